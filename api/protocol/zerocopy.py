"""Zero copy in both directions: uvicorn's HTTP/1.1 protocol with `sendfile` for responses, and with
request bodies received directly into their final buffers.

Takes the messages of the ASGI extension `http.response.zerocopysend` (`file`, `offset`, `count`,
`more_body`; several per response). On plain connections it also offers `DIRECT_BODY`, which
`bodies` uses.

Rules:

* A response's head is held back and sent with the first bytes of its body, in one packet.
* There is one writer at a time: whatever the transport has buffered is written first, and nothing
  else is written while a `FileSender` runs.
* The socket is used through a duplicate of its descriptor, since both asyncio and uvloop refuse
  `add_writer` on a transport's descriptor. Under TLS, and without a descriptor left, a thread reads
  the file, `TURN_BYTES` at a time, and the transport sends it.
* If a file is shorter than announced, or a send fails, the connection is aborted: a client may see
  a short response, never wrong bytes.
* A response sends at most `TURN_BYTES` per iteration of the loop while other requests are in
  progress.
* A client that closes its sending side still gets the responses to its complete requests.
* While a body is received directly, the transport does not read. The parser does not see those
  bytes, so the next request gets a new parser; after an incomplete body no request follows.

This relies on internals of uvicorn's `HttpToolsProtocol`; `tests/unit/api/test_zerocopy.py` lists
them.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from uvicorn.protocols.http.httptools_impl import STATUS_LINE, RequestResponseCycle

from tierlog.api.protocol.body_receiver import DIRECT_BODY, BodyReceiver
from tierlog.api.protocol.errors import ClientDisconnected
from tierlog.api.protocol.file_sender import FileSender
from tierlog.api.protocol.limited_protocol import LimitedProtocol
from tierlog.api.protocol.no_upgrade_protocol import new_parser
from tierlog.api.protocol.send_scheduler import TURN_BYTES, SendScheduler
from tierlog.host.page_cache import HasFileno

SEND_FILE: Final = "http.response.zerocopysend"
ALONE_TURN_BYTES: Final = 2 << 20
SMALL_BODY_BYTES: Final = 64 << 10  # such a body is sent with its head: one send(2), not two
_BODILESS: Final = frozenset((204, 304))
_MSG_MORE: Final[int] = getattr(socket, "MSG_MORE", 0)


def encode_head(status: int, lines: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Encode a head as uvicorn does, in a third of the time. Names are lower case, as in ASGI."""
    head = STATUS_LINE[status] + b"".join([b"%b: %b\r\n" % line for line in lines]) + b"\r\n"
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2:
        raise RuntimeError("a response header contains a line break")
    return head


class ZeroCopyCycle(RequestResponseCycle):
    """One request and its response, on a connection that can send files."""

    protocol: ZeroCopyProtocol
    pending_head = b""
    body_taken = False  # the application has received the whole request body
    half_closed = False  # the client closed its sending side
    close_delimited = False  # no Content-Length, and HTTP/1.0 has no chunked coding (RFC 9112, 6.3)

    @property
    def is_unbounded(self) -> bool:
        """Whether the length was not announced: chunked or, in HTTP/1.0, close-delimited."""
        return self.chunked_encoding or self.close_delimited

    async def send(self, message: Any) -> None:
        """Raises ClientDisconnected if more of the body is to follow."""
        kind = message["type"]
        if self.disconnected and message.get("more_body", False):
            raise ClientDisconnected
        if self.close_delimited:
            self.expected_content_length = len(message.get("body", b""))
        if kind == SEND_FILE:
            await self._send_file(message)
        elif kind == "http.response.start" and not self.response_started:
            await self._set_head(message)
        elif not self.pending_head:
            await super().send(message)
        elif self._is_small_whole_body(message):
            head, self.pending_head = self.pending_head, b""
            if not self.disconnected:
                self.transport.write(head + message.get("body", b""))
                self.expected_content_length = 0
                self._complete()
        else:
            head, self.pending_head = self.pending_head, b""
            if not self.disconnected:
                self.transport.write(head)
            await super().send(message)

    async def _set_head(self, message: Any) -> None:
        if self.flow.write_paused and not self.disconnected:
            await self.flow.drain()
        if self.disconnected:
            return
        if self.waiting_for_100_continue and self.more_body:
            self.keep_alive = False  # the client may or may not send the body (RFC 9110, 10.1.1)
        self.response_started, self.waiting_for_100_continue = True, False
        self.pending_head = self._head(message["status"], message.get("headers", ()))
        if not self.keep_alive and self.more_body:
            self.keep_alive = True
            self.protocol.close_after_response()

    def _head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> bytes:
        lines = [*self.default_headers, *headers]
        given = dict(lines)
        if given.get(b"connection") == b"close":
            self.keep_alive = False
        elif not self.keep_alive:
            lines.append((b"connection", b"close"))
        length = given.get(b"content-length")
        if length is not None:
            self.expected_content_length = int(length)
        has_body = self.scope["method"] != "HEAD" and status not in _BODILESS
        is_open_ended = length is None and has_body
        self.close_delimited = is_open_ended and self.scope["http_version"] == "1.0"
        self.chunked_encoding = is_open_ended and not self.close_delimited
        if self.chunked_encoding:
            lines.append((b"transfer-encoding", b"chunked"))
        return encode_head(status, lines)

    def _is_small_whole_body(self, message: Any) -> bool:
        size = len(message.get("body", b""))
        return (
            message["type"] == "http.response.body"
            and not message.get("more_body", False)
            and not self.chunked_encoding
            and size <= SMALL_BODY_BYTES
            and size == self.expected_content_length
            and self.scope["method"] != "HEAD"
        )

    async def _send_file(self, message: Any) -> None:
        if self.disconnected:
            return
        assert self.response_started, "a response begins with its head"
        assert not self.chunked_encoding, "files are sent with a Content-Length"
        count = message["count"]
        head, self.pending_head = self.pending_head, b""
        if self.scope["method"] == "HEAD":
            count = self.expected_content_length = 0
        assert count <= self.expected_content_length, "no more than the Content-Length"
        self.expected_content_length -= count
        await self.protocol.send_file(
            head, message["file"], position=message.get("offset", 0), size_bytes=count
        )
        if not message.get("more_body", False) and not self.disconnected:
            self._complete()

    def _complete(self) -> None:
        """End a response as uvicorn does."""
        if self.expected_content_length:
            raise RuntimeError("Response content shorter than Content-Length")
        self.response_complete = True
        self.message_event.set()
        if not self.keep_alive:
            self.transport.close()
        self.on_response()

    async def receive(self) -> Any:
        """As uvicorn's, but without a copy of the body, and a half-close is a disconnect."""
        if self.waiting_for_100_continue and not (self.disconnected or self.transport.is_closing()):
            self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
            self.waiting_for_100_continue = False
        if not (self.disconnected or self.response_complete or self._reports_half_close):
            self.protocol.resume_reading()
            await self.message_event.wait()
            self.message_event.clear()
        if self.disconnected or self.response_complete or self._reports_half_close:
            return {"type": "http.disconnect"}
        body, more = self.take_body()
        return {"type": "http.request", "body": body, "more_body": more}

    def take_body(self) -> tuple[bytes | bytearray, bool]:
        body, self.body = self.body, bytearray()
        self.body_taken = not self.more_body
        return body, self.more_body

    @property
    def _reports_half_close(self) -> bool:
        return self.body_taken and self.half_closed


class ZeroCopyProtocol(LimitedProtocol):
    """The protocol with `sendfile`, direct bodies, and responses to half-closed clients."""

    threads: Executor | None = None
    scheduler: SendScheduler
    _is_plain = False  # not TLS: the socket may be used beside the transport
    _half_closed = False  # no request follows those in progress
    _sock: socket.socket | None = None  # a duplicate of the transport's
    _sending: FileSender | None = None
    _receiving: BodyReceiver | None = None

    # --- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self._extensions: dict[str, object] = {}
        raw = transport.get_extra_info("socket")
        self._is_plain = self.scheme == "http" and raw is not None
        if self._is_plain:
            self._extensions[DIRECT_BODY] = self

    def connection_lost(self, exc: Exception | None) -> None:
        active = self._active
        if active is not None and not active.response_complete:
            active.disconnected = True
            active.message_event.set()
        super().connection_lost(exc)
        if self._sending is not None:
            self._sending.stop()
        if self._receiving is not None:
            self._receiving.stop()
        self._extensions.clear()  # breaks the reference cycle with this protocol
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def eof_received(self) -> bool | None:  # type: ignore[override]
        """Keep our sending side open while complete requests wait for their responses."""
        active, last = self._active, self.cycle
        self._is_at_eof = True
        if not self._is_plain or active is None or active.response_complete:
            return None
        if active is last and last.more_body:
            return None
        if self._discards_input:
            return True  # the error response follows those in progress
        if last.more_body:
            self.pipeline.popleft()
            self.close_after_response()
        else:
            last.keep_alive = False
        self._input_ended()
        return True

    def _input_ended(self) -> None:
        self._half_closed = True
        if isinstance(self._active, ZeroCopyCycle):
            self._active.half_closed = True
            self._active.message_event.set()

    def abort_unbounded_response(self) -> None:
        """Abort a response without a length: its client knows where to resume."""
        active = self._active
        assert active is None or isinstance(active, ZeroCopyCycle)
        if active is not None and active.is_unbounded:
            self.abort_response()

    def abort_response(self) -> None:
        """Abort a response that has begun."""
        active = self._active
        if active is not None and active.response_started and not active.response_complete:
            self.transport.abort()

    # --- requests -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._extensions:
            self.scope["extensions"] = self._extensions  # type: ignore[typeddict-item]

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        cycle.__class__ = ZeroCopyCycle
        assert isinstance(cycle, ZeroCopyCycle)
        cycle.protocol = self
        cycle.half_closed = self._half_closed
        if cycle.scope["http_version"] == "1.0":
            cycle.waiting_for_100_continue = False  # HTTP/1.0 has no 1xx responses
        super()._start_asgi_task(cycle, app)

    # --- bodies ---------------------------------------------------------------------------------

    def take_buffered_body(self) -> tuple[bytes | bytearray, bool] | None:
        """See `DirectBody`. None for a client that waits for 100 Continue."""
        cycle = self._active
        assert isinstance(cycle, ZeroCopyCycle)
        is_ready = bool(cycle.body) or not cycle.more_body
        if not is_ready or cycle.disconnected or cycle.body_taken or cycle.waiting_for_100_continue:
            return None
        self.resume_reading()
        cycle.message_event.clear()
        return cycle.take_body()

    async def receive_into(
        self, view: memoryview, *, idle_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        """See `DirectBody`."""
        cycle = self._active
        assert isinstance(cycle, ZeroCopyCycle)
        assert cycle is self.cycle, "only the last request's body is still arriving"
        assert not cycle.body, "the buffered part was taken"
        if self.transport.is_closing():
            cycle.disconnected = True  # as `connection_lost` is about to set
            raise ConnectionAbortedError("the connection was closed")
        self.flow.pause_reading()
        sock = self._duplicate()
        self._receiving = BodyReceiver(self.loop, sock, view, idle_s=idle_s, on_bytes=on_bytes)
        try:
            await self._receiving.run()
        except ConnectionError:
            cycle.disconnected = True
            self.transport.abort()
            raise
        except BaseException:
            self._discards_input = True  # the next request's beginning is unknown
            self.close_after_response()
            raise
        finally:
            self._receiving = None
        self.parser = new_parser(self)
        self.on_message_complete()
        cycle.body_taken = True
        cycle.message_event.clear()

    # --- files ----------------------------------------------------------------------------------

    async def send_file(
        self, head: bytes, file: HasFileno, *, position: int, size_bytes: int
    ) -> None:
        """Write `head`, then the bytes; do nothing if the client has disconnected.

        If the file is too short or the disk fails, aborts the connection and raises EOFError or
        OSError.
        """
        if self._is_plain and not self.transport.get_write_buffer_size():
            head = self._send_head(head, more=size_bytes > 0)
        if head or self.transport.get_write_buffer_size():
            await self._drain(head)
        if not size_bytes or self.transport.is_closing():
            return
        try:
            await self._send_range(file, position=position, size_bytes=size_bytes)
        except ConnectionError:
            self.transport.abort()
        except (OSError, EOFError, asyncio.CancelledError):
            self.transport.abort()
            raise

    async def _send_range(self, file: HasFileno, *, position: int, size_bytes: int) -> None:
        try:
            sock = self._duplicate() if self._is_plain else None
        except OSError:  # no file descriptor left
            sock = None
        if sock is None:
            await self._send_reads(file, position=position, size_bytes=size_bytes)
            return
        self._sending = FileSender(
            self.loop,
            sock,
            file,
            position=position,
            size_bytes=size_bytes,
            turn_bytes=self._turn_bytes,
            scheduler=self.scheduler,
            threads=self.threads,
        )
        try:
            await self._sending.run()
        finally:
            self._sending = None

    async def _send_reads(self, file: HasFileno, *, position: int, size_bytes: int) -> None:
        """Send through the transport, which encrypts and needs no other descriptor."""
        end = position + size_bytes
        while position < end and not self.transport.is_closing():
            count = min(TURN_BYTES, end - position)
            data = await self.loop.run_in_executor(self.threads, _pread, file, count, position)
            if not data:
                raise EOFError("the file is shorter than the announced range")
            await self._drain(data)
            position += len(data)

    def _send_head(self, head: bytes, *, more: bool) -> bytes:
        """Send the head directly. Returns the part that the socket did not accept."""
        if not head:
            return head
        try:
            sock = self._duplicate()
        except OSError:  # no file descriptor left
            return head
        try:
            return head[sock.send(head, _MSG_MORE if more else 0) :]
        except BlockingIOError:
            return head
        except OSError:
            self.transport.abort()
            return b""

    async def _drain(self, data: bytes) -> None:
        """Write `data` and wait until the transport has written everything it has buffered."""
        transport = self.transport
        transport.write(data)
        low, high = transport.get_write_buffer_limits()
        transport.set_write_buffer_limits(high=0)
        try:
            while transport.get_write_buffer_size() and not transport.is_closing():
                if self.flow.write_paused:
                    await self.flow.drain()
                else:
                    await asyncio.sleep(0)  # uvloop writes at the end of the iteration
        finally:
            transport.set_write_buffer_limits(high=high, low=low)

    def _duplicate(self) -> socket.socket:
        if self._sock is None:
            raw = self.transport.get_extra_info("socket")
            self._sock = socket.socket(raw.family, raw.type, raw.proto, fileno=os.dup(raw.fileno()))
            self._sock.setblocking(False)
        return self._sock

    def _turn_bytes(self) -> int:
        return TURN_BYTES if len(self.tasks) > 1 else ALONE_TURN_BYTES


def _pread(file: HasFileno, size_bytes: int, position: int) -> bytes:
    """Keeps the file open while a thread reads."""
    return os.pread(file.fileno(), size_bytes, position)
