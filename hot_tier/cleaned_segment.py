"""The segment that a compaction or repair writes: `….cleaned` files, complete and synced before
anyone sees them.

* Batches are added in order and indexed as by appends.
* The files are named after their segment, so a log writes one at a time (`new_cleaned_segment`).
* It is not part of the log until `segment_swap` puts it there; otherwise nothing is left behind.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from tierlog.host.disk import write_all
from tierlog.hot_tier.file_names import (
    CLEANED,
    LOG,
    OFFSET_INDEX,
    SEGMENT_SUFFIXES,
    TIME_INDEX,
    TRANSACTION_INDEX,
    staged,
)
from tierlog.hot_tier.index_builder import IndexBuilder
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import Throttled
from tierlog.record_format.index_layouts import AbortedTxn, pack_txn_index

WRITE_BYTES: Final = 1 << 20


@contextmanager
def new_cleaned_segment(state: LogState, base_offset: int) -> Iterator[CleanedSegment]:
    """An empty segment, removed on exit unless it was swapped in. Raises Throttled, instead of
    waiting, while another is being written: a repair holds a lock that the other's swap needs.
    Raises OSError.
    """
    if not state.rewrite_lock.acquire(blocking=False):
        raise Throttled(f"{state.name}: another segment is being rewritten")
    try:
        cleaned = CleanedSegment(state, base_offset)
        try:
            yield cleaned
        finally:
            cleaned.discard()
    finally:
        state.rewrite_lock.release()


class CleanedSegment:
    """Used by one thread. Any method may raise OSError."""

    def __init__(self, state: LogState, base_offset: int) -> None:
        self._state = state
        self.segment = Segment(state.folder, base_offset, SegmentEnd(0, base_offset))
        self._builder = IndexBuilder(base_offset, interval_bytes=state.config.index_interval_bytes)
        self._pending: list[Buffer] = []
        self._pending_bytes = self._written_bytes = self._crc = self._records = 0
        self.suffixes = [LOG, OFFSET_INDEX, TIME_INDEX]
        self._fd = -1
        self.discard()
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        self._fd = state.disk.open(self._path(LOG), flags)

    @property
    def size_bytes(self) -> int:
        return self._written_bytes + self._pending_bytes

    def _path(self, suffix: str) -> Path:
        return staged(self.segment.path(suffix), CLEANED)

    def add(self, header: BatchHeader, body: Buffer) -> None:
        self._builder.add(header, position=self.size_bytes)
        self._records += header.record_count
        self._pending.append(bytes(body))  # a memoryview would keep its whole chunk alive
        self._pending_bytes += len(body)
        if self._pending_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        write_all(self._state.disk, self._fd, self._pending, self._written_bytes)
        for body in self._pending:
            self._crc = crc32c_of(body, self._crc)
        self._written_bytes += self._pending_bytes
        self._pending, self._pending_bytes = [], 0

    def finish(
        self, *, next_offset: int, aborted: Sequence[AbortedTxn], modified_ns: int
    ) -> Segment:
        """Write and sync everything. `modified_ns`: the mtime of the newest segment that it was
        made from.
        """
        segment, builder = self.segment, self._builder
        self._write()
        self._state.disk.sync_bytes(self._fd)
        self._close()
        os.utime(self._path(LOG), ns=(modified_ns, modified_ns))
        builder.add_time_entry()
        offset_index, time_index = builder.images()
        self._write_file(OFFSET_INDEX, offset_index)
        self._write_file(TIME_INDEX, time_index)
        if aborted:
            self._write_file(TRANSACTION_INDEX, pack_txn_index(aborted))
            self.suffixes.append(TRANSACTION_INDEX)
        segment.end = SegmentEnd(self._written_bytes, next_offset)
        segment.largest, segment.has_transactions = builder.largest, bool(aborted)
        segment.record_count, segment.crc32c = self._records, self._crc
        return segment

    def _write_file(self, suffix: str, data: bytes) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC
        fd = self._state.disk.open(self._path(suffix), flags)
        try:
            write_all(self._state.disk, fd, [data], 0)
            self._state.disk.sync_bytes(fd)
        finally:
            os.close(fd)

    def _close(self) -> None:
        os.close(self._fd)
        self._fd = -1

    def discard(self) -> None:
        """Remove the files. If the log is offline or closed, the next open removes them."""
        if self._fd >= 0:
            self._close()
        if self._state.offline is None and not self._state.closed:
            for suffix in SEGMENT_SUFFIXES:
                self._state.disk.unlink(self._path(suffix))
