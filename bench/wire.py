"""A keep-alive connection that sends prepared requests: for latencies, where a client library would
be most of what is measured.

It understands only our own server's responses: `Content-Length`, and chunks of event streams.
"""

from __future__ import annotations

import re
import socket
import time
from collections.abc import Callable
from typing import NamedTuple

from bench.children import Server

Append = Callable[[], object]
"""Sends a prepared request to append, and waits for its response."""

_RECEIVE_BYTES = 256 << 10


class Timed(NamedTuple):
    seconds: float
    body: bytes


class Wire:
    """A context manager; leaving it closes the connection."""

    def __init__(self, server: Server) -> None:
        self._host = f"{server.host}:{server.port}"
        self.sock = socket.create_connection((server.host, server.port), timeout=120)
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *_: object) -> None:
        self.sock.close()

    def request(self, line: str, body: bytes = b"", **headers: str) -> bytes:
        """The bytes of a request; `headers` have underscores in place of dashes."""
        lines = [f"{line} HTTP/1.1", f"Host: {self._host}", f"Content-Length: {len(body)}"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        return "\r\n".join(lines).encode() + b"\r\n\r\n" + body

    def timed(self, request: bytes) -> Timed:
        """Send it and read the whole response. Raises RuntimeError unless it succeeded."""
        began = time.perf_counter()
        self.sock.sendall(request)
        response = self._receive()
        seconds = time.perf_counter() - began
        head, _, body = response.partition(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"not a success: {response[:500]!r}")
        return Timed(seconds, body)

    def drain(self, request: bytes, buffer: memoryview) -> tuple[bytes, int]:
        """Send it and discard the body, as cheaply as a client can. Returns the response's head and
        the body's size. Raises RuntimeError unless it succeeded.
        """
        self.sock.sendall(request)
        head, _, body = self._head_and_more().partition(b"\r\n\r\n")
        size = left = _content_length(head)
        if not head.startswith(b"HTTP/1.1 2"):
            raise RuntimeError(f"not a success: {head + body[:500]!r}")
        left -= len(body)
        while left > 0:
            got = self.sock.recv_into(buffer, min(left, len(buffer)), socket.MSG_WAITALL)
            if not got:
                raise RuntimeError("the server closed the connection")
            left -= got
        return head, size

    def fetch(self, line: str, buffer: memoryview, **headers: str) -> tuple[int, int]:
        """As `drain`, of records. Returns the next offset, and the body's size, which is not 0."""
        head, size = self.drain(self.request(line, b"", **headers), buffer)
        found = re.search(rb"(?i)\r\nlog-next-offset: (\d+)", head)
        if not size or found is None:
            raise RuntimeError(f"{line}: {head!r}")
        return int(found[1]), size

    def start_stream(self, request: bytes) -> None:
        """Send a request for an event stream, and read up to the start of the body."""
        self.sock.sendall(request)
        seen = b""
        while b"\r\n\r\n" not in seen or not seen.endswith(b"\n\r\n"):
            seen += self.read_some()
        if not seen.startswith(b"HTTP/1.1 200"):
            raise RuntimeError(f"not a success: {seen[:500]!r}")

    def read_some(self) -> bytes:
        data = self.sock.recv(_RECEIVE_BYTES)
        if not data:
            raise RuntimeError("the server closed the connection")
        return data

    def _receive(self) -> bytes:
        response = self._head_and_more()
        head, _, body = response.partition(b"\r\n\r\n")
        size = _content_length(head)
        parts, left = [response], size - len(body)
        while left > 0:
            part = self.read_some()
            parts.append(part)
            left -= len(part)
        return b"".join(parts)

    def _head_and_more(self) -> bytes:
        response = self.read_some()
        while b"\r\n\r\n" not in response:
            response += self.read_some()
        return response


def _content_length(head: bytes) -> int:
    for line in head.lower().split(b"\r\n"):
        if line.startswith(b"content-length:"):
            return int(line.partition(b":")[2])
    return 0
