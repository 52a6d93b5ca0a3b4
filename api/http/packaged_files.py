"""Serves files of our package, and other content that is constant while a broker runs, with a
strong ETag.

Files are looked up by name in a table: a path is never built from a request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from importlib.resources import files
from typing import NamedTuple

import aiofiles

from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.http_errors import NotFound
from tierlog.api.http.problems import HeaderList
from tierlog.api.http.request.byte_range import none_match
from tierlog.api.http.responses import Response


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
