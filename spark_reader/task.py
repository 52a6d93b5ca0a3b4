"""Runs a task on an executor, for batches and streams alike.

Imported on executors only: loading the compiled kernels takes a third of a second, which would
delay a session's first plan.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa

from tierlog.spark_reader.batch_source import SplitPartition
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.plan import NO_FILTERS, Filters
from tierlog.spark_reader.split_reader import SplitReader


def read_partition(
    partition: SplitPartition,
    options: ReadOptions,
    columns: tuple[str, ...],
    filters: Filters = NO_FILTERS,
) -> Iterator[pa.RecordBatch]:
    """The rows of a task's splits."""
    reader = SplitReader(options, columns, row_filter=filters.row_filter)
    for split in partition.splits:
        yield from reader.read(split)
        _freeze_once()


_frozen: list[bool] = []


def _freeze_once() -> None:
    """Exclude what the first task has loaded from garbage collection.

    Spark's worker collects after every task; with the kernels loaded, that takes more than 70 ms.
    """
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen.append(True)
