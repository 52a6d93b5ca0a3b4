"""Ranged GETs of S3 objects, received straight into the reader's buffer.

* boto3 says where an object is and signs for it: a presigned URL, kept for a few minutes and never
  shown, since it opens the object. This file sends the request and takes in the answer, because
  boto3's own way with a body costs three times the CPU.
* What is not plain HTTP/1.1 with a known length is not for here, and neither is what a redirect, a
  region or a signature may have to do with: `NotPlain` says so, and boto3's own answer counts.
* Any other refusal is told as an `Answer`. Nothing is repeated; but a kept connection that the
  server had closed meanwhile is no answer at all, and a new one is asked.

Thread-safe: a connection is in one pair of hands, or idle.
"""

from __future__ import annotations

import re
import ssl
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from cold_tier.s3_connection import Connection, Head, NotPlain
from cold_tier.s3_errors import Answer
from cold_tier.s3_options import S3Options

URL_KEPT_S: Final = 300.0  # a third of what it is good for
URLS_KEPT: Final = 1024
IDLE_KEPT_S: Final = 20.0
FAULT_MAX_BYTES: Final = 64 * 1024
IN_VAIN_MAX: Final = 3

_BOTO3_KNOWS_BETTER: Final = frozenset({301, 302, 307, 308, 400, 401, 403})
_FAULT_FIELD: Final = re.compile(rb"<(Code|Message)>([^<]*)</")


class Refused(Exception):
    def __init__(self, answer: Answer) -> None:
        super().__init__(answer.code)
        self.answer = answer


class PresignedUrls:
    """`sign(key)` makes one; each is used for a third of its life at most."""

    def __init__(self, sign: Callable[[str], str]) -> None:
        self._sign, self._lock = sign, threading.Lock()
        self._urls: OrderedDict[str, tuple[float, str]] = OrderedDict()

    def of(self, key: str) -> str:
        now = time.monotonic()
        with self._lock:
            made_at, url = self._urls.get(key, (0.0, ""))
        if url and now - made_at < URL_KEPT_S:
            return url
        url = self._sign(key)
        with self._lock:
            self._urls[key] = (now, url)
            self._urls.move_to_end(key)
            if len(self._urls) > URLS_KEPT:
                self._urls.popitem(last=False)
        return url

    def forget(self, key: str) -> None:
        with self._lock:
            self._urls.pop(key, None)


class Ranges:
    """GETs of byte ranges over kept connections.

    `sign` gives a presigned URL of a key, `ca_file` names whose certificates are trusted.
    """

    def __init__(
        self, sign: Callable[[str], str], options: S3Options, *, endpoint: str, ca_file: str
    ) -> None:
        self._urls, self._options, self._ca_file = PresignedUrls(sign), options, ca_file
        self._idle: deque[Connection] = deque(maxlen=options.max_connections)
        self._is_proxied = not options.is_on_this_machine and _has_proxy(urlsplit(endpoint))
        self._in_vain = 0

    @property
    def lead_to_objects(self) -> bool:
        """Whether it is worth a try: not past a proxy, and not after some that were in vain."""
        return self._in_vain < IN_VAIN_MAX and not self._is_proxied

    def open(self, key: str, start: int, end: int) -> Answering:
        """The answer for bytes [start, end), its head read. Raises NotPlain, Refused, OSError."""
        origin, request = self._request(key, start, end)
        connection = self._take(origin)
        if connection is not None:
            try:
                return self._ask(connection, request, key)
            except (ConnectionResetError, BrokenPipeError):
                pass  # it was closed while it was idle
        return self._ask(self._connect(origin), request, key)

    def boto3_answered(self, key: str) -> None:
        """What was not to be had this way was had by boto3: after a few, ask it alone."""
        self._urls.forget(key)
        self._in_vain += 1

    def keep(self, connection: Connection) -> None:
        """For the next GET: the answer was taken in whole."""
        self._in_vain = 0
        connection.idle_since = time.monotonic()
        if len(self._idle) == self._idle.maxlen:
            connection.close()
        else:
            self._idle.append(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()

    def _request(self, key: str, start: int, end: int) -> tuple[str, bytes]:
        parts = urlsplit(self._urls.of(key))
        head = (
            f"GET {parts.path}?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n"
            f"Range: bytes={start}-{end - 1}\r\nAccept-Encoding: identity\r\n"
            "User-Agent: tierlog\r\n\r\n"
        )
        return f"{parts.scheme}://{parts.netloc}", head.encode()

    def _take(self, origin: str) -> Connection | None:
        """The one that was used last, and not too long ago."""
        while True:
            try:
                connection = self._idle.pop()
            except IndexError:
                return None
            fresh = time.monotonic() - connection.idle_since < IDLE_KEPT_S
            if fresh and connection.origin == origin:
                return connection
            connection.close()

    def _connect(self, origin: str) -> Connection:
        options = self._options
        try:
            return Connection(
                origin,
                lambda: self._trust,
                connect_timeout_s=options.connect_timeout_s,
                read_timeout_s=options.range_timeout_s,
            )
        except ssl.SSLCertVerificationError as error:
            raise NotPlain(f"its certificate is not trusted: {error}") from error

    @cached_property
    def _trust(self) -> ssl.SSLContext:
        if Path(self._ca_file).is_dir():
            return ssl.create_default_context(capath=self._ca_file)
        return ssl.create_default_context(cafile=self._ca_file)

    def _ask(self, connection: Connection, request: bytes, key: str) -> Answering:
        try:
            head = connection.ask(request)
            if head.status not in {200, 206}:
                raise self._refusal(connection, head, key)
            return Answering(self, connection, head)
        except BaseException:
            connection.close()
            raise

    def _refusal(self, connection: Connection, head: Head, key: str) -> Exception:
        if head.status in _BOTO3_KNOWS_BETTER:
            self._urls.forget(key)
            return NotPlain(f"refused with {head.status}")
        body = b""
        if head.size_bytes <= FAULT_MAX_BYTES:
            pieces = connection.receive(head, memoryview(bytearray(FAULT_MAX_BYTES)))
            body = b"".join(bytes(piece) for piece in pieces)
        said = {name: text.decode("utf-8", "replace") for name, text in _FAULT_FIELD.findall(body)}
        code = said.get(b"Code") or str(head.status)
        return Refused(Answer(head.status, code, said.get(b"Message", "")))


class Answering:
    """A good answer whose body is to come. Close it, whether or not the body was taken."""

    def __init__(self, ranges: Ranges, connection: Connection, head: Head) -> None:
        self._ranges, self._connection, self._whole = ranges, connection, False
        self.size_bytes = head.size_bytes
        self._head = head

    @property
    def content_range(self) -> str:
        return self._head.headers.get("content-range", "")

    def pieces(self, into: memoryview) -> Iterator[memoryview]:
        """The body, each piece a view of `into`, which the next one overwrites."""
        yield from self._connection.receive(self._head, into)
        self._whole = True

    def close(self) -> None:
        if self._whole and self._head.keeps_alive:
            self._ranges.keep(self._connection)
        else:
            self._connection.close()


def _has_proxy(endpoint: SplitResult) -> bool:
    host = endpoint.hostname or ""
    return endpoint.scheme in getproxies() and not proxy_bypass(host)
