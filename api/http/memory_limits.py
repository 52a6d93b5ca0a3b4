"""The memory that requests and their responses may take, of all clients together: bodies that
arrived, records being decoded, and responses that wait for their clients.

* For records that are decoded and written as text everybody waits for a turn, in the order of
  asking, before anything is built. A page is built in a moment, and then counts as an unsent
  response. The text of a large record is made as its client reads: such streams get at most half,
  so that clients which do not read keep nobody from a page. So does what was produced and
  expands to more than `EXPANDED_BYTES`, which is found out by trying, and text that has more.
* A client that reads slowly, or not at all, must not cost the broker memory. A response that does
  not fit is spilled to an unnamed file and sent from there; the kernel can reclaim its page cache.
  Until it is written, it counts as in flight: a disk may be slow. The files are limited too; beyond
  that a request is refused with 429. A small response is not counted: most of it fits into the
  socket's send buffer.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Executor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

import aiofiles.tempfile

from tierlog.api.http.exchange import Exchange, UnsentBytes
from tierlog.api.http.responses import SMALL_BYTES, AnyResponse, FileResponse, Response
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.record_format.errors import RequestTooLarge, Throttled

PAGE_BASE_BYTES = 64 << 20  # of any page: an expanded batch, and the positions of its fields
EXPANDED_BYTES = 32 << 20  # of a produced batch or body: so much expands without a turn
PAGE_FACTOR = 8  # of the records of a page: themselves, and their text


class InflightBytes:
    """The bytes in memory of request bodies, of what they expand to until it is appended, of
    appends that are not awaited, and of responses that wait for their file. Thread-safe.
    """

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._lock = limit_bytes, threading.Lock()
        self.held = 0

    def acquire(self, size_bytes: int) -> None:
        """Raises Throttled beyond the limit. A single request is always admitted."""
        with self._lock:
            if self.held and self.held + size_bytes > self._limit:
                raise Throttled(f"requests in progress already hold {self.held} bytes; try again")
            self.held += size_bytes

    @contextmanager
    def holding_beside(self, body_bytes: int, size_bytes: int) -> Iterator[None]:
        """Hold what a request takes beside its body, which is held. Raises Throttled, and
        RequestTooLarge if even alone it is beyond the limit.
        """
        if (whole := body_bytes + size_bytes) > self._limit and size_bytes:
            raise RequestTooLarge(
                f"the body takes {whole} bytes in memory; the limit of all requests together is "
                f"{self._limit}",
                limit_bytes=self._limit,
                size_bytes=whole,
            )
        self.acquire(size_bytes)
        try:
            yield
        finally:
            self.release(size_bytes)

    def force(self, size_bytes: int) -> None:
        """As `acquire`, for what can no longer be refused."""
        with self._lock:
            self.held += size_bytes

    def release(self, size_bytes: int) -> None:
        with self._lock:
            self.held -= size_bytes


class DecodingMemory:
    def __init__(self, limit_bytes: int) -> None:
        self._all, half = _Queue(limit_bytes), limit_bytes // 2
        self._streams, self._expansions = _Queue(half), _Queue(half)

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

    @asynccontextmanager
    async def for_expansion(self, size_bytes: int) -> AsyncIterator[None]:
        """For what was produced and takes `size_bytes` once it is expanded and parsed."""
        async with self._expansions.holding(size_bytes), self._all.holding(size_bytes):
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


class UnsentLimits(NamedTuple):
    memory_bytes: int = 64 << 20
    disk_bytes: int = 4 << 30


class UnsentResponses:
    """Used only on the event loop. Spill files are created in `folder`."""

    def __init__(self, folder: Path, threads: Executor, inflight: InflightBytes) -> None:
        self._folder, self._threads, self._inflight = folder, threads, inflight
        self.limits = UnsentLimits()
        self.held = UnsentBytes()

    async def admit(self, exchange: Exchange, response: AnyResponse) -> AnyResponse:
        """Return the response, or the same body spilled to a file. Raises Throttled.

        Call `release` afterwards, and keep no reference to `response`: its bytes would stay in
        memory.
        """
        if not isinstance(response, Response) or exchange.method == "HEAD":
            return response
        size = len(response.body)
        if size <= SMALL_BYTES:
            return response
        if self.held.memory_bytes + size <= self.limits.memory_bytes:
            self._hold(exchange, UnsentBytes(memory_bytes=size))
            return response
        if self.held.disk_bytes + size > self.limits.disk_bytes:
            raise Throttled(
                f"{self.held.disk_bytes} bytes of responses are already waiting for slow readers"
            )
        self._inflight.acquire(size)
        self._hold(exchange, UnsentBytes(disk_bytes=size))
        try:
            file = await self._written(response.body)
        except OSError as error:
            raise Throttled(f"no room on disk to hold the response: {error.strerror}") from error
        finally:
            self._inflight.release(size)
        return FileResponse(response.status, response.headers, (FileSlice(file, 0, size),))

    async def _written(self, body: bytes) -> OpenFile:
        async with aiofiles.tempfile.TemporaryFile(
            dir=self._folder, executor=self._threads
        ) as file:
            await file.write(body)
            await file.flush()
            return _UnnamedFile(file.fileno())

    def release(self, exchange: Exchange) -> None:
        """The response was sent, or its client disconnected."""
        memory, disk = self.held
        unsent, exchange.unsent = exchange.unsent, UnsentBytes()
        self.held = UnsentBytes(memory - unsent.memory_bytes, disk - unsent.disk_bytes)

    def _hold(self, exchange: Exchange, unsent: UnsentBytes) -> None:
        memory, disk = self.held
        self.held = UnsentBytes(memory + unsent.memory_bytes, disk + unsent.disk_bytes)
        exchange.unsent = unsent


class _UnnamedFile(OpenFile):
    """A file that exists for as long as somebody sends it."""

    __slots__ = ()

    def __init__(self, fd: int) -> None:
        self._hold(os.dup(fd), "an unsent response")
