"""Indexes of sealed segments in memory, within one limit for all logs.

* A small index (one block of a look-up) is cached on its first use, a larger one on its second: a
  single look-up does not read two megabytes.
* A cached index is trusted no more than its file: the batch at an indexed position is checked when
  it is used, and whoever replaces or renames the file calls `invalidate`.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from typing import Final

from tierlog.hot_tier.index_columns import IndexColumns

LIMIT_BYTES: Final = 32 << 20
SMALL_BYTES: Final = 4096
ENTRY_BYTES: Final = 512  # overhead of an entry: name, object, position in the order
ASKED_MAX: Final = 1024


class IndexCache:
    """Least recently used indexes by file name. Thread-safe."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._indexes: OrderedDict[str, IndexColumns] = OrderedDict()
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self.generation = 0  # counts invalidations
        self._lock = threading.Lock()

    def get(self, name: str) -> IndexColumns | None:
        with self._lock:
            columns = self._indexes.get(name)
            if columns is not None:
                self._indexes.move_to_end(name)
            return columns

    def should_cache(self, name: str, *, size_bytes: int) -> bool:
        """Whether the caller should read this file whole and `put` it."""
        if size_bytes <= SMALL_BYTES:
            return True
        with self._lock:
            if name in self._asked:
                return size_bytes <= self._limit_bytes // 4
            self._asked[name] = None
            if len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return False

    def put(self, name: str, columns: IndexColumns, *, generation: int | None = None) -> None:
        """`generation`: from before the file was opened; if it has changed since, the index may be
        stale and is not cached.
        """
        with self._lock:
            if generation not in (None, self.generation):
                return
            self._drop(name)
            self._indexes[name] = columns
            self._bytes += columns.size_bytes + ENTRY_BYTES
            while self._bytes > self._limit_bytes and len(self._indexes) > 1:
                self._drop(next(iter(self._indexes)))

    def invalidate(self, name: str) -> None:
        with self._lock:
            self.generation += 1
            self._asked.pop(name, None)
            self._drop(name)

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            self._indexes.clear()
            self._asked.clear()
            self._bytes = 0

    def _drop(self, name: str) -> None:
        columns = self._indexes.pop(name, None)
        if columns is not None:
            self._bytes -= columns.size_bytes + ENTRY_BYTES
