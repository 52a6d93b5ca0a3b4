"""The memory for records that are decoded and written as text, of all requests together.

* Who needs some waits for its turn, in the order of asking, before anything is built.
* A page is built in a moment, and then counts as an unsent response. The text of a large record is
  made as its client reads: such streams get at most half, so that clients which do not read keep
  nobody from a page.
* Used only on the event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

PAGE_BASE_BYTES = 64 << 20  # of any page: an expanded batch, and the positions of its fields
PAGE_FACTOR = 8  # of the records of a page: themselves, and their text


class DecodingMemory:
    def __init__(self, limit_bytes: int) -> None:
        self._all, self._streams = _Queue(limit_bytes), _Queue(limit_bytes // 2)

    @property
    def held(self) -> int:
        return self._all.held

    @asynccontextmanager
    async def for_page(self, max_bytes: int) -> AsyncIterator[None]:
        """For a page of records of at most `max_bytes`."""
        async with self._all.holding(PAGE_BASE_BYTES + PAGE_FACTOR * max_bytes):
            yield

    @asynccontextmanager
    async def for_stream(self, size_bytes: int) -> AsyncIterator[None]:
        async with self._streams.holding(size_bytes), self._all.holding(size_bytes):
            yield


class _Queue:
    """A limit on bytes held. What is larger than the limit takes all of it."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self.held = limit_bytes, 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def holding(self, size_bytes: int) -> AsyncIterator[None]:
        size_bytes = min(size_bytes, self._limit)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((size_bytes, turn))
        self._admit()
        try:
            await turn
            yield
        finally:
            if turn.done() and not turn.cancelled():
                self.held -= size_bytes
            self._admit()

    def _admit(self) -> None:
        while self._waiting:
            size_bytes, turn = self._waiting[0]
            if not turn.cancelled():
                if self.held + size_bytes > self._limit:
                    return
                self.held += size_bytes
                turn.set_result(None)
            self._waiting.popleft()
