"""Ranged GETs of S3 objects, received directly into the reader's buffer; and HEADs.

* boto3 resolves the address and signs: a presigned URL, reused for a few minutes and never logged,
  since it grants access to the object. This module sends the request and receives the response,
  because receiving a body through boto3 costs three times the CPU, and a HEAD several times.
* `UnsupportedResponse` means that boto3 must make the request instead: the response is not HTTP/1.1
  with a known length (a 5xx needs none), or its status may be due to a redirect, a region or a
  signature.
* Any other error status raises `ErrorStatus`. Requests are not retried, except once on a new
  connection if the server had closed an idle one.

Thread-safe: a connection is used by one thread, or idle.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import cached_property
from http import HTTPStatus
from pathlib import Path
from typing import Final, Literal
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from tierlog.object_store.s3_connection import (
    Connection,
    ResponseHead,
    S3Options,
    UnsupportedResponse,
)
from tierlog.object_store.s3_responses import ErrorResponse, stat_of
from tierlog.object_store.store import ObjectStat

URL_REUSE_S: Final = 300.0  # a third of its validity
URLS_MAX: Final = 8192  # an owner checks each partition again and again, with one HEAD
IDLE_MAX_S: Final = 20.0
ERROR_BODY_MAX_BYTES: Final = 64 * 1024
FALLBACKS_MAX: Final = 3

Operation = Literal["get_object", "head_object"]

_LEFT_TO_BOTO3: Final = frozenset({301, 302, 307, 308, 400, 401, 403})
_ERROR_FIELD: Final = re.compile(rb"<(Code|Message)>([^<]*)</")


class ErrorStatus(Exception):
    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.code)
        self.response = response


class PresignedUrls:
    """A cache of presigned URLs made by `sign`; each is used for a third of its validity."""

    def __init__(self, sign: Callable[[Operation, str], str]) -> None:
        self._sign, self._lock = sign, threading.Lock()
        self._urls: OrderedDict[tuple[Operation, str], tuple[float, str]] = OrderedDict()

    def presigned_url(self, operation: Operation, key: str) -> tuple[str, bool]:
        """The URL, and whether it was signed just now."""
        now, place = time.monotonic(), (operation, key)
        with self._lock:
            signed_at, url = self._urls.get(place, (0.0, ""))
        if url and now - signed_at < URL_REUSE_S:
            return url, False
        url = self._sign(operation, key)
        with self._lock:
            self._urls[place] = (now, url)
            self._urls.move_to_end(place)
            if len(self._urls) > URLS_MAX:
                self._urls.popitem(last=False)
        return url, True

    def discard(self, operation: Operation, key: str) -> None:
        with self._lock:
            self._urls.pop((operation, key), None)


class RangedGets:
    """GETs of byte ranges, and HEADs, over pooled connections.

    `sign` returns a presigned URL for an operation on a key; `ca_file` is the file or folder of
    trusted CAs.
    """

    def __init__(
        self,
        sign: Callable[[Operation, str], str],
        options: S3Options,
        *,
        endpoint: str,
        ca_file: str,
    ) -> None:
        self._urls, self._options, self._ca_file = PresignedUrls(sign), options, ca_file
        self._idle: deque[Connection] = deque(maxlen=options.max_connections)
        self._is_proxied = not options.is_loopback and _has_proxy(urlsplit(endpoint))
        self._fallbacks = 0

    @property
    def is_usable(self) -> bool:
        """False if the endpoint is behind a proxy, or after consecutive fallbacks to boto3."""
        return self._fallbacks < FALLBACKS_MAX and not self._is_proxied

    def open(self, key: str, start: int, end: int) -> RangeResponse:
        """Request bytes [start, end) and receive the response's head.

        Raises UnsupportedResponse, ErrorStatus, OSError.
        """
        connection, head = self._exchange("get_object", key, f"Range: bytes={start}-{end - 1}")
        try:
            if head.status not in {200, 206}:
                raise _error(connection, head)
            return RangeResponse(self, connection, head)
        except BaseException:
            connection.close()
            raise

    def head(self, key: str) -> ObjectStat:
        """Raises as `open` does."""
        connection, head = self._exchange("head_object", key, "x-amz-checksum-mode: ENABLED")
        try:
            found = stat_of(key, head.headers) if head.status == HTTPStatus.OK else None
        except UnsupportedResponse:
            connection.close()
            raise
        self.release(connection, head)  # it has no body, whatever its length says
        if found is None:
            raise ErrorStatus(ErrorResponse(head.status, str(head.status)))
        return found

    def note_fallback(self) -> None:
        """Note that boto3 succeeded with a request that was unsupported here."""
        self._fallbacks += 1

    def release(self, connection: Connection, head: ResponseHead) -> None:
        """Return a connection whose response was received completely to the pool."""
        self._fallbacks = 0
        connection.idle_since = time.monotonic()
        if not head.keeps_alive or len(self._idle) == self._idle.maxlen:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _exchange(
        self, operation: Operation, key: str, header: str
    ) -> tuple[Connection, ResponseHead]:
        while True:
            url, is_new = self._urls.presigned_url(operation, key)
            connection, head = self._send(*_request(url, operation, header))
            if head.status not in _LEFT_TO_BOTO3:
                return connection, head
            connection.close()
            self._urls.discard(operation, key)
            if is_new:
                raise UnsupportedResponse(f"status {head.status}")
            # Else it may have expired: no clock here counts all time in suspend.

    def _send(self, origin: str, request: bytes) -> tuple[Connection, ResponseHead]:
        connection = self._take_idle(origin)
        if connection is not None:
            try:
                return connection, _receive_head(connection, request)
            except (ConnectionResetError, BrokenPipeError):
                pass  # it was closed while it was idle
        connection = self._connect(origin)
        return connection, _receive_head(connection, request)

    def _take_idle(self, origin: str) -> Connection | None:
        """The most recently used connection; None if all have been idle for too long."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            is_fresh = time.monotonic() - connection.idle_since < IDLE_MAX_S
            if is_fresh and connection.origin == origin:
                return connection
            connection.close()

    def _connect(self, origin: str) -> Connection:
        options = self._options
        try:
            return Connection(
                origin,
                lambda: self._ssl_context,
                connect_timeout_s=options.connect_timeout_s,
                read_timeout_s=options.range_timeout_s,
            )
        except ssl.SSLCertVerificationError as error:
            raise UnsupportedResponse(f"its certificate is not trusted: {error}") from error

    @cached_property
    def _ssl_context(self) -> ssl.SSLContext:
        if Path(self._ca_file).is_dir():
            return ssl.create_default_context(capath=self._ca_file)
        return ssl.create_default_context(cafile=self._ca_file)


class RangeResponse:
    """A successful response whose body is still to be received. Close it in any case."""

    def __init__(self, gets: RangedGets, connection: Connection, head: ResponseHead) -> None:
        self._gets, self._connection, self._is_complete = gets, connection, False
        self.size_bytes = head.size_bytes
        self._head = head

    @property
    def content_range(self) -> str:
        return self._head.headers.get("content-range", "")

    def pieces(self, into: memoryview) -> Iterator[memoryview]:
        """The body in pieces, each a view of `into` that the next one overwrites."""
        yield from self._connection.receive(self._head, into)
        self._is_complete = True

    def close(self) -> None:
        if self._is_complete:
            self._gets.release(self._connection, self._head)
        else:
            self._connection.close()


def _request(url: str, operation: Operation, header: str) -> tuple[str, bytes]:
    """Where to send it, and the request."""
    parts = urlsplit(url)
    method = "GET" if operation == "get_object" else "HEAD"
    head = (
        f"{method} {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
        f"{header}\r\nAccept-Encoding: identity\r\nUser-Agent: tierlog\r\n\r\n"
    )
    return f"{parts.scheme}://{parts.netloc}", head.encode()


def _receive_head(connection: Connection, request: bytes) -> ResponseHead:
    try:
        return connection.send(request)
    except BaseException:
        connection.close()
        raise


def _error(connection: Connection, head: ResponseHead) -> Exception:
    if head.status >= 500 and "content-length" not in head.headers:
        # boto3 could say more, but would ask a store that is throttled once more.
        return ErrorStatus(ErrorResponse(head.status, str(head.status)))
    body = b""
    if head.size_bytes <= ERROR_BODY_MAX_BYTES:
        pieces = connection.receive(head, memoryview(bytearray(ERROR_BODY_MAX_BYTES)))
        body = b"".join(bytes(piece) for piece in pieces)
    fields = {name: text.decode("utf-8", "replace") for name, text in _ERROR_FIELD.findall(body)}
    code = fields.get(b"Code") or str(head.status)
    return ErrorStatus(ErrorResponse(head.status, code, fields.get(b"Message", "")))


def _has_proxy(endpoint: SplitResult) -> bool:
    host = endpoint.hostname or ""
    return endpoint.scheme in getproxies() and not proxy_bypass(host)
