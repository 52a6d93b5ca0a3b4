"""Claim: what Kafka's clients ask of a broker in Python costs little more, or less, than of Kafka.

* Measured: the same frames to both, from one bare client on one connection. CPU of the broker's
  process per GB, one partition, batches of 1 MiB and of 16 KiB, uncompressed: produced with
  `acks=all`, one in flight, then fetched hot; the latency of one durable produce of 1 KiB; the CPU
  of a fetch in a session of 101 partitions, of which one has a new record.
* Ours flushes before each answer; Kafka answers from its page cache, with one replica.
* Peer: Apache Kafka 4.3.1, with the JVM's defaults and 1 GiB of heap.

`python -m bench kafka_wire`; takes about three minutes, and the Kafka of the tests.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

import msgspec

from bench import children
from bench.children import free_port
from bench.kafka import kafka
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, interleave
from tierlog.client.client import Client
from tierlog.record_format.batch import parse_header
from tierlog.record_format.kafka_messages import codec, messages
from tierlog.record_format.kafka_messages.apis import APIS
from tierlog.record_format.kafka_messages.messages import (
    CreateTopicsRequest,
    FetchRequest,
    ListOffsetsRequest,
    MetadataRequest,
    ProduceRequest,
)

ROUNDS: Final = 5
KIB: Final = 1 << 10
MIB: Final = 1 << 20
TOTAL_BYTES: Final = 256 * MIB  # of a run: CPU is counted in ticks
SMALL_PRODUCES: Final = 1500
IDLE: Final = 100
IDLE_FETCHES: Final = 1000
TOPICS: Final = {"large": 1, "small": 1, "one": 1, "idle": IDLE + 1}
PRODUCE_VERSION: Final = 9
FETCH_VERSION: Final = 12
_APIS: Final = {api.name: api for api in APIS.values()}


class Peer(NamedTuple):
    pid: int
    port: int


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
        api = _api_of(request)
        answer = self.exchange(frame_of(request, version))
        start = 4 + api.response_header_version(version)
        return codec.decode(
            getattr(messages, f"{api.name}Response"), version, answer, position=start
        )

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


def produce_frame(topic: str, batch: bytes, *, partition: int = 0) -> bytes:
    data = [ProduceRequest.PartitionProduceData(partition, batch)]
    named = ProduceRequest.TopicProduceData(name=topic, partition_data=data)
    return frame_of(ProduceRequest(None, -1, 30_000, [named]), PRODUCE_VERSION)


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


def create_topics(port: int, partitions: dict[str, int]) -> None:
    creatable = CreateTopicsRequest.CreatableTopic
    request = CreateTopicsRequest([creatable(*one, 1) for one in partitions.items()], 30_000)
    with Connection(port) as client:
        client.ask(request, 5)
        deadline = time.monotonic() + 30
        for name in partitions:
            wanted = [MetadataRequest.MetadataRequestTopic(name=name)]
            while client.ask(MetadataRequest(wanted), 9).topics[0].error_code:
                assert time.monotonic() < deadline, f"{name} is not there"
                time.sleep(0.05)


# --- CPU per GB -----------------------------------------------------------------------------------


def _spent(pid: int, run: Callable[[], int]) -> float:
    """CPU seconds per GB, of the process while `run` moves as many bytes as it returns."""
    before = cpu_seconds_of(pid)
    moved = run()
    return (cpu_seconds_of(pid) - before) / (moved / 1e9)


def produce_cpu(peer: Peer, topic: str, size: int) -> Callable[[], float]:
    frame = produce_frame(topic, batch_of_size(size))

    def run() -> int:
        with Connection(peer.port) as client:
            for _ in range(TOTAL_BYTES // size):
                client.exchange(frame)
        return TOTAL_BYTES

    return lambda: _spent(peer.pid, run)


def fetch_cpu(peer: Peer, topic: str, size: int) -> Callable[[], float]:
    """Of batches of this size, one a fetch, from the end that was just produced backwards."""
    records = parse_header(batch_of_size(size)).record_count

    def run() -> int:
        with Connection(peer.port) as client:
            count = TOTAL_BYTES // size
            first = max(0, _end_of(client, topic) - count * records)
            moved = 0
            for number in range(count):
                request = fetch_request(topic, {0: first + number * records}, max_bytes=size)
                moved += len(client.exchange(frame_of(request, FETCH_VERSION)))
        assert moved >= TOTAL_BYTES
        return moved

    return lambda: _spent(peer.pid, run)


def _end_of(client: Connection, topic: str) -> int:
    latest = [ListOffsetsRequest.ListOffsetsPartition(0, -1, -1)]
    request = ListOffsetsRequest(-1, topics=[ListOffsetsRequest.ListOffsetsTopic(topic, latest)])
    found: int = client.ask(request, 5).topics[0].partitions[0].offset
    return found


# --- latency, and many idle partitions ------------------------------------------------------------


def produce_ms(peer: Peer, topic: str) -> Callable[[], list[float]]:
    frame = produce_frame(topic, batch_of_size(KIB))

    def run() -> list[float]:
        taken = []
        with Connection(peer.port) as client:
            for _ in range(SMALL_PRODUCES):
                began = time.perf_counter()
                client.exchange(frame)
                taken.append((time.perf_counter() - began) * 1000)
        return taken

    return run


def idle_cpu_us(peer: Peer, topic: str) -> Callable[[], float]:
    """CPU of one record of 1 KiB, produced to one of the partitions, and of the fetch of it by a
    session of all.
    """
    frame = produce_frame(topic, batch_of_size(KIB))

    def run() -> float:
        with Connection(peer.port) as producer, Connection(peer.port) as consumer:
            offsets = dict.fromkeys(range(IDLE + 1), 0)
            offsets[0] = _end_of(consumer, topic)
            full = fetch_request(topic, offsets, max_bytes=MIB, max_wait_ms=0, session_epoch=0)
            session = consumer.ask(full, FETCH_VERSION).session_id
            before = cpu_seconds_of(peer.pid)
            for epoch in range(1, IDLE_FETCHES + 1):
                fields = {"session_id": session, "session_epoch": epoch}
                news = {0: offsets[0] + epoch - 1}
                request = fetch_request(topic, news, max_bytes=MIB, **fields)
                consumer.socket.sendall(frame_of(request, FETCH_VERSION))
                producer.exchange(frame)
                assert len(consumer.receive()) > KIB
        return (cpu_seconds_of(peer.pid) - before) / IDLE_FETCHES * 1e6

    return run


# --- the report -----------------------------------------------------------------------------------


@contextmanager
def both(folder: Path) -> Iterator[tuple[Peer, Peer]]:
    port = free_port()
    listen = ("--kafka-listen", f"127.0.0.1:{port}")
    with kafka(folder) as theirs, children.broker(folder, *listen) as ours:
        peers = Peer(ours.pid, port), Peer(theirs.pid, int(theirs.server.rpartition(":")[2]))
        create_topics(peers[1].port, TOPICS)
        with Client(ours.url) as client:
            for topic, partitions in TOPICS.items():
                client.create_topic(topic, partitions=partitions, config={"retention.ms": -1})
        yield peers


def measure(folder: Path, *, rounds: int) -> Report:
    title = "Kafka's wire protocol: the same frames, one connection"
    report = Report(name="kafka_wire", title=title, peer="Kafka")
    with both(folder) as (ours, theirs):
        runs: dict[str, Callable[[], Any]] = {}
        for name, peer in ("ours", ours), ("kafka", theirs):
            for topic, size in ("large", MIB), ("small", 16 * KIB):
                runs[f"{name} produce {topic}"] = produce_cpu(peer, topic, size)
                runs[f"{name} fetch {topic}"] = fetch_cpu(peer, topic, size)
            runs[f"{name} ms"] = produce_ms(peer, "one")
            runs[f"{name} idle"] = idle_cpu_us(peer, "idle")
        seen = interleave(runs, rounds=rounds)
    # The targets are Kafka's MB per CPU second, of which ours should reach as many times.
    for what, times in {
        "fetch large": 1.3,
        "produce large": 1.2,
        "produce small": 0.6,
        "fetch small": None,
    }.items():
        target = None if times is None else Target(value=round(1 / times, 2), at_most=True)
        in_words = what.replace("large", "1 MiB").replace("small", "16 KiB")
        report.add(in_words, "CPU s/GB", seen[f"ours {what}"], seen[f"kafka {what}"], target=target)
    for name, pick in ("p50", median), ("p99", _p99):
        target = Target(value=1.5, at_most=True) if name == "p50" else None
        taken = ([pick(one) for one in seen[f"{whose} ms"]] for whose in ("ours", "kafka"))
        report.add(f"produce 1 KiB, {name}", "ms", *taken, target=target)
    report.add(
        f"a record among {IDLE} idle partitions", "CPU us", seen["ours idle"], seen["kafka idle"]
    )
    report.notes.append("ours is flushed before each answer, Kafka's is not")
    return report


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]
