"""One HTTP/1.1 connection to a store: a GET is sent, its answer received into a given buffer.

* Whatever needs more than that (an unknown length, another version, a huge head) is NotPlain, and
  no attempt is made to understand it.
* Network errors are OSError, as the system names them. Only one thread uses a connection at a time.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple
from urllib.parse import urlsplit

HEAD_MAX_BYTES: Final = 32 * 1024
PIECE_S: Final = 1.0
_RECV_BYTES: Final = 8192


class NotPlain(Exception):
    """Not an answer that this file can take in."""


class NeverConnected(OSError):
    """Nobody was reached, so nothing was asked."""


class Head(NamedTuple):
    """An answer's status and headers, names in lower case; `body` is what came with them."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def size_bytes(self) -> int:
        """Raises NotPlain if the answer does not say."""
        size = self.headers.get("content-length", "")
        if "transfer-encoding" in self.headers or not size.isdecimal():
            raise NotPlain("a response of unknown length")
        return int(size)

    @property
    def keeps_alive(self) -> bool:
        return "close" not in self.headers.get("connection", "").lower()


class Connection:
    """One connection to the store; `trust` makes what TLS needs. Network errors are OSError."""

    def __init__(
        self,
        origin: str,
        trust: Callable[[], ssl.SSLContext],
        *,
        connect_timeout_s: float,
        read_timeout_s: float,
    ) -> None:
        parts = urlsplit(origin)
        assert parts.hostname is not None
        port = parts.port or (443 if parts.scheme == "https" else 80)
        address = (parts.hostname, port)
        try:
            self._socket = socket.create_connection(address, timeout=connect_timeout_s)
        except OSError as error:
            raise NeverConnected(*error.args) from error
        self.origin, self.idle_since = origin, 0.0
        self._flags = 0
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if parts.scheme == "https":
                self._socket = trust().wrap_socket(self._socket, server_hostname=parts.hostname)
                self._socket.settimeout(read_timeout_s)
            else:
                self._wait_in_the_kernel(read_timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def _wait_in_the_kernel(self, timeout_s: float) -> None:
        """One call a piece, and no poll before it: the kernel waits until the piece is whole."""
        self._socket.settimeout(None)
        timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._flags = socket.MSG_WAITALL

    def ask(self, request: bytes) -> Head:
        """Raises ConnectionResetError if the other side is gone and has said nothing."""
        self._socket.sendall(request)
        seen = bytearray()
        while (end := seen.find(b"\r\n\r\n")) < 0:
            more = self._socket.recv(_RECV_BYTES)
            if not more:
                kind = ConnectionAbortedError if seen else ConnectionResetError
                raise kind("the connection was closed before a response")
            seen += more
            if len(seen) > HEAD_MAX_BYTES:
                raise NotPlain("a response whose head is too large")
        return _parse_head(bytes(seen[:end]), bytes(seen[end + 4 :]))

    def receive(self, head: Head, into: memoryview) -> Iterator[memoryview]:
        """The body in pieces, each a view of `into`, which the next one overwrites.

        A slow piece is passed on incomplete, so that a caller with a deadline can check it between
        pieces.
        """
        left = head.size_bytes - len(head.body)
        if left < 0:
            raise ConnectionAbortedError("the response is longer than it says")
        have = len(head.body)
        into[:have] = head.body
        while have or left:
            wanted = min(len(into), have + left)
            give_out_s = time.monotonic() + PIECE_S
            while have < wanted:
                received = self._socket.recv_into(into[have:wanted], 0, self._flags)
                if not received:
                    if have:
                        yield into[:have]
                    raise ConnectionAbortedError("the connection was closed")
                have, left = have + received, left - received
                if have < wanted and time.monotonic() > give_out_s:
                    break
            yield into[:have]
            have = 0

    def close(self) -> None:
        self._socket.close()


def _parse_head(head: bytes, body: bytes) -> Head:
    lines = head.decode("iso-8859-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = rest[:3]
    if version != "HTTP/1.1" or not status.isdecimal() or int(status) < 200:
        raise NotPlain("a response that is not HTTP/1.1")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return Head(int(status), headers, body)
