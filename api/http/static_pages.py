"""What is constant while a broker runs, with a strong ETag: files of our package, `/openapi.json`,
and at `/docs` the same as a page, with a bundled Swagger UI.

* Files are looked up by name in a table: a path is never built from a request.
* `/docs` looks like the console and leads back to it: it has the console's stylesheet, and its
  choice of light or dark, by their addresses.
* Nothing is loaded from elsewhere, and the page's Content-Security-Policy forbids it: it works
  without a network.
* The page and its files contain only what is public in our package, and a browser sends no token
  for them, so they are open; the page asks for the token that the document needs.
* `docs/swagger_ui/` has the necessary files of swagger-ui-dist 5.35.0 (Apache-2.0, with its
  license), unchanged except for the stylesheet's reference to a source map.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import aiofiles
import msgspec

from tierlog.api.http import header_values
from tierlog.api.http.access.scopes import DOCS_NAMES
from tierlog.api.http.calls import Body, Call
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.header_values import none_match
from tierlog.api.http.problems import HeaderList, NotFound
from tierlog.api.http.responses import Response

_PAGE: Final = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<script src="console/static/choices.js"></script>
<title>tierlog: the HTTP API</title>
<link rel="icon" href="console/static/icon.svg" type="image/svg+xml">
<link rel="stylesheet" href="docs/swagger-ui.css">
<link rel="stylesheet" href="console/static/console.css">
<link rel="stylesheet" href="docs/docs.css">
</head>
<body>
<header class="top">
<a class="brand" href="/">
<img src="console/static/icon.svg" alt="" width="22" height="22">tierlog</a>
<nav aria-label="Main">
<a href="/#/overview">Topics</a>
<a href="/#/groups">Groups</a>
<a href="/#/store">Store</a>
<a href="/docs" aria-current="page">API</a>
</nav>
</header>
<div id="swagger-ui"></div>
<dialog id="ask-token" aria-labelledby="ask-token-title">
<form>
<h2 id="ask-token-title">This broker requires a token</h2>
<p>One with the scope <code>read</code> is enough. It is kept only in this tab, until the tab is
closed.</p>
<label>Token
<input type="password" name="token" autocomplete="off" spellcheck="false" required></label>
<p id="refusal" class="refusal" role="alert"></p>
<div class="row"><button class="primary">Use it</button></div>
</form>
</dialog>
<noscript>The same is in <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/docs.js"></script>
</body>
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
]


class Tagged(NamedTuple):
    body: bytes
    etag: str


def tagged(body: bytes) -> Tagged:
    return Tagged(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def tagged_response(
    exchange: Exchange, content: Tagged, content_type: bytes, headers: HeaderList
) -> Response:
    """The content, or 304 if the browser's copy is current; it revalidates each time."""
    headers = [(b"etag", content.etag.encode()), (b"cache-control", b"no-cache"), *headers]
    if not none_match(exchange.header(b"if-none-match"), content.etag):
        return Response(304, headers)
    return Response(200, [(b"content-type", content_type), *headers], content.body)


class PackagedFiles:
    """The files of one folder of a package, by name, with their media types."""

    def __init__(
        self, package: str, folder: str, media_types: Mapping[str, bytes], headers: HeaderList
    ) -> None:
        self._folder = files(package).joinpath(folder)
        self._media_types, self._headers = media_types, headers
        self._read: dict[str, Tagged] = {}

    async def serve(self, context: Context, exchange: Exchange) -> Response:
        """The handler of a call whose path ends with `{file}`."""
        name = exchange.params["file"]
        media_type = self._media_types.get(name)
        if media_type is None:
            raise NotFound("no file of this name is served here")
        if name not in self._read:
            path = str(self._folder.joinpath(name))
            async with aiofiles.open(path, "rb", executor=context.readers) as file:
                self._read[name] = tagged(await file.read())
        return tagged_response(exchange, self._read[name], media_type, self._headers)


_FILES: Final = PackagedFiles("tierlog.api.http.docs", "swagger_ui", DOCS_NAMES, _HEADERS)


async def docs_page(_: Context, __: Exchange) -> Response:
    headers = [(b"content-type", b"text/html; charset=utf-8"), (b"cache-control", b"no-cache")]
    return Response(200, [*headers, *_HEADERS], _PAGE)


def document_call(document: Callable[[], dict[str, Any]]) -> Call:
    """`document` is called once, at the first request."""

    @cache
    def written() -> Tagged:
        return tagged(msgspec.json.encode(document()))

    async def openapi_document(_: Context, exchange: Exchange) -> Response:
        return tagged_response(exchange, written(), header_values.JSON.encode(), [])

    return Call(
        method="GET",
        path="/openapi.json",
        handler=openapi_document,
        tag="docs",
        summary="",
        response={header_values.JSON: Body(schema={"type": "object"})},
    )


DOCS_CALLS: Final = (
    Call(method="GET", path="/docs", handler=docs_page, tag="docs", summary=""),
    Call(method="GET", path="/docs/{file}", handler=_FILES.serve, tag="docs", summary=""),
)
