"""Receives the rest of a request's body from the socket directly into its final buffer.

Between the socket and a handler, uvicorn copies a body four times: into the loop's buffer, into
the parser's piece, into the queue of pieces, and into the joined body. Here the kernel's copy is
the only one.

* Bytes are read as they arrive, at most `TURN_BYTES` per iteration of the loop.
* No more is read than the buffer can hold: what follows the body is the next request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final

from tierlog.api.serving.deadline import Deadline

TURN_BYTES: Final = 1 << 20


class BodyReceiver:
    """Fills one buffer. `on_bytes` is called with the total number of bytes so far; it may raise
    to stop.
    """

    __slots__ = (
        "_done",
        "_idle",
        "_idle_s",
        "_loop",
        "_on_bytes",
        "_received",
        "_sock",
        "_view",
        "_watching",
    )

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        view: memoryview,
        *,
        idle_s: float,
        on_bytes: Callable[[int], None],
    ) -> None:
        self._loop, self._sock, self._view = loop, sock, view
        self._idle_s, self._on_bytes = idle_s, on_bytes
        self._received, self._watching = 0, False
        self._idle = Deadline(loop, self._timed_out)
        self._done: asyncio.Future[None] = loop.create_future()

    async def receive_all(self) -> None:
        """Return when the buffer is full.

        Raises TimeoutError if nothing arrives for `idle_s`, ConnectionError if the client
        disconnects, and what `on_bytes` raises.
        """
        self._read()  # often the rest of the body has already arrived
        if not self._done.done():
            self._idle.set(self._idle_s)
            self._watching = True
            self._loop.add_reader(self._sock.fileno(), self._read)
        try:
            await self._done
        finally:
            self._unwatch()

    def stop(self) -> None:
        """The socket is about to be closed."""
        self._finish(ConnectionAbortedError("the connection was closed"))

    def _read(self) -> None:
        try:
            count = self._sock.recv_into(self._view[self._received : self._received + TURN_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(ConnectionResetError(str(error)))
            return
        self._received += count
        if self._received == len(self._view):
            self._finish()
        elif not count:
            self._finish(ConnectionResetError("the client disconnected before the body's end"))
        else:
            self._continue()

    def _continue(self) -> None:
        self._idle.set(self._idle_s)
        try:
            self._on_bytes(self._received)
        except Exception as error:  # noqa: BLE001  raised by `receive_all`
            self._finish(error)

    def _timed_out(self) -> None:
        self._finish(TimeoutError())

    def _unwatch(self) -> None:
        self._idle.stop()
        if self._watching:
            self._watching = False
            self._loop.remove_reader(self._sock.fileno())

    def _finish(self, error: BaseException | None = None) -> None:
        self._unwatch()
        if self._done.done():
            return
        if error is None:
            self._done.set_result(None)
        else:
            self._done.set_exception(error)
