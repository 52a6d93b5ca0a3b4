"""Replacing segments by one that compaction or a repair made from them; putting one that was
brought back from the other tier before the first.

| step | the next open after a crash finds |
|---|---|
| `.cleaned` files complete and synced | the old segments; it removes the `.cleaned` files |
| `.log.cleaned` renamed to `.log.swap`, then the others, folder | the new segment: `LogFolder` |
| synced | finishes the swap |
| the old segments' files renamed to `.deleted` | the same |
| `.swap` files renamed into place, the `.log` last, folder synced | the new segment |

* The `.cleaned` files are named after their segment, so a log writes one at a time
  (`new_cleaned_segment`). If they are not swapped in, nothing is left behind.
* The marker that the bucket is out of date is created with the `.swap` names and synced with them.
* It runs under the log's lock: appends wait for a few renames and two syncs of the folder. Readers
  see either the old segments or the new one (`read_consistently`); files that they have open stay
  open.
* If a step fails after the point of no return, the log goes offline and the next open finishes the
  swap. Until then reads use the old segments, wherever their files are by then.
* A segment from the other tier arrives complete and synced in a folder of its own on the same disk,
  and is moved in by renames, its `.log` last: a crash leaves either the whole segment or only
  indexes, which the next open removes. It ends where the next one begins, whatever lies between.
  The newest is brought back first, so that no new gap appears.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from tierlog.host.disk import write_all
from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.log_folder import (
    CLEANED,
    LOG,
    OFFSET_INDEX,
    SEGMENT_SUFFIXES,
    SNAPSHOT,
    SWAP,
    TIME_INDEX,
    TRANSACTION_INDEX,
    UNMIRRORED,
    path_of,
    staged,
)
from tierlog.hot_tier.log_state import LogState, Segments, replacing_segments
from tierlog.hot_tier.reaper import FIRST_REPLACED_IN_ORDER, REPLACED_IN_ORDER, Reaper
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import Segment, SegmentEnd, SegmentFiles
from tierlog.record_format.batch import BatchHeader, Buffer
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import Throttled
from tierlog.record_format.index_builder import IndexBuilder
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

    def add_batch(self, header: BatchHeader, body: Buffer) -> None:
        self._builder.index_batch(header, position=self.size_bytes)
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


def swap(
    state: LogState,
    reaper: Reaper,
    old: tuple[Segment, ...],
    cleaned: CleanedSegment,
    *,
    bucket_follows: bool = True,
) -> bool:
    """Replace `old` by `cleaned` (finished); False if not all of `old` are still in the log.

    `bucket_follows`: the bucket may hold the old segments and must be updated. Raises
    LogOfflineError, DiskFull (nothing changed).
    """
    with state.lock:
        state.check_online()
        if state.closing:
            return False
        first = state.segments.number_of(old[0].base_offset)
        if first < 0 or state.segments.items[first : first + len(old)] != old:
            return False
        if bucket_follows:
            _mark_unmirrored(state)
        _publish(state, cleaned)
        with replacing_segments(state):
            moved: dict[Path, Path] = {}
            try:
                _rename(state, reaper, old, cleaned, moved=moved)
            except OSError as error:
                offline = state.go_offline(error)
                for path, current_path in moved.items():
                    with suppress(OSError):  # out of descriptors: reads fail until a restart
                        state.files.pin(path, OpenFile(current_path))
                raise offline from error
            items = state.segments.items
            after = (*items[:first], cleaned.segment, *items[first + len(old) :])
            state.segments = Segments.of(after)
        return True


def _mark_unmirrored(state: LogState) -> None:
    try:
        (state.folder / UNMIRRORED).touch()
    except OSError as error:
        raise disk_error(state, error) from error
    state.unmirrored = True


def _publish(state: LogState, cleaned: CleanedSegment) -> None:
    """From the first rename on, the swap will be finished, by this process or by the next open."""
    try:
        _stage(state, cleaned, LOG)
    except OSError as error:
        raise disk_error(state, error) from error
    try:
        for suffix in cleaned.suffixes:
            if suffix != LOG:
                _stage(state, cleaned, suffix)
        state.disk.sync_folder(state.folder)
    except OSError as error:
        raise state.go_offline(error) from error


def _stage(state: LogState, cleaned: CleanedSegment, suffix: str) -> None:
    path = cleaned.segment.path(suffix)
    state.disk.rename(staged(path, CLEANED), staged(path, SWAP))


def _rename(
    state: LogState,
    reaper: Reaper,
    old: tuple[Segment, ...],
    cleaned: CleanedSegment,
    *,
    moved: dict[Path, Path],
) -> None:
    reaper.rename_deleted(old[0], FIRST_REPLACED_IN_ORDER, moved=moved)
    for segment in old[1:]:
        reaper.rename_deleted(segment, REPLACED_IN_ORDER, moved=moved)
    for suffix in reversed(cleaned.suffixes):  # the .log is the first of them
        path = cleaned.segment.path(suffix)
        state.disk.rename(staged(path, SWAP), path)
    state.disk.sync_folder(state.folder)
    for segment in (*old, cleaned.segment):
        for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT):
            state.files.invalidate(path_of(state.folder, segment.base_offset, suffix))


def prepend_segment(
    state: LogState, files: SegmentFiles, *, epochs: Sequence[EpochEntry], crc32c: int
) -> bool:
    """Make `files` (sealed, synced) the first segment. False if the log start has passed it or the
    log was closed.

    `epochs`: those of its records. Raises DiskFull, LogOfflineError.
    """
    with state.lock:
        state.check_online()
        first = state.segments.items[0]
        assert files.last_offset < first.base_offset, "it precedes the local segments"
        if state.closing or files.last_offset < state.log_start_offset:
            return False
        end = SegmentEnd(files.size_bytes, first.base_offset)
        segment = Segment(state.folder, files.base_offset, end)
        segment.record_count, segment.min_timestamp = files.record_count, files.min_timestamp
        segment.crc32c, segment.has_transactions = crc32c, files.txnindex is not None
        try:
            state.epochs.prepend(epochs)
            for suffix, path in _renames(files):
                state.disk.rename(path, segment.path(suffix))
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error
        state.segments = Segments.of((segment, *state.segments.items))
        return True


def _renames(files: SegmentFiles) -> list[tuple[str, Path]]:
    transactions = [(TRANSACTION_INDEX, files.txnindex)] if files.txnindex else []
    return [
        *transactions,
        (TIME_INDEX, files.timeindex),
        (OFFSET_INDEX, files.index),
        (LOG, files.log),
    ]
