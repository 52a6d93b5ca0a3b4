"""Which connections may send file bytes in this iteration of the event loop.

* All large responses together may send `TURN_BYTES` per iteration, in FIFO order. The loop polls
  its sockets between iterations, so a small request waits for one such run of bytes rather than for
  one of every large response in progress.
* A sender that waits for its socket or its disk is not in the queue; it calls `schedule` when it is
  ready.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Final

TURN_BYTES: Final = 256 << 10

SendTurn = Callable[[], int]
"""Sends the bytes of one turn. Returns how many were sent."""


class SendScheduler:
    """Belongs to the event loop of one server."""

    __slots__ = ("_queue", "_scheduled")

    def __init__(self) -> None:
        self._queue: deque[SendTurn] = deque()
        self._scheduled = False

    @property
    def busy(self) -> bool:
        """Whether senders are waiting for their turn."""
        return bool(self._queue)

    def schedule(self, send: SendTurn, loop: asyncio.AbstractEventLoop) -> None:
        """Call `send` once, when it is its turn. It must not raise."""
        self._queue.append(send)
        if not self._scheduled:
            self._scheduled = True
            loop.call_soon(self._run, loop)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        sent = 0
        while self._queue and sent < TURN_BYTES:
            sent += self._queue.popleft()()
        self._scheduled = bool(self._queue)
        if self._scheduled:
            loop.call_soon(self._run, loop)
