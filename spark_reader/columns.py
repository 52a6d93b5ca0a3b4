"""The columns, as Spark's Kafka source has them, and what a given schema may ask for."""

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

from spark_reader.option_values import InvalidOption

_HEADER = StructType([StructField("key", StringType()), StructField("value", BinaryType())])

TYPES: dict[str, DataType] = {
    "key": BinaryType(),
    "value": BinaryType(),
    "topic": StringType(),
    "partition": IntegerType(),
    "offset": LongType(),
    "timestamp": TimestampType(),
    "timestampType": IntegerType(),
    "headers": ArrayType(_HEADER),
}


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns of a schema given with `spark.read.schema`: any of ours, once, as they are."""
    names: tuple[str, ...] = tuple(schema.fieldNames())
    for field in schema.fields:
        kind = field.dataType
        if TYPES.get(field.name) != kind:
            allowed = ", ".join(f"{name} {one.simpleString()}" for name, one in TYPES.items())
            raise InvalidOption(
                f"the schema's column {field.name} {kind.simpleString()} is none of this "
                f"source's, each of which may be null: {allowed}"
            )
        if not field.nullable:
            raise InvalidOption(
                f"the schema's column {field.name} is NOT NULL; each of this source's may be null"
            )
        if names.count(field.name) > 1:
            raise InvalidOption(f"the schema has the column {field.name} more than once")
    return names
