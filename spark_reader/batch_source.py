"""Batch reads of `format("tierlog")`: planned in Spark's planning process, run on executors.

* Only an adapter: options, planning and reading have their own modules.
* The state that is sent to the executors is small and picklable, and its repr has no secrets.
* Spark plans in a separate Python process, which has no SparkSession. Modules that only executors
  need are not imported there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader, InputPartition

from tierlog.spark_reader.data_loss import log_to_stderr
from tierlog.spark_reader.filters import push_down
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.plan import NO_FILTERS, Split
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.quick_ack import QuickAckOnUnpickle

if TYPE_CHECKING:
    import pyarrow as pa


class SplitPartition(InputPartition):  # type: ignore[misc]
    """The splits of a task."""

    def __init__(self, splits: Sequence[Split]) -> None:
        super().__init__(None)
        self.splits = splits

    def __repr__(self) -> str:
        return ", ".join(
            f"{split.topic}-{split.partition}[{split.start_offset}, {split.end_offset})"
            for split in self.splits
        )


PLANS_BY_SCAN: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether Spark keeps pushed filters per scan. Up to 4.3 it keeps them per `load()`, so that other
scans of the same frame would be filtered too, and miss rows.
"""


class _PushFilters:
    """`pushFilters` of a reader, for both settings of `spark.sql.python.filterPushdown.enabled`.

    If it is off, Spark fails for a class that overrides the method instead of not calling it. It
    looks at `__func__`; this attribute shows it the base class's method.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: TierlogReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        if not self._reader.takes_filters:
            return filters
        self._reader.filters, left = push_down(filters, self._reader.filters)
        return left


class TierlogReader(QuickAckOnUnpickle, DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self.takes_filters = PLANS_BY_SCAN or options.single_query
        self.filters = NO_FILTERS
        self.pushFilters = _PushFilters(self)

    def partitions(self) -> list[SplitPartition]:
        planner = Planner(self._options, report=log_to_stderr, warn=log_to_stderr)
        splits = planner.batch(self.filters)
        # Spark turns an empty list into one partition of None.
        return [SplitPartition(task) for task in planner.tasks(splits) or [()]]

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        from tierlog.spark_reader.task import read_partition

        return read_partition(partition, self._options, self._columns, self.filters)
