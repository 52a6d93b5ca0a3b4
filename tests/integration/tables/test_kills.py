"""A table that follows a broker's topic, while both are killed."""

import random

import pytest

pytest.importorskip("pyiceberg")

import polars as pl

from tests.fakes.table_kills import KilledTable


def test_a_table_has_each_record_once_over_kills_of_the_broker_and_of_four_writers(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    killed = KilledTable(tmp_path, random.Random(4))
    try:
        killed.run(kills=3)
        killed.table.check_each_once()
    finally:
        killed.close()
    assert killed.kills >= 3
    polars = pl.scan_iceberg(killed.table.load()).select("_offset").collect()
    assert sorted(polars["_offset"]) == sorted(killed.table.json_rows())
