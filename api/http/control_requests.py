"""Requests that carry no records: query parameters, `Accept`, and a small JSON body.

Unknown parameters and members are refused by name.
"""

from __future__ import annotations

from typing import TypeVar

import msgspec

from tierlog.api.http import strict_json
from tierlog.api.http.calls import Call
from tierlog.api.http.context import UNKNOWN_SIZE, Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.request import bodies, media_types

T = TypeVar("T")


class _Nothing(msgspec.Struct, forbid_unknown_fields=True):
    """No parameters, or no members."""


async def json_body(context: Context, exchange: Exchange, kind: type[T]) -> T:
    """Read and decode a small JSON body. Raises InvalidRequest, UnsupportedMediaType, and what
    `bodies.received_body` does.
    """
    media_types.content_type(exchange.header(b"content-type"), accepted=(media_types.JSON,))
    encoding = media_types.content_encoding(exchange.header(b"content-encoding"))
    limit = context.settings.control_body_max_bytes
    async with bodies.received_body(
        exchange, context.settings, context.inflight, limit=limit
    ) as body:

        def decode() -> T:
            expanded = bodies.expand(body, encoding, max_bytes=limit)
            return strict_json.decode_control(expanded, kind)

        return await context.compute(UNKNOWN_SIZE if encoding else len(body), decode)


async def no_body(context: Context, exchange: Exchange) -> None:
    """Check that a POST without parameters has no body, or an object without members."""
    encoding = media_types.content_encoding(exchange.header(b"content-encoding"))
    limit = context.settings.control_body_max_bytes
    async with bodies.received_body(
        exchange, context.settings, context.inflight, limit=limit
    ) as body:
        if body.strip():
            media_types.content_type(exchange.header(b"content-type"), accepted=(media_types.JSON,))
            body = bodies.expand(body, encoding, max_bytes=limit)
            strict_json.decode_control(body, _Nothing)


def check_request(call: Call, exchange: Exchange) -> None:
    """Check the query and `Accept` of a call. Raises InvalidRequest, NotAcceptable."""
    if call.query is None:
        no_query(exchange)
    if call.returns_only_json:
        media_types.preferred(exchange.header(b"accept"), offered=(media_types.JSON,))


def no_query(exchange: Exchange) -> None:
    exchange.query(_Nothing)
