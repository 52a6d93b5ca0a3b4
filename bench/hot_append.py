"""Claim: the log costs little over the write itself.

* Measured: `PartitionLog.append`, which is acks=1 without HTTP: batches are checked like a
  producer's, stamped and written; bytes per second of 1 MiB batches, appends per CPU second of
  16 KiB ones.
* Peer: a bare loop that writes the same bytes to one file with `writev`.

`python -m bench hot_append`; takes half a minute.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from bench.logs import opened, produced
from bench.records import batch_of_size
from bench.report import Report, Target
from bench.rounds import interleave
from tierlog.hot_tier.log_writer import Append, AppendResult
from tierlog.record_format import native

ROUNDS: Final = 9
KIB: Final = 1 << 10
MIB: Final = 1 << 20
TOTAL_BYTES: Final = 256 * MIB


class Spent(NamedTuple):
    wall_s: float
    cpu_s: float


def measure(folder: Path, *, rounds: int) -> Report:
    native.load()
    report = Report(name="hot_append", title="Append to one partition, acks=1", peer="bare writev")
    for size, name in (MIB, "1 MiB"), (16 * KIB, "16 KiB"):
        body, count = bytearray(batch_of_size(size)), TOTAL_BYTES // size
        runs = {
            "append": _append_run(folder / "log", body, count, check_each=False),
            "checked": _append_run(folder / "log", body, count, check_each=True),
            "bare": _bare_run(folder / "bare", body, count),
        }
        _add_rows(report, name, size, interleave(runs, rounds=rounds))
    return report


def _append_run(
    folder: Path, body: bytearray, count: int, *, check_each: bool
) -> Callable[[], Spent]:
    def run() -> Spent:
        with opened(folder) as log:
            batches = produced(body)
            began = _now()
            for _ in range(count):
                (outcome,) = log.writer.append([Append(produced(body) if check_each else batches)])
                assert isinstance(outcome, AppendResult), outcome
            spent = _since(began)
        shutil.rmtree(folder)
        return spent

    return run


def _bare_run(path: Path, body: bytearray, count: int) -> Callable[[], Spent]:
    def run() -> Spent:
        file = os.open(path, os.O_WRONLY | os.O_CREAT)
        began = _now()
        for _ in range(count):
            os.writev(file, [body])
        spent = _since(began)
        os.fdatasync(file)  # as closing the log does, so that the disk is idle in the next round
        os.close(file)
        path.unlink()
        return spent

    return run


def _now() -> Spent:
    return Spent(time.perf_counter(), time.process_time())


def _since(began: Spent) -> Spent:
    now = _now()
    return Spent(now.wall_s - began.wall_s, now.cpu_s - began.cpu_s)


def _add_rows(report: Report, name: str, size: int, seen: dict[str, list[Spent]]) -> None:
    count = TOTAL_BYTES // size
    kinds = {"append": "append", "checked": "check and append"}
    for kind, shown in kinds.items():
        report.add(
            f"{name} {shown}",
            "MB/s",
            [TOTAL_BYTES / 1e6 / spent.wall_s for spent in seen[kind]],
            [TOTAL_BYTES / 1e6 / spent.wall_s for spent in seen["bare"]],
            target=Target(value=0.6) if size == MIB else None,
        )
    for kind, shown in kinds.items():
        report.add(
            f"{name} {shown}",
            "1/CPU s",
            [count / spent.cpu_s for spent in seen[kind]],
            [count / spent.cpu_s for spent in seen["bare"]],
            target=Target(value=15_000, of_ratio=False) if size != MIB else None,
        )
