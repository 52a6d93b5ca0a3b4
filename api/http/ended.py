"""Waiting for threads: the task goes on in the next turn of the event loop.

`wrap_future` takes one turn more and `gather` another, in each of which all others are served:
beside readers that keep a core busy, a durable produce takes half as long again with them.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Generator
from concurrent.futures import Future
from contextvars import Context
from typing import Any


class Ended:
    """To be awaited, once, by a task: all of the futures have ended, however they did.

    As much of asyncio's future (`asyncio.isfuture`) as a task needs. What waits in a queue when the
    task is cancelled is taken out of it. The futures know this for ever, and so are let go of in
    the end: else the files that one gave would stay open until the garbage collector comes.
    """

    _asyncio_future_blocking = False  # asyncio's own mark: true once a task is to wait for this

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        assert futures, "or nobody would end the wait"
        self._futures, self._count = futures, itertools.count(1)
        self._last = len(futures)
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    def __await__(self) -> Generator[Ended, None, None]:
        self._asyncio_future_blocking = True
        yield self

    # --- what the task asks of a future -----------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(self, go_on: Callable[[Ended], object], *, context: Context) -> None:
        self._go_on: Callable[[Ended], object] | None = go_on
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
        # The count is one step of the interpreter: of many threads one comes last.
        if next(self._count) == self._last:
            try:
                self._loop.call_soon_threadsafe(self._wake, context=self._context)
            except RuntimeError:  # the loop is closed: the server has stopped
                assert self._loop.is_closed()

    def _wake(self) -> None:
        go_on, self._go_on = self._go_on, None
        if go_on is not None:  # else it was cancelled, and the thread ended later
            go_on(self)
