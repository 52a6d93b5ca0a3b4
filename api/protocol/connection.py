"""One HTTP/1.1 connection: `messages` parses, `connection_state` says what may come next, and
uvicorn runs it as its `http` protocol class (`Config(http=…)`).

* Requests are parsed ahead of their responses, which are sent in order, one task at a time. Of
  pipelined requests only the next few are parsed, and little is read of the last one's body: a
  client that sends faster than it is served waits, and costs no memory.
* Bytes that are not HTTP get an error response, after the responses in progress; then the
  connection ends. Before it is closed, its sending side is shut down and what still arrives is
  discarded, within limits, so that the client sees the response.
* A large body of known length bypasses the parser: it is received straight into its handler's
  buffer while the transport does not read. A new parser goes on behind it.
* A client that closes its sending side still gets the responses to its complete requests.
* Above `connections_max` connections `busy_app` responds; above twice that, connections are
  aborted.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Any, Final, cast
from urllib.parse import unquote

import uvicorn
from uvicorn.server import ServerState

from tierlog.api.protocol import connection_state as state
from tierlog.api.protocol.asgi_cycle import Cycle
from tierlog.api.protocol.body_receiver import BodyReceiver
from tierlog.api.protocol.connection_state import Input, Response
from tierlog.api.protocol.messages import Head, Headers, RequestParser, encode_head
from tierlog.api.protocol.service import DIRECT_BODY, Scope, Service
from tierlog.api.serving.deadline import Deadline
from tierlog.api.serving.slice_sender import SliceSender
from tierlog.host.file_slice import FileSlice
from tierlog.record_format.errors import InvalidRequest, RequestError

_TLS_CLOSE_S: Final = 1.0
_PIPELINE_MAX: Final = 16  # with so many requests waiting for their turn, no more are parsed
_PIECE_BYTES: Final = 16 << 10  # parsed at once, but for a body: at most some hundred requests
_BODY_BUFFER_BYTES: Final = 64 << 10  # of a body that nobody takes, no more is read than about this


def connection_class(service: Service) -> type[HttpConnection]:
    """The class for `uvicorn.Config(http=…)`."""
    return type("HttpConnection", (HttpConnection,), {"service": service})


class HttpConnection(asyncio.Protocol):
    """See `api.protocol` for what it relies on in uvicorn."""

    service: Service
    transport: asyncio.Transport
    sender: SliceSender

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self._limits, self._server = self.service.limits, server_state
        self._app: Any = config.loaded_app
        self._immediate = self.service.immediate_app
        self._keep_alive_s = config.timeout_keep_alive
        self._app_state = app_state
        self._deadline = Deadline(self.loop, self._expired)
        self._is_timed = False  # the deadline of this state is set
        self._input = Input.HEAD
        self._requests: deque[Cycle] = deque()  # not answered yet; the last one may be incomplete
        self._parser = RequestParser(self, head_max_bytes=self._limits.header_max_bytes)
        self._unparsed = b""  # received; empty unless `_PIPELINE_MAX` requests are waiting
        self._waits_turn = False  # for a turn to parse what was received
        self._may_respond = True  # no immediate response was sent yet in this read of the socket
        self._is_paused = False
        self._discarded_bytes = 0
        self._last_words = b""  # an error response, after the responses in progress
        self._receiving: BodyReceiver | None = None

    # --- the connection -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        service, tasks = self.service, self._server.tasks
        self.sender = SliceSender(
            self.transport,
            scheduler=service.scheduler,
            threads=service.threads,
            is_alone=lambda: len(tasks) <= 1,
        )
        self._extensions = {DIRECT_BODY: self} if self.sender.is_plain else {}
        self._scope: dict[str, Any] = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "server": _address(transport.get_extra_info("sockname")),
            "client": _address(transport.get_extra_info("peername")),
            "scheme": "http" if transport.get_extra_info("sslcontext") is None else "https",
            "root_path": "",
            "extensions": self._extensions,
        }
        self._server.connections.add(self)  # type: ignore[arg-type]
        count = len(self._server.connections)
        if service.is_stopping or count > 2 * self._limits.connections_max:
            self.transport.abort()
            return
        if count > self._limits.connections_max:
            self._app, self._immediate = service.busy_app, None
        self._watch()

    def connection_lost(self, _: Exception | None) -> None:
        self._server.connections.discard(self)
        self._deadline.stop()
        for request in self._requests:
            request.disconnect()
        self.sender.close()
        if self._receiving is not None:
            self._receiving.stop()
        self._parser.close()
        self._extensions.clear()  # requests refer to it, and it refers to this connection

    def pause_writing(self) -> None:
        self.sender.pause_writing()

    def resume_writing(self) -> None:
        self.sender.resume_writing()

    @property
    def is_at_end(self) -> bool:
        """Whether the client has nothing more to say: a request that waits waits in vain."""
        return self._input in (Input.LOST, Input.EOF)

    @property
    def default_headers(self) -> Headers:
        return self._server.default_headers

    # --- time -----------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Limit how long the present state lasts. While requests are being handled nothing is
        limited here: a handler limits its own waiting.
        """
        if self.transport.is_closing():
            return
        if self._requests:
            self._deadline.clear()
        elif self._input is Input.IDLE:
            self._deadline.set(self._keep_alive_s)
        elif self._input is Input.HEAD:
            self._watch_once(self._limits.header_timeout_s)
        else:
            self._watch_once(self._limits.drain_timeout_s)

    def _watch_once(self, limit_s: float) -> None:
        if not self._is_timed:
            self._is_timed = True
            self._deadline.set(limit_s)

    def _expired(self) -> None:
        if self._waits_turn:
            return
        if self.transport.is_closing() and self.transport.get_write_buffer_size():
            self._deadline.set(_TLS_CLOSE_S)
        elif self._input is Input.IDLE and not self.transport.is_closing():
            self._close()
        else:
            self.transport.abort()

    # --- input ----------------------------------------------------------------------------------

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():  # TLS may bring more after a close
            return
        self._may_respond = True
        self._unparsed += data
        if self._waits_turn:
            return
        if data.startswith(b"GET "):
            self._waits_turn = True
            self.service.turns.add_turn(self.loop, self._take_turn)
        else:
            self._parse()

    def _take_turn(self) -> None:
        self._waits_turn = False
        if not self.transport.is_closing():
            self._parse()

    def eof_received(self) -> bool:
        """Whether to keep our sending side open: complete requests wait for their responses."""
        if self._waits_turn:
            self._parse()
        is_cut = self._input in state.INCOMPLETE
        self._input = state.EOF[self._input]
        if not self.sender.is_plain or not self._requests:
            return False
        if is_cut and len(self._requests) == 1:
            return False  # what is being served will never be complete
        if is_cut:
            self._requests.pop()
        elif not self._last_words:
            self._requests[-1].keep_alive = False
        self._requests[0].wake()
        return True

    def regulate(self) -> None:
        """Read on, unless enough is waiting: requests, or the body of the last of them."""
        if self.transport.is_closing():
            return
        is_much = self._requests and len(self._requests[-1].body) > _BODY_BUFFER_BYTES
        pause = bool(is_much or self._unparsed or self._input is Input.DIRECT)
        if pause is not self._is_paused:
            self._is_paused = pause
            (self.transport.pause_reading if pause else self.transport.resume_reading)()

    def _parse(self) -> None:
        data, self._unparsed = memoryview(self._unparsed), b""
        while data and len(self._requests) < _PIPELINE_MAX:
            size = max(_PIECE_BYTES, self._parser.body_left)
            self._parse_piece(data[:size])
            data = data[size:]
        if data:
            self._unparsed = bytes(data)
        self.regulate()
        self._watch()

    def _parse_piece(self, piece: memoryview) -> None:
        if self._input in state.ENDED:
            self._discard(len(piece))
            return
        try:
            self._parser.feed(piece)
        except RequestError as error:
            if self._input is not Input.LAST:  # what follows the last request is not one
                self._refuse(error)

    def _discard(self, size_bytes: int) -> None:
        self._discarded_bytes += size_bytes
        if self._discarded_bytes > self._limits.drain_max_bytes:
            self.transport.abort()

    # --- requests, as they are parsed -----------------------------------------------------------

    def head_begins(self) -> None:
        if self._input is Input.LAST:
            raise InvalidRequest("no request follows `Connection: close`")
        self._input = state.HEAD_BEGINS[self._input]
        self._is_timed = False

    def head_ends(self, head: Head) -> None:
        self._input = state.HEAD_ENDS[self._input]
        path, _, query = head.target.partition(b"?")
        scope: Scope = {
            **self._scope,
            "http_version": head.version,
            "method": head.method,
            "path": unquote(path) if b"%" in path else path.decode("ascii"),
            "raw_path": path,
            "query_string": query,
            "headers": head.headers,
            "state": self._app_state.copy(),
        }
        unsent = self._try_respond(scope) if self._may_be_immediate(head) else None
        if unsent == ():
            self._may_respond = False
            self._input = state.RESPONSE_ENDS[self._input]
            self._server.total_requests += 1
            return
        request = Cycle(self, scope, keep_alive=head.keep_alive, awaits_100=head.awaits_100)
        if unsent:
            request.resume(sum(piece.size_bytes for piece in unsent))
        self._requests.append(request)
        if len(self._requests) == 1:
            self._start()

    def body_part(self, part: bytes) -> None:
        if self._input is Input.REST:
            self._discard(len(part))
        else:
            self._requests[-1].add_part(part)

    def request_ends(self) -> None:
        ends = state.BODY_ENDS
        if self._input is not Input.REST:
            request = self._requests[-1]
            request.end_body(is_taken=self._input is Input.DIRECT)
            ends = state.BODY_ENDS if request.keep_alive else state.LAST_BODY_ENDS
        self._input = ends[self._input]

    # --- responses ------------------------------------------------------------------------------

    def _may_be_immediate(self, head: Head) -> bool:
        return (
            head.is_plain
            and head.method == "GET"
            and head.keep_alive
            and self._immediate is not None
            and self._may_respond
            and self.sender.is_plain
            and not self._requests
            and not self.transport.is_closing()
            and not self.transport.get_write_buffer_size()
        )

    def _try_respond(self, scope: Scope) -> tuple[FileSlice, ...] | None:
        """Respond without a task; see `immediate`. Returns what a task has to send; None, and
        nothing was sent, if all of it is left to the task.
        """
        app = self._immediate
        assert app is not None, "checked before"
        response = app.try_respond(scope)
        if response is None:
            return None
        head = encode_head(response.status, [*self.default_headers, *response.headers])
        unsent: tuple[FileSlice, ...] | None = ()
        if response.slices:
            unsent = self.sender.send_now(head, response.slices)
        else:
            self.transport.write(head + response.body)
        if unsent is not None:
            app.response_sent(scope, unsent=unsent)
        return unsent

    def _start(self) -> None:
        task = self.loop.create_task(self._requests[0].run_app(self._app))
        self._server.tasks.add(task)
        task.add_done_callback(self._server.tasks.discard)

    def response_ended(self, request: Cycle) -> None:
        """The response to the oldest request is complete."""
        self._server.total_requests += 1
        self._requests.popleft()
        self._is_timed = False
        if not self._requests:
            self._input = state.RESPONSE_ENDS[self._input]
            self._discarded_bytes = 0
        if self.transport.is_closing():
            return
        if not request.keep_alive or (not self._requests and self._input in state.ENDED):
            self._end()
            return
        if self._requests:
            self._start()
        self._parse()

    # --- the end --------------------------------------------------------------------------------

    def _refuse(self, error: RequestError) -> None:
        """Send an error response after those in progress, then end the connection."""
        is_spoiled, is_rest = self._input in state.INCOMPLETE, self._input is Input.REST
        self._input = state.REFUSED[self._input]
        if is_spoiled:  # the error response is the response to the last request
            request = self._requests.pop()
            request.disconnect()
            if request.response is Response.STARTED:
                self.transport.abort()
                return
        if not is_rest:
            self._last_words = self.service.error_response(error)
        if self._requests:
            self._requests[0].wake()
        else:
            self._end()

    def _end(self) -> None:
        """Say what is left to say, and close. Closing a socket with unread bytes sends a reset, and
        the client could lose the response: then first shut down the sending side, and discard.
        """
        self._requests.clear()
        self._unparsed = b""
        self.transport.write(self._last_words)
        is_clean = self._input in (Input.IDLE, Input.LAST, Input.EOF)
        if is_clean or not self.transport.can_write_eof():
            self._close()
            return
        self._input = state.REFUSED[self._input]
        self._is_timed, self._discarded_bytes = False, 0
        try:
            self.transport.write_eof()
        except OSError:  # from asyncio: the client has just reset the connection
            self.transport.abort()
        self.regulate()
        self._watch()

    def _close(self) -> None:
        """A TLS client that is idle does not read, so it does not answer the close_notify."""
        self.transport.close()
        if not self.transport.can_write_eof():
            self._deadline.set(_TLS_CLOSE_S)

    def shutdown(self) -> None:
        """The server stops: finish what was begun."""
        if self._requests:
            self._requests[-1].keep_alive = False
        else:
            self._close()

    def abort(self) -> None:
        self.transport.abort()

    def abort_response(self, *, only_unbounded: bool = False) -> None:
        """Abort a response that has begun. `only_unbounded`: one without a length, whose client
        knows where to resume.
        """
        for request in list(self._requests)[:1]:
            if request.response is Response.STARTED and (
                request.is_unbounded or not only_unbounded
            ):
                self.transport.abort()

    # --- bodies past the parser -----------------------------------------------------------------

    def take_buffered_body(self) -> tuple[bytes | bytearray, bool] | None:
        """See `DirectBody`."""
        return self._requests[0].take_buffered() if self._requests else None

    async def receive_into(
        self, view: memoryview, *, idle_s: float, on_bytes: Callable[[int], None]
    ) -> None:
        """See `DirectBody`."""
        request = self._requests[0]
        assert request is self._requests[-1], "only the last request's body is still arriving"
        assert not request.body, "the buffered part was taken"
        if self.transport.is_closing():
            request.disconnect()  # as `connection_lost` is about to do
            raise ConnectionAbortedError("the connection was closed")
        sock = self.sender.duplicate()
        self._input = state.TAKEN_OVER[self._input]
        self.regulate()
        self._receiving = BodyReceiver(self.loop, sock, view, idle_s=idle_s, on_bytes=on_bytes)
        try:
            await self._receiving.receive_all()
        except ConnectionError:
            request.disconnect()
            self.transport.abort()
            raise
        except BaseException:
            self._input = state.REFUSED[self._input]  # where the next request begins is unknown
            raise
        finally:
            self._receiving = None
        self._parser.skip_body()
        self.regulate()


def _address(info: Any) -> tuple[str, int] | None:
    return (str(info[0]), int(info[1])) if isinstance(info, tuple) else None
