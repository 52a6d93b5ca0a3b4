"""Batch headers: parsing, validation, and the fields that are changed in place."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierlog.record_format.batch import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    BatchHeader,
    check_crc,
    iter_headers,
    parse_header,
    set_producer,
    stamp,
    stamp_log_append_time,
)
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch

BATCH = bytes(encode_batch([b"one", b"two"], timestamps=[5, 3], base_offset=7, leader_epoch=2))


def patched(layout: str, position: int, value: int) -> bytes:
    changed = bytearray(BATCH)
    struct.pack_into(layout, changed, position, value)
    return bytes(changed)


def test_a_header_is_parsed_at_any_position() -> None:
    header = parse_header(b"xyz" + BATCH, 3)
    assert header.position == 3
    assert header.size_bytes == len(BATCH)
    assert header.end_position == 3 + len(BATCH)
    assert (header.base_offset, header.last_offset, header.next_offset) == (7, 8, 9)
    assert (header.base_timestamp, header.max_timestamp) == (5, 5)
    assert header.leader_epoch == 2
    assert header.pack() == BATCH[:HEADER_SIZE]


def test_a_truncated_header_is_refused() -> None:
    for size in range(HEADER_SIZE):
        with pytest.raises(CorruptBatch):
            parse_header(BATCH[:size])
        assert list(iter_headers(BATCH[:size])) == []


@pytest.mark.parametrize(
    ("layout", "position", "value", "message"),
    [
        (">b", 16, 1, "magic is 1"),
        (">b", 16, 3, "magic is 3"),
        (">i", 8, HEADER_SIZE - 12 - 1, "shorter"),
        (">i", 8, -1, "shorter"),
        (">i", 8, -(2**31), "shorter"),
        (">q", 0, -1, "base offset"),
        (">i", 23, -1, "last offset delta"),
        (">i", 57, -1, "records"),
        (">i", 57, 3, "records"),
    ],
)
def test_an_impossible_field_is_refused(
    layout: str, position: int, value: int, message: str
) -> None:
    with pytest.raises(CorruptBatch, match=message):
        parse_header(patched(layout, position, value))


def test_a_count_that_cannot_fit_is_refused() -> None:
    overstated = bytearray(patched(">i", 57, 2**31 - 1))
    struct.pack_into(">i", overstated, 23, 2**31 - 2)
    with pytest.raises(CorruptBatch, match="cannot fit"):
        parse_header(overstated)


def test_a_negative_position_is_refused() -> None:
    with pytest.raises(CorruptBatch):
        parse_header(BATCH, -61)


def test_iteration_stops_at_a_truncated_batch() -> None:
    three = BATCH * 3
    size = len(BATCH)
    assert [h.position for h in iter_headers(three)] == [0, size, 2 * size]
    for end in range(len(three)):
        positions = [h.position for h in iter_headers(three[:end])]
        assert positions == [0, size, 2 * size][: end // size]


def test_iteration_raises_at_bytes_that_are_no_batch() -> None:
    headers = iter_headers(BATCH + b"\0" * 100)
    assert next(headers).base_offset == 7
    with pytest.raises(CorruptBatch) as caught:
        next(headers)
    assert caught.value.position == len(BATCH)


def test_a_flipped_bit_in_the_checksummed_part_is_detected() -> None:
    unprotected = {*range(8), *range(12, 16)}  # base offset, leader epoch
    for position in range(len(BATCH)):
        for bit in range(8):
            changed = bytearray(BATCH)
            changed[position] ^= 1 << bit
            try:
                check_crc(changed, parse_header(changed))
            except CorruptBatch:
                continue
            assert position in unprotected, f"byte {position}, bit {bit}"


def test_check_crc_refuses_a_truncated_batch() -> None:
    for size in range(HEADER_SIZE, len(BATCH)):
        with pytest.raises(CorruptBatch, match="are left"):
            check_crc(BATCH[:size], parse_header(BATCH[:size]))


def test_stamping_changes_only_offset_and_epoch() -> None:
    changed = bytearray(b"ab" + BATCH)
    stamp(changed, 2, base_offset=2**62, leader_epoch=9)
    header = parse_header(changed, 2)
    check_crc(changed, header)
    assert (header.base_offset, header.leader_epoch) == (2**62, 9)
    assert changed[2 + 16 :] == BATCH[16:]
    assert changed[2 + 8 : 2 + 12] == BATCH[8:12]


def test_log_append_time_applies_to_every_record() -> None:
    changed = bytearray(BATCH)
    stamp(changed, 0, base_offset=100, leader_epoch=1)
    header = stamp_log_append_time(changed, parse_header(BATCH), timestamp=1234)
    check_crc(changed, header)
    assert header == parse_header(changed)
    assert header.base_offset == 100
    assert header.timestamp_type == LOG_APPEND_TIME
    assert [record.timestamp for record in decode_batch(changed, header)] == [1234, 1234]
    assert changed[HEADER_SIZE:] == BATCH[HEADER_SIZE:]


def test_producer_fields_are_written_with_a_new_checksum() -> None:
    changed = bytearray(BATCH)
    header = set_producer(changed, producer_id=2**40, producer_epoch=3, base_sequence=9)
    check_crc(changed, header)
    assert header[10:13] == (2**40, 3, 9)
    assert header.last_sequence == 10


def test_sequences_wrap_to_zero() -> None:
    header = parse_header(BATCH)._replace(base_sequence=2**31 - 1)
    assert header.last_sequence == 0
    assert header._replace(base_sequence=-1).last_sequence == -1


@given(st.binary(max_size=200))
def test_any_bytes_give_headers_or_an_error(data: bytes) -> None:
    try:
        for header in iter_headers(data):
            assert isinstance(header, BatchHeader)
            assert header.end_position <= len(data)
    except CorruptBatch:
        pass
