"""Passes calls on to the broker of the cluster that can carry them out. Imported only in a cluster.

* A call is tried here first. If another broker leads what it is about, it goes there as it came;
  that broker never passes it on (`Tierlog-Forwarded`). What is in the bucket is read here
  (`fetch.cold_elsewhere`).
* While nobody leads, as during a hand-over, a call waits, `leader_wait_ms` at most. Meanwhile the
  others are asked who does: one question at a time, whatever waits.
* It is sent again only if it certainly was not carried out: without a connection, or after a
  refusal that says so. A read may always be sent again.
* A small body is received first, and kept, so that it can be sent again. A large one, and one of
  unknown length, is passed on as it arrives, and can be sent again until more of it has arrived
  than is kept (`bodies.KEPT_MAX_BYTES`); a refusal after that is the client's. Responses are
  streamed.
* A client that disconnects ends the call that was passed on.
"""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple, TypeVar

import httpx2
import msgspec

from tierlog.api.http import bodies
from tierlog.api.http.calls import Call
from tierlog.api.http.cluster.peers import check_trusted, trusted_for_peers
from tierlog.api.http.cluster.splitting import refusal_of
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import FORWARDED, Exchange
from tierlog.api.http.fetch.cold_elsewhere import ColdElsewhere
from tierlog.api.http.problems import HeaderList, PeerProblem
from tierlog.api.http.responses import AnyResponse, Response, StreamResponse
from tierlog.api.protocol.messages import BODILESS
from tierlog.broker.cluster.cluster import ASK_AGAIN_S, Cluster
from tierlog.record_format.errors import (
    WILL_PASS,
    LeaderUnknown,
    NotLeader,
    PeerAnswerLost,
    PeerUnavailable,
    ShuttingDown,
    TierlogError,
)
from tierlog.record_format.workarounds import decode_json

T = TypeVar("T")

CONNECT_TIMEOUT_S: Final = 2.0
SEND_TIMEOUT_S: Final = 30.0
_HOPS_MAX: Final = 3  # the broker that is asked may have handed over since, and names the next
_PAUSE_S: Final = 0.02
_PAUSE_MAX_S: Final = 0.25
_GONE_GRACE_S: Final = 0.2
_PIECE_BYTES: Final = 256 << 10
_IDLE_CONNECTIONS: Final = 64
_IDLE_S: Final = 30.0  # less than a broker keeps a connection: it is not closed under a request
_REFUSAL_MAX_BYTES: Final = 64 << 10
# Of one connection (RFC 9110, 7.6.1), set anew, or checked here already.
_NOT_PASSED_ON: Final = frozenset(
    b"connection content-length expect host http2-settings keep-alive origin proxy-connection "
    b"sec-fetch-site te tierlog-forwarded trailer transfer-encoding upgrade x-request-id".split()
)
_NOT_PASSED_BACK: Final = frozenset(
    b"connection content-length date keep-alive server server-timing transfer-encoding "
    b"x-request-id".split()
)
# A machine that is gone without a word ends a long poll after a minute, not never.
_KEEP_ALIVE: Final = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 4))
        if hasattr(socket, name)
    ),
]


@dataclass(slots=True)
class PassedOn:
    """How many calls, and parts of calls, by their answers: written on the event loop alone."""

    answered: int = 0
    refused: int = 0
    lost: int = 0


class Gateway:
    """Used on the event loop only."""

    def __init__(self, context: Context, cluster: Cluster) -> None:
        self._context, self._cluster = context, cluster
        limits = httpx2.Limits(
            max_connections=None,
            max_keepalive_connections=_IDLE_CONNECTIONS,
            keepalive_expiry=_IDLE_S,
        )
        trusted = trusted_for_peers(context.settings.peers_ca_file)
        self._http = httpx2.AsyncHTTPTransport(
            verify=trusted,
            limits=limits,
            socket_options=_KEEP_ALIVE,
            trust_env=False,
        )
        self.cold = ColdElsewhere(context, cluster, trusted)
        self._asking: asyncio.Future[None] | None = None
        self.passed_on = PassedOn()

    async def close(self) -> None:
        if self._asking is not None:
            self._asking.cancel()
        self.cold.close()
        await self._http.aclose()

    async def carry_out(
        self, exchange: Exchange, call: Call, here: Callable[[], Awaitable[AnyResponse]]
    ) -> AnyResponse:
        """The response of `here`, or of the broker that leads. Raises what `here` does."""
        context = self._context
        began_s, pause_s = time.monotonic(), _PAUSE_S
        while True:
            try:
                return await here()
            except WILL_PASS as error:
                refusal: TierlogError = error
            answer = await self._ask_leader(exchange, call, refusal)
            if not isinstance(answer, TierlogError):
                return answer
            waited_ms = (time.monotonic() - began_s) * 1000
            is_over = waited_ms >= context.settings.leader_wait_ms or context.waiting.is_stopping
            if is_over or exchange.is_spent:
                raise answer
            if self._asking is None or self._asking.done():
                self._asking = asyncio.ensure_future(self._ask_others())
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, _PAUSE_MAX_S)

    async def _ask_others(self) -> None:
        """Who leads; done once they may be asked again. What they report grows with what they lead,
        so they are asked for a fifth of the time at most.
        """
        began_s = time.monotonic()
        with suppress(TierlogError):  # the broker stops
            await self._context.write_cold(self._cluster.ask_who_leads)
        took_s = time.monotonic() - began_s
        await asyncio.sleep(max(ASK_AGAIN_S, 4 * took_s))

    async def _ask_leader(
        self, exchange: Exchange, call: Call, refusal: TierlogError
    ) -> AnyResponse | TierlogError:
        """The leader's response, or why nobody has carried the call out."""
        for _ in range(_HOPS_MAX):
            if not isinstance(refusal, NotLeader) or exchange.is_spent:
                break
            try:
                answer = await self._pass_on(exchange, call, refusal.url)
            except ClientGone as error:
                raise (PeerAnswerLost(str(error)) if call.writes else error) from error
            except PeerUnavailable as error:
                return error
            if not isinstance(answer, TierlogError):
                return answer
            refusal = answer
        # Whoever is named names another: one of them has yet to hear.
        return LeaderUnknown(str(refusal)) if isinstance(refusal, NotLeader) else refusal

    async def _pass_on(
        self, exchange: Exchange, call: Call, url: str
    ) -> AnyResponse | TierlogError:
        settings, inflight = self._context.settings, self._context.inflight
        watch = ClientWatch(self._context, exchange, stops=not call.writes)
        async with AsyncExitStack() as until_refused:
            until_refused.callback(watch.close)
            passed = bodies.body_to_pass_on(exchange, settings, inflight, on_end=watch.begin)
            async with passed as body:
                request = self._request(exchange, url, body)
                answer = await watch.until(self.send(request, writes=call.writes))
                until_refused.push_async_callback(answer.aclose)
                if answer.status_code in (421, 503):
                    if isinstance(body, bodies.BodyOnItsWay):
                        body.give_back()
                    return await watch.until(_refused(answer))
            until_refused.pop_all()  # they are the response's now
            return _streamed(answer, watch)

    async def ask_same(self, exchange: Exchange, url: str) -> PeerAnswer:
        """The call itself, for another broker's part of it. Raises as `ask` does."""
        async with bodies.received_body(
            exchange, self._context.settings, self._context.inflight
        ) as body:
            request = self._request(exchange, url, body)
        return await self.ask(request, writes=exchange.method not in ("GET", "HEAD"))

    def _request(
        self, exchange: Exchange, url: str, body: bytes | bytearray | bodies.BodyOnItsWay
    ) -> httpx2.Request:
        headers = [one for one in exchange.scope["headers"] if one[0] not in _NOT_PASSED_ON]
        query = exchange.scope["query_string"]
        target = exchange.scope["raw_path"] + (b"?" + query if query else b"")
        return self.request(
            exchange, url, target, method=exchange.method, headers=headers, body=body
        )

    def request(
        self,
        exchange: Exchange,
        url: str,
        target: bytes,
        *,
        method: str,
        headers: HeaderList,
        body: bytes | bytearray | memoryview | bodies.BodyOnItsWay = b"",
    ) -> httpx2.Request:
        """To the broker at `url`, on behalf of a client."""
        given = [
            *headers,
            (b"host", httpx2.URL(url).netloc),
            (b"x-request-id", exchange.request_id.encode("latin-1")),
            (FORWARDED, b"%d" % self._cluster.members.me.node_id),
        ]
        size_bytes: int | None
        if isinstance(body, bodies.BodyOnItsWay):
            size_bytes, parts = body.size_bytes, body.parts()
        else:
            size_bytes, parts = len(body), _pieces_of(body)
        if size_bytes is None:
            given.append((b"transfer-encoding", b"chunked"))
        elif size_bytes or method not in ("GET", "HEAD"):
            given.append((b"content-length", b"%d" % size_bytes))
        timeout = {"connect": CONNECT_TIMEOUT_S, "write": SEND_TIMEOUT_S, "read": None}
        return httpx2.Request(
            method,
            url,
            headers=given,
            stream=_Parts(parts),
            extensions={"target": target, "timeout": timeout},
        )

    def watch(self, exchange: Exchange) -> ClientWatch:
        """For a call that waits for other brokers, and changes nothing; its body was received."""
        watch = ClientWatch(self._context, exchange, stops=True)
        watch.begin()
        return watch

    async def ask(self, request: httpx2.Request, *, writes: bool) -> PeerAnswer:
        """The whole answer. Raises as `send` does; NotLeader, LeaderUnknown or ShuttingDown for a
        refusal after which it may be sent again; PeerProblem for any other.
        """
        answer = await self.send(request, writes=writes)
        body = bytearray()
        try:
            async for part in PeerBody(answer, None):
                body += part
        except PeerUnavailable as error:
            raise (PeerAnswerLost(str(error)) if writes else error) from error
        finally:
            await answer.aclose()
        if answer.status_code < 300:
            return PeerAnswer(answer.status_code, bytes(body))
        raise _refusal_or_problem(answer, bytes(body))

    @asynccontextmanager
    async def streaming(self, request: httpx2.Request) -> AsyncIterator[PeerStream]:
        """A response that is read as it comes. Raises as `ask` does."""
        answer = await self.send(request, writes=False)
        try:
            if answer.status_code >= 300:
                raise await _error_of(answer)
            yield PeerStream(_passed_back(answer), PeerBody(answer, None))
        finally:
            await answer.aclose()

    async def send(self, request: httpx2.Request, *, writes: bool) -> httpx2.Response:
        """Raises PeerUnavailable if the request was certainly not carried out, or may be sent
        again; PeerAnswerLost if it may have been.
        """
        check_trusted(str(request.url), self._context.settings.peers_ca_file)
        try:
            answer = await self._http.handle_async_request(request)
        except (httpx2.ConnectError, httpx2.ConnectTimeout, httpx2.UnsupportedProtocol) as error:
            self.passed_on.lost += 1
            raise PeerUnavailable(_in_words(request, error)) from error
        except httpx2.TransportError as error:
            self.passed_on.lost += 1
            lost = PeerAnswerLost if writes else PeerUnavailable
            raise lost(_in_words(request, error)) from error
        if answer.status_code in (421, 503):
            self.passed_on.refused += 1
        else:
            self.passed_on.answered += 1
        return answer


class PeerAnswer(NamedTuple):
    status: int
    body: bytes


class PeerStream(NamedTuple):
    headers: HeaderList
    parts: PeerBody


async def _error_of(answer: httpx2.Response) -> TierlogError:
    return _refusal_or_problem(answer, await _short_body(answer))


def _refusal_or_problem(answer: httpx2.Response, body: bytes) -> TierlogError:
    refusal = refusal_of(answer.status_code, body)
    if refusal is not None:
        return refusal
    try:
        document = decode_json(body, dict[str, Any])
        return PeerProblem(answer.status_code, document, _passed_back(answer))
    except msgspec.MsgspecError:
        return PeerUnavailable(f"another broker answers {answer.status_code}")


class _Parts(httpx2.AsyncByteStream):
    def __init__(self, parts: AsyncIterator[bytes]) -> None:
        self._parts = parts

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._parts


async def _pieces_of(body: bytes | bytearray | memoryview) -> AsyncIterator[bytes]:
    for start in range(0, len(body), _PIECE_BYTES):
        yield bytes(body[start : start + _PIECE_BYTES])


class ClientGone(PeerUnavailable):
    """Nobody waits for the answer."""


class ClientWatch:
    """Ends waits for another broker: soon after the client has closed its connection, or at least
    its sending side; with `stops` also when this broker stops. Call `begin` once the request's
    body was received.
    """

    def __init__(self, context: Context, exchange: Exchange, *, stops: bool) -> None:
        self._waiting = context.waiting
        self._waits: asyncio.Task[Any] | None = None
        self._ended: TierlogError | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._exchange = exchange
        self._gone: asyncio.Future[None] | None = None
        if stops:
            self._waiting.add_cancel(self._stop)

    def begin(self) -> None:
        self._gone = asyncio.ensure_future(self._exchange.wait_for_disconnect())
        self._gone.add_done_callback(self._end_soon)

    async def until(self, awaited: Awaitable[T]) -> T:
        """Raises ClientGone, ShuttingDown."""
        self._waits = task = asyncio.current_task()
        assert task is not None, "a request has a task"
        if self._ended is not None:
            task.cancel()
        try:
            return await awaited
        except asyncio.CancelledError:
            if self._ended is None:
                raise
            task.uncancel()
            raise self._ended from None
        finally:
            self._waits = None

    def _end_soon(self, _: object) -> None:
        """It may have sent all, and wait for a response that is on its way."""
        self._timer = asyncio.get_running_loop().call_later(
            _GONE_GRACE_S, self._end, ClientGone("the client has closed its connection")
        )

    def _stop(self) -> None:
        self._end(ShuttingDown("the broker is shutting down"))

    def _end(self, reason: TierlogError) -> None:
        self._ended = reason
        if self._waits is not None:
            self._waits.cancel()

    def close(self) -> None:
        self._waiting.discard_cancel(self._stop)
        if self._gone is not None:
            self._gone.remove_done_callback(self._end_soon)
            self._gone.cancel()
        if self._timer is not None:
            self._timer.cancel()


class PeerBody:
    """The body of another broker's response. Without an announced end (`watch`) it ends with its
    client, and when this broker stops.
    """

    def __init__(self, answer: httpx2.Response, watch: ClientWatch | None) -> None:
        self._answer, self._watch = answer, watch
        assert isinstance(answer.stream, httpx2.AsyncByteStream)
        self._parts = aiter(answer.stream)

    def __aiter__(self) -> PeerBody:
        return self

    async def __anext__(self) -> bytes:
        try:
            if self._watch is None:
                return await anext(self._parts)
            return await self._watch.until(anext(self._parts))
        except (PeerUnavailable, ShuttingDown):
            raise StopAsyncIteration from None
        except httpx2.TransportError as error:
            raise PeerUnavailable(f"a broker's answer breaks off: {error}") from error

    async def aclose(self) -> None:
        if self._watch is not None:
            self._watch.close()
        await self._answer.aclose()


async def _refused(answer: httpx2.Response) -> Response | TierlogError:
    body = await _short_body(answer)
    refusal = refusal_of(answer.status_code, body)
    return refusal or Response(answer.status_code, _passed_back(answer), body)


async def _short_body(answer: httpx2.Response) -> bytes:
    body = bytearray()
    async for part in PeerBody(answer, None):
        body += part
        if len(body) > _REFUSAL_MAX_BYTES:
            raise PeerUnavailable("another broker's refusal is too long")
    return bytes(body)


def _streamed(answer: httpx2.Response, watch: ClientWatch) -> StreamResponse:
    length = answer.headers.get("content-length")
    is_unbounded = length is None and answer.status_code not in BODILESS
    if not is_unbounded:
        watch.close()
    return StreamResponse(
        _passed_back(answer),
        PeerBody(answer, watch if is_unbounded else None),
        status=answer.status_code,
        size_bytes=None if length is None else int(length),
    )


def _passed_back(answer: httpx2.Response) -> HeaderList:
    lower = [(name.lower(), value) for name, value in answer.headers.raw]
    return [one for one in lower if one[0] not in _NOT_PASSED_BACK]


def _in_words(request: httpx2.Request, error: Exception) -> str:
    return f"the broker at {request.url.netloc.decode()}: {str(error) or type(error).__name__}"
