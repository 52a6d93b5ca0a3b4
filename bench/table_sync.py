"""Claim: a topic becomes an Iceberg table about as fast as Spark rewrites the same rows.

* Measured: rows a second of `tierlog table sync` of ten million records, straight from a `file://`
  bucket into a new table in a catalog of SQLite, in one process.
* On Spark: the same with `--spark`, in the peer's session.
* Peer: Spark's rewrite, in a session of two cores, of a Parquet file (zstd) of these rows as files
  of the same codec by day.
* Lag: with `--follow --every 5s` on a broker, a record each second: from before its produce until
  the table's position is past it.

Four partitions, 16-byte keys and values of about 130 bytes, lz4 batches.

`python -m bench table_sync`; takes about ten minutes. BENCH_RECORDS is another number of records.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import tierlog
from bench.children import MissingPeer, broker, running
from bench.report import Report, Target
from bench.rounds import interleave, wall_seconds
from bench.spark_scan import PARTITIONS, fill, session

ROUNDS: Final = 3
RECORDS: Final = int(os.environ.get("BENCH_RECORDS", "10000000"))
OF_PEER: Final = 0.9
TRIGGER_S: Final = 5
LAG_S: Final = TRIGGER_S + 10
FOLLOWED: Final = 20  # records, one a second


def measure(folder: Path, *, rounds: int) -> Report:
    for name, extra in (("pyiceberg", "iceberg"), ("pyspark", "spark")):
        if importlib.util.find_spec(name) is None:
            raise MissingPeer(f"{name} is not installed: the extra `{extra}` has it")
    report = Report(
        name="table_sync",
        title=f"A topic as an Iceberg table, {RECORDS:,} records",
        peer="Spark, Parquet to Parquet",
    )
    fill(folder, {"t": PARTITIONS}, records=RECORDS)
    numbers = itertools.count()
    last = _sync(folder, next(numbers))
    with session(folder) as spark:
        rows = folder / "rows.parquet"
        synced = spark.read.option("recursiveFileLookup", "true").parquet(str(last))
        synced.write.option("compression", "zstd").parquet(str(rows))

        def rewrite() -> None:
            frame = spark.read.parquet(str(rows)).selectExpr("*", "date(timestamp) day")
            written = frame.write.option("compression", "zstd").partitionBy("day")
            written.mode("overwrite").parquet(str(folder / "rewritten"))

        def sync() -> None:
            shutil.rmtree(_sync(folder, next(numbers)))

        def sync_on_spark() -> None:
            shutil.rmtree(_sync(folder, next(numbers), spark))

        runs: dict[str, Callable[[], float]] = {
            "sync": lambda: RECORDS / wall_seconds(sync),
            "on Spark": lambda: RECORDS / wall_seconds(sync_on_spark),
            "rewrite": lambda: RECORDS / wall_seconds(rewrite),
        }
        seen = interleave(runs, rounds=rounds)
    report.add("sync", "rows/s", seen["sync"], seen["rewrite"], target=Target(value=OF_PEER))
    report.add("sync on Spark", "rows/s", seen["on Spark"], seen["rewrite"])
    sizes = [_bytes_of(one) / RECORDS for one in (last, folder / "bucket")]
    report.add("a row in the table (peer: in the segments)", "bytes", sizes[:1], sizes[1:])
    most = Target(value=LAG_S, at_most=True, of_ratio=False)
    report.add(f"lag, every {TRIGGER_S} s, the longest", "s", [_lag_s(folder)], target=most)
    return report


def _sync(folder: Path, number: int, spark: Any = None) -> Path:
    """A new table's files."""
    # Imported here: it is an extra.
    from tierlog.tables.catalog import create_table, open_catalog
    from tierlog.tables.spark_writer import SparkWriter
    from tierlog.tables.step_files import LocalWriter
    from tierlog.tables.sync import TableSync, begin_tables, read_options

    writer = LocalWriter() if spark is None else SparkWriter(spark)
    store = {"store": f"file://{folder}/bucket", "tier": "cold", "includeHeaders": "true"}
    options = read_options(store, "t")
    catalog = open_catalog(f"sqlite:///{folder}/catalog.db", {"warehouse": f"file://{folder}"})
    ((position, _),) = begin_tables(options)
    name = ("tables", f"t{number}")
    create_table(catalog, name, position)
    run = TableSync(catalog=catalog, name=name, topic="t", options=options, writer=writer)
    done = run.sync_table()
    assert done.records == RECORDS, done
    return folder / "tables" / name[-1] / "data"


def _bytes_of(folder: Path) -> int:
    return sum(one.stat().st_size for one in folder.rglob("*") if one.is_file())


def _lag_s(folder: Path) -> float:
    """The longest, of records that are sent one a second while a run follows them."""
    from tierlog.tables.catalog import load_table, open_catalog, position_of

    url, warehouse = f"sqlite:///{folder}/followed.db", f"file://{folder}/followed"
    sent: list[float] = []
    longest = 0.0
    with broker(folder) as server, tierlog.Client(server.url) as client:
        client.create_topic("followed", partitions=1)
        at = ["--catalog", url, "--warehouse", warehouse, "--server", server.url]
        tables = [sys.executable, "-m", "tierlog.cli.main", "table"]
        subprocess.run([*tables, "create", "followed", *at], check=True, stdout=subprocess.DEVNULL)
        follow = [*tables, "sync", "followed", *at, "--follow", "--every", f"{TRIGGER_S}s"]
        with running(follow, log=folder / "follow.log"):
            catalog = open_catalog(url, {"warehouse": warehouse})

            def send() -> None:
                with client.producer() as producer:
                    producer.send("followed", b"x", partition=0)

            def reached() -> int:
                table = load_table(catalog, ("tierlog", "followed"))
                return position_of(table).offsets.get(0, 0)

            send()
            while not reached():  # the run has begun
                time.sleep(0.05)
            done = 0
            while done < FOLLOWED:
                if len(sent) < FOLLOWED and (not sent or time.monotonic() - sent[-1] >= 1):
                    sent.append(time.monotonic())
                    send()
                found, now = reached() - 1, time.monotonic()
                longest = max([longest, *(now - one for one in sent[done:found])])
                done = max(done, found)
                time.sleep(0.05)
    return longest
