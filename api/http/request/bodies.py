"""A request's body, whole and uncompressed, within its limits.

* A body is refused by its Content-Length before a byte of it is read, or without one by what has
  come; one that expands too far is refused before it has expanded.
* What all requests hold together is bounded: beyond `inflight_max_bytes` a request is refused with
  429, and its body is not read.
* A client that stops sending for `body_idle_timeout_ms` is cut off, and so is one that sends a byte
  at a time: on the whole a body must come at `body_rate_min` bytes a second or more.
"""

from __future__ import annotations

import ctypes
import threading
import time
import zlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final, Protocol

import zstandard

from api.http.exchange import Exchange
from api.http.http_errors import StalledBody
from api.http.request import media_types
from api.http.settings import HttpSettings
from api.protocol.body_receiver import DirectBody
from api.protocol.errors import ClientDisconnected
from record_format.errors import (
    FieldProblem,
    InvalidRequest,
    RequestTooLarge,
    Throttled,
    TooManyOpenFiles,
)

ENCODINGS: Final = ("gzip", "zstd")
# How much of a body must be left to be received straight into its buffer: less is usually there
# already.
_STRAIGHT_MIN_BYTES: Final = 32 << 10
# A bytearray that holds whatever its memory held: to clear 64 MiB holds up the loop for tens of
# milliseconds. Nothing of it is read before all of it was filled.
_uncleared: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_uncleared.restype, _uncleared.argtypes = ctypes.py_object, (ctypes.c_char_p, ctypes.c_ssize_t)
_MEMBERS_MAX: Final = 10_000
_WINDOW_MAX: Final = 128 << 20


class InflightBytes:
    """How much all requests hold, and what they left to be written. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._lock = limit_bytes, threading.Lock()
        self.held = 0

    def take(self, size_bytes: int) -> None:
        with self._lock:
            if self.held and self.held + size_bytes > self._limit:
                raise Throttled(f"requests in progress already hold {self.held} bytes; try again")
            self.held += size_bytes

    def keep(self, size_bytes: int) -> None:
        """As `take`, of what can no longer be refused."""
        with self._lock:
            self.held += size_bytes

    def give_back(self, size_bytes: int) -> None:
        with self._lock:
            self.held -= size_bytes


class _Share:
    """One request's share of them."""

    __slots__ = ("_all", "_held")

    def __init__(self, inflight: InflightBytes, size_bytes: int) -> None:
        inflight.take(size_bytes)
        self._all, self._held = inflight, size_bytes

    def grow_to(self, size_bytes: int) -> None:
        if size_bytes > self._held:
            self._all.take(size_bytes - self._held)
            self._held = size_bytes

    def give_back(self) -> None:
        self._all.give_back(self._held)


@asynccontextmanager
async def received_body(
    exchange: Exchange,
    settings: HttpSettings,
    inflight: InflightBytes,
    *,
    limit: int | None = None,
) -> AsyncIterator[bytes | bytearray]:
    """The body as it was sent. Its bytes count as held until the block is left.

    `limit` is `body_max_bytes` unless given. Raises RequestTooLarge, Throttled, TooManyOpenFiles,
    StalledBody, ClientDisconnected.
    """
    limit = settings.body_max_bytes if limit is None else limit
    announced = _announced_size(exchange, limit)
    share = _Share(inflight, announced)
    try:
        pace = _Pace(settings)
        part, more = await _next_part(exchange, pace)
        direct = exchange.direct_body
        if more and direct is not None and announced - len(part) >= _STRAIGHT_MIN_BYTES:
            body: bytes | bytearray = await _filled(direct, part, announced, pace)
        else:
            body = await _joined(exchange, part, share, pace, more=more, limit=limit)
        assert announced in (0, len(body)), "the server ends a body where it was announced to end"
        yield body
    finally:
        share.give_back()


async def _filled(
    direct: DirectBody, part: bytes | bytearray, size_bytes: int, pace: _Pace
) -> bytearray:
    """The body that begins with `part`, the rest received directly into its buffer."""
    body: bytearray = _uncleared(None, size_bytes)
    body[: len(part)] = part
    with memoryview(body) as whole, whole[len(part) :] as rest:
        try:
            await direct.receive_into(
                rest, idle_s=pace.idle_s, on_bytes=lambda came: pace.check(len(part) + came)
            )
        except TimeoutError:
            raise pace.stalled() from None
        except ConnectionError:
            raise ClientDisconnected from None
        except OSError as error:
            raise TooManyOpenFiles(
                f"no file descriptor left for a body: {error.strerror}"
            ) from error
    return body


async def _joined(
    exchange: Exchange,
    part: bytes | bytearray,
    share: _Share,
    pace: _Pace,
    *,
    more: bool,
    limit: int,
) -> bytes | bytearray:
    """The body that begins with `part`, joined from the server's pieces."""
    parts, size = [part], len(part)
    while True:
        if more:
            pace.check(size)
        if size > limit:
            raise _too_large(limit, size)
        share.grow_to(size)
        if not more:
            return part if len(parts) == 1 else b"".join(parts)
        part, more = await _next_part(exchange, pace)
        size += len(part)
        parts.append(part)


def _announced_size(exchange: Exchange, limit: int) -> int:
    text = exchange.header(b"content-length")
    if text is None or not text.isdigit():
        return 0
    size = int(text)
    if size > limit:
        raise _too_large(limit, size)
    return size


def _too_large(limit: int, size: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body has {size} bytes or more; at most {limit} are taken",
        limit_bytes=limit,
        size_bytes=size,
    )


async def _next_part(exchange: Exchange, pace: _Pace) -> tuple[bytes | bytearray, bool]:
    try:
        return await exchange.next_body_part(timeout_s=pace.idle_s)
    except TimeoutError:
        raise pace.stalled() from None


class _Pace:
    """Measured from the first wait: a slow line is tolerated, a trickle is not."""

    __slots__ = ("_rate", "_started", "idle_s")

    def __init__(self, settings: HttpSettings) -> None:
        self._rate = settings.body_rate_min
        self.idle_s = settings.body_idle_timeout_ms / 1000
        self._started = time.monotonic()

    def check(self, size_bytes: int) -> None:
        """Raises StalledBody."""
        if time.monotonic() - self._started > self.idle_s + size_bytes / self._rate:
            raise StalledBody(f"the body arrived at less than {self._rate} bytes per second")

    def stalled(self) -> StalledBody:
        return StalledBody(f"no byte of the body came for {self.idle_s:g} s")


def encoding_of(exchange: Exchange) -> str:
    """The Content-Encoding, or an empty string. Raises UnsupportedMediaType."""
    found = media_types.content_encodings(exchange.header(b"content-encoding"), accepted=ENCODINGS)
    return found[0] if found else ""


def expand(body: bytes | bytearray, encoding: str, *, max_bytes: int) -> bytes | bytearray:
    """The body without its Content-Encoding. Run in a thread if it is large.

    Raises InvalidRequest if it does not decode, RequestTooLarge beyond `max_bytes`.
    """
    if not encoding:
        return body
    try:
        if encoding == "gzip":
            return _gunzip(body, max_bytes)
        return _unzstd(body, max_bytes)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        detail = f"the body does not decode as {encoding}: {error}"
        raise InvalidRequest(
            detail, problems=(FieldProblem("Content-Encoding", detail),)
        ) from error


def _gunzip(body: bytes | bytearray, max_bytes: int) -> bytes:
    """All members of a gzip stream (RFC 1952, 2.2)."""
    return _decode_members(
        body, lambda: zlib.decompressobj(wbits=31), max_bytes=max_bytes, piece_bytes=16 << 10
    )


def _unzstd(body: bytes | bytearray, max_bytes: int) -> bytes:
    """All frames of a zstd stream (RFC 8878)."""

    def frame() -> _Decoder:
        return zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX).decompressobj()

    return _decode_members(body, frame, max_bytes=max_bytes, piece_bytes=2 << 10)


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, /) -> bytes: ...


def _decode_members(
    body: bytes | bytearray,
    new_decoder: Callable[[], _Decoder],
    *,
    max_bytes: int,
    piece_bytes: int,
) -> bytes:
    """Decode in pieces so small that none can expand to more than some tens of MiB."""
    parts: list[bytes] = []
    position = members = 0
    room = max_bytes
    while position < len(body) or not members:
        members += 1
        if members > _MEMBERS_MAX:
            raise EOFError(f"more than {_MEMBERS_MAX} streams in one body")
        decoder = new_decoder()
        while not decoder.eof:
            piece = bytes(body[position : position + piece_bytes])
            if not piece:
                raise EOFError("the stream is cut")
            part = decoder.decompress(piece)
            room = _checked_room(room, len(part), max_bytes)
            parts.append(part)
            position += len(piece)
        position -= len(decoder.unused_data)
    return b"".join(parts)


def _checked_room(room: int, size: int, max_bytes: int) -> int:
    if size > room:
        raise RequestTooLarge(
            f"the body expands to more than {max_bytes} bytes",
            limit_bytes=max_bytes,
            size_bytes=max_bytes - room + size,
        )
    return room - size
