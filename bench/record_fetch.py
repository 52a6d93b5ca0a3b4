"""Claim: records are served as text about as fast as they can be encoded as text.

* Measured: fetches of a topic of 100-byte records as NDJSON (also with values that are JSON, and as
  one JSON document), 1 MiB per request, 4 connections: records per second of wall time and of the
  server's CPU (what one core does).
* Peer: a bare loop in one process, without HTTP and without a log, that encodes records as lines
  with msgspec from existing columns.

`python -m bench record_fetch`; takes about half a minute, and wrk.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from bench import children, load
from bench.children import Server
from bench.load import Requests
from bench.records import START_MS, texts
from bench.report import Report, Target
from bench.rounds import interleave
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES
from tierlog.record_format.encode import encode_batch

ROUNDS: Final = 5
DURATION_S: Final = 2
RECORD_BYTES: Final = 100
BATCHES: Final = 64
BATCH_RECORDS: Final = 1000


class Case(NamedTuple):
    name: str
    accept: str
    parameters: str
    target: float | None = None


class Rate(NamedTuple):
    per_s: float
    per_cpu_s: float


CASES: Final = (
    Case("NDJSON", "application/x-ndjson", "", 300_000),
    Case("NDJSON, values put in as JSON", "application/x-ndjson", "&encoding=json"),
    Case("JSON", "application/json", ""),
)


class _Line(msgspec.Struct):
    partition: int
    offset: int
    timestamp: int
    key: str | None
    value: str
    headers: list[str]


def measure(folder: Path, *, rounds: int) -> Report:
    children.program("wrk")
    report = Report(
        name="record_fetch", title="Fetch of 100-byte records, 4 connections", peer="bare loop"
    )
    with children.broker(folder) as broker:
        _fill(broker)
        for case in CASES:
            runs = {"ours": _our_run(broker, case, folder), "bare": _bare_run()}
            seen = interleave(runs, rounds=rounds)
            report.add(
                case.name,
                "records/s",
                [rate.per_s for rate in seen["ours"]],
                [rate.per_s for rate in seen["bare"]],
            )
            report.add(
                f"{case.name}, server",
                "records/CPU s",
                [rate.per_cpu_s for rate in seen["ours"]],
                [rate.per_cpu_s for rate in seen["bare"]],
                target=Target(value=case.target, of_ratio=False) if case.target else None,
            )
    return report


def _values() -> list[bytes]:
    """JSON texts, so that the same records serve for both encodings."""
    frame = len(b'{"text":""}')
    return [b'{"text":"%b"}' % text for text in texts(BATCH_RECORDS, RECORD_BYTES - frame)]


def _fill(broker: Server) -> None:
    batch = bytes(encode_batch(_values(), timestamps=[START_MS] * BATCH_RECORDS))
    with Client(broker.url) as client:
        client.create_topic("t", config={"retention.ms": -1})
    with Wire(broker) as wire:
        path = "POST /v1/topics/t/partitions/0/records"
        for _ in range(BATCHES):
            wire.timed(wire.request(path, batch, Content_Type=RECORD_BATCHES))
        fetch = "GET /v1/topics/t/partitions/0/records?max_records=1&offset="
        for number in range(BATCHES):
            wire.timed(wire.request(f"{fetch}{number * BATCH_RECORDS}"))


def _our_run(broker: Server, case: Case, folder: Path) -> Callable[[], Rate]:
    pages = _page_starts(broker)
    path = "GET /v1/topics/t/partitions/0/records?offset={}{} Accept={}"
    lines = [path.format(start, case.parameters, case.accept) for start, _ in pages]
    records_per_page = sum(count for _, count in pages) / len(pages)

    def run() -> Rate:
        seen = load.run(
            broker, Requests(lines), folder=folder, duration_s=DURATION_S, connections=4
        )
        records = seen.requests * records_per_page
        return Rate(records / seen.duration_s, records / seen.cpu_s)

    return run


def _page_starts(broker: Server) -> list[tuple[int, int]]:
    """(first offset, records) of the full pages of the topic, as a client would walk them."""
    starts: list[tuple[int, int]] = []
    path = "GET /v1/topics/t/partitions/0/records?offset="
    with Wire(broker) as wire:
        offset = 0
        while offset < BATCHES * BATCH_RECORDS:
            body = wire.timed(wire.request(f"{path}{offset}", Accept="application/x-ndjson")).body
            count = body.count(b"\n")
            starts.append((offset, count))
            offset += count
    return starts[:-1]


def _bare_run() -> Callable[[], Rate]:
    texts_ = [value.decode() for value in _values()]
    encoder = msgspec.json.Encoder()

    def run() -> Rate:
        began, cpu_began, records = time.perf_counter(), time.process_time(), 0
        while time.perf_counter() - began < 1:
            lines = [
                _Line(0, offset, START_MS, None, text, []) for offset, text in enumerate(texts_)
            ]
            encoder.encode_lines(lines)
            records += len(lines)
        wall = time.perf_counter() - began
        return Rate(records / wall, records / (time.process_time() - cpu_began))

    return run
