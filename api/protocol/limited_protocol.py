"""uvicorn's HTTP/1.1 protocol with limits on what a client may send outside what handlers see.

* A head is limited in bytes and in time, however it is split into packets. So is the framing of a
  body: chunk extensions, and trailers, which are dropped (RFC 9110, 6.5.1: a trailer is not merged
  into the head, where it could name another client or condition).
* Bytes that are not HTTP get a response after those under way, and end the connection. It is closed
  once the client had time to read that.
* If a request is refused before its body was read, the rest of the body is read and dropped, within
  limits, so that its sender sees the response; then the connection ends. If it ends in any case,
  its sending side is closed first.
* Above `connections_max` connections another application answers; above twice that, nobody does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from api.protocol.deadline import Deadline
from api.protocol.errors import HeaderTooLarge
from api.protocol.no_upgrade_protocol import NoUpgradeProtocol
from api.protocol.request_target import to_origin_form
from record_format.errors import InvalidRequest, RequestError

_FAREWELL_S: Final = 1.0


class ConnectionLimits(NamedTuple):
    """`busy_app` answers on connections above `connections_max`; above twice that they are cut.

    `unread_*` limit a body that nobody reads any more. `refusal` makes the whole response to bytes
    that are not a request.
    """

    connections_max: int
    header_max_bytes: int
    header_timeout_s: float
    unread_max_bytes: int
    unread_timeout_s: float
    busy_app: Any
    refusal: Callable[[RequestError], bytes]


class LimitedProtocol(NoUpgradeProtocol):
    """Relies on `cycle` and `connections` of uvicorn's protocol, and on what its cycles know."""

    limits: ConnectionLimits
    _active: RequestResponseCycle | None = None  # `cycle` is that of the last parsed request
    _in_head = True
    _head_bytes = 0
    _framing_bytes = 0  # since the last byte of a body
    _refusal = b""  # the last response of this connection, after those under way
    _ends = False  # after the response under way, though its request's body may still be coming
    _is_deaf = False  # whatever still comes is not read
    _has_said_last = False  # waits only for the client to close
    _head_deadline: Deadline
    _rest_deadline: Deadline
    _unread_bytes = 0
    _unread_timer: asyncio.TimerHandle | None = None
    is_stopping = False  # the server
    _farewell_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._head_deadline = Deadline(self.loop, self._head_is_late)
        self._rest_deadline = Deadline(self.loop, self.timeout_keep_alive_handler)
        count = len(self.connections)
        if self.is_stopping or count > 2 * self.limits.connections_max:
            self.transport.abort()
            return
        if count > self.limits.connections_max:
            self.app = self.limits.busy_app
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_deadline.stop()
        self._rest_deadline.stop()
        self._unread_ended()
        if self._farewell_timer is not None:
            self._farewell_timer.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    # --- the head -------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            self._let_go_by(len(data))
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        super().data_received(data)
        self._was_read()

    def _was_read(self) -> None:
        if self._is_deaf:
            return
        size = self._head_bytes if self._in_head else self._framing_bytes
        if size > self.limits.header_max_bytes:
            self._refuse(self._head_too_large(size))
        elif not self._in_head and (self.cycle is None or self.cycle.response_complete):
            # Not only when an answer ends: what came may have been the end of a body that nobody
            # reads, a request answered at once, or an empty line.
            self._rest()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._await_head()

    def on_headers_complete(self) -> None:
        # A head that came in a single read, perhaps with its body, has not been counted yet.
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > self.limits.header_max_bytes:
            raise self._head_too_large(size)
        self._head_arrived()
        if not self.url.startswith(b"/"):
            self.url = to_origin_form(self.url, self.headers)
        if not self._try_respond():
            self.check_framing()
            super().on_headers_complete()
        self.headers = []  # trailers go here: the scope has the list of the head

    def _try_respond(self) -> bool:
        """Whether the request was answered already, and needs no task."""
        return False

    def _await_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_deadline.set(self.limits.header_timeout_s)

    def _head_is_late(self) -> None:
        if self.flow.read_paused:  # by us, after the answers in progress
            self._head_deadline.set(self.limits.header_timeout_s)
        else:
            self.transport.abort()

    def _head_arrived(self) -> None:
        self._in_head, self._framing_bytes = False, 0
        self._head_deadline.clear()

    def _head_too_large(self, size_bytes: int) -> HeaderTooLarge:
        return HeaderTooLarge(limit_bytes=self.limits.header_max_bytes, size_bytes=size_bytes)

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls this while it handles what the parser raised."""
        found = sys.exception()
        # The parser raises an error of its own, with what our callback raised as its context.
        reason = found and (found.__context__ or found)
        if not isinstance(reason, HeaderTooLarge):
            reason = InvalidRequest(f"this is no request of HTTP/1.1: {reason or msg}")
        self._refuse(reason)

    def _refuse(self, error: RequestError) -> None:
        """Send a response after those under way, and end the connection."""
        self._head_arrived()
        self._is_deaf = True
        refusal = self.limits.refusal(error)
        active, last = self._active, self.cycle
        if active is not None and active is last and active.more_body:  # it is in its body
            if active.response_complete:
                refusal = b""
            elif active.response_started:
                self.transport.abort()
                return
            else:
                active.disconnected = True
                active.message_event.set()
        elif active is not None and not active.response_complete:
            if last.more_body:  # the refusal is its answer
                self.pipeline.popleft()
            self._refusal = refusal
            self._nothing_more_comes()
            return
        self._say_last(refusal)

    def end_behind_answer(self) -> None:
        """Instead of a close, which would cut off a client that is still sending its body."""
        self._ends = True

    def _nothing_more_comes(self) -> None:
        """The requests under way are the last ones."""

    def shutdown(self) -> None:
        """As uvicorn's, without waiting for a client that has been sent everything."""
        if self._has_said_last:
            self.transport.close()
        else:
            super().shutdown()
        self._bound_farewell()

    def _bound_farewell(self) -> None:
        """An idle TLS client reads nothing, and so does not answer the close: without this the
        server's stop would wait for it until its time is over.
        """
        if self.transport.is_closing() and not self.transport.can_write_eof():
            self._farewell_timer = self.loop.call_later(_FAREWELL_S, self._end_farewell)

    def _end_farewell(self) -> None:
        if self.transport.get_write_buffer_size():
            self._bound_farewell()
        else:
            self.transport.abort()

    def _say_last(self, refusal: bytes) -> None:
        """Unread bytes would turn the close into a reset, which could destroy the response."""
        self._is_deaf = self._has_said_last = True
        self.transport.write(refusal)
        if not self.transport.can_write_eof():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:  # from asyncio: the client is gone, and has just answered with a reset
            self.transport.abort()
            return
        self._await_unread()

    # --- between requests -----------------------------------------------------------------------

    def _rest(self) -> None:
        self._rest_deadline.set(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        self._rest_deadline.clear()

    # --- a body that nobody reads ---------------------------------------------------------------

    def on_response_complete(self) -> None:
        """As uvicorn's, but no timer is created for an idle connection."""
        if self._active is self.cycle and self.cycle.more_body:
            self._await_unread()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if self.is_stopping:
                self._bound_farewell()
            return
        self.flow.resume_reading()
        if self._in_head:
            self._head_deadline.set(self.limits.header_timeout_s)
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
        elif self._refusal or self._ends:
            self._say_last(self._refusal)
        else:
            self._rest()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        super().on_body(body)
        if self._unread_timer is not None:
            self._let_go_by(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self._body_head:
            self.cycle.more_body = False  # uvicorn leaves it set if the answer is complete
            self._unread_ended()

    def _await_unread(self) -> None:
        self._unread_bytes = 0
        if self._unread_timer is None:
            self._unread_timer = self.loop.call_later(
                self.limits.unread_timeout_s, self.transport.abort
            )

    def _let_go_by(self, size_bytes: int) -> None:
        self._unread_bytes += size_bytes
        if self._unread_bytes > self.limits.unread_max_bytes:
            self.transport.abort()

    def _unread_ended(self) -> None:
        if self._unread_timer is not None:
            self._unread_timer.cancel()
            self._unread_timer = None
