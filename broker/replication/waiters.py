"""Callbacks that wait for a partition's high watermark to pass an offset.

`wake` calls each due callback once, in the thread of its caller, unless it was cancelled; a
cancelled callback may still be running. No callback runs under the lock. Thread-safe.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Waiters:
    __slots__ = ("_lock", "_next", "_waiting")

    def __init__(self) -> None:
        self._waiting: dict[int, tuple[int, Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._next = 0

    def add_waiter(self, offset: int, callback: Callable[[], None]) -> Callable[[], bool]:
        """Returns a function that cancels the callback; it returns False if that was too late."""
        with self._lock:
            self._next += 1
            key = self._next
            self._waiting[key] = (offset, callback)

        def cancel() -> bool:
            with self._lock:
                return self._waiting.pop(key, None) is not None

        return cancel

    def wake(self, high_watermark: int) -> None:
        """Call the callbacks that wait for an offset below `high_watermark`."""
        if not self._waiting:
            return
        with self._lock:
            due = [key for key, (offset, _) in self._waiting.items() if offset < high_watermark]
            callbacks = [self._waiting.pop(key)[1] for key in due]
        for callback in callbacks:
            callback()
