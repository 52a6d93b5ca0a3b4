"""Where a request of the asynchronous client is cancelled: where httpx's pool can bear it.

* A request that is cancelled while it waits for its connection, sends, or reads may keep its place
  in the pool for ever (httpcore's issue 1093), until there is none left. One that waits for the
  head of its answer does not.
* So each request is a task of its own. Who waited for it is cancelled at once; the request is when
  it waits for the head, or else it ends by itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

Trace = Callable[[str, object], Coroutine[Any, Any, None]]
WAITS: Final = "http11.receive_response_headers.started"


class Requests:
    """Those of one client; `stop` ends what is left of them."""

    def __init__(self) -> None:
        self._unwanted: set[asyncio.Task[Any]] = set()

    async def run(
        self, send: Callable[[Trace], Coroutine[Any, Any, T]], at_end: Callable[[], None]
    ) -> T:
        """What `send` returns, which gives its argument to httpx."""
        request = _Request()
        task = asyncio.create_task(send(request.trace))
        task.add_done_callback(lambda _: at_end())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._unwanted.add(task)
            task.add_done_callback(self._unwanted.discard)
            request.give_up(task)
            raise

    async def stop(self) -> None:
        """For a client whose pools are closed."""
        for task in self._unwanted:
            task.cancel()
        await asyncio.gather(*self._unwanted, return_exceptions=True)


class _Request:
    def __init__(self) -> None:
        self._waits = self._is_unwanted = False

    async def trace(self, event: str, _: object) -> None:
        self._waits = event == WAITS
        if self._waits and self._is_unwanted:
            raise asyncio.CancelledError

    def give_up(self, task: asyncio.Task[Any]) -> None:
        self._is_unwanted = True
        if self._waits:
            task.cancel()
