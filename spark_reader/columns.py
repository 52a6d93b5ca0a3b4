"""The columns, which are those of Spark's Kafka source, and the check of a user's schema."""

from __future__ import annotations

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

from tierlog.spark_reader.option_values import InvalidOption

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


def schema(*, with_headers: bool) -> StructType:
    names = TYPES if with_headers else tuple(TYPES)[:-1]
    return StructType([StructField(name, TYPES[name]) for name in names])


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema given with `spark.read.schema`. Raises InvalidOption unless each is a
    column of this source with its type, nullable, and named once.
    """
    names: tuple[str, ...] = tuple(schema.fieldNames())
    for field in schema.fields:
        kind = field.dataType
        if TYPES.get(field.name) != kind:
            allowed = ", ".join(f"{name} {type_.simpleString()}" for name, type_ in TYPES.items())
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
