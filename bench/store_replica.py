"""Claim: a produce that the bucket has to keep takes half of `store.flush.ms`, a PUT and little
more, however many partitions there are, and topics without it do not notice.

* Measured, with `store.flush.ms` at its default: a record of 1 KiB, `acks=all`, one at a time, to a
  topic with `replication.store=always`. Its peer is a bare PUT of an object of that size; the
  figure with a target is what is left beyond half the interval and the PUT. Each is sent at a
  random moment of the interval.
* Measured: the same produce to a topic without it, while a thousand partitions of the other one
  are written to all the time; its peer is the same beside as many writes to a topic without it.
* Measured: PUTs of write-ahead objects a second meanwhile, by the broker's own metrics.

`python -m bench store_replica`; takes about two minutes.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Final

import httpx2

from bench import children, s3
from bench.children import Server, free_port
from bench.report import Report, Target, percentile
from bench.rounds import interleave
from bench.wire import Wire
from tierlog.client.client import Client

ROUNDS: Final = 3
FLUSH_MS: Final = 250
PARTITIONS: Final = 1000
PRODUCES: Final = 40
BUSY_S: Final = 8
CREATED_S: Final = 300.0
OCTETS: Final = "application/octet-stream"
_VALUE: Final = b"v" * 1024


def measure(folder: Path, *, rounds: int) -> Report:
    title = "The bucket as a replica in sync"
    report = Report(name="store_replica", title=title, peer="peer")
    with s3.versitygw(folder) as bucket, _broker(folder, bucket) as broker:
        with Client(broker.url, timeout_s=CREATED_S) as client:
            for name, role, count in (
                ("one-kept", "always", 1),
                ("kept", "always", PARTITIONS),
                ("one", "none", 1),
                ("plain", "none", PARTITIONS),
            ):
                client.create_topic(name, partitions=count, config={"replication.store": role})
        _latency(report, broker, bucket, rounds)
        _beside(report, broker, rounds)
    return report


@contextmanager
def _broker(folder: Path, bucket: s3.Bucket) -> Iterator[Server]:
    flags = ("--join", "--listen", f"127.0.0.1:{free_port()}", *bucket.flags)
    with children.broker(folder, *flags) as broker:
        yield broker


def _latency(report: Report, broker: Server, bucket: s3.Bucket, rounds: int) -> None:
    store: Any = s3.client(bucket)

    def put() -> list[float]:
        return [_put_ms(store) for _ in range(PRODUCES)]

    produce = partial(_produces_ms, broker, "one-kept")
    of: dict[str, Callable[[], list[float]]] = {"ours": produce, "put": put}
    seen = interleave(of, rounds=rounds)
    name, ours, puts = "produce of 1 KiB", seen["ours"], seen["put"]
    report.add_latency(name, ours, puts, peer_is="a bare PUT")
    beyond = [
        percentile(own, 0.5) - FLUSH_MS / 2 - percentile(other, 0.5)
        for own, other in zip(ours, puts, strict=True)
    ]
    target = Target(value=20, at_most=True, of_ratio=False)
    report.add(f"{name}, p50, beyond the PUT and half the interval", "ms", beyond, target=target)


def _put_ms(store: Any) -> float:
    began = time.perf_counter()
    store.put_object(Bucket=s3.BUCKET, Key="bare", Body=_VALUE)
    return (time.perf_counter() - began) * 1000


def _produces_ms(broker: Server, topic: str) -> list[float]:
    taken = []
    with Wire(broker) as wire:
        line = f"POST /v1/topics/{topic}/partitions/0/records"
        request = wire.request(line, _VALUE, Content_Type=OCTETS)
        for _ in range(PRODUCES):
            time.sleep(random.random() * FLUSH_MS / 1000)
            taken.append(wire.timed(request).seconds * 1000)
    return taken


def _beside(report: Report, broker: Server, rounds: int) -> None:
    puts_per_s = list[float]()

    def beside(topic: str) -> list[float]:
        with _busy(broker, topic):
            began_s, before = time.monotonic(), _puts(broker)
            taken = _produces_ms(broker, "one")
            while (took_s := time.monotonic() - began_s) < BUSY_S:
                time.sleep(0.1)
            if topic == "kept":
                puts_per_s.append((_puts(broker) - before) / took_s)
        return taken

    of: dict[str, Callable[[], list[float]]] = {
        topic: partial(beside, topic) for topic in ("kept", "plain")
    }
    seen = interleave(of, rounds=rounds)
    report.add_latency(
        f"a topic without it beside {PARTITIONS:,} busy partitions",
        seen["kept"],
        seen["plain"],
        peer_is="those are without it as well",
    )
    target = Target(value=1000 / FLUSH_MS + 1, at_most=True, of_ratio=False)
    report.add(f"PUTs for {PARTITIONS:,} busy partitions", "1/s", puts_per_s[1:], target=target)


@contextmanager
def _busy(broker: Server, topic: str) -> Iterator[None]:
    """Each partition gets a record in turn, for as long as it lasts, by `acks=1`: in each interval
    hundreds of them.
    """
    stop = threading.Event()

    def write() -> None:
        with Wire(broker) as wire:
            number = 0
            while not stop.is_set():
                line = f"POST /v1/topics/{topic}/partitions/{number % PARTITIONS}/records?acks=1"
                wire.timed(wire.request(line, _VALUE, Content_Type=OCTETS))
                number += 1

    writing = threading.Thread(target=write)
    writing.start()
    try:
        yield
    finally:
        stop.set()
        writing.join()


def _puts(broker: Server) -> float:
    lines = httpx2.get(f"{broker.url}/metrics", timeout=30).text.splitlines()
    counters = [line for line in lines if line.startswith("tierlog_store_requests_total{")]
    return sum(
        float(line.rpartition(" ")[2])
        for line in counters
        if '"write_ahead"' in line and '"put"' in line
    )
