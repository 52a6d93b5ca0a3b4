"""Validation of produced batches: what Kafka's broker accepts is accepted unchanged, anything else
is refused with the reason.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.records import iter_records
from tests.unit.record_format import golden
from tests.unit.record_format.columns import Rows, rows
from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    CONTROL_BIT,
    DELETE_HORIZON_BIT,
    LOG_APPEND_TIME,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    check_crc,
    parse_header,
    set_max_timestamp,
)
from tierlog.record_format.codecs import CODEC_NAMES, GZIP, LZ4, SNAPPY, ZSTD, compress
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    InvalidBatch,
    InvalidRecord,
    RecordTooLarge,
    RequestTooLarge,
    TierlogError,
    TooManyRecords,
)
from tierlog.record_format.produced import (
    ProducedBatches,
    ProduceLimits,
    build_produced,
    check_produced,
    check_sizes,
    recompress,
    timestamp_problem,
)
from tierlog.record_format.record_walk import Walker

NOW = 1_700_000_000_000
MIB = 1 << 20


def check(body: bytes, **limits: Any) -> ProducedBatches:
    defaults = {"max_message_bytes": 8 * MIB, "now_ms": NOW}
    return check_produced(bytearray(body), ProduceLimits(**{**defaults, **limits}))


def batch(count: int = 3, **fields: Any) -> bytearray:
    return encode_batch(
        [b"value %d" % n for n in range(count)],
        timestamps=[NOW + n for n in range(count)],
        **fields,
    )


def resealed(body: bytes) -> bytearray:
    """The body, one batch, with its checksum corrected."""
    changed = bytearray(body)
    header = parse_header(changed)
    set_max_timestamp(changed, header, timestamp=header.max_timestamp)
    return changed


def patched(body: bytes, layout: str, position: int, value: int) -> bytearray:
    changed = bytearray(body)
    struct.pack_into(layout, changed, position, value)
    return resealed(changed)


# --- accepted -------------------------------------------------------------------------------------


def test_batches_of_kafkas_producers_are_accepted_unchanged(walk: Walker) -> None:
    for header, data in golden.all_batches():
        only_for_brokers = (
            header.is_control
            or header.is_transactional
            or header.timestamp_type
            or header.has_delete_horizon
            or header.record_count != header.last_offset_delta + 1
        )
        if only_for_brokers:
            with pytest.raises((InvalidRecord, InvalidBatch)):
                check(data)
            continue
        produced = check(data)
        assert produced.body == data
        assert produced.headers == [header]
        timestamps = [record.timestamp for record in decode_batch(data, header)]
        assert produced.min_timestamps == [min(timestamps)]


def test_a_segment_of_many_batches_is_accepted(walk: Walker) -> None:
    _, data = golden.logs(golden.ROOT / "codec-zstd-0")[0]
    produced = check(data)
    assert produced.body == data
    assert produced.record_count == 260
    assert produced.headers[0].position == 0


@given(batch=rows(), codec=st.sampled_from(list(CODEC_NAMES)))
def test_encoded_batches_are_accepted(batch: Rows, codec: int) -> None:
    data = encode_batch(**batch._asdict(), codec=codec)
    produced = check(data)
    assert produced.body == data
    assert produced.min_timestamps == [min(batch.timestamps)]


# --- refused: bytes -------------------------------------------------------------------------------


def test_every_flipped_bit_of_the_checksummed_part_is_refused(walk: Walker) -> None:
    data = batch(2)
    for position in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[position] ^= 1 << bit
            if position not in range(8) and position not in range(12, 16):
                with pytest.raises(InvalidBatch):
                    check(changed)


@pytest.mark.parametrize("codec", CODEC_NAMES)
def test_changed_bytes_with_a_valid_checksum_are_refused_or_decoded_correctly(
    codec: int, walk: Walker
) -> None:
    source = random.Random(codec)
    data = batch(5, codec=codec)
    for _ in range(500):
        changed = bytearray(data)
        for _ in range(source.randint(1, 3)):
            changed[source.randrange(16, len(changed))] = source.randrange(256)
        try:
            changed = resealed(changed)
            produced = check(changed)
        except TierlogError:
            continue
        header = produced.headers[0]
        records = decode_batch(produced.body, header)
        assert [record.offset for record in records] == list(range(header.record_count))
        assert max(record.timestamp for record in records) == header.max_timestamp
        assert min(record.timestamp for record in records) == produced.min_timestamps[0]


@given(data=st.binary(max_size=200))
def test_any_bytes_are_refused(data: bytes) -> None:
    with pytest.raises((InvalidBatch, InvalidRecord, RecordTooLarge)):
        check(data)


def test_truncated_and_trailing_batches_are_refused_with_their_position() -> None:
    data = batch()
    for size in range(1, len(data)):
        with pytest.raises(InvalidBatch) as caught:
            check(data + data[:size])
        assert caught.value.position == len(data)
    with pytest.raises(InvalidBatch):
        check(data + b"\0")


def test_an_empty_request_is_refused() -> None:
    with pytest.raises(InvalidRecord):
        check(b"")


@pytest.mark.parametrize(
    ("layout", "position", "value"),
    [
        (">h", 21, 5),  # codec
        (">h", 21, 7),
        (">i", 57, 2),  # one record too few
        (">i", 23, 3),  # last offset delta
        (">i", 57, 0),
        (">q", 43, 9),  # producer id without epoch and sequence
        (">q", 43, -2),
    ],
)
def test_an_inconsistent_field_is_refused(layout: str, position: int, value: int) -> None:
    with pytest.raises(InvalidBatch):
        check(patched(batch(), layout, position, value))


def test_a_negative_producer_id_is_refused_even_with_epoch_and_sequence() -> None:
    """The log would treat the batch as one without a producer."""
    data = batch(producer_id=9, producer_epoch=0, base_sequence=0)
    with pytest.raises(InvalidBatch):
        check(patched(data, ">q", 43, -2))


def test_a_batch_without_records_is_refused() -> None:
    empty = batch(1)[:61]
    struct.pack_into(">i", empty, 8, 49)
    struct.pack_into(">i", empty, 57, 0)
    with pytest.raises(InvalidBatch):
        check(resealed(empty))


@pytest.mark.parametrize("codec", [GZIP, SNAPPY, LZ4, ZSTD])
def test_records_that_cannot_be_decompressed_are_refused(codec: int) -> None:
    data = batch(codec=codec)
    for position in (61, 62, 63):
        changed = bytearray(data)
        changed[position] ^= 0xFF
        with pytest.raises(InvalidBatch):
            check(resealed(changed))
    mislabelled = patched(batch(), ">h", 21, codec)
    with pytest.raises(InvalidBatch):
        check(mislabelled)


def test_gaps_in_the_offset_deltas_are_refused(walk: Walker) -> None:
    data = batch(2)
    at = data.rindex(b"\x02\x02\x01")  # timestamp delta 1, offset delta 1, null key
    changed = patched(data, ">b", at + 1, 4)
    changed = patched(changed, ">i", 23, 2)
    with pytest.raises(InvalidBatch):
        check(changed)


# --- refused: fields that producers may not set ---------------------------------------------------


@pytest.mark.parametrize(
    "bit", [CONTROL_BIT, TRANSACTIONAL_BIT, DELETE_HORIZON_BIT, LOG_APPEND_TIME_BIT]
)
def test_attributes_reserved_for_the_broker_are_refused(bit: int) -> None:
    with pytest.raises(InvalidRecord) as caught:
        check(batch() + patched(batch(), ">h", 21, bit))
    assert caught.value.problems[0].loc == "batches[1]"


def test_a_compacted_topic_refuses_records_without_a_key(walk: Walker) -> None:
    keyed = encode_batch([b"v", None], timestamps=[NOW, NOW], keys=[b"", b"k"], codec=LZ4)
    assert check(keyed, require_keys=True).record_count == 2
    unkeyed = encode_batch([b"v", None], timestamps=[NOW, NOW], keys=[b"k", None], codec=LZ4)
    with pytest.raises(InvalidRecord, match="key"):
        check(unkeyed, require_keys=True)


# --- refused: sizes -------------------------------------------------------------------------------


def test_a_batch_of_exactly_the_size_limit_is_accepted() -> None:
    data = batch()
    assert check(data, max_message_bytes=len(data)).record_count == 3
    with pytest.raises(RecordTooLarge) as caught:
        check(data, max_message_bytes=len(data) - 1)
    assert caught.value.limit_bytes == len(data) - 1
    assert caught.value.size_bytes == len(data)


def test_a_batch_too_large_for_readers_to_decompress_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whatever `http.expanded.max.bytes` allows for a request."""
    data = bytes(encode_batch([bytes(1000)], timestamps=[1], codec=ZSTD))
    monkeypatch.setattr(codecs, "MAX_EXPANDED_BYTES", 1010)
    assert check(data * 3, max_expanded_bytes=1 << 40).record_count == 3
    monkeypatch.setattr(codecs, "MAX_EXPANDED_BYTES", 1000)
    with pytest.raises(RequestTooLarge, match="a batch decompresses to more than 1000 bytes"):
        check(data, max_expanded_bytes=1 << 40)


def test_the_decompressed_size_of_a_request_is_limited() -> None:
    value = b"\0" * 100_000
    data = encode_batch([value], timestamps=[NOW], codec=ZSTD)
    assert check(data * 3, max_expanded_bytes=301_000).record_count == 3
    with pytest.raises(RequestTooLarge) as caught:
        check(data * 4, max_expanded_bytes=301_000)
    assert caught.value.limit_bytes == 301_000


def test_the_number_of_records_is_limited() -> None:
    assert check(batch(3) * 2, max_records=6).record_count == 6
    with pytest.raises(TooManyRecords):
        check(batch(3) * 2, max_records=5)


def test_an_impossible_count_of_compressed_records_is_refused() -> None:
    data = bytearray(batch(1, codec=ZSTD))
    struct.pack_into(">i", data, 23, 2**31 - 2)
    struct.pack_into(">i", data, 57, 2**31 - 1)
    with pytest.raises(InvalidBatch, match="cannot fit"):
        check(resealed(data))


# --- time -----------------------------------------------------------------------------------------

CUSTOM: dict[str, Any] = {"before_max_ms": 1000, "after_max_ms": 500}


@pytest.mark.parametrize("timestamp", [NOW - 1000, NOW, NOW + 500, -1])
def test_timestamps_within_the_bounds_are_accepted(timestamp: int, walk: Walker) -> None:
    data = encode_batch([b"v"] * 3, timestamps=[NOW, timestamp, NOW])
    assert check(data, **CUSTOM).min_timestamps == [min(NOW, timestamp)]


@pytest.mark.parametrize(
    ("timestamp", "message"),
    [(NOW - 1001, "before.max"), (NOW + 501, "after.max"), (0, "before.max"), (-2, "negative")],
)
def test_timestamps_outside_the_bounds_are_refused(
    timestamp: int, message: str, walk: Walker
) -> None:
    for others in (NOW, -1):
        data = encode_batch([b"v"] * 3, timestamps=[others, timestamp, NOW])
        with pytest.raises(InvalidRecord, match=message):
            check(data, **CUSTOM)


def test_log_append_time_ignores_the_timestamp_bounds() -> None:
    data = encode_batch([b"v"], timestamps=[1])
    assert check(data, timestamp_type=LOG_APPEND_TIME, **CUSTOM).record_count == 1


def test_a_wrong_maximum_timestamp_is_corrected_as_kafka_does(walk: Walker) -> None:
    correct = batch()
    for wrong in (0, NOW + 10_000, -1):
        body = bytearray(batch() + batch())
        set_max_timestamp(body, parse_header(body), timestamp=wrong)
        produced = check(body)
        assert produced.body == correct + correct
        assert produced.headers[0] == parse_header(correct)


def test_a_refused_body_is_not_changed() -> None:
    wrong_timestamp = batch()
    set_max_timestamp(wrong_timestamp, parse_header(wrong_timestamp), timestamp=5)
    body = bytearray(wrong_timestamp + batch(control=True))
    before = bytes(body)
    with pytest.raises(InvalidRecord):
        check_produced(body, ProduceLimits(max_message_bytes=MIB, now_ms=NOW))
    assert body == before


def test_a_single_timestamp_can_be_validated() -> None:
    limits = ProduceLimits(1, NOW, **CUSTOM)
    assert timestamp_problem(NOW, limits) == ""
    assert timestamp_problem(-1, limits) == ""
    assert "before.max" in timestamp_problem(NOW - 1001, limits)


# --- recompression --------------------------------------------------------------------------------


@pytest.mark.parametrize("source", CODEC_NAMES)
@pytest.mark.parametrize("target", CODEC_NAMES)
def test_recompression_changes_only_the_codec(source: int, target: int) -> None:
    fields = {"producer_id": 77, "producer_epoch": 1, "base_sequence": 5, "codec": source}
    produced = check(batch(4, **fields) + batch(2) + batch(1, codec=target))
    again = recompress(produced, target)
    assert [header.codec for header in again.headers] == [target] * 3
    assert list(iter_records(again.body)) == list(iter_records(produced.body))
    assert again.min_timestamps == produced.min_timestamps
    for old, new in zip(produced.headers, again.headers, strict=True):
        check_crc(again.body, new)
        assert new == parse_header(again.body, new.position)
        assert new[7:] == old[7:]
    assert check(again.body).headers == again.headers


def test_recompression_to_the_same_codec_changes_nothing() -> None:
    produced = check(batch(codec=LZ4))
    assert recompress(produced, LZ4) is produced


def test_sizes_are_checked_again_after_recompression() -> None:
    data = encode_batch([b"\0" * 5000], timestamps=[NOW], codec=ZSTD)
    produced = recompress(check(data, max_message_bytes=1000), 0)
    with pytest.raises(RecordTooLarge):
        check_sizes(produced, max_message_bytes=1000)
    check_sizes(produced, max_message_bytes=6000)


# --- columns --------------------------------------------------------------------------------------


@given(batch=rows(), codec=st.sampled_from(list(CODEC_NAMES)))
def test_built_batches_are_valid(batch: Rows, codec: int) -> None:
    built = build_produced(**batch._asdict(), max_message_bytes=1500 + 61, codec=codec)
    assert check(built.body) == built


def test_an_idempotent_request_is_one_batch_up_to_the_limit() -> None:
    ids = {"producer_id": 2**40, "producer_epoch": 2, "base_sequence": 10}
    columns: dict[str, Any] = {"values": [b"v"] * 100, "timestamps": [NOW] * 100}
    size = len(encode_batch(**columns))
    built = build_produced(**columns, **ids, max_message_bytes=size)
    assert built.headers[0][10:13] == (2**40, 2, 10)
    assert check(built.body) == built
    with pytest.raises(RequestTooLarge) as refused:
        build_produced(**columns, **ids, max_message_bytes=size - 1)
    assert (refused.value.size_bytes, refused.value.limit_bytes) == (size, size - 1)
    assert len(build_produced(**columns, max_message_bytes=size - 1).headers) > 1


def test_a_record_that_is_too_large_alone_is_named_to_an_idempotent_producer_too() -> None:
    columns: dict[str, Any] = {"values": [b"v", b"v" * 100], "timestamps": [NOW] * 2}
    with pytest.raises(RecordTooLarge) as refused:
        build_produced(**columns, producer_id=2**40, max_message_bytes=100)
    assert refused.value.row == 1


def test_compressed_garbage_is_refused() -> None:
    data = bytearray(batch(3, codec=GZIP))[:61] + compress(GZIP, b"noise" * 50)
    struct.pack_into(">i", data, 8, len(data) - 12)
    with pytest.raises(InvalidBatch):
        check(resealed(data))
