"""A Kafka client that sends any message in any version, over one connection, and decodes the answer
with our codec (which has judges of its own).
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Final

import msgspec

from tierlog.record_format.kafka_messages import codec, messages
from tierlog.record_format.kafka_messages.apis import APIS, Api

_APIS: Final = {api.name: api for api in APIS.values()}


def api_of_request(request: msgspec.Struct) -> Api:
    return _APIS[type(request).__name__.removesuffix("Request")]


def request_frame(request: msgspec.Struct, version: int, *, correlation_id: int = 7) -> bytes:
    api = api_of_request(request)
    head = struct.pack(">hhih", api.key, version, correlation_id, 4) + b"test"
    if api.is_flexible(version):
        head += b"\0"
    body = head + codec.encode(request, version)
    return struct.pack(">i", len(body)) + body


class KafkaCaller:
    """A context manager."""

    def __init__(self, port: int) -> None:
        """On loopback."""
        self.sock = socket.create_connection(("127.0.0.1", port), timeout=30)
        self._count = 0

    def __enter__(self) -> KafkaCaller:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.sock.close()

    def ask(self, request: msgspec.Struct, version: int) -> Any:
        self.send(request, version)
        return self.answer(request, version)

    def send(self, request: msgspec.Struct, version: int) -> None:
        self._count += 1
        self.sock.sendall(request_frame(request, version, correlation_id=self._count))

    def answer(self, request: msgspec.Struct, version: int) -> Any:
        """The next answer, which is that of `request`."""
        frame = self.frame()
        api = api_of_request(request)
        kind = getattr(messages, f"{api.name}Response")
        start = 4 + api.response_header_version(version)
        return codec.decode(kind, version, frame, position=start)

    def frame(self) -> bytes:
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def is_closed(self) -> bool:
        """Whether the broker has ended the connection, without an answer."""
        try:
            return self.sock.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, size: int) -> bytes:
        data, filled = bytearray(size), 0
        while filled < size:
            more = self.sock.recv_into(memoryview(data)[filled:])
            assert more, "the connection was closed"
            filled += more
        return bytes(data)
