"""uvicorn's HTTP/1.1 protocol, which ignores requests to upgrade to another protocol.

* A request with `Upgrade` is handled as if it had none (RFC 9110, 7.8). Java's client asks for h2c
  in the first request of a connection, even if that has a body.
* uvicorn's parser takes such a request for the last one of its connection, without a body. If it
  has a body, a new parser is given the framing and continues with the body; the parsed head stays.
* Only the framing of HTTP/1.0 and 1.1 is accepted: another version is refused, and so is any
  transfer coding except `chunked`, whose bytes would be taken for the body.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from tierlog.record_format.errors import InvalidRequest

_VERSIONS: Final = ("1.1", "1.0")


class NoUpgradeProtocol(HttpToolsProtocol):
    """Relies on uvicorn calling `_unsupported_upgrade_warning` where the parser stopped."""

    _piece = b""  # being fed to the parser
    _unfed = b""  # what the parser left of it after a request with `Upgrade`
    _body_head = b""  # for such a request: a head with the framing of its body

    def data_received(self, data: bytes) -> None:
        self._unfed = data
        while self._unfed and self.parser is not None:  # it is None once the connection is lost
            self._piece, self._unfed = self._unfed, b""
            super().data_received(self._piece)
        self._piece = b""

    def check_framing(self) -> None:
        """Check the version and the transfer coding of a complete head. Raises InvalidRequest."""
        version = self.parser.get_http_version()
        if version not in _VERSIONS:
            raise InvalidRequest(f"HTTP/{version} is not supported")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and b",".join(codings).lower() != b"chunked":
            raise InvalidRequest("the only Transfer-Encoding supported is `chunked`")
        if self.parser.should_upgrade():
            self._body_head = _body_head(self.headers)

    def on_message_complete(self) -> None:
        if not self._body_head:
            super().on_message_complete()

    def _unsupported_upgrade_warning(self) -> None:
        found = sys.exception()
        assert isinstance(found, httptools.HttpParserUpgrade), "called while handling it"
        self._unfed = self._piece[found.args[0] :]
        if self._body_head:
            head, self._body_head = self._body_head, b""
            self.parser = _parser_after(head, self)


def _body_head(headers: list[tuple[bytes, bytes]]) -> bytes:
    """A head with the same framing; empty if there is no body."""
    for name, value in headers:
        if name == b"transfer-encoding" or (name == b"content-length" and int(value)):
            return b"POST / HTTP/1.1\r\n%b: %b\r\n\r\n" % (name, value)
    return b""


def _parser_after(head: bytes, protocol: NoUpgradeProtocol) -> httptools.HttpRequestParser:
    """A parser that has read `head` without any callback to `protocol`."""
    callbacks = _Callbacks(protocol)
    parser = new_parser(callbacks)
    parser.feed_data(head)
    callbacks.enabled = True
    return parser


def new_parser(callbacks: object) -> httptools.HttpRequestParser:
    """A parser configured as uvicorn's, at the start of a request."""
    parser = httptools.HttpRequestParser(callbacks)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)
    return parser


class _Callbacks:
    """The protocol's parser callbacks, which do nothing until `enabled`."""

    def __init__(self, protocol: NoUpgradeProtocol) -> None:
        self._protocol, self.enabled = protocol, False

    def __getattr__(self, name: str) -> Callable[..., Any]:
        callback = getattr(self._protocol, name)

        def forward(*args: bytes) -> None:
            if self.enabled:
                callback(*args)

        return forward
