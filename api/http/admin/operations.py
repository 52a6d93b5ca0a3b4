"""Calls for operators: health, readiness, metrics, storage, offload, verification."""

from __future__ import annotations

import msgspec
from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from tierlog.api.http.access.scopes import NOBODY
from tierlog.api.http.context import Context
from tierlog.api.http.control_requests import no_body
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch.reading import WaitMs
from tierlog.api.http.local_paths import short_path
from tierlog.api.http.metrics.registry import CONTENT_TYPE
from tierlog.api.http.request import media_types
from tierlog.api.http.responses import NO_STORE, Response, json_response
from tierlog.api.http.schemas import Alive, Ready
from tierlog.record_format.findings import Problem


class OffloadQuery(msgspec.Struct, forbid_unknown_fields=True):
    wait_ms: WaitMs | UnsetType = UNSET


class VerifyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`deep` reads every byte of both tiers."""

    deep: bool = False


async def healthz(_: Context, __: Exchange) -> Response:
    return json_response(Alive())


async def readyz(context: Context, exchange: Exchange) -> Response:
    reasons, degraded = context.broker.readiness()
    ready = Ready(
        not reasons,
        [context.shorten_paths(one) for one in reasons],
        [context.shorten_paths(one) for one in degraded],
    )
    if exchange.grant is NOBODY or exchange.grant.topics:  # the reasons name any topic
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


async def offload(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(OffloadQuery)
    await no_body(context, exchange)
    wait_ms = None if isinstance(query.wait_ms, UnsetType) else query.wait_ms
    progress = await context.write_cold(context.broker.offload, exchange.topic, wait_ms=wait_ms)
    return json_response(progress)


async def verify(context: Context, exchange: Exchange) -> Response:
    """The problems found are the response, not an error."""
    query = exchange.query(VerifyQuery)
    await no_body(context, exchange)
    report = await context.write_cold(context.broker.verify, exchange.topic, deep=query.deep)
    return json_response(
        replace(report, problems=[_shown_problem(context, one) for one in report.problems])
    )


def _shown_problem(context: Context, found: Problem) -> Problem:
    """Shorten the path of a local file, as in problem documents."""
    if found.file is None:
        return found
    file, detail = short_path(found.file), context.shorten_paths(found.detail)
    return replace(found, file=file, detail=detail)
