"""Claim: a first read of the cold tier costs no more CPU than Kafka's read of its remote tier.

* Measured: CPU of the broker process per GB, one partition, records of 1 KiB in batches of 16 KiB,
  one reader, nothing of the topic cached, fetches of 1 and of 8 MiB; from an S3 server, the usual
  case, and from a local folder, like Kafka's.
* Peer: Apache Kafka 4.3.1 under its own ConsumerPerformance, with its own LocalTieredStorage: a
  local folder without an S3 client, hence about the least that its remote tier can cost. It checks
  nothing that it reads; we check a CRC-32C of every chunk, and write it to the cache on disk. Its
  JVM has read the topic a few times before it is measured: the first reads cost five times as much,
  until the JVM has compiled their code.

`python -m bench kafka_tiered`; takes about three minutes, and the Kafka of the tests.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Final

from bench import cold_topic, s3
from bench.cold_topic import COLD_BYTES, MIB, SEGMENT_BYTES, TOPIC_BYTES, Pass
from bench.kafka import Kafka, tiered_kafka
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, interleave

ROUNDS: Final = 5
RECORDS: Final = TOPIC_BYTES // 1024
COLD_RECORDS: Final = COLD_BYTES // 1100  # of 1 KiB plus the overhead of record and batch
FETCHES_BYTES: Final = (MIB, 8 * MIB)
WARM_UP_READS: Final = 4
OFFLOAD_TIMEOUT_S: Final = 120


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(
        name="kafka_tiered", title="First read of the cold tier, one partition", peer="Kafka"
    )
    from_folder, from_s3 = folder / "folder", folder / "s3"
    from_folder.mkdir()
    from_s3.mkdir()
    with s3.versitygw(from_s3) as bucket, tiered_kafka(folder) as peer:
        _fill(peer, folder / "kafka")
        cold_topic.fill(from_s3, *bucket.flags)
        cold_topic.fill(from_folder)
        runs: dict[str, Callable[[], Pass]] = {}
        for size in FETCHES_BYTES:
            first_read = partial(cold_topic.first_read, fetch_bytes=size)
            runs[f"s3 {size}"] = partial(first_read, from_s3, *bucket.flags)
            runs[f"folder {size}"] = partial(first_read, from_folder)
            runs[f"kafka {size}"] = partial(_read, peer, size)
        seen = interleave(runs, rounds=rounds)
    spent = {name: [one.cpu_s_per_gb for one in passes] for name, passes in seen.items()}
    for size in FETCHES_BYTES:
        for ours, where in ("s3", "S3"), ("folder", "a folder"):
            report.add(
                f"from {where}, fetches of {size // MIB} MiB",
                "CPU s/GB",
                spent[f"{ours} {size}"],
                spent[f"kafka {size}"],
                target=Target(value=1.0, at_most=True),
            )
    return report


def _fill(peer: Kafka, data: Path) -> None:
    """A topic like ours: rolled segments are only in the remote tier."""
    config = {"remote.storage.enable": "true", "local.retention.bytes": 1, "retention.ms": -1}
    config["segment.bytes"] = SEGMENT_BYTES
    flags = [word for name, value in config.items() for word in ("--config", f"{name}={value}")]
    peer.tool("TopicCommand", "--create", "--topic", "t", "--partitions", "1", *flags)
    count = ("--num-records", str(RECORDS), "--record-size", "1024", "--throughput", "-1")
    peer.tool("ProducerPerformance", "--topic", "t", *count, "--command-property", "acks=1")
    deadline = time.monotonic() + OFFLOAD_TIMEOUT_S
    while len(list((data / "t-0").glob("*.log*"))) > 1:
        if time.monotonic() > deadline:
            raise RuntimeError("Kafka's segments did not move to its remote tier")
        time.sleep(0.5)
    for _ in range(WARM_UP_READS):
        _read(peer, MIB)


def _read(peer: Kafka, fetch_bytes: int) -> Pass:
    count = ("--num-records", str(COLD_RECORDS), "--fetch-size", str(fetch_bytes))
    cpu_before, began = cpu_seconds_of(peer.pid), time.perf_counter()
    peer.tool("ConsumerPerformance", "--topic", "t", "--hide-header", *count)
    seconds = time.perf_counter() - began
    return Pass(COLD_RECORDS * 1024, seconds, cpu_seconds_of(peer.pid) - cpu_before)
