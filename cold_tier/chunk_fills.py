"""Which chunks are downloaded into the chunk cache, and when: those that a reader waits for (fills)
and those that it will need next (prefetch), also of following segments.

* A chunk is downloaded once, however many readers wait for it; all of them get the same file or the
  same error.
* The chunk that is needed now is requested first, then all others that this read needs; how much
  further to go is decided by `ReadAhead`. Errors of what is read ahead are not reported: the reader
  will encounter them.
* Fills in flight are bounded, and those for read-ahead to half of that, so that a reader waits for
  few speculative fills at most. Read-ahead that finds no space or no slot is dropped, not queued.
* A full disk does not fail a read: a chunk that a reader waits for is then downloaded to memory and
  not cached (`MemoryChunks`).

Thread-safe.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import CancelledError, Future
from contextlib import ExitStack, suppress
from functools import partial
from itertools import islice
from typing import Final, NamedTuple

from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.ranged_reader import ChunkKey, ChunkRef, RangedReader
from tierlog.cold_tier.segment_lookup import SegmentIndex, SegmentIndexes
from tierlog.host.file_slice import OpenFile
from tierlog.host.threads import Threads
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import (
    DiskFull,
    ShuttingDown,
    Throttled,
    TierlogError,
    disk_full_error,
)
from tierlog.record_format.segment_entry import SegmentEntry

SPACE_WAIT_S: Final = 10.0
SHRINK_CHUNKS: Final = 4
SEGMENTS_AHEAD: Final = 2
TASKS_AHEAD: Final = 32
WINDOW_MAX: Final = 6
STREAMS_MAX: Final = 4096

ChunkId = tuple[str, int]
"""The log's key, and the chunk's number in it."""


class _Fill:
    """A fill in progress. `readers`: how many wait for the file, each of which will hold it.
    `space_wait_s`: how long it waits for space; read-ahead gives up first.

    A reader that finds no space after another has waited for as long does not wait again: readers
    of one chunk would otherwise wait one after the other.
    """

    __slots__ = ("future", "readers", "space_wait_s")

    def __init__(self, future: Future[OpenFile], space_wait_s: float = -1.0) -> None:
        self.future, self.space_wait_s, self.readers = future, space_wait_s, 0


class ChunkFills:
    """`memory_max_bytes` limits the chunks kept in memory while the disk is full."""

    def __init__(
        self, cache: ChunkCache, reader: RangedReader, *, fills_max: int, memory_max_bytes: int
    ) -> None:
        self._cache, self._reader = cache, reader
        self._in_memory = MemoryChunks(limit_bytes=memory_max_bytes)
        self._read_ahead_max = max(1, fills_max // 2)
        self._pool = Threads(fills_max, name="cold-fill")
        self._lock = threading.Lock()
        self._filling: dict[ChunkKey, _Fill] = {}
        self._read_aheads = 0

    def open_chunk(
        self, chunk: ChunkRef, *, space_wait_s: float = SPACE_WAIT_S, wait: Wait = Wait.WAIT
    ) -> OpenFile:
        """The chunk's file, which the caller closes; waits for the store if it is not cached.

        Waits up to `space_wait_s` for space in the cache; callers that hold other chunks open must
        pass 0. Raises CorruptObject, MissingObject, StoreUnavailable, Throttled; DiskFull only if
        the system has no memory files; WouldBlock if it is not cached, or not verified yet.
        """
        while True:
            found = self._cache.lookup(chunk, wait)
            if found is not None:
                return found
            filling = self._join_or_start(chunk, space_wait_s=space_wait_s)
            if filling is None:
                continue
            try:
                opened = filling.future.result()
            except CancelledError as error:
                raise ShuttingDown("cold reads have ended") from error
            except Throttled:
                if filling.space_wait_s >= space_wait_s:
                    raise
            else:
                self._cache.mark_read(chunk)
                return opened

    def prefetch(self, chunk: ChunkRef) -> bool:
        """Start to fill the chunk if there is a slot. Whether it is cached or being filled now."""
        with self._lock:
            if chunk.key in self._filling or chunk in self._cache:
                return True
            if self._read_aheads >= self._read_ahead_max:
                return False
            self._filling[chunk.key] = _Fill(self._pool.submit(self._fill_ahead, chunk))
            self._read_aheads += 1
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _join_or_start(self, chunk: ChunkRef, *, space_wait_s: float) -> _Fill | None:
        """None if the chunk was cached meanwhile."""
        with self._lock:
            filling = self._filling.get(chunk.key)
            if filling is None and chunk not in self._cache:
                future = self._pool.submit(partial(self._fill, space_wait_s=space_wait_s), chunk)
                filling = self._filling[chunk.key] = _Fill(future, space_wait_s)
            if filling is not None:
                filling.readers += 1
            return filling

    def _fill_ahead(self, chunk: ChunkRef) -> OpenFile:
        file = None
        try:
            file = self._fill_cache(chunk, space_wait_s=0.0)
            return file
        except DiskFull as error:
            raise Throttled("the disk has no space for read-ahead") from error
        finally:
            with self._lock:
                self._read_aheads -= 1
            self._end(chunk, file)

    def _fill(self, chunk: ChunkRef, *, space_wait_s: float) -> OpenFile:
        file = None
        try:
            try:
                file = self._fill_cache(chunk, space_wait_s=space_wait_s)
            except DiskFull:
                file = self._in_memory.fill(chunk, self._reader.fetch_into, wait_s=space_wait_s)
            return file
        finally:
            self._end(chunk, file)

    def _end(self, chunk: ChunkRef, file: OpenFile | None) -> None:
        """Called after `publish`, so that a reader that finds no fill finds the chunk cached."""
        with self._lock:
            filling = self._filling.pop(chunk.key)
        if file is not None:
            for _ in range(filling.readers):
                file.share()
            file.close()

    def _fill_cache(self, chunk: ChunkRef, *, space_wait_s: float) -> OpenFile:
        try:
            return self._fill_once(chunk, space_wait_s=space_wait_s)
        except DiskFull:
            # The disk has less space than the cache's limit, so evict cached chunks.
            if not self._cache.shrink(SHRINK_CHUNKS * chunk.size_bytes):
                raise
            return self._fill_once(chunk, space_wait_s=space_wait_s)

    def _fill_once(self, chunk: ChunkRef, *, space_wait_s: float) -> OpenFile:
        self._cache.reserve(chunk.size_bytes, wait_s=space_wait_s)
        try:
            temp = self._reader.fetch_chunk(chunk, self._cache.new_temp_path)
        except BaseException:
            self._cache.unreserve(chunk.size_bytes)
            raise
        return self._cache.publish(chunk, temp)


class _MemoryFile(OpenFile):
    __slots__ = ("_free",)

    def __init__(self, chunk: ChunkRef, free: Callable[[], None]) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory files")
        self._hold(os.memfd_create("tierlog-chunk"), f"{chunk.log_key}, chunk {chunk.number}")
        self._free = free

    def _close_last(self) -> None:
        super()._close_last()
        self._free()


class MemoryChunks:
    """Chunks in anonymous memory files, for when the disk has no space for them.

    * A chunk serves only the readers that are waiting for it, and is freed with the last of them.
      It is read and sent like any other file.
    * Together, including those being filled, they stay within the limit or are a single chunk.
      Beyond that a fill waits for a reader to release one, and finally raises Throttled.
    * Memory files need Linux. On other systems, or if the process is out of file descriptors, the
      read fails with the error of the disk.
    """

    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes, self._used_bytes = limit_bytes, 0
        self._freed = threading.Condition()

    def fill(
        self, chunk: ChunkRef, fetch: Callable[[ChunkRef, memoryview], object], *, wait_s: float
    ) -> OpenFile:
        """A file filled by `fetch`. Raises Throttled, DiskFull, and whatever `fetch` raises."""
        size_bytes = chunk.size_bytes
        with self._freed:
            if not self._freed.wait_for(lambda: self._has_room(size_bytes), wait_s):
                raise Throttled("the disk is full, and so is the memory for chunks in use")
            self._used_bytes += size_bytes
        with ExitStack() as on_failure:
            on_failure.callback(self._free, size_bytes)
            try:
                file = _MemoryFile(chunk, partial(self._free, size_bytes))
                on_failure.pop_all()
                on_failure.callback(file.close)
                os.posix_fallocate(file.fd, 0, size_bytes)
                buffer = mmap.mmap(file.fd, size_bytes)
            except OSError as error:
                raise disk_full_error("no space on disk or in memory", error) from error
            fetch(chunk, memoryview(buffer))
            on_failure.pop_all()
        return file

    def _has_room(self, size_bytes: int) -> bool:
        return not self._used_bytes or self._used_bytes + size_bytes <= self._limit_bytes

    def _free(self, size_bytes: int) -> None:
        with self._freed:
            self._used_bytes -= size_bytes
            self._freed.notify_all()


class Prefetcher:
    def __init__(self, fills: ChunkFills, indexes: SegmentIndexes) -> None:
        self._fills, self._indexes = fills, indexes
        self._read_ahead = ReadAhead()
        self._pool = Threads(SEGMENTS_AHEAD, name="cold-ahead")
        self._slots = threading.BoundedSemaphore(TASKS_AHEAD)

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def begin_read(
        self,
        segment: SegmentEntry,
        index: SegmentIndex,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int,
        following: Iterable[SegmentEntry],
    ) -> ReadAheadState:
        """Start to fetch what a read of `max_bytes` from `offset` needs, nothing of which begins at
        or above `end_offset`. Returns the state to pass to `end_read`.
        """
        number = index.table.index_of(offset)
        current = (segment.log_key, number)
        state = self._read_ahead.state_at(_folder_of(segment.log_key), offset, chunk=current)
        window, needed = state.window, _chunks_needed(index, number, max_bytes=max_bytes)
        if needed <= window and (not window or state.is_complete):
            return state
        last = index.table.index_of(end_offset - 1)
        end = min(number + 1 + max(window, needed), last + 1, len(index.chunks))
        requested = [self._fills.prefetch(chunk) for chunk in index.chunks[number:end]]
        beyond = number + 1 + window - end
        if beyond > 0 and end_offset > segment.next_offset:
            requested.append(self._prefetch_beyond(following, beyond))
        return ReadAheadState(window, current, is_complete=all(requested))

    def end_read(self, segment: SegmentEntry, next_offset: int, state: ReadAheadState) -> None:
        """Note that the read ended at `next_offset`."""
        self._read_ahead.record(_folder_of(segment.log_key), next_offset, state)

    def _prefetch_beyond(self, following: Iterable[SegmentEntry], chunks: int) -> bool:
        if not self._slots.acquire(blocking=False):
            return False
        try:
            self._pool.submit(self._fetch_beyond, iter(following), chunks)
        except ShuttingDown:
            self._slots.release()
            return False
        return True

    def _fetch_beyond(self, following: Iterator[SegmentEntry], chunks: int) -> None:
        try:
            with suppress(TierlogError, WouldBlock):
                for segment in islice(following, SEGMENTS_AHEAD):
                    index = self._indexes.load_index(segment)
                    for chunk in index.chunks[:chunks]:
                        self._fills.prefetch(chunk)
                    chunks -= len(index.chunks)
                    if chunks <= 0:
                        return
        finally:
            self._slots.release()


def _folder_of(log_key: str) -> str:
    """The partition's segments folder, which sequential reads have in common."""
    return log_key.rpartition("/")[0]


def _chunks_needed(index: SegmentIndex, number: int, *, max_bytes: int) -> int:
    """How many chunks after this one the read continues to: until it has half of `max_bytes`."""
    chunks = index.chunks
    size_bytes = count = 0
    while number + count < len(chunks) - 1:
        size_bytes += chunks[number + count].size_bytes
        if size_bytes * 2 > max_bytes:
            break
        count += 1
    return count


class ReadAheadState(NamedTuple):
    """`window`: how many chunks to read ahead of `chunk`; `is_complete`: all were requested."""

    window: int = 0
    chunk: ChunkId | None = None
    is_complete: bool = False


NOT_SEQUENTIAL: Final = ReadAheadState()


class ReadAhead:
    """The windows of sequential readers: bookkeeping without I/O.

    * A read that starts where an earlier read of the same partition ended is sequential: its window
      doubles with each chunk that it enters, up to the limit. Any other read has no window, so
      random reads cause no extra requests.
    * Once the whole window has been requested, nothing more is until the reader enters another
      chunk, so that small reads do not repeat the same requests.
    * Readers are not identified: two readers at the same position share what is read ahead.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._states: OrderedDict[tuple[str, int], ReadAheadState] = OrderedDict()

    def state_at(self, folder: str, offset: int, *, chunk: ChunkId) -> ReadAheadState:
        """The state for a read that starts at `offset`, which lies in `chunk`."""
        known = self._states.get((folder, offset))
        if known is None:
            return NOT_SEQUENTIAL
        if known.chunk == chunk:
            return known
        return ReadAheadState(min(WINDOW_MAX, max(1, known.window * 2)), chunk)

    def record(self, folder: str, next_offset: int, state: ReadAheadState) -> None:
        """Record that a read ended at `next_offset` in this state."""
        with self._lock:
            self._states[folder, next_offset] = state
            self._states.move_to_end((folder, next_offset))
            if len(self._states) > STREAMS_MAX:
                self._states.popitem(last=False)
