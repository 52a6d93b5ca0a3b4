"""How an S3 store is reached: the options of its bucket, and a minimal HTTP/1.1 connection that
sends a GET and receives the response into a buffer.

* An option that is None is left to AWS's provider chain (environment, profile, instance or web
  identity). The repr contains no secrets, so that no log line can.
* A response that needs more (one of unknown length, another HTTP version, a huge head) raises
  UnsupportedResponse; no attempt is made to parse it.
* Network errors are the system's OSErrors. Only one thread may use a connection at a time.
* A response that trickles times out too: apart from the read timeout, it may not be slower than
  SLOWEST_BYTES_PER_S.
"""

from __future__ import annotations

import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from urllib.parse import urlsplit

from tierlog.host.loopback import is_loopback


@dataclass(frozen=True, kw_only=True)
class S3Options:
    endpoint: str | None = None
    region: str | None = None
    path_style: bool | None = None
    """None: path style with a custom endpoint, AWS's default otherwise."""
    access_key_id: str | None = field(default=None, repr=False)
    secret_access_key: str | None = field(default=None, repr=False)
    session_token: str | None = field(default=None, repr=False)
    profile: str | None = None
    ca_bundle: str | None = None
    """Path of a PEM file, for an endpoint whose certificate is not from a public authority."""
    storage_class: str | None = None
    """For segment logs only: manifests and indexes are small and read often."""
    server_side_encryption: str | None = None
    """`AES256`, `aws:kms` or `aws:kms:dsse`; None means the bucket's default."""
    sse_kms_key_id: str | None = field(default=None, repr=False)
    max_connections: int = 48
    connect_timeout_s: float = 5.0
    read_timeout_s: float = 20.0
    """The longest a connection may be idle during a request, not the length of a transfer."""
    range_timeout_s: float = 10.0
    """The same for ranged GETs, for which a reader waits and which a retry may serve sooner."""
    deadline_s: float = 60.0
    """For a write including its retries; each part of a large upload has its own."""

    @property
    def is_loopback(self) -> bool:
        """Whether the endpoint is this machine; proxies from the environment are then ignored."""
        return is_loopback(urlsplit(self.endpoint or "").hostname or "")


HEAD_MAX_BYTES: Final = 32 * 1024
PARTIAL_PIECE_AFTER_S: Final = 1.0
SLOWEST_BYTES_PER_S: Final = 4 * 1024  # many requests at once may share a slow link
_RECV_BYTES: Final = 8192


class UnsupportedResponse(Exception):
    """A response that this module cannot receive."""


class ConnectFailed(OSError):
    """No connection was established, so no request was sent."""


class ResponseHead(NamedTuple):
    """The status and headers, names in lower case; `body` is what was received along with them."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def size_bytes(self) -> int:
        """Raises UnsupportedResponse if the length is unknown."""
        size = self.headers.get("content-length", "")
        if "transfer-encoding" in self.headers or not size.isdecimal():
            raise UnsupportedResponse("the response has no length")
        return int(size)

    @property
    def keeps_alive(self) -> bool:
        return "close" not in self.headers.get("connection", "").lower()


class Connection:
    """One connection to the store. `ssl_context` is called for HTTPS only."""

    def __init__(
        self,
        origin: str,
        ssl_context: Callable[[], ssl.SSLContext],
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
            raise ConnectFailed(*error.args) from error
        self.origin, self.idle_since = origin, 0.0
        self._timeout_s, self._flags = read_timeout_s, 0
        try:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            if parts.scheme == "https":
                self._socket = ssl_context().wrap_socket(
                    self._socket, server_hostname=parts.hostname
                )
                self._socket.settimeout(read_timeout_s)
            else:
                self._use_kernel_timeouts(read_timeout_s)
        except BaseException:
            self._socket.close()
            raise

    def _use_kernel_timeouts(self, timeout_s: float) -> None:
        """Receive each piece in one blocking call, without poll: the kernel waits for all of it."""
        self._socket.settimeout(None)
        timeval = struct.pack("ll", int(timeout_s), int(timeout_s % 1 * 1_000_000))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)
        self._flags = socket.MSG_WAITALL

    def send(self, request: bytes) -> ResponseHead:
        """Send a request and receive the head of its response. Raises ConnectionResetError if the
        server closed the connection without a response.
        """
        self._socket.sendall(request)
        received, began = bytearray(), time.monotonic()
        while (end := received.find(b"\r\n\r\n")) < 0:
            more = self._socket.recv(_RECV_BYTES)
            if not more:
                kind = ConnectionAbortedError if received else ConnectionResetError
                raise kind("the connection was closed before a response")
            received += more
            if len(received) > HEAD_MAX_BYTES:
                raise UnsupportedResponse("the response's head is too large")
            self._check_speed(len(received), time.monotonic() - began)
        return _parse_head(bytes(received[:end]), bytes(received[end + 4 :]))

    def receive(self, head: ResponseHead, into: memoryview) -> Iterator[memoryview]:
        """The body in pieces, each a view of `into` that the next one overwrites.

        A slow piece is yielded incomplete, so that the caller can check its deadline between
        pieces.
        """
        remaining = head.size_bytes - len(head.body)
        if remaining < 0:
            raise ConnectionAbortedError("the response is longer than its Content-Length")
        filled, waited_s = len(head.body), 0.0
        into[:filled] = head.body
        while filled or remaining:
            self._check_speed(head.size_bytes - remaining, waited_s)
            wanted = min(len(into), filled + remaining)
            began = time.monotonic()
            while filled < wanted:
                received = self._socket.recv_into(into[filled:wanted], 0, self._flags)
                if not received:
                    if filled:
                        yield into[:filled]
                    raise ConnectionAbortedError("the connection was closed")
                filled, remaining = filled + received, remaining - received
                if time.monotonic() - began > PARTIAL_PIECE_AFTER_S:
                    break
            waited_s += time.monotonic() - began
            yield into[:filled]
            filled = 0

    def _check_speed(self, received_bytes: int, waited_s: float) -> None:
        if received_bytes < SLOWEST_BYTES_PER_S * (waited_s - self._timeout_s):
            raise TimeoutError(f"the response is slower than {SLOWEST_BYTES_PER_S} bytes/s")

    def close(self) -> None:
        self._socket.close()


def _parse_head(head: bytes, body: bytes) -> ResponseHead:
    lines = head.decode("iso-8859-1").split("\r\n")
    version, _, rest = lines[0].partition(" ")
    status = rest[:3]
    if version != "HTTP/1.1" or not status.isdecimal() or int(status) < 200:
        raise UnsupportedResponse("the response is not HTTP/1.1")
    headers = {}
    for line in lines[1:]:
        name, _, value = line.partition(":")
        headers[name.lower()] = value.strip()
    return ResponseHead(int(status), headers, body)
