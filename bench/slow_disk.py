"""Claim: readers of the tail do not wait for readers of old data on a slow disk.

* Measured: a fetch of the one record at the end of a topic, while 8 connections read 512 MiB of
  another topic in raw batches of 1 MiB, not in the page cache, from a disk that gives the broker
  50 MB/s; its peer is the same fetch alone.
* The kernel throttles the disk (cgroup v1, `blkio.throttle.read_bps_device`) for the broker's
  process alone. That needs root and this controller; without them the claim is skipped.

`python -m bench slow_disk`; takes about a minute, and wrk.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Final

from bench import children, load
from bench.children import MissingPeer, Server
from bench.load import Load, Requests
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave
from bench.wire import Wire
from tierlog.client.client import Client
from tierlog.client.wire import RECORD_BATCHES
from tierlog.record_format.batch import parse_header

ROUNDS: Final = 3
MIB: Final = 1 << 20
OLD_BYTES: Final = 512 * MIB
DISK_BYTES_PER_S: Final = 50_000_000
SCAN_S: Final = 6
OCTETS: Final = "application/octet-stream"
_RECORDS: Final = "/v1/topics/{}/partitions/0/records"
_BLKIO: Final = Path("/sys/fs/cgroup/blkio")


def measure(folder: Path, *, rounds: int) -> Report:
    children.program("wrk")
    report = Report(
        name="slow_disk", title="Tail fetch beside 8 readers of old data at 50 MB/s", peer="alone"
    )
    with children.broker(folder) as broker:
        lines = _fill(broker)
        log = folder / "data" / "old-0" / f"{0:020d}.log"
        with _throttled(broker, log):
            with Wire(broker) as wire:
                fetch = wire.request(f"GET {_RECORDS.format('tail')}?offset=0&max_records=1")
            scan = partial(load.run, broker, Requests(lines), folder=folder, duration_s=SCAN_S)
            scans: list[Load] = []

            def beside() -> list[float]:
                _evict(log)
                seen, read = load.beside(broker, fetch, scan, after_s=1, for_s=SCAN_S - 2)
                scans.append(read)
                return seen

            def alone() -> list[float]:
                return load.timed(broker, fetch, for_s=1)

            seen = interleave({"beside": beside, "alone": alone}, rounds=rounds)
    targets = {0.99: Target(value=25.0, at_most=True, of_ratio=False)}
    report.add_latency("tail fetch", seen["beside"], seen["alone"], targets=targets)
    read = [scan.bytes_per_s / 1e6 for scan in scans[-rounds:]]
    report.add("old data read meanwhile", "MB/s", read)
    return report


def _fill(broker: Server) -> list[str]:
    """Write old data to one log, and a tail to another; returns the readers' requests, in order."""
    batch = batch_of_size(MIB)
    records = parse_header(batch).record_count
    with Client(broker.url) as client:
        config = {"retention.ms": -1, "max.message.bytes": 2 * MIB, "remote.storage.enable": False}
        client.create_topic("old", config=config)
        client.create_topic("tail")
        for _ in range(OLD_BYTES // MIB):
            client.produce_batches("old", batch, partition=0, acks="1")
        client.produce_batches("old", batch, partition=0)
        client.produce("tail", ["x" * 100])
    path = _RECORDS.format("old")
    offsets = range(0, OLD_BYTES // MIB * records, records)
    rest = f"&max_bytes={MIB} Accept={RECORD_BATCHES}"
    return [f"GET {path}?offset={offset}{rest}" for offset in offsets]


@contextmanager
def _throttled(broker: Server, log: Path) -> Iterator[None]:
    """Limit the bytes per second that the broker reads from the disk that has `log`."""
    group = _BLKIO / f"tierlog-bench-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise MissingPeer(f"the disk cannot be throttled here: {error}") from error
    try:
        device = log.stat().st_dev
        rule = f"{os.major(device)}:{os.minor(device)} {DISK_BYTES_PER_S}"
        (group / "blkio.throttle.read_bps_device").write_text(rule)
        (group / "cgroup.procs").write_text(str(broker.pid))
        yield
    finally:
        (_BLKIO / "cgroup.procs").write_text(str(broker.pid))
        group.rmdir()


def _evict(log: Path) -> None:
    """Evict the file from the page cache. It is synced first, because dirty pages would stay."""
    fd = os.open(log, os.O_RDWR)
    try:
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(fd)
