"""Claim: one small request at a time takes little more than the disk's time, and does not wait
behind large ones.

* Measured: a produce of one 1 KiB record, `acks=all`, one at a time. Its peer is a bare append and
  `fdatasync` of the same bytes in the same round; the figure with a target is by how much our
  median exceeds the peer's.
* Measured: a fetch of one record, while 8 connections download ranges of 16 MiB of a sealed segment
  as fast as they can; its peer is the same fetch alone. And the produce, while 8 connections fetch
  one record each as fast as they can.
* That produce waits for three iterations of the event loop: until its head is read, until its task
  begins, and until the task learns that a thread has written it. Reads are answered in
  each for half a millisecond (`ReadTurns`). Neither the disk (0.3 ms) nor the interpreter's lock
  (0.2 ms) matters much.

`python -m bench latency`; takes about a minute, and wrk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from bench import children, load
from bench.children import Server
from bench.load import Requests
from bench.records import batch_of_size
from bench.report import Report, Target, percentile
from bench.rounds import interleave
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES

ROUNDS: Final = 5
PRODUCES: Final = 400
LOAD_S: Final = 3
MIB: Final = 1 << 20
OCTETS: Final = "application/octet-stream"
_RECORDS: Final = "/v1/topics/{}/partitions/0/records"
_ONE_RECORD: Final = f"GET {_RECORDS.format('small')}?offset=0&max_records=1"


def measure(folder: Path, *, rounds: int) -> Report:
    children.program("wrk")
    report = Report(name="latency", title="One small request at a time", peer="peer")
    with children.broker(folder) as broker:
        _fill(broker)
        _durable_produce(report, broker, folder, rounds)
        _fetch_beside_drains(report, broker, folder, rounds)
        _produce_beside_readers(report, broker, folder, rounds)
    return report


def _fill(broker: Server) -> None:
    batch = batch_of_size(MIB)
    with Client(broker.url) as client:
        client.create_topic("big", config={"retention.ms": -1, "segment.bytes": 64 * MIB})
        client.create_topic("small")
    with Wire(broker) as wire:
        request = wire.request(f"POST {_RECORDS.format('big')}", batch, Content_Type=RECORD_BATCHES)
        for _ in range(70):
            wire.timed(request)
        wire.timed(
            wire.request(f"POST {_RECORDS.format('small')}", b"x" * 100, Content_Type=OCTETS)
        )


def _durable_produce(report: Report, broker: Server, folder: Path, rounds: int) -> None:
    line, body = f"POST {_RECORDS.format('small')}", b"v" * 1024

    def ours() -> list[float]:
        with Wire(broker) as wire:
            request = wire.request(line, body, Content_Type=OCTETS)
            return [wire.timed(request).seconds * 1000 for _ in range(PRODUCES)]

    def disk() -> list[float]:
        with (folder / "bare").open("wb", buffering=0) as file:
            return [_bare_append_ms(file.fileno(), body) for _ in range(PRODUCES)]

    seen = interleave({"ours": ours, "disk": disk}, rounds=rounds)
    name, both = "durable 1 KiB produce", (seen["ours"], seen["disk"])
    report.add_latency(name, *both, peer_is="bare append + fdatasync")
    beyond = [percentile(own, 0.5) - percentile(disk, 0.5) for own, disk in zip(*both, strict=True)]
    target = Target(value=1.2, at_most=True, of_ratio=False)
    report.add(f"{name}, p50, beyond the disk's", "ms", beyond, target=target)


def _bare_append_ms(fd: int, body: bytes) -> float:
    began = time.perf_counter()
    os.write(fd, body)
    os.fdatasync(fd)
    return (time.perf_counter() - began) * 1000


def _fetch_beside_drains(report: Report, broker: Server, folder: Path, rounds: int) -> None:
    path = "/v1/topics/big/partitions/0/segments/0"
    drains = [f"GET {path} Range=bytes={at * MIB}-{(at + 16) * MIB - 1}" for at in range(0, 48, 16)]
    with Wire(broker) as wire:
        fetch = wire.request(_ONE_RECORD)
    seen = _beside(broker, folder, fetch, drains, rounds=rounds)
    _add(report, "1-record fetch beside 8 drains", seen, most={0.5: 2.0, 0.99: 15.0})


def _produce_beside_readers(report: Report, broker: Server, folder: Path, rounds: int) -> None:
    with Wire(broker) as wire:
        line = f"POST {_RECORDS.format('small')}"
        produce = wire.request(line, b"v" * 1024, Content_Type=OCTETS)
    seen = _beside(broker, folder, produce, [_ONE_RECORD], rounds=rounds)
    name = "durable 1 KiB produce beside 8 who fetch one record"
    _add(report, name, seen, most={0.5: 3.0}, of_ratio=True)


Seen = Mapping[str, Sequence[list[float]]]


def _beside(
    broker: Server, folder: Path, request: bytes, others: Sequence[str], *, rounds: int
) -> Seen:
    """How long a request takes alone, and beside 8 connections that send as fast as they can."""
    run_load = partial(load.run, broker, Requests(others), folder=folder, duration_s=LOAD_S)

    def beside() -> list[float]:
        return load.beside(broker, request, run_load, after_s=0.5, for_s=LOAD_S - 1)[0]

    alone = partial(load.timed, broker, request, for_s=1)
    return interleave({"beside": beside, "alone": alone}, rounds=rounds)


def _add(
    report: Report, name: str, seen: Seen, *, most: Mapping[float, float], of_ratio: bool = False
) -> None:
    targets = {
        share: Target(value=bound, at_most=True, of_ratio=of_ratio) for share, bound in most.items()
    }
    report.add_latency(name, seen["beside"], seen["alone"], peer_is="ours alone", targets=targets)
