"""The columns, as Spark's Kafka source has them, and what a given schema may ask for."""

from __future__ import annotations

from pyspark.sql.types import StructType

from spark_reader.option_values import InvalidOption

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
