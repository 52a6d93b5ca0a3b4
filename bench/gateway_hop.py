"""Claim: a call that another broker of the cluster carries out costs a millisecond more, and three
milliseconds of CPU if it has 1 MiB.

* Measured: produces of raw batches with `acks=all` and hot fetches of the same, of 1 KiB and of
  1 MiB, one at a time on one connection, through a broker that does not lead the partition: the
  median latency, and the CPU of both brokers for each call.
* Peer: the same calls to the leader itself.

`python -m bench gateway_hop`; takes about a minute.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

from bench import children
from bench.children import Server, free_port
from bench.records import batch_of_size
from bench.report import Report, percentile
from bench.rounds import cpu_seconds_of, interleave
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES

ROUNDS: Final = 5
KIB: Final = 1 << 10
CALLS: Final = {KIB: 1000, KIB << 10: 200}  # of a run, by size: CPU is counted in ticks
_RECORDS: Final = "/v1/topics/hop/partitions/0/records"


class Calls(NamedTuple):
    p50_ms: float
    cpu_ms: float


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="gateway_hop", title="A call passed on by another broker", peer="direct")
    with _two_brokers(folder) as brokers:
        with Client(brokers[0].url) as client:
            client.create_topic("hop", config={"retention.ms": -1})
            led = client.describe_topic("hop").partitions[0].leader
            assert led is not None, "in a cluster"
        leader, gateway = sorted(brokers, key=lambda one: one.url != led.url)
        for size_bytes, count in CALLS.items():
            name = f"{size_bytes >> 10} KiB"
            for what, calls in (("produce", _produces), ("fetch", _fetches)):
                of = partial(calls, brokers, size_bytes=size_bytes, count=count)
                asked = {one.url: partial(of, asked=one) for one in (gateway, leader)}
                found = interleave(asked, rounds=rounds)
                _add(report, f"{what} of {name}", found[gateway.url], found[leader.url])
    return report


def _add(report: Report, what: str, ours: Sequence[Calls], direct: Sequence[Calls]) -> None:
    for name, unit, of in (
        ("p50", "ms", lambda one: one.p50_ms),
        ("CPU of both brokers", "ms", lambda one: one.cpu_ms),
    ):
        report.add(f"{what}, {name}", unit, list(map(of, ours)), list(map(of, direct)))


@contextmanager
def _two_brokers(folder: Path) -> Iterator[list[Server]]:
    store = (folder / "bucket").as_uri()
    with ExitStack() as stack:
        brokers = []
        for name in ("a", "b"):
            (folder / name).mkdir()
            flags = ("--join", "--store", store, "--listen", f"127.0.0.1:{free_port()}")
            brokers.append(stack.enter_context(children.broker(folder / name, *flags)))
        yield brokers


def _produces(brokers: Sequence[Server], *, asked: Server, size_bytes: int, count: int) -> Calls:
    with Wire(asked) as wire:
        batch = batch_of_size(size_bytes)
        request = wire.request(f"POST {_RECORDS}", batch, Content_Type=RECORD_BATCHES)
        return _measured(brokers, lambda: wire.timed(request).seconds, count)


def _fetches(brokers: Sequence[Server], *, asked: Server, size_bytes: int, count: int) -> Calls:
    """Of the newest records: a whole batch of that size."""
    with Client(asked.url) as client:
        end = client.offsets("hop", 0).high_watermark
    records = max(1, (size_bytes - 61) // (KIB + 12))
    with Wire(asked) as wire:
        line = f"GET {_RECORDS}?offset={end - records}&max_bytes={size_bytes}"
        request = wire.request(line, Accept=RECORD_BATCHES)
        return _measured(brokers, lambda: wire.timed(request).seconds, count)


def _measured(brokers: Sequence[Server], call: Callable[[], float], count: int) -> Calls:
    call()
    before_s = sum(cpu_seconds_of(one.pid) for one in brokers)
    seconds = [call() for _ in range(count)]
    spent_s = sum(cpu_seconds_of(one.pid) for one in brokers) - before_s
    return Calls(1000 * percentile(seconds, 0.5), 1000 * spent_s / count)
