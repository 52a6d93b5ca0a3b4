"""Calls on groups, and how a consumer that reads for a group keeps its place.

Rules that keep it honest:

* A record counts as read when the next one is asked for, or when the loop over them ends normally:
  what a consumer was working on when it broke off is read again (at least once).
* Commits are made between fetches, at most every `COMMIT_INTERVAL_S`, and once at the end.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Final, NamedTuple
from urllib.parse import quote

import msgspec

from record_format.errors import InvalidRequest
from tierlog.client import answers
from tierlog.client.answers import nothing, reader
from tierlog.client.calls import Start
from tierlog.client.cursor import PartitionCursor
from tierlog.client.exchange import Call, Repeat
from tierlog.client.records import ConsumedRecord
from tierlog.client.times import Time
from tierlog.client.wire import JSON, Place, Reply, Request

log = logging.getLogger(__name__)

COMMIT_INTERVAL_S: Final = 5.0  # Kafka's auto.commit.interval.ms


class OffsetCommit(NamedTuple):
    """The next offset that a group reads of a partition. With `topic_id` the commit is refused
    (UnknownTopic) if the name is another topic's by then.
    """

    topic: str
    partition: int
    offset: int
    metadata: str | None = None
    topic_id: str | None = None


def commit_offsets(group: str, offsets: Iterable[OffsetCommit]) -> Call[None]:
    """Where a group reads on; durable when this returns. Other partitions keep theirs.

    Saying it twice is saying it once. Raises TypeError.
    """
    rows = [offset._asdict() for offset in _each(offsets)]
    body = msgspec.json.encode({"offsets": rows})
    place = Place(rows[0]["topic"], rows[0]["partition"]) if len(rows) == 1 else Place()
    path = f"{_path(group)}/offsets"
    fields = {"content-type": JSON}
    return Call(Request("PUT", path, headers=fields, body=body, place=place), nothing)


def _each(offsets: Iterable[OffsetCommit]) -> list[OffsetCommit]:
    """One commit alone would be taken apart, by its fields."""
    if isinstance(offsets, (OffsetCommit, str, bytes, Mapping)):
        raise TypeError(
            "offsets: expected a list of OffsetCommit, "
            f"not one {type(offsets).__name__}; put it in a list"
        )
    commits: list[OffsetCommit] = []
    given: Iterable[object] = offsets
    for index, offset in enumerate(given):
        if not isinstance(offset, OffsetCommit):
            kind = type(offset).__name__
            raise TypeError(f"offsets[{index}]: expected an OffsetCommit, not {kind}")
        commits.append(offset)
    return commits


def group(name: str) -> Call[answers.Group]:
    """A group's offsets and lag. Raises UnknownGroup."""
    return Call(Request("GET", _path(name)), reader(answers.Group))


def groups() -> Call[tuple[answers.GroupSummary, ...]]:
    """All groups, by name."""
    read = reader(_Groups)
    return Call(Request("GET", "/v1/groups"), lambda reply: read(reply).groups)


def delete_group(name: str) -> Call[None]:
    """A group's offsets are gone when this returns. Raises UnknownGroup.

    Not retried once it was sent: a repeat after the deletion would answer `unknown-group`.
    """
    return Call(Request("DELETE", _path(name)), nothing, Repeat.DUPLICATES)


class _Groups(msgspec.Struct):
    groups: tuple[answers.GroupSummary, ...]


def _path(name: str) -> str:
    """Dots alone are encoded as well: a path would swallow them. Raises InvalidRequest."""
    if not name:
        raise InvalidRequest("a group's name may not be empty")
    encoded = quote(name, safe="")
    return "/v1/groups/" + (encoded.replace(".", "%2E") if name in {".", ".."} else encoded)


class GroupPlace:
    """How far one consumer has read for its group, and what of it is committed."""

    def __init__(self, name: str, topic: str, *, timestamp: Time | None, now_s: float) -> None:
        if timestamp is not None:
            raise InvalidRequest("a group continues from its commits: give group or timestamp")
        self.name, self._topic = name, topic
        self._topic_id: str | None = None
        self._committed_s = now_s
        self._read: dict[int, int] = {}
        self._committed: dict[int, int] = {}

    def starts(
        self,
        known: Iterable[answers.GroupOffset],
        topic: answers.TopicDescription,
        otherwise: Start | Mapping[int, Start],
    ) -> Mapping[int, Start]:
        """Where each partition's reading begins: at its commit, or at the log start above it, which
        is told.
        """
        self._topic_id = topic.topic_id
        committed = {one.partition: one.offset for one in known if one.topic == self._topic}
        self._committed = dict(committed)
        begins: dict[int, Start] = {}
        log_starts = {one.partition: one.log_start_offset for one in topic.partitions}
        for number in topic.numbers:
            if number in committed:
                begins[number] = self._reached(number, committed[number], log_starts.get(number, 0))
            elif not isinstance(otherwise, Mapping):
                begins[number] = otherwise
            elif number in otherwise:
                begins[number] = otherwise[number]
        return begins

    def _reached(self, partition: int, committed: int, log_start: int) -> int:
        if committed >= log_start:
            return committed
        unread = f"offsets {committed} to {log_start - 1} of {self._topic}-{partition}"
        log.warning("group %s never read %s: they are deleted", self.name, unread)
        return log_start

    def hand_out(self, record: ConsumedRecord) -> None:
        """All before `record` are read."""
        self._read[record.partition] = record.offset

    def finish(self, cursor: PartitionCursor) -> None:
        """Everything that the cursor has taken is read."""
        if isinstance(cursor.start, int):
            self._read[cursor.partition] = cursor.start

    def due_commit(self, now_s: float) -> Call[None] | None:
        if now_s - self._committed_s < COMMIT_INTERVAL_S:
            return None
        self._committed_s = now_s
        return self.commit()

    def commit(self) -> Call[None] | None:
        """The commit of everything new; None if nothing is. It counts as new until the commit is
        answered.
        """
        news = {p: o for p, o in sorted(self._read.items()) if self._committed.get(p) != o}
        if not news:
            return None
        offsets = [OffsetCommit(self._topic, p, o, None, self._topic_id) for p, o in news.items()]
        call = commit_offsets(self.name, offsets)

        def read(reply: Reply) -> None:
            call.read(reply)
            self._committed.update(news)

        return replace(call, read=read)
