"""Claim: a record on three brokers costs a producer milliseconds, and no more CPU than Kafka's.

* Measured: the same Kafka frames to both, `acks=all`, one partition of three replicas,
  `min.insync.replicas` 2, three brokers on loopback, on one connection to the leader: the latency
  of a batch of one record of 1 KiB, one at a time; the throughput of batches of 1 MiB, four in
  flight, and the CPU of all three brokers for it.
* Every replica of ours in sync has flushed before the answer; Kafka's answer from the page cache.
* Peer: three brokers of Apache Kafka 4.3.1, with the JVM's defaults and 1 GiB of heap each.

`python -m bench cluster_replicas`; takes about four minutes, and the Kafka of the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from bench import children
from bench.children import free_port
from bench.kafka import kafka_cluster
from bench.kafka_frames import MIB, Connection, check_produced, create_topics, produce_frame
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, interleave
from tierlog.record_format.kafka_messages.messages import MetadataRequest

ROUNDS: Final = 5
BROKERS: Final = 3
KIB: Final = 1 << 10
TOTAL_BYTES: Final = 128 * MIB  # of a run; each of the brokers writes as much
IN_FLIGHT: Final = 4
SMALL_PRODUCES: Final = 500
TOPICS: Final = ("large", "one")
CONFIG: Final = {"min.insync.replicas": 2}
READY_S: Final = 60


class Brokers(NamedTuple):
    pids: Sequence[int]
    ports: Sequence[int]


class Spent(NamedTuple):
    mb_per_s: float
    cpu_s_per_gb: float


def measure(folder: Path, *, rounds: int) -> Report:
    title = "Three replicas: produces with acks=all, one partition, one connection"
    report = Report(name="cluster_replicas", title=title, peer="Kafka")
    with _theirs(folder) as theirs, _ours(folder) as ours:
        for each in (ours, theirs):
            create_topics(
                each.ports[0],
                dict.fromkeys(TOPICS, 1),
                dict.fromkeys(TOPICS, CONFIG),
                factor=BROKERS,
            )
        small = interleave({"ours": _times(ours), "kafka": _times(theirs)}, rounds=rounds)
        large = interleave({"ours": _large(ours), "kafka": _large(theirs)}, rounds=rounds)
    soon = Target(value=3, at_most=True, of_ratio=False)
    report.add_latency("a record of 1 KiB", small["ours"], small["kafka"], targets={0.5: soon})
    speeds = ([one.mb_per_s for one in large[who]] for who in ("ours", "kafka"))
    report.add("1 MiB batches", "MB/s", *speeds)
    spent = ([one.cpu_s_per_gb for one in large[who]] for who in ("ours", "kafka"))
    no_more = Target(value=1.0, at_most=True)
    report.add("1 MiB batches, CPU of all brokers", "CPU s/GB", *spent, target=no_more)
    report.notes.append("ours is flushed by each replica before an answer, Kafka's is not")
    return report


@contextmanager
def _theirs(folder: Path) -> Iterator[Brokers]:
    with kafka_cluster(folder, brokers=BROKERS) as started:
        ports = [int(one.server.rpartition(":")[2]) for one in started]
        yield Brokers([one.pid for one in started], ports)


@contextmanager
def _ours(folder: Path) -> Iterator[Brokers]:
    store, pids, ports = (folder / "bucket").as_uri(), list[int](), list[int]()
    with ExitStack() as stack:
        for name in "abc"[:BROKERS]:
            (folder / name).mkdir()
            ports.append(free_port())
            flags = ["--join", "--store", store, "--listen", f"127.0.0.1:{free_port()}"]
            flags += ["--kafka-listen", f"127.0.0.1:{ports[-1]}"]
            pids.append(stack.enter_context(children.broker(folder / name, *flags)).pid)
        yield Brokers(pids, ports)


def _leader_of(brokers: Brokers, topic: str) -> int:
    """Its port, once all replicas are in sync."""
    request = MetadataRequest([MetadataRequest.MetadataRequestTopic(name=topic)])
    deadline = time.monotonic() + READY_S
    with Connection(brokers.ports[0]) as client:
        while time.monotonic() < deadline:
            answer = client.ask(request, 9)
            ports = {one.node_id: one.port for one in answer.brokers}
            for partition in answer.topics[0].partitions:
                if len(partition.isr_nodes) == BROKERS and partition.leader_id in ports:
                    return int(ports[partition.leader_id])
            time.sleep(0.05)
    raise RuntimeError(f"{topic} has not {BROKERS} replicas in sync")


def _times(brokers: Brokers) -> Callable[[], list[float]]:
    """In ms, of one produce after another."""
    frame = produce_frame("one", batch_of_size(KIB))

    def run() -> list[float]:
        taken = []
        with Connection(_leader_of(brokers, "one")) as client:
            for _ in range(SMALL_PRODUCES):
                began = time.perf_counter()
                answer = client.exchange(frame)
                taken.append((time.perf_counter() - began) * 1000)
            check_produced(answer)
        return taken

    return run


def _large(brokers: Brokers) -> Callable[[], Spent]:
    frame, count = produce_frame("large", batch_of_size(MIB)), TOTAL_BYTES // MIB

    def run() -> Spent:
        with Connection(_leader_of(brokers, "large")) as client:
            began, before = time.perf_counter(), _cpu_seconds(brokers)
            for number in range(count + IN_FLIGHT):
                if number >= IN_FLIGHT:
                    answer = client.receive()
                if number < count:
                    client.socket.sendall(frame)
            took_s = time.perf_counter() - began
            check_produced(answer)
        spent_s = _cpu_seconds(brokers) - before
        return Spent(TOTAL_BYTES / 1e6 / took_s, spent_s / (TOTAL_BYTES / 1e9))

    return run


def _cpu_seconds(brokers: Brokers) -> float:
    return sum(map(cpu_seconds_of, brokers.pids))
