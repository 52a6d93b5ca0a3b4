"""What a handler returns, and how it is sent.

* Bytes leave in one message. Slices of files leave by the zero-copy extension if the server offers
  it, otherwise by reads of at most `READ_BYTES` in a thread: a slow client never holds more memory.
* Except for streams, a head is sent only once the length of the body is known.
* The answer to HEAD is the same head without the body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Final, NamedTuple

import msgspec

from api.http.exchange import Exchange
from api.http.problems import HeaderList
from api.protocol.zerocopy import EXTENSION
from record_format.file_slice import FileSlice

READ_BYTES: Final = 256 << 10
SMALL_BYTES: Final = 256 << 10  # most of it fits into the kernel's buffer
JSON: Final = (b"content-type", b"application/json")
NO_STORE: Final = (b"cache-control", b"no-store")
_END: Final = {"type": "http.response.body", "body": b"", "more_body": False}


class Answer(NamedTuple):
    """A whole body in memory."""

    status: int
    headers: HeaderList
    body: bytes = b""

    @property
    def size_bytes(self) -> int:
        return len(self.body)


class FileAnswer(NamedTuple):
    """A body in files."""

    status: int
    headers: HeaderList
    slices: tuple[FileSlice, ...]

    @property
    def size_bytes(self) -> int:
        return sum([piece.size_bytes for piece in self.slices])


class WindowedAnswer(NamedTuple):
    """As FileAnswer, but the slices come one window after the other, `size_bytes` in all."""

    status: int
    headers: HeaderList
    size_bytes: int
    windows: AsyncGenerator[tuple[FileSlice, ...], None]


class StreamAnswer(NamedTuple):
    """A body of unknown length. Each part is in the socket before the next is asked for."""

    headers: HeaderList
    parts: AsyncGenerator[bytes, None]


AnyAnswer = Answer | FileAnswer | WindowedAnswer | StreamAnswer


def json_answer(
    document: object, *, status: int = 200, headers: HeaderList | None = None
) -> Answer:
    return Answer(status, [JSON, NO_STORE, *(headers or ())], msgspec.json.encode(document))


async def send_answer(exchange: Exchange, answer: AnyAnswer) -> None:
    if isinstance(answer, Answer):
        await _send_bytes(exchange, answer)
    elif isinstance(answer, FileAnswer):
        await _send_files(exchange, answer)
    elif isinstance(answer, WindowedAnswer):
        await _send_windows(exchange, answer)
    else:
        await _send_stream(exchange, answer)


def announced_size(answer: Answer | FileAnswer) -> int | None:
    """The value of Content-Length; None if the status forbids a body (RFC 9110, 8.6)."""
    return None if answer.status in (204, 304) else answer.size_bytes


def whole_head(exchange: Exchange, headers: HeaderList, *, size: int | None) -> HeaderList:
    """With the headers that every response has."""
    lines = [
        *headers,
        (b"x-request-id", exchange.request_id.encode("latin-1")),
        (b"server-timing", exchange.timings.header()),
    ]
    if size is not None:
        lines.append((b"content-length", b"%d" % size))
    return lines


async def _send_head(
    exchange: Exchange, status: int, headers: HeaderList, *, size: int | None
) -> None:
    exchange.started = True
    lines = whole_head(exchange, headers, size=size)
    await exchange.send({"type": "http.response.start", "status": status, "headers": lines})


async def _send_bytes(exchange: Exchange, answer: Answer) -> None:
    await _send_head(exchange, answer.status, answer.headers, size=announced_size(answer))
    body = b"" if exchange.method == "HEAD" else answer.body
    is_last = len(body) <= SMALL_BYTES
    await exchange.send({"type": "http.response.body", "body": body, "more_body": not is_last})
    if not is_last:
        await exchange.send(_END)  # waits until the client has read most of it


async def _send_files(exchange: Exchange, answer: FileAnswer) -> None:
    size = answer.size_bytes
    if not exchange.started:
        await _send_head(exchange, answer.status, answer.headers, size=size)
    if not size or exchange.method == "HEAD":
        await exchange.send(_END)
    else:
        await _send_slices(exchange, answer.slices, is_last=True)


async def _send_windows(exchange: Exchange, answer: WindowedAnswer) -> None:
    async with aclosing(answer.windows) as windows:
        left = answer.size_bytes
        await _send_head(exchange, answer.status, answer.headers, size=left)
        if not left or exchange.method == "HEAD":
            await exchange.send(_END)
            return
        async for slices in windows:
            left -= sum(piece.size_bytes for piece in slices)
            await _send_slices(exchange, slices, is_last=not left)
            del slices  # released before the next are waited for


async def _send_slices(exchange: Exchange, slices: Sequence[FileSlice], *, is_last: bool) -> None:
    if EXTENSION in exchange.scope.get("extensions", ()):
        await _send_zero_copy(exchange, slices, is_last=is_last)
    else:
        await _send_reads(exchange, slices, is_last=is_last)


async def _send_zero_copy(
    exchange: Exchange, slices: Sequence[FileSlice], *, is_last: bool
) -> None:
    last = len(slices) - 1
    for index, piece in enumerate(slices):
        await exchange.send(
            {
                "type": EXTENSION,
                "file": piece.file,
                "offset": piece.position,
                "count": piece.size_bytes,
                "more_body": not is_last or index < last,
            }
        )


async def _send_reads(exchange: Exchange, slices: Sequence[FileSlice], *, is_last: bool) -> None:
    """If the server cannot send files (TLS). EOFError ends the connection: never wrong bytes."""
    for piece in slices:
        end = piece.position + piece.size_bytes
        for position in range(piece.position, end, READ_BYTES):
            part = piece._replace(position=position, size_bytes=min(READ_BYTES, end - position))
            data = await asyncio.to_thread(part.read)
            await exchange.send({"type": "http.response.body", "body": data, "more_body": True})
    if is_last:
        await exchange.send(_END)


async def _send_stream(exchange: Exchange, answer: StreamAnswer) -> None:
    async with aclosing(answer.parts) as parts:
        await _send_head(exchange, 200, answer.headers, size=None)
        if exchange.method != "HEAD":
            async for part in parts:
                await exchange.send({"type": "http.response.body", "body": part, "more_body": True})
    await exchange.send(_END)
