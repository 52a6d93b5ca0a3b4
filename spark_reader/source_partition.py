"""What goes to an executor and what it does there, for batches and streams alike.

Rule: picklable, small, and without a secret in its repr.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from spark_reader.options import ReadOptions
from spark_reader.plan import EMPTY, Split
from spark_reader.ranges import LossPolicy
from spark_reader.reading import ReadRequest, read_split


class SplitPartition(InputPartition):  # type: ignore[misc]
    """A split, as Spark carries it."""

    def __init__(self, split: Split) -> None:
        super().__init__(None)
        self.split = split

    def __repr__(self) -> str:
        split = self.split
        return f"{split.topic}-{split.partition}[{split.start_offset}, {split.end_offset})"


def read_partition(
    partition: SplitPartition, options: ReadOptions, request: ReadRequest
) -> Iterator[pa.RecordBatch]:
    """The rows of one of our partitions, on an executor."""
    if partition.split == EMPTY:
        return
    yield from read_split(partition.split, request, LossPolicy(options.fail_on_data_loss, say))
    _freeze_once()


def say(text: str) -> None:
    """To the log of the Python worker, which is its standard error."""
    print(f"tierlog: {text}", file=sys.stderr, flush=True)


_frozen: list[bool] = []


def _freeze_once() -> None:
    """Take what the first task has loaded out of the garbage collector's sight.

    Spark's worker collects after every task: with the kernels loaded, more than 70 ms each.
    """
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen.append(True)
