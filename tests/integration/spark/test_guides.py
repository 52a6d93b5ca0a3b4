"""Every Python block of the guides, and the first of README, runs as printed but for addresses, and
for a time that the tests' records are older than.
"""

import re
from pathlib import Path

import pytest

from pyspark_tierlog import DefaultSource
from tests.fakes.two_tiers import two_tiers
from tierlog.client.client import Client

GUIDES = Path(__file__).parents[3] / "docs" / "guides"


def code_of(page):
    return re.findall(r"^```python\n(.*?)^```$", (GUIDES / page).read_text(), re.MULTILINE | re.S)


def run(page, tiers, folder, *, count=None, **namespace):
    """Run the blocks in order, or the first `count`, in one namespace."""
    changed = {
        "s3://bucket/prefix": tiers.store_url,
        "http://127.0.0.1:8640": tiers.url,
        "/data/": f"{folder}/",
        "2026-06-01T00:00:00Z": "2023-06-01T00:00:00Z",
    }
    for code in code_of(page)[:count]:
        for printed, real in changed.items():
            code = code.replace(printed, real)
        try:
            exec(compile(code, page, "exec"), namespace)
        except ModuleNotFoundError as missing:
            if missing.name not in {"polars", "duckdb", "dask"}:  # optional
                raise
    return namespace


@pytest.mark.spark
def test_the_guide_from_kafkas_source_runs(spark, tmp_path):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights")
        tiers.produce("flights", 300)
        tiers.offload("flights")
        tiers.create("copy")
        namespace = run("from-kafka-source.md", tiers, tmp_path, spark=spark)
        assert namespace["part"].count() == 100 + 50 + 300
        copied = sum(
            tiers.broker.partition("copy", number).offsets().log_end_offset for number in range(3)
        )
        assert copied == 900


@pytest.mark.spark
@pytest.mark.usefixtures("spark")
def test_the_spark_block_of_the_readme_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with two_tiers(tmp_path / ".tierlog") as tiers, Client(tiers.url) as client:
        tiers.create("hello", partitions=1)
        client.produce_encoded("hello", [b"%d" % n for n in range(1, 1001)], partition=0)
        tiers.offload("hello")
        run("../../README.md", tiers, tmp_path, count=1)
    assert re.findall(r"\|\s+(\d+)\|\s+(\d+)\|", capsys.readouterr().out) == [
        ("997", "998"),
        ("998", "999"),
        ("999", "1000"),
    ]


@pytest.mark.spark
def test_the_spark_page_runs(spark, tiers, tmp_path):
    namespace = run("../spark.md", tiers, tmp_path, spark=spark)
    spark.dataSource.register(DefaultSource)  # as before, without the session's settings
    assert (namespace["frame"].count(), namespace["table"].num_rows) == (4800, 4800)


def test_the_guide_to_reading_with_python_runs(tiers, tmp_path):
    namespace = run("read-with-python.md", tiers, tmp_path)
    cold = sum(tiers.cold_end("flights", partition) for partition in range(3))
    assert namespace["table"].num_rows == cold
    assert namespace["rows"] == 4800 - 100
    assert namespace["per_hour"].sum() == cold
    if "last" in namespace:  # Dask is there
        assert namespace["last"].sum() == sum(
            tiers.cold_end("flights", partition) - 1 for partition in range(3)
        )
    assert list((tmp_path / "flights").rglob("*.parquet"))
