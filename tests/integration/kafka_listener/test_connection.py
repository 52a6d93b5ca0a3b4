"""The connection, from outside: frames over a real socket."""

import socket
import struct
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest
from kafka import KafkaConsumer

from tests.fakes.served_broker import Served
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.apis import APIS
from tierlog.record_format.kafka_messages.messages import (
    ApiVersionsRequest,
    ApiVersionsResponse,
    MetadataRequest,
    MetadataResponse,
)

API_VERSIONS, METADATA = 18, 3


@contextmanager
def connected(served: Served) -> Iterator[socket.socket]:
    with socket.create_connection(("127.0.0.1", served.kafka_port), timeout=20) as sock:
        yield sock


def frame(key: int, version: int, request: msgspec.Struct, *, correlation_id: int = 7) -> bytes:
    head = struct.pack(">hhih", key, version, correlation_id, 4) + b"test"
    if APIS[key].is_flexible(version):
        head += b"\0"
    body = head + codec.encode(request, version)
    return struct.pack(">i", len(body)) + body


def received(sock: socket.socket) -> bytes:
    size = struct.unpack(">i", exactly(sock, 4))[0]
    return exactly(sock, size)


def exactly(sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = sock.recv(size - len(data))
        assert more, "the connection was closed"
        data += more
    return data


def test_a_client_finds_the_topics(served: Served) -> None:
    served.broker.create_topic("flights", partitions=3)
    consumer = KafkaConsumer(bootstrap_servers=f"127.0.0.1:{served.kafka_port}")
    try:
        assert consumer.topics() == {"flights"}
        assert consumer.partitions_for_topic("flights") == {0, 1, 2}
    finally:
        consumer.close()


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(served: Served) -> None:
    with connected(served) as sock:
        sock.sendall(struct.pack(">ihhih", 10, API_VERSIONS, 99, 5, -1))
        answer = received(sock)
        assert answer[:4] == struct.pack(">i", 5)
        found = codec.decode(ApiVersionsResponse, 0, answer, position=4)
        assert found.error_code == 35
        assert [(one.api_key, one.min_version, one.max_version) for one in found.api_keys] == [
            (API_VERSIONS, 0, 4)
        ]
        named = ApiVersionsRequest(client_software_name="t", client_software_version="1")
        sock.sendall(frame(API_VERSIONS, 4, named))  # on the same connection
        served_now = codec.decode(ApiVersionsResponse, 4, received(sock), position=4)
        assert METADATA in {one.api_key for one in served_now.api_keys}


@pytest.mark.parametrize("piece_bytes", [1, 3, 50, 10**6])
def test_frames_are_answered_in_order_however_they_arrive(served: Served, piece_bytes: int) -> None:
    served.broker.create_topic("a")
    requests = [
        frame(METADATA, 9, MetadataRequest(topics=None), correlation_id=n) for n in range(9)
    ]
    sent = b"".join(requests)
    with connected(served) as sock:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for start in range(0, len(sent), piece_bytes):
            sock.sendall(sent[start : start + piece_bytes])
        for number in range(9):
            answer = received(sock)
            assert answer[:4] == struct.pack(">i", number)
            found = codec.decode(MetadataResponse, 9, answer, position=5)
            assert [one.name for one in found.topics] == ["a"]


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(struct.pack(">i", 2**31 - 1), id="two gigabytes"),
        pytest.param(struct.pack(">i", -5), id="a negative size"),
        pytest.param(struct.pack(">i", 0), id="nothing"),
        pytest.param(struct.pack(">ihhih", 10, 999, 0, 1, -1), id="an API that nobody knows"),
        pytest.param(struct.pack(">ihhih", 10, METADATA, 99, 1, -1), id="an unknown version"),
        pytest.param(struct.pack(">ihhihi", 14, METADATA, 1, 1, -1, 2**31 - 1), id="a huge count"),
        pytest.param(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n", id="HTTP"),
    ],
)
def test_what_is_no_request_ends_its_connection_and_no_other(served: Served, sent: bytes) -> None:
    with connected(served) as sock, connected(served) as other:
        sock.sendall(sent)
        assert sock.recv(100) == b"" or pytest.fail("it was answered")
        other.sendall(frame(METADATA, 9, MetadataRequest(topics=None)))
        assert received(other)
