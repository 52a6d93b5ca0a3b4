"""The write side of one segment: the only code that makes a `.log` longer.

* A write is planned first (`PendingWrite`: bytes, index entries, facts), then done with one call,
  then taken over whole. A write that fails leaves no trace in memory, and none in the file below
  its end.
* Index entries go out after the bytes that they point to. Where the disk has no room for them they
  wait in memory; an index is never a reason to refuse a record.
* All under the log's lock but `sync`, which only touches descriptors that stay open until it is
  done.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from hot_tier.disk import Buffer, Disk, is_refusal, write_all
from hot_tier.file_names import LOG, OFFSET_INDEX, SNAPSHOT, TIME_INDEX, TRANSACTION_INDEX, path_of
from hot_tier.index_file import IndexImage
from hot_tier.log_config import LogConfig
from hot_tier.segment import (
    MAX_RELATIVE_OFFSET,
    MAX_SEGMENT_BYTES,
    OFFSET_ENTRY,
    TIME_ENTRY,
    LargestTimestamp,
    Segment,
    SegmentEnd,
)
from record_format.batch import NO_TIMESTAMP, BatchHeader
from record_format.header_run import HeaderRun


class IndexPlan:
    """Which batches of a segment get index entries, batch by batch: Kafka's rule, in one place.

    Appending and rebuilding both go through here, so a rebuilt index is the one that was written.
    """

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

    def take(self, *, position: int, size_bytes: int, last_offset: int, max_timestamp: int) -> None:
        if max_timestamp > self.largest.timestamp:
            self.largest = LargestTimestamp(max_timestamp, last_offset)
        if self.bytes_since_entry > self.interval_bytes:
            self.offset_entries.append((last_offset - self.base_offset, position))
            self.add_time_entry()
            self.bytes_since_entry = 0
        self.bytes_since_entry += size_bytes

    def take_run(self, run: HeaderRun, *, position: int) -> None:
        """As `take` for each batch of a run whose buffer begins at `position` of the file."""
        largest, at = self.largest
        since, interval, base_offset = self.bytes_since_entry, self.interval_bytes, self.base_offset
        for start, end, last_offset, max_timestamp in zip(*run[2:], strict=True):
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
        """Index the largest timestamp so far, where it grew since the last entry."""
        timestamp, offset = self.largest
        if timestamp > self.last_indexed_timestamp:
            self.time_entries.append((timestamp, offset - self.base_offset))
            self.last_indexed_timestamp = timestamp


class PendingWrite:
    """What one call will add to the segment."""

    __slots__ = (
        "buffers",
        "end",
        "first_timestamp",
        "min_timestamp",
        "plan",
        "record_count",
        "start",
    )

    def __init__(self, active: ActiveSegment) -> None:
        self.start = self.end = active.segment.end
        self.buffers: list[Buffer] = []
        self.plan = active.plan_from_here()
        self.first_timestamp = active.first_timestamp
        self.min_timestamp = active.segment.min_timestamp
        self.record_count = active.segment.record_count

    @property
    def size_bytes(self) -> int:
        return self.end.size_bytes - self.start.size_bytes

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
            self.first_timestamp = headers[0].max_timestamp
        for header, min_timestamp in zip(headers, min_timestamps, strict=True):
            last_offset = header.last_offset
            self.plan.take(
                position=start + header.position,
                size_bytes=header.size_bytes,
                last_offset=last_offset,
                max_timestamp=header.max_timestamp,
            )
            self._count(header.record_count, min_timestamp, first=start + header.position == 0)
        self.buffers.append(body)
        self.end = SegmentEnd(start + len(body), headers[-1].next_offset)

    def _count(self, records: int, min_timestamp: int | None, *, first: bool) -> None:
        """Add up facts; one that is not known of a part is not known of the whole."""
        if first:
            self.record_count, self.min_timestamp = records, min_timestamp
            return
        if self.record_count is not None:
            self.record_count += records
        if min_timestamp is None or self.min_timestamp is None:
            self.min_timestamp = None
        elif min_timestamp < self.min_timestamp:
            self.min_timestamp = min_timestamp


class ActiveSegment:
    """The segment that takes appends."""

    def __init__(
        self,
        segment: Segment,
        *,
        config: LogConfig,
        jitter_ms: int,
        now_ms: int,
        disk: Disk,
        offset_image: bytes = b"",
        time_image: bytes = b"",
        bytes_since_entry: int = 0,
    ) -> None:
        """Open the files (created where they are not there) and preallocate the indexes."""
        self.segment, self.config, self.disk = segment, config, disk
        self.jitter_ms, self.created_ms = jitter_ms, now_ms
        self.first_append_ms: int | None = now_ms if segment.end.size_bytes else None
        self.first_timestamp: int | None = None
        self._bytes_since_entry = bytes_since_entry
        self._fd = disk.open(segment.path(LOG), os.O_RDWR | os.O_CREAT)
        offsets = IndexImage(
            segment.path(OFFSET_INDEX), OFFSET_ENTRY, image=offset_image, disk=disk
        )
        times = IndexImage(segment.path(TIME_INDEX), TIME_ENTRY, image=time_image, disk=disk)
        segment.offsets, segment.times = offsets, times
        self.offsets, self.times = offsets, times
        offsets.preallocate(config.segment_index_bytes)
        times.preallocate(config.segment_index_bytes)
        if config.preallocate and segment.end.size_bytes < config.segment_bytes:
            disk.reserve(self._fd, config.segment_bytes)

    def restore_indexes(self, offset_image: bytes, time_image: bytes) -> None:
        """Put back the entries that recovery found by walking; they are written as appends
        write.
        """
        self.offsets.image += offset_image
        self.times.image += time_image
        self._write_indexes()

    # --- planning ---------------------------------------------------------------------------------

    def plan_from_here(self) -> IndexPlan:
        return IndexPlan(
            self.segment.base_offset,
            interval_bytes=self.config.index_interval_bytes,
            bytes_since_entry=self._bytes_since_entry,
            largest=self.segment.largest,
            last_indexed_timestamp=self._last_indexed_timestamp(),
        )

    def _last_indexed_timestamp(self) -> int:
        return self.times.entry(-1)[0] if len(self.times) else NO_TIMESTAMP

    def reason_to_roll(
        self,
        pending: PendingWrite,
        *,
        size_bytes: int,
        max_timestamp: int,
        last_offset: int,
        now_ms: int,
    ) -> str | None:
        """Why these bytes belong into another segment (Kafka's LogSegment.shouldRoll), or None.

        An empty segment takes whatever comes.
        """
        end = pending.end
        if end.size_bytes == 0:
            return None
        config = self.config
        limit = min(config.segment_bytes, MAX_SEGMENT_BYTES)
        if end.size_bytes > limit - size_bytes:
            return "segment.bytes"
        waited_ms = self._waited_ms(pending, max_timestamp, now_ms)
        if waited_ms > config.effective_segment_ms - self.jitter_ms:
            return "segment.ms"
        if self.index_is_full(pending):
            return "segment.index.bytes"
        if last_offset - self.segment.base_offset > MAX_RELATIVE_OFFSET:
            return "relative offset overflow"
        return None

    def _waited_ms(self, pending: PendingWrite, max_timestamp: int, now_ms: int) -> int:
        first = pending.first_timestamp
        if first is not None and first >= 0:
            return max_timestamp - first
        return now_ms - self.created_ms

    def index_is_full(self, pending: PendingWrite) -> bool:
        room = self.config.segment_index_bytes
        offsets = len(self.offsets) + len(pending.plan.offset_entries)
        times = len(self.times) + len(pending.plan.time_entries)
        # The time index keeps one place free for the entry that sealing adds.
        return offsets >= room // OFFSET_ENTRY.size or times >= room // TIME_ENTRY.size - 1

    # --- writing ----------------------------------------------------------------------------------

    def write(self, pending: PendingWrite, *, now_ms: int) -> None:
        """Do what was planned. Raises OSError; the segment is then as it was, but for the file's
        tail.
        """
        write_all(self.disk, self._fd, pending.buffers, pending.start.size_bytes)
        self._take_over(pending)
        if self.first_append_ms is None:
            self.first_append_ms = now_ms

    def _take_over(self, pending: PendingWrite) -> None:
        plan, segment = pending.plan, self.segment
        self.first_timestamp = pending.first_timestamp
        self._bytes_since_entry = plan.bytes_since_entry
        segment.largest = plan.largest
        segment.min_timestamp, segment.record_count = pending.min_timestamp, pending.record_count
        room = self.config.segment_index_bytes
        for entry in plan.offset_entries[: room // OFFSET_ENTRY.size - len(self.offsets)]:
            self.offsets.add(*entry)
        for entry in plan.time_entries[: room // TIME_ENTRY.size - 1 - len(self.times)]:
            self.times.add(*entry)
        segment.end = pending.end
        if plan.offset_entries:
            self._write_indexes()

    def _write_indexes(self) -> None:
        try:
            self.offsets.write()
            self.times.write()
        except OSError as error:
            if not is_refusal(error):
                raise

    def drop_tail(self) -> None:
        """Cut what a failed write left behind. Raises OSError."""
        if not self.config.preallocate:
            self.disk.truncate(self._fd, self.segment.end.size_bytes)

    # --- sealing ----------------------------------------------------------------------------------

    def seal(self) -> None:
        """Finish both indexes and cut all files to their length. Raises OSError; may be
        repeated.
        """
        largest = self.segment.largest
        if largest is not None and largest.timestamp > self._last_indexed_timestamp():
            self.times.add(largest.timestamp, largest.offset - self.segment.base_offset)
        self.offsets.trim()
        self.times.trim()
        self.disk.truncate(self._fd, self.segment.end.size_bytes)

    def release_indexes(self) -> None:
        """Lookups go to the files from now on; their descriptors are not needed any more."""
        self.offsets.close()
        self.times.close()
        self.segment.offsets = self.segment.times = None

    def sync_log(self) -> None:
        self.disk.sync_bytes(self._fd)

    def sync_all(self) -> None:
        """Bytes, indexes and, where there are some, the aborted transactions and the snapshot."""
        self.sync_log()
        base = self.segment.base_offset
        for path in (
            self.segment.path(OFFSET_INDEX),
            self.segment.path(TIME_INDEX),
            self.segment.path(TRANSACTION_INDEX),
            path_of(self.segment.folder, base, SNAPSHOT),
        ):
            self.sync_if_there(path)

    def sync_if_there(self, path: Path) -> None:
        with suppress(FileNotFoundError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            try:
                self.disk.sync_bytes(fd)
            finally:
                os.close(fd)

    def close(self) -> None:
        self.offsets.close()
        self.times.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
