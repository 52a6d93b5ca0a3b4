"""`/openapi.json`, and at `/docs` the same as a page, by Swagger UI out of our own package.

* Nothing is loaded from elsewhere, and the page's policy forbids it: it works without a network.
* The page and its files hold nothing but what anybody can read in our package, and a browser sends
  no token for them: they are open, and the page asks for the token that the document takes.
* Files are found by name in one table: no path is ever made of a request.
* `swagger_ui/` holds what is needed of swagger-ui-dist 5.35.0 (Apache-2.0, its licence beside it),
  unchanged but for the stylesheet's reference to a source map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, Final

import msgspec

from api.http.answers import JSON, Answer
from api.http.byte_range import none_match
from api.http.calls import Call
from api.http.context import Context
from api.http.docs_files import FILES
from api.http.exchange import Exchange
from api.http.plain_requests import acceptable_json, no_query
from api.http.problems import HeaderList
from api.http.refusals import NotFound

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>tierlog: the HTTP API</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="stylesheet" href="docs/docs.css">
<div id="swagger-ui"></div>
<dialog id="ask-token" aria-labelledby="ask-token-title">
<form>
<h2 id="ask-token-title">This broker wants a token</h2>
<p>One with the scope <code>read</code> is enough. It is kept by this tab alone, until the tab is
closed.</p>
<label>Token
<input type="password" name="token" autocomplete="off" spellcheck="false" required></label>
<p id="refusal" role="alert"></p>
<button>Use it</button>
</form>
</dialog>
<noscript>The same is in <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/docs.js"></script>
</html>
"""
# Swagger UI's stylesheet draws with data: images.
_HEADERS: Final[HeaderList] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; "
        b"img-src 'self' data:; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cache-control", b"no-cache"),
]


async def docs_page(_: Context, exchange: Exchange) -> Answer:
    no_query(exchange)
    return Answer(200, [(b"content-type", b"text/html; charset=utf-8"), *_HEADERS], _PAGE)


async def docs_file(_: Context, exchange: Exchange) -> Answer:
    no_query(exchange)
    name = exchange.params["file"]
    if name not in FILES:
        raise NotFound("not a file of the documentation")
    body, etag = _read(name)
    headers = [(b"etag", etag.encode()), *_HEADERS]
    if not none_match(exchange.header(b"if-none-match"), etag):
        return Answer(304, headers)
    return Answer(200, [(b"content-type", FILES[name]), *headers], body)


def document_call(document: Callable[[], dict[str, Any]]) -> Call:
    """`document` makes what is shown; it is asked once, when the first reader comes."""

    @cache
    def written() -> tuple[bytes, str]:
        return _tagged(msgspec.json.encode(document()))

    async def openapi_document(_: Context, exchange: Exchange) -> Answer:
        no_query(exchange)
        acceptable_json(exchange)
        body, etag = written()
        headers = [(b"etag", etag.encode()), (b"cache-control", b"no-cache")]
        if not none_match(exchange.header(b"if-none-match"), etag):
            return Answer(304, headers)
        return Answer(200, [JSON, *headers], body)

    return Call(
        method="GET", path="/openapi.json", handler=openapi_document, tag="docs", summary=""
    )


@cache
def _read(name: str) -> tuple[bytes, str]:
    return _tagged(files("api.http").joinpath("swagger_ui", name).read_bytes())


def _tagged(body: bytes) -> tuple[bytes, str]:
    """With a strong ETag."""
    return body, f'"{hashlib.sha256(body).hexdigest()[:32]}"'


DOCS_CALLS: Final = (
    Call(method="GET", path="/docs", handler=docs_page, tag="docs", summary=""),
    Call(method="GET", path="/docs/{file}", handler=docs_file, tag="docs", summary=""),
)
