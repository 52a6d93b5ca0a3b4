"""`POST /v1/topics/{topic}/verify`: the problems found are the response, not an error."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from api.http.context import Context
from api.http.control_requests import no_body
from api.http.exchange import Exchange
from api.http.local_paths import short_path
from api.http.responses import Response, json_response
from record_format.findings import Problem


class VerifyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`deep` reads every byte of both tiers."""

    deep: bool = False


async def verify(context: Context, exchange: Exchange) -> Response:
    query = exchange.query(VerifyQuery)
    await no_body(context, exchange)
    report = await context.write_cold(context.broker.verify, exchange.topic, deep=query.deep)
    return json_response(
        replace(report, problems=[_shown(context, one) for one in report.problems])
    )


def _shown(context: Context, found: Problem) -> Problem:
    """Shorten the path of a local file, as in problem documents."""
    if found.file is None:
        return found
    file, detail = short_path(found.file), context.shorten_paths(found.detail)
    return replace(found, file=file, detail=detail)
