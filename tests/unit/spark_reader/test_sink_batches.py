import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructType

from record_format.batch import parse_header
from record_format.decode import decode_batch
from record_format.errors import InvalidRecord
from record_format.murmur2 import partition_for_key
from spark_reader import sink_batches
from spark_reader.option_values import InvalidOption
from spark_reader.sink_batches import Batcher, Row, TopicMetadata, rows_of
from spark_reader.source import TierlogSource


def row(value=b"v", *, topic=None, partition=None, key=None, timestamp=None, headers=()):
    return Row(topic, partition, key, value, timestamp, headers)


def batcher(topic="t", partitions=3, **given):
    return Batcher(
        topic=topic,
        metadata_of=lambda name: TopicMetadata(partitions, 1 << 20, range(partitions)),
        codec=given.pop("codec", 0),
        now_ms=lambda: 77,
        **given,
    )


def sent(batcher, rows):
    batches = [batch for each in rows for batch in batcher.add(each)] + list(batcher.flush())
    return [
        (batch.topic_partition, record)
        for batch in batches
        for record in decode_batch(batch.data, parse_header(batch.data))
    ]


def test_a_rows_partition_takes_precedence_over_its_key_and_keyless_rows_stay_together():
    rows = [row(partition=2, key=b"a"), row(key=b"a"), row(), row(b"w")]
    found = sent(batcher(first_sticky=1), rows)
    sent_rows = {(to.partition, record.key, record.value) for to, record in found}
    by_key = partition_for_key(b"a", 3)
    assert sent_rows == {(2, b"a", b"v"), (by_key, b"a", b"v"), (1, None, b"v"), (1, None, b"w")}
    assert {record.timestamp for _, record in found} == {77}


def test_the_topic_option_takes_precedence_over_a_rows_topic():
    rows = [row(topic="a"), row(topic="b")]
    assert {to.topic for to, _ in sent(batcher(topic=None), rows)} == {"a", "b"}
    assert {to.topic for to, _ in sent(batcher(topic="t"), rows)} == {"t"}
    with pytest.raises(InvalidRecord, match="has no topic"):
        sent(batcher(topic=None), [row()])
    with pytest.raises(InvalidRecord, match="t-3, but the topic has 3 partitions"):
        sent(batcher(), [row(partition=3)])


def test_batches_and_buffered_bytes_are_limited(monkeypatch):
    monkeypatch.setattr(sink_batches, "BATCH_BYTES", 1000)
    monkeypatch.setattr(sink_batches, "FLUSH_BYTES", 2500)
    limited = batcher(partitions=50)
    ready = [b for n in range(29) for b in limited.add(row(bytes(200), partition=n))]
    assert sum(batch.records for batch in ready) == 20
    full = [b for n in range(8) for b in limited.add(row(bytes(500), partition=40))]
    assert {batch.records for batch in full} >= {2}


def test_overwriting_is_refused_and_complete_mode_appends():
    source = TierlogSource({"server": "127.0.0.1:1", "topic": "t"})
    schema = StructType().add("value", BinaryType())
    assert source.streamWriter(schema, overwrite=True)
    with pytest.raises(InvalidOption, match="cannot be overwritten; write with mode append"):
        source.writer(schema, overwrite=True)


def test_arrow_rows_keep_nulls_headers_and_times():
    header = pa.struct([("key", pa.string()), ("value", pa.binary())])
    batch = pa.RecordBatch.from_pydict(
        {
            "key": pa.array(["k", None]),
            "value": pa.array([None, b"\xff"], pa.binary()),
            "headers": pa.array([[{"key": "h", "value": None}], None], pa.list_(header)),
            "timestamp": pa.array([1_700_000_000_123_999, None], pa.timestamp("us", "UTC")),
        }
    )
    assert list(rows_of(batch)) == [
        Row(None, None, b"k", None, 1_700_000_000_123, (("h", None),)),
        Row(None, None, None, b"\xff", None, ()),
    ]


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}])
def test_a_header_without_a_key_is_refused(header):
    kind = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    rows = pa.RecordBatch.from_pydict({"value": [b"v"], "headers": pa.array([[header]], kind)})
    with pytest.raises(InvalidRecord, match="has a header without a key"):
        list(rows_of(rows))
