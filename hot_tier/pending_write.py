"""What one call will add to the active segment, before any of it is written.

* Each batch is checked against the segment as it will be after the batches before it, so one write
  can hold many appends and still respect the segment's limits.
* Nothing here touches the disk or the segment. `ActiveSegment` applies it as a whole after the
  write, or not at all.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from tierlog.hot_tier.index_builder import IndexBuilder
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET


class RollLimits(NamedTuple):
    """How much a segment may hold before it must be rolled."""

    size_bytes: int
    age_ms: int  # `segment.ms` less this segment's jitter
    created_ms: int
    offset_entries: int
    time_entries: int


class PendingWrite:
    """See the module. Created by `ActiveSegment.begin_write`, under the log's lock."""

    __slots__ = (
        "_limits",
        "buffers",
        "builder",
        "end",
        "first_timestamp",
        "min_timestamp",
        "record_count",
        "start",
    )

    def __init__(
        self,
        segment: Segment,
        *,
        builder: IndexBuilder,
        first_timestamp: int | None,
        limits: RollLimits,
    ) -> None:
        """`first_timestamp`: of the segment's first batch; None if that was never read."""
        self.start = self.end = segment.end
        self.builder, self._limits, self.first_timestamp = builder, limits, first_timestamp
        self.min_timestamp, self.record_count = segment.min_timestamp, segment.record_count
        self.buffers: list[Buffer] = []

    def must_roll(
        self, *, size_bytes: int, max_timestamp: int, last_offset: int, now_ms: int
    ) -> bool:
        """Whether these bytes belong in a new segment (Kafka's LogSegment.shouldRoll).

        An empty segment accepts any batch.
        """
        limits, builder, end_bytes = self._limits, self.builder, self.end.size_bytes
        return end_bytes > 0 and (
            end_bytes + size_bytes > limits.size_bytes
            or self._age_ms(max_timestamp, now_ms) > limits.age_ms
            or len(builder.offset_entries) >= limits.offset_entries
            or len(builder.time_entries) >= limits.time_entries
            or last_offset - builder.base_offset > MAX_RELATIVE_OFFSET
        )

    def _age_ms(self, max_timestamp: int, now_ms: int) -> int:
        """By the records' own timestamps, if they have them."""
        first = self.first_timestamp
        if first is not None and first >= 0:
            return max_timestamp - first
        return now_ms - self._limits.created_ms

    def add(
        self,
        body: Buffer,
        headers: Sequence[BatchHeader],
        *,
        min_timestamps: Sequence[int | None],
    ) -> None:
        """Add the batches of `body`; `headers` hold their positions in it and their final
        offsets.
        """
        start = self.end.size_bytes
        if start == 0:
            self.first_timestamp, self.min_timestamp = headers[0].max_timestamp, min_timestamps[0]
            self.record_count = 0
        for header, min_timestamp in zip(headers, min_timestamps, strict=True):
            self.builder.add(header, position=start + header.position)
            self._count(header.record_count, min_timestamp)
        self.buffers.append(body)
        self.end = SegmentEnd(start + len(body), headers[-1].next_offset)

    def _count(self, records: int, min_timestamp: int | None) -> None:
        """A statistic that is unknown for a part is unknown for the whole."""
        if self.record_count is not None:
            self.record_count += records
        if min_timestamp is None or self.min_timestamp is None:
            self.min_timestamp = None
        elif min_timestamp < self.min_timestamp:
            self.min_timestamp = min_timestamp
