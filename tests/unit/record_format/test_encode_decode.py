"""Encoding columns into batches, and decoding them; and the end markers of transactions."""

from __future__ import annotations

import random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.fakes.control_markers import marker_key, marker_value
from tests.fakes.records import iter_records
from tests.unit.record_format.columns import Rows, rows
from tierlog.record_format.batch import check_crc, iter_headers, parse_header
from tierlog.record_format.codecs import (
    CODEC_NAMES,
    GZIP,
    LZ4,
    NONE,
    SNAPPY,
    ZSTD,
    DecompressedTooLarge,
)
from tierlog.record_format.decode import (
    EndMarker,
    Record,
    control_type,
    decode_batch,
    decode_columns,
    end_marker,
    end_marker_of,
    min_timestamp_of,
)
from tierlog.record_format.encode import encode_batch, encode_batches, record_size
from tierlog.record_format.errors import CorruptBatch, RecordTooLarge
from tierlog.record_format.record_walk import Walker
from tierlog.record_format.varint import SMALL

KIB_64 = b"v" * 65_536


def expected(batch: Rows, *, base_offset: int = 0) -> list[Record]:
    count = len(batch.values)
    return [
        Record(
            base_offset + index,
            batch.timestamps[index],
            (batch.keys or [None] * count)[index],
            batch.values[index],
            (batch.headers or [()] * count)[index] or (),
        )
        for index in range(count)
    ]


@example(batch=Rows([b"a", b"b"], [-1, 2**63 - 1], None, None), codec=0, base=0)
@given(batch=rows(), codec=st.sampled_from(list(CODEC_NAMES)), base=st.integers(0, 2**62))
def test_records_round_trip(batch: Rows, codec: int, base: int) -> None:
    data = encode_batch(**batch._asdict(), codec=codec, base_offset=base, leader_epoch=4)
    header = parse_header(data)
    check_crc(data, header)
    assert header.size_bytes == len(data)
    assert header.codec == codec
    assert header.leader_epoch == 4
    assert header.max_timestamp == max(batch.timestamps)
    assert decode_batch(data, header) == expected(batch, base_offset=base)
    assert min_timestamp_of(data, header) == min(batch.timestamps)


@given(batch=rows(), low=st.integers(0, 30), high=st.none() | st.integers(0, 30))
def test_a_range_of_offsets_is_decoded(batch: Rows, low: int, high: int | None) -> None:
    data = encode_batch(**batch._asdict(), base_offset=5)
    columns = decode_columns(data, parse_header(data), from_offset=low, end_offset=high)
    top = 1000 if high is None else high
    wanted = [r for r in expected(batch, base_offset=5) if low <= r.offset < top]
    assert list(map(Record, *columns)) == wanted


@pytest.mark.parametrize("count", [1, 63, 64, 65, 8191, 8192, 8193, len(SMALL) + 1])
def test_counts_and_sizes_around_varint_boundaries_round_trip(count: int) -> None:
    for size in (0, 1, *range(55, 65)):
        values = [b"x" * size] * count
        data = encode_batch(values, timestamps=[1] * count)
        assert decode_columns(data, parse_header(data)).values == values, size


@pytest.mark.parametrize("size", [8100, 8128, 8180, 8190, 8192, 8200, 16_383, 2**20, 2**21])
def test_large_values_around_varint_boundaries_round_trip(size: int) -> None:
    value = b"x" * size
    for keys in (None, [value]):
        data = encode_batch([value], timestamps=[1], keys=keys)
        assert decode_columns(data, parse_header(data)).values == [value]
        assert len(data) == 61 + record_size(value, keys[0] if keys else None)


def test_the_fast_path_writes_the_same_bytes_as_the_general_one() -> None:
    values = [bytes([n % 256]) * (n % 200) for n in range(1000)]
    fast = encode_batch(values, timestamps=[9] * 1000)
    assert fast == encode_batch(values, timestamps=[9] * 1000, keys=[None] * 1000)
    assert fast == encode_batch(values, timestamps=[9] * 1000, headers=[None] * 1000)


def test_the_header_has_the_given_fields() -> None:
    data = encode_batch(
        [b"v"],
        timestamps=[7],
        producer_id=5,
        producer_epoch=6,
        base_sequence=8,
        transactional=True,
        control=True,
    )
    header = parse_header(data)
    assert (header.producer_id, header.producer_epoch, header.base_sequence) == (5, 6, 8)
    assert header.is_transactional
    assert header.is_control
    assert list(iter_records(data)) == []
    assert len(decode_batch(data, header)) == 1


# --- cutting into batches -------------------------------------------------------------------------


@given(batch=rows(max_size=60), limit=st.integers(1500, 3000), codec=st.sampled_from([NONE, LZ4]))
def test_batches_respect_the_limit_and_lose_nothing(batch: Rows, limit: int, codec: int) -> None:
    ranges = encode_batches(**batch._asdict(), max_bytes=limit, codec=codec)
    assert [r.start for r in ranges] == [0, *(r.end for r in ranges[:-1])]
    found: list[Record] = []
    for item in ranges:
        assert len(item.batch) <= limit
        found += (r._replace(offset=r.offset + item.start) for r in iter_records(item.batch))
    assert found == expected(batch)


def test_a_record_of_exactly_the_limit_is_accepted() -> None:
    fits = b"x" * (1000 - 61 - (record_size(b"x" * 900) - 900))
    for values in ([fits], [b"a", fits, b"b"]):
        ranges = encode_batches(values, timestamps=[1] * len(values), max_bytes=1000)
        assert max(len(item.batch) for item in ranges) == 1000
        assert len(ranges) == len(values)
    with pytest.raises(RecordTooLarge) as caught:
        encode_batches([b"a", fits + b"x"], timestamps=[1, 1], max_bytes=1000)
    assert caught.value.limit_bytes == 1000
    assert caught.value.size_bytes == 1001


def test_the_limit_on_a_record_is_on_its_uncompressed_size() -> None:
    for values in ([bytes(5000)], [b"a", bytes(5000)]):
        with pytest.raises(RecordTooLarge):
            encode_batches(values, timestamps=[1] * len(values), max_bytes=1000, codec=ZSTD)


@pytest.mark.parametrize("codec", [GZIP, SNAPPY])
def test_batches_that_grow_by_compression_are_split(codec: int) -> None:
    noise = random.Random(3).randbytes(1000)
    values = [noise[:500], noise[500:]]
    limit = 1093  # enough for both uncompressed, not with a compressor's header
    assert len(encode_batches(values, timestamps=[1, 1], max_bytes=limit)) == 1
    ranges = encode_batches(values, timestamps=[1, 1], max_bytes=limit, codec=codec)
    assert [(item.start, item.end) for item in ranges] == [(0, 1), (1, 2)]
    with pytest.raises(RecordTooLarge):
        encode_batches([noise], timestamps=[1], max_bytes=1080, codec=codec)


def test_a_large_value_gets_its_own_batch() -> None:
    values = [b"small", KIB_64, b"small"]
    ranges = encode_batches(values, timestamps=[1, 2, 3], max_bytes=65_610)
    assert [(item.start, item.end) for item in ranges] == [(0, 1), (1, 2), (2, 3)]


# --- reading --------------------------------------------------------------------------------------


def test_invalid_utf8_in_header_names_is_replaced_as_kafkas_client_does(walk: Walker) -> None:
    data = encode_batch([b"v"], timestamps=[1], headers=[(("ab", b"x"),)])
    changed = data.replace(b"\x04ab", b"\x04\xff\xfe")
    (record,) = decode_batch(changed, parse_header(changed))
    assert record.headers == (("��", b"x"),)


def test_iteration_skips_batches_outside_the_range() -> None:
    data = b"".join(
        encode_batch([b"%d" % n, b"%d" % (n + 1)], timestamps=[n, n], base_offset=n)
        for n in range(0, 20, 2)
    )
    assert [r.offset for r in iter_records(data, from_offset=5, end_offset=9)] == [5, 6, 7, 8]
    assert [r.offset for r in iter_records(data[:-1], from_offset=15)] == [15, 16, 17]
    assert len(list(iter_headers(data))) == 10


def test_decompression_is_limited() -> None:
    data = encode_batch([KIB_64] * 4, timestamps=[1] * 4, codec=ZSTD)
    with pytest.raises(DecompressedTooLarge):
        decode_columns(data, parse_header(data), max_bytes=4 * 65_536)
    assert len(decode_columns(data, parse_header(data), max_bytes=4 * 65_600).offsets) == 4


def test_a_truncated_batch_raises() -> None:
    data = encode_batch([b"v"], timestamps=[1])
    with pytest.raises(CorruptBatch):
        decode_batch(data[:-1], parse_header(data))


def test_min_timestamp_of_undecodable_records_raises() -> None:
    data = encode_batch([b"value"] * 3, timestamps=[1, 2, 3], codec=GZIP)
    data[80] ^= 0xFF
    for cut in (data, data[:70]):
        with pytest.raises(CorruptBatch):
            min_timestamp_of(cut, parse_header(data))


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_errors_have_position_and_offset(codec: int) -> None:
    data = b"x" * 5 + encode_batch(
        [b"value"] * 3, timestamps=[1, 2, 3], base_offset=70, codec=codec
    )
    changed = data[:66] + bytes(b ^ 0xFF for b in data[66:80]) + data[80:]
    with pytest.raises(CorruptBatch) as caught:
        decode_batch(changed, parse_header(changed, 5))
    assert (caught.value.position, caught.value.offset) == (5, 70)


def record(key: bytes | None, value: bytes | None) -> Record:
    return Record(7, 0, key, value, ())


@pytest.mark.parametrize("committed", [True, False])
def test_an_end_marker_is_decoded(committed: bool) -> None:
    data = encode_batch(
        [marker_value(coordinator_epoch=5)],
        keys=[marker_key(committed=committed)],
        timestamps=[1],
        transactional=True,
        control=True,
    )
    assert end_marker_of(data, parse_header(data)) == EndMarker(committed, 5)


def test_other_control_records_are_not_end_markers() -> None:
    for kind in (2, 3, 6, -1):
        key = b"\0\0" + kind.to_bytes(2, "big", signed=True)
        assert control_type(key) == kind
        assert end_marker(record(key, b"\0")) is None


def test_markers_of_newer_versions_are_decoded_by_their_common_fields() -> None:
    assert end_marker(record(b"\0\1\0\1\0", b"\0\1\0\0\0\x09\0")) == EndMarker(True, 9)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (None, b""),
        (b"\0\0\0", b""),
        (b"\xff\xff\0\0", b""),
        (b"\0\0\0\0", None),
        (b"\0\0\0\0", b"\0\0\0\0\0"),
        (b"\0\0\0\0", b"\xff\xff\0\0\0\0"),
    ],
)
def test_an_invalid_marker_is_corrupt(key: bytes | None, value: bytes | None) -> None:
    with pytest.raises(CorruptBatch):
        end_marker(record(key, value))
