"""HTTP/1.1 messages: requests out of the bytes of a connection, and the heads of responses. It does
no I/O. httptools (llhttp) parses; this checks what it lets pass.

* A head is limited in bytes, however it is split into packets. So is the framing of a body: chunk
  extensions, and trailers, which are dropped. (Merged into the head, a trailer could name another
  client or condition; RFC 9110, 6.5.1.)
* A request with `Upgrade` is handled as if it had none (RFC 9110, 7.8): Java's client asks for h2c
  in the first request of a connection, even if that has a body. llhttp stops there, as if no body
  followed: another parser goes on, which was given a head with the same framing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Any, Final, NamedTuple, Protocol

import httptools

from tierlog.record_format.errors import InvalidRequest, RequestError

_NOT_PLAIN: Final = frozenset((b"content-length", b"transfer-encoding", b"expect"))
Headers = list[tuple[bytes, bytes]]
CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS: Final = frozenset((204, 304))
_STATUS_LINES: Final = {
    one.value: b"HTTP/1.1 %d %b\r\n" % (one.value, one.phrase.encode()) for one in HTTPStatus
}
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


class HeaderTooLarge(RequestError):
    """The request line and the headers together."""

    def __init__(self, *, limit_bytes: int, size_bytes: int) -> None:
        super().__init__(
            f"the request line and headers have {size_bytes} bytes or more; the limit is "
            f"{limit_bytes}"
        )
        self.limit_bytes, self.size_bytes = limit_bytes, size_bytes


class Head(NamedTuple):
    """`is_plain`: no body can follow, and nothing else is asked for than a response."""

    method: str
    target: bytes
    version: str
    headers: Headers
    keep_alive: bool
    awaits_100: bool
    is_plain: bool


class Sink(Protocol):
    """Called while bytes are fed: for each request a head that begins and is complete, parts of its
    body, and its end.
    """

    def head_begins(self) -> None:
        """Raises a RequestError to stop."""
        ...

    def head_ends(self, head: Head, /) -> None: ...
    def body_part(self, part: bytes, /) -> None: ...
    def request_ends(self) -> None: ...


class RequestParser:
    def __init__(self, sink: Sink, *, head_max_bytes: int) -> None:
        self._sink, self._head_max_bytes = sink, head_max_bytes
        self._parser: Any = httptools.HttpRequestParser(self)
        self._url = b""
        self._headers: Headers = []
        self._error: RequestError | None = None  # why a callback stopped the parser
        self._overhead_bytes = 0  # fed since the last byte of a body, or a whole head
        self._upgrade_head = b""  # of a request with `Upgrade`, for the parser of its body
        self.body_left = 0  # of the body that is arriving; 0 if its length is unknown

    def feed(self, piece: memoryview) -> None:
        """Raises RequestError; nothing can be fed after that."""
        self._overhead_bytes += len(piece)
        try:
            self._feed(piece)
        except httptools.HttpParserError as error:
            if self._error is None and isinstance(error, httptools.HttpParserCallbackError):
                raise  # a defect of ours
            raise self._error or InvalidRequest(f"malformed request: {error}") from None
        if self._overhead_bytes > self._head_max_bytes:
            raise self._too_large(self._overhead_bytes)

    def skip_body(self) -> None:
        """The rest of the body was not fed. Its request has ended."""
        self._parser = httptools.HttpRequestParser(self)
        self.on_message_complete()

    def close(self) -> None:
        """The parsers refer to this one, which refers to the connection."""
        self._parser = None

    def _feed(self, piece: memoryview) -> None:
        while piece:
            try:
                self._parser.feed_data(piece)
                return
            except httptools.HttpParserUpgrade as stopped:
                piece = piece[stopped.args[0] :]
                if self._upgrade_head:
                    self._parser = httptools.HttpRequestParser(self)
                    self._parser.feed_data(self._upgrade_head)
                    self._upgrade_head = b""

    def _too_large(self, size_bytes: int) -> HeaderTooLarge:
        return HeaderTooLarge(limit_bytes=self._head_max_bytes, size_bytes=size_bytes)

    # --- what httptools calls -------------------------------------------------------------------

    def on_message_begin(self) -> None:
        self._url, self._headers = b"", []
        if self._upgrade_head:
            return
        try:
            self._sink.head_begins()
        except RequestError as error:
            self._error = error
            raise

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._upgrade_head:
            return
        try:
            head = self._complete_head()
        except RequestError as error:
            self._error = error
            raise
        self._headers = []  # trailers go here
        self._overhead_bytes = 0
        self._sink.head_ends(head)

    def on_body(self, part: bytes) -> None:
        self._overhead_bytes = 0
        self.body_left = max(0, self.body_left - len(part))
        self._sink.body_part(part)

    def on_message_complete(self) -> None:
        if not self._upgrade_head:
            self.body_left = self._overhead_bytes = 0
            self._sink.request_ends()

    def _complete_head(self) -> Head:
        parser, headers = self._parser, self._headers
        # A head that arrived in one read, perhaps with its body, has not been counted yet.
        size = len(self._url) + sum([len(name) + len(value) + 4 for name, value in headers])
        if size > self._head_max_bytes:
            raise self._too_large(size)
        version = parser.get_http_version()
        given = dict(headers)
        is_plain = _NOT_PLAIN.isdisjoint(given)
        if version != "1.1" or not is_plain:
            check_framing(version, headers)
        target = origin_form(self._url, headers)
        awaits_100 = False
        if not is_plain:
            self.body_left = int(given.get(b"content-length", 0))
            # HTTP/1.0 has no 1xx responses.
            awaits_100 = version == "1.1" and given.get(b"expect", b"").lower() == b"100-continue"
        if parser.should_upgrade():
            is_plain = False
            self._upgrade_head = same_framing(headers)
        return Head(
            parser.get_method().decode("ascii"),
            target,
            version,
            headers,
            keep_alive=version == "1.1" and parser.should_keep_alive(),
            awaits_100=awaits_100,
            is_plain=is_plain,
        )


def encode_head(status: int, lines: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Names are lower case, as in ASGI. Raises RuntimeError if one brings lines of its own."""
    head = _STATUS_LINES[status] + b"".join([b"%b: %b\r\n" % line for line in lines]) + b"\r\n"
    if not head.count(b"\n") == head.count(b"\r") == len(lines) + 2:
        raise RuntimeError("a response header contains a line break")
    return head


def check_framing(version: str, headers: Headers) -> None:
    """Only what HTTP/1.0 and 1.1 say a body ends with: the bytes of another transfer coding would
    be taken for the body. Raises InvalidRequest.
    """
    if version not in ("1.1", "1.0"):
        raise InvalidRequest(f"HTTP/{version} is not supported")
    codings = [value for name, value in headers if name == b"transfer-encoding"]
    if codings and b",".join(codings).lower() != b"chunked":
        raise InvalidRequest("the only Transfer-Encoding supported is `chunked`")


def same_framing(headers: Headers) -> bytes:
    """A head with a body of the same framing; empty if there is no body."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value)):
            return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, value)
    return b""


def origin_form(target: bytes, headers: Headers) -> bytes:
    """The path and query of a request's target; `*` is returned as it is.

    In absolute-form, as sent to a proxy (RFC 9112, 3.2.2), the URL names the host and `Host` is
    ignored: the URL's host replaces it in `headers`. Raises InvalidRequest for another scheme, and
    for userinfo before the host (RFC 9110, 4.2.4).
    """
    if target.startswith(b"/"):
        return target.partition(b"#")[0]
    if target == b"*":
        return target
    found = _ABSOLUTE.fullmatch(target)
    if found is None:
        raise InvalidRequest(
            "the request target is neither a path nor an http URL without userinfo"
        )
    authority, rest = found.groups(default=b"/")
    headers[:] = [(name, authority if name == b"host" else value) for name, value in headers]
    return rest if rest.startswith(b"/") else b"/" + rest
