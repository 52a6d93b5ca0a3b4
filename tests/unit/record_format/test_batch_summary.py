"""The plain and the compiled summary of a run of batches are equal for every input."""

import random

import pytest

from tests.unit.record_format import golden
from tierlog.record_format import native
from tierlog.record_format.batch import compute_crc, parse_header, stamp_log_append_time
from tierlog.record_format.batch_runs import summarize_plain
from tierlog.record_format.codecs import GZIP
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch


@pytest.fixture(scope="module")
def compiled():
    assert native.load(), "numba is a test dependency"
    from tierlog.record_format.record_kernel import summarize_native

    return summarize_native


def outcome(summarize, body, next_offset=0):
    try:
        return summarize(body, next_offset)
    except CorruptBatch as error:
        return type(error), str(error)


def batches(count, *, codec=0, seed=1):
    dice = random.Random(seed)
    body, offset = bytearray(), 5
    for number in range(count):
        values = [dice.randbytes(dice.randint(0, 40)) for _ in range(dice.randint(1, 4))]
        stamps = [dice.randint(-1, 10**12) for _ in values]
        headers = [(("h", b"1"), ("n", None))] * len(values) if number % 3 == 0 else None
        encoded = encode_batch(
            values,
            timestamps=stamps,
            headers=headers,
            base_offset=offset,
            codec=codec,
            transactional=number % 4 == 3,
            producer_id=7,
        )
        if number % 5 == 4:
            stamp_log_append_time(encoded, parse_header(encoded), timestamp=dice.randint(0, 10**12))
        body += encoded
        offset += len(values) + (number % 7 == 6)
    return bytes(body)


@pytest.mark.parametrize("codec", [0, GZIP])
def test_summaries_are_equal_for_batches_truncated_anywhere(compiled, codec):
    body = batches(12, codec=codec)
    whole = compiled(body, 5)
    assert whole == summarize_plain(body, 5)
    assert whole.size_bytes == len(body)
    assert not compiled(body[: len(body) // 2], 0).size_bytes > len(body) // 2
    for end in range(len(body)):
        assert outcome(compiled, body[:end], 5) == outcome(summarize_plain, body[:end], 5)


@pytest.mark.parametrize("codec", [0, GZIP])
def test_summaries_are_equal_for_every_flipped_byte(compiled, codec):
    body = bytearray(batches(6, codec=codec))
    for at in range(len(body)):
        for bit in (1, 128):
            body[at] ^= bit
            assert outcome(compiled, bytes(body)) == outcome(summarize_plain, bytes(body)), at
            body[at] ^= bit


def test_undecodable_records_leave_the_minimum_timestamp_unknown(compiled):
    """With a valid checksum: as some producer sent them."""
    body = bytearray(batches(1))
    body[61] ^= 2  # the first record's length
    header = parse_header(body)
    body[17:21] = compute_crc(body, header).to_bytes(4, "big")
    body += batches(3)[header.size_bytes :]
    found = compiled(bytes(body), 0)
    assert found == summarize_plain(bytes(body), 0)
    assert found.min_timestamp is None
    assert found.max_timestamp is not None


def test_summaries_are_equal_for_kafkas_segments(compiled):
    for path in golden.files("*.log"):
        body = path.read_bytes()
        assert compiled(body, 0) == summarize_plain(body, 0), path


def test_decreasing_offsets_are_refused(compiled):
    for summarize in (compiled, summarize_plain):
        with pytest.raises(CorruptBatch, match="begins below offset 9"):
            summarize(batches(1), 9)
