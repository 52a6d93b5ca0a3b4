"""Downloads chunks into the chunk cache, with a limit on concurrent downloads (fills).

* A chunk is downloaded once, however many readers wait for it; all of them get the same file or the
  same error.
* Fills in flight are bounded, and those for read-ahead to half of that, so that a reader waits for
  few speculative fills at most. Read-ahead that finds no space or no slot is dropped, not queued.
* A full disk does not fail a read: a chunk that a reader waits for is then downloaded to memory and
  not cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future
from functools import partial
from typing import Final, NamedTuple

from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.memory_chunks import MemoryChunks
from tierlog.cold_tier.ranged_reader import ChunkKey, ChunkRef, RangedReader
from tierlog.host.file_slice import OpenFile
from tierlog.host.threads import Threads
from tierlog.host.waiting import Wait
from tierlog.record_format.errors import DiskFull, ShuttingDown, Throttled

SPACE_WAIT_S: Final = 10.0
SHRINK_CHUNKS: Final = 4


class _Fill(NamedTuple):
    """A fill in progress. `space_wait_s`: how long it waits for space; read-ahead gives up first.

    A reader that finds no space after another has waited for as long does not wait again: readers
    of one chunk would otherwise wait one after the other.
    """

    future: Future[OpenFile]
    space_wait_s: float = -1.0


class ChunkFills:
    """Thread-safe. `memory_max_bytes` limits the chunks kept in memory while the disk is full."""

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

    def get(
        self, chunk: ChunkRef, *, space_wait_s: float = SPACE_WAIT_S, wait: Wait = Wait.WAIT
    ) -> OpenFile:
        """The chunk's file, open; waits for the store if it is not cached.

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
            finally:
                del filling  # an error that refers to its own future would keep open files alive

    def prefetch(self, chunk: ChunkRef) -> bool:
        """Start to fill the chunk if there is a slot. Whether it is cached or being filled now."""
        with self._lock:
            if chunk.key in self._filling or chunk in self._cache:
                return True
            if self._read_aheads >= self._read_ahead_max:
                return False
            self._filling[chunk.key] = _Fill(self._submit(self._fill_ahead, chunk))
            self._read_aheads += 1
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _join_or_start(self, chunk: ChunkRef, *, space_wait_s: float) -> _Fill | None:
        """None if the chunk was cached meanwhile."""
        with self._lock:
            filling = self._filling.get(chunk.key)
            if filling is None and chunk not in self._cache:
                future = self._submit(partial(self._fill, space_wait_s=space_wait_s), chunk)
                filling = self._filling[chunk.key] = _Fill(future, space_wait_s)
            return filling

    def _submit(self, fill: Callable[[ChunkRef], OpenFile], chunk: ChunkRef) -> Future[OpenFile]:
        try:
            return self._pool.submit(fill, chunk)
        except RuntimeError as error:  # which a pool that was shut down raises
            raise ShuttingDown("cold reads have ended") from error

    def _fill_ahead(self, chunk: ChunkRef) -> OpenFile:
        try:
            return self._fill_cache(chunk, space_wait_s=0.0)
        except DiskFull as error:
            raise Throttled("the disk has no space for read-ahead") from error
        finally:
            with self._lock:
                self._read_aheads -= 1
                self._filling.pop(chunk.key, None)

    def _fill(self, chunk: ChunkRef, *, space_wait_s: float) -> OpenFile:
        try:
            try:
                return self._fill_cache(chunk, space_wait_s=space_wait_s)
            except DiskFull:
                return self._in_memory.fill(chunk, self._reader.fetch_into, wait_s=space_wait_s)
        finally:
            # After `publish`, so that a reader that finds no fill finds the chunk cached.
            with self._lock:
                self._filling.pop(chunk.key, None)

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
            temp = self._reader.fetch(chunk, self._cache.new_temp_path)
        except BaseException:
            self._cache.unreserve(chunk.size_bytes)
            raise
        return self._cache.publish(chunk, temp)
