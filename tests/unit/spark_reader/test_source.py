import pytest
from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    LongType,
    StringType,
    StructField,
    StructType,
    TimestampNTZType,
)

from tierlog.spark_reader.option_values import InvalidOption
from tierlog.spark_reader.source import TYPES, columns_of

HEADER = StructType([StructField("key", StringType(), False), StructField("value", BinaryType())])
VALUE = StructField("value", BinaryType())


def test_a_schema_may_have_any_columns_in_any_order():
    backwards = [StructField(name, kind) for name, kind in reversed(TYPES.items())]
    assert columns_of(StructType(backwards)) == tuple(reversed(TYPES))
    assert columns_of(StructType([])) == ()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            [StructField("value", StringType())],
            "column value string is not a column of this source",
        ),
        (
            [StructField("VALUE", BinaryType())],
            "column VALUE binary is not a column of this source",
        ),
        (
            [StructField("timestamp", TimestampNTZType())],
            "timestamp timestamp_ntz is not a column of",
        ),
        ([StructField("headers", ArrayType(HEADER))], "headers .* all nullable"),
        ([VALUE, StructField("offset", LongType(), False)], "column offset is NOT NULL"),
        ([VALUE, VALUE], "has the column value more than once"),
    ],
)
def test_an_unsupported_column_is_refused_by_name(fields, message):
    with pytest.raises(InvalidOption, match=message):
        columns_of(StructType(fields))
