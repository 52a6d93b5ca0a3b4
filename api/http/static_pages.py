"""What is constant while a broker runs, with a strong ETag: files of our package, `/openapi.json`,
and at `/docs` the same as a page.

* Files are looked up by name in a table: a path is never built from a request.
* `/docs` looks like the console and leads back to it: it has the console's stylesheet, and its
  choice of light or dark, by their addresses.
* Nothing is loaded from elsewhere, and the page's Content-Security-Policy forbids it: it works
  without a network.
* The page and its files contain only what is public in our package, and a browser sends no token
  for them, so they are open; the page asks for the token that the document needs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from functools import cache
from importlib.resources import files
from typing import Any, Final, NamedTuple

import aiofiles
import msgspec
from fastapi import Request, Response

from tierlog.api.http import header_values
from tierlog.api.http.access.scopes import DOCS_NAMES
from tierlog.api.http.calls import Body, Call
from tierlog.api.http.control_routes import EXCHANGE
from tierlog.api.http.header_values import none_match
from tierlog.api.http.problems import HeaderList, NotFound

_HTML: Final = "text/html; charset=utf-8"
_PAGE: Final = b"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<script src="console/static/choices.js"></script>
<title>tierlog: the HTTP API</title>
<link rel="icon" href="console/static/icon.svg" type="image/svg+xml">
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
<span class="grow"></span>
<button type="button" class="quiet" id="other-token" hidden>Another token</button>
</header>
<main id="calls"></main>
<dialog id="ask-token" aria-labelledby="ask-token-title">
<form>
<h2 id="ask-token-title">This broker requires a token</h2>
<p>One with the scope <code>read</code> shows the page; calls are sent with it. It is kept only in
this tab, until the tab is closed.</p>
<label>Token
<input type="password" name="token" autocomplete="off" spellcheck="false" required></label>
<p id="refusal" class="refusal" role="alert"></p>
<div class="row"><button class="primary">Use it</button></div>
</form>
</dialog>
<noscript>The same is in <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/docs.js"></script>
</body>
</html>
"""
_HEADERS: Final[HeaderList] = [
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; "
        b"img-src 'self'; connect-src 'self'; base-uri 'none'; form-action 'none'; "
        b"frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
]
_REVALIDATED: Final = {"cache-control": "no-cache"}


class Tagged(NamedTuple):
    body: bytes
    etag: str


def tagged(body: bytes) -> Tagged:
    return Tagged(body, f'"{hashlib.sha256(body).hexdigest()[:32]}"')


def tagged_response(
    request: Request, content: Tagged, content_type: str, headers: Mapping[str, str]
) -> Response:
    """The content, or 304 if the browser's copy is current; it revalidates each time."""
    headers = {"etag": content.etag, **_REVALIDATED, **headers}
    if not none_match(request.scope[EXCHANGE].header(b"if-none-match"), content.etag):
        return Response(status_code=304, headers=headers)
    return Response(content.body, headers={"content-type": content_type, **headers})


class PackagedFiles:
    """The files of one folder of a package, by name, with their media types."""

    def __init__(
        self, package: str, folder: str, media_types: Mapping[str, bytes], headers: HeaderList
    ) -> None:
        self._folder = files(package).joinpath(folder)
        self._media_types = media_types
        self.headers = {name.decode(): value.decode() for name, value in headers}
        self._read: dict[str, Tagged] = {}

    async def serve(self, request: Request) -> Response:
        """The endpoint of a call whose path ends with `{file}`. Without dependencies, which would
        take as long as the rest.
        """
        file = request.path_params["file"]
        media_type = self._media_types.get(file)
        if media_type is None:
            raise NotFound("no file of this name is served here")
        if file not in self._read:
            path = str(self._folder.joinpath(file))
            async with aiofiles.open(
                path, "rb", executor=request.app.context.workers.readers
            ) as opened:
                self._read[file] = tagged(await opened.read())
        return tagged_response(request, self._read[file], media_type.decode(), self.headers)


_FILES: Final = PackagedFiles("tierlog.api.http.docs", "page", DOCS_NAMES, _HEADERS)


async def docs_page() -> Response:
    return Response(_PAGE, headers={"content-type": _HTML, **_REVALIDATED, **_FILES.headers})


def document_call(document: Callable[[], dict[str, Any]]) -> Call:
    """`document` is called once, at the first request."""

    @cache
    def written() -> Tagged:
        return tagged(msgspec.json.encode(document()))

    async def openapi_document(request: Request) -> Response:
        return tagged_response(request, written(), header_values.JSON, {})

    return Call(
        method="GET",
        path="/openapi.json",
        endpoint=openapi_document,
        tag="docs",
        summary="",
        response={header_values.JSON: Body(schema={"type": "object"})},
    )


DOCS_CALLS: Final = (
    Call(method="GET", path="/docs", endpoint=docs_page, tag="docs", summary=""),
    Call(method="GET", path="/docs/{file}", endpoint=_FILES.serve, tag="docs", summary=""),
)
