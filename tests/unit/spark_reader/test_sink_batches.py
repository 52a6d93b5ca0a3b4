import random
from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from pyspark.sql.types import BinaryType, StructType

from tierlog.record_format.batch import parse_header
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.errors import InvalidOption, InvalidRecord
from tierlog.record_format.topic_rules import partition_for_key
from tierlog.spark_reader import sink_batches
from tierlog.spark_reader.sink_batches import Batcher, TopicMetadata
from tierlog.spark_reader.source import TierlogSource

HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TYPES = {
    "value": pa.binary(),
    "key": pa.string(),
    "topic": pa.string(),
    "partition": pa.int32(),
    "timestamp": pa.timestamp("us", "UTC"),
    "headers": HEADERS,
}


def row(value=b"v", **given):
    return {"value": value, **given}


def rows_of(*rows):
    """Spark's batch, with the columns that any of the rows has."""
    names = [name for name in TYPES if any(name in one for one in rows)]
    columns = {name: pa.array([one.get(name) for one in rows], TYPES[name]) for name in names}
    return pa.RecordBatch.from_pydict(columns)


def batcher(topic="t", partitions=3, **given):
    return Batcher(
        topic=topic,
        metadata_of=lambda name: TopicMetadata(partitions, 1 << 20, range(partitions)),
        codec=given.pop("codec", 0),
        now_ms=lambda: 77,
        **given,
    )


def sent(batcher, *rows):
    batches = [*batcher.add_rows(rows_of(*rows)), *batcher.flush()]
    return [
        (batch.topic_partition, record)
        for batch in batches
        for record in decode_batch(batch.data, parse_header(batch.data))
    ]


def test_a_rows_partition_takes_precedence_over_its_key_and_keyless_rows_stay_together():
    rows = [row(partition=2, key="a"), row(key="a"), row(), row(b"w")]
    found = sent(batcher(first_sticky=1), *rows)
    sent_rows = {(to.partition, record.key, record.value) for to, record in found}
    by_key = partition_for_key(b"a", 3)
    assert sent_rows == {(2, b"a", b"v"), (by_key, b"a", b"v"), (1, None, b"v"), (1, None, b"w")}
    assert {record.timestamp for _, record in found} == {77}


def test_rows_of_a_partition_keep_their_order():
    rng, rows = random.Random(1), []
    for number in range(500):
        row_ = row(b"%d" % number, topic=rng.choice("ab"))
        rows.append(row_ | rng.choice(({}, {"key": rng.choice("xyz")}, {"partition": 1})))
    for found in (sent(batcher(topic=None), *rows), sent(batcher(topic="t"), *rows)):
        numbers = {}
        for to, record in found:
            numbers.setdefault(to, []).append(int(record.value))
        assert all(of == sorted(of) for of in numbers.values())
        assert sorted(number for of in numbers.values() for number in of) == [*range(500)]


def test_the_topic_option_takes_precedence_over_a_rows_topic():
    rows = [row(topic="a"), row(topic="b")]
    assert {to.topic for to, _ in sent(batcher(topic=None), *rows)} == {"a", "b"}
    assert {to.topic for to, _ in sent(batcher(topic="t"), *rows)} == {"t"}
    with pytest.raises(InvalidRecord, match="has no topic"):
        sent(batcher(topic=None), row(topic="a"), row())
    for partition in (3, -1):
        with pytest.raises(InvalidRecord, match=f"t-{partition}, but the topic has 3 partitions"):
            sent(batcher(), row(partition=partition), row())


def test_batches_and_buffered_bytes_are_limited(monkeypatch):
    monkeypatch.setattr(sink_batches, "BATCH_BYTES", 1000)
    monkeypatch.setattr(sink_batches, "FLUSH_BYTES", 2500)
    limited = batcher(partitions=50)
    spread = rows_of(*(row(bytes(200), partition=n) for n in range(29)))
    ready = [*limited.add_rows(spread)]
    pending = 29 - sum(batch.records for batch in ready)
    assert 0 < pending * 200 < 2500
    full = [*limited.add_rows(rows_of(*(row(bytes(500), partition=40) for _ in range(8))))]
    assert {batch.records for batch in full if batch.topic_partition.partition == 40} == {2}


def test_keyless_rows_move_to_the_next_partition_with_each_full_batch(monkeypatch):
    monkeypatch.setattr(sink_batches, "BATCH_BYTES", 1000)
    keyless = rows_of(*(row(bytes(500)) for _ in range(8)))
    partitions = [batch.topic_partition.partition for batch in batcher().add_rows(keyless)]
    assert partitions == [0, 1, 2, 0]


def test_overwriting_is_refused_and_complete_mode_appends():
    source = TierlogSource({"server": "127.0.0.1:1", "topic": "t"})
    schema = StructType().add("value", BinaryType())
    assert source.streamWriter(schema, overwrite=True)
    with pytest.raises(InvalidOption, match="cannot be overwritten; write with mode append"):
        source.writer(schema, overwrite=True)


def test_records_keep_nulls_headers_and_times():
    micros = timedelta(microseconds=123_999)
    late, early = (datetime.fromtimestamp(at, UTC) + micros for at in (1_700_000_000, -1))
    rows = [
        row(None, key="k", timestamp=late, headers=[{"key": "h", "value": None}]),
        row(b"\xff", timestamp=early, headers=[]),
        row(b"", key="ü"),
    ]
    found = [record[1:] for _, record in sent(batcher(partitions=1), *rows)]
    assert found == [
        (1_700_000_000_123, b"k", None, (("h", None),)),
        (-877, None, b"\xff", ()),
        (77, "ü".encode(), b"", ()),
    ]


@pytest.mark.parametrize("header", [None, {"key": None, "value": b"v"}])
def test_a_header_without_a_key_is_refused(header):
    with pytest.raises(InvalidRecord, match="has a header without a key"):
        sent(batcher(), row(headers=[header]))
