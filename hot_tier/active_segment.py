"""The write side of one segment: the only code that extends a `.log`.

* A write is first planned (`PendingWrite`: bytes, index entries, statistics), then done with one
  call, then applied in memory as a whole. A failed write leaves no trace in memory, and none in the
  file below its end.
* Each batch is checked against the segment as it will be after the batches before it, so one write
  can hold many appends and still respect the segment's limits.
* Index entries are written after the bytes that they point to, a block of them at a time: after a
  crash the indexes of this segment are rebuilt. If the disk has no room for them they stay in
  memory; a full disk never refuses a record because of an index.
* Everything runs under the log's lock except the syncs, which only touch descriptors that stay open
  until they are done.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.host.disk import Disk, is_disk_full, write_all
from tierlog.host.durable_file import write_atomically
from tierlog.hot_tier.indexes import Entry, IndexColumns
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_folder import (
    LOG,
    OFFSET_INDEX,
    SNAPSHOT,
    TIME_INDEX,
    TRANSACTION_INDEX,
    path_of,
)
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES, Segment, SegmentEnd
from tierlog.record_format.batch import NO_TIMESTAMP, BatchHeader, Buffer
from tierlog.record_format.index_builder import IndexBuilder
from tierlog.record_format.index_layouts import (
    MAX_RELATIVE_OFFSET,
    OFFSET_ENTRY,
    TIME_ENTRY,
    pack_txn_index,
)

INDEX_WRITE_BYTES: Final = 4096


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
        "buffers",
        "builder",
        "end",
        "first_timestamp",
        "limits",
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
        self.builder, self.limits, self.first_timestamp = builder, limits, first_timestamp
        self.min_timestamp, self.record_count = segment.min_timestamp, segment.record_count
        self.buffers: list[Buffer] = []

    def must_roll(
        self, *, size_bytes: int, max_timestamp: int, last_offset: int, now_ms: int
    ) -> bool:
        """Whether these bytes belong in a new segment (Kafka's LogSegment.shouldRoll).

        An empty segment accepts any batch.
        """
        limits, builder, end_bytes = self.limits, self.builder, self.end.size_bytes
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
        return now_ms - self.limits.created_ms

    def plan_batch(
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
            self.builder.index_batch(header, position=start + header.position)
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


class ActiveIndex:
    """The index of an active segment: its entries in memory, which are authoritative, and its file.

    The file is preallocated (sparse). Entries that could not be written are written with the next
    ones, or at the seal; after a crash recovery rebuilds the file. Never through a mapping: a full
    disk has to be an error, not a signal.
    """

    __slots__ = ("_disk", "_fd", "_written", "columns")

    def __init__(self, path: Path, columns: IndexColumns, *, disk: Disk) -> None:
        """Open (or create) `path`, which has the entries of `columns`."""
        self.columns, self._disk = columns, disk
        self._written = len(columns)
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT)

    def preallocate(self, size_bytes: int) -> None:
        """Set the file's length to `size_bytes`, rounded down to whole entries, with zeros after
        the entries.
        """
        room = size_bytes // self.columns.entry_bytes
        self._disk.truncate(self._fd, self.columns.size_bytes)
        self._disk.truncate(self._fd, room * self.columns.entry_bytes)
        self._written = min(self._written, room)

    def replace(self, columns: IndexColumns) -> None:
        """Replace all entries; those in the file with the next write."""
        self.columns, self._written = columns, 0

    @property
    def unwritten_bytes(self) -> int:
        return (len(self.columns) - self._written) * self.columns.entry_bytes

    def write_entries(self) -> None:
        """Write the entries that are not in the file yet. Raises OSError; may be repeated."""
        unwritten = self.columns.image(self._written)
        if unwritten:
            write_all(self._disk, self._fd, [unwritten], self._written * self.columns.entry_bytes)
            self._written = len(self.columns)

    def trim(self) -> None:
        """Write everything and truncate the file to its entries. Raises OSError."""
        self.write_entries()
        self._disk.truncate(self._fd, self.columns.size_bytes)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ActiveSegment:
    """The segment that receives appends. `is_shortened`: the log's length is not synced."""

    def __init__(
        self,
        segment: Segment,
        *,
        config: LogConfig,
        jitter_ms: int,
        now_ms: int,
        disk: Disk,
        offsets: IndexColumns,
        times: IndexColumns,
        bytes_since_entry: int,
    ) -> None:
        """Open the files, creating missing ones, and preallocate the indexes.

        `now_ms`, here and below, is from the log's monotonic clock.
        """
        self.segment, self.config, self.disk = segment, config, disk
        self.jitter_ms, self.created_ms = jitter_ms, now_ms
        segment.first_append_ms = now_ms if segment.end.size_bytes else None
        self.first_timestamp: int | None = None
        self._bytes_since_entry = bytes_since_entry
        self.is_shortened = False
        with ExitStack() as on_failure:
            self._fd = disk.open(segment.path(LOG), os.O_RDWR | os.O_CREAT)
            on_failure.callback(os.close, self._fd)
            self.offsets = ActiveIndex(segment.path(OFFSET_INDEX), offsets, disk=disk)
            on_failure.callback(self.offsets.close)
            self.times = ActiveIndex(segment.path(TIME_INDEX), times, disk=disk)
            on_failure.callback(self.times.close)
            self.offsets.preallocate(config.segment_index_bytes)
            self.times.preallocate(config.segment_index_bytes)
            if config.preallocate and segment.end.size_bytes < config.segment_bytes:
                disk.reserve(self._fd, config.segment_bytes)
            on_failure.pop_all()
        segment.offsets, segment.times = offsets, times

    def resume(self, first_timestamp: int | None, *, age_ms: int) -> None:
        """The segment existed when the log was opened, and has had records for `age_ms`."""
        self.first_timestamp = first_timestamp
        if self.segment.first_append_ms is not None:
            self.segment.first_append_ms -= age_ms

    def add_entries(self, offset_entries: Iterable[Entry], time_entries: Iterable[Entry]) -> None:
        """Add entries to the indexes, in memory and, now and then, if the disk has room, in the
        files.
        """
        for entry in offset_entries:
            self.offsets.columns.append(*entry)
        for entry in time_entries:
            self.times.columns.append(*entry)
        if self.offsets.unwritten_bytes < INDEX_WRITE_BYTES:
            return
        try:
            self.offsets.write_entries()
            self.times.write_entries()
        except OSError as error:
            if not is_disk_full(error):
                raise

    def replace_entries(self, builder: IndexBuilder) -> None:
        """Replace both indexes, which were read from files that turned out to be corrupt."""
        offsets, times = builder.images()
        self.offsets.replace(IndexColumns(OFFSET_ENTRY, offsets))
        self.times.replace(IndexColumns(TIME_ENTRY, times))
        self._bytes_since_entry = builder.bytes_since_entry
        segment = self.segment
        segment.largest = builder.largest
        segment.offsets, segment.times = self.offsets.columns, self.times.columns

    # --- planning ---------------------------------------------------------------------------------

    def begin_write(self) -> PendingWrite:
        """An empty plan for the next write to the segment as it is now."""
        return PendingWrite(
            self.segment,
            builder=self._new_builder(),
            first_timestamp=self.first_timestamp,
            limits=self._limits(),
        )

    def _new_builder(self) -> IndexBuilder:
        return IndexBuilder(
            self.segment.base_offset,
            interval_bytes=self.config.index_interval_bytes,
            bytes_since_entry=self._bytes_since_entry,
            largest=self.segment.largest,
            last_indexed_timestamp=self._last_indexed_timestamp(),
        )

    def _last_indexed_timestamp(self) -> int:
        times = self.times.columns
        return times[-1][0] if len(times) else NO_TIMESTAMP

    def _limits(self) -> RollLimits:
        config, index_bytes = self.config, self.config.segment_index_bytes
        return RollLimits(
            size_bytes=min(config.segment_bytes, MAX_SEGMENT_BYTES),
            age_ms=config.effective_segment_ms - self.jitter_ms,
            created_ms=self.created_ms,
            # Below zero if `segment.index.bytes` was lowered since.
            offset_entries=max(index_bytes // OFFSET_ENTRY.size - len(self.offsets.columns), 0),
            # One slot stays free for the entry that sealing adds.
            time_entries=max(index_bytes // TIME_ENTRY.size - 1 - len(self.times.columns), 0),
        )

    # --- writing ----------------------------------------------------------------------------------

    def write_planned(self, pending: PendingWrite, *, now_ms: int) -> None:
        """Write what was planned. On OSError the segment is unchanged, except for bytes past its
        end in the file.
        """
        write_all(self.disk, self._fd, pending.buffers, pending.start.size_bytes)
        self._apply(pending)
        if self.segment.first_append_ms is None:
            self.segment.first_append_ms = now_ms

    def _apply(self, pending: PendingWrite) -> None:
        builder, segment = pending.builder, self.segment
        self.first_timestamp = pending.first_timestamp
        self._bytes_since_entry = builder.bytes_since_entry
        segment.largest = builder.largest
        segment.min_timestamp, segment.record_count = pending.min_timestamp, pending.record_count
        segment.end = pending.end  # first: a reader that finds an index entry must see its batch
        if builder.offset_entries:
            self.add_entries(
                builder.offset_entries[: pending.limits.offset_entries],
                builder.time_entries[: pending.limits.time_entries],
            )

    def drop_tail(self) -> None:
        """Truncate what a failed write and preallocation left past the end: after a shorter write,
        recovery would take whole batches there for records. Raises OSError.
        """
        size_bytes = self.segment.end.size_bytes
        if os.fstat(self._fd).st_size != size_bytes:
            self.disk.truncate(self._fd, size_bytes)
            self.is_shortened = True

    # --- sealing ----------------------------------------------------------------------------------

    def seal(self) -> None:
        """Finish both indexes and truncate all files to their length. Raises OSError; may be
        repeated.
        """
        largest = self.segment.largest
        if largest is not None and largest.timestamp > self._last_indexed_timestamp():
            self.times.columns.append(largest.timestamp, largest.offset - self.segment.base_offset)
        self.offsets.trim()
        self.times.trim()
        self._write_aborted()
        self.drop_tail()

    def _write_aborted(self) -> None:
        if self.segment.aborted is not None:
            path, entries = self.segment.path(TRANSACTION_INDEX), self.segment.aborted
            write_atomically(path, pack_txn_index(entries), disk=self.disk, sync=True)
            self.segment.aborted = None

    def release_indexes(self) -> None:
        """Look-ups use the files from now on, so the descriptors are no longer needed."""
        self.offsets.close()
        self.times.close()
        self.segment.offsets = self.segment.times = None

    def sync_log(self) -> None:
        self.is_shortened = False  # first: it may be shortened during the sync
        self.disk.sync_bytes(self._fd)

    def sync_indexes(self) -> None:
        """Sync the indexes, and the transaction index if there is one."""
        for suffix in (OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX):
            with suppress(FileNotFoundError):
                self.disk.sync_file(self.segment.path(suffix))

    def sync_all(self) -> None:
        """Sync the log, the indexes, and the snapshot at its end."""
        self.sync_log()
        self.sync_indexes()
        with suppress(FileNotFoundError):
            snapshot = path_of(self.segment.folder, self.segment.end.next_offset, SNAPSHOT)
            self.disk.sync_file(snapshot)

    def close(self) -> None:
        self.offsets.close()
        self.times.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
