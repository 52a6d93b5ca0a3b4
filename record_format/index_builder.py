"""Which batches get entries in the indexes of a segment: Kafka's rule, in one place, so that an
index that is made anew equals the original. It writes nothing.
"""

from __future__ import annotations

from typing import NamedTuple

from tierlog.record_format.batch import NO_TIMESTAMP, BatchHeader
from tierlog.record_format.batch_runs import HeaderRun
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY, pack_entries


class LargestTimestamp(NamedTuple):
    """The largest timestamp of a segment and the last offset of the batch that has it."""

    timestamp: int
    offset: int


class IndexBuilder:
    """Not thread-safe."""

    __slots__ = (
        "base_offset",
        "bytes_since_entry",
        "interval_bytes",
        "largest",
        "last_indexed_timestamp",
        "offset_entries",
        "time_entries",
    )

    def __init__(
        self,
        base_offset: int,
        *,
        interval_bytes: int,
        bytes_since_entry: int = 0,
        largest: LargestTimestamp | None = None,
        last_indexed_timestamp: int = NO_TIMESTAMP,
    ) -> None:
        self.base_offset, self.interval_bytes = base_offset, interval_bytes
        self.bytes_since_entry = bytes_since_entry
        self.largest = largest or LargestTimestamp(NO_TIMESTAMP, base_offset)
        self.last_indexed_timestamp = last_indexed_timestamp
        self.offset_entries: list[tuple[int, int]] = []
        self.time_entries: list[tuple[int, int]] = []

    def index_batch(self, header: BatchHeader, *, position: int) -> None:
        """The next batch, which begins at `position` in the file."""
        last_offset = header.last_offset
        if header.max_timestamp > self.largest.timestamp:
            self.largest = LargestTimestamp(header.max_timestamp, last_offset)
        if self.bytes_since_entry > self.interval_bytes:
            self.offset_entries.append((last_offset - self.base_offset, position))
            self.add_time_entry()
            self.bytes_since_entry = 0
        self.bytes_since_entry += header.size_bytes

    def index_run(self, run: HeaderRun, *, position: int) -> None:
        """As `index_batch` for each of a run whose buffer begins at `position` in the file."""
        largest, at = self.largest
        since, interval, base_offset = self.bytes_since_entry, self.interval_bytes, self.base_offset
        columns = zip(run.starts, run.ends, run.last_offsets, run.max_timestamps, strict=True)
        for start, end, last_offset, max_timestamp in columns:
            if max_timestamp > largest:
                largest, at = max_timestamp, last_offset
            if since > interval:
                self.offset_entries.append((last_offset - base_offset, position + start))
                if largest > self.last_indexed_timestamp:
                    self.time_entries.append((largest, at - base_offset))
                    self.last_indexed_timestamp = largest
                since = 0
            since += end - start
        self.largest, self.bytes_since_entry = LargestTimestamp(largest, at), since

    def add_time_entry(self) -> None:
        """Index the largest timestamp so far, if it has grown since the last entry."""
        timestamp, offset = self.largest
        if timestamp > self.last_indexed_timestamp:
            self.time_entries.append((timestamp, offset - self.base_offset))
            self.last_indexed_timestamp = timestamp

    def images(self) -> tuple[bytes, bytes]:
        """The contents of `.index` and `.timeindex`."""
        return (
            pack_entries(OFFSET_ENTRY, self.offset_entries),
            pack_entries(TIME_ENTRY, self.time_entries),
        )
