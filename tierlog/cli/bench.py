"""`tierlog bench`: how fast a broker takes and gives records, from here, with this client.

The figures hold the client's own work, and the network: with both on one machine they share its
cores. Every request is timed from its sending to the end of its answer.
"""

from __future__ import annotations

import random
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import typer

from record_format.clock import wall_clock_ms
from tierlog.cli.client_options import OutputOption, client_command
from tierlog.cli.output import Output, print_json, print_table

if TYPE_CHECKING:
    from tierlog.client import Client

app = typer.Typer(add_completion=False)

Records = Annotated[int, typer.Option("--records", min=1, help="Records to produce in all.")]
RecordBytes = Annotated[int, typer.Option("--record-bytes", min=1, help="Size of a value.")]
BatchRecords = Annotated[int, typer.Option("--batch", min=1, help="Records in a request.")]
Connections = Annotated[int, typer.Option("--connections", min=1, help="Requests at a time.")]
Partitions = Annotated[
    int, typer.Option("--partitions", min=1, help="Partitions of the topic that it makes.")
]
AcksOption = Annotated[str, typer.Option("--acks", help="all (flushed) or 1 (written).")]
Compression = Annotated[
    str, typer.Option("--compression", help="none, gzip, snappy, lz4 or zstd, by this client.")
]

FETCH_BYTES = 8 << 20
Progress = Callable[[int], None]


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One phase: records a second, MB (10^6 bytes) of batches a second, milliseconds a request."""

    phase: Literal["produce", "fetch"]
    records: int
    seconds: float
    records_per_s: float
    mb_per_s: float
    requests: int
    p50_ms: float
    p99_ms: float


class Work(NamedTuple):
    """What one request moved, and how long it took."""

    records: int
    size_bytes: int
    seconds: float


@app.command()
@client_command
def bench(
    client: Client,
    *,
    records: Records = 500_000,
    record_bytes: RecordBytes = 1000,
    batch: BatchRecords = 1000,
    connections: Connections = 4,
    partitions: Partitions = 1,
    acks: AcksOption = "all",
    compression: Compression = "none",
    output: OutputOption = Output.AUTO,
) -> None:
    """Produce into a topic of its own, fetch it all back, delete it, and tell how fast that was."""
    from record_format.codecs import CODEC_IDS

    if acks not in ("all", "1"):
        raise typer.BadParameter(f"--acks is all or 1, not {acks!r}")
    if compression not in CODEC_IDS:
        raise typer.BadParameter(f"--compression is one of {', '.join(CODEC_IDS)}")
    body = _batch(batch, record_bytes, CODEC_IDS[compression])
    topic = f"tierlog-bench-{secrets.token_hex(4)}"
    limit = max(len(body), 1 << 20) + 64
    client.create_topic(topic, partitions=partitions, config={"max.message.bytes": limit})
    try:
        plan = [number % partitions for number in range(-(-records // batch))]
        with _bar("produce", len(plan) * batch) as progress:

            def produce(partition: int) -> Work:
                began = time.perf_counter()
                client.produce_batches(
                    topic, body, partition=partition, acks="all" if acks == "all" else "1"
                )
                return Work(batch, len(body), time.perf_counter() - began)

            produced = _measured("produce", plan, produce, connections, progress)
        with _bar("fetch", len(plan) * batch) as progress:
            fetched = _fetch(client, topic, partitions, connections, progress)
    finally:
        client.delete_topic(topic)
    _report([produced, fetched], output)


def _batch(records: int, record_bytes: int, codec: int) -> bytes:
    """One batch, of values that compress as text does: to about three quarters."""
    from record_format.encode import encode_batch

    dice = random.Random(1)  # the same bytes in every run
    filling = dice.randbytes(records * record_bytes // 2 + 1).hex().encode()
    cuts = range(0, records * record_bytes, record_bytes)
    values = [filling[cut : cut + record_bytes] for cut in cuts]
    timestamps = [wall_clock_ms()] * records
    return bytes(encode_batch(values, timestamps=timestamps, codec=codec))


def _measured(
    phase: Literal["produce", "fetch"],
    plan: list[int],
    request: Callable[[int], Work],
    connections: int,
    progress: Progress,
) -> Figures:
    """Run `request` for each of the plan, `connections` at a time."""
    done: list[Work] = []

    def run(step: int) -> None:
        work = request(step)
        done.append(work)
        progress(work.records)

    began = time.perf_counter()
    with _threads(connections) as pool:
        for _ in pool.map(run, plan):
            pass
    return _figures(phase, done, time.perf_counter() - began)


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """Whoever is interrupted, or fails, waits for what is under way and not for the whole plan."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def _fetch(
    client: Client, topic: str, partitions: int, connections: int, progress: Progress
) -> Figures:
    """All of the topic as raw batches, each partition by one reader."""
    from tierlog.client import Limits

    done: list[Work] = []
    lock = threading.Lock()

    def read(partition: int) -> None:
        offset = 0
        while True:
            began = time.perf_counter()
            fetched = client.fetch_batches(
                topic, partition, offset=offset, limits=Limits(max_bytes=FETCH_BYTES)
            )
            count = fetched.next_offset - offset
            with lock:
                done.append(Work(count, len(fetched.batches), time.perf_counter() - began))
                progress(count)
            offset = fetched.next_offset
            if fetched.up_to_date:
                return

    began = time.perf_counter()
    with _threads(connections) as pool:
        for _ in pool.map(read, range(partitions)):
            pass
    return _figures("fetch", done, time.perf_counter() - began)


def _figures(phase: Literal["produce", "fetch"], done: list[Work], seconds: float) -> Figures:
    records = sum(work.records for work in done)
    times = sorted(work.seconds for work in done)
    return Figures(
        phase=phase,
        records=records,
        seconds=round(seconds, 3),
        records_per_s=round(records / seconds),
        mb_per_s=round(sum(work.size_bytes for work in done) / seconds / 1e6, 1),
        requests=len(done),
        p50_ms=round(times[len(times) // 2] * 1000, 2),
        p99_ms=round(times[len(times) * 99 // 100] * 1000, 2),
    )


@contextmanager
def _bar(phase: str, total: int) -> Iterator[Progress]:
    """On a terminal, a bar with the rate; elsewhere nothing."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(phase), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=total)
        yield lambda count: bar.advance(task, count)


def _report(phases: list[Figures], output: Output) -> None:
    if output.is_json:
        print_json({"phases": phases})
        return
    columns = ("", "records/s", "MB/s", "requests", "p50 ms", "p99 ms")
    rows = [
        (
            one.phase,
            int(one.records_per_s),
            f"{one.mb_per_s:,.1f}",
            one.requests,
            f"{one.p50_ms:.2f}",
            f"{one.p99_ms:.2f}",
        )
        for one in phases
    ]
    print_table("", columns, rows)
