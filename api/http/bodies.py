"""Receives and decompresses a request's body, within limits.

* A body that is too large is refused by its Content-Length before a byte is read, or without one
  as soon as too much has arrived; a compressed one is refused before it has fully expanded.
* The total size of bodies in memory is limited: beyond `inflight_max_bytes` a request is refused
  with 429, and its body is not read.
* A large body that another broker is to have goes there as it arrives, and so does one of unknown
  length.
* A client that sends nothing for `body_idle_timeout_ms` is disconnected, and so is one that sends a
  byte at a time: the average must be at least `body_rate_min` bytes per second.
"""

from __future__ import annotations

import ctypes
import time
import zlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Final, Protocol

import zstandard

from tierlog.api.http.exchange import Exchange, KeptBody
from tierlog.api.http.memory_limits import InflightBytes
from tierlog.api.http.problems import StalledBody
from tierlog.api.http.settings import HttpSettings
from tierlog.api.protocol.service import ClientDisconnected, DirectBody
from tierlog.record_format.errors import (
    FieldProblem,
    InvalidRequest,
    RequestTooLarge,
    TooManyOpenFiles,
)

# The least remainder of a body that is received directly: less has usually arrived already.
_DIRECT_MIN_BYTES: Final = 32 << 10
# An uninitialized bytearray: to zero 64 MiB blocks the event loop for tens of milliseconds. It is
# read only after it was filled completely.
_uninitialized: Final = ctypes.pythonapi.PyByteArray_FromStringAndSize
_uninitialized.restype = ctypes.py_object
_uninitialized.argtypes = (ctypes.c_char_p, ctypes.c_ssize_t)
_MEMBERS_MAX: Final = 10_000
STREAMED_FROM_BYTES: Final = 256 << 10  # what is less has usually arrived already
KEPT_MAX_BYTES: Final = 8 << 20
_WINDOW_MAX: Final = 128 << 20


class _Reservation:
    """What one request holds of the in-flight bytes."""

    __slots__ = ("_held", "_inflight")

    def __init__(self, inflight: InflightBytes, size_bytes: int) -> None:
        inflight.acquire(size_bytes)
        self._inflight, self._held = inflight, size_bytes

    def grow_to(self, size_bytes: int) -> None:
        if size_bytes > self._held:
            self._inflight.acquire(size_bytes - self._held)
            self._held = size_bytes

    def release(self) -> None:
        self._inflight.release(self._held)


@asynccontextmanager
async def received_body(
    exchange: Exchange,
    settings: HttpSettings,
    inflight: InflightBytes,
    *,
    limit: int | None = None,
) -> AsyncIterator[bytes | bytearray]:
    """The body as it was sent. Its bytes count as in flight until the block is left; if the
    exchange keeps it, until that ends.

    `limit` is `body_max_bytes` unless given. Raises RequestTooLarge, Throttled, TooManyOpenFiles,
    StalledBody, ClientDisconnected.
    """
    if exchange.kept is not None:
        yield exchange.kept.body
        return
    limit = settings.body_max_bytes if limit is None else limit
    content_length = _content_length(exchange, limit)
    reservation = _Reservation(inflight, content_length)
    try:
        pace = _Pace(settings)
        part, more = await _next_part(exchange, pace)
        direct = exchange.direct_body
        if more and direct is not None and content_length - len(part) >= _DIRECT_MIN_BYTES:
            body: bytes | bytearray = await _receive_direct(direct, part, content_length, pace)
        else:
            body = await _receive_parts(exchange, part, reservation, pace, more=more, limit=limit)
        assert content_length in (0, len(body)), "the server enforces Content-Length"
        if exchange.keeps_body:
            exchange.kept = KeptBody(body, reservation.release)
        yield body
    finally:
        if exchange.kept is None:
            reservation.release()


class BodyOnItsWay:
    """A body that goes to another broker as it arrives: its parts, once. What was received is kept
    so that it can be given back, and counts as in flight, until it is more than `KEPT_MAX_BYTES`;
    then the exchange is spent.

    `size_bytes`: None if it was not announced. `on_end` is called when all of it was received.
    Raises as `received_body` does.
    """

    def __init__(
        self,
        exchange: Exchange,
        settings: HttpSettings,
        inflight: InflightBytes,
        *,
        size_bytes: int | None,
        on_end: Callable[[], None],
    ) -> None:
        self._reservation = _Reservation(inflight, min(size_bytes or 0, KEPT_MAX_BYTES))
        self._exchange, self._settings, self._on_end = exchange, settings, on_end
        self.size_bytes = size_bytes
        self._kept: list[bytes | bytearray] = []
        self._received, self._more = 0, True

    async def parts(self) -> AsyncIterator[bytes]:
        pace = _Pace(self._settings)
        while self._more:
            part, self._more = await _next_part(self._exchange, pace)
            self._received += len(part)
            if self._received > self._settings.body_max_bytes:
                raise _too_large(self._settings.body_max_bytes, self._received)
            self._keep(part)
            if self._more:
                pace.check(self._received)
            yield bytes(part)
        self._on_end()

    def _keep(self, part: bytes | bytearray) -> None:
        if self._received > KEPT_MAX_BYTES:
            self._exchange.is_spent = True
            self._kept.clear()
        else:
            self._reservation.grow_to(self._received)
            self._kept.append(part)

    def give_back(self) -> None:
        """Unless the exchange is spent."""
        if self._received and not self._exchange.is_spent:
            self._exchange.give_back(b"".join(self._kept), more=self._more)

    def release(self) -> None:
        self._kept.clear()
        self._reservation.release()


@asynccontextmanager
async def body_to_pass_on(
    exchange: Exchange,
    settings: HttpSettings,
    inflight: InflightBytes,
    *,
    on_end: Callable[[], None],
) -> AsyncIterator[bytes | bytearray | BodyOnItsWay]:
    """The body of a call that goes to another broker: whole if it is small. `on_end` is called when
    all of it was received.
    """
    is_announced = exchange.header(b"transfer-encoding") is None
    size_bytes = _content_length(exchange, settings.body_max_bytes) if is_announced else None
    if exchange.kept is None and (size_bytes is None or size_bytes > STREAMED_FROM_BYTES):
        body = BodyOnItsWay(exchange, settings, inflight, size_bytes=size_bytes, on_end=on_end)
        try:
            yield body
        finally:
            body.release()
        return
    async with received_body(exchange, settings, inflight) as whole:
        on_end()
        yield whole


async def _receive_direct(
    direct: DirectBody, part: bytes | bytearray, size_bytes: int, pace: _Pace
) -> bytearray:
    """Receive the rest of the body, which begins with `part`, directly into its buffer."""
    body: bytearray = _uninitialized(None, size_bytes)
    body[: len(part)] = part
    with memoryview(body) as whole, whole[len(part) :] as rest:
        try:
            await direct.receive_into(
                rest, idle_s=pace.idle_s, on_bytes=lambda size: pace.check(len(part) + size)
            )
        except TimeoutError:
            raise pace.stalled() from None
        except ConnectionError:
            raise ClientDisconnected from None
        except OSError as error:
            raise TooManyOpenFiles(
                f"no file descriptor left to receive the body: {error.strerror}"
            ) from error
    return body


async def _receive_parts(
    exchange: Exchange,
    part: bytes | bytearray,
    reservation: _Reservation,
    pace: _Pace,
    *,
    more: bool,
    limit: int,
) -> bytes | bytearray:
    """Receive the rest of the body, which begins with `part`, from the server's messages."""
    parts, size = [part], len(part)
    while True:
        if more:
            pace.check(size)
        if size > limit:
            raise _too_large(limit, size)
        reservation.grow_to(size)
        if not more:
            return part if len(parts) == 1 else b"".join(parts)
        part, more = await _next_part(exchange, pace)
        size += len(part)
        parts.append(part)


def _content_length(exchange: Exchange, limit: int) -> int:
    text = exchange.header(b"content-length")
    if text is None or not text.isdigit():
        return 0
    size = int(text)
    if size > limit:
        raise _too_large(limit, size)
    return size


def _too_large(limit: int, size: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"the body has {size} bytes or more; the limit is {limit}",
        limit_bytes=limit,
        size_bytes=size,
    )


async def _next_part(exchange: Exchange, pace: _Pace) -> tuple[bytes | bytearray, bool]:
    try:
        return await exchange.next_body_part(timeout_s=pace.idle_s)
    except TimeoutError:
        raise pace.stalled() from None


class _Pace:
    """Checks how fast a body arrives: a slow line is tolerated, a trickle is not."""

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
        return StalledBody(f"no byte of the body arrived for {self.idle_s:g} s")


def expand(body: bytes | bytearray, encoding: str, *, max_bytes: int) -> bytes | bytearray:
    """Decompress the body. Call in a thread if it is large.

    Raises InvalidRequest if it does not decode, RequestTooLarge beyond `max_bytes`.
    """
    if not encoding:
        return body
    new_decoder, piece_bytes = _DECODERS[encoding]
    try:
        return _decode_members(body, new_decoder, max_bytes=max_bytes, piece_bytes=piece_bytes)
    except (zlib.error, zstandard.ZstdError, EOFError) as error:
        detail = f"the body does not decode as {encoding}: {error}"
        raise InvalidRequest(
            detail, problems=(FieldProblem("Content-Encoding", detail),)
        ) from error


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes | memoryview, /) -> bytes: ...


# For a member of gzip (RFC 1952, 2.2) and a frame of zstd (RFC 8878): how to begin one, and how
# much to feed at once.
_DECODERS: Final[Mapping[str, tuple[Callable[[], _Decoder], int]]] = {
    "gzip": (lambda: zlib.decompressobj(wbits=31), 16 << 10),
    "zstd": (
        lambda: zstandard.ZstdDecompressor(max_window_size=_WINDOW_MAX).decompressobj(),
        2 << 10,
    ),
}


def _decode_members(
    body: bytes | bytearray,
    new_decoder: Callable[[], _Decoder],
    *,
    max_bytes: int,
    piece_bytes: int,
) -> bytearray:
    """Decode all members, in pieces so small that none expands to more than some tens of MiB."""
    expanded = bytearray()
    position = members = 0
    while position < len(body) or not members:
        members += 1
        if members > _MEMBERS_MAX:
            raise EOFError(f"more than {_MEMBERS_MAX} streams in one body")
        decoder = new_decoder()
        while not decoder.eof:
            piece = bytes(body[position : position + piece_bytes])
            if not piece:
                raise EOFError("the stream is truncated")
            expanded += decoder.decompress(piece)
            if len(expanded) > max_bytes:
                raise RequestTooLarge(
                    f"the body expands to more than {max_bytes} bytes",
                    limit_bytes=max_bytes,
                    size_bytes=len(expanded),
                )
            position += len(piece)
        position -= len(decoder.unused_data)
    return expanded
