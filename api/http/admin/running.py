"""Calls for those who run the broker: health, readiness, metrics, storage."""

from __future__ import annotations

from api.http.access.grants import NOBODY
from api.http.answers import NO_STORE, Answer, json_answer
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.metrics.registry import CONTENT_TYPE
from api.http.problems import public
from api.http.request import media_types
from api.http.shapes import Alive, Ready


async def healthz(_: Context, __: Exchange) -> Answer:
    return json_answer(Alive())


async def readyz(context: Context, exchange: Exchange) -> Answer:
    reasons, degraded = context.broker.readiness()
    ready = Ready(not reasons, [public(one) for one in reasons], [public(one) for one in degraded])
    if exchange.grant is NOBODY:
        ready = Ready(ready.ready, [], [])
    return json_answer(ready, status=200 if ready.ready else 503)


async def metrics(context: Context, exchange: Exchange) -> Answer:
    media_types.preferred(
        exchange.header(b"accept"), offered=("text/plain", "application/openmetrics-text")
    )
    body = await context.read(context.metrics.text)
    return Answer(200, [(b"content-type", CONTENT_TYPE.encode()), NO_STORE], body)


async def storage(context: Context, _: Exchange) -> Answer:
    return json_answer(await context.read(context.broker.storage_report))
