"""`format("tierlog")`: the classes that PySpark's Python Data Source asks for.

Rules that keep it honest:

* Nothing is decided here: options, plan and reading have their own files. This one translates
  between Spark's classes and ours.
* What goes to the executors is small and picklable, and shows no secret.
* Spark runs the planning in a Python process of its own: no SparkSession is to be found there.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, MutableMapping
from typing import TYPE_CHECKING, Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from spark_reader.filters import take
from spark_reader.option_values import InvalidOption
from spark_reader.options import ReadOptions, parse_options, wants_headers
from spark_reader.plan import EMPTY, NO_FILTERS
from spark_reader.planner import Planner
from spark_reader.reading import ReadRequest
from spark_reader.source_partition import SplitPartition, read_partition, say

if TYPE_CHECKING:
    from spark_reader.sink import WriteOptions

SCHEMA = (
    "key binary, value binary, topic string, partition int, offset bigint, timestamp timestamp, "
    "timestampType int"
)
HEADERS = ", headers array<struct<key: string, value: binary>>"
TYPES = {
    "key": "binary",
    "value": "binary",
    "topic": "string",
    "partition": "int",
    "offset": "bigint",
    "timestamp": "timestamp",
    "timestampType": "int",
    "headers": "array<struct<key:string,value:binary>>",
}


class TierlogSource(DataSource):  # type: ignore[misc]
    """What Spark finds under the name `tierlog`."""

    def __init__(self, options: MutableMapping[str, str]) -> None:
        super().__init__(options)

    def __repr__(self) -> str:
        return "tierlog"

    @classmethod
    def name(cls) -> str:
        return "tierlog"

    def schema(self) -> str:
        return SCHEMA + (HEADERS if wants_headers(self.options) else "")

    def reader(self, schema: StructType) -> DataSourceReader:
        options = parse_options(self.options, streaming=False)
        return TierlogReader(options, columns_of(schema))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        # Spark before 4.2 lacks what this module imports, and reads batches all the same.
        from spark_reader.stream_source import TierlogStreamReader

        options = parse_options(self.options, streaming=True)
        return TierlogStreamReader(options, columns_of(schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from spark_reader.sink import TierlogWriter

        return TierlogWriter(self._write_options(schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        from spark_reader.sink import TierlogStreamWriter

        return TierlogStreamWriter(self._write_options(schema, overwrite=overwrite))

    def _write_options(self, schema: StructType, *, overwrite: bool) -> WriteOptions:
        from spark_reader.sink import check_columns, parse_write_options

        if overwrite:
            raise InvalidOption(
                "a log cannot be overwritten: write with mode append, or output mode append or "
                "update"
            )
        options = parse_write_options(self.options)
        check_columns(schema, options)
        return options


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema given with `spark.read.schema`: any of ours, as they are."""
    for field in schema.fields:
        expected = TYPES.get(field.name)
        if expected is None or field.dataType.simpleString() != expected:
            allowed = ", ".join(f"{name} {kind}" for name, kind in TYPES.items())
            raise InvalidOption(
                f"the schema's column {field.name} {field.dataType.simpleString()} is none of "
                f"this source's: {allowed}"
            )
    return tuple(schema.fieldNames())


class _PushFilters:
    """`pushFilters` of a reader, for both settings of `spark.sql.python.filterPushdown.enabled`.

    Where it is off, Spark refuses to plan for a class that overrides the method, rather than not
    to call it. It looks at `__func__`; this one shows it the method of the base class.
    """

    __func__ = staticmethod(DataSourceReader.pushFilters)

    def __init__(self, reader: TierlogReader) -> None:
        self._reader = reader

    def __call__(self, filters: list[Any]) -> Iterable[Any]:
        self._reader.filters, left = take(filters, self._reader.filters)
        return left


class TierlogReader(DataSourceReader):  # type: ignore[misc]
    def __init__(self, options: ReadOptions, columns: tuple[str, ...]) -> None:
        self._options, self._columns = options, columns
        self.filters = NO_FILTERS
        self.pushFilters = _PushFilters(self)

    def partitions(self) -> list[SplitPartition]:
        planner = Planner(self._options, report=say, warn=say)
        splits = planner.batch(self.filters)
        # Spark makes one partition of None out of an empty list.
        return [SplitPartition(split) for split in splits or [EMPTY]]

    def read(self, partition: SplitPartition) -> Iterator[pa.RecordBatch]:
        return read_partition(partition, self._options, self._request())

    def _request(self) -> ReadRequest:
        return ReadRequest(
            access=self._options.access,
            columns=self._columns,
            cut=self.filters.cut,
            isolation=self._options.isolation,
        )
