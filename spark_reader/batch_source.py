"""The batch side of `format("tierlog")`: plans in Spark's planning process, reads on executors.

Rules that keep it honest:

* Nothing is decided here: options, plan and reading have their own files.
* What goes to the executors is small and picklable, and shows no secret.
* Spark runs the planning in a separate Python process: there is no SparkSession there, and what
  only executors need is not imported.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql.datasource import DataSourceReader

from spark_reader.filters import take
from spark_reader.options import ReadOptions
from spark_reader.plan import NO_FILTERS
from spark_reader.planner import Planner
from spark_reader.prompt_acks import AcknowledgesItsTask
from spark_reader.source_partition import SplitPartition, say

if TYPE_CHECKING:
    import pyarrow as pa


PLANS_BY_SCAN: Final = hasattr(DataSourceReader, "pushLimit")
"""Whether Spark keeps what pushed filters narrowed with the scan they are of. Up to 4.3 it keeps it
with the `load()`: other scans of the same frame would get it too, and lack rows.
"""


class _PushFilters:
    """`pushFilters` of a reader, for both settings of `spark.sql.python.filterPushdown.enabled`.

    Where it is off, Spark refuses to plan for a class that overrides the method, rather than not
    to call it. It looks at `__func__`; this one shows it the method of the base class.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: TierlogReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        if not self._reader.takes_filters:
            return filters
        self._reader.filters, left = take(filters, self._reader.filters)
        return left


class TierlogReader(AcknowledgesItsTask, DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self.takes_filters = PLANS_BY_SCAN or options.single_query
        self.filters = NO_FILTERS
        self.pushFilters = _PushFilters(self)

    def partitions(self) -> list[SplitPartition]:
        planner = Planner(self._options, report=say, warn=say)
        splits = planner.batch(self.filters)
        # Spark makes one partition of None out of an empty list.
        return [SplitPartition(task) for task in planner.tasks(splits) or [()]]

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        from spark_reader.task import read_partition

        return read_partition(partition, self._options, self._columns, self.filters)
