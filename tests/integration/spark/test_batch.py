"""What only Spark itself can show: that it finds the source, ships it, and joins its parts."""

import contextlib
import io

import pytest

from cold_tier.open import open_store
from spark_reader.jobs.stats import stats
from tests.fakes.bucket import put_topic

pytestmark = pytest.mark.spark


def read(spark, tiers, schema=None, **options):
    reader = spark.read.format("tierlog")
    if schema:
        reader = reader.schema(schema)
    given = {"store": tiers.store_url, "server": tiers.url, "subscribe": "flights"}
    given |= {"splitBytes": "32k", **options}
    return reader.options(**{k: v for k, v in given.items() if v is not None}).load()


def test_finds_the_source_by_name_and_reads_both_tiers(spark, tiers):
    frame = read(spark, tiers, includeHeaders="true")
    assert frame.columns == [
        *("key", "value", "topic", "partition", "offset"),
        *("timestamp", "timestampType", "headers"),
    ]
    rows = frame.collect()
    found = {}
    for row in sorted(rows, key=lambda row: (row.partition, row.offset)):
        key = None if row.key is None else bytes(row.key)
        found.setdefault(("flights", row.partition), []).append((row.offset, key, bytes(row.value)))
        assert (row.topic, row.timestampType, row.headers) == ("flights", 0, None)
    assert found == {
        place: [(one.offset, one.key, one.value) for one in written]
        for place, written in tiers.written.items()
        if place[0] == "flights"
    }


def test_columns_are_pruned_by_a_schema_and_counted_by_offsets(spark, tiers):
    values = read(spark, tiers, schema="value binary")
    assert values.selectExpr("sum(length(value))").first()[0] == 3 * 1600 * 100
    counted = read(spark, tiers, schema="offset bigint").selectExpr("count(*)", "max(offset)")
    assert tuple(counted.first()) == (4800, 1599)
    for wrong, told in (
        ("value string", "column value string is not a column of this source"),
        ("value binary not null", "column value is NOT NULL"),
    ):
        with pytest.raises(Exception, match=told):
            read(spark, tiers, schema=wrong).count()


def test_a_timestamp_is_a_moment_whatever_the_word_means_in_the_session(spark, tiers):
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        last = read(spark, tiers).selectExpr("max(unix_millis(timestamp))").first()[0]
        hours = stats(spark, {"store": tiers.store_url, "tier": "cold", "subscribe": "flights"})
    finally:
        spark.conf.unset("spark.sql.timestampType")
    flights = [one for (topic, _), of in tiers.written.items() if topic == "flights" for one in of]
    assert last == max(one.timestamp for one in flights)
    assert sum(one.records for one in hours) == sum(tiers.cold_end("flights", p) for p in range(3))


def test_filters_give_the_same_rows_pushed_down_or_not(spark, tiers):
    written = tiers.written["flights", 1]
    low = written[700].timestamp / 1000
    expected = sorted(
        one.offset for one in written if one.offset >= 650 and one.timestamp / 1000 < low
    )
    for pushed, zone in (("true", "America/New_York"), ("false", "UTC")):
        spark.conf.set("spark.sql.python.filterPushdown.enabled", pushed)
        spark.conf.set("spark.sql.session.timeZone", zone)
        try:
            frame = read(spark, tiers, singleQuery=pushed)
            frame = frame.where("partition = 1 and offset >= 650")
            frame = frame.where(f"timestamp < timestamp_millis({written[700].timestamp})")
            assert sorted(row.offset for row in frame.select("offset").collect()) == expected
        finally:
            spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")
            spark.conf.set("spark.sql.session.timeZone", "UTC")


def test_filters_narrow_no_other_use_of_a_frame(spark, tiers):
    """Spark up to 4.3 keeps the last plan of a frame, with its filters, for all that reads it."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, tiers, tier="cold", schema="partition int, offset bigint")
        one = frame.where("partition = 0 and offset < 10")
        other = frame.where("partition = 1 and offset < 20")
        found = sorted(tuple(row) for row in one.union(other).collect())
        assert found == [(0, n) for n in range(10)] + [(1, n) for n in range(20)]
        assert frame.count() == sum(tiers.cold_end("flights", p) for p in range(3))
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_cold_alone_needs_no_broker(spark, tiers):
    frame = read(spark, tiers, server=None, tier="cold")
    ends = {
        row.partition: row.end
        for row in frame.groupBy("partition")
        .agg({"offset": "max"})
        .withColumnRenamed("max(offset)", "end")
        .collect()
    }
    assert ends == {p: tiers.cold_end("flights", p) - 1 for p in range(3)}
    options = f"store '{tiers.store_url}', tier 'cold', subscribe 'flights'"
    spark.sql(f"CREATE OR REPLACE TEMPORARY VIEW cold_flights USING tierlog OPTIONS ({options})")
    grouped = spark.sql("SELECT partition, max(offset) FROM cold_flights GROUP BY partition")
    assert dict(grouped.collect()) == ends


def test_a_wrong_option_is_named_and_secrets_show_nowhere(spark, tiers):
    secrets = {"token": "hunter2", "secretAccessKey": "hunter2", "accessKeyId": "hunter2"}
    frame = read(spark, tiers, **secrets)
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        frame.explain(mode="extended")
    assert "hunter2" not in told.getvalue()
    with pytest.raises(Exception, match="option tier: 'warm' is not one of all, cold") as caught:
        read(spark, tiers, tier="warm", **secrets).count()
    assert "hunter2" not in str(caught.value)


def test_a_little_of_many_partitions_is_read_by_few_tasks(spark, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    put_topic(open_store(url), "wide", dict.fromkeys(range(40), "codec-lz4-0"))
    given = {"store": url, "tier": "cold", "subscribe": "wide"}
    frame = spark.read.format("tierlog").options(**given).load()
    assert frame.rdd.getNumPartitions() == 20
    assert frame.select("partition", "offset").distinct().count() == frame.count() == 40 * 260


def test_an_empty_read_is_no_rows(spark, tiers):
    assert (
        read(spark, tiers, startingOffsets='{"flights": {"0": 1600, "1": 1600, "2": 1600}}').count()
        == 0
    )


def test_a_stream_that_cannot_be_says_why_and_no_more(spark, tiers, tmp_path):
    options = {"server": tiers.url, "subscribe": "flights", "maxOffsetPerTrigger": "5"}
    query = (
        spark.readStream.format("tierlog")
        .options(**options)
        .load()
        .writeStream.format("noop")
        .option("checkpointLocation", str(tmp_path))
        .start()
    )
    with pytest.raises(Exception, match="did you mean maxOffsetsPerTrigger") as caught:
        query.awaitTermination(120)
    assert "UnboundLocalError" not in str(caught.value)
