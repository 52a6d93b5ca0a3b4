"""The memory of a Python worker after a read: Spark starts one per core and keeps it."""

import subprocess
import sys

import pytest

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store

WORKER = """
import gc, sys
from pyspark.sql.datasource import InputPartition
from tierlog.spark_reader.batch_source import TierlogReader
from tierlog.spark_reader.options import parse_options
from tierlog.record_format.arrow_schema import COLUMNS
given = {"store": sys.argv[1], "tier": "cold", "subscribe": "many"}
reader = TierlogReader(parse_options(given, streaming=False), COLUMNS[:-1])
rows = [sum(batch.num_rows for batch in reader.read(part)) for part in reader.partitions()]
gc.collect()
print(sum(rows), len(gc.get_objects()), "pandas" in sys.modules)
"""


COUNTER = """
import sys
from tierlog.spark_reader.batch_source import TierlogReader
from tierlog.spark_reader.options import parse_options
given = {"store": sys.argv[1], "tier": "cold", "subscribe": "many"}
for columns in (("partition",), ("topic", "offset"), ()):
    reader = TierlogReader(parse_options(given, streaming=False), columns)
    rows = [batch for part in reader.partitions() for batch in reader.read(part)]
    print(sum(len(batch) for batch in rows), "numba" in sys.modules)
"""


def test_a_worker_that_counts_or_reads_offsets_loads_no_compiler(tmp_path):
    url = (tmp_path / "bucket").as_uri()
    put_topic(open_store(url), "many", {0: "codec-lz4-0", 1: "keyed-0"})
    command = [sys.executable, "-c", COUNTER, url]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    (counted, *others) = completed.stdout.splitlines()
    assert counted.endswith(" False")
    assert int(counted.split()[0]) > 0
    assert others == [counted, counted]


def test_a_worker_imports_no_pandas_and_has_few_tracked_objects(tmp_path):
    pytest.importorskip("pandas")
    url = (tmp_path / "bucket").as_uri()
    put_topic(open_store(url), "many", {0: "codec-lz4-0"})
    command = [sys.executable, "-c", WORKER, url]
    completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    rows, objects, has_pandas = completed.stdout.split()
    assert (int(rows) > 0, has_pandas) == (True, "False")
    # The compiled decoder alone has tens of thousands; Spark's worker collects after every task.
    assert int(objects) < 5_000
