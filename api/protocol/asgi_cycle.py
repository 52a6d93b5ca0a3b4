"""One request and its response, as ASGI's `scope`, `receive` and `send`.

* A response's head is held back and sent with the first bytes of its body, in one packet.
* Besides ASGI's messages it takes those of the extension `http.response.zerocopysend` (`file`,
  `offset`, `count`, `more_body`; several per response).
* A client that closed its sending side is a disconnect to whoever waits for more of it, and still
  gets its response.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

import structlog

from tierlog.api.protocol.connection_state import Response
from tierlog.api.protocol.messages import BODILESS, CONTINUE, encode_head
from tierlog.api.protocol.service import ClientDisconnected, ResponseCutShort, Scope
from tierlog.api.serving.slice_sender import SMALL_BYTES
from tierlog.host.file_slice import FileSlice

if TYPE_CHECKING:
    from tierlog.api.protocol.connection import HttpConnection

log = structlog.get_logger(__name__)

SEND_FILE: Final = "http.response.zerocopysend"
_START: Final = "http.response.start"


class Cycle:
    """Belongs to the connection that parsed it, which calls `add_part`, `disconnect` and `wake`."""

    def __init__(
        self, connection: HttpConnection, scope: Scope, *, keep_alive: bool, awaits_100: bool
    ) -> None:
        self.scope, self._connection = scope, connection
        self.keep_alive = keep_alive  # whether another request may follow
        self.body = bytearray()  # received, and not taken yet
        self.more_body = True
        self._awaits_100 = awaits_100
        self._body_taken = False  # the application has received all of it
        self._waiter: asyncio.Future[None] | None = None
        self.disconnected = False
        self.response = Response.AWAITED
        self._head = b""  # not sent yet
        self._left: int | None = 0  # of the Content-Length; None if there is none
        self._chunked = False

    @property
    def is_unbounded(self) -> bool:
        """Whether the length was not announced: chunked or, in HTTP/1.0, ended by the close."""
        return self._left is None

    async def run_app(self, app: Any) -> None:
        try:
            await app(self.scope, self.receive, self.send)
            if not (self.response is Response.COMPLETE or self.disconnected):
                raise RuntimeError("the application returned without a complete response")
        except (ClientDisconnected, ResponseCutShort):
            pass  # neither is a defect
        except Exception as error:
            log.error("exception in the application", exc_info=error)
            await self._send_500()
        finally:
            if not (self.response is Response.COMPLETE or self.disconnected):
                self._connection.abort()

    async def _send_500(self) -> None:
        if self.response is Response.AWAITED and not self.disconnected:
            headers = [(b"content-length", b"0"), (b"connection", b"close")]
            await self.send({"type": _START, "status": 500, "headers": headers})
            await self.send({"type": "http.response.body"})

    # --- the request ----------------------------------------------------------------------------

    def add_part(self, part: bytes) -> None:
        self.body += part
        self.wake()

    def end_body(self, *, is_taken: bool = False) -> None:
        self.more_body, self._body_taken = False, is_taken
        self.wake()

    def disconnect(self) -> None:
        self.disconnected = True
        self.wake()

    def wake(self) -> None:
        """Something has come, or nothing can come any more."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def receive(self) -> Any:
        self._continue()
        while not (self._is_over() or self.body or self._body_is_whole()):
            self._connection.regulate()
            self._waiter = self._connection.loop.create_future()
            await self._waiter
        if self._is_over():
            return {"type": "http.disconnect"}
        body, more = self._take()
        return {"type": "http.request", "body": body, "more_body": more}

    def take_buffered(self) -> tuple[bytes | bytearray, bool] | None:
        """See `DirectBody`. None for a client that waits for 100 Continue."""
        is_ready = self.body or self._body_is_whole()
        if not is_ready or self.disconnected or self._awaits_100:
            return None
        return self._take()

    def _is_over(self) -> bool:
        return (
            self.disconnected
            or self.response is Response.COMPLETE
            or (self._body_taken and self._connection.is_at_end)
        )

    def _body_is_whole(self) -> bool:
        return not (self.more_body or self._body_taken)

    def _take(self) -> tuple[bytes | bytearray, bool]:
        body, self.body = self.body, bytearray()
        self._body_taken = not self.more_body
        self._connection.regulate()
        return body, self.more_body

    def _continue(self) -> None:
        transport = self._connection.transport
        if self._awaits_100 and not (self.disconnected or transport.is_closing()):
            self._awaits_100 = False
            transport.write(CONTINUE)

    # --- the response ---------------------------------------------------------------------------

    def resume(self, unsent_bytes: int) -> None:
        """The head and the first bytes were sent without this cycle."""
        self.response, self._left = Response.STARTED, unsent_bytes

    async def send(self, message: Any) -> None:
        """Raises ClientDisconnected if more of the body is to follow."""
        await self._connection.sender.until_writable()
        if self.disconnected:
            if message.get("more_body", False):
                raise ClientDisconnected
            return
        is_head = message["type"] == _START
        expected = Response.AWAITED if is_head else Response.STARTED
        if self.response is not expected:
            raise RuntimeError(f"{message['type']} while the response is {self.response.name}")
        if is_head:
            self._set_head(message["status"], message.get("headers", ()))
        elif message["type"] == SEND_FILE:
            await self._send_file(message)
        else:
            self._send_body(message.get("body", b""), more=message.get("more_body", False))

    def _set_head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        self.response = Response.STARTED
        if self._awaits_100 and self.more_body:
            self.keep_alive = False  # the client may or may not send the body (RFC 9110, 10.1.1)
        self._awaits_100 = False
        lines = [*self._connection.default_headers, *headers]
        given = dict(lines)
        if given.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append((b"connection", b"close"))
        length = given.get(b"content-length")
        if self.scope["method"] == "HEAD" or status in BODILESS:
            self._left = 0
        elif length is not None:
            self._left = int(length)
        else:
            self._left = None
            self._chunked = self.scope["http_version"] != "1.0"  # RFC 9112, 6.3
            if self._chunked:
                lines.append((b"transfer-encoding", b"chunked"))
        self._head = encode_head(status, lines)

    def _send_body(self, body: bytes, *, more: bool) -> None:
        if self.scope["method"] == "HEAD":
            body = b""
        self._count(len(body), more=more)
        if self._chunked:
            body = (b"%x\r\n%b\r\n" % (len(body), body) if body else b"") + (
                b"" if more else b"0\r\n\r\n"
            )
        transport, head, self._head = self._connection.transport, self._head, b""
        if len(body) <= SMALL_BYTES:
            transport.write(head + body)  # one send(2), not two
        else:
            transport.write(head)
            transport.write(body)
        if not more:
            self._complete()

    async def _send_file(self, message: Any) -> None:
        assert not self.is_unbounded, "files are sent with a Content-Length"
        more = message.get("more_body", False)
        count = 0 if self.scope["method"] == "HEAD" else message["count"]
        self._count(count, more=more)
        head, self._head = self._head, b""
        piece = FileSlice(message["file"], message.get("offset", 0), count)
        await self._connection.sender.send(head, piece)
        if not (more or self.disconnected):
            self._complete()

    def _count(self, size_bytes: int, *, more: bool) -> None:
        if self._left is None:
            return
        self._left -= size_bytes
        if self._left < 0 or (self._left and not more):
            raise RuntimeError("the response is longer or shorter than its Content-Length")

    def _complete(self) -> None:
        self.response = Response.COMPLETE
        self.wake()
        self._connection.response_ended(self)
