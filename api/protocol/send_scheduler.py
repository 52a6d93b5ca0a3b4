"""Who may send bytes of a file in this turn of the event loop.

* All large responses together get `TURN_BYTES` in one turn, first come first served: between two
  turns the loop looks at its sockets, so a small request waits for one run of bytes and not for one
  of every large response under way.
* A sender that is not in the queue is waiting for its socket or its disk, and says when it is
  ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_BYTES: Final = 256 << 10

SendTurn = Callable[[], int]
"""Sends what one turn allows. Returns how many bytes that were."""


class SendScheduler:
    """Belongs to the event loop of one server."""

    __slots__ = ("_queue", "_scheduled")

    def __init__(self) -> None:
        self._queue: deque[SendTurn] = deque()
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Whether somebody else is waiting for a turn."""
        return bool(self._queue)

    def schedule(self, send: SendTurn, loop: asyncio.AbstractEventLoop) -> None:
        """Call `send` once, when its turn comes. It must not raise."""
        self._queue.append(send)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._turn, loop)

    def _turn(self, loop: asyncio.AbstractEventLoop) -> None:
        sent = 0
        while self._queue and sent < TURN_BYTES:
            sent += self._queue.popleft()()
        self._scheduled = bool(self._queue)
        if self._scheduled:
            loop.call_soon(self._turn, loop)
