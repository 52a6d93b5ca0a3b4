"""The commands on executors in their own processes, with our code shipped to them as a zip."""

import json
import os
import subprocess
import sys

import pytest

from tests.fakes.spark_process import run_python
from tierlog.spark_reader.jobs.package import build_zip

CLUSTER = "local-cluster[1,2,1024]"  # an executor of two cores
CHILD = """
import json, sys
import pyarrow as pa
from tierlog.spark_reader.jobs.session import job_session
from tierlog.cli.program import run_command

def where(batches):
    from tierlog.record_format import arrow
    from tierlog.spark_reader import split_reader
    for batch in batches:
        files = [arrow.__file__, split_reader.__file__]
        yield pa.RecordBatch.from_pydict({"file": files})

few = {"spark.sql.shuffle.partitions": "2"}
with job_session("cluster", master=sys.argv[1], config=few) as session:
    rows = session.range(2, numPartitions=2).mapInArrow(where, "file string").collect()
    print(json.dumps(sorted({row.file for row in rows})))
    for command in json.loads(sys.argv[2]):  # each reuses the active session
        assert run_command(command) == 0, command
        print()
"""


@pytest.mark.spark
@pytest.mark.soak
def test_jobs_run_on_a_cluster_with_the_code_shipped_as_a_zip(tiers, tmp_path):
    chart, out = tmp_path / "stats.svg", tmp_path / "für Spark"
    store = ("--store", tiers.store_url)
    table = (
        *("flights", *store, "--server", tiers.url),
        *("--catalog", f"sqlite:///{tmp_path}/catalog.db", "--warehouse", f"file://{tmp_path}/t"),
    )
    commands = [
        ("replay", "flights", *store, "--server", tiers.url, "--to-parquet", str(out)),
        ("storage", "verify", "flights", "--spark", *store),
        ("stats", "flights", *store, "--picture", str(chart)),
        ("table", "create", *table),
        ("table", "sync", *table, "--spark"),
    ]
    files, replayed, verified, counted, _, synced = run_python(
        CHILD, CLUSTER, json.dumps(commands), cwd=tmp_path
    )
    assert len(files) == 2, files
    assert all("/tierlog.zip/" in file for file in files), files
    assert replayed["records"] == 4800
    assert any(path.name.startswith("date=") for path in out.iterdir())
    assert verified["ok"] is True
    cold = sum(tiers.cold_end("flights", partition) for partition in range(3))
    assert verified["checked"]["records"] == cold
    assert sum(one["records"] for one in counted["hours"]) == cold
    assert chart.read_text().startswith("<svg")
    assert (synced["commits"], synced["records"]) == (1, 4800)


def run_from_zip(path, code, **env):
    result = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(path), **env},
        cwd=path.parent,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def test_the_zip_is_reproducible(tmp_path):
    first, second = build_zip(tmp_path / "one.zip"), build_zip(tmp_path / "two.zip")
    assert first.read_bytes() == second.read_bytes()
    code = (
        "import pyspark_tierlog; from tierlog import record_format; print(record_format.__file__)"
    )
    assert run_from_zip(first, code).startswith(str(first))


def test_kernels_from_the_zip_need_no_writable_cache_folder(tmp_path):
    home = tmp_path / "home"
    home.touch()  # not a folder, so not writable
    code = """
from tierlog.record_format.arrow_columns import _micros, __file__
print(__file__, _micros(5))
"""
    env = {"HOME": str(home), "XDG_CACHE_HOME": str(home)}
    path = build_zip(tmp_path / "tierlog.zip")
    kernel = f"{path}/tierlog/record_format/arrow_columns.py"
    assert run_from_zip(path, code, **env) == f"{kernel} 5000\n"
