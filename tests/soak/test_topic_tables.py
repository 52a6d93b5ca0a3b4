"""Runs of `sync`, four at once, that are killed at random: each record is a row once."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from itertools import count

import pytest

pytest.importorskip("pyiceberg")

import polars as pl

from bench.maven import fetch
from tests.fakes import spark_process
from tests.fakes.real_kafka import CACHE
from tests.fakes.soak import MINUTES, soak_seed
from tests.fakes.table_kills import KilledTable
from tests.fakes.topic_tables import (
    ROOT,
    SEGMENTS,
    JsonTable,
    TopicTable,
    check_each_once,
    runs_of,
)
from tierlog.tables.catalog import load_table
from tierlog.tables.errors_table import errors_name
from tierlog.tables.maintain import Ages, maintain_table

KILLS = 200
# The newest DuckDB for which PyPI has the extension, and what that one loads.
DUCKDB = ("duckdb==1.4.4", "duckdb-ext-avro==1.4.4.20260205", "duckdb-ext-iceberg==1.4.4.20260205")
QUERY = """
import json, sys
from pathlib import Path
import duckdb

db = duckdb.connect(config={"allow_unsigned_extensions": "true"})
for name in ("avro", "iceberg"):
    (file,) = Path(sys.prefix).rglob(f"{name}.duckdb_extension")
    db.execute(f"load '{file}'")
table = f"iceberg_scan('{sys.argv[1]}')"
rows = db.execute(f"select {sys.argv[2]} from {table} order by 1")
print(json.dumps(rows.fetchall()))
"""

ON_SPARK_KILLS = 20  # a driver takes ten seconds to start
DRIVER = """
import random, sys
from pathlib import Path
from tests.fakes.topic_tables import JsonTable, before_each_call, killed_at_call
from tests.fakes.unlucky_task import UnluckyTask
from tierlog.spark_reader.jobs.session import job_session
from tierlog.tables import spark_writer

spark_writer.RowTask = UnluckyTask
with job_session("driver", master="local[2,4]") as session:
    if killed_at := int(sys.argv[2]):
        before_each_call(killed_at_call(killed_at))
    writer = spark_writer.SparkWriter(session, task_bytes=60_000)
    JsonTable(Path(sys.argv[1])).run(writer=writer)
"""
SPARK = "4.1.4"  # Iceberg's runtime is for this line alone
RUNTIME = "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0"
SPARK_QUERY = """
import json, sys
from pyspark.sql import SparkSession

builder = SparkSession.builder.master("local[2]").config("spark.jars", sys.argv[1])
builder = builder.config("spark.sql.ansi.doubleQuotedIdentifiers", "true")
spark = builder.config("spark.ui.enabled", "false").getOrCreate()
rows = spark.read.format("iceberg").load(sys.argv[2]).selectExpr(*sys.argv[3].split(", "))
print(json.dumps(sorted(map(list, rows.collect()))))
"""


@pytest.mark.soak
def test_a_table_has_each_record_once_however_its_writers_end(tmp_path):
    dice, kills, end = random.Random(soak_seed()), 0, time.monotonic() + MINUTES * 60
    for number in count():
        table = TopicTable(tmp_path / f"{number}")
        table.folder.mkdir()
        table.put(0, 1)
        table.create()
        with runs_of(table.folder) as runs:
            for segment in range(1, SEGMENTS + 1):
                writers = [
                    runs.start(table, killed_at=dice.choice((0, dice.randrange(1, 30))))
                    for _ in "1234"
                ]
                for pid in writers:
                    if dice.random() < 0.5:
                        time.sleep(dice.random())
                        os.kill(pid, signal.SIGKILL)
                kills += sum(runs.wait(pid) == -signal.SIGKILL for pid in writers)
                check_each_once_so_far(table)
                if segment < SEGMENTS:
                    table.put(segment, segment + 1)
        table.run()
        check_each_once(table)
        if kills >= KILLS or time.monotonic() > end:
            break
    print(kills, "kills")


def check_each_once_so_far(table):
    offsets = table.rows()["offset"].to_pylist()
    assert offsets == list(range(len(offsets)))


@pytest.mark.soak
def test_json_has_each_record_once_however_its_writers_and_the_broker_end(tmp_path, monkeypatch):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    killed = KilledTable(tmp_path, random.Random(soak_seed()))
    try:
        killed.run(kills=KILLS, seconds=MINUTES * 60)
        killed.table.check_each_once()
    finally:
        killed.close()
    print(killed.kills, "kills of", killed.sent, "records")
    table, duckdb = killed.table, DuckDB(tmp_path)
    offsets, errors = sorted(table.json_rows()), sorted(table.errors())
    assert sorted(pl.scan_iceberg(table.load()).collect()["_offset"]) == offsets
    beside = load_table(table.open_catalog(), errors_name(table.name))
    for engine in (duckdb, Spark()):
        assert engine.rows(table.load(), "_offset") == [[one] for one in offsets]
        assert engine.rows(beside, '"offset"') == [[one] for one in errors]


@pytest.mark.soak
def test_a_table_that_spark_writes_has_each_record_once_over_kills_and_failures(tmp_path):
    """Two drivers at once are killed, and tasks fail after they have written."""
    dice, kills, end = random.Random(soak_seed()), 0, time.monotonic() + MINUTES * 60
    table = JsonTable(tmp_path)
    table.put_values(_value(dice))
    table.create()
    table.run()
    with (tmp_path / "drivers.log").open("ab") as log:
        while kills < ON_SPARK_KILLS and time.monotonic() < end:
            table.put_values(*(_value(dice) for _ in range(100)))
            drivers = [_driver(table, dice.choice((0, *range(1, 25))), log) for _ in "12"]
            try:
                for driver in drivers:
                    if dice.random() < 0.3:
                        time.sleep(dice.uniform(0, 10))
                        driver.kill()
                kills += sum(driver.wait(timeout=600) == -signal.SIGKILL for driver in drivers)
            finally:
                for driver in drivers:
                    driver.kill()
                    driver.wait()
            offsets = sorted([*table.json_rows(), *table.errors()])
            assert offsets == list(range(len(offsets)))
    table.run()
    table.check_each_once()
    print(kills, "kills of", len(table.values), "records")


def _value(dice):
    return {"id": dice.choice((1, 2, "x")), dice.choice("abcdefgh"): 1, "pad": "x" * 5000}


def _driver(table, killed_at, log):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", DRIVER, table.folder, str(killed_at)],
        env=spark_process.environment() | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        stdout=log,
        stderr=log,
    )


@pytest.mark.soak
def test_duckdb_and_spark_read_each_record_once_also_after_maintenance(tmp_path):
    table = TopicTable(tmp_path)
    table.put(0, 8)
    table.create()
    table.run()
    maintain_table(table.open_catalog(), table.name, Ages(), log=print)
    table.put(8)
    table.run()
    rows = table.expected()
    expected = [
        [offset, len(value)]
        for offset, value in zip(
            *(rows[one].to_pylist() for one in ("offset", "value")), strict=True
        )
    ]
    for engine in (DuckDB(tmp_path), Spark()):
        assert engine.rows(table.load(), '"offset", octet_length(value)') == expected


class DuckDB:
    """In an environment of its own."""

    def __init__(self, folder):
        environment = folder / "environment"
        for command in (
            ["venv", environment],
            ["pip", "install", "--python", environment, *DUCKDB],
        ):
            subprocess.run([sys.executable, "-m", "uv", *command], check=True)
        self._python = environment / "bin/python"

    def rows(self, table, columns):
        """In order of the first column."""
        command = [self._python, "-c", QUERY, table.metadata_location, columns]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)


class Spark:
    """A PySpark of its own, as `make test-spark` keeps it, and Iceberg's runtime."""

    def __init__(self):
        self._packages = CACHE / f"pyspark-{SPARK}"
        subprocess.run(["make", f"SPARK={SPARK}", self._packages], cwd=ROOT, check=True)
        self._jar = fetch(RUNTIME, into=CACHE / "iceberg-spark")

    def rows(self, table, columns):
        """In order of the first column."""
        command = [sys.executable, "-c", SPARK_QUERY, self._jar, table.metadata_location, columns]
        environment = os.environ | {"PYTHONPATH": str(self._packages)}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, env=environment)
        return json.loads(done.stdout)
