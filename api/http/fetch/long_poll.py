"""Waiting for the high watermark: woken by it, by the deadline, or by the client's leaving.

No thread and no polling: a waiting request is an entry in `watermarks`, a timer, and a task that
listens for the end of the connection.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import NamedTuple

from api.http.context import Context
from api.http.exchange import Exchange
from broker.partition import Partition


class AwaitedOffset(NamedTuple):
    """Wait for a high watermark above `offset`."""

    partition: Partition
    offset: int


class LongPoll:
    """How long one request waits. A context manager; on the event loop."""

    def __init__(self, context: Context, exchange: Exchange, *, wait_ms: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._context, self._exchange = context, exchange
        self._deadline = self._loop.time() + wait_ms / 1000
        self._over = wait_ms <= 0
        self.left = False  # the client has left, or the server is about to stop
        self._woken = asyncio.Event()
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """The time is up, or the client has left: answer with what there is."""
        return self._over or self._loop.time() >= self._deadline

    def listen(self) -> None:
        """From now on `left` is kept up to date, whether anything is waited for or not."""
        if self._watch is None:
            self._watch = self._exchange.watch_disconnect(self.leave)
            self._context.add_waiting(self.leave)

    async def wait(self, beyonds: Iterable[AwaitedOffset]) -> None:
        """Return when one of the high watermarks is above its offset, or `over`."""
        self.listen()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._end)
        self._woken.clear()
        watermarks = self._context.watermarks
        cancels = [watermarks.wait_beyond(*beyond, self._woken.set) for beyond in beyonds]
        try:
            if not self._over:
                await self._woken.wait()
        finally:
            for cancel in cancels:
                cancel()

    def restart(self, *, wait_ms: int) -> None:
        """Wait for the same time once more, unless the client left."""
        self._deadline = self._loop.time() + wait_ms / 1000
        self._over = self.left
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def leave(self) -> None:
        """The client is gone, or the server is stopping: stop waiting."""
        self.left = True
        self._end()

    def _end(self) -> None:
        self._over = True
        self._woken.set()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._context.remove_waiting(self.leave)
        if self._timer is not None:
            self._timer.cancel()

    def __enter__(self) -> LongPoll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
