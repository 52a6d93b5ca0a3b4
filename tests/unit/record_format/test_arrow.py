import random
import struct

import pyarrow as pa
import pytest

from tests.fakes.records import iter_records
from tests.unit.record_format import golden
from tierlog.record_format import arrow_columns as kernel
from tierlog.record_format.arrow import ArrowDecoder, DecodeRequest, warm
from tierlog.record_format.arrow_schema import COLUMNS, SCHEMA
from tierlog.record_format.batch import (
    HEADER_SIZE,
    iter_headers,
    parse_header,
    set_max_timestamp,
    stamp,
    stamp_log_append_time,
)
from tierlog.record_format.decode import Record, decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn, parse_txn_index
from tierlog.record_format.record_walk import RowFilter

FIXTURES = golden.ROOT
PARTITIONS = sorted(path.name for path in FIXTURES.glob("*-[0-9]") if path.is_dir())


def log_of(partition: str) -> bytes:
    return b"".join(path.read_bytes() for path in sorted((FIXTURES / partition).glob("*.log")))


def two_logs() -> bytes:
    """Batches without and with compression; the offsets of the second log follow the first."""
    first, second = log_of("codec-none-0"), bytearray(log_of("codec-zstd-0"))
    end = list(iter_headers(first))[-1].next_offset
    for header in iter_headers(bytes(second)):
        struct.pack_into(">q", second, header.position, end + header.base_offset)
    return first + bytes(second)


def rows_of(batches) -> list[dict]:
    return [row for batch in batches for row in batch.to_pylist()]


def decode(buf, **request) -> list[dict]:
    return rows_of(ArrowDecoder(DecodeRequest("topic", 3, **request)).decode(buf))


def ms(moment) -> int:
    return int(moment.timestamp() * 1000 + 0.5 * (1 if moment.timestamp() > 0 else -1))


def as_fixture(row: dict, like: dict) -> dict:
    headers = tuple((h["key"], h["value"]) for h in row["headers"] or ())
    record = Record(row["offset"], ms(row["timestamp"]), row["key"], row["value"], headers)
    timestamp_type = ("CreateTime", "LogAppendTime")[row["timestampType"]]
    return golden.as_expected(record, like | {"timestamp_type": timestamp_type})


@pytest.mark.parametrize("partition", PARTITIONS)
def test_decodes_the_records_that_kafkas_consumer_read(partition):
    expected = golden.expected_records(FIXTURES / partition)
    start = golden.offsets(FIXTURES / partition)["log_start_offset"]
    rows = decode(log_of(partition), row_filter=RowFilter(start_offset=start))
    assert len(rows) == len(expected)
    for row, like in zip(rows, expected, strict=True):
        assert as_fixture(row, like) == like
        assert (row["topic"], row["partition"]) == ("topic", 3)


@pytest.mark.parametrize("partition", PARTITIONS)
def test_single_columns_and_small_batches_give_the_same_rows(partition):
    log = log_of(partition)
    whole = pa.Table.from_batches(
        ArrowDecoder(DecodeRequest("t", 0)).decode(log), schema=SCHEMA
    ).combine_chunks()
    for name in COLUMNS:
        decoder = ArrowDecoder(DecodeRequest("t", 0, columns=(name,), batch_rows=7, batch_bytes=99))
        batches = list(decoder.decode(log))
        assert all(0 < batch.num_rows <= 7 for batch in batches)
        for batch in batches:
            batch.validate(full=True)
        column = pa.Table.from_batches(batches, schema=decoder.schema).column(0)
        assert column.combine_chunks().equals(whole.column(name).combine_chunks()), name


@pytest.mark.parametrize("partition", ["txn-0", "txn-multi-0", "txn-multi-1", "compacted-txn-0"])
def test_skips_what_a_read_committed_consumer_did_not_see(partition):
    aborted = [
        txn
        for path in (FIXTURES / partition).glob("*.txnindex")
        for txn in parse_txn_index(path.read_bytes())
    ]
    facts = golden.offsets(FIXTURES / partition)
    rows = decode(
        log_of(partition),
        columns=("offset",),
        aborted=aborted,
        row_filter=RowFilter(end_offset=facts["last_stable_offset"]),
    )
    assert [row["offset"] for row in rows] == golden.committed(FIXTURES / partition)


def test_offset_and_time_filters_are_exact_with_unordered_timestamps():
    log = log_of("codec-lz4-0")
    records = list(iter_records(log))
    times = sorted({record.timestamp for record in records})
    for row_filter in (
        RowFilter(start_offset=5, end_offset=20),
        RowFilter(start_offset=records[-1].offset),
        RowFilter(end_offset=0),
        RowFilter(
            start_timestamp=times[len(times) // 3], last_timestamp=times[2 * len(times) // 3]
        ),
        RowFilter(3, 200, times[2], times[-1]),
    ):
        wanted = [
            record.offset
            for record in records
            if row_filter.start_offset <= record.offset < row_filter.end_offset
            and row_filter.start_timestamp <= record.timestamp <= row_filter.last_timestamp
        ]
        for columns in (("offset",), ("offset", "value"), COLUMNS):
            for batch_rows in (3, 16384):
                rows = decode(log, columns=columns, row_filter=row_filter, batch_rows=batch_rows)
                assert [row["offset"] for row in rows] == wanted


def test_a_record_batch_is_split_into_arrow_batches():
    headers = [tuple((f"h{n}", b"x") for n in range(index % 9)) for index in range(5000)]
    buf = encode_batch(
        [None if n % 5 == 0 else b"v%d" % n for n in range(5000)],
        keys=[None if n % 3 == 0 else b"" for n in range(5000)],
        headers=headers,
        timestamps=range(5000),
        codec=4,
    )
    whole = decode(buf)
    assert decode(buf, batch_rows=37) == whole
    found = [row["headers"] and [(h["key"], h["value"]) for h in row["headers"]] for row in whole]
    assert found == [list(pairs) or None for pairs in headers]  # null, as of Spark's Kafka source


def test_records_are_not_decompressed_if_only_offsets_are_read():
    buf = encode_batch([b"x"] * 100, timestamps=[1] * 100, codec=3, base_offset=50)
    buf[HEADER_SIZE + 20] ^= 0xFF
    set_max_timestamp(
        buf, parse_header(buf), timestamp=1
    )  # corrects the checksum over the broken records
    rows = decode(buf, columns=("offset", "timestampType"), batch_rows=30)
    assert [row["offset"] for row in rows] == list(range(50, 150))
    with pytest.raises(CorruptBatch):
        decode(buf, columns=("offset", "timestamp"))


def test_rows_are_counted_without_columns():
    buf = encode_batch([b"x"] * 100, timestamps=[1] * 100)
    batches = ArrowDecoder(DecodeRequest("t", 0, columns=(), batch_rows=64)).decode(buf)
    assert [batch.num_rows for batch in batches] == [64, 36]


def test_timestamps_out_of_range_in_microseconds_are_clamped():
    buf = encode_batch([b"", b""], timestamps=[-(2**63), -1])
    buf += encode_batch([b""], timestamps=[2**63 - 1], base_offset=2)
    (batch,) = ArrowDecoder(DecodeRequest("t", 0, columns=("timestamp",))).decode(buf)
    limit = (2**63 - 1) // 1000 * 1000
    assert batch.column(0).cast(pa.int64()).to_pylist() == [-limit, -1000, limit]


def test_log_append_time_is_that_of_the_batch():
    buf = encode_batch([b"a", b"b"], timestamps=[5, 6])
    stamp_log_append_time(buf, parse_header(buf), timestamp=999)
    rows = decode(buf, columns=("timestamp", "timestampType"))
    assert [(ms(row["timestamp"]), row["timestampType"]) for row in rows] == [(999, 1)] * 2


def test_header_names_are_decoded_like_kafkas_client_does():
    buf = encode_batch([b"a"], timestamps=[5], headers=[(("name", b"\xff"),)])
    at = buf.index(b"name")
    buf[at] = 0xFF
    set_max_timestamp(buf, parse_header(buf), timestamp=5)
    assert decode(buf)[0]["headers"] == [{"key": "\ufffdame", "value": b"\xff"}]


def test_corruption_is_reported_with_file_position_and_offset():
    first, second = (encode_batch([b"x" * 50], timestamps=[1], base_offset=n) for n in (0, 1))
    second[-1] ^= 1
    decoder = ArrowDecoder(DecodeRequest("t", 0))
    with pytest.raises(CorruptBatch, match="checksum") as caught:
        list(decoder.decode(bytes(first + second), file="some.log", position=1000))
    error = caught.value
    assert (error.file, error.position, error.offset) == ("some.log", 1000 + len(first), 1)


@pytest.mark.parametrize(("damaged", "byte", "refused"), [(1, 6, 1), (1, 7, 2), (1, 0, 2)])
@pytest.mark.parametrize("columns", [("value",), ("offset",)])
def test_a_batch_out_of_order_is_corrupt(damaged, byte, refused, columns):
    """No checksum covers a base offset: its rows would be given other offsets, or be left out."""
    batches = [
        encode_batch([b"a"] * 5, timestamps=[1] * 5, base_offset=base) for base in (300, 305, 310)
    ]
    assert len(decode(b"".join(batches), columns=columns)) == 15
    batches[damaged][byte] ^= 3 if byte == 7 else 1
    with pytest.raises(CorruptBatch) as corrupt:
        decode(b"".join(batches), columns=columns, row_filter=RowFilter(end_offset=400))
    assert corrupt.value.position == refused * len(batches[0])


@pytest.mark.parametrize("cut", [1, 30, HEADER_SIZE, HEADER_SIZE + 1, -1])
def test_a_truncated_batch_is_corrupt(cut):
    buf = encode_batch([b"x" * 50], timestamps=[1])
    with pytest.raises(CorruptBatch):
        decode(buf + buf[:cut])


def test_a_record_count_that_cannot_fit_is_refused():
    buf = encode_batch([b"x"] * 10, timestamps=[1] * 10, codec=4)
    struct.pack_into(">i", buf, 23, 2**31 - 2)
    struct.pack_into(">i", buf, 57, 2**31 - 1)
    set_max_timestamp(buf, parse_header(buf), timestamp=1)
    for columns in (COLUMNS, ("offset",)):
        with pytest.raises(CorruptBatch, match="cannot fit"):
            decode(buf, columns=columns)


def expected_rows(buf) -> list | None:
    """The rows of the plain decoder; None if it refuses the bytes."""
    try:
        records = [r for header in iter_headers(buf) for r in decode_batch(buf, header)]
    except CorruptBatch:
        return None
    limit = (2**63 - 1) // 1000
    micros = [max(-limit, min(limit, record.timestamp)) * 1000 for record in records]
    return [(r.offset, t, r.key, r.value, r.headers) for r, t in zip(records, micros, strict=True)]


def broken(buf: bytearray, rng: random.Random) -> bytearray:
    """`buf` with one to three bytes of its records or counts changed, and a valid checksum."""
    buf = bytearray(buf)
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        if rng.random() < 0.1:
            at, mask = rng.choice((26, 60, 34, 27)), 1 << rng.randrange(8)
        else:
            at, mask = rng.randrange(HEADER_SIZE, len(buf)), rng.randrange(1, 256)
        buf[at] ^= mask
    set_max_timestamp(buf, parse_header(buf), timestamp=2**40)
    return buf


@pytest.mark.parametrize("codec", range(5))
def test_broken_records_are_refused_exactly_if_the_plain_decoder_refuses_them(codec):
    rng = random.Random(codec)
    for _ in range(400):
        count = rng.randrange(1, 6)
        buf = encode_batch(
            [rng.choice((None, b"", rng.randbytes(rng.randrange(70)))) for _ in range(count)],
            keys=[rng.choice((None, b"", b"key")) for _ in range(count)],
            headers=[
                tuple(
                    ("n" * rng.randrange(3), rng.choice((None, b"c")))
                    for _ in range(rng.randrange(3))
                )
                for _ in range(count)
            ],
            timestamps=[rng.choice((5, 2**40, 0)) for _ in range(count)],
            codec=codec,
        )
        stamp(buf, 0, base_offset=7, leader_epoch=0)
        try:
            bad = broken(buf, rng)
        except CorruptBatch:  # an impossible header
            continue
        expected = expected_rows(bad)
        assert arrow_rows(bad) == expected, bad.hex()


def arrow_rows(buf) -> list | None:
    """The rows of the compiled decoder in the same form, with timestamps in microseconds."""
    columns = ("offset", "timestamp", "key", "value", "headers")
    try:
        batches = list(ArrowDecoder(DecodeRequest("t", 0, columns=columns)).decode(buf))
    except CorruptBatch:
        return None
    found = []
    for batch in batches:
        batch.validate(full=True)
        lists = [batch.column(0), batch.column(1).cast(pa.int64()), *batch.columns[2:4]]
        headers = [
            tuple((h["key"], h["value"]) for h in row or ()) for row in batch.column(4).to_pylist()
        ]
        found += zip(*(column.to_pylist() for column in lists), headers, strict=True)
    return found


def test_an_aborted_transaction_of_another_producer_changes_nothing():
    buf = encode_batch(
        [b"x"], timestamps=[1], producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
    )
    assert decode(buf, aborted=[AbortedTxn(8, 0, 5, 0)]) == decode(buf) != []
    assert decode(buf, aborted=[AbortedTxn(7, 0, 5, 0)]) == []
    assert decode(buf, aborted=[AbortedTxn(7, 1, 5, 0)]) != []


def test_a_flipped_bit_is_refused_or_changes_no_row_count():
    rng = random.Random(7)
    log = two_logs()
    decoder = ArrowDecoder(DecodeRequest("t", 0))
    whole = sum(batch.num_rows for batch in decoder.decode(log))
    refused = 0
    for _ in range(300):
        bad = bytearray(log)
        bad[rng.randrange(len(bad))] ^= 1 << rng.randrange(8)
        try:
            # Base offset and leader epoch lie before the checksummed part.
            assert sum(batch.num_rows for batch in decoder.decode(bad)) == whole
        except CorruptBatch:
            refused += 1
    assert refused > 290


def test_decoding_after_warm_compiles_nothing():
    warm()
    log = two_logs()
    for data in (log, bytearray(log), memoryview(log), log_of("codec-none-0")):
        for columns in (COLUMNS, ("offset",)):
            list(ArrowDecoder(DecodeRequest("t", 0, columns=columns)).decode(data))
    for compiled in (kernel.scan_headers, kernel.decode_records, kernel.fill_offsets):
        assert len(compiled.signatures) == 1, compiled
