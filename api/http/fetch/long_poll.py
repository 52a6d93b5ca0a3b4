"""Waits until the high watermark advances, the deadline passes, or the client disconnects.

* A waiting request is an entry for each partition (`WaitingRequests`), a timer, and a task that
  waits for the disconnect. Entries stay from one wait to the next: a topic's tail has many, and
  each record wakes few.
* Used on the event loop only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

from tierlog.api.http.exchange import Exchange
from tierlog.api.serving.waiting_requests import WaitingRequests
from tierlog.broker.partition.partition import Partition


class AwaitedOffset(NamedTuple):
    """Wait for a high watermark above `offset`."""

    partition: Partition
    offset: int


class LongPoll:
    """The wait of one request in its task, at most `wait_ms`. A context manager."""

    def __init__(self, waiting: WaitingRequests, exchange: Exchange, *, wait_ms: int) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting, self._exchange = waiting, exchange
        self._deadline = self._loop.time() + wait_ms / 1000
        self._over = wait_ms <= 0
        self.cancelled = False  # the client has disconnected, or the server is stopping
        self._woken = asyncio.Event()
        self._cancels: dict[Partition, Callable[[], None]] = {}  # of the entries in `waiting`
        self._advanced: set[Partition] = set()  # those whose entries have ended
        self._watch: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None

    @property
    def over(self) -> bool:
        """The deadline has passed, or the wait was cancelled: respond with what there is."""
        return self._over or self._loop.time() >= self._deadline

    def listen(self) -> None:
        """Keep `cancelled` up to date from now on, even while nothing waits."""
        if self._watch is None:
            self._watch = self._loop.create_task(self._cancel_on_disconnect())
            self._waiting.add_cancel(self.cancel)

    async def wait(self, awaited: Iterable[AwaitedOffset]) -> None:
        """Return when one of the high watermarks is above its offset, or when `over`. It may return
        early for a partition that was awaited before, at a lower offset.
        """
        self.listen()
        if self._timer is None:
            self._timer = self._loop.call_at(self._deadline, self._end)
        for partition in self._advanced:
            self._cancels.pop(partition)()
        self._advanced.clear()
        self._woken.clear()
        for partition, offset in awaited:
            if partition not in self._cancels:
                self._cancels[partition] = self._waiting.wait_beyond(
                    partition, offset, partial(self._wake, partition)
                )
        if not self._over:
            await self._woken.wait()

    def wake(self) -> None:
        """Something else has happened."""
        self._woken.set()

    def _wake(self, partition: Partition) -> None:
        self._advanced.add(partition)
        self._woken.set()

    def restart(self, *, wait_ms: int) -> None:
        """Set a new deadline, unless the wait was cancelled."""
        self._deadline = self._loop.time() + wait_ms / 1000
        self._over = self.cancelled
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def cancel(self) -> None:
        """Stop waiting: the client has disconnected, or the server is stopping."""
        self.cancelled = True
        self._end()

    async def _cancel_on_disconnect(self) -> None:
        await self._exchange.wait_for_disconnect()
        self.cancel()

    def _end(self) -> None:
        self._over = True
        self._woken.set()

    def close(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
            self._waiting.discard_cancel(self.cancel)
        if self._timer is not None:
            self._timer.cancel()
        for cancel in self._cancels.values():
            cancel()

    def __enter__(self) -> LongPoll:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
