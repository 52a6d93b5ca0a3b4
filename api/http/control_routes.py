"""Calls that carry no records are routes of FastAPI. What they need is theirs by dependencies:
path parameters, query and body as typed structs, the broker, what the caller may do.

* The path was matched already, as it was sent: an encoded slash never changes it, and each segment
  is decoded once. So a route is FULL for the call that was found, and for no other.
* Query and body are msgspec structs: unknown parameters and members are refused by name, and a
  refusal says where. FastAPI's own validation finds nothing to refuse.
* Dependencies run in the order of a handler's parameters: the first that raises is the answer.
* Whatever they or a handler raise becomes a problem document by an exception handler of the
  application.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, TypeVar

import msgspec
from fastapi import Depends, Request, Response
from fastapi.routing import APIRoute
from starlette.routing import Match

from tierlog.api.http import bodies, header_values, strict_json
from tierlog.api.http.calls import Call, Endpoint
from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.exchange import Exchange, Receive, Send
from tierlog.api.protocol.service import Scope
from tierlog.api.serving.grants import Grant
from tierlog.broker.partition.partition import Partition

T = TypeVar("T")
EXCHANGE: Final = "tierlog.exchange"  # in the scope: the `Exchange`
CALL: Final = "tierlog.call"  # in the scope: the `Call` that was found


class JsonResponse(Response):
    """Encoded by msgspec, and not to be stored."""

    media_type = "application/json"

    def __init__(
        self, document: object, *, status: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        given = {"cache-control": "no-store", **(headers or {})}
        super().__init__(msgspec.json.encode(document), status_code=status, headers=given)


class ControlRoute(APIRoute):
    """A call of the table, served by FastAPI. `shown`: in the OpenAPI document."""

    def __init__(self, call: Call, endpoint: Endpoint, *, shown: bool) -> None:
        self._call = call
        super().__init__(
            call.path,
            endpoint,
            methods={call.method},
            status_code=call.status,
            response_class=Response,
            response_model=None,
            operation_id=call.name,
            include_in_schema=shown,
        )

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope.get(CALL) is not self._call:
            return Match.NONE, {}
        params = dict(scope[EXCHANGE].params)
        return Match.FULL, {"endpoint": self.endpoint, "path_params": params, "route": self}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """HEAD is served as GET; its body is left out where it is sent."""
        await self.app(scope, receive, send)


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters, or no members."""


_JSON: Final = (header_values.JSON,)


async def json_body(
    context: Context,
    exchange: Exchange,
    kind: type[T],
    *,
    limit: int | None = None,
    accepted: Sequence[str] = _JSON,
) -> T:
    """Read and decode a JSON body of at most `limit` bytes; by default it is a small one. Raises
    InvalidRequest, UnsupportedMediaType, and what `bodies.received_body` does.
    """
    header_values.content_type(exchange.header(b"content-type"), accepted=accepted)
    encoding = header_values.content_encoding(exchange.header(b"content-encoding"))
    limit = context.settings.control_body_max_bytes if limit is None else limit
    async with bodies.received_body(
        exchange, context.settings, context.inflight, limit=limit
    ) as body:

        def decode() -> T:
            expanded = bodies.expand(body, encoding, max_bytes=limit)
            return strict_json.decode_control(expanded, kind)

        return await context.compute(UNKNOWN_SIZE if encoding else len(body), decode)


def no_query(exchange: Exchange) -> None:
    exchange.query(_Nothing)


async def _exchange_of(request: Request) -> Exchange:
    exchange: Exchange = request.scope[EXCHANGE]
    return exchange


async def _context_of(request: Request) -> Context:
    context: Context = request.app.context
    return context


TheExchange = Annotated[Exchange, Depends(_exchange_of)]
TheContext = Annotated[Context, Depends(_context_of)]


async def _grant_of(exchange: TheExchange) -> Grant:
    return exchange.grant


async def _partition_of(context: TheContext, exchange: TheExchange) -> Partition:
    """Raises UnknownTopic, UnknownPartition."""
    return context.broker.partition(exchange.topic, exchange.partition)


async def _no_body(context: TheContext, exchange: TheExchange) -> None:
    """Check that a POST without parameters has no body, or an object without members."""
    encoding = header_values.content_encoding(exchange.header(b"content-encoding"))
    limit = context.settings.control_body_max_bytes
    async with bodies.received_body(
        exchange, context.settings, context.inflight, limit=limit
    ) as body:
        if body.strip():
            header_values.content_type(exchange.header(b"content-type"), accepted=_JSON)
            body = bodies.expand(body, encoding, max_bytes=limit)
            strict_json.decode_control(body, _Nothing)


TheGrant = Annotated[Grant, Depends(_grant_of)]
ThePartition = Annotated[Partition, Depends(_partition_of)]
WithoutBody: Final = Depends(_no_body)


def query_as(kind: type[Any]) -> Any:
    """The query's parameters as this struct. Raises InvalidRequest."""

    async def parse(exchange: TheExchange) -> Any:
        return exchange.query(kind)

    return Depends(parse)


def body_as(kind: type[Any], *, accepted: Sequence[str] = _JSON) -> Any:
    """The JSON body as this struct. Raises what `json_body` does."""

    async def decode(context: TheContext, exchange: TheExchange) -> Any:
        return await json_body(context, exchange, kind, accepted=accepted)

    return Depends(decode)
