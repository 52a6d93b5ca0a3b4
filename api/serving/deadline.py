"""A timer for how long a state of a connection may last."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Deadline:
    """Calls `on_expiry` once, `after_s` seconds after the last `set`, unless it was cleared.

    Every request postpones it, and it rarely expires: to postpone it makes no timer. The loop's
    timer fires when it was first due; if it has been postponed meanwhile, a new one is made for the
    rest.
    """

    __slots__ = ("_due_s", "_loop", "_on_expiry", "_timer", "_timer_s")

    def __init__(self, loop: asyncio.AbstractEventLoop, on_expiry: Callable[[], object]) -> None:
        self._loop, self._on_expiry = loop, on_expiry
        self._due_s: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_s = 0.0  # when it fires

    def set(self, after_s: float) -> None:
        self._due_s = self._loop.time() + after_s
        if self._timer is None or self._due_s < self._timer_s:
            self._start_timer(after_s)

    def clear(self) -> None:
        self._due_s = None

    def stop(self) -> None:
        """Cancel for good, and drop the callback, which refers to the connection."""
        self._due_s, self._on_expiry = None, _nothing
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _start_timer(self, after_s: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer_s = self._loop.time() + after_s
        self._timer = self._loop.call_later(after_s, self._fire)

    def _fire(self) -> None:
        self._timer = None
        if self._due_s is None:
            return
        left_s = self._due_s - self._loop.time()
        if left_s > 0:
            self._start_timer(left_s)
        else:
            self._due_s = None
            self._on_expiry()


def _nothing() -> None:
    return
