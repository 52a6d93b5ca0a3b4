import pytest

from tests.fakes.two_tiers import two_tiers
from tierlog.client import Client

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore::FutureWarning:pyspark"),
]


@pytest.fixture
def own(tmp_path):
    with two_tiers(tmp_path) as tiers:
        tiers.create("out", partitions=3)
        yield tiers


def consumed(tiers):
    with Client(tiers.url) as client:
        return list(client.consume("out"))


def test_writes_a_frame_and_reads_it_back(spark, own):
    frame = spark.range(1000).selectExpr(
        "cast(id % 10 as string) key",
        "concat('value ', id) value",
        "array(struct('origin' key, cast('spark' as binary) value)) headers",
        "timestamp_millis(1700000000000 + id) timestamp",
    )
    options = {"server": own.url, "topic": "out", "compression": "zstd"}
    frame.write.format("tierlog").mode("append").options(**options).save()
    records = consumed(own)
    assert {record.value for record in records} == {b"value %d" % n for n in range(1000)}
    assert {record.headers for record in records} == {(("origin", b"spark"),)}
    assert min(record.timestamp for record in records) == 1_700_000_000_000
    partitions = {}
    for record in records:
        partitions.setdefault(record.key, set()).add(record.partition)
    assert all(len(where) == 1 for where in partitions.values())


def test_refuses_what_cannot_be_written_by_name(spark, own):
    def save(frame, mode="append", **options):
        given = {"server": own.url, **options}
        frame.write.format("tierlog").mode(mode).options(**given).save()

    frame = spark.range(3).selectExpr("cast(id as string) value")
    for wrong, told in (
        (lambda: save(frame), "give the option topic, or a column topic"),
        (lambda: save(frame, mode="overwrite", topic="out"), "a log cannot be overwritten"),
        (lambda: save(spark.range(3), topic="out"), "column id bigint cannot be written"),
        (lambda: save(frame, topic="nothing"), "there is no topic 'nothing'"),
        (lambda: save(frame, topic="out", compresion="lz4"), "did you mean compression"),
        (lambda: save(frame, topic="out", compression="brotli"), "one of none, gzip, snappy"),
    ):
        with pytest.raises(Exception, match=told):
            wrong()
    assert consumed(own) == []


def test_a_stream_goes_from_one_topic_into_another(spark, own, tmp_path):
    pytest.importorskip("pyspark.sql.streaming.datasource", reason="streams need pyspark 4.2")
    own.create("in", partitions=2)
    own.produce("in", 100)
    source = {"store": own.store_url, "server": own.url, "startingOffsets": "earliest"}
    frame = spark.readStream.format("tierlog").options(subscribe="in", **source).load()
    query = (
        frame.select("key", "value", "timestamp")
        .writeStream.format("tierlog")
        .options(server=own.url, topic="out", checkpointLocation=str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    written = [one for (name, _), all_of in own.written.items() if name == "in" for one in all_of]
    assert sorted((r.timestamp, r.value) for r in consumed(own)) == sorted(
        (one.timestamp, one.value) for one in written
    )
