"""The responses that a handler may return, and how they are sent.

* Bytes are sent in one message. File slices are handed to the protocol (`SEND_FILE`), and never
  held in memory as a whole.
* Except for streams, a head is sent only once the length of the body is known.
* A HEAD request gets the same head without the body.
* A response owns the files that it is sent from: whoever sends it, or drops it, closes it.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from contextlib import aclosing, closing
from typing import Final, NamedTuple, Protocol

import msgspec

from tierlog.api.http.exchange import Exchange
from tierlog.api.http.problems import HeaderList
from tierlog.api.protocol.asgi_cycle import SEND_FILE
from tierlog.api.protocol.messages import BODILESS
from tierlog.host.file_slice import FileSlice, close_all

SMALL_BYTES: Final = 256 << 10  # most of this fits into the socket's send buffer
JSON: Final = (b"content-type", b"application/json")
NO_STORE: Final = (b"cache-control", b"no-store")
_END: Final = {"type": "http.response.body", "body": b"", "more_body": False}


class Response(NamedTuple):
    """A whole body in memory."""

    status: int
    headers: HeaderList
    body: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.body)

    def close(self) -> None:
        """Nothing is open."""


class FileResponse(NamedTuple):
    """A body in files."""

    status: int
    headers: HeaderList
    slices: tuple[FileSlice, ...]

    @property
    def size_bytes(self) -> int:
        return sum([piece.size_bytes for piece in self.slices])

    def close(self) -> None:
        close_all(self.slices)


class FramedResponse(NamedTuple):
    """A body that begins with bytes in memory, and goes on in files."""

    status: int
    headers: HeaderList
    prefix: bytes
    slices: tuple[FileSlice, ...]

    @property
    def size_bytes(self) -> int:
        return len(self.prefix) + sum([piece.size_bytes for piece in self.slices])

    def close(self) -> None:
        close_all(self.slices)


class WindowedResponse(NamedTuple):
    """A body in files whose slices become available one by one, `size_bytes` in all: `ready` is
    there already, and whoever takes one from `slices` closes it.
    """

    status: int
    headers: HeaderList
    size_bytes: int
    ready: list[FileSlice]
    slices: AsyncGenerator[FileSlice, None]

    def close(self) -> None:
        close_all(self.ready)


class Closeable(Protocol):
    def close(self) -> None: ...


class Parts(Protocol):
    """An iterator that is closed also if it was never begun."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...
    def aclose(self) -> Awaitable[None]: ...


class StreamResponse(NamedTuple):
    """A body in parts. The next one is requested once the last one is in the socket. `size_bytes`:
    of all; None if it is not known.
    """

    headers: HeaderList
    parts: Parts
    files: tuple[Closeable, ...] = ()
    status: int = 200
    size_bytes: int | None = None

    def close(self) -> None:
        for file in self.files:
            file.close()


AnyResponse = Response | FileResponse | FramedResponse | WindowedResponse | StreamResponse


def json_response(
    document: object, *, status: int = 200, headers: HeaderList | None = None
) -> Response:
    return Response(status, [JSON, NO_STORE, *(headers or ())], msgspec.json.encode(document))


async def send_response(exchange: Exchange, response: AnyResponse) -> None:
    if isinstance(response, Response):
        await _send_bytes(exchange, response)
    elif isinstance(response, FileResponse):
        await _send_files(exchange, response)
    elif isinstance(response, FramedResponse):
        await _send_framed(exchange, response)
    elif isinstance(response, WindowedResponse):
        await _send_windows(exchange, response)
    else:
        await _send_stream(exchange, response)


def complete_headers(
    exchange: Exchange, headers: HeaderList, *, content_length: int | None
) -> HeaderList:
    """Add the headers that every response has."""
    lines = [
        *headers,
        (b"x-request-id", exchange.request_id.encode("latin-1")),
        (b"server-timing", exchange.timings.header()),
    ]
    if content_length is not None:
        lines.append((b"content-length", b"%d" % content_length))
    return lines


async def _send_head(
    exchange: Exchange, status: int, headers: HeaderList, *, content_length: int | None
) -> None:
    exchange.head_sent = True
    lines = complete_headers(exchange, headers, content_length=content_length)
    await exchange.send({"type": "http.response.start", "status": status, "headers": lines})


async def _send_bytes(exchange: Exchange, response: Response) -> None:
    length = None if response.status in BODILESS else response.size_bytes
    await _send_head(exchange, response.status, response.headers, content_length=length)
    body = b"" if exchange.method == "HEAD" else response.body
    is_last = len(body) <= SMALL_BYTES
    await exchange.send({"type": "http.response.body", "body": body, "more_body": not is_last})
    if not is_last:
        await exchange.send(_END)  # waits until the client has read most of it


async def _send_files(exchange: Exchange, response: FileResponse) -> None:
    size = response.size_bytes
    if not exchange.head_sent:
        await _send_head(exchange, response.status, response.headers, content_length=size)
    if not size or exchange.method == "HEAD":
        await exchange.send(_END)
    else:
        await _send_slices(exchange, response.slices, is_last=True)


async def _send_framed(exchange: Exchange, response: FramedResponse) -> None:
    status, headers, prefix, slices = response
    await _send_head(exchange, status, headers, content_length=response.size_bytes)
    more = bool(slices)
    await exchange.send({"type": "http.response.body", "body": prefix, "more_body": more})
    await _send_slices(exchange, slices, is_last=True)


async def _send_windows(exchange: Exchange, response: WindowedResponse) -> None:
    async with aclosing(response.slices) as slices:
        left = response.size_bytes
        await _send_head(exchange, response.status, response.headers, content_length=left)
        if not left or exchange.method == "HEAD":
            await exchange.send(_END)
            return
        async for piece in slices:
            with closing(piece):
                left -= piece.size_bytes
                await _send_slices(exchange, (piece,), is_last=not left)


async def _send_slices(exchange: Exchange, slices: Sequence[FileSlice], *, is_last: bool) -> None:
    last = len(slices) - 1
    for index, piece in enumerate(slices):
        await exchange.send(
            {
                "type": SEND_FILE,
                "file": piece.file,
                "offset": piece.position,
                "count": piece.size_bytes,
                "more_body": not is_last or index < last,
            }
        )


async def _send_stream(exchange: Exchange, response: StreamResponse) -> None:
    async with aclosing(response.parts) as parts:
        length = response.size_bytes
        await _send_head(exchange, response.status, response.headers, content_length=length)
        if exchange.method != "HEAD":
            async for part in parts:
                await exchange.send({"type": "http.response.body", "body": part, "more_body": True})
    await exchange.send(_END)
