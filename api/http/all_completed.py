"""Awaits futures of threads; the task continues in the next iteration of the event loop.

`asyncio.wrap_future` takes one more iteration and `gather` another, and each iteration serves all
other tasks: beside readers that keep a core busy, a durable produce then takes half as long again.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from contextvars import Context
from typing import Any


class AllCompleted:
    """Awaited once, by a task, until all futures are done: with a result, an error, or cancelled.

    Has the part of asyncio's future interface (`asyncio.isfuture`) that a task uses. If the task is
    cancelled, futures that have not started are cancelled too. The futures refer to this object for
    ever, so it drops its references to them at the end: otherwise files in a result would stay open
    until the garbage collector runs.
    """

    _asyncio_future_blocking = False  # asyncio's own flag: true while a task waits for this

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        assert futures, "without any, nothing would end the wait"
        self._futures, self._count = futures, itertools.count(1)
        self._last = len(futures)
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    def __await__(self) -> Generator[AllCompleted, None, None]:
        self._asyncio_future_blocking = True
        yield self

    # --- the interface that a task uses -----------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(
        self, callback: Callable[[AllCompleted], object], *, context: Context
    ) -> None:
        self._callback: Callable[[AllCompleted], object] | None = callback
        self._context = context
        for future in self._futures:
            future.add_done_callback(self._one_done)

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

    # --- from the futures' threads back to the loop -----------------------------------------------

    def _one_done(self, _: Future[Any]) -> None:
        # `next` is atomic: exactly one of several threads sees the last number.
        if next(self._count) == self._last:
            try:
                self._loop.call_soon_threadsafe(self._wake, context=self._context)
            except RuntimeError:  # the loop is closed: the server has stopped
                assert self._loop.is_closed()

    def _wake(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:  # else it was cancelled before the threads were done
            callback(self)
