"""Claim: raw bytes leave the broker about as fast as from a static file server, from either tier.

* Measured: throughput, and CPU of the server per gigabyte, of ranges of a sealed segment
  (`/segments/0` with `Range`) and of whole batches (`/records`, raw), of 64 KiB, 1 MiB and 16 MiB
  at random aligned positions; hot, and cold from cached chunks.
* Peer: nginx, one process, sendfile on, the same bytes from the same page cache.
* wrk loads both over 8 connections. Batches are of 16 KiB, so that ranges end where batches do.

`python -m bench raw_fetch`; takes about three minutes, and nginx and wrk.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from bench import children, load
from bench.children import Server
from bench.load import Load, Requests
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES
from tierlog.record_format.batch import parse_header

ROUNDS: Final = 5
KIB: Final = 1 << 10
MIB: Final = 1 << 20
BATCH_BYTES: Final = 16 * KIB
SEGMENT_BYTES: Final = 128 * MIB
DURATION_S: Final = 2
SIZES: Final = {64 * KIB: ("64 KiB", 0.35), MIB: ("1 MiB", 0.6), 16 * MIB: ("16 MiB", 0.75)}


class Route(NamedTuple):
    """A route to request the bytes: segments or batches of a topic."""

    name: str
    topic: str
    by_offset: bool


ROUTES: Final = (
    Route("hot segment", "hot", by_offset=False),
    Route("hot batches", "hot", by_offset=True),
    Route("cold segment", "cold", by_offset=False),
    Route("cold batches", "cold", by_offset=True),
)


def measure(folder: Path, *, rounds: int) -> Report:
    for needed in ("wrk", "nginx"):
        children.program(needed)
    report = Report(
        name="raw_fetch", title="Raw fetch of a sealed segment, 8 connections", peer="nginx"
    )
    hot = folder / "data" / "hot-0" / f"{0:020d}.log"
    with (
        children.broker(folder, "--cache-bytes", str(1 << 30)) as ours,
        children.nginx(folder, root=hot.parent) as nginx,
    ):
        batch_records = _fill(ours)
        for size, (name, throughput) in SIZES.items():
            runs = {"nginx": _nginx_run(nginx, f"/{hot.name}", size, folder)}
            runs |= {
                route.name: _our_run(ours, route, size, batch_records, folder) for route in ROUTES
            }
            _add_rows(report, name, interleave(runs, rounds=rounds), throughput)
    return report


def _fill(broker: Server) -> int:
    """Store a sealed segment hot, and the same one cold; returns the records per batch."""
    batch = batch_of_size(BATCH_BYTES)
    body = batch * (8 * MIB // BATCH_BYTES)
    config = {"segment.bytes": SEGMENT_BYTES, "retention.ms": -1, "index.interval.bytes": 4096}
    with Client(broker.url, timeout_s=120) as client:
        for topic, local_bytes in ("hot", -2), ("cold", 0):
            client.create_topic(topic, config={**config, "local.retention.bytes": local_bytes})
            for _ in range(SEGMENT_BYTES // len(body)):
                client.produce_batches(topic, body, partition=0, acks="1")
            client.offload(topic, wait_ms=60_000)
            segment = next(client.segments(topic, 0))
            assert segment.size_bytes == SEGMENT_BYTES, segment
            _await_tier(client, topic, "cold" if topic == "cold" else "both")
    return parse_header(batch).record_count


def _await_tier(client: Client, topic: str, tier: str) -> None:
    for _ in range(600):
        if next(client.segments(topic, 0)).tier == tier:
            return
        time.sleep(0.1)
    raise RuntimeError(f"the segment of {topic} did not become {tier}")


def _nginx_run(server: Server, path: str, size: int, folder: Path) -> Callable[[], Load]:
    requests = Requests([f"GET {path} Range=bytes={at}-{at + size - 1}" for at in _positions(size)])
    return lambda: load.run(server, requests, folder=folder, duration_s=DURATION_S)


def _our_run(
    server: Server, route: Route, size: int, batch_records: int, folder: Path
) -> Callable[[], Load]:
    base = f"/v1/topics/{route.topic}/partitions/0"
    if route.by_offset:
        lines = [
            f"GET {base}/records?offset={at // BATCH_BYTES * batch_records}&max_bytes={size}"
            f" Accept={RECORD_BATCHES}"
            for at in _positions(size)
        ]
    else:
        lines = [
            f"GET {base}/segments/0 Range=bytes={at}-{at + size - 1}" for at in _positions(size)
        ]
    return lambda: load.run(server, Requests(lines), folder=folder, duration_s=DURATION_S)


def _positions(size: int) -> list[int]:
    """Where the requests begin; the same for all servers."""
    rng = random.Random(size)
    return [rng.randrange(SEGMENT_BYTES // size) * size for _ in range(1024)]


def _add_rows(
    report: Report, size: str, seen: Mapping[str, Sequence[Load]], throughput: float
) -> None:
    peer = seen["nginx"]
    for route in ROUTES:
        ours = seen[route.name]
        report.add(
            f"{size} {route.name}",
            "MB/s",
            [one.bytes_per_s / 1e6 for one in ours],
            [one.bytes_per_s / 1e6 for one in peer],
            target=Target(value=throughput),
        )
    for route in ROUTES:
        report.add(
            f"{size} {route.name}, server",
            "CPU s/GB",
            [one.cpu_s_per_gb for one in seen[route.name]],
            [one.cpu_s_per_gb for one in peer],
        )
