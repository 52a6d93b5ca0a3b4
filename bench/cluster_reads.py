"""Claim: history is read through any broker of a cluster, and its leader is relieved.

* A topic of one partition, only in the bucket; three readers of raw batches, each of all of it,
  from warm chunk caches. Peer: the same three readers, all at the leader. Both in 8 MiB and in
  64 KiB, where the question to the leader that each read costs is most of the difference.
* All brokers share this machine's cores: the speeds say what the brokers together cost, not what
  three machines would give. What the leader alone spends says how much it is relieved.

`python -m bench cluster_reads`; takes about a minute.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench import children
from bench.children import Server, free_port
from bench.cold_topic import (
    BATCH_BYTES,
    COLD_BYTES,
    FETCH_BYTES,
    LARGE_CACHE_BYTES,
    MIB,
    SEGMENT_BYTES,
    TOPIC_BYTES,
    Reader,
    settle,
)
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, interleave
from tierlog.client.client import Client

ROUNDS: Final = 3
BROKERS: Final = 3
LARGE: Final = f"{FETCH_BYTES // 1024} KiB"
SMALL_BYTES: Final = 64 << 10
SMALL_READ_BYTES: Final = 64 * MIB  # of each reader


class Total(NamedTuple):
    """What all readers read, and what it cost."""

    size_bytes: int
    seconds: float
    cpu_s: float
    leader_cpu_s: float

    @property
    def mb_per_s(self) -> float:
        return self.size_bytes / 1e6 / self.seconds

    def per_gb(self, cpu_s: float) -> float:
        return cpu_s / (self.size_bytes / 1e9)


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="cluster_reads", title="Cold reads over three brokers", peer="at one")
    with _cluster(folder) as brokers:
        leader = _fill(brokers)
        others = [one for one in brokers if one.pid != leader.pid]
        for broker in brokers:
            settle(broker)
            _read(broker, FETCH_BYTES, COLD_BYTES)
        for max_bytes, each in (FETCH_BYTES, COLD_BYTES), (SMALL_BYTES, SMALL_READ_BYTES):
            contenders = {
                "three": partial(_pass, [leader, *others], max_bytes, each),
                "one": partial(_pass, [leader] * BROKERS, max_bytes, each),
            }
            found = interleave(contenders, rounds=rounds)
            _add(report, f"{max_bytes // 1024} KiB", found["three"], found["one"])
    return report


def _add(report: Report, what: str, three: Sequence[Total], one: Sequence[Total]) -> None:
    report.add(
        f"reads of {what}", "MB/s", [it.mb_per_s for it in three], [it.mb_per_s for it in one]
    )
    report.add(
        f"reads of {what}, all brokers",
        "CPU s/GB",
        [it.per_gb(it.cpu_s) for it in three],
        [it.per_gb(it.cpu_s) for it in one],
    )
    report.add(
        f"reads of {what}, the leader",
        "CPU s/GB",
        [it.per_gb(it.leader_cpu_s) for it in three],
        [it.per_gb(it.leader_cpu_s) for it in one],
        target=Target(value=0.5, at_most=True) if what == LARGE else None,
    )


@contextmanager
def _cluster(folder: Path) -> Iterator[list[Server]]:
    with ExitStack() as running:
        brokers = []
        for number in range(BROKERS):
            own = folder / f"broker-{number}"
            own.mkdir()
            flags = ["--join", "--store", f"file://{folder / 'bucket'}"]
            flags += ["--listen", f"127.0.0.1:{free_port()}"]
            flags += ["--cache-bytes", str(LARGE_CACHE_BYTES)]
            brokers.append(running.enter_context(children.broker(own, *flags)))
        yield brokers


def _fill(brokers: Sequence[Server]) -> Server:
    """Topic "cold", of which all but the last segment is only in the bucket. Its leader."""
    body = batch_of_size(BATCH_BYTES) * (FETCH_BYTES // BATCH_BYTES)
    config = {"segment.bytes": SEGMENT_BYTES, "retention.ms": -1, "local.retention.bytes": 0}
    with Client([one.url for one in brokers], timeout_s=120) as client:
        client.create_topic("cold", config=config)
        for _ in range(TOPIC_BYTES // len(body)):
            client.produce_batches("cold", body, partition=0, acks="1")
        client.offload("cold", wait_ms=60_000)
        for _ in range(600):
            if all(one.tier == "cold" for one in list(client.segments("cold", 0))[:-1]):
                break
            time.sleep(0.1)
        else:
            raise RuntimeError("the topic did not become cold")
        led = client.describe_topic("cold").partitions[0].leader
    assert led is not None, "in a cluster"
    return next(one for one in brokers if one.url == led.url)


def _read(broker: Server, max_bytes: int, size_bytes: int) -> int:
    size = offset = 0
    with Reader(broker, "cold") as reader:
        while size < size_bytes:
            offset, got = reader.read(offset, max_bytes=max_bytes)
            size += got
    return size


def _pass(brokers: Sequence[Server], max_bytes: int, size_bytes: int) -> Total:
    """One reader at each; the first is the leader."""
    pids = {one.pid for one in brokers}
    before = {pid: cpu_seconds_of(pid) for pid in pids}
    began = time.perf_counter()
    with ThreadPoolExecutor(len(brokers)) as pool:
        size = sum(pool.map(lambda one: _read(one, max_bytes, size_bytes), brokers))
    seconds = time.perf_counter() - began
    spent = {pid: cpu_seconds_of(pid) - before[pid] for pid in pids}
    return Total(size, seconds, sum(spent.values()), spent[brokers[0].pid])
