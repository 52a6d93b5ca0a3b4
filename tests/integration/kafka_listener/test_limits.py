"""What a client may not do to others: hostile frames, half ones, many, large, too often; and that
everything it took is given back on every path.
"""

import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes.kafka_caller import KafkaCaller, request_frame
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.http.settings import HttpSettings
from tierlog.api.kafka.calls import Row
from tierlog.api.kafka.handlers import all_calls
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.kafka_messages.messages import (
    ApiVersionsRequest,
    DescribeClusterRequest,
    FetchRequest,
    ListOffsetsRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)

ALL = MetadataRequest(topics=None)
NAMED = ApiVersionsRequest(client_software_name="t", client_software_version="1")
VALID = [
    request_frame(ALL, 12),
    request_frame(NAMED, 4),
    request_frame(FetchRequest(max_bytes=1, session_epoch=-1), 12),
    request_frame(ListOffsetsRequest(), 7),
    request_frame(DescribeClusterRequest(), 1),
    request_frame(ProduceRequest(acks=1, timeout_ms=1), 9),
]


@contextmanager
def broker(folder: Path, **kafka: int) -> Iterator[Served]:
    with served_broker(folder / "data", kafka=KafkaSettings(**kafka)) as served:  # type: ignore[arg-type]
        yield served


def is_at_rest(served: Served) -> bool:
    counts = served.app.context.kafka_counts
    return counts.request_memory_bytes() == 0


# --- hostile frames -------------------------------------------------------------------------------


@st.composite
def hostile(draw: st.DrawFn) -> bytes:
    """A valid frame that is cut, or changed somewhere, or given another size; or anything."""
    sent = bytearray(draw(st.sampled_from(VALID)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(sent) - 1))
        sent[at] = draw(st.integers(0, 255))
    if draw(st.booleans()):
        sent[:4] = struct.pack(">i", len(sent) - 4)  # so that what was changed is read
    if draw(st.booleans()):
        del sent[draw(st.integers(1, len(sent))) :]
    return bytes(sent) if draw(st.integers(0, 9)) else draw(st.binary(max_size=300))


def test_whatever_is_sent_others_are_served_and_nothing_is_kept(tmp_path: Path) -> None:
    with broker(tmp_path) as served, KafkaCaller(served.kafka_port) as other:

        @settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
        @given(st.lists(hostile(), min_size=1, max_size=4))
        def send(frames: list[bytes]) -> None:
            with socket.create_connection(("127.0.0.1", served.kafka_port), timeout=20) as sock:
                sock.sendall(b"".join(frames))
                sock.shutdown(socket.SHUT_WR)
                try:
                    while sock.recv(1 << 16):
                        pass
                except ConnectionResetError:
                    pass
            assert len(other.ask(DescribeClusterRequest(), 1).brokers) == 1

        with structlog.testing.capture_logs() as logs:
            send()
        assert not [one for one in logs if one["log_level"] == "error"]
        until(lambda: is_at_rest(served))
        until(lambda: served.app.context.kafka_counts.connections == 1)


def test_what_is_no_request_is_one_line_in_the_log(tmp_path: Path) -> None:
    with broker(tmp_path) as served, structlog.testing.capture_logs() as logs:
        with KafkaCaller(served.kafka_port) as caller:
            caller.sock.sendall(b"GET / HTTP/1.1\r\n\r\n" * 100)
            assert caller.is_closed()
        assert [one["event"] for one in logs] == ["not a Kafka request"]


def test_half_a_frame_is_given_up_after_a_time(tmp_path: Path) -> None:
    with broker(tmp_path, request_idle_timeout_ms=50) as served:
        for part in (b"\0\0", struct.pack(">i", 1000), request_frame(ALL, 9)[:-1]):
            with KafkaCaller(served.kafka_port) as caller:
                caller.sock.sendall(part)
                assert caller.is_closed()
        assert is_at_rest(served)


def test_frames_that_are_sent_ahead_are_all_answered_in_order(tmp_path: Path) -> None:
    """However many: they wait as they came, and only a few of them as frames."""
    with broker(tmp_path) as served, KafkaCaller(served.kafka_port) as caller:
        frames = [request_frame(NAMED, 4, correlation_id=number) for number in range(5000)]
        caller.sock.sendall(b"".join(frames))
        for number in range(5000):
            assert caller.frame()[:4] == struct.pack(">i", number)


def test_beyond_the_limit_of_connections_new_ones_are_closed(tmp_path: Path) -> None:
    with broker(tmp_path, connections_max=2) as served:
        with KafkaCaller(served.kafka_port) as first, KafkaCaller(served.kafka_port) as second:
            assert first.ask(ALL, 9).error_code == second.ask(ALL, 9).error_code == 0
            with KafkaCaller(served.kafka_port) as third:
                assert third.is_closed()
            assert first.ask(ALL, 9).error_code == 0
        until(lambda: served.app.context.kafka_counts.connections == 0)
        with KafkaCaller(served.kafka_port) as later:
            assert later.ask(ALL, 9).error_code == 0


# --- memory ---------------------------------------------------------------------------------------


def padded(size: int) -> bytes:
    """A request of so many bytes, most of which are no part of it: they are ignored."""
    frame = request_frame(ALL, 9) + bytes(size)
    return struct.pack(">i", len(frame) - 4) + frame[4:]


def test_large_frames_take_turns_within_the_limit(tmp_path: Path) -> None:
    size, limit = 1 << 20, 3 << 20
    with broker(tmp_path, queued_max_bytes=limit) as served:
        callers = [KafkaCaller(served.kafka_port) for _ in range(20)]
        frame = padded(size)
        for caller in callers:
            caller.sock.sendall(frame[:100_000])  # all have begun, and three are read
        counts = served.app.context.kafka_counts
        until(lambda: counts.request_memory_bytes() > limit - size - 1000)
        callers[-1].close()  # one that waits, and one that was admitted, go away
        callers[0].close()
        for caller in callers[1:-1]:
            assert counts.request_memory_bytes() <= limit
            caller.sock.sendall(frame[100_000:])
            caller.frame()
        until(lambda: is_at_rest(served))
        for caller in callers:
            caller.close()


def fails(_call: object, _request: object) -> object:
    raise RuntimeError("planted")


async def fails_later(_call: object, _request: object) -> object:
    raise RuntimeError("planted")


def cannot_be_written(_call: object, _request: object) -> object:
    return MetadataResponse(controller_id=1 << 40)


async def cannot_be_written_later(_call: object, _request: object) -> object:
    return MetadataResponse(controller_id=1 << 40)


@pytest.mark.parametrize("handle", [fails, fails_later, cannot_be_written, cannot_be_written_later])
def test_what_a_handler_raises_ends_the_connection_and_frees_its_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, handle: Callable[..., object]
) -> None:
    def planted() -> dict[str, Row]:
        calls = dict(all_calls())
        calls["Metadata"] = calls["Metadata"]._replace(handle=handle)  # type: ignore[arg-type]
        return calls

    monkeypatch.setattr("tierlog.api.kafka.handlers.all_calls", planted)
    with broker(tmp_path) as served, structlog.testing.capture_logs() as logs:
        with KafkaCaller(served.kafka_port) as caller:
            caller.sock.sendall(padded(200_000))
            assert caller.is_closed()
        until(lambda: is_at_rest(served))
        assert [one["event"] for one in logs] == ["exception in a Kafka request"]


def test_a_client_that_leaves_while_it_is_answered_gives_back_its_memory(tmp_path: Path) -> None:
    with broker(tmp_path) as served:
        served.broker.create_topic("a")
        part = FetchRequest.FetchPartition(partition=0, fetch_offset=0, partition_max_bytes=1)
        topic = FetchRequest.FetchTopic(topic="a", partitions=[part])
        waits = FetchRequest(
            max_wait_ms=60_000, min_bytes=1, max_bytes=1, session_epoch=-1, topics=[topic]
        )
        for behind in (b"", request_frame(ALL, 9)[:-3], padded(10**6)[:500]):
            with KafkaCaller(served.kafka_port) as caller:
                caller.sock.sendall(request_frame(waits, 11) + behind)
                until(lambda: not is_at_rest(served))
            until(lambda: is_at_rest(served))


# --- rates ----------------------------------------------------------------------------------------


def test_a_client_above_its_rate_is_told_and_not_read_for_a_while(tmp_path: Path) -> None:
    http = HttpSettings(client_requests_max=20)
    with (
        served_broker(tmp_path / "data", http=http, kafka=KafkaSettings()) as served,
        KafkaCaller(served.kafka_port) as caller,
        KafkaCaller(served.kafka_port) as other,
    ):
        told = [caller.ask(ALL, 9).throttle_time_ms for _ in range(45)]
        assert told[:40] == [0] * 40  # the burst
        assert 0 < told[-1] <= 60_000
        assert other.ask(ALL, 9).throttle_time_ms > 0  # it is the client that has a rate
        assert served.app.context.kafka_counts.throttled_requests >= 2
