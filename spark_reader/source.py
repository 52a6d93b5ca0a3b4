"""The Spark data source `format("tierlog")`.

This module must be cheap to import, and must never fail if pyspark is installed: Spark imports it
in every application on a machine that has tierlog, only to learn its name. Everything else is
imported on use.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from types import MappingProxyType
from typing import TYPE_CHECKING, ClassVar, Final

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    DataSourceStreamWriter,
    DataSourceWriter,
)
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    DataType,
    IntegerType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from tierlog.spark_reader.options import Reading, ReadOptions
    from tierlog.spark_reader.s3a import S3ASettings


_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])

TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),  # an instant, whatever `spark.sql.timestampType` is
    "timestampType": IntegerType(),
    "headers": ArrayType(_HEADER),
}


_DECIDE_SCHEMA: Final = frozenset(("includeheaders", "keyschema", "valueschema"))


class TierlogSource(DataSource):  # type: ignore[misc]
    s3a: ClassVar[S3ASettings | None] = None
    """The session's, in the subclass that `register` makes."""
    _readings: Mapping[str, Reading] = MappingProxyType({})
    """How keys and values are read, as `schema` found: Spark pickles the source after it has asked
    for the schema, and every reader is made of that.
    """

    @classmethod
    def name(cls) -> str:
        return "tierlog"

    def __repr__(self) -> str:
        """Without the options, some of which are secrets."""
        return "tierlog"

    def schema(self) -> StructType:
        if _DECIDE_SCHEMA.isdisjoint(name.lower() for name in self.options):
            return source_schema(with_headers=False)  # what reads the options takes time to load
        from tierlog.spark_reader.options import parse_value_options, wants_headers
        from tierlog.spark_reader.workarounds import in_brief

        with_headers = wants_headers(self.options)
        options = in_brief(parse_value_options)(self.options, self.s3a)
        if options is None:
            return source_schema(with_headers=with_headers)
        self._readings = in_brief(with_readings)(options).readings
        return source_schema(with_headers=with_headers, types=types_of(self._readings))

    def _with_readings(self, options: ReadOptions) -> ReadOptions:
        """With what `schema` found, if it was asked: another version may be the latest now."""
        found = self._readings
        return options.with_readings(found) if found else with_readings(options)

    def reader(self, schema: StructType) -> DataSourceReader:
        from tierlog.spark_reader.workarounds import in_brief

        return in_brief(self._reader)(schema)

    def _reader(self, schema: StructType) -> DataSourceReader:
        from tierlog.spark_reader.batch_source import TierlogReader
        from tierlog.spark_reader.options import parse_options

        options = self._with_readings(parse_options(self.options, streaming=False, s3a=self.s3a))
        return TierlogReader(options, columns_of(schema, types_of(options.readings)))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's
        from tierlog.record_format.errors import TierlogError

        try:
            return self._stream_reader(schema)
        except TierlogError as error:
            from tierlog.spark_reader.workarounds import FailedStreamReader

            return FailedStreamReader(error)

    def _stream_reader(self, schema: StructType) -> DataSourceStreamReader:
        from tierlog.spark_reader.options import parse_options

        options = parse_options(self.options, streaming=True, s3a=self.s3a)
        _check_streams()
        from tierlog.spark_reader.stream_source import TierlogStreamReader

        options = self._with_readings(options)
        return TierlogStreamReader(options, columns_of(schema, types_of(options.readings)))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        from tierlog.spark_reader.sink import TierlogWriter, write_options
        from tierlog.spark_reader.workarounds import in_brief

        return TierlogWriter(in_brief(write_options)(self.options, schema, overwrite=overwrite))

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: ARG002, N802
        from tierlog.spark_reader.sink import TierlogStreamWriter, write_options

        # Output mode complete: every batch's whole result is appended, as with Kafka's sink.
        return TierlogStreamWriter(write_options(self.options, schema, overwrite=False))


def source_schema(
    *, with_headers: bool, types: Mapping[str, DataType] = MappingProxyType(TYPES)
) -> StructType:
    names = types if with_headers else tuple(types)[:-1]
    return StructType([StructField(name, types[name]) for name in names])


def with_readings(options: ReadOptions) -> ReadOptions:
    """The same, and how keys and values are read as columns. Raises InvalidOption, and what the
    registry raises.
    """
    if not options.wanted:
        return options
    from tierlog.spark_reader.values import find_readings

    return find_readings(options)


def types_of(readings: Mapping[str, Reading]) -> Mapping[str, DataType]:
    """The types of the columns, `key` and `value` being what their schemas say."""
    if not readings:
        return TYPES
    from pyspark.sql.pandas.types import from_arrow_type

    found = {
        name: from_arrow_type(one.type, prefer_timestamp_ntz=True) for name, one in readings.items()
    }
    return TYPES | found


def columns_of(
    schema: StructType, types: Mapping[str, DataType] = MappingProxyType(TYPES)
) -> tuple[str, ...]:
    """The columns of a schema given with `spark.read.schema`. Raises InvalidOption unless each is a
    column of this source with its type, nullable, and named once.
    """
    from tierlog.record_format.errors import InvalidOption

    names: tuple[str, ...] = tuple(schema.fieldNames())
    for field in schema.fields:
        kind = field.dataType
        if types.get(field.name) != kind:
            allowed = ", ".join(f"{name} {type_.simpleString()}" for name, type_ in types.items())
            raise InvalidOption(
                f"the schema's column {field.name} {kind.simpleString()} is not a column of this "
                f"source; its columns, all nullable, are {allowed}"
            )
        if not field.nullable:
            raise InvalidOption(
                f"the schema's column {field.name} is NOT NULL, but this source's are nullable"
            )
        if names.count(field.name) > 1:
            raise InvalidOption(f"the schema has the column {field.name} more than once")
    return names


def register(session: SparkSession) -> None:
    """Make `format("tierlog")` in this session use its current S3A settings (`fs.s3a.*`).

    Call it again after changing them. Without it Spark still finds the source, which then uses its
    options and AWS's provider chain. Spark Connect does not forward credentials.
    """
    from tierlog.spark_reader.s3a import settings_of

    # Spark pickles the class by value, and so the settings, for the planning process, which has no
    # session to query.
    settings = {"s3a": settings_of(session)}
    session.dataSource.register(type("TierlogSourceOfSession", (TierlogSource,), settings))


def _check_streams() -> None:
    """Raise ConfigurationError if PySpark does not let Python sources limit a micro-batch."""
    if find_spec("pyspark.sql.streaming.datasource") is None:
        from pyspark import __version__

        from tierlog.record_format.errors import ConfigurationError

        raise ConfigurationError(f"streams need pyspark 4.2 or newer; this is {__version__}")
