"""Batch reads of `format("tierlog")`: planned in Spark's planning process, run on executors. The
filters that Spark pushes down become a range of offsets and times and a set of partitions.

* The state that is sent to the executors is small and picklable, and its repr has no secrets.
* Spark plans in a separate Python process, which has no SparkSession. Modules that only executors
  need are not imported there.
* An accepted filter is applied exactly to every row, since Spark does not apply it again. All
  others are returned to Spark, also those on keys, which choose chunks.
* The log has millisecond timestamps: a bound between two milliseconds is rounded to the one that
  selects the same rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from pyspark.sql import datasource as spark
from pyspark.sql.datasource import DataSourceReader, InputPartition

from tierlog.record_format.record_walk import I64_MAX, I64_MIN, RowFilter
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.planner import Planner
from tierlog.spark_reader.splits import (
    NO_FILTERS,
    Filters,
    RowsWanted,
    Split,
    log_to_stderr,
    pack_tasks,
)
from tierlog.spark_reader.workarounds import (
    FILTERS_BY_SCAN,
    PushFilters,
    QuickAckOnUnpickle,
    in_brief,
)

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


class TierlogReader(QuickAckOnUnpickle, DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self.takes_filters = FILTERS_BY_SCAN or options.single_query
        self.filters = NO_FILTERS
        self.pushFilters = PushFilters(self._take_filters)

    def _take_filters(self, filters: list[Any]) -> Iterable[Any]:
        if not self.takes_filters:
            return filters
        self.filters, left = push_down(filters, self.filters)
        return left

    @in_brief
    def partitions(self) -> list[SplitPartition]:
        planner = Planner(self._options, report=log_to_stderr, warn=log_to_stderr)
        splits = planner.batch(self.filters)
        wanted = RowsWanted(self._columns, self.filters.row_filter)
        tasks = pack_tasks(splits, self._options.limits, wanted)
        return [SplitPartition(task) for task in tasks or [()]]  # or Spark makes one of None

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        from tierlog.spark_reader.split_reader import read_partition

        return read_partition(partition, self._options, self._columns, self.filters)


_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER_NULL: Final = frozenset(("topic", "partition", "offset", "timestamp", "timestampType"))


def push_down(filters: Iterable[Any], taken: Filters = NO_FILTERS) -> tuple[Filters, list[Any]]:
    """The combined filters, and those that Spark has to apply itself."""
    left: list[Any] = []
    for one in filters:
        if (keys := _keys(one)) is not None:  # of what is read, Spark has to find the rows
            taken = taken._replace(keys=keys if taken.keys is None else taken.keys & keys)
        narrowed = _narrowed(taken, one)
        if narrowed is None:
            left.append(one)
        else:
            taken = narrowed
    return taken, left


def _narrowed(taken: Filters, one: Any) -> Filters | None:
    """`taken`, narrowed by one more filter; None if the filter is not supported."""
    column = one.attribute[0] if len(getattr(one, "attribute", ())) == 1 else None
    if isinstance(one, spark.IsNotNull):
        return taken if column in _NEVER_NULL else None
    if column in {"topic", "partition"}:
        values = _values(one)
        return None if values is None else _chosen(taken, column, values)
    if column == "offset":
        bounds = _bounds(one, one.value) if _is_int(one) else None
    elif column == "timestamp":
        bounds = _time_bounds(one)
    else:
        return None
    if bounds is None:
        return None
    return taken._replace(row_filter=_intersect(taken.row_filter, column, bounds))


def _keys(one: Any) -> frozenset[bytes] | None:
    if not isinstance(one, (spark.EqualTo, spark.In)) or one.attribute != ("key",):
        return None
    values = [one.value] if isinstance(one, spark.EqualTo) else one.value
    if not all(isinstance(key, (bytes, bytearray)) for key in values):
        return None
    return frozenset(map(bytes, values))


def _values(one: Any) -> frozenset[Any] | None:
    if isinstance(one, spark.EqualTo):
        return frozenset((one.value,))
    return frozenset(one.value) if isinstance(one, spark.In) else None


def _chosen(taken: Filters, column: str, values: frozenset[Any]) -> Filters:
    if column == "topic":
        return taken._replace(topics=values if taken.topics is None else taken.topics & values)
    both = values if taken.partitions is None else taken.partitions & values
    return taken._replace(partitions=both)


def _is_int(one: Any) -> bool:
    return isinstance(getattr(one, "value", None), int)


def _bounds(one: Any, value: int) -> tuple[int, int] | None:
    """Both inclusive; None if the filter is no comparison."""
    match one:
        case spark.EqualTo():
            return value, value
        case spark.GreaterThan():
            return value + 1, I64_MAX
        case spark.GreaterThanOrEqual():
            return value, I64_MAX
        case spark.LessThan():
            return I64_MIN, value - 1
        case spark.LessThanOrEqual():
            return I64_MIN, value
    return None


def _time_bounds(one: Any) -> tuple[int, int] | None:
    """The range of milliseconds, both inclusive, whose microseconds pass the filter."""
    if not isinstance(getattr(one, "value", None), datetime):
        return None
    if (bounds := _bounds(one, _micros(one.value))) is None:
        return None
    low, high = bounds
    # Rounded inwards: up at the low end, down at the high one.
    return (low if low == I64_MIN else -(-low // 1000)), (high if high == I64_MAX else high // 1000)


def _micros(moment: datetime) -> int:
    aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
    return (aware - _EPOCH) // timedelta(microseconds=1)


def _intersect(row_filter: RowFilter, column: str, bounds: tuple[int, int]) -> RowFilter:
    low, high = bounds
    if column == "offset":
        return row_filter.within(low, I64_MAX if high == I64_MAX else high + 1)
    return row_filter._replace(
        start_timestamp=max(row_filter.start_timestamp, low),
        last_timestamp=min(row_filter.last_timestamp, high),
    )
