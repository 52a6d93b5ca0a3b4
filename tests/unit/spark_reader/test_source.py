import traceback

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

from tierlog.record_format.errors import InvalidOption
from tierlog.spark_reader.source import TYPES, TierlogSource, columns_of

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


@pytest.mark.parametrize("options", [{}, {"subscribe": "a", "startingOfset": "1"}])
def test_an_error_of_planning_leaves_out_the_calls_that_led_to_it(options, tmp_path):
    source = TierlogSource({"store": tmp_path.as_uri(), **options})
    with pytest.raises(InvalidOption) as caught:
        source.reader(StructType([]))
    shown = "".join(traceback.format_exception(caught.value))
    assert "tierlog.errors.InvalidOption: " in shown
    assert "options.py" not in shown
