"""The files that the page loads, by name out of one table: no path is ever made of a request."""

from __future__ import annotations

import hashlib
from functools import cache
from importlib.resources import files

from api.console.rendering import HEADERS
from api.console.static_names import STATIC_NAMES
from api.http.answers import Answer
from api.http.byte_range import none_match
from api.http.context import Context
from api.http.exchange import Exchange
from api.http.plain_requests import no_query
from api.http.refusals import NotFound


async def static_file(_: Context, exchange: Exchange) -> Answer:
    no_query(exchange)
    name = exchange.params["file"]
    media_type = STATIC_NAMES.get(name)
    if media_type is None:
        raise NotFound("not a file of the console")
    body, etag = _read(name)
    headers = [
        (b"etag", etag.encode()),
        (b"cache-control", b"no-cache"),
        *HEADERS,
    ]
    if not none_match(exchange.header(b"if-none-match"), etag):
        return Answer(304, headers)
    return Answer(200, [(b"content-type", media_type), *headers], body)


@cache
def _read(name: str) -> tuple[bytes, str]:
    body = files("api.console").joinpath("static", name).read_bytes()
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'
