from datetime import UTC, datetime, timedelta

import pytest
from pyspark.sql import datasource as spark

from tierlog.record_format.record_walk import I64_MAX, I64_MIN, RowFilter
from tierlog.spark_reader.batch_source import push_down
from tierlog.spark_reader.splits import NO_FILTERS

EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def at(micros):
    return EPOCH + timedelta(microseconds=micros)


def pushed(*filters):
    found, left = push_down(filters)
    assert left == []
    return found


@pytest.mark.parametrize(
    ("pushable", "start", "end"),
    [
        (spark.EqualTo(("offset",), 5), 5, 6),
        (spark.GreaterThan(("offset",), 5), 6, I64_MAX),
        (spark.GreaterThanOrEqual(("offset",), 5), 5, I64_MAX),
        (spark.LessThan(("offset",), 5), 0, 5),
        (spark.LessThanOrEqual(("offset",), 5), 0, 6),
    ],
)
def test_offset_filters_become_offset_ranges(pushable, start, end):
    row_filter = pushed(pushable).row_filter
    assert (row_filter.start_offset, row_filter.end_offset) == (start, end)


@pytest.mark.parametrize(
    ("kind", "passes"),
    [
        (spark.EqualTo, lambda a, b: a == b),
        (spark.GreaterThan, lambda a, b: a > b),
        (spark.GreaterThanOrEqual, lambda a, b: a >= b),
        (spark.LessThan, lambda a, b: a < b),
        (spark.LessThanOrEqual, lambda a, b: a <= b),
    ],
)
def test_a_timestamp_filter_keeps_exactly_the_matching_milliseconds(kind, passes):
    for micros in (-2001, -2000, -1999, 0, 1, 999, 1000, 1001, 123_456_789):
        row_filter = pushed(kind(("timestamp",), at(micros))).row_filter
        for ms in range(micros // 1000 - 3, micros // 1000 + 4):
            kept = row_filter.start_timestamp <= ms <= row_filter.last_timestamp
            assert kept == passes(ms * 1000, micros), (ms, micros)


def test_equality_filters_select_partitions_and_topics():
    found = pushed(
        spark.In(("partition",), (1, 2)),
        spark.EqualTo(("partition",), 2),
        spark.EqualTo(("topic",), "a"),
        spark.IsNotNull(("offset",)),
    )
    assert found.admits("a", 2)
    assert not found.admits("a", 1)
    assert not found.admits("b", 2)
    assert found.row_filter == RowFilter()
    assert not pushed(spark.EqualTo(("partition",), 1), spark.EqualTo(("partition",), 2)).admits(
        "a", 1
    )


def test_filters_on_keys_choose_chunks_and_are_left_to_spark():
    given = [spark.In(("key",), (b"a", bytearray(b"b"))), spark.EqualTo(("key",), b"b")]
    found, left = push_down(given)
    assert (found.keys, left) == ({b"b"}, given)
    for other in (spark.In(("key",), (b"a", None)), spark.Not(spark.EqualTo(("key",), b"a"))):
        assert push_down([other]) == (NO_FILTERS, [other])


def test_unsupported_filters_are_left_to_spark():
    others = [
        spark.EqualTo(("key",), b"x"),
        spark.Not(spark.EqualTo(("offset",), 1)),
        spark.IsNotNull(("key",)),
        spark.IsNotNull(("headers",)),
        spark.IsNull(("offset",)),
        spark.EqualTo(("headers", "x"), 1),
        spark.In(("offset",), (1, 2)),
    ]
    found, left = push_down(others)
    assert left == others
    assert found.row_filter == RowFilter(0, I64_MAX, I64_MIN, I64_MAX)
