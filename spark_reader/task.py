"""What a task does, on an executor, for batches and streams alike.

Rule: imported on executors alone. The kernels that it uses take a third of a second to load, which
the first plan of a session should not pay for.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pyarrow as pa

from spark_reader.options import ReadOptions
from spark_reader.plan import NO_FILTERS, Filters
from spark_reader.ranges import LossPolicy
from spark_reader.reading import ReadRequest, read_split
from spark_reader.source_partition import SplitPartition, say


def read_partition(
    partition: SplitPartition,
    options: ReadOptions,
    columns: tuple[str, ...],
    filters: Filters = NO_FILTERS,
) -> Iterator[pa.RecordBatch]:
    """The rows of one of our partitions."""
    request = ReadRequest(
        access=options.access,
        columns=columns,
        row_filter=filters.row_filter,
        isolation=options.isolation,
    )
    loss = LossPolicy(options.fail_on_data_loss, say)
    for split in partition.splits:
        yield from read_split(split, request, loss)
        _freeze_once()


_frozen: list[bool] = []


def _freeze_once() -> None:
    """Take what the first task has loaded out of the garbage collector's sight.

    Spark's worker collects after every task: with the kernels loaded, more than 70 ms each.
    """
    if not _frozen:
        gc.collect()
        gc.freeze()
        _frozen.append(True)
