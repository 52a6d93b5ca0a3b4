"""Sends a range of a file to a socket, with a bounded number of bytes per turn.

* Only bytes in the page cache are sent on the event loop; a thread waits for the disk.
* `turn_bytes` limits a turn, and `send_scheduler` decides whose turn it is, so that large responses
  do not delay small ones.
* Nothing is buffered here: what the socket does not accept stays in the file.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Final

from tierlog.api.protocol.send_scheduler import SendScheduler
from tierlog.host import page_cache
from tierlog.host.page_cache import HasFileno

SMALL_BYTES: Final = 64 << 10  # up to this size a response does not wait for its turn


class FileSender:
    """One transfer of a range of a file to a socket."""

    __slots__ = (
        "_done",
        "_file",
        "_left",
        "_loop",
        "_position",
        "_queued",
        "_scheduler",
        "_sock",
        "_threads",
        "_turn_bytes",
        "_watching",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        file: HasFileno,
        *,
        position: int,
        size_bytes: int,
        turn_bytes: Callable[[], int],
        scheduler: SendScheduler,
        threads: Executor | None = None,
    ) -> None:
        self._loop, self._sock, self._file = loop, sock, file
        self._position, self._left = position, size_bytes
        self._turn_bytes, self._scheduler, self._threads = turn_bytes, scheduler, threads
        self._watching = self._queued = False
        self._done: asyncio.Future[None] = loop.create_future()

    async def run(self) -> None:
        """Return when everything is in the socket's buffer, or after `stop`.

        Raises ConnectionError if the client has disconnected, another OSError if the disk fails,
        and EOFError if the file is too short.
        """
        if self._scheduler.busy and self._left > SMALL_BYTES:
            self._on_writable()
        else:
            self._send_turn()  # immediately, with the head
        try:
            await self._done
        finally:
            self._unwatch()

    def stop(self) -> None:
        """The socket is about to be closed."""
        self._finish()

    def _on_writable(self) -> None:
        """Called in each iteration of the loop in which the socket is writable."""
        if not self._queued:
            self._queued = True
            self._scheduler.schedule(self._send_turn, self._loop)

    def _send_turn(self) -> int:
        """Send one window, after loading it if necessary. Returns how many bytes were sent now."""
        self._queued = False
        if self._done.done():
            return 0
        window = min(self._left, self._turn_bytes())
        try:
            resident = page_cache.is_resident(self._file.fileno(), self._position, window)
        except OSError as error:
            self._finish(error)
            return 0
        if resident:
            return self._send(window)
        self._load(window)
        return 0

    def _send(self, window: int) -> int:
        try:
            sent = os.sendfile(self._sock.fileno(), self._file.fileno(), self._position, window)
        except BlockingIOError:
            self._watch()
            return 0
        except OSError as error:
            # Otherwise the error is the socket's: the bytes are in memory.
            is_disk = error.errno == errno.EIO
            self._finish(error if is_disk else ConnectionResetError(str(error)))
            return 0
        self._position += sent
        self._left -= sent
        if not self._left:
            self._finish()
        elif not sent:
            self._finish(EOFError("the file is shorter than the announced range"))
        else:
            self._watch()
        return sent

    def _load(self, window: int) -> None:
        """Load the window in a thread, then send it without checking again."""
        self._unwatch()
        waiting = self._loop.run_in_executor(
            self._threads, page_cache.prefetch, self._file, self._position, window
        )

        def loaded(_: asyncio.Future[None]) -> None:
            error = None if waiting.cancelled() else waiting.exception()
            if self._done.done():
                return
            if error is None:
                self._send(window)
            else:
                self._finish(error)

        waiting.add_done_callback(loaded)

    def _watch(self) -> None:
        if not self._watching:
            self._watching = True
            self._loop.add_writer(self._sock.fileno(), self._on_writable)

    def _unwatch(self) -> None:
        if self._watching:
            self._watching = False
            self._loop.remove_writer(self._sock.fileno())

    def _finish(self, error: BaseException | None = None) -> None:
        self._unwatch()
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
