"""A stream's offsets, and the size of its next micro-batch. Pure.

The offsets as Spark keeps them in its checkpoint (JSON):

    {"flights": {"id": "<topic id>", "offsets": {"0": 1234, "1": 99}}}

* Each partition has the next offset to read. The topic id distinguishes a topic from a later one of
  the same name. A topic that is gone is kept, without offsets, if options name it.
* The end of a stream's first batch also has the offsets where that batch began (`from`). Spark
  keeps only the ends of batches: it asks for the start of the first one again, when it is read and
  after every restart, and by then `earliest`, `latest` or a time may be another offset.
* A limit is shared among partitions in proportion to their backlog, as in Spark's Kafka source; a
  partition with a backlog advances by at least one offset, so that none starves.
* Offsets that a restore skipped are not backlog: limits do not count them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from tierlog.record_format.errors import CorruptDataError
from tierlog.spark_reader.splits import Gaps, count_offsets, ranges_outside

PartitionName = tuple[str, int]


class CorruptCheckpoint(CorruptDataError):
    """A stream's checkpoint has offsets that this source did not write."""


class StreamOffsets(NamedTuple):
    """Next offsets by topic and partition, and the ids of the topics.

    `first_start`: where the batch that ends here began, if it is a stream's first; else None.
    """

    topic_ids: Mapping[str, str]
    offsets: Mapping[PartitionName, int]
    first_start: Mapping[PartitionName, int] | None = None

    def next_offset(self, topic_id: str, name: PartitionName) -> int | None:
        """None if the stream has read nothing of it, or only of another topic of that name."""
        return self.offsets.get(name) if self.topic_ids.get(name[0]) == topic_id else None

    def ending_the_first_batch(self, begun: StreamOffsets) -> StreamOffsets:
        """The same offsets as the end of a stream's first batch, which began at `begun`."""
        kept = {
            name: offset
            for name, offset in begun.offsets.items()
            if self.topic_ids.get(name[0]) == begun.topic_ids[name[0]]
        }
        return self._replace(first_start=kept)

    def start_of_batch(self, given: StreamOffsets) -> StreamOffsets:
        """Where the batch that ends here began, if Spark says `given`."""
        if self.first_start is None or given == self:
            return given
        return StreamOffsets(self.topic_ids, self.first_start)

    def is_at(self, other: StreamOffsets) -> bool:
        return (self.topic_ids, self.offsets) == (other.topic_ids, other.offsets)

    def to_document(self) -> dict[str, Any]:
        document: dict[str, Any] = {topic: {"id": one} for topic, one in self.topic_ids.items()}
        _add(document, "offsets", self.offsets)
        if self.first_start is not None:
            _add(document, "from", self.first_start)
        return document


def _add(document: dict[str, Any], member: str, offsets: Mapping[PartitionName, int]) -> None:
    for of_topic in document.values():
        of_topic[member] = {}
    for (topic, partition), offset in sorted(offsets.items()):
        document[topic][member][str(partition)] = offset


def from_document(document: Mapping[str, Any]) -> StreamOffsets:
    """Raises CorruptCheckpoint."""
    try:
        ids = {str(topic): str(one["id"]) for topic, one in document.items()}
        offsets = _by_partition({topic: one["offsets"] for topic, one in document.items()})
        starts = {topic: one["from"] for topic, one in document.items() if "from" in one}
        first_start = _by_partition(starts) if starts else None
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise CorruptCheckpoint(f"not offsets of a tierlog stream: {document!r}"[:300]) from error
    return StreamOffsets(ids, offsets, first_start)


def _by_partition(document: Mapping[str, Any]) -> dict[PartitionName, int]:
    return {
        (topic, int(partition)): int(offset)
        for topic, partitions in document.items()
        for partition, offset in partitions.items()
    }


class Backlog(NamedTuple):
    """The unread offsets of one partition: [start_offset, end_offset) except for the gaps."""

    name: PartitionName
    start_offset: int
    end_offset: int
    gaps: Gaps = ()

    @property
    def offsets(self) -> int:
        return count_offsets(self.start_offset, self.end_offset, self.gaps)

    def end_of_first(self, count: int) -> int:
        """The end of its first `count` offsets."""
        reached = self.start_offset
        for start, end in ranges_outside(self.start_offset, self.end_offset, self.gaps):
            if count <= 0:
                break
            reached = min(end, start + count)
            count -= reached - start
        return reached


def limit_offsets(backlogs: Sequence[Backlog], limit: int) -> dict[PartitionName, int]:
    """The end of each partition's share of about `limit` offsets in total."""
    total = sum(one.offsets for one in backlogs)
    if total <= limit:
        return {one.name: max(one.start_offset, one.end_offset) for one in backlogs}
    return {one.name: one.end_of_first(max(1, one.offsets * limit // total)) for one in backlogs}


def end_within_bytes(backlog: Backlog, sizes: Iterable[tuple[int, int, int]], limit: int) -> int:
    """The end of the first `limit` bytes, at least one offset.

    `sizes` are (start offset, end offset, bytes) in offset order; the bytes of each are assumed to
    be spread evenly.
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
