"""Responses rendered in memory, from when they are ready until their clients have read them.

A client that reads slowly, or not at all, must not cost the broker memory:

* The total size of unsent responses in memory is limited. One that does not fit is spilled to an
  unnamed file and sent from there; the kernel can reclaim its page cache. Until it is written, it
  counts as in flight: a disk may be slow.
* The total size of those files is limited too; beyond it a request is refused with 429.
* A small response is not counted: most of it fits into the socket's send buffer.
"""

from __future__ import annotations

import os
from concurrent.futures import Executor
from pathlib import Path
from typing import NamedTuple

import aiofiles.tempfile

from tierlog.api.http.exchange import Exchange, UnsentBytes
from tierlog.api.http.request.bodies import InflightBytes
from tierlog.api.http.responses import SMALL_BYTES, AnyResponse, FileResponse, Response
from tierlog.host.file_slice import FileSlice, OpenFile
from tierlog.record_format.errors import Throttled


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
        self.fd, self.name = -1, "an unsent response"
        self.fd = os.dup(fd)
