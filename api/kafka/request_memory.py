"""The memory that the requests of all Kafka clients may take together, from the first bytes of a
frame until its answer is ready.

A frame that does not fit waits, first come first served, and its connection is not read meanwhile:
Kafka's `queued.max.request.bytes`. Used on the event loop only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable


class RequestMemory:
    def __init__(self, limit_bytes: int) -> None:
        self._limit, self.held = limit_bytes, 0
        self._waiting: OrderedDict[object, tuple[int, Callable[[], None]]] = OrderedDict()

    def acquire(self, size_bytes: int, *, who: object, when_free: Callable[[], None]) -> bool:
        """Whether the bytes are there now; otherwise `when_free` is called once they are, and
        holds them. A single frame is always admitted.
        """
        if self._waiting or (self.held and self.held + size_bytes > self._limit):
            self._waiting[who] = (size_bytes, when_free)
            return False
        self.held += size_bytes
        return True

    def force(self, size_bytes: int) -> None:
        """For a small frame that is already here."""
        self.held += size_bytes

    def release(self, size_bytes: int) -> None:
        self.held -= size_bytes
        while self._waiting:
            who, (needed, when_free) = next(iter(self._waiting.items()))
            if self.held and self.held + needed > self._limit:
                return
            del self._waiting[who]
            self.held += needed
            when_free()

    def give_up(self, who: object) -> None:
        """Its connection has ended."""
        self._waiting.pop(who, None)
