"""Which chunk of the cache is evicted: an order that withstands scans.

* A chunk that was only guessed at (read-ahead) is unread; these get a quarter of the cache.
* A chunk read in one visit is on probation, and a random one of those goes first: a scan that is
  larger than the cache then still hits part of it the next time.
* One that is visited again later is protected; these get up to four fifths, and go by last use.

No disk, no lock: its owner has one.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

from cold_tier.ranged_reader import ChunkKey

PROTECTED_SHARE: Final = 0.8
UNREAD_SHARE: Final = 0.25
PICKS: Final = 4
VISIT_FILLS: Final = 32  # so many fills later, a hit is another visit and not the same reader still


class _Place:
    __slots__ = ("last_fill", "protected", "read", "size_bytes", "slot")

    def __init__(self, size_bytes: int, *, fill: int) -> None:
        self.size_bytes, self.last_fill = size_bytes, fill
        self.read = self.protected = False
        self.slot = -1  # where it stands among those on probation


class EvictionOrder:
    def __init__(self, limit_bytes: int) -> None:
        self._limit_bytes = limit_bytes
        self._places: dict[ChunkKey, _Place] = {}
        self._unread: OrderedDict[ChunkKey, None] = OrderedDict()
        self._probation: list[ChunkKey] = []
        self._protected: OrderedDict[ChunkKey, None] = OrderedDict()
        self._unread_bytes = self._protected_bytes = 0
        self._fills = 0

    def add(self, key: ChunkKey, size_bytes: int, *, filled: bool = True) -> None:
        """A chunk that nobody has read yet. `filled`: just now, not by an earlier process."""
        self._fills += filled
        self._places[key] = _Place(size_bytes, fill=self._fills)
        self._unread[key] = None
        self._unread_bytes += size_bytes
        while self._unread_bytes > self._limit_bytes * UNREAD_SHARE and len(self._unread) > 1:
            # The guess that it would be read was wrong, or too early.
            given_up = next(iter(self._unread))
            self._mark_read(given_up, self._places[given_up])

    def touch(self, key: ChunkKey) -> None:
        """A chunk was read."""
        place = self._places[key]
        if not place.read:
            self._mark_read(key, place)
        elif place.protected:
            self._protected.move_to_end(key)
        elif self._fills - place.last_fill >= min(VISIT_FILLS, len(self._places) // 2 + 1):
            self._protect(key, place)
        place.last_fill = self._fills

    def remove(self, key: ChunkKey) -> None:
        place = self._places.pop(key)
        if not place.read:
            del self._unread[key]
            self._unread_bytes -= place.size_bytes
        elif place.protected:
            del self._protected[key]
            self._protected_bytes -= place.size_bytes
        else:
            self._leave_probation(place)

    def victim(self, may_go: Callable[[ChunkKey], bool]) -> ChunkKey | None:
        """The next to be evicted, of those that may be."""
        for _ in range(PICKS if self._probation else 0):
            picked = random.choices(self._probation, k=2)
            older = min(picked, key=lambda key: self._places[key].last_fill)
            if may_go(older):
                return older
        for keys in (self._probation, self._unread, self._protected):
            for key in keys:
                if may_go(key):
                    return key
        return None

    def _mark_read(self, key: ChunkKey, place: _Place) -> None:
        place.read = True
        del self._unread[key]
        self._unread_bytes -= place.size_bytes
        self._to_probation(key, place)

    def _to_probation(self, key: ChunkKey, place: _Place) -> None:
        place.slot = len(self._probation)
        self._probation.append(key)

    def _leave_probation(self, place: _Place) -> None:
        last = self._probation.pop()
        if place.slot < len(self._probation):
            self._probation[place.slot] = last
            self._places[last].slot = place.slot
        place.slot = -1

    def _protect(self, key: ChunkKey, place: _Place) -> None:
        self._leave_probation(place)
        place.protected = True
        self._protected[key] = None
        self._protected_bytes += place.size_bytes
        most = self._limit_bytes * PROTECTED_SHARE
        while self._protected_bytes > most and len(self._protected) > 1:
            demoted, _ = self._protected.popitem(last=False)
            other = self._places[demoted]
            other.protected = False
            self._protected_bytes -= other.size_bytes
            self._to_probation(demoted, other)
