"""Waiting for threads: the task continues in the next turn of the event loop.

`wrap_future` takes one turn more and `gather` another, and in each turn all others are served: with
them, beside readers that keep a core busy, a durable produce takes half as long again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from contextvars import Context
from typing import Any


class AllCompleted:
    """Awaited once, by a task: all of the futures have ended, in whatever way.

    It has as much of asyncio's future (`asyncio.isfuture`) as a task needs. If the task is
    cancelled, futures that still wait in a queue are taken out of it. The futures keep a reference
    to this for ever, so it drops them in the end: otherwise the files in a result would stay open
    until the garbage collector runs.
    """

    _asyncio_future_blocking = False  # asyncio's own mark: true while a task waits for this

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        assert futures, "or nobody would end the wait"
        self._futures, self._count = futures, itertools.count(1)
        self._last = len(futures)
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    def __await__(self) -> Generator[AllCompleted, None, None]:
        self._asyncio_future_blocking = True
        yield self

    # --- what the task asks of a future -----------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(
        self, go_on: Callable[[AllCompleted], object], *, context: Context
    ) -> None:
        self._go_on: Callable[[AllCompleted], object] | None = go_on
        self._context = context
        for future in self._futures:
            future.add_done_callback(self._one_ended)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002  asyncio's signature
        self._is_cancelled = True
        for future in self._futures:
            future.cancel()
        self._loop.call_soon(self._wake, context=self._context)
        return True

    def result(self) -> None:
        futures, self._futures = self._futures, ()
        if self._is_cancelled or any(future.cancelled() for future in futures):
            raise asyncio.CancelledError

    # --- in the thread, and back ------------------------------------------------------------------

    def _one_ended(self, _: Future[Any]) -> None:
        # `next` is atomic: exactly one of many threads comes last.
        if next(self._count) == self._last:
            try:
                self._loop.call_soon_threadsafe(self._wake, context=self._context)
            except RuntimeError:  # the loop is closed: the server has stopped
                assert self._loop.is_closed()

    def _wake(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:  # else it was cancelled, and the thread ended later
            go_on(self)
