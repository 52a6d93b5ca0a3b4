"""Cancels requests of the asynchronous client only where httpx's connection pool tolerates it.

* A request that is cancelled while it waits for a connection, sends, or reads may occupy its slot
  in the pool for ever (httpcore issue 1093), until none is left. One that waits for the response's
  head does not.
* So each request is a task of its own. Its caller is cancelled at once; the request when it waits
  for the head, or else it runs to its end.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Final, TypeVar

T = TypeVar("T")

Trace = Callable[[str, object], Coroutine[Any, Any, None]]
AWAITING_HEAD: Final = "http11.receive_response_headers.started"


class CancellableRequests:
    """The requests of one client."""

    def __init__(self) -> None:
        self._abandoned: set[asyncio.Task[Any]] = set()

    async def run(
        self, send: Callable[[Trace], Coroutine[Any, Any, T]], on_end: Callable[[], None]
    ) -> T:
        """Return the result of `send`, which gives its argument to httpx as extension `trace`."""
        request = _TracedRequest()
        task = asyncio.create_task(send(request.trace))
        task.add_done_callback(lambda _: on_end())
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            self._abandoned.add(task)
            task.add_done_callback(self._abandoned.discard)
            request.abandon(task)
            raise

    async def stop(self) -> None:
        """Cancel the abandoned requests; the connection pools must be closed."""
        for task in self._abandoned:
            task.cancel()
        await asyncio.gather(*self._abandoned, return_exceptions=True)


class _TracedRequest:
    def __init__(self) -> None:
        self._awaits_head = self._is_abandoned = False

    async def trace(self, event: str, _: object) -> None:
        self._awaits_head = event == AWAITING_HEAD
        if self._awaits_head and self._is_abandoned:
            raise asyncio.CancelledError

    def abandon(self, task: asyncio.Task[Any]) -> None:
        self._is_abandoned = True
        if self._awaits_head:
            task.cancel()
