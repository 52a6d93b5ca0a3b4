"""Ranged GETs of S3 objects, received directly into the reader's buffer, and HEADs; and how every
request to S3 is made.

* Retries happen only here, by `RetryPolicy`; every attempt is counted. Foreign exceptions are
  mapped only here, by `error_response_of` and `error_for`.
* A ranged response is accepted only if its Content-Range is the one that was requested.
* boto3 resolves the address and signs: a presigned URL, reused for a few minutes and never logged,
  since it grants access to the object. This module sends the request and receives the response,
  because receiving a body through boto3 costs three times the CPU, and a HEAD several times.
* `UnsupportedResponse` means that boto3 must make the request instead: the response is not HTTP/1.1
  with a known length (a 5xx needs none), or its status may be due to a redirect, a region or a
  signature. Any other error status is `ErrorStatus`.
* An idle connection that the server had closed is replaced at once, by a new one.

Thread-safe: boto3's clients are; a connection is used by one thread, or idle.
"""

from __future__ import annotations

import re
import ssl
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import cached_property, partial
from http import HTTPStatus
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from botocore.exceptions import BotoCoreError, FlexibleChecksumError

from tierlog.host.retry import READ_POLICY, ChecksumMismatch, RetryPolicy
from tierlog.object_store.ledger import Operation, StoreLedger
from tierlog.object_store.s3_client import (
    FOREIGN,
    PresignedUrls,
    SignedOperation,
    ca_file,
    error_response_of,
    make_client,
    url_signer,
)
from tierlog.object_store.s3_connection import (
    Connection,
    ResponseHead,
    S3Options,
    UnsupportedResponse,
)
from tierlog.object_store.s3_responses import (
    ErrorResponse,
    check_range,
    error_for,
    member_of,
    reported_crc32c,
    stat_of,
)
from tierlog.object_store.store import PIECE_BYTES, ObjectStat, Piece, check_key
from tierlog.record_format.errors import (
    ConfigurationError,
    MissingObject,
    ShuttingDown,
    StoreUnavailable,
)

IDLE_MAX_S: Final = 20.0
ERROR_BODY_MAX_BYTES: Final = 64 * 1024
FALLBACKS_MAX: Final = 3
READS: Final = frozenset(("get", "head", "list"))
ONE_ATTEMPT: Final = RetryPolicy(attempts=1)

T = TypeVar("T")
P = TypeVar("P", bytes, Piece)

_LEFT_TO_BOTO3: Final = frozenset({301, 302, 307, 308, 400, 401, 403})
_ERROR_FIELD: Final = re.compile(rb"<(Code|Message)>([^<]*)</")


class ErrorStatus(Exception):
    def __init__(self, response: ErrorResponse) -> None:
        super().__init__(response.code)
        self.response = response


class S3Reads:
    """The reads of an S3Store that boto3 only signs.

    `policy` is for all calls. By default it is a broker's: a read gives up sooner than a write,
    since a client waits for it.
    """

    def __init__(
        self, bucket: str, prefix: str, options: S3Options, *, policy: RetryPolicy | None = None
    ) -> None:
        self._bucket, self._options = bucket, options
        self._prefix = prefix + "/" if prefix else ""
        self._policy = policy or RetryPolicy(deadline_s=options.deadline_s)
        self.read_policy = policy or READ_POLICY
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self.ledger = StoreLedger()
        self._is_closed = False
        try:
            self._client = make_client(options)
            sign, authorities = url_signer(options), ca_file(options)
        except (BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"store {self.url}: {error}") from error
        self.identity = f"{self.url} at {self._client.meta.endpoint_url}"
        self._ranges = RangedGets(
            lambda operation, key: sign(operation, bucket, self.full_key(key)),
            options,
            endpoint=self._client.meta.endpoint_url,
            ca_file=authorities,
        )

    def full_key(self, key: str) -> str:
        return self._prefix + key

    def close(self) -> None:
        """Calls in progress end with their current request."""
        self._is_closed = True
        self._ranges.close()
        self._client.close()

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Iterator[Piece]:
        assert 0 <= start < end
        check_key(key)
        if not self._ranges.is_usable:
            yield from self._range_by_boto3(key, start, end)
            return
        try:
            response = self._call(
                "get", key, lambda: self._ranges.open(key, start, end), policy=ONE_ATTEMPT
            )
        except UnsupportedResponse:
            yield from self._range_by_boto3(key, start, end)
            self._ranges.note_fallback()
            return
        with closing(response):
            check_range(response.content_range, response.size_bytes, start=start, end=end, key=key)
            yield from self._counted(key, _pieces(response, into), end - start)

    def _range_by_boto3(self, key: str, start: int, end: int) -> Iterator[bytes]:
        def send() -> Any:
            return self._client.get_object(**self._target(key), Range=f"bytes={start}-{end - 1}")

        response = self._call("get", key, send, policy=ONE_ATTEMPT)
        with closing(response["Body"]) as stream:
            size_bytes = member_of(response, "ContentLength", key=key)
            given = response.get("ContentRange", "")
            check_range(given, size_bytes, start=start, end=end, key=key)
            yield from self._counted(key, stream.iter_chunks(PIECE_BYTES), end - start)

    def head(self, key: str) -> ObjectStat | None:
        check_key(key)
        try:
            return self._call("head", key, partial(self._head, key))
        except MissingObject:
            return None

    def _head(self, key: str) -> ObjectStat:
        if not self._ranges.is_usable:
            return self._head_by_boto3(key)
        try:
            return self._ranges.head(key)
        except UnsupportedResponse:
            found = self._head_by_boto3(key)
        self._ranges.note_fallback()
        return found

    def _head_by_boto3(self, key: str) -> ObjectStat:
        response = self._client.head_object(**self._target(key), ChecksumMode="ENABLED")
        size_bytes = member_of(response, "ContentLength", key=key)
        modified = member_of(response, "LastModified", key=key)
        modified_ms = int(modified.timestamp() * 1000)
        return ObjectStat(key, size_bytes, reported_crc32c(response), modified_ms)

    # --- one call ---------------------------------------------------------------------------------

    def _target(self, key: str) -> Any:
        return {"Bucket": self._bucket, "Key": self.full_key(key)}

    def _call(
        self,
        operation: Operation,
        key: str,
        send: Callable[[], T],
        *,
        creates: bool = False,
        sent_bytes: int = 0,
        policy: RetryPolicy | None = None,
    ) -> T:
        """Send until it succeeds or `policy` gives up; each attempt is counted. Raises the errors
        of `ObjectStore` alone.
        """
        failed = partial(error_for, operation=operation, key=key, url=self.url, creates=creates)

        def attempt() -> T:
            if self._is_closed:
                raise ShuttingDown(f"store {self.url} was closed")
            with self.ledger.counted(operation, key, sent_bytes=sent_bytes):
                try:
                    return send()
                except ErrorStatus as status:
                    raise failed(status.response) from status
                except FOREIGN as error:
                    raise failed(error_response_of(error)) from error

        given = self.read_policy if operation in READS else self._policy
        return (policy or given).call_with_retries(attempt)

    def _counted(self, key: str, pieces: Iterator[P], size_bytes: int) -> Iterator[P]:
        """Count the bytes of `pieces`. Raises StoreUnavailable unless they total `size_bytes`."""
        received = 0
        try:
            for piece in pieces:
                received += len(piece)
                yield piece
        except FlexibleChecksumError as error:  # boto3 checks other algorithms too
            raise ChecksumMismatch(str(error)) from error
        except FOREIGN as error:
            why = error_response_of(error).detail
            raise StoreUnavailable(
                f"{key}: the response was interrupted after {received} bytes: {why}"
            ) from error
        finally:
            self.ledger.count("get", key, requests=0, received_bytes=received)
        if received != size_bytes:
            raise StoreUnavailable(f"{key}: the response has {received} bytes, not {size_bytes}")


def _pieces(response: RangeResponse, into: memoryview | None) -> Iterator[Piece]:
    if into is not None:
        return response.pieces(into)
    return (bytes(piece) for piece in response.pieces(memoryview(bytearray(PIECE_BYTES))))


class RangedGets:
    """GETs of byte ranges, and HEADs, over pooled connections.

    `sign` returns a presigned URL for an operation on a key; `ca_file` is the file or folder of
    trusted CAs.
    """

    def __init__(
        self,
        sign: Callable[[SignedOperation, str], str],
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
        self, operation: SignedOperation, key: str, header: str
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


def _request(url: str, operation: SignedOperation, header: str) -> tuple[str, bytes]:
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
