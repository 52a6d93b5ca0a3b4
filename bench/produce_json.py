"""Claim: JSON is not a bottleneck: records posted as JSON reach the disk at the rate of batches.

* Measured: 1,000 records per request, `acks=all`, 8 connections of wrk, a prepared body: records
  per second, and per second of the server's CPU (what one core does); raw batches of 1 MiB,
  `acks=1`, likewise in MB.
* Peer: a bare loop in one process, without HTTP and without a log: for JSON it parses the body into
  typed records, writes the body and flushes it; for batches it writes them.

The server shares the machine with wrk, so the target is for the figure per CPU second.

`python -m bench produce_json`; takes about a minute, and wrk.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench import children, load
from bench.children import Server
from bench.load import Requests
from bench.records import batch_of_size, texts
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES

ROUNDS: Final = 5
DURATION_S: Final = 3
RECORDS: Final = 1000
MIB: Final = 1 << 20


class Case(NamedTuple):
    """A body, and how many units it has of what is counted."""

    name: str
    unit: str
    body: bytes
    units: float
    acks: str
    target: float


class Rate(NamedTuple):
    """Units per second of wall time, and of CPU."""

    per_s: float
    per_cpu_s: float


class _Record(msgspec.Struct):
    value: str


class _Body(msgspec.Struct):
    records: list[_Record]


def measure(folder: Path, *, rounds: int) -> Report:
    children.program("wrk")
    report = Report(name="produce_json", title="Produce, 8 connections", peer="bare loop")
    with children.broker(folder) as broker:
        for case in _cases():
            runs = {
                "ours": _our_run(broker, case, folder),
                "bare": _bare_run(case, folder / "bare"),
            }
            seen = interleave(runs, rounds=rounds)
            _add_rows(report, case, seen["ours"], seen["bare"])
    return report


def _cases() -> list[Case]:
    batch = batch_of_size(MIB)
    return [
        Case("JSON, 1 KiB records, acks=all", "records", _json(1024), RECORDS, "all", 150_000),
        Case("JSON, 100 B records, acks=all", "records", _json(100), RECORDS, "all", 450_000),
        Case("raw 1 MiB batches, acks=1", "MB", batch, len(batch) / 1e6, "1", 400),
    ]


def _json(record_bytes: int) -> bytes:
    values = texts(RECORDS, record_bytes)
    return msgspec.json.encode({"records": [{"value": value.decode()} for value in values]})


def _our_run(broker: Server, case: Case, folder: Path) -> Callable[[], Rate]:
    body = folder / "body"
    content_type = RECORD_BATCHES if case.unit == "MB" else "application/json"
    line = f"POST /v1/topics/t/partitions/0/records?acks={case.acks} Content-Type={content_type}"

    def run() -> Rate:
        body.write_bytes(case.body)
        with Client(broker.url) as client:
            client.create_topic("t", config={"segment.bytes": 1 << 30})
            seen = load.run(broker, Requests([line], body), folder=folder, duration_s=DURATION_S)
            client.delete_topic("t")
        units = seen.requests * case.units
        return Rate(units / seen.duration_s, units / seen.cpu_s)

    return run


def _bare_run(case: Case, path: Path) -> Callable[[], Rate]:
    decoder = msgspec.json.Decoder(_Body) if case.unit == "records" else None

    def run() -> Rate:
        began, cpu_began, requests = time.perf_counter(), time.process_time(), 0
        with path.open("wb", buffering=0) as file:
            while time.perf_counter() - began < 1:
                if decoder:
                    decoder.decode(case.body)
                os.writev(file.fileno(), [case.body])
                if case.acks == "all":
                    os.fdatasync(file.fileno())
                requests += 1
        units, wall = requests * case.units, time.perf_counter() - began
        path.unlink()
        return Rate(units / wall, units / (time.process_time() - cpu_began))

    return run


def _add_rows(report: Report, case: Case, ours: Sequence[Rate], bare: Sequence[Rate]) -> None:
    report.add(
        case.name,
        f"{case.unit}/s",
        [rate.per_s for rate in ours],
        [rate.per_s for rate in bare],
    )
    report.add(
        f"{case.name}, server",
        f"{case.unit}/CPU s",
        [rate.per_cpu_s for rate in ours],
        [rate.per_cpu_s for rate in bare],
        target=Target(value=case.target, of_ratio=False),
    )
    if case.unit == "records":
        report.add(
            f"{case.name}, server", "CPU s/M records", [1e6 / rate.per_cpu_s for rate in ours]
        )
