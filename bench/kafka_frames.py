"""Frames of Kafka's protocol, and a bare client that sends and receives them, for either broker."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Final

import msgspec

from tierlog.record_format.kafka_messages import codec, messages
from tierlog.record_format.kafka_messages.apis import APIS
from tierlog.record_format.kafka_messages.messages import (
    CreateTopicsRequest,
    FetchRequest,
    MetadataRequest,
    ProduceRequest,
)

MIB: Final = 1 << 20
PRODUCE_VERSION: Final = 9
FETCH_VERSION: Final = 12
_APIS: Final = {api.name: api for api in APIS.values()}


class Connection:
    """A bare client: frames out, frames in."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = memoryview(bytearray(64 * MIB))

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def ask(self, request: msgspec.Struct, version: int) -> Any:
        return answer_of(request, version, self.exchange(frame_of(request, version)))

    def exchange(self, frame: bytes) -> memoryview:
        """Send a frame, and receive the next one; it is good until the next call."""
        self.socket.sendall(frame)
        return self.receive()

    def receive(self) -> memoryview:
        (size,) = struct.unpack(">i", self._fill(4))
        return self._fill(size)

    def _fill(self, size: int) -> memoryview:
        got = 0
        while got < size:
            more = self.socket.recv_into(self._buffer[got:size])
            assert more, "the broker closed the connection"
            got += more
        return self._buffer[:size]


def _api_of(request: msgspec.Struct) -> Any:
    return _APIS[type(request).__name__.removesuffix("Request")]


def frame_of(request: msgspec.Struct, version: int) -> bytes:
    api = _api_of(request)
    head = struct.pack(">hhih", api.key, version, 1, 5) + b"bench"
    body = head + bytes(api.is_flexible(version)) + codec.encode(request, version)
    return struct.pack(">i", len(body)) + body


def answer_of(request: msgspec.Struct, version: int, frame: bytes | memoryview) -> Any:
    api = _api_of(request)
    kind = getattr(messages, f"{api.name}Response")
    return codec.decode(kind, version, frame, position=4 + api.response_header_version(version))


def produce_frame(topic: str, batch: bytes, *, partition: int = 0) -> bytes:
    data = [ProduceRequest.PartitionProduceData(partition, batch)]
    named = ProduceRequest.TopicProduceData(name=topic, partition_data=data)
    return frame_of(ProduceRequest(None, -1, 30_000, [named]), PRODUCE_VERSION)


def check_produced(answer: memoryview) -> None:
    """Of a frame from `produce_frame`."""
    found = answer_of(ProduceRequest(None, -1, 30_000, []), PRODUCE_VERSION, answer)
    refused = [one for topic in found.responses for one in topic.partition_responses]
    assert not any(one.error_code for one in refused), refused


def fetch_request(
    topic: str, offsets: dict[int, int], *, max_bytes: int, **fields: Any
) -> FetchRequest:
    """`offsets`: by partition."""
    wanted = [
        FetchRequest.FetchPartition(
            partition=number, fetch_offset=offset, partition_max_bytes=max_bytes
        )
        for number, offset in offsets.items()
    ]
    topics = [FetchRequest.FetchTopic(topic=topic, partitions=wanted)] if wanted else []
    given: dict[str, Any] = {"max_wait_ms": 5000, "min_bytes": 1, "max_bytes": 50 * MIB, **fields}
    return FetchRequest(topics=topics, **given)


def create_topics(
    port: int,
    partitions: Mapping[str, int],
    configs: Mapping[str, Mapping[str, object]],
    *,
    factor: int = 1,
) -> None:
    def creatable(name: str, count: int) -> CreateTopicsRequest.CreatableTopic:
        settings = {"retention.ms": -1, **configs.get(name, {})}.items()
        written = [
            CreateTopicsRequest.CreatableTopicConfig(key, str(value)) for key, value in settings
        ]
        return CreateTopicsRequest.CreatableTopic(name, count, factor, configs=written)

    request = CreateTopicsRequest([creatable(*one) for one in partitions.items()], 30_000)
    with Connection(port) as client:
        refused = [one for one in client.ask(request, 5).topics if one.error_code]
        assert not refused, refused
        deadline = time.monotonic() + 30
        for name in partitions:
            wanted = [MetadataRequest.MetadataRequestTopic(name=name)]
            while client.ask(MetadataRequest(wanted), 9).topics[0].error_code:
                assert time.monotonic() < deadline, f"{name} is not there"
                time.sleep(0.05)
