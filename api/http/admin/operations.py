"""Calls for operators: health, readiness, metrics, storage."""

from __future__ import annotations

from api.http.access.scopes import NOBODY
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.metrics.registry import CONTENT_TYPE
from api.http.request import media_types
from api.http.responses import NO_STORE, Response, json_response
from api.http.schemas import Alive, Ready


async def healthz(_: Context, __: Exchange) -> Response:
    return json_response(Alive())


async def readyz(context: Context, exchange: Exchange) -> Response:
    reasons, degraded = context.broker.readiness()
    ready = Ready(
        not reasons,
        [context.shorten_paths(one) for one in reasons],
        [context.shorten_paths(one) for one in degraded],
    )
    if exchange.grant is NOBODY:
        ready = Ready(ready.ready, [], [])
    return json_response(ready, status=200 if ready.ready else 503)


async def metrics(context: Context, exchange: Exchange) -> Response:
    media_types.preferred(
        exchange.header(b"accept"), offered=("text/plain", "application/openmetrics-text")
    )
    body = await context.read(context.metrics.text)
    return Response(200, [(b"content-type", CONTENT_TYPE.encode()), NO_STORE], body)


async def storage(context: Context, _: Exchange) -> Response:
    return json_response(await context.read(context.broker.storage_report))
