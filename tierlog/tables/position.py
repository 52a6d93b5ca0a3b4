"""How far a table is with its topic: JSON in the table's property `tierlog.position`. Pure.

    {"format_version": 1, "topic": "flights", "topic_id": "<topic id>", "offsets": {"0": 5000},
     "snapshot_id": 7302, "sequence_number": 4}

* `offsets` are the next to read, by partition. Partitions that are not there yet begin where the
  command says. The topic's id distinguishes it from a later one of its name.
* One commit has the files, and the position after them, which names its own snapshot (none before
  the first). Properties outlive a rollback of the table, and compaction and expiry of snapshots: so
  a position holds while its snapshot is the table's, or an ancestor of it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Final, NamedTuple

from tierlog.record_format.errors import CorruptDataError, RequestError

PROPERTY: Final = "tierlog.position"
FORMAT_VERSION: Final = 1


class TableRolledBack(RequestError):
    """The table lacks what was committed with its position: rows would be left out."""


class OtherTopic(RequestError):
    """The table's rows are of another topic, or of one that was deleted since."""


class Ancestor(NamedTuple):
    """A snapshot that the table's state goes back to, or that state itself."""

    snapshot_id: int
    sequence_number: int


@dataclass(frozen=True, kw_only=True)
class Position:
    topic: str
    topic_id: str
    offsets: Mapping[int, int] = field(default_factory=dict)
    snapshot_id: int | None = None
    sequence_number: int = 0

    def after(self, ends: Mapping[int, int]) -> Position:
        """With what was read of these partitions: a log that ends earlier now sets nothing back."""
        reached = {one: max(end, self.offsets.get(one, 0)) for one, end in ends.items()}
        return replace(self, offsets={**self.offsets, **reached})

    def is_past(self, other: Position) -> bool:
        """In any partition."""
        return any(end > other.offsets.get(one, 0) for one, end in self.offsets.items())

    def committed_by(self, snapshot: Ancestor) -> Position:
        return replace(self, **snapshot._asdict())

    def check_topic(self, topic: str, topic_id: str) -> None:
        """Raises OtherTopic."""
        if topic != self.topic:
            raise OtherTopic(f"the table is of topic {self.topic!r}, not of {topic!r}")
        if topic_id != self.topic_id:
            raise OtherTopic(
                f"topic {topic!r} was deleted and re-created (its id is {topic_id}, the table's "
                f"rows are of {self.topic_id}); make another table of it"
            )

    def check_not_rolled_back(self, history: Iterable[Ancestor]) -> None:
        """`history`: the table's state, and what it goes back to, newest first; older ones may be
        expired. Raises TableRolledBack.
        """
        if self.snapshot_id is None:
            return
        newest = 0
        for one in history:
            if one.snapshot_id == self.snapshot_id:
                return
            newest = max(newest, one.sequence_number)
            if one.sequence_number <= self.sequence_number:
                break
        else:
            if newest:  # all of them are newer: what is missing of the chain has expired
                return
        raise TableRolledBack(
            f"the table was rolled back: its position is of snapshot {self.snapshot_id} (sequence "
            f"number {self.sequence_number}), which its current state does not go back to; set the "
            "branch main to that snapshot again, or make another table of the topic"
        )

    def to_json(self) -> str:
        return json.dumps({"format_version": FORMAT_VERSION, **asdict(self)})


def from_json(text: str, *, table: str) -> Position:
    """Raises CorruptDataError."""
    try:
        document = json.loads(text)
        version = document.pop("format_version")
        if version != FORMAT_VERSION:
            detail = f"{PROPERTY} has format version {version!r}"
            raise CorruptDataError(f"{detail}; this tierlog supports {FORMAT_VERSION}", file=table)
        document["offsets"] = {int(one): int(of) for one, of in document["offsets"].items()}
        return Position(**document)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptDataError(f"{PROPERTY} is not a position: {text[:100]}", file=table) from error
