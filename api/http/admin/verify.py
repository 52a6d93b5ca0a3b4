"""`POST /v1/topics/{topic}/verify`: what it finds wrong is the answer, not an error."""

from __future__ import annotations

import msgspec
from msgspec.structs import replace

from api.http import strict_json
from api.http.answers import Answer, json_answer
from api.http.bad_bytes import shown_path
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.plain_requests import no_body
from api.http.problems import public
from record_format.findings import Problem


class VerifyQuery(msgspec.Struct, forbid_unknown_fields=True):
    """`deep` reads every byte of both tiers."""

    deep: bool = False


async def verify(context: Context, exchange: Exchange) -> Answer:
    query = strict_json.parse_query(exchange.scope["query_string"], VerifyQuery)
    await no_body(context, exchange)
    report = await context.change_cold(context.broker.verify, exchange.topic, deep=query.deep)
    return json_answer(replace(report, problems=[_shown(one) for one in report.problems]))


def _shown(found: Problem) -> Problem:
    """A local file as other problems show one: without this machine's paths."""
    if found.file is None:
        return found
    file = shown_path(found.file)
    return replace(found, file=file, detail=public(found.detail.replace(found.file, file)))
