"""The front door: every request comes in here, and every response leaves here.

* A call of the API is found and run here, in place of FastAPI's routing and its dependency
  machinery, which cost several times as much as a small fetch. The calls are in FastAPI's routes as
  well, so that its document and its tools see them; what is not a call is not found.
* Whatever a handler raises becomes a problem document, here and nowhere else.
* Each response carries `X-Request-Id`: the client's if it is a plain token, otherwise a new one.
* The first steps (who asks, for what, and the answer if it waits for nothing) need no task: if the
  protocol can send such an answer itself, they run in the parser's callback, which halves the cost
  of a small fetch. Either way the request ends here.
"""

from __future__ import annotations

import asyncio
import itertools
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import inf
from typing import Any, Final

import structlog
from fastapi import FastAPI
from structlog.contextvars import bind_contextvars, bound_contextvars

from api.http.answers import (
    Answer,
    AnyAnswer,
    FileAnswer,
    announced_size,
    send_answer,
    whole_head,
)
from api.http.calls import Call, CallTable
from api.http.context import Context
from api.http.exchange import Exchange, Receive, Send
from api.http.plain_requests import check_plain
from api.http.refusals import CutByStop, MethodNotAllowed, NotFound
from api.protocol.at_once import AT_ONCE_BYTES, ReadyAnswer, Scope
from api.protocol.errors import ClientGone
from record_format.errors import OUT_OF_FILES, NoDescriptor, TierlogError
from record_format.file_slice import FileSlice

log = structlog.get_logger(__name__)

_PLAIN_ID: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}\Z", re.ASCII)
_METHODS: Final = frozenset(("GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"))
_TELL_EVERY_S: Final = 60.0
_BEGUN: Final = "tierlog.begun"  # in the scope: the result of the request's first steps


class CutShort(ConnectionAbortedError):
    """A response ended before its announced length. It was logged already."""


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
class Begun:
    """A request's first steps: a call, or an answer, or both."""

    exchange: Exchange
    call: Call | None = None
    answer: AnyAnswer | None = None


class TierlogApp(FastAPI):
    """FastAPI, with the calls of the API in front of its routes. `tell`: called with each request
    that is over and its status, if anybody wants to know.
    """

    tell: Callable[[Exchange, str], None] | None = None

    def __init__(self, context: Context, table: CallTable, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.context, self.table = context, table
        self._ids = RequestIds()
        self._told_of_files_s = -inf

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await super().__call__(scope, receive, send)
            return
        begun: Begun = scope.pop(_BEGUN, None) or self._begin(scope)
        exchange = begun.exchange
        exchange.receive, exchange.send = receive, send
        bind_contextvars(request_id=exchange.request_id)  # every line that is logged during it
        await self._serve(begun)

    # --- before there is a task -------------------------------------------------------------------

    def answer_at_once(self, scope: Scope) -> ReadyAnswer | None:
        """A small answer with its whole head. If there is none, the request continues in `__call__`
        with this scope; otherwise `went_out` has to follow.
        """
        begun = self._begin(scope)
        scope[_BEGUN] = begun
        answer = begun.answer
        if not isinstance(answer, Answer | FileAnswer) or answer.size_bytes > AT_ONCE_BYTES:
            return None
        headers = whole_head(begun.exchange, answer.headers, size=announced_size(answer))
        if isinstance(answer, Answer):
            return ReadyAnswer(answer.status, headers, body=answer.body)
        slices = answer.slices if answer.size_bytes else ()
        return ReadyAnswer(answer.status, headers, slices=slices)

    def went_out(self, scope: Scope, *, left: tuple[FileSlice, ...]) -> None:
        """The head of an answer was sent, and its body except `left`, which `__call__` sends."""
        # Taken out: the scope stays with the connection, and an open file would stay with it.
        begun: Begun = scope.pop(_BEGUN)
        exchange, answer = begun.exchange, begun.answer
        assert isinstance(answer, Answer | FileAnswer), "what was answered at once"
        exchange.started = True
        if left:
            assert isinstance(answer, FileAnswer), "bytes in memory are all taken"
            begun.answer = answer._replace(slices=left)
            scope[_BEGUN] = begun
        else:
            self._count(exchange, str(answer.status))

    def _begin(self, scope: Scope) -> Begun:
        exchange = Exchange(scope)
        exchange.request_id = self._ids.of(exchange.header(b"x-request-id"))
        call: Call | None = None
        try:
            access = self.context.access
            access.admit(exchange)
            call = self._find(exchange)
            access.check(exchange, None if call is None else (call.method, call.path))
            if call is None:
                path = scope["path"]
                raise NotFound(f"{path} is not a path of this API; see /docs")
            if call.at_once is None:
                check_plain(call, exchange)
                return Begun(exchange, call)
            return Begun(exchange, call, call.at_once(self.context, exchange))
        except Exception as error:  # noqa: BLE001
            # Here, not later: an exception that is kept keeps the frames that it passed through.
            with bound_contextvars(request_id=exchange.request_id):
                return Begun(exchange, answer=self._refusal(exchange, call, error))

    # --- the rest of it ---------------------------------------------------------------------------

    async def _serve(self, begun: Begun) -> None:
        metrics, exchange = self.context.metrics, begun.exchange
        status = "500"
        metrics.under_way.inc()
        try:
            answer = await self._answer(begun)
            status = str(getattr(answer, "status", 200))
            await self._send(exchange, answer)
        except ClientGone:
            status = "gone"
        finally:
            self.context.unsent.sent(exchange)
            metrics.under_way.dec()
            self._count(exchange, status)

    def _count(self, exchange: Exchange, status: str) -> None:
        method = exchange.method if exchange.method in _METHODS else "other"
        path = exchange.template or "other"
        self.context.metrics.requests.answered(
            method, path, status, seconds=exchange.timings.elapsed_s
        )
        if self.tell is not None:
            self.tell(exchange, status)

    async def _answer(self, begun: Begun) -> AnyAnswer:
        exchange, call = begun.exchange, begun.call
        answer, begun.answer = begun.answer, None  # only the sender keeps a reference to it
        try:
            if answer is None:
                assert call is not None, "what is no call was refused"
                answer = await call.handler(self.context, exchange)
            return await self.context.unsent.admitted(exchange, answer)
        except ClientGone:
            raise
        except asyncio.CancelledError:
            if not self.context.is_stopping:
                raise
            late = CutByStop("the broker stops, and waited for this request as long as it may")
            return self._refusal(exchange, call, late)
        except Exception as error:  # noqa: BLE001
            return self._refusal(exchange, call, error)

    async def _send(self, exchange: Exchange, answer: AnyAnswer) -> None:
        """A fault after the head was sent can only cut the connection: it is logged and raised."""
        try:
            await send_answer(exchange, answer)
        except (TierlogError, EOFError, OSError) as error:
            self._log(exchange, error, "cut-short")
            raise CutShort("the response was cut short") from error

    def _find(self, exchange: Exchange) -> Call | None:
        scope = exchange.scope
        found = self.table.find(scope.get("raw_path") or scope["path"].encode())
        if found is None:
            return None
        by_method, exchange.params = found
        method = "GET" if exchange.method == "HEAD" else exchange.method
        call = by_method.get(method)
        if call is None:
            exchange.template = next(iter(by_method.values())).path
            raise MethodNotAllowed(exchange.method, allowed=allowed_methods(by_method))
        exchange.template = call.path
        return call

    def _refusal(self, exchange: Exchange, call: Call | None, error: Exception) -> Answer:
        writing = call is not None and call.writes
        if isinstance(error, OSError) and error.errno in OUT_OF_FILES and not writing:
            error = NoDescriptor(f"no descriptor left for what is to be read: {error.strerror}")
        if isinstance(error, NoDescriptor):
            self._tell_of_files(error)
        problem = self.context.problem(exchange, error, writing=writing)
        self.context.metrics.errors.labels(problem.code).inc()
        if problem.status >= 500:
            self._log(exchange, error, problem.code)
        return Answer(problem.status, problem.headers, problem.body())

    def _tell_of_files(self, error: NoDescriptor) -> None:
        """Now and then, not for each of the many requests that it affects."""
        now_s = time.monotonic()
        if now_s - self._told_of_files_s >= _TELL_EVERY_S:
            self._told_of_files_s = now_s
            log.error("no descriptor left", error=str(error))

    def _log(self, exchange: Exchange, error: Exception, code: str) -> None:
        log.error(
            "request failed",
            method=exchange.method,
            path=exchange.template,
            **_named(exchange.params),
            offset=getattr(error, "offset", None),
            code=code,
            error=str(error) or type(error).__name__,
            exc_info=None if isinstance(error, TierlogError) else error,
        )


def _named(params: Mapping[str, str]) -> dict[str, str]:
    """The path's parts as the broker's own log lines show them: a partition as `topic-number`."""
    named = dict(params)
    if "topic" in named and "partition" in named:
        named["partition"] = f"{named.pop('topic')}-{named['partition']}"
    return named


def allowed_methods(by_method: Any) -> list[str]:
    return sorted({*by_method, *(("HEAD",) if "GET" in by_method else ())})
