"""The chunk cache's eviction policy: a segmented LRU that resists scans.

* A chunk that was only read ahead is unread; unread chunks get a quarter of the cache.
* A chunk read during one visit is on probation. Probation evicts first, at random, so that a scan
  larger than the cache still hits part of it the next time.
* A chunk visited again later is protected. Protected chunks get up to four fifths of the cache and
  are evicted in LRU order.

No I/O and no lock: the owner holds one.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from tierlog.cold_tier.ranged_reader import ChunkKey

PROTECTED_SHARE: Final = 0.8
UNREAD_SHARE: Final = 0.25
SAMPLES: Final = 4
VISIT_FILLS: Final = 32  # a hit after this many fills is a new visit, not the same reader


class _Entry:
    __slots__ = ("is_protected", "is_read", "last_fill", "probation_index", "size_bytes")

    def __init__(self, size_bytes: int, *, fill: int) -> None:
        self.size_bytes, self.last_fill = size_bytes, fill
        self.is_read = self.is_protected = False
        self.probation_index = -1


class EvictionPolicy:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._entries: dict[ChunkKey, _Entry] = {}
        self._unread: OrderedDict[ChunkKey, None] = OrderedDict()
        self._probation: list[ChunkKey] = []
        self._protected: OrderedDict[ChunkKey, None] = OrderedDict()
        self._unread_bytes = self._protected_bytes = 0
        self._fills = 0

    def add_chunk(self, key: ChunkKey, size_bytes: int, *, is_new: bool = True) -> None:
        """Add an unread chunk. `is_new` is false for a chunk left by an earlier process."""
        self._fills += is_new
        self._entries[key] = _Entry(size_bytes, fill=self._fills)
        self._unread[key] = None
        self._unread_bytes += size_bytes
        while self._unread_bytes > self._limit_bytes * UNREAD_SHARE and len(self._unread) > 1:
            # The oldest unread chunk was read ahead in vain, or too early.
            oldest = next(iter(self._unread))
            self._mark_read(oldest, self._entries[oldest])

    def touch(self, key: ChunkKey) -> None:
        """Note that a chunk was read."""
        entry = self._entries[key]
        if not entry.is_read:
            self._mark_read(key, entry)
        elif entry.is_protected:
            self._protected.move_to_end(key)
        elif self._fills - entry.last_fill >= min(VISIT_FILLS, len(self._entries) // 2 + 1):
            self._protect(key, entry)
        entry.last_fill = self._fills

    def remove(self, key: ChunkKey) -> None:
        entry = self._entries.pop(key)
        if not entry.is_read:
            del self._unread[key]
            self._unread_bytes -= entry.size_bytes
        elif entry.is_protected:
            del self._protected[key]
            self._protected_bytes -= entry.size_bytes
        else:
            self._leave_probation(entry)

    def victim(self, is_evictable: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The next chunk to evict among those that are evictable; None if there is none."""
        for _ in range(SAMPLES if self._probation else 0):
            sampled = random.choices(self._probation, k=2)
            older = min(sampled, key=lambda key: self._entries[key].last_fill)
            if is_evictable(older):
                return older
        for keys in (self._probation, self._unread, self._protected):
            for key in keys:
                if is_evictable(key):
                    return key
        return None

    def _mark_read(self, key: ChunkKey, entry: _Entry) -> None:
        entry.is_read = True
        del self._unread[key]
        self._unread_bytes -= entry.size_bytes
        self._put_on_probation(key, entry)

    def _put_on_probation(self, key: ChunkKey, entry: _Entry) -> None:
        entry.probation_index = len(self._probation)
        self._probation.append(key)

    def _leave_probation(self, entry: _Entry) -> None:
        last = self._probation.pop()
        if entry.probation_index < len(self._probation):
            self._probation[entry.probation_index] = last
            self._entries[last].probation_index = entry.probation_index
        entry.probation_index = -1

    def _protect(self, key: ChunkKey, entry: _Entry) -> None:
        self._leave_probation(entry)
        entry.is_protected = True
        self._protected[key] = None
        self._protected_bytes += entry.size_bytes
        limit_bytes = self._limit_bytes * PROTECTED_SHARE
        while self._protected_bytes > limit_bytes and len(self._protected) > 1:
            demoted, _ = self._protected.popitem(last=False)
            other = self._entries[demoted]
            other.is_protected = False
            self._protected_bytes -= other.size_bytes
            self._put_on_probation(demoted, other)
