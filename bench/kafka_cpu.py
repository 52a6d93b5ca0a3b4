"""Claim: a broker in Python spends no more CPU on a gigabyte than Kafka's does.

* Measured: CPU of the broker process per GB, one partition, records of 1 KiB: produced in batches
  of 1 MiB (ours flushed before each response, one in flight; Kafka's `acks=1`, not flushed), then
  consumed hot in fetches of 1 MiB.
* Peer: Apache Kafka 4.3.1 under its own ProducerPerformance and ConsumerPerformance. Its figure
  includes its clients' other requests: metadata, a group, its offsets.

`python -m bench kafka_cpu`; takes about two minutes, and the Kafka of the tests.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

from bench import children
from bench.children import Server
from bench.kafka import Kafka, kafka
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, interleave
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES

ROUNDS: Final = 5
MIB: Final = 1 << 20
RECORDS: Final = 512 * 1024  # of 1 KiB: CPU is counted in ticks, so the run is half a GB
TOTAL_BYTES: Final = RECORDS * 1024
RECORDS_OF_TOPIC: Final = "/v1/topics/t/partitions/0/records"


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(
        name="kafka_cpu", title="CPU of the broker, 1 MiB batches, one partition", peer="Kafka"
    )
    with kafka(folder) as peer, children.broker(folder) as ours:
        with Client(ours.url) as client:
            client.create_topic("t", config={"retention.ms": -1})
        runs = {
            "produce": _spent(ours.pid, lambda: _produce(ours)),
            "kafka produce": _spent(peer.pid, lambda: _kafka_produce(peer)),
            "consume": _spent(ours.pid, lambda: _consume(ours)),
            "kafka consume": _spent(peer.pid, lambda: _kafka_consume(peer)),
        }
        seen = interleave(runs, rounds=rounds)
    at_most = Target(value=1.0, at_most=True)
    for what, name in ("produce", "produce, ours flushed"), ("consume", "consume hot"):
        report.add(name, "CPU s/GB", seen[what], seen[f"kafka {what}"], target=at_most)
    return report


def _spent(pid: int, run: Callable[[], None]) -> Callable[[], float]:
    """CPU seconds per GB of the process while `run` moves TOTAL_BYTES."""

    def measured() -> float:
        before = cpu_seconds_of(pid)
        run()
        return (cpu_seconds_of(pid) - before) / (TOTAL_BYTES / 1e9)

    return measured


def _produce(broker: Server) -> None:
    with Wire(broker) as wire:
        line = f"POST {RECORDS_OF_TOPIC}?acks=all"
        request = wire.request(line, batch_of_size(MIB), Content_Type=RECORD_BATCHES)
        for _ in range(TOTAL_BYTES // MIB):
            wire.timed(request)


def _consume(broker: Server) -> None:
    buffer, offset, left = memoryview(bytearray(MIB)), 0, TOTAL_BYTES
    with Wire(broker) as wire:
        while left > 0:
            line = f"GET {RECORDS_OF_TOPIC}?offset={offset}&max_bytes={MIB}"
            offset, size = wire.fetch(line, buffer, Accept=RECORD_BATCHES)
            left -= size


def _kafka_produce(peer: Kafka) -> None:
    settings = ("acks=1", f"batch.size={MIB}", "linger.ms=50", f"max.request.size={2 * MIB}")
    count = ("--num-records", str(RECORDS), "--record-size", "1024", "--throughput", "-1")
    peer.tool("ProducerPerformance", "--topic", "t", *count, "--command-property", *settings)


def _kafka_consume(peer: Kafka) -> None:
    count = ("--num-records", str(RECORDS), "--fetch-size", str(MIB), "--hide-header")
    peer.tool("ConsumerPerformance", "--topic", "t", *count)
