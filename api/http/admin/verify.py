"""`POST /v1/topics/{topic}/verify`: the problems found are the response, not an error."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from api.http import strict_json
from api.http.context import Context
from api.http.control_requests import no_body
from api.http.corruption_details import short_path
from api.http.exchange import Exchange
from api.http.problems import shorten_paths
from api.http.responses import Response, json_response
from record_format.findings import Problem


class VerifyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`deep` reads every byte of both tiers."""

    deep: bool = False


async def verify(context: Context, exchange: Exchange) -> Response:
    query = strict_json.parse_query(exchange.scope["query_string"], VerifyQuery)
    await no_body(context, exchange)
    report = await context.write_cold(context.broker.verify, exchange.topic, deep=query.deep)
    return json_response(replace(report, problems=[_shown(one) for one in report.problems]))


def _shown(found: Problem) -> Problem:
    """Shorten the path of a local file, as in problem documents."""
    if found.file is None:
        return found
    file = short_path(found.file)
    return replace(found, file=file, detail=shorten_paths(found.detail.replace(found.file, file)))
