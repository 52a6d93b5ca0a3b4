"""uvicorn's HTTP/1.1 protocol with limits on whatever a client sends that handlers never see.

* A head is limited in bytes and in time, however it is split into packets. So is the framing of a
  body: chunk extensions, and trailers, which are dropped. (Merged into the head, a trailer could
  name another client or condition; RFC 9110, 6.5.1.)
* Bytes that are not HTTP get an error response, after the responses in progress; then the
  connection is closed, once the client has had time to read it.
* If a request is refused before its body was read, the rest of the body is drained, within limits,
  so that the client sees the response; then the connection is closed. Before any close the sending
  side is shut down first.
* Of pipelined requests only the next few are parsed, and little is read of the last one's body: a
  client that sends faster than it is served waits, and costs no memory.
* Above `connections_max` connections `busy_app` responds; above twice that, connections are
  aborted.
"""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Callable
from typing import Any, Final, NamedTuple

from uvicorn.protocols.http.flow_control import HIGH_WATER_LIMIT
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from tierlog.api.protocol.deadline import Deadline
from tierlog.api.protocol.errors import HeaderTooLarge
from tierlog.api.protocol.no_upgrade_protocol import NoUpgradeProtocol
from tierlog.record_format.errors import InvalidRequest, RequestError

_CLOSE_TIMEOUT_S: Final = 1.0
_PIPELINE_MAX: Final = 16  # with so many requests waiting for their turn, no more are parsed
_PIECE_BYTES: Final = 16 << 10  # parsed at once, but for a body: at most some hundred requests
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


class ConnectionLimits(NamedTuple):
    """`busy_app` serves connections above `connections_max`; above twice that they are aborted.

    `drain_*` limit a body that is read only to be discarded. `error_response` makes the complete
    response to bytes that are not a request.
    """

    connections_max: int
    header_max_bytes: int
    header_timeout_s: float
    drain_max_bytes: int
    drain_timeout_s: float
    busy_app: Any
    error_response: Callable[[RequestError], bytes]


class LimitedProtocol(NoUpgradeProtocol):
    """Relies on `cycle` and `connections` of uvicorn's protocol, and on its cycles' attributes."""

    limits: ConnectionLimits
    _active: RequestResponseCycle | None = None  # being served; `cycle` is the last one parsed
    _in_head = True
    _head_bytes = 0
    _framing_bytes = 0  # since the last byte of a body
    _body_bytes = 0  # received of the last request's body
    _final_response = b""  # to be sent after the responses in progress
    _closes_after_response = False  # though the body of its request may still be arriving
    _discards_input = False
    _unparsed = b""  # received; empty unless `_PIPELINE_MAX` requests are waiting
    _sent_final_response = False  # only waits for the client to close
    _is_at_eof = False  # the client closed its sending side: nothing is left to drain
    _head_deadline: Deadline
    _keep_alive_deadline: Deadline
    _drained_bytes = 0
    _drain_timer: asyncio.TimerHandle | None = None
    is_stopping = False  # the server
    _close_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)  # type: ignore[arg-type]
        self._head_deadline = Deadline(self.loop, self._head_timed_out)
        self._keep_alive_deadline = Deadline(self.loop, self.timeout_keep_alive_handler)
        count = len(self.connections)
        if self.is_stopping or count > 2 * self.limits.connections_max:
            self.transport.abort()
            return
        if count > self.limits.connections_max:
            self.app = self.limits.busy_app
        self._start_head()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._head_deadline.stop()
        self._keep_alive_deadline.stop()
        self._stop_draining()
        if self._close_timer is not None:
            self._close_timer.cancel()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._active = cycle
        super()._start_asgi_task(cycle, app)

    # --- input ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        self._unparsed += data
        self._parse()

    def _parse(self) -> None:
        data, self._unparsed = memoryview(self._unparsed), b""
        while data and len(self.pipeline) < _PIPELINE_MAX:
            size = max(_PIECE_BYTES, self._body_bytes_left())
            self._parse_piece(data[:size])
            data = data[size:]
        if data:
            self._unparsed = bytes(data)
            self.flow.pause_reading()

    def _body_bytes_left(self) -> int:
        """Of the body that is arriving; 0 if none is, or if its length is unknown."""
        if self._in_head or self.cycle is None or not self.cycle.more_body:
            return 0
        sizes = (int(value) for name, value in self.scope["headers"] if name == b"content-length")
        return next(sizes, self._body_bytes) - self._body_bytes

    def resume_reading(self) -> None:
        """Read on, unless enough is waiting: requests, or the body of the last of them."""
        if not self._unparsed and (not self.pipeline or len(self.cycle.body) <= HIGH_WATER_LIMIT):
            self.flow.resume_reading()

    def _parse_piece(self, data: memoryview) -> None:
        if self._discards_input:
            self._count_discarded(len(data))
            return
        if self._in_head:
            self._head_bytes += len(data)
        else:
            self._framing_bytes += len(data)
        super().data_received(data)  # type: ignore[arg-type]  # the parser takes any buffer
        self._after_piece()

    def _after_piece(self) -> None:
        if self._discards_input:
            return
        size = self._head_bytes if self._in_head else self._framing_bytes
        if size > self.limits.header_max_bytes:
            self._refuse(self._head_too_large(size))
        elif not self._in_head and (self.cycle is None or self.cycle.response_complete):
            # Not only at the end of a response: this may have been the end of a drained body, a
            # request with an immediate response, or an empty line.
            self._start_keep_alive()

    # --- the head -------------------------------------------------------------------------------

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_head:
            self._start_head()

    def on_headers_complete(self) -> None:
        # A head that arrived in one read, perhaps with its body, has not been counted yet.
        size = len(self.url) + sum([len(name) + len(value) + 4 for name, value in self.headers])
        if size > self.limits.header_max_bytes:
            raise self._head_too_large(size)
        self._end_head()
        if not self.url.startswith(b"/"):
            self.url = _to_origin_form(self.url, self.headers)
        if not self._try_respond():
            self.check_framing()
            super().on_headers_complete()
        self.headers = []  # trailers go here: the scope has the list of the head

    def _try_respond(self) -> bool:
        """Respond without a task if possible. Returns whether the response was sent."""
        return False

    def _start_head(self) -> None:
        self._in_head, self._head_bytes = True, 0
        self._head_deadline.set(self.limits.header_timeout_s)

    def _head_timed_out(self) -> None:
        if self.flow.read_paused:  # by us, while responses are in progress
            self._head_deadline.set(self.limits.header_timeout_s)
        else:
            self.transport.abort()

    def _end_head(self) -> None:
        self._in_head, self._framing_bytes, self._body_bytes = False, 0, 0
        self._head_deadline.clear()

    def _head_too_large(self, size_bytes: int) -> HeaderTooLarge:
        return HeaderTooLarge(limit_bytes=self.limits.header_max_bytes, size_bytes=size_bytes)

    def send_400_response(self, msg: str) -> None:
        """Uvicorn calls this while it handles an exception of the parser."""
        found = sys.exception()
        # The parser raises its own error, with the exception of our callback as its context.
        reason = found and (found.__context__ or found)
        if not isinstance(reason, HeaderTooLarge):
            reason = InvalidRequest(f"malformed request: {reason or msg}")
        self._refuse(reason)

    def _refuse(self, error: RequestError) -> None:
        """Send an error response after those in progress, then close the connection."""
        self._end_head()
        self._discards_input = True
        active, last = self._active, self.cycle
        if active is not None and active is last and active.more_body:  # the error is in its body
            if active.response_complete:
                self._send_final_response(b"")
                return
            if active.response_started:
                self.transport.abort()
                return
            active.disconnected = True
            active.message_event.set()
        elif active is not None and not active.response_complete:
            if last.more_body:  # the error response is the response to it
                self.pipeline.popleft()
            self._final_response = self.limits.error_response(error)
            self._input_ended()
            return
        self._send_final_response(self.limits.error_response(error))

    def close_after_response(self) -> None:
        """Close later: an immediate close would reset a client that is still sending its body."""
        self._closes_after_response = True

    def _input_ended(self) -> None:
        """No request follows those in progress."""

    def shutdown(self) -> None:
        """As uvicorn's, but do not wait for a client that has been sent everything."""
        if self._sent_final_response:
            self.transport.close()
        else:
            super().shutdown()
        self._limit_close()

    def _limit_close(self) -> None:
        """Limit how long a TLS close may take: an idle client does not read, so it does not answer
        the close_notify, and the server's shutdown would wait for it until its timeout.
        """
        if self.transport.is_closing() and not self.transport.can_write_eof():
            self._close_timer = self.loop.call_later(_CLOSE_TIMEOUT_S, self._end_close)

    def _end_close(self) -> None:
        if self.transport.get_write_buffer_size():
            self._limit_close()
        else:
            self.transport.abort()

    def _send_final_response(self, response: bytes) -> None:
        """Send it, shut down the sending side, and drain the input: closing a socket with unread
        bytes sends a reset, and the client could lose the response.
        """
        self._discards_input = self._sent_final_response = True
        self.transport.write(response)
        if self._is_at_eof or not self.transport.can_write_eof():
            self.transport.close()
            return
        try:
            self.transport.write_eof()
        except OSError:  # from asyncio: the client has just reset the connection
            self.transport.abort()
            return
        self._start_draining()

    # --- between requests -----------------------------------------------------------------------

    def _start_keep_alive(self) -> None:
        self._keep_alive_deadline.set(self.timeout_keep_alive)

    def _unset_keepalive_if_required(self) -> None:
        self._keep_alive_deadline.clear()

    # --- draining a body ------------------------------------------------------------------------

    def on_response_complete(self) -> None:
        """As uvicorn's, without a new timer for each idle connection."""
        if self._active is self.cycle and self.cycle.more_body:
            self._start_draining()
        self.server_state.total_requests += 1
        if self.transport.is_closing():
            if self.is_stopping:
                self._limit_close()
            return
        self.resume_reading()
        if self._in_head:
            self._head_deadline.set(self.limits.header_timeout_s)
        if self.pipeline:
            self._start_asgi_task(*self.pipeline.pop())
            self._parse()
        elif self._final_response or self._closes_after_response:
            self._send_final_response(self._final_response)
        else:
            self._start_keep_alive()

    def on_body(self, body: bytes) -> None:
        self._framing_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)
        if self._drain_timer is not None:
            self._count_discarded(len(body))

    def on_message_complete(self) -> None:
        super().on_message_complete()
        if not self._body_head:
            self.cycle.more_body = False  # uvicorn leaves it set if the response is complete
            self._stop_draining()

    def _start_draining(self) -> None:
        self._drained_bytes = 0
        if self._drain_timer is None:
            self._drain_timer = self.loop.call_later(
                self.limits.drain_timeout_s, self.transport.abort
            )

    def _count_discarded(self, size_bytes: int) -> None:
        self._drained_bytes += size_bytes
        if self._drained_bytes > self.limits.drain_max_bytes:
            self.transport.abort()

    def _stop_draining(self) -> None:
        if self._drain_timer is not None:
            self._drain_timer.cancel()
            self._drain_timer = None


def _to_origin_form(url: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the path and query of a target that does not begin with `/`; `*` is returned as it is.

    In absolute-form, as sent to a proxy (RFC 9112, 3.2.2), the URL names the host and `Host` is
    ignored: the URL's host replaces it in `headers`. Raises InvalidRequest for another scheme, and
    for userinfo before the host (RFC 9110, 4.2.4).
    """
    if url == b"*":
        return url
    found = _ABSOLUTE.fullmatch(url)
    if found is None:
        raise InvalidRequest(
            "the request target is neither a path nor an http URL without userinfo"
        )
    authority, target = found.groups()
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]
    if target is None:
        return b"/"
    return bytes(target if target.startswith(b"/") else b"/" + target)
