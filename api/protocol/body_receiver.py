"""The rest of a request's body, received from the socket straight into the body's buffer.

Between a socket and a handler, uvicorn copies a body four times: into the loop's buffer, into a
piece for the parser, into the pieces that wait, and into the whole. Here the kernel's copy is the
only one.

* Bytes are read as they come, at most `TURN_BYTES` in one turn of the loop.
* No more is read than the buffer has room for: what follows the body is the next request.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Final, Protocol

from api.protocol.deadline import Deadline

DIRECT_BODY: Final = "tierlog.body"  # among a scope's extensions: a `DirectBody`
TURN_BYTES: Final = 1 << 20


class DirectBody(Protocol):
    """The body of the request under way, past ASGI's messages."""

    def take_buffered_body(self) -> tuple[bytes | bytearray, bool] | None:
        """What came of it and was not taken yet, and whether more is to come; None if it has to be
        asked for by a message.
        """
        ...

    async def receive_into(
        self, view: memoryview, *, idle_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        """Fill a view that is as long as the rest of it. Raises what `BodyReceiver.run` does."""
        ...


class BodyReceiver:
    """Fills one buffer. `on_bytes` gets the total number of bytes so far, and may raise."""

    __slots__ = (
        "_came",
        "_done",
        "_idle",
        "_idle_s",
        "_loop",
        "_on_bytes",
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
        self._came, self._watching = 0, False
        self._idle = Deadline(loop, self._is_late)
        self._done: asyncio.Future[None] = loop.create_future()

    async def run(self) -> None:
        """Return when the buffer is full.

        Raises TimeoutError if nothing came for `idle_s`, ConnectionError if the client is gone, and
        what `on_bytes` raises.
        """
        self._read()  # often the rest of the body is already there
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
            count = self._sock.recv_into(self._view[self._came : self._came + TURN_BYTES])
        except BlockingIOError:
            return
        except OSError as error:
            self._finish(ConnectionResetError(str(error)))
            return
        self._came += count
        if self._came == len(self._view):
            self._finish()
        elif not count:
            self._finish(ConnectionResetError("the client disconnected within the body"))
        else:
            self._go_on()

    def _go_on(self) -> None:
        self._idle.set(self._idle_s)
        try:
            self._on_bytes(self._came)
        except Exception as error:  # noqa: BLE001  raised where it is waited for
            self._finish(error)

    def _is_late(self) -> None:
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
