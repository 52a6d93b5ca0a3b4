import pytest
from pyspark.sql.functions import expr

from tests.fakes.two_tiers import two_tiers
from tierlog.client.client import Client
from tierlog.record_format.batch import parse_header
from tierlog.record_format.codecs import CODEC_NAMES

pytestmark = pytest.mark.spark


@pytest.fixture
def tiers(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=3)
        yield tiers


def consumed(tiers, topic="out"):
    with Client(tiers.url) as client:
        return list(client.consume(topic))


def fields(record):
    return (record.partition, record.key, record.value, record.timestamp, record.headers)


def test_a_frame_is_written_and_read_back(spark, tiers):
    frame = spark.range(1000).selectExpr(
        "cast(id % 10 as string) key",
        "concat('value ', id) value",
        "array(struct('origin' key, cast('spark' as binary) value)) headers",
        "timestamp_millis(1700000000000 + id) timestamp",
        "id",  # ignored, as by Kafka's sink
    )
    options = {"server": tiers.url, "topic": "out", "compression": "zstd"}
    frame.write.format("tierlog").mode("append").options(**options).save()
    records = consumed(tiers)
    assert {record.value for record in records} == {b"value %d" % n for n in range(1000)}
    assert {record.headers for record in records} == {(("origin", b"spark"),)}
    assert min(record.timestamp for record in records) == 1_700_000_000_000
    partitions = {}
    for record in records:
        partitions.setdefault(record.key, set()).add(record.partition)
    assert all(len(seen_in) == 1 for seen_in in partitions.values())

    # Rows of the source can be written unchanged; columns set the topic and partition.
    for name in ("even", "odd"):
        tiers.create(name, partitions=3, **{"compression.type": "producer"})
    source = {"store": tiers.store_url, "server": tiers.url, "subscribe": "out"}
    frame = spark.read.format("tierlog").options(includeHeaders="true", **source).load()
    frame = frame.withColumn(
        "topic", expr("if(cast(cast(key as string) as int) % 2 = 0, 'even', 'odd')")
    )
    frame = frame.withColumn("partition", expr("(partition + 1) % 3"))
    to = {"server": tiers.url, "compression": "gzip"}
    frame.write.format("tierlog").mode("append").options(**to).save()
    copied = [one for name in ("even", "odd") for one in consumed(tiers, name)]
    assert sorted(map(fields, copied)) == sorted(
        fields(one._replace(partition=(one.partition + 1) % 3)) for one in records
    )
    assert {int(one.key) % 2 for one in copied if one.topic == "even"} == {0}
    with Client(tiers.url) as client:
        sent = {of: client.fetch_batches(of, 0).batches for of in ("out", "even")}
    # `out` has its own codec.
    assert {of: CODEC_NAMES[parse_header(data).codec] for of, data in sent.items()} == {
        "out": "lz4",
        "even": "gzip",
    }


def test_an_invalid_write_is_refused_with_the_reason(spark, tiers):
    def save(frame, mode="append", **options):
        both = {"server": tiers.url, **options}
        frame.write.format("tierlog").mode(mode).options(**both).save()

    frame = spark.range(3).selectExpr("cast(id as string) value")
    for write, message in (
        (lambda: save(frame), "set the option topic, or add a column topic"),
        (lambda: save(frame, mode="overwrite", topic="out"), "a log cannot be overwritten"),
        (lambda: save(spark.range(3), topic="out"), "the frame has no column value"),
        (lambda: save(frame.selectExpr("*", "1 keys"), topic="out"), "did you mean key"),
        (lambda: save(frame.selectExpr("*", "1 key"), topic="out"), "column key int cannot be"),
        (lambda: save(frame, mode="error", topic="out"), "ErrorIfExists"),
        (lambda: save(frame, topic="nothing"), "there is no topic 'nothing'"),
        (lambda: save(frame, topic="out", compresion="lz4"), "did you mean compression"),
        (lambda: save(frame, topic="out", compression="brotli"), "one of none, gzip, snappy"),
    ):
        with pytest.raises(Exception, match=message):
            write()
    assert consumed(tiers) == []


def test_a_stream_copies_one_topic_to_another(spark, tiers, tmp_path):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    tiers.create("in", partitions=2)
    tiers.produce("in", 100)
    source = {"store": tiers.store_url, "server": tiers.url, "startingOffsets": "earliest"}
    frame = spark.readStream.format("tierlog").options(subscribe="in", **source).load()
    query = (
        frame.select("key", "value", "timestamp")
        .writeStream.format("tierlog")
        .options(server=tiers.url, topic="out", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    written = [
        one for (name, _), records in tiers.written.items() if name == "in" for one in records
    ]
    assert sorted((r.timestamp, r.value) for r in consumed(tiers)) == sorted(
        (one.timestamp, one.value) for one in written
    )
