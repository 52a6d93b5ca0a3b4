"""Claim: what Kafka's clients ask of a broker in Python costs little more, or less, than of Kafka.

* Measured: the same frames to both, from one bare client on one connection. CPU of the broker's
  process per GB, one partition, batches of 1 MiB and of 16 KiB, uncompressed: produced with
  `acks=all`, one in flight, then fetched hot; fetched cold, from a local folder, where each read is
  the first; the latency of one durable produce of 1 KiB; the CPU of a fetch in a session of 101
  partitions, of which one has a new record.
* Records per second of Kafka's own performance tools, against both; CPU and memory of a broker
  whose groups have nothing to read (`resting_groups`).
* Ours flushes before each answer; Kafka answers from its page cache, with one replica.
* Peer: Apache Kafka 4.3.1, with the JVM's defaults and 1 GiB of heap, and its LocalTieredStorage.

`python -m bench kafka_wire`; takes about six minutes, and the Kafka of the tests.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles
from typing import Any, Final, NamedTuple

from bench import children
from bench.children import free_port
from bench.kafka import Kafka, tiered_kafka
from bench.kafka_frames import (
    FETCH_VERSION,
    MIB,
    Connection,
    create_topics,
    fetch_request,
    frame_of,
    produce_frame,
)
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.resting_groups import GROUPS, MEMBERS, TOPIC, resting
from bench.rounds import cpu_seconds_of, interleave, resident_mib_of
from tierlog.record_format.batch import parse_header
from tierlog.record_format.kafka_messages.messages import ListOffsetsRequest

ROUNDS: Final = 5
KIB: Final = 1 << 10
TOTAL_BYTES: Final = 256 * MIB  # of a run: CPU is counted in ticks
SMALL_PRODUCES: Final = 1500
IDLE: Final = 100
IDLE_FETCHES: Final = 1000
PERF_RECORDS: Final = 200_000  # of 1 KiB
REST_S: Final = 5
COLD_SEGMENT_BYTES: Final = 32 * MIB
CACHE_BYTES: Final = 64 * MIB  # less than is read, so that each read of it all is the first
OFFLOAD_TIMEOUT_S: Final = 60
JOIN_MS: Final = "3000"  # so that the members of a group join at once
TOPICS: Final = {
    "large": 1,
    "small": 1,
    "one": 1,
    "idle": IDLE + 1,
    "cold": 1,
    "perf": 1,
    TOPIC: MEMBERS,
}
COLD: Final = {
    "segment.bytes": COLD_SEGMENT_BYTES,
    "local.retention.bytes": 1,
    "remote.storage.enable": "true",
}


class Peer(NamedTuple):
    pid: int
    port: int


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


def fetch_cpu(peer: Peer, topic: str, size: int, *, behind_bytes: int = 0) -> Callable[[], float]:
    """Of the last batches of this size, one a fetch; of those that are so far behind the end."""
    records = parse_header(batch_of_size(size)).record_count

    def run() -> int:
        with Connection(peer.port) as client:
            count = TOTAL_BYTES // size
            behind = count + behind_bytes // size
            first = max(0, _end_of(client, topic) - behind * records)
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


# --- the cold tier --------------------------------------------------------------------------------


def fill_cold(peer: Peer, data: Path) -> None:
    """TOTAL_BYTES that are not in the data folder any more, and the segment that is active."""
    frame = produce_frame("cold", batch_of_size(MIB))
    with Connection(peer.port) as client:
        for _ in range((TOTAL_BYTES + COLD_SEGMENT_BYTES) // MIB):
            client.exchange(frame)
    deadline = time.monotonic() + OFFLOAD_TIMEOUT_S
    while len(list((data / "cold-0").glob("*.log"))) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError(f"the segments stay in {data}")
        time.sleep(0.2)


# --- Kafka's own performance tools ----------------------------------------------------------------


def perf_produce(peer: Peer) -> Callable[[], float]:
    """Records per second, by Kafka's producer with its defaults: acks=all, idempotent."""
    words = ("--record-size", str(KIB), "--throughput", "-1", "--command-property", "acks=all")

    def run() -> float:
        text = _tool(peer, "ProducerPerformance", "--num-records", str(PERF_RECORDS), *words)
        return float(re.findall(r"([\d.]+) records/sec", text)[-1])

    return run


def perf_consume(peer: Peer) -> Callable[[], float]:
    """Records per second from the topic's start, by Kafka's consumer, without the wait to join."""

    def run() -> float:
        words = ("--num-records", str(PERF_RECORDS), "--hide-header")
        return float(_tool(peer, "ConsumerPerformance", *words).split(",")[-1])

    return run


def _tool(peer: Peer, name: str, *words: str) -> str:
    return Kafka(peer.pid, f"127.0.0.1:{peer.port}").tool(name, "--topic", "perf", *words)


# --- groups at rest -------------------------------------------------------------------------------


def rest(folder: Path, report: Report, *, rounds: int) -> None:
    """Of brokers that have done nothing else: both rest at the same time."""
    with (
        both(folder) as peers,
        resting(peers[0].port, log=folder / "ours.resting.log"),
        resting(peers[1].port, log=folder / "kafka.resting.log"),
    ):
        runs = {str(peer.pid): _spent_at_rest(peer.pid) for peer in peers}
        cpu = interleave(runs, rounds=rounds).values()
        memory = [[resident_mib_of(peer.pid)] * rounds for peer in peers]
    what = f"{GROUPS * MEMBERS} consumers in {GROUPS} groups at rest"
    report.add(what, "CPU ms/s", *cpu)
    report.add(what, "resident MiB", *memory)


def _spent_at_rest(pid: int) -> Callable[[], float]:
    def run() -> float:
        before = cpu_seconds_of(pid)
        time.sleep(REST_S)
        return (cpu_seconds_of(pid) - before) / REST_S * 1000

    return run


# --- the report -----------------------------------------------------------------------------------


@contextmanager
def both(folder: Path) -> Iterator[tuple[Peer, Peer]]:
    folder.mkdir(exist_ok=True)
    port = free_port()
    flags = ["--kafka-listen", f"127.0.0.1:{port}", "--cache-bytes", str(CACHE_BYTES)]
    flags += ["--retention-check-interval", "1", "--group-initial-rebalance-delay-ms", JOIN_MS]
    settings = {"group.initial.rebalance.delay.ms": JOIN_MS}
    with tiered_kafka(folder, settings) as theirs, children.broker(folder, *flags) as ours:
        peers = Peer(ours.pid, port), Peer(theirs.pid, int(theirs.server.rpartition(":")[2]))
        for peer in peers:
            create_topics(peer.port, TOPICS, {"cold": COLD})
        yield peers


def measure(folder: Path, *, rounds: int) -> Report:
    title = "Kafka's wire protocol: the same frames, one connection"
    report = Report(name="kafka_wire", title=title, peer="Kafka")
    with both(folder) as peers:
        runs: dict[str, Callable[[], Any]] = {}
        for name, data, peer in zip(("ours", "kafka"), ("data", "kafka"), peers, strict=True):
            fill_cold(peer, folder / data)
            runs |= {f"{name} {what}": run for what, run in runs_of(peer).items()}
        seen = interleave(runs, rounds=rounds)
    add_rows(report, seen)
    rest(folder / "rest", report, rounds=rounds)
    report.notes.append("ours is flushed before each answer, Kafka's is not")
    return report


def runs_of(peer: Peer) -> dict[str, Callable[[], Any]]:
    return {
        "produce large": produce_cpu(peer, "large", MIB),
        "fetch large": fetch_cpu(peer, "large", MIB),
        "produce small": produce_cpu(peer, "small", 16 * KIB),
        "fetch small": fetch_cpu(peer, "small", 16 * KIB),
        "fetch cold": fetch_cpu(peer, "cold", MIB, behind_bytes=COLD_SEGMENT_BYTES),
        "ms": produce_ms(peer, "one"),
        "idle": idle_cpu_us(peer, "idle"),
        "perf produce": perf_produce(peer),
        "perf consume": perf_consume(peer),
    }


def add_rows(report: Report, seen: dict[str, list[Any]]) -> None:
    # The targets are Kafka's MB per CPU second, of which ours should reach as many times.
    for what, name, times in (
        ("fetch large", "fetch 1 MiB", 1.3),
        ("produce large", "produce 1 MiB", 1.2),
        ("produce small", "produce 16 KiB", 0.6),
        ("fetch small", "fetch 16 KiB", None),
        ("fetch cold", "fetch 1 MiB, cold", None),
    ):
        target = None if times is None else Target(value=round(1 / times, 2), at_most=True)
        report.add(name, "CPU s/GB", seen[f"ours {what}"], seen[f"kafka {what}"], target=target)
    for name, pick in ("p50", median), ("p99", _p99):
        target = Target(value=1.5, at_most=True) if name == "p50" else None
        taken = ([pick(one) for one in seen[f"{whose} ms"]] for whose in ("ours", "kafka"))
        report.add(f"produce 1 KiB, {name}", "ms", *taken, target=target)
    idle = f"a record among {IDLE} idle partitions"
    report.add(idle, "CPU us", seen["ours idle"], seen["kafka idle"])
    for what, name in ("produce", "producer"), ("consume", "consumer"):
        figures = seen[f"ours perf {what}"], seen[f"kafka perf {what}"]
        report.add(f"Kafka's {name}-perf-test, 1 KiB", "records/s", *figures)


def _p99(values: Sequence[float]) -> float:
    return quantiles(values, n=100)[98]
