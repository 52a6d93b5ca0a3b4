"""Who fills the chunk cache, and how many at once.

* A chunk is filled once however many wait for it; all of them get the same file or the same error.
* Fills in flight are bounded, those for read-ahead to half of that: a waiting reader never waits
  for more than a few guesses. Read-ahead that finds no room or no slot is dropped, not queued.
* A disk that is full refuses no read: what a reader waits for is filled in memory then, and is not
  cached.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from functools import partial
from typing import Final

from cold_tier.chunk_cache import ChunkCache
from cold_tier.memory_chunks import MemoryChunks
from cold_tier.ranged_reader import ChunkKey, ChunkRef, RangedReader
from record_format.errors import DiskFull, ShuttingDown, Throttled
from record_format.file_slice import OpenFile

ROOM_WAIT_S: Final = 10.0
SHRINK_CHUNKS: Final = 4


class ChunkFills:
    """Thread-safe. `memory_max_bytes`: of chunks that the disk has no room for."""

    def __init__(
        self, cache: ChunkCache, reader: RangedReader, *, fills_max: int, memory_max_bytes: int
    ) -> None:
        self._cache, self._reader = cache, reader
        self._in_memory = MemoryChunks(limit_bytes=memory_max_bytes)
        self._read_ahead_max = max(1, fills_max // 2)
        self._pool = ThreadPoolExecutor(fills_max, thread_name_prefix="cold-fill")
        self._lock = threading.Lock()
        self._filling: dict[ChunkKey, Future[OpenFile]] = {}
        self._guesses = 0

    def get(self, chunk: ChunkRef, *, room_wait_s: float = ROOM_WAIT_S) -> OpenFile:
        """The chunk's file, open; waits for the store if it is not cached.

        Waits `room_wait_s` for room in the cache: a caller that holds other chunks open must not
        wait at all. Raises CorruptObject, MissingObject, StoreUnavailable, Throttled; DiskFull only
        where the system has no files in memory.
        """
        while True:
            found = self._cache.lookup(chunk)
            if found is not None:
                return found
            filling, ours = self._join_or_start(chunk, room_wait_s=room_wait_s)
            if filling is None:
                continue
            try:
                opened = filling.result()
            except CancelledError as error:
                raise ShuttingDown("cold reads have ended") from error
            except Throttled:
                if ours:
                    raise
                continue  # it was a guess, or did not wait for room as long as we would
            finally:
                del filling  # an error that holds its own future would keep open files alive
            self._cache.mark_read(chunk)
            return opened

    def cached(self, chunk: ChunkRef) -> OpenFile | None:
        """The chunk's file if it is cached and checked; never waits."""
        return self._cache.lookup(chunk, checked_only=True)

    def prefetch(self, chunk: ChunkRef) -> bool:
        """Begin to fill the chunk if there is a slot; whether it is there or on its way."""
        with self._lock:
            if chunk.key in self._filling or self._cache.has(chunk):
                return True
            if self._guesses >= self._read_ahead_max:
                return False
            self._filling[chunk.key] = self._submit(self._guess, chunk)
            self._guesses += 1
        return True

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _join_or_start(
        self, chunk: ChunkRef, *, room_wait_s: float
    ) -> tuple[Future[OpenFile] | None, bool]:
        """The fill, and whether it is the caller's own; no fill where one ended since it looked."""
        with self._lock:
            filling = self._filling.get(chunk.key)
            if filling is not None:
                return filling, False
            if self._cache.has(chunk):
                return None, False
            started = self._submit(partial(self._fill, room_wait_s=room_wait_s), chunk)
            self._filling[chunk.key] = started
            return started, True

    def _submit(self, fill: Callable[[ChunkRef], OpenFile], chunk: ChunkRef) -> Future[OpenFile]:
        try:
            return self._pool.submit(fill, chunk)
        except RuntimeError as error:  # the pool's only word for: shut down
            raise ShuttingDown("cold reads have ended") from error

    def _guess(self, chunk: ChunkRef) -> OpenFile:
        try:
            return self._fill_cache(chunk, room_wait_s=0.0)
        except DiskFull as error:
            raise Throttled("the disk has no room for reading ahead") from error
        finally:
            with self._lock:
                self._guesses -= 1
                self._filling.pop(chunk.key, None)

    def _fill(self, chunk: ChunkRef, *, room_wait_s: float) -> OpenFile:
        try:
            try:
                return self._fill_cache(chunk, room_wait_s=room_wait_s)
            except DiskFull:
                return self._in_memory.fill(chunk, self._reader.fetch_into, wait_s=room_wait_s)
        finally:
            # After `publish`: whoever finds no fill under way finds the chunk.
            with self._lock:
                self._filling.pop(chunk.key, None)

    def _fill_cache(self, chunk: ChunkRef, *, room_wait_s: float) -> OpenFile:
        try:
            return self._fill_once(chunk, room_wait_s=room_wait_s)
        except DiskFull:
            # The disk is shorter than the cache's limit: cached chunks are what can go.
            if not self._cache.shrink(SHRINK_CHUNKS * chunk.size_bytes):
                raise
            return self._fill_once(chunk, room_wait_s=room_wait_s)

    def _fill_once(self, chunk: ChunkRef, *, room_wait_s: float) -> OpenFile:
        self._cache.reserve(chunk.size_bytes, wait_s=room_wait_s)
        try:
            temp = self._reader.fetch(chunk, self._cache.new_temp)
        except BaseException:
            self._cache.unreserve(chunk.size_bytes)
            raise
        return self._cache.publish(chunk, temp)
