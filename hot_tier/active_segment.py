"""The write side of one segment: the only code that makes a `.log` longer.

* A write is planned first (`PendingWrite`: bytes, index entries, facts), then done with one call,
  then taken over whole. A write that fails leaves no trace in memory, and none in the file below
  its end.
* Index entries are written after the bytes that they point to. If the disk has no room for them
  they wait in memory; an index is never a reason to refuse a record.
* Everything runs under the log's lock except `sync`, which only touches descriptors that stay open
  until it is done.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress

from hot_tier.disk import Disk, is_refusal, write_all
from hot_tier.file_names import LOG, OFFSET_INDEX, SNAPSHOT, TIME_INDEX, TRANSACTION_INDEX, path_of
from hot_tier.index_builder import IndexBuilder
from hot_tier.index_file import ActiveIndex
from hot_tier.log_config import LogConfig
from hot_tier.pending_write import Facts, PendingWrite, Room
from hot_tier.segment import MAX_SEGMENT_BYTES, Segment
from record_format.batch import NO_TIMESTAMP
from record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


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
        offset_image: bytes,
        time_image: bytes,
        bytes_since_entry: int,
    ) -> None:
        """Open the files (created where they are not there) and preallocate the indexes.

        `now_ms`, here and below, is of the log's monotonic clock.
        """
        self.segment, self.config, self.disk = segment, config, disk
        self.jitter_ms, self.created_ms = jitter_ms, now_ms
        segment.first_append_ms = now_ms if segment.end.size_bytes else None
        self.first_timestamp: int | None = None
        self._bytes_since_entry = bytes_since_entry
        with ExitStack() as opened:  # what was opened is closed again where the rest fails
            self._fd = disk.open(segment.path(LOG), os.O_RDWR | os.O_CREAT)
            opened.callback(os.close, self._fd)
            offsets = ActiveIndex(
                segment.path(OFFSET_INDEX), OFFSET_ENTRY, image=offset_image, disk=disk
            )
            opened.callback(offsets.close)
            times = ActiveIndex(segment.path(TIME_INDEX), TIME_ENTRY, image=time_image, disk=disk)
            opened.callback(times.close)
            offsets.preallocate(config.segment_index_bytes)
            times.preallocate(config.segment_index_bytes)
            if config.preallocate and segment.end.size_bytes < config.segment_bytes:
                disk.reserve(self._fd, config.segment_bytes)
            opened.pop_all()
        segment.offsets, segment.times = offsets, times
        self.offsets, self.times = offsets, times

    def resume(self, first_timestamp: int | None, *, age_ms: int) -> None:
        """It was there when the log was opened, and has had records for `age_ms`."""
        self.first_timestamp = first_timestamp
        if self.segment.first_append_ms is not None:
            self.segment.first_append_ms -= age_ms

    def restore_indexes(self, offset_image: bytes, time_image: bytes) -> None:
        """Put back the entries that recovery found by walking; they are written as appends
        write.
        """
        self.offsets.image += offset_image
        self.times.image += time_image
        self._write_indexes()

    # --- planning ---------------------------------------------------------------------------------

    def begin_write(self) -> PendingWrite:
        """An empty plan for the next write, from the segment as it is now."""
        segment = self.segment
        return PendingWrite(
            segment.end,
            plan=self._plan_from_here(),
            facts=Facts(self.first_timestamp, segment.min_timestamp, segment.record_count),
            room=self._room(),
        )

    def _plan_from_here(self) -> IndexBuilder:
        return IndexBuilder(
            self.segment.base_offset,
            interval_bytes=self.config.index_interval_bytes,
            bytes_since_entry=self._bytes_since_entry,
            largest=self.segment.largest,
            last_indexed_timestamp=self._last_indexed_timestamp(),
        )

    def _last_indexed_timestamp(self) -> int:
        return self.times.entry(-1)[0] if len(self.times) else NO_TIMESTAMP

    def _room(self) -> Room:
        config, index_bytes = self.config, self.config.segment_index_bytes
        return Room(
            size_bytes=min(config.segment_bytes, MAX_SEGMENT_BYTES),
            age_ms=config.effective_segment_ms - self.jitter_ms,
            created_ms=self.created_ms,
            # Below zero if the topic's `segment.index.bytes` was lowered meanwhile.
            offset_entries=max(index_bytes // OFFSET_ENTRY.size - len(self.offsets), 0),
            # One place stays free for the entry that sealing adds.
            time_entries=max(index_bytes // TIME_ENTRY.size - 1 - len(self.times), 0),
        )

    # --- writing ----------------------------------------------------------------------------------

    def write(self, pending: PendingWrite, *, now_ms: int) -> None:
        """Do what was planned. Raises OSError; the segment is then as it was, except for the file's
        tail.
        """
        write_all(self.disk, self._fd, pending.buffers, pending.start.size_bytes)
        self._take_over(pending)
        if self.segment.first_append_ms is None:
            self.segment.first_append_ms = now_ms

    def _take_over(self, pending: PendingWrite) -> None:
        plan, segment = pending.plan, self.segment
        self.first_timestamp = pending.first_timestamp
        self._bytes_since_entry = plan.bytes_since_entry
        segment.largest = plan.largest
        segment.min_timestamp, segment.record_count = pending.min_timestamp, pending.record_count
        segment.end = pending.end  # before the entries: a reader that meets one sees its batch too
        if plan.offset_entries:
            room = self._room()
            for entry in plan.offset_entries[: room.offset_entries]:
                self.offsets.add(*entry)
            for entry in plan.time_entries[: room.time_entries]:
                self.times.add(*entry)
            self._write_indexes()

    def _write_indexes(self) -> None:
        try:
            self.offsets.write()
            self.times.write()
        except OSError as error:
            if not is_refusal(error):
                raise

    def drop_tail(self) -> None:
        """Cut off what a failed write left behind, and what was preallocated: after a shorter
        write, recovery would take whole batches of it for records. Raises OSError.
        """
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
        """Bytes, indexes and, where there are some, the aborted transactions; and the snapshot at
        its end.
        """
        self.sync_log()
        for path in (
            self.segment.path(OFFSET_INDEX),
            self.segment.path(TIME_INDEX),
            self.segment.path(TRANSACTION_INDEX),
            path_of(self.segment.folder, self.segment.end.next_offset, SNAPSHOT),
        ):
            with suppress(FileNotFoundError):
                self.disk.sync_file(path)

    def close(self) -> None:
        self.offsets.close()
        self.times.close()
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
