"""Responses that are written whole, from when they are ready until their clients have them.

A client that reads slowly, or not at all, must not cost the broker memory:

* The bytes of all such responses that wait in memory are limited. What does not fit waits in a file
  without a name, and is sent from there; the kernel can reclaim its page cache.
* The bytes that wait in files are limited too; beyond that a request is refused (429).
* A small response is not counted: most of it fits into the kernel's own buffer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

from api.http.answers import SMALL_BYTES, Answer, AnyAnswer, FileAnswer
from api.http.exchange import Exchange, Unsent
from record_format.errors import Throttled
from record_format.file_slice import FileSlice, OpenFile

InThread = Callable[[Callable[[], OpenFile]], Awaitable[OpenFile]]


class UnsentLimits(NamedTuple):
    memory_bytes: int = 64 << 20
    disk_bytes: int = 4 << 30


class UnsentAnswers:
    """Used only on the event loop. Files are created in `folder`."""

    def __init__(self, folder: Path, in_thread: InThread) -> None:
        self._folder, self._in_thread = folder, in_thread
        self.limits = UnsentLimits()
        self.held = Unsent()

    async def admitted(self, exchange: Exchange, answer: AnyAnswer) -> AnyAnswer:
        """The answer, or the same from a file. Raises Throttled. `sent` must follow.

        The caller must not keep a reference to `answer`, or its bytes stay in memory all the same.
        """
        if not isinstance(answer, Answer) or exchange.method == "HEAD":
            return answer
        size = len(answer.body)
        if size <= SMALL_BYTES:
            return answer
        if self.held.memory_bytes + size <= self.limits.memory_bytes:
            self._take(exchange, Unsent(memory_bytes=size))
            return answer
        if self.held.disk_bytes + size > self.limits.disk_bytes:
            raise Throttled(
                f"responses of {self.held.disk_bytes} bytes are waiting for slow readers"
            )
        self._take(exchange, Unsent(disk_bytes=size))
        try:
            file = await self._in_thread(partial(_NamelessFile, self._folder, answer.body))
        except OSError as error:
            raise Throttled(f"there is no room on disk for a response: {error.strerror}") from error
        return FileAnswer(answer.status, answer.headers, (FileSlice(file, 0, size),))

    def sent(self, exchange: Exchange) -> None:
        """The response went out, or its client is gone."""
        memory, disk = self.held
        self.held = Unsent(memory - exchange.unsent.memory_bytes, disk - exchange.unsent.disk_bytes)
        exchange.unsent = Unsent()

    def _take(self, exchange: Exchange, unsent: Unsent) -> None:
        memory, disk = self.held
        self.held = Unsent(memory + unsent.memory_bytes, disk + unsent.disk_bytes)
        exchange.unsent = unsent


class _NamelessFile(OpenFile):
    """Bytes on disk, or in the page cache, for as long as somebody sends them."""

    __slots__ = ()

    def __init__(self, folder: Path, data: bytes) -> None:
        self.fd, self.name = -1, "an answer on its way"
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(data)
            file.flush()
            self.fd = os.dup(file.fileno())
