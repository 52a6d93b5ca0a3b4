"""Claim: a broker is ready at once, however much it has stored.

* Measured on an empty folder: the time from the start of the process until /readyz is 200, and its
  memory then and once it has been given work, for which it loads its native kernels.
* Measured after kill -9 with 2 GB in 10 partitions, without a checkpoint of what was flushed, so
  that every batch is checked: the time until ready, for batches of 1 MiB and of 16 KiB.
* Measured with 1,000 partitions, after kill -9: the time until ready, memory and threads.

Memory is the resident set. Files are in the page cache, as after a crash of the process.

`python -m bench broker_start`; takes about a minute and 4 GB of disk.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx2

from bench.children import ROOT, free_port
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import resident_mib_of
from tierlog.client.client import Client

ROUNDS: Final = 5
MIB: Final = 1 << 20
TOTAL_BYTES: Final = 2_000_000_000
PARTITIONS: Final = 10
MANY_PARTITIONS: Final = 1000
KERNELS_TIMEOUT_S: Final = 60
RECOVERY_POINTS: Final = "recovery-point-offset-checkpoint"


def measure(folder: Path, *, rounds: int) -> Report:
    report = Report(name="broker_start", title="From the start of the process until ready", peer="")
    _empty(report, folder / "rest", rounds)
    for size, name in (MIB, "1 MiB"), (16 << 10, "16 KiB"):
        _after_kill(report, folder / f"killed-{size}", size, name, rounds)
    _many_partitions(report, folder / "many", rounds)
    return report


def _empty(report: Report, folder: Path, rounds: int) -> None:
    ready, before, after = [], [], []
    for number in range(rounds):
        with _started(folder / str(number)) as broker:
            ready.append(broker.ready_s)
            before.append(broker.resident_mb())
            _await_kernels(broker)
            after.append(broker.resident_mb())
    report.add("empty: ready", "s", ready, target=_at_most(1.5))
    report.add("empty: memory when ready", "MB", before, target=_at_most(120))
    report.add("empty: memory once it has worked", "MB", after, target=_at_most(250))


def _after_kill(report: Report, folder: Path, size: int, name: str, rounds: int) -> None:
    batch = batch_of_size(size)
    body = batch * (4 * MIB // len(batch))
    with _started(folder) as broker, Client(broker.url) as client:
        config = {"max.message.bytes": 2 * MIB}
        client.create_topic("t", partitions=PARTITIONS, config=config)
        for number in range(TOTAL_BYTES // len(body)):
            client.produce_batches("t", body, partition=number % PARTITIONS, acks="1")
    ready = []
    for _ in range(rounds):
        (folder / "data" / RECOVERY_POINTS).unlink(missing_ok=True)
        with _started(folder) as broker:
            ready.append(broker.ready_s)
    report.add(f"killed with 2 GB of {name} batches: ready", "s", ready, target=_at_most(2))


def _many_partitions(report: Report, folder: Path, rounds: int) -> None:
    with _started(folder) as broker, Client(broker.url, timeout_s=120) as client:
        for number in range(10):
            client.create_topic(f"t{number}", partitions=MANY_PARTITIONS // 10)
    ready, before, memory, threads = [], [], [], []
    for _ in range(rounds):
        with _started(folder) as broker:
            ready.append(broker.ready_s)
            before.append(broker.resident_mb() * 1e6 / MIB)
            _await_kernels(broker)
            memory.append(broker.resident_mb() * 1e6 / MIB)
            threads.append(float(len(list(Path(f"/proc/{broker.pid}/task").iterdir()))))
    report.add("1,000 partitions: ready", "s", ready, target=_at_most(3))
    report.add("1,000 partitions: memory when ready", "MiB", before, target=_at_most(200))
    report.add("1,000 partitions: memory once it has worked", "MiB", memory, target=_at_most(200))
    report.add("1,000 partitions: threads", "", threads)


def _at_most(value: float) -> Target:
    return Target(value=value, at_most=True, of_ratio=False)


class _Broker:
    def __init__(self, pid: int, url: str, ready_s: float) -> None:
        self.pid, self.url, self.ready_s = pid, url, ready_s

    def resident_mb(self) -> float:
        return resident_mib_of(self.pid) * (1 << 20) / 1e6

    def has_mapped(self, name: str) -> bool:
        return name in Path(f"/proc/{self.pid}/maps").read_text()


@contextmanager
def _started(folder: Path) -> Iterator[_Broker]:
    """`tierlog serve`, timed from its exec; killed with SIGKILL."""
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    command = [sys.executable, "-m", "tierlog.cli.main", "serve"]
    command += ["--data-dir", str(folder / "data"), "--store", f"file://{folder / 'bucket'}"]
    command += ["--listen", f"127.0.0.1:{port}", "--disk-reserve-bytes", "0"]
    with (folder / "broker.log").open("ab") as log:
        began = time.perf_counter()
        child = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT)
        try:
            url = f"http://127.0.0.1:{port}"
            yield _Broker(child.pid, url, _await_ready(child, url, began))
        finally:
            child.send_signal(signal.SIGKILL)
            child.wait()


def _await_ready(child: subprocess.Popen[bytes], url: str, began: float) -> float:
    with httpx2.Client(timeout=10) as client:
        while child.poll() is None:
            try:
                if client.get(f"{url}/readyz").status_code == 200:
                    return time.perf_counter() - began
            except httpx2.TransportError:
                time.sleep(0.002)
    raise RuntimeError("the broker ended before it was ready")


def _await_kernels(broker: _Broker) -> None:
    """Produce enough for the kernels to be loaded, then wait until numba's library is mapped and
    memory no longer changes.
    """
    batch, topic = batch_of_size(16 << 10), f"work-{time.monotonic_ns()}"
    with Client(broker.url) as client:
        client.create_topic(topic)
        for _ in range(2):
            client.produce_batches(topic, batch * (2 * MIB // len(batch)), partition=0)
    deadline, last = time.monotonic() + KERNELS_TIMEOUT_S, -1.0
    while time.monotonic() < deadline:
        now = broker.resident_mb()
        if now == last and broker.has_mapped("llvmlite"):
            return
        last = now
        time.sleep(0.5)
    raise RuntimeError(f"the broker's memory has not settled within {KERNELS_TIMEOUT_S} s")
