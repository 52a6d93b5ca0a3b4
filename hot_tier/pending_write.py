"""What one call will add to the active segment, before any of it is written.

* Batches are planned one after another: each is checked against the segment as it will be after
  those before it, so one write may hold many appends and still end where it must.
* Nothing here touches the disk or the segment: `ActiveSegment` takes it over whole once it is
  written, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from hot_tier.index_builder import IndexBuilder
from hot_tier.segment import SegmentEnd
from record_format.batch import BatchHeader, Buffer
from record_format.index_layouts import MAX_RELATIVE_OFFSET


class Facts(NamedTuple):
    """What is counted about a segment's records; None if a part of it was never read."""

    first_timestamp: int | None
    min_timestamp: int | None
    record_count: int | None


class Room(NamedTuple):
    """How much a segment may take before it must be rolled."""

    size_bytes: int
    age_ms: int  # of `segment.ms`, less this segment's jitter
    created_ms: int
    offset_entries: int
    time_entries: int


class PendingWrite:
    """See the module. Made by `ActiveSegment.begin_write`, under the log's lock."""

    __slots__ = (
        "_room",
        "buffers",
        "end",
        "first_timestamp",
        "min_timestamp",
        "plan",
        "record_count",
        "start",
    )

    def __init__(self, start: SegmentEnd, *, plan: IndexBuilder, facts: Facts, room: Room) -> None:
        self.start = self.end = start
        self.plan, self._room = plan, room
        self.first_timestamp, self.min_timestamp, self.record_count = facts
        self.buffers: list[Buffer] = []

    def must_roll(
        self, *, size_bytes: int, max_timestamp: int, last_offset: int, now_ms: int
    ) -> bool:
        """Whether these bytes belong in another segment (Kafka's LogSegment.shouldRoll).

        An empty segment takes whatever comes.
        """
        room, plan, end_bytes = self._room, self.plan, self.end.size_bytes
        return end_bytes > 0 and (
            end_bytes + size_bytes > room.size_bytes
            or self._waited_ms(max_timestamp, now_ms) > room.age_ms
            or len(plan.offset_entries) >= room.offset_entries
            or len(plan.time_entries) >= room.time_entries
            or last_offset - plan.base_offset > MAX_RELATIVE_OFFSET
        )

    def _waited_ms(self, max_timestamp: int, now_ms: int) -> int:
        """By the records' own time, if they have one."""
        first = self.first_timestamp
        if first is not None and first >= 0:
            return max_timestamp - first
        return now_ms - self._room.created_ms

    def add(
        self,
        body: Buffer,
        headers: Sequence[BatchHeader],
        *,
        min_timestamps: Sequence[int | None],
    ) -> None:
        """Plan the batches of `body`, whose headers hold their positions in it and final
        offsets.
        """
        start = self.end.size_bytes
        if start == 0:
            self.first_timestamp, self.min_timestamp = headers[0].max_timestamp, min_timestamps[0]
            self.record_count = 0
        for header, min_timestamp in zip(headers, min_timestamps, strict=True):
            self.plan.take(header, position=start + header.position)
            self._count(header.record_count, min_timestamp)
        self.buffers.append(body)
        self.end = SegmentEnd(start + len(body), headers[-1].next_offset)

    def _count(self, records: int, min_timestamp: int | None) -> None:
        """Add up facts; one that is not known for a part is not known for the whole."""
        if self.record_count is not None:
            self.record_count += records
        if min_timestamp is None or self.min_timestamp is None:
            self.min_timestamp = None
        elif min_timestamp < self.min_timestamp:
            self.min_timestamp = min_timestamp
