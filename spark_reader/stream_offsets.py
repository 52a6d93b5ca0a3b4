"""Where a stream stands, and how far the next micro-batch goes: pure.

A stream's offsets, as Spark keeps them in its checkpoint (JSON):

    {"flights": {"id": "<topic id>", "offsets": {"0": 1234, "1": 99}}}

Rules that keep it honest:

* The number of a partition is the next offset to read. The topic id distinguishes a topic from a
  later one of the same name. One that is gone is kept without offsets if options name it.
* A limit is shared among partitions by what each has to give, as Spark's Kafka source does; a
  partition that has something moves by at least one offset, so that none starves.
* Offsets that a restore left out are not backlog: limits do not count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from record_format.errors import CorruptDataError
from spark_reader.gaps import count_offsets, stretches

PartitionName = tuple[str, int]


class CorruptCheckpoint(CorruptDataError):
    """A stream's checkpoint holds offsets that this source did not write."""


class StreamOffsets(NamedTuple):
    """Next offsets by topic and partition, and the ids of the topics."""

    topic_ids: Mapping[str, str]
    offsets: Mapping[PartitionName, int]

    def place(self, topic_id: str, name: PartitionName) -> int | None:
        """None if the stream has read nothing of it: another topic's place is none of this."""
        return self.offsets.get(name) if self.topic_ids.get(name[0]) == topic_id else None

    def to_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {
            topic: {"id": topic_id, "offsets": {}} for topic, topic_id in self.topic_ids.items()
        }
        for (topic, partition), offset in sorted(self.offsets.items()):
            document[topic]["offsets"][str(partition)] = offset
        return document


def from_document(document: Mapping[str, Any]) -> StreamOffsets:
    """Raises CorruptCheckpoint."""
    try:
        ids = {str(topic): str(one["id"]) for topic, one in document.items()}
        offsets = {
            (topic, int(partition)): int(offset)
            for topic, one in document.items()
            for partition, offset in one["offsets"].items()
        }
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint(f"no offsets of a tierlog stream: {document!r}"[:300]) from error
    return StreamOffsets(ids, offsets)


class Backlog(NamedTuple):
    """What one partition has to give: [start_offset, end_offset) except for the gaps."""

    name: PartitionName
    start_offset: int
    end_offset: int
    gaps: tuple[tuple[int, int], ...] = ()

    @property
    def offsets(self) -> int:
        return count_offsets(self.start_offset, self.end_offset, self.gaps)

    def end_of_first(self, count: int) -> int:
        """Where its first `count` offsets end."""
        reached = self.start_offset
        for start, end in stretches(self.start_offset, self.end_offset, self.gaps):
            if count <= 0:
                break
            reached = min(end, start + count)
            count -= reached - start
        return reached


def limit_offsets(backlogs: Sequence[Backlog], limit: int) -> dict[PartitionName, int]:
    """The end of each partition's part of about `limit` offsets in all."""
    total = sum(one.offsets for one in backlogs)
    if total <= limit:
        return {one.name: max(one.start_offset, one.end_offset) for one in backlogs}
    return {one.name: one.end_of_first(max(1, one.offsets * limit // total)) for one in backlogs}


def end_within_bytes(backlog: Backlog, sizes: Iterable[tuple[int, int, int]], limit: int) -> int:
    """How far `limit` bytes go, at least one offset.

    `sizes` says (start offset, end offset, bytes) in offset order; inside one the bytes are taken
    to lie evenly.
    """
    left = limit
    for start, end, size in sizes:
        first, last = max(start, backlog.start_offset), min(end, backlog.end_offset)
        if first >= last:
            continue
        share = size * (last - first) // (end - start)
        if share > left:
            reached = first + (last - first) * left // share
            return max(reached, backlog.start_offset + 1)
        left -= share
    return backlog.end_offset
