"""Claim: one partition is read by as many tasks as there are cores, cheaply, and a short time range
reads little.

* One topic of one partition, 4 million records over 30 days, lz4 batches, all of it in a `file://`
  bucket, no broker.
* Measured: the same query (all columns to the noop sink) with the whole session bound to one core,
  and to two; the target is 0.85 of twice as fast.
* Measured: CPU of the Python workers per additional task, from scans in splits of 64 MiB and of
  8 MiB; the workers' largest resident set with splits of 64 MiB; the share of all bytes in the
  bucket that the workers read for one hour of the 30 days.

`python -m bench spark_source`; takes about two minutes, and pyspark with a Java.
"""

from __future__ import annotations

import importlib.util
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.children import MissingPeer
from bench.records import START_MS
from bench.report import Report, Target
from bench.rounds import cpu_seconds_of, process_tree, wall_seconds
from bench.spark_scan import RECORDS, RECORDS_PER_REQUEST, Request, fill, session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROUNDS: Final = 3
MIB: Final = 1 << 20
DAYS: Final = 30
HOUR_MS: Final = 3_600_000
STEP_MS: Final = DAYS * 24 * HOUR_MS // RECORDS
LARGE_SPLITS: Final = 64 << 20
SMALL_SPLITS: Final = 8 << 20


def measure(folder: Path, *, rounds: int) -> Report:
    if importlib.util.find_spec("pyspark") is None:
        raise MissingPeer("pyspark is not installed: the extra `spark` has it")
    report = Report(name="spark_source", title="One partition, 30 days, in the bucket", peer="")
    fill(folder, {"t": 1}, _requests)
    stored_bytes = sum(path.stat().st_size for path in (folder / "bucket").rglob("*.log"))
    walls: dict[int, list[float]] = {}
    for cores in (1, 2):
        with _bound_to(cores), session(folder, cores=cores) as spark:
            run = _scan(spark, folder)
            wall_seconds(run)  # loads kernels, starts workers
            walls[cores] = [wall_seconds(run) for _ in range(rounds)]
            if cores == 2:
                _add_worker_rows(report, spark, folder, stored_bytes, rounds)
    report.add(
        "all columns, two cores over one",
        "x",
        [one / two for one, two in zip(walls[1], walls[2], strict=True)],
        target=Target(value=2 * 0.85, of_ratio=False),
    )
    report.add("all columns, one core", "M rows/s", [RECORDS / 1e6 / one for one in walls[1]])
    report.add("all columns, two cores", "M rows/s", [RECORDS / 1e6 / two for two in walls[2]])
    return report


def _add_worker_rows(
    report: Report, spark: SparkSession, folder: Path, stored_bytes: int, rounds: int
) -> None:
    resident = max(_for_each_worker(spark, _peak_resident_bytes)) / MIB
    at_most = Target(value=300, at_most=True, of_ratio=False)
    report.add("largest Python worker", "MiB", [resident], target=at_most)
    per_task_ms = [_cpu_per_task_ms(spark, folder) for _ in range(rounds)]
    at_most = Target(value=10, at_most=True, of_ratio=False)
    report.add("CPU of the Python workers for one more task", "ms", per_task_ms, target=at_most)
    shares = [_hour_bytes(spark, folder) / stored_bytes * 100 for _ in range(rounds)]
    at_most = Target(value=2, at_most=True, of_ratio=False)
    report.add("one hour of 30 days: bytes read", "%", shares, target=at_most)


@contextmanager
def _bound_to(cores: int) -> Iterator[None]:
    """Bind this process, and what it starts meanwhile, to the first `cores` cores."""
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, set(sorted(mine)[:cores]))
    try:
        yield
    finally:
        os.sched_setaffinity(0, mine)


def _requests(records: int, seed: int) -> Iterator[Request]:
    rng = random.Random(5 + seed)
    notes = [b"%x" % rng.getrandbits(1600) for _ in range(997)]
    for first in range(0, records, RECORDS_PER_REQUEST):
        offsets = range(first, first + RECORDS_PER_REQUEST)
        values = [b'{"id":%d,"note":"%s"}' % (n, notes[n % 997]) for n in offsets]
        yield Request(values, None, [START_MS + n * STEP_MS for n in offsets])


def _reader(spark: SparkSession, folder: Path, **options: str | int) -> DataFrame:
    options |= {"store": f"file://{folder / 'bucket'}", "subscribe": "t", "tier": "cold"}
    return spark.read.format("tierlog").options(**options).load()


def _drain(frame: DataFrame) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _scan(spark: SparkSession, folder: Path) -> Callable[[], None]:
    return lambda: _drain(_reader(spark, folder, splitBytes=LARGE_SPLITS))


def _read_hour(spark: SparkSession, folder: Path, **options: str | int) -> DataFrame:
    """The records of one hour in the middle."""
    begin = START_MS + 15 * 24 * HOUR_MS
    times = {"startingTimestamp": begin, "endingTimestamp": begin + HOUR_MS}
    return _reader(spark, folder, **times, **options)


def _cpu_per_task_ms(spark: SparkSession, folder: Path) -> float:
    spent, tasks = [], []
    for split_bytes in (LARGE_SPLITS, SMALL_SPLITS):
        before = sum(_for_each_worker(spark, cpu_seconds_of))
        frame = _reader(spark, folder, splitBytes=split_bytes)
        _drain(frame)
        spent.append(sum(_for_each_worker(spark, cpu_seconds_of)) - before)
        tasks.append(frame.rdd.getNumPartitions())
    assert tasks[1] > tasks[0] + 20, tasks
    more: int = tasks[1] - tasks[0]
    return (spent[1] - spent[0]) / more * 1000


def _hour_bytes(spark: SparkSession, folder: Path) -> float:
    before = sum(_for_each_worker(spark, _read_bytes))
    frame = _read_hour(spark, folder)
    wanted = HOUR_MS // STEP_MS
    assert abs(frame.count() - wanted) <= 1
    return sum(_for_each_worker(spark, _read_bytes)) - before


def _for_each_worker(spark: SparkSession, figure: Callable[[int], float]) -> list[float]:
    """A figure of each Python worker of this session."""
    found = []
    for pid in process_tree(os.getpid()):
        with suppress(OSError):
            if b"pyspark.daemon" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(figure(pid))
    assert found, f"{spark.sparkContext.appName} has no Python worker"
    return found


def _peak_resident_bytes(pid: int) -> float:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return float(line.split()[1]) * 1024
    raise AssertionError("Linux reports a process's largest resident set")


def _read_bytes(pid: int) -> float:
    """Bytes that the process received from read(2) and similar calls, from any source."""
    return float(Path(f"/proc/{pid}/io").read_text().split()[1])
