"""Claim: a topic in the bucket is scanned in one process at little more than the cost of Parquet.

* Measured: CPU of the process and wall time of a scan of the values, of all columns and of a count,
  through `tierlog.dataset` over a `file://` bucket, and of the sum of values' lengths in DuckDB.
* Peer: pyarrow's dataset of a Parquet file (zstd) of the same rows, in the same calls.

Four partitions, 4 million records of 16-byte keys and values of about 130 bytes, lz4 batches.

`python -m bench dataset_scan`; takes about two minutes, and the extra `sql`.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow.dataset as ds

from bench.children import MissingPeer
from bench.report import Report, Target
from bench.rounds import interleave
from bench.spark_scan import PARTITIONS, RECORDS, Spent, fill
from tierlog.spark_reader.arrow_dataset import dataset

ROUNDS: Final = 7
COUNTS: Final = 100  # one takes less than can be measured beside the others
ROW_GROUP: Final = 1 << 20
CPU_AT_MOST: Final = {
    "values": 1.6,
    "values, one thread": 1.6,
    f"{COUNTS} counts": 1.5,
}  # of Parquet's
WALL_AT_MOST: Final = 3.0  # of Parquet's, in DuckDB
QUERY: Final = "select count(*), sum(octet_length(value)) from rows"


def measure(folder: Path, *, rounds: int) -> Report:
    if importlib.util.find_spec("duckdb") is None:
        raise MissingPeer("duckdb is not installed: the extra `sql` has it")
    report = Report(
        name="dataset_scan",
        title="Scan in one process, 4 million records, cold",
        peer="Parquet zstd, pyarrow",
    )
    fill(folder, {"t": PARTITIONS})
    topic = dataset("t", store=f"file://{folder / 'bucket'}", tier="cold")
    file = folder / "rows"
    ds.write_dataset(
        topic.scanner().to_reader(),
        file,
        format="parquet",
        file_options=ds.ParquetFileFormat().make_write_options(compression="zstd"),
        min_rows_per_group=ROW_GROUP,
        max_rows_per_group=ROW_GROUP,
    )
    works: dict[str, Callable[[Any], int]] = {
        "values": partial(_scan, columns=["value"]),
        "values, one thread": partial(_scan, columns=["value"], use_threads=False),
        "all columns": _scan,
        f"{COUNTS} counts": _count,
        "DuckDB, sum of lengths": _query,
    }
    runs: dict[str, Callable[[], Spent]] = {}
    for name, work in works.items():
        runs[name] = partial(_spend, work, topic)
        runs[f"{name}, Parquet"] = partial(_spend, work, ds.dataset(file))
    seen = interleave(runs, rounds=rounds)
    for name in works:
        ours, peer = seen[name], seen[f"{name}, Parquet"]
        cpu = Target(value=of_cpu, at_most=True) if (of_cpu := CPU_AT_MOST.get(name)) else None
        wall = Target(value=WALL_AT_MOST, at_most=True) if name.startswith("DuckDB") else None
        for what, at, target in (("CPU", 1, cpu), ("wall", 0, wall)):
            report.add(
                f"{name}, {what}", "s", [one[at] for one in ours], [one[at] for one in peer],
                target=target,
            )  # fmt: skip
    return report


def _scan(rows: Any, **options: Any) -> int:
    return sum(batch.num_rows for batch in rows.to_batches(**options))


def _count(rows: Any) -> int:
    return [int(rows.count_rows()) for _ in range(COUNTS)][-1]


def _query(rows: Any) -> int:
    import duckdb

    with duckdb.connect() as connection:
        connection.register("rows", rows)
        found = connection.execute(QUERY).fetchone()
    assert found is not None
    return int(found[0])


def _spend(work: Callable[[Any], int], rows: Any) -> Spent:
    began, cpu = time.perf_counter(), time.process_time()
    found = work(rows)
    assert found == RECORDS, found
    return Spent(time.perf_counter() - began, time.process_time() - cpu)
