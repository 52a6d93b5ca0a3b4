"""The ASGI application: every request is dispatched here, and every response is sent from here.

* Every path is looked up here, as it was sent. Calls that carry no records then go through FastAPI;
  those that carry records do not: its dependency injection costs several times as much as a small
  fetch.
* In a cluster, a call that another broker has to carry out is passed on (`cluster.gateway`).
* Whatever a handler raises becomes a problem document, here and nowhere else.
* Each response carries `X-Request-Id`: the client's if it is a plain token, otherwise a new one.
* Authentication, routing and handlers that need not wait run without a task. If the protocol can
  send the response itself, they run in the parser's callback, which halves the cost of a small
  fetch. Either way the request is counted and logged here.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf
from typing import TYPE_CHECKING, Any, Final

import structlog
from fastapi import FastAPI, Request
from fastapi import Response as FastApiResponse
from structlog.contextvars import bind_contextvars, bound_contextvars

from tierlog.api.http import header_values
from tierlog.api.http.calls import Call, CallTable
from tierlog.api.http.context import Context
from tierlog.api.http.control_routes import CALL, EXCHANGE, no_query
from tierlog.api.http.exchange import Exchange, Receive, Send
from tierlog.api.http.problems import (
    REGISTRY_PATHS,
    AbortedByShutdown,
    MethodNotAllowed,
    NotFound,
)
from tierlog.api.http.responses import (
    AnyResponse,
    FileResponse,
    Response,
    complete_headers,
    send_response,
)
from tierlog.api.protocol.messages import BODILESS
from tierlog.api.protocol.service import (
    IMMEDIATE_MAX_BYTES,
    ClientDisconnected,
    ImmediateResponse,
    ResponseCutShort,
    Scope,
)
from tierlog.host.file_slice import FileSlice, close_all
from tierlog.record_format.errors import (
    FILE_LIMIT_ERRNOS,
    WILL_PASS,
    LeaderUnknown,
    TierlogError,
    TooManyOpenFiles,
)

if TYPE_CHECKING:
    from tierlog.api.http.cluster.gateway import Gateway

log = structlog.get_logger(__name__)

_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z", re.ASCII)
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_DESCRIPTOR_LOG_INTERVAL_S: Final = 60.0
_STARTED: Final = "tierlog.started"  # in the scope: a `StartedRequest`


class RequestIds:
    """Unique within this process, with a random part that differs between processes."""

    def __init__(self) -> None:
        self._prefix = secrets.token_hex(6)
        self._count = itertools.count(1)

    def of(self, given: str | None) -> str:
        if given is not None and _PLAIN_ID.match(given):
            return given
        return f"{self._prefix}-{next(self._count):x}"


@dataclass(slots=True)
class StartedRequest:
    """A request after authentication and routing: its call, its response if there is one already,
    or both; `rest`: of a handler that was begun.
    """

    exchange: Exchange
    call: Call | None = None
    response: AnyResponse | None = None
    rest: Awaitable[AnyResponse] | None = None


class TierlogApp(FastAPI):
    """FastAPI with our own routing. `on_finished`, if set, is called with each finished request and
    its status.
    """

    on_finished: Callable[[Exchange, str], None] | None = None

    def __init__(self, context: Context, table: CallTable, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.add_exception_handler(TierlogError, self._refuse)
        self.context, self.table = context, table
        self._ids = RequestIds()
        self._descriptors_logged_s = -inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        if not self.context.access.is_current():
            await self.context.access.refresh()
        started: StartedRequest = scope.pop(_STARTED, None) or self._start(scope)
        exchange = started.exchange
        exchange.receive, exchange.send = receive, send
        bind_contextvars(request_id=exchange.request_id)  # for every log line of this request
        await self._serve(started)

    # --- without a task ---------------------------------------------------------------------------

    def try_respond(self, scope: Scope) -> ImmediateResponse | None:
        """A small response that is ready now. None: the request continues in `__call__` with this
        scope; otherwise the caller has to call `response_sent`.
        """
        if not self.context.access.is_current():
            return None
        started = self._start(scope)
        scope[_STARTED] = started
        response = started.response
        if not isinstance(response, Response | FileResponse):
            return None
        size_bytes = response.size_bytes
        if size_bytes > IMMEDIATE_MAX_BYTES:
            return None
        status, headers = response.status, response.headers
        length = None if status in BODILESS else size_bytes
        headers = complete_headers(started.exchange, headers, content_length=length)
        if isinstance(response, Response):
            return ImmediateResponse(status, headers, response.body)
        return ImmediateResponse(status, headers, slices=response.slices if size_bytes else ())

    def response_sent(self, scope: Scope, *, unsent: tuple[FileSlice, ...]) -> None:
        """The head was sent, and the body except `unsent`, which `__call__` is to send."""
        # Removed from the scope, which lives as long as the connection.
        started: StartedRequest = scope.pop(_STARTED)
        exchange, response = started.exchange, started.response
        assert isinstance(response, Response | FileResponse), "only these are sent without a task"
        exchange.head_sent = True
        if unsent:
            assert isinstance(response, FileResponse), "bytes in memory are sent as a whole"
            close_all(response.slices[: len(response.slices) - len(unsent)])
            started.response = response._replace(slices=unsent)
            scope[_STARTED] = started
        else:
            response.close()
            self._finish(exchange, str(response.status))

    def _start(self, scope: Scope) -> StartedRequest:
        exchange = Exchange(scope)
        exchange.request_id = self._ids.of(exchange.header(b"x-request-id"))
        call: Call | None = None
        try:
            access = self.context.access
            access.authenticate(exchange)
            call = self._find(exchange)
            access.authorize(exchange, None if call is None else (call.method, call.path))
            if call is None:
                path = scope["raw_path"].decode("latin-1")  # an encoded slash is not one
                raise NotFound(f"{path} is not a path of this API; see /docs")
            if call.handler is None or not call.immediate:
                _check_request(call, exchange)
                return StartedRequest(exchange, call)
            return StartedRequest(
                exchange, call, *self.context.immediate.begin(call.handler(self.context, exchange))
            )
        except Exception as error:  # noqa: BLE001
            if isinstance(error, WILL_PASS) and self._gateway_of(exchange) is not None:
                return StartedRequest(exchange, call)  # begun again in the task
            # Handled here: a stored exception would keep alive the frames that it passed through.
            with bound_contextvars(request_id=exchange.request_id):
                return StartedRequest(exchange, response=self._problem(exchange, call, error))

    # --- in a task --------------------------------------------------------------------------------

    async def _serve(self, started: StartedRequest) -> None:
        metrics, exchange = self.context.metrics, started.exchange
        status, response = "500", None
        metrics.in_progress.inc()
        try:
            response = await self._respond(started)
            status = str(getattr(response, "status", 200))
            await self._send(exchange, response)
        except ClientDisconnected:
            status = "gone"
        finally:
            if response is not None:
                response.close()
            self.context.unsent.release(exchange)
            exchange.release_body()
            metrics.in_progress.dec()
            self._finish(exchange, status)

    def _finish(self, exchange: Exchange, status: str) -> None:
        method = exchange.method if exchange.method in _METHODS else "other"
        path = exchange.template or "other"
        self.context.metrics.requests.finished(
            method, path, status, seconds=exchange.timings.elapsed_s
        )
        if self.on_finished is not None:
            self.on_finished(exchange, status)

    async def _respond(self, started: StartedRequest) -> AnyResponse:
        exchange, call = started.exchange, started.call
        response, started.response = started.response, None  # only the sender keeps a reference
        try:
            if response is None:
                assert call is not None, "a path without a call has its response already"
                exchange.keeps_body = not (self.context.gateway is None or exchange.is_forwarded)
                gateway = self._gateway_of(exchange)
                if gateway is None:
                    response = await self._carry_out(started, call)
                else:
                    here = partial(self._carry_out, started, call)
                    response = await gateway.carry_out(exchange, call, here)
            return await self.context.unsent.admit(exchange, response)
        except ClientDisconnected:
            raise
        except asyncio.CancelledError:
            if not self.context.waiting.is_stopping:
                raise
            late = AbortedByShutdown("the broker shut down before this request had finished")
            return self._problem(exchange, call, late)
        except Exception as error:  # noqa: BLE001
            return self._problem(exchange, call, error)

    def _gateway_of(self, exchange: Exchange) -> Gateway | None:
        gateway = self.context.gateway
        return None if gateway is None or exchange.is_direct else gateway

    async def _carry_out(self, started: StartedRequest, call: Call) -> AnyResponse:
        if call.handler is None:
            return await self._through_fastapi(started.exchange, call)
        rest, started.rest = started.rest, None
        return await (rest or call.handler(self.context, started.exchange))

    async def _through_fastapi(self, exchange: Exchange, call: Call) -> Response:
        """The response of FastAPI: its middleware, dependencies, route and exception handlers. It
        is collected, since all responses in memory are bounded where they are sent.
        """
        messages: list[Any] = []

        async def collect(message: Any) -> None:
            messages.append(message)

        exchange.scope[EXCHANGE], exchange.scope[CALL] = exchange, call
        try:
            await super().__call__(exchange.scope, exchange.receive, collect)
        finally:
            del exchange.scope[EXCHANGE]  # it refers to the scope
        head, *parts = messages
        headers = [line for line in head["headers"] if line[0] != b"content-length"]
        return Response(head["status"], headers, b"".join([one.get("body", b"") for one in parts]))

    async def _refuse(self, request: Request, error: Exception) -> FastApiResponse:
        """FastAPI's exception handler."""
        scope = request.scope
        if isinstance(error, WILL_PASS) and self._gateway_of(scope[EXCHANGE]) is not None:
            raise error
        status, headers, body = self._problem(scope[EXCHANGE], scope[CALL], error)
        shown = {name.decode(): value.decode("latin-1") for name, value in headers}
        return FastApiResponse(body, status, shown)

    async def _send(self, exchange: Exchange, response: AnyResponse) -> None:
        """An error after the head was sent can only abort the connection: logged, then raised."""
        try:
            await send_response(exchange, response)
        except (TierlogError, EOFError, OSError) as error:
            self._log(exchange, error, "cut-short")
            raise ResponseCutShort from error

    def _find(self, exchange: Exchange) -> Call | None:
        found = self.table.find_route(exchange.scope["raw_path"])
        if found is None:
            return None
        by_method, exchange.params = found
        method = "GET" if exchange.method == "HEAD" else exchange.method
        call = by_method.get(method)
        if call is None:
            exchange.template = next(iter(by_method.values())).path
            head = {"HEAD"} if "GET" in by_method else set()
            raise MethodNotAllowed(exchange.method, allowed=sorted(by_method.keys() | head))
        exchange.template = call.path
        return call

    def _problem(self, exchange: Exchange, call: Call | None, error: Exception) -> Response:
        writing = call is not None and call.writes
        if isinstance(error, OSError) and error.errno in FILE_LIMIT_ERRNOS and not writing:
            error = TooManyOpenFiles(f"no file descriptor left for this read: {error.strerror}")
        if isinstance(error, TooManyOpenFiles):
            self._log_no_descriptor(error)
        problem = self.context.problem(exchange, error, writing=writing)
        if exchange.scope["path"].startswith(REGISTRY_PATHS):
            problem.add_confluents_members()
        self.context.metrics.errors.labels(problem.code).inc()
        if problem.status >= 500 and not isinstance(error, LeaderUnknown):  # of the cluster
            self._log(exchange, error, problem.code)
        return Response(problem.status, problem.headers, problem.body())

    def _log_no_descriptor(self, error: TooManyOpenFiles) -> None:
        """Rate-limited: it affects many requests at once."""
        now_s = time.monotonic()
        if now_s - self._descriptors_logged_s >= _DESCRIPTOR_LOG_INTERVAL_S:
            self._descriptors_logged_s = now_s
            log.error("no descriptor left", error=str(error))

    def _log(self, exchange: Exchange, error: Exception, code: str) -> None:
        log.error(
            "request failed",
            method=exchange.method,
            path=exchange.template,
            **_log_params(exchange.params),
            offset=getattr(error, "offset", None),
            code=code,
            error=str(error) or type(error).__name__,
            exc_info=None if isinstance(error, TierlogError) else error,
        )


def _log_params(params: Mapping[str, str]) -> dict[str, str]:
    """The path parameters as in the broker's own log lines: a partition as `topic-number`."""
    shown = dict(params)
    if "topic" in shown and "partition" in shown:
        shown["partition"] = f"{shown.pop('topic')}-{shown['partition']}"
    return shown


def _check_request(call: Call, exchange: Exchange) -> None:
    """Check the query and `Accept` of a call. Raises InvalidRequest, NotAcceptable."""
    if call.query is None:
        no_query(exchange)
    if call.returns_only_json:
        header_values.preferred(exchange.header(b"accept"), offered=tuple(call.response))
