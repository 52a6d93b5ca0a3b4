"""What only Spark itself can show: it finds the source, ships it, and combines its partitions."""

import contextlib
import io

import pytest

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store
from tierlog.spark_reader.jobs.stats import stats

pytestmark = pytest.mark.spark


def read(spark, tiers, schema=None, **options):
    reader = spark.read.format("tierlog")
    if schema:
        reader = reader.schema(schema)
    given = {"store": tiers.store_url, "server": tiers.url, "subscribe": "flights"}
    given |= {"splitBytes": "32k", **options}
    return reader.options(**{k: v for k, v in given.items() if v is not None}).load()


def test_spark_finds_the_source_by_name_and_reads_both_tiers(spark, tiers):
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
        partition: [(record.offset, record.key, record.value) for record in written]
        for partition, written in tiers.written.items()
        if partition[0] == "flights"
    }


def test_a_schema_prunes_columns(spark, tiers):
    values = read(spark, tiers, schema="value binary")
    assert values.selectExpr("sum(length(value))").first()[0] == 3 * 1600 * 100
    counted = read(spark, tiers, schema="offset bigint").selectExpr("count(*)", "max(offset)")
    assert tuple(counted.first()) == (4800, 1599)
    assert read(spark, tiers, schema="topic string, partition int").count() == 4800
    for wrong, message in (
        ("value string", "column value string is not a column of this source"),
        ("value binary not null", "column value is NOT NULL"),
    ):
        with pytest.raises(Exception, match=message):
            read(spark, tiers, schema=wrong).count()


def test_timestamps_are_instants_whatever_the_sessions_timestamp_type(spark, tiers):
    spark.conf.set("spark.sql.timestampType", "TIMESTAMP_NTZ")
    try:
        last = read(spark, tiers).selectExpr("max(unix_millis(timestamp))").first()[0]
        hours = stats(spark, {"store": tiers.store_url, "tier": "cold", "subscribe": "flights"})
    finally:
        spark.conf.unset("spark.sql.timestampType")
    flights = [one for (topic, _), of in tiers.written.items() if topic == "flights" for one in of]
    assert last == max(one.timestamp for one in flights)
    assert sum(one.records for one in hours) == sum(tiers.cold_end("flights", p) for p in range(3))


def test_pushed_down_filters_return_the_same_rows(spark, tiers):
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


def test_filters_on_keys_leave_out_the_chunks_that_lack_them(spark, tiers):
    flights = {p: of for (topic, p), of in tiers.written.items() if topic == "flights"}
    written = [(p, one) for p, of in flights.items() for one in of]
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, tiers, singleQuery="true").where("key in (X'6B65792D33', X'00')")
        found = sorted(tuple(row) for row in frame.select("partition", "offset").collect())
        assert found == sorted((p, one.offset) for p, one in written if one.key == b"key-3")
        cold = read(spark, tiers, tier="cold", minPartitions="50", singleQuery="true")
        assert cold.rdd.getNumPartitions() >= 50
        cold = read(spark, tiers, tier="cold", minPartitions="50", singleQuery="true")
        assert cold.where("key = X'00'").rdd.getNumPartitions() < 5
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_filters_do_not_affect_other_uses_of_a_frame(spark, tiers):
    """Spark up to 4.3 reuses the last plan of a frame, with its filters, for all its uses."""
    spark.conf.set("spark.sql.python.filterPushdown.enabled", "true")
    try:
        frame = read(spark, tiers, tier="cold", schema="partition int, offset bigint")
        first = frame.where("partition = 0 and offset < 10")
        second = frame.where("partition = 1 and offset < 20")
        found = sorted(tuple(row) for row in first.union(second).collect())
        assert found == [(0, n) for n in range(10)] + [(1, n) for n in range(20)]
        assert frame.count() == sum(tiers.cold_end("flights", p) for p in range(3))
    finally:
        spark.conf.set("spark.sql.python.filterPushdown.enabled", "false")


def test_reading_only_the_cold_tier_needs_no_broker(spark, tiers):
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


def test_a_query_of_a_catalog_table_names_its_options_or_is_told_to(spark, tiers):
    options = f"store '{tiers.store_url}', tier 'cold', subscribe 'flights'"
    spark.sql(f"CREATE TABLE flights_table USING tierlog OPTIONS ({options})")
    try:
        with pytest.raises(Exception, match="none of those of CREATE TABLE: name them in each"):
            spark.sql("SELECT count(*) FROM flights_table").collect()
        with pytest.raises(Exception, match="none of those of CREATE TABLE: name them in each"):
            spark.sql("INSERT INTO flights_table SELECT * FROM flights_table").collect()
        given = f"'store' = '{tiers.store_url}', 'tier' = 'cold', 'subscribe' = 'flights'"
        found = spark.sql(f"SELECT count(*) FROM flights_table WITH ({given})").collect()
        assert found[0][0] == read(spark, tiers, server=None, tier="cold").count()
    finally:
        spark.sql("DROP TABLE flights_table")


def test_an_invalid_option_is_named_and_secrets_are_never_shown(spark, tiers):
    secrets = {"token": "hunter2", "secretAccessKey": "hunter2", "accessKeyId": "hunter2"}
    frame = read(spark, tiers, **secrets)
    output = io.StringIO()
    with contextlib.redirect_stdout(output):
        frame.explain(mode="extended")
    assert "hunter2" not in output.getvalue()
    with pytest.raises(Exception, match="option tier: 'warm' is not one of all, cold") as caught:
        read(spark, tiers, tier="warm", **secrets).count()
    assert "hunter2" not in str(caught.value)


def test_small_partitions_share_tasks(spark, tmp_path):
    url = (tmp_path / "bucket").as_uri()
    put_topic(open_store(url), "wide", dict.fromkeys(range(40), "codec-lz4-0"))
    given = {"store": url, "tier": "cold", "subscribe": "wide"}
    frame = spark.read.format("tierlog").options(**given).load()
    assert frame.rdd.getNumPartitions() == 20
    assert frame.select("partition", "offset").distinct().count() == frame.count() == 40 * 260
    for log in tmp_path.rglob("*.log"):  # of which a count needs none, and the rows are cheap
        log.unlink()
    for schema in ("partition int", "topic string, partition int", "offset bigint"):
        counted = spark.read.format("tierlog").schema(schema).options(**given).load()
        assert counted.rdd.getNumPartitions() == 1
        assert counted.count() == 40 * 260
    by_partition = spark.read.format("tierlog").schema("partition int").options(**given).load()
    assert {row[1] for row in by_partition.groupBy("partition").count().collect()} == {260}


def test_an_empty_range_returns_no_rows(spark, tiers):
    assert (
        read(spark, tiers, startingOffsets='{"flights": {"0": 1600, "1": 1600, "2": 1600}}').count()
        == 0
    )


def test_an_invalid_stream_option_is_the_only_error_shown(spark, tiers, tmp_path):
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
