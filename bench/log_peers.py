"""Claim: over HTTP and in Python, tierlog is still ahead of other small logs that one might run.

* Measured: records of 1 KiB, one at a time and in requests of 100 and 1,000, from one client and
  from eight, all into one partition, `acks=all`; and a read from the start. Ours as JSON and as raw
  batches.
* Peers: s2-lite on a local folder, its JSON against our JSON, and the faster of its JSON and its
  protobuf against our raw batches; NATS JetStream with `sync_interval: always`, which flushes as we
  do, and with its defaults, where it acknowledges before a flush (compared with our `acks=1` too).
* Another peer of our batches is the disk alone: the same bytes written by as many threads to one
  file, with one `fdatasync` for all that wait.
* Reads request as much as the log returns at once: ours 8 MiB, s2 1,000 records; NATS streams.
* All use prepared requests over plain sockets, from threads of one process: the client is the same,
  and only counts what it reads.

The client takes its share of two cores. An unsuccessful response ends the run.

`python -m bench log_peers`; takes about two minutes, nats-server and s2 (from PATH, or named by
BENCH_NATS and BENCH_S2), and root for s2.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, Protocol, TypeVar

from bench import children
from bench.children import MissingPeer, Server
from bench.nats import nats
from bench.records import START_MS, texts
from bench.report import Report, Target, percentile
from bench.rounds import interleave, wall_seconds
from bench.s2 import S2Log, s2
from bench.wire import Append, Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES
from tierlog.record_format.encode import encode_batch

ROUNDS: Final = 3
SECONDS: Final = 0.6
READ_RECORDS: Final = 30_000
FETCH_BYTES: Final = 8 << 20
_RECEIVE_BYTES: Final = 1 << 20
_JSON: Final = "application/json"
DISK: Final = "the disk alone"


class Shape(NamedTuple):
    """How many clients append, and how many records per request."""

    name: str
    clients: int
    records: int


ONE: Final = Shape("one record at a time", 1, 1)
SHAPES: Final = (
    Shape("1 client x 100", 1, 100),
    Shape("1 client x 1,000", 1, 1000),
    Shape("8 clients x 1,000", 8, 1000),
)


class Appends(Protocol):
    """What can be appended to. Logs are named `append` and `read`."""

    def recreate(self, log: str, /) -> None: ...
    def appender(self, log: str, values: list[bytes], /) -> AbstractContextManager[Append]: ...


class Log(Appends, Protocol):
    """What is compared."""

    def read(self, log: str, count: int) -> None: ...


Contender = TypeVar("Contender", bound=Appends)


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="log_peers", title="Records of 1 KiB, beside other logs", peer="peer")
    with ExitStack() as stack:
        logs = _contenders(stack, folder, report)
        _add_latencies(report, _interleaved(logs, _latencies, rounds))
        appending: dict[str, Appends] = {**logs, DISK: BareDisk(folder)}
        for shape in SHAPES:
            seen = _interleaved(appending, _appends(shape), rounds)
            _add_rates(report, f"append, {shape.name}", seen)
        for log in logs.values():
            _fill(log)
        _add_rates(report, "read from the start", _interleaved(logs, _read, rounds))
    return report


def _contenders(stack: ExitStack, folder: Path, report: Report) -> dict[str, Log]:
    """Ours, and the peers that are installed. Raises MissingPeer if none is."""
    logs: dict[str, Log] = {}
    missing = []
    try:
        logs["NATS"] = stack.enter_context(nats(folder, durable=False))
        logs["durable NATS"] = stack.enter_context(nats(folder, durable=True))
    except MissingPeer as peer:
        missing.append(str(peer))
    try:
        wires = stack.enter_context(s2(folder))
        logs["s2 JSON"] = S2Log(wires, protobuf=False)
        logs["s2 protobuf"] = S2Log(wires, protobuf=True)
    except MissingPeer as peer:
        missing.append(str(peer))
    if not logs:
        raise MissingPeer("; ".join(missing))
    report.notes += missing
    broker = stack.enter_context(children.broker(folder))
    ours = {"JSON": OurLog(broker, raw=False), "raw": OurLog(broker, raw=True)}
    return {**ours, "raw acks=1": OurLog(broker, raw=True, acks="1"), **logs}


def _interleaved(
    logs: Mapping[str, Contender], run: Callable[[Contender], float], rounds: int
) -> dict[str, list[float]]:
    return interleave({name: partial(run, log) for name, log in logs.items()}, rounds=rounds)


def _latencies(log: Log) -> float:
    """The median of single appends, in ms."""
    log.recreate("append")
    seen: list[float] = []
    with log.appender("append", texts(1, 1024)) as append:
        until = time.perf_counter() + SECONDS
        while time.perf_counter() < until:
            seen.append(wall_seconds(append) * 1000)
    return percentile(seen, 0.5)


def _appends(shape: Shape) -> Callable[[Appends], float]:
    """Records per second of all clients together."""
    values = _values(shape.records)

    def run(log: Appends) -> float:
        log.recreate("append")
        with ExitStack() as stack:
            appends = [
                stack.enter_context(log.appender("append", values)) for _ in range(shape.clients)
            ]
            began = time.perf_counter()
            requests = _repeat_together(appends, until=began + SECONDS)
            return requests * shape.records / (time.perf_counter() - began)

    return run


def _repeat_together(appends: Sequence[Append], *, until: float) -> int:
    """Repeat each in its own thread; returns how often in all. Raises what one of them raised."""
    counts, errors = [0] * len(appends), []

    def repeat(number: int) -> None:
        try:
            while time.perf_counter() < until:
                appends[number]()
                counts[number] += 1
        except (OSError, RuntimeError) as error:
            errors.append(error)

    threads = [threading.Thread(target=repeat, args=(number,)) for number in range(len(appends))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return sum(counts)


def _fill(log: Log) -> None:
    log.recreate("read")
    with log.appender("read", _values(1000)) as append:
        for _ in range(READ_RECORDS // 1000):
            append()


def _read(log: Log) -> float:
    """Records per second of repeated reads from the start: the fastest takes 20 ms for one."""
    reads, began = 0, time.perf_counter()
    while (elapsed_s := time.perf_counter() - began) < SECONDS:
        log.read("read", READ_RECORDS)
        reads += 1
    return reads * READ_RECORDS / elapsed_s


def _values(count: int) -> list[bytes]:
    few = texts(min(count, 64), 1024)
    return [few[number % len(few)] for number in range(count)]


def _add_latencies(report: Report, seen: Mapping[str, Sequence[float]]) -> None:
    """A row for every peer. Here durable NATS may be ahead, and NATS is."""
    for peer, ours in ("s2 JSON", "JSON"), ("durable NATS", "JSON"), ("NATS", "JSON"):
        if peer in seen:
            target = Target(value=1.0, at_most=True) if peer == "s2 JSON" else None
            what = f"append, {ONE.name}, p50: {ours} (peer: {peer})"
            report.add(what, "ms", seen[ours], seen[peer], target=target)


def _add_rates(report: Report, what: str, seen: Mapping[str, Sequence[float]]) -> None:
    """Targets: our JSON is ahead of s2's and of durable NATS, our batches are five times as fast as
    s2 and ahead of the rest. NATS pushes stored bytes and has no JSON: its reads are compared only
    with raw batches.
    """
    seen = _with_best_of_s2(seen)
    compared: list[tuple[str, str, float | None]] = [("JSON", "s2 JSON", 1.0), ("raw", "s2", 5.0)]
    if what.startswith("append"):
        compared.append(("JSON", "durable NATS", 1.0))
        compared += [("raw acks=1", "NATS", None), ("raw", DISK, None)]
    compared += [("raw", "durable NATS", 1.0), ("raw", "NATS", 1.0)]
    for ours, peer, least in compared:
        if peer in seen:
            name = f"{what}: {ours} (peer: {peer})"
            target = None if least is None else Target(value=least)
            report.add(name, "records/s", seen[ours], seen[peer], target=target)


def _with_best_of_s2(seen: Mapping[str, Sequence[float]]) -> dict[str, Sequence[float]]:
    """With the faster of s2's two forms in each round, as `s2`."""
    if "s2 JSON" not in seen:
        return dict(seen)
    both = zip(seen["s2 JSON"], seen["s2 protobuf"], strict=True)
    return {**seen, "s2": [max(forms) for forms in both]}


class BareDisk:
    """A file to append to instead of a log. Each is new, and the old ones stay, like a log's
    segments: a file that was just deleted would leave its pages in memory to the next.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._files = folder, 0
        self._writing, self._flushing = threading.Lock(), threading.Lock()
        self._written = self._flushed = 0

    def recreate(self, _: str) -> None:
        self._files += 1

    @contextmanager
    def appender(self, _: str, values: list[bytes]) -> Iterator[Append]:
        body = _batch_of(values)
        path = self._folder / f"bare-{self._files}"
        with path.open("ab", buffering=0) as file:
            yield lambda: self._append(file.fileno(), body)

    def _append(self, fd: int, body: bytes) -> None:
        with self._writing:
            os.write(fd, body)
            self._written += 1
            own = self._written
        with self._flushing:
            if self._flushed < own:
                written = self._written
                os.fdatasync(fd)
                self._flushed = written


class OurLog:
    """Topics of one broker, one partition each, as raw batches or JSON."""

    def __init__(self, server: Server, *, raw: bool, acks: str = "all") -> None:
        self._server = server
        self._acks = acks
        self._form = RECORD_BATCHES if raw else _JSON

    def recreate(self, log: str) -> None:
        with Client(self._server.url) as client:
            if any(topic.name == self._topic(log) for topic in client.list_topics()):
                client.delete_topic(self._topic(log))
            client.create_topic(self._topic(log), config={"retention.ms": -1})

    @contextmanager
    def appender(self, log: str, values: list[bytes]) -> Iterator[Append]:
        with Wire(self._server) as wire:
            line = f"POST {self._records(log)}?acks={self._acks}"
            request = wire.request(line, self._body(values), Content_Type=self._form)
            yield partial(wire.timed, request)

    def read(self, log: str, count: int) -> None:
        buffer, offset = memoryview(bytearray(_RECEIVE_BYTES)), 0
        with Wire(self._server) as wire:
            while offset < count:
                line = f"GET {self._records(log)}?offset={offset}&max_bytes={FETCH_BYTES}"
                offset, _ = wire.fetch(line, buffer, Accept=self._form)

    def _topic(self, log: str) -> str:
        return f"{log}-{'raw' if self._form == RECORD_BATCHES else 'json'}-{self._acks}"

    def _records(self, log: str) -> str:
        return f"/v1/topics/{self._topic(log)}/partitions/0/records"

    def _body(self, values: list[bytes]) -> bytes:
        if self._form == RECORD_BATCHES:
            return _batch_of(values)
        return json.dumps({"records": [{"value": value.decode()} for value in values]}).encode()


def _batch_of(values: list[bytes]) -> bytes:
    times = [START_MS + number for number in range(len(values))]
    return bytes(encode_batch(values, timestamps=times))
