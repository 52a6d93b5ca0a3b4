"""Runs the application on uvicorn with our protocol, and shuts it down.

* On SIGTERM or SIGINT no new connections are accepted, long polls respond with what they have, and
  requests in progress get four fifths of `shutdown_timeout_ms`; then `serve` returns and the caller
  closes the broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import secrets
import signal
import socket
import ssl
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from email.utils import formatdate
from functools import partial
from types import FrameType
from typing import Any, Protocol, cast

import structlog
import uvicorn

from tierlog.api.http import problems
from tierlog.api.http.context import Context
from tierlog.api.http.dispatch import TierlogApp
from tierlog.api.http.responses import Response
from tierlog.api.protocol.connection import HttpConnection, connection_class
from tierlog.api.protocol.messages import encode_head
from tierlog.api.protocol.service import ConnectionLimits, Service
from tierlog.api.serving.listening import BACKLOG, TlsServer, listen
from tierlog.host.threads import Threads
from tierlog.record_format.errors import RequestError, Throttled, TierlogError

log = structlog.get_logger(__name__)
_HEALTH_PATHS = ("/healthz", "/readyz")
_ABORT_GRACE_S = 1.0
_PULSE_S = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    certificate: str
    key: str


class Beside(Protocol):
    """Another listener on the same event loop, which starts and stops with the server."""

    async def start(self, tls: ssl.SSLContext | None) -> None: ...

    async def stop(self, timeout_s: float) -> None:
        """Accept nothing more, let requests in progress end, and close what is left then."""
        ...


def serve(
    app: TierlogApp,
    *,
    sock: socket.socket,
    tls: Tls | None = None,
    beside: Beside | None = None,
    on_started: Callable[[], None] | None = None,
) -> None:
    """Serve on a bound socket until a signal. Call from the main thread."""
    with configured_server(app, tls=tls, beside=beside, on_started=on_started) as server:
        server.run(sockets=[sock])


class _Pulse:
    """How long ago an event loop should have had a turn, as other threads see it."""

    def __init__(self) -> None:
        self._due_s = math.inf
        self._timer: asyncio.TimerHandle | None = None

    def beat(self) -> None:
        """On the loop; again and again by itself."""
        self._due_s = time.monotonic() + _PULSE_S
        self._timer = asyncio.get_running_loop().call_later(_PULSE_S, self.beat)

    def wait_s(self) -> float:
        return max(0.0, time.monotonic() - self._due_s)

    def end(self) -> None:
        self._due_s = math.inf
        if self._timer is not None:
            self._timer.cancel()


class _Server(uvicorn.Server):
    """uvicorn's server with our sockets and shutdown. In a thread it handles no signals, as
    uvicorn's. Our connections are all that it has.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        service: Service,
        context: Context,
        *,
        beside: Beside | None,
        on_started: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._service, self._context = service, context
        self._beside, self._on_started = beside, on_started
        self._signal: int | None = None
        self._pulse = _Pulse()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._context.metrics.sample("tierlog_http_connections", self._count_connections)
        if (cluster := self._context.broker.cluster) is not None:
            wait_s = self._pulse.wait_s
            cluster.members.watch_for_hangs("the event loop has not run", wait_s)
            self._pulse.beat()
        await super().startup([])
        for sock in sockets or ():
            self.servers.append(await self._listen(sock))  # type: ignore[arg-type]
        if self._beside is not None:
            await self._beside.start(self.config.ssl)
        if self._on_started is not None:
            self._on_started()

    def _count_connections(self) -> int:
        return len(self.server_state.connections) + sum(
            server.handshakes for server in self.servers if isinstance(server, TlsServer)
        )

    async def _listen(self, sock: socket.socket) -> asyncio.Server | TlsServer:
        config, settings = self.config, self._context.settings

        def new_protocol() -> asyncio.Protocol:
            return config.http_protocol_class(  # type: ignore[call-arg]
                config=config, server_state=self.server_state, app_state=self.lifespan.state
            )

        return await listen(
            sock,
            new_protocol,
            config.ssl,
            send_idle_timeout_ms=settings.send_idle_timeout_ms,
            handshake_timeout_ms=settings.header_timeout_ms,  # it is part of the head
            is_full=lambda: self._count_connections() >= 2 * settings.connections_max,
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """As uvicorn's, but a handled signal is not raised again: the process exits with 0."""
        self.force_exit |= self.should_exit and sig == signal.SIGINT
        self.should_exit, self._signal = True, sig

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._signal is not None:
            log.info("stopping", signal=signal.Signals(self._signal).name)
        timeout_s = self.config.timeout_graceful_shutdown
        assert timeout_s is not None, "set by `configured_server`"
        if (cluster := self._context.broker.cluster) is not None:  # still served
            await self._context.write_cold(cluster.leave, timeout_s=timeout_s / 2)
        self._service.is_stopping = True  # for sockets accepted but not yet connections
        self._context.waiting.stop()  # ends every tail whose client reads
        loop = asyncio.get_running_loop()
        timers = (
            loop.call_later(_ABORT_GRACE_S, self._abort_responses, True),
            loop.call_later(timeout_s * 0.9, self._abort_responses, False),
        )
        if self._beside is not None:
            await asyncio.gather(self._beside.stop(timeout_s), super().shutdown(sockets))
        else:
            await super().shutdown(sockets)
        for timer in timers:
            timer.cancel()
        if self.force_exit:  # by a second Ctrl-C: then uvicorn does not end the application
            await self.lifespan.shutdown()
        await self._close_connections()
        self._pulse.end()

    def _abort_responses(self, only_unbounded: bool) -> None:
        for connection in self._connections():
            connection.abort_response(only_unbounded=only_unbounded)

    def _connections(self) -> list[HttpConnection]:
        return cast(list[HttpConnection], list(self.server_state.connections))

    async def _close_connections(self) -> None:
        """Let cancelled requests send their 503, then abort whatever is left."""
        if self.server_state.tasks and not self.force_exit:
            await asyncio.wait(list(self.server_state.tasks), timeout=_ABORT_GRACE_S)
        for connection in self._connections():
            connection.abort()


@contextlib.contextmanager
def configured_server(
    app: TierlogApp,
    *,
    tls: Tls | None,
    beside: Beside | None = None,
    on_started: Callable[[], None] | None,
    loop: str = "auto",
) -> Iterator[uvicorn.Server]:
    """Its sockets are given to `run`; the threads that read for it end with the context."""
    settings = app.context.settings
    with Threads(settings.read_threads, name="http-send") as threads:
        service = _service(app, threads)
        config = uvicorn.Config(
            app,
            http=connection_class(service),
            ws="none",
            loop=loop,
            lifespan="on",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            backlog=BACKLOG,
            timeout_keep_alive=max(1, settings.keep_alive_ms // 1000),
            # The rest of the time is for the broker to close its logs.
            timeout_graceful_shutdown=max(1, settings.shutdown_timeout_ms * 4 // 5000),
            ssl_certfile=tls.certificate if tls else None,
            ssl_keyfile=tls.key if tls else None,
        )
        yield _Server(config, service, app.context, beside=beside, on_started=on_started)


def _service(app: TierlogApp, threads: Threads) -> Service:
    settings = app.context.settings
    limits = ConnectionLimits(
        connections_max=settings.connections_max,
        header_max_bytes=settings.header_max_bytes,
        header_timeout_s=settings.header_timeout_ms / 1000,
        # A client that sends more than this sees a reset instead of its 413.
        drain_max_bytes=8 * settings.body_max_bytes,
        drain_timeout_s=settings.body_idle_timeout_ms / 1000,
    )
    return Service(
        limits=limits,
        error_response=partial(_error_response, app.context),
        busy_app=_busy(app),
        immediate_app=app,
        threads=threads,
    )


def _busy(app: TierlogApp) -> Any:
    """The application above the limit of connections: only health is served, the rest gets 429."""

    async def busy(scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] in _HEALTH_PATHS:
            await app(scope, receive, send)
            return
        status, headers, body = _last_response(app.context, Throttled("too many connections"))
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    return busy


def _error_response(context: Context, error: RequestError) -> bytes:
    """The complete response to bytes that are not a request."""
    log.warning("not a request", error=str(error))
    status, headers, body = _last_response(context, error)
    date = (b"date", formatdate(usegmt=True).encode())  # uvicorn adds it to all others
    return encode_head(status, [date, *headers]) + body


def _last_response(context: Context, error: TierlogError) -> Response:
    """A problem that ends its connection and does not go through `dispatch`."""
    problem = problems.to_problem(error, request_id="")
    context.metrics.errors.labels(problem.code).inc()
    body = problem.body()
    headers = [
        *problem.headers,
        (b"x-request-id", secrets.token_hex(8).encode()),
        (b"content-length", b"%d" % len(body)),
        (b"connection", b"close"),
    ]
    return Response(problem.status, headers, body)
