"""Rows become files of one day each, in the order in which they came, in bounded memory."""

import random
from datetime import UTC, datetime, timedelta

import pytest

pytest.importorskip("pyiceberg")

import pyarrow as pa
import pyarrow.parquet as pq
from pyiceberg.io.pyarrow import PyArrowFileIO, schema_to_pyarrow

from tierlog.record_format.arrow_schema import SCHEMA
from tierlog.tables import data_files
from tierlog.tables.catalog import RAW
from tierlog.tables.data_files import OPEN_FILES, DayFiles

ARROW = pa.schema([SCHEMA.field(field.name) for field in RAW.fields])
DAY_US = 86_400_000_000


def rows_of(times, start=0):
    rows = len(times)
    columns = {
        "key": [None] * rows,
        "value": [b"v" * 100] * rows,
        "partition": [0] * rows,
        "offset": range(start, start + rows),
        "timestamp": times,
        "headers": [[]] * rows,
    }
    return pa.record_batch(
        [pa.array(columns[name], ARROW.field(name).type) for name in ARROW.names], schema=ARROW
    )


def write_files(tmp_path, batches):
    files = DayFiles(PyArrowFileIO(), str(tmp_path), schema_to_pyarrow(RAW))
    for batch in batches:
        files.add_rows(batch)
    return [pq.read_table(path) for path in files.close()]


def days_of(file):
    return {time.date() for time in file["timestamp"].to_pylist()}


@pytest.mark.parametrize("waiting_bytes", [1 << 20, 2000])
def test_each_file_has_one_day_and_the_order_of_the_log(tmp_path, monkeypatch, waiting_bytes):
    monkeypatch.setattr(data_files, "WAITING_BYTES", waiting_bytes)
    dice = random.Random(7)
    days = [dice.randrange(-5, 3 * OPEN_FILES) for _ in range(900)]
    times = [day * DAY_US + dice.randrange(DAY_US) for day in days]
    files = write_files(tmp_path, [rows_of(times[n : n + 90], n) for n in range(0, 900, 90)])
    for file in files:
        assert len(days_of(file)) == 1
        assert file["offset"].to_pylist() == sorted(file["offset"].to_pylist())
    rows = [row for file in files for row in file.to_pylist()]
    found = {row["offset"]: row["timestamp"] for row in rows}
    epoch = datetime.fromtimestamp(0, UTC)
    assert found == {n: epoch + timedelta(microseconds=time) for n, time in enumerate(times)}
    assert (len(files) > 5 + 3 * OPEN_FILES) == (waiting_bytes < 1 << 20)


def test_a_file_ends_at_its_size(tmp_path, monkeypatch):
    monkeypatch.setattr(data_files, "FILE_BYTES", 1)
    monkeypatch.setattr(data_files, "ROW_GROUP_BYTES", 1000)
    files = write_files(tmp_path, [rows_of([5] * 10, n) for n in range(0, 100, 10)])
    assert [file.num_rows for file in files] == [10] * 10


def test_a_timestamp_that_no_tool_can_show_becomes_the_nearest_that_it_can(tmp_path):
    (first, last) = write_files(tmp_path, [rows_of([2**62, -(2**62), 2**62])])
    assert first["timestamp"].to_pylist() == [datetime(1, 1, 1, tzinfo=UTC)]
    assert last["timestamp"].to_pylist() == [datetime.max.replace(tzinfo=UTC)] * 2
