"""Heads of HTTP/1.1 messages: what the parser leaves to check of a request's, and how a response's
is written. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from http import HTTPStatus
from typing import Final

from tierlog.record_format.errors import InvalidRequest

Headers = list[tuple[bytes, bytes]]

CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"
BODILESS: Final = frozenset((204, 304))
_STATUS_LINES: Final = {
    one.value: b"HTTP/1.1 %d %b\r\n" % (one.value, one.phrase.encode()) for one in HTTPStatus
}
_ABSOLUTE: Final = re.compile(rb"https?://([^/?#@]+)([/?][^#]*)?", re.IGNORECASE)


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
