"""A time-out that every request moves and that rarely fires: moving it creates no timer.

The loop's timer fires at the time it was set for, and is then set again for the time to which the
time-out was moved meanwhile.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_time` once, `after_s` seconds after the last `set`, unless it was cleared."""

    __slots__ = ("_due_s", "_loop", "_on_time", "_timer")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_time: Callable[[], object]) -> None:
        self._loop, self._on_time = loop, on_time
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None

    def set(self, after_s: float) -> None:
        self._due_s = self._loop.time() + after_s
        if self._timer is None:
            self._timer = self._loop.call_later(after_s, self._ring)

    def clear(self) -> None:
        self._due_s = None

    def stop(self) -> None:
        """For good: nothing keeps a reference to the connection afterwards."""
        self._due_s, self._on_time = None, _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _ring(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        left_s = self._due_s - self._loop.time()
        if left_s > 0:
            self._timer = self._loop.call_later(left_s, self._ring)
        else:
            self._due_s = None
            self._on_time()


def _nothing() -> None:
    return
