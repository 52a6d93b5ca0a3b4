"""`tierlog bench`: the produce and fetch rates of a broker, measured with this client.

The figures include the client's own work and the network; a client on the broker's machine shares
its cores. Every request is timed from sending it to the end of its response.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Annotated, Literal, NamedTuple

import msgspec
import typer

from tierlog.cli.options import OutputOption, client_command
from tierlog.cli.output import Output, progress_bar
from tierlog.host.clock import wall_clock_ms

if TYPE_CHECKING:
    from tierlog.client.client import Client

Records = Annotated[int, typer.Option("--records", min=1, help="Total number of records.")]
RecordBytes = Annotated[int, typer.Option("--record-bytes", min=1, help="Size of each value.")]
BatchRecords = Annotated[int, typer.Option("--batch", min=1, help="Records per request.")]
Connections = Annotated[int, typer.Option("--connections", min=1, help="Concurrent requests.")]
Partitions = Annotated[
    int, typer.Option("--partitions", min=1, help="Partitions of the topic that is created.")
]
AcksOption = Annotated[
    Literal["all", "1"], typer.Option("--acks", help="all (flushed) or 1 (written).")
]
Compression = Annotated[
    Literal["none", "gzip", "snappy", "lz4", "zstd"],
    typer.Option("--compression", help="none, gzip, snappy, lz4 or zstd; done by this client."),
]

FETCH_BYTES = 8 << 20


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """One phase: records per second, MB (10^6 bytes) of batches per second, ms per request."""

    phase: Literal["produce", "fetch"]
    records: int
    seconds: float
    records_per_s: float
    mb_per_s: float
    requests: int
    p50_ms: float
    p99_ms: float


class Work(NamedTuple):
    """What one request transferred, and how long it took."""

    records: int
    size_bytes: int
    seconds: float


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
    """Measure produce and fetch rates, with a new topic that is deleted afterwards."""
    from tierlog.record_format.codecs import CODEC_IDS

    body = _batch(batch, record_bytes, CODEC_IDS[compression])
    topic = f"tierlog-bench-{secrets.token_hex(4)}"
    limit = max(len(body), 1 << 20) + 64
    client.create_topic(topic, partitions=partitions, config={"max.message.bytes": limit})
    try:
        plan = [number % partitions for number in range(-(-records // batch))]
        run = partial(_measured, connections=connections, total=len(plan) * batch)

        def produce(partition: int) -> Iterator[Work]:
            began = time.perf_counter()
            client.produce_batches(topic, body, partition=partition, acks=acks)
            yield Work(batch, len(body), time.perf_counter() - began)

        phases = [
            run("produce", plan, produce),
            run("fetch", range(partitions), partial(_read_partition, client, topic)),
        ]
    finally:
        client.delete_topic(topic)
    _report(phases, output)


def _batch(records: int, record_bytes: int, codec: int) -> bytes:
    """One batch; its values compress like text, to about three quarters."""
    from tierlog.record_format.encode import encode_batch

    generator = random.Random(1)  # the same bytes in every run
    filling = generator.randbytes(records * record_bytes // 2 + 1).hex().encode()
    cuts = range(0, records * record_bytes, record_bytes)
    values = [filling[cut : cut + record_bytes] for cut in cuts]
    timestamps = [wall_clock_ms()] * records
    return bytes(encode_batch(values, timestamps=timestamps, codec=codec))


def _measured(
    phase: Literal["produce", "fetch"],
    plan: Iterable[int],
    requests: Callable[[int], Iterator[Work]],
    *,
    connections: int,
    total: int,
) -> Figures:
    """Run the requests of each item of the plan, `connections` concurrently."""
    done: list[Work] = []
    with progress_bar(phase, total=total) as move:

        def run_requests(partition: int) -> None:
            for work in requests(partition):
                done.append(work)
                move(advance=work.records)

        began = time.perf_counter()
        with _threads(connections) as pool:
            for _ in pool.map(run_requests, plan):
                pass
        return _figures(phase, done, time.perf_counter() - began)


def _read_partition(client: Client, topic: str, partition: int) -> Iterator[Work]:
    """Read a whole partition as raw batches."""
    from tierlog.client.wire import Limits

    offset, up_to_date = 0, False
    while not up_to_date:
        began = time.perf_counter()
        fetched = client.fetch_batches(
            topic, partition, offset=offset, limits=Limits(max_bytes=FETCH_BYTES)
        )
        seconds = time.perf_counter() - began
        yield Work(fetched.next_offset - offset, len(fetched.batches), seconds)
        offset, up_to_date = fetched.next_offset, fetched.up_to_date


@contextmanager
def _threads(count: int) -> Iterator[ThreadPoolExecutor]:
    """On an interrupt or a failure, wait only for the requests that are running."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


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


def _report(phases: list[Figures], output: Output) -> None:
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
    output.table({"phases": phases}, columns, rows)
