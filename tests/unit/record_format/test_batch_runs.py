"""A header run has the plain batches that a walk finds, up to the first that is not plain. And the
plain and the compiled summary of a run are equal for every input.
"""

from __future__ import annotations

import random
import struct

import pytest

from tests.unit.record_format import golden
from tierlog.record_format import native
from tierlog.record_format.batch import (
    CRC_START,
    HEADER_SIZE,
    check_crc,
    compute_crc,
    iter_headers,
    parse_header,
    stamp,
    stamp_log_append_time,
)
from tierlog.record_format.batch_runs import header_run, summarize_plain
from tierlog.record_format.codecs import GZIP
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch

ANY = 2**62


def batch(base_offset: int, *, count: int = 3, epoch: int = 4, **fields) -> bytes:
    encoded = encode_batch(
        [b"v" * 20] * count, timestamps=[1000 + base_offset + i for i in range(count)], **fields
    )
    stamp(encoded, 0, base_offset=base_offset, leader_epoch=epoch)
    return bytes(encoded)


def with_fields(encoded: bytes, *, delta: int, count: int) -> bytes:
    """The batch with another last offset delta and record count, with the checksum corrected."""
    changed = bytearray(encoded)
    struct.pack_into(">i", changed, 23, delta)
    struct.pack_into(">i", changed, 57, count)
    struct.pack_into(">I", changed, 17, crc32c_of(changed[CRC_START:]))
    return bytes(changed)


def test_a_run_has_the_columns_of_its_headers():
    dice = random.Random(7)
    data, offset = b"", 50
    for _ in range(40):
        count = dice.randrange(1, 9)
        data += batch(offset, count=count, codec=dice.choice([0, 0, 3, 4]))
        offset += count
    headers = list(iter_headers(data))
    run = header_run(data + b"\0" * 30, base_offset=50, last_offset=ANY, remember=5)
    assert run.starts == [header.position for header in headers]
    assert run.ends == [header.end_position for header in headers]
    assert run.last_offsets == [header.last_offset for header in headers]
    assert run.max_timestamps == [header.max_timestamp for header in headers]
    assert (run.leader_epoch, run.base_offset, run.next_offset) == (4, 50, offset)


@pytest.mark.parametrize(
    ("name", "second"),
    [
        ("a gap", batch(4)),
        ("an overlap", batch(2)),
        (
            "a transaction",
            batch(3, producer_id=9, producer_epoch=0, base_sequence=0, transactional=True),
        ),
        ("a control batch", batch(3, control=True, producer_id=-1)),
        ("another epoch", batch(3, epoch=5)),
        ("a truncated batch", batch(3)[:-5]),
        ("a flipped byte", batch(3)[:-1] + b"\xff"),
        ("a count beyond its offsets", with_fields(batch(3), delta=2, count=4)),
        ("a count beyond its bytes", with_fields(batch(3), delta=99, count=99)),
        ("a negative count", with_fields(batch(3), delta=2, count=-1)),
        ("no offset", with_fields(batch(3), delta=-1, count=0)),
        ("another magic", batch(3)[:16] + b"\x01" + batch(3)[17:]),
        ("a negative length", batch(3)[:8] + struct.pack(">i", -5) + batch(3)[12:]),
        ("a length below a header", batch(3)[:8] + struct.pack(">i", 20) + batch(3)[12:]),
        ("zeros", bytes(HEADER_SIZE + 10)),
    ],
)
def test_a_run_ends_before_a_batch_that_is_not_plain(name, second):
    data = batch(0) + second + batch(6)
    run = header_run(data, base_offset=0, last_offset=ANY, remember=5)
    assert run.last_offsets == [2], name


def test_a_run_begins_at_its_base_offset_and_ends_at_its_last_offset():
    data = batch(0) + batch(3) + batch(6)
    assert header_run(data, base_offset=0, last_offset=5, remember=5).last_offsets == [2, 5]
    assert header_run(data, base_offset=0, last_offset=1, remember=5) is None
    assert header_run(data, base_offset=1, last_offset=ANY, remember=5) is None
    assert header_run(b"", base_offset=0, last_offset=ANY, remember=5) is None


def test_a_run_includes_a_batch_emptied_by_compaction():
    header = parse_header(batch(3))._replace(size_bytes=HEADER_SIZE)
    emptied = with_fields(header.pack(), delta=2, count=0)
    run = header_run(batch(0) + emptied, base_offset=0, last_offset=ANY, remember=5)
    assert run.last_offsets == [2, 5]


def test_random_damage_never_enters_a_run():
    dice = random.Random(seed := random.randrange(10**6))
    print("seed", seed)
    whole = b"".join(batch(offset) for offset in range(0, 30, 3))
    runs = 0
    for _ in range(500):
        data = bytearray(whole)
        for _ in range(dice.randrange(1, 4)):
            data[dice.randrange(len(data))] ^= 1 << dice.randrange(8)
        run = header_run(bytes(data), base_offset=0, last_offset=ANY, remember=5)
        runs += run is not None
        for header in list(iter_headers(bytes(data[: run.ends[-1]]))) if run else []:
            check_crc(bytes(data), header)
    assert runs > 300


def test_the_last_headers_of_each_producer_are_remembered():
    data, numbers = b"", dict.fromkeys((7, 8, 0), 0)
    for offset, producer_id in enumerate((7, 7, 8, -1, 7, 0, 7, 8, 7)):
        if producer_id < 0:
            data += batch(offset, count=1)
            continue
        data += batch(
            offset,
            count=1,
            producer_id=producer_id,
            producer_epoch=2,
            base_sequence=numbers[producer_id],
        )
        numbers[producer_id] += 1
    run = header_run(data, base_offset=0, last_offset=ANY, remember=3)
    assert run.last_offsets == list(range(9))
    remembered = {
        producer_id: [parse_header(packed) for packed in headers]
        for producer_id, headers in run.remembered.items()
    }
    offsets = {
        producer_id: [header.base_offset for header in headers]
        for producer_id, headers in remembered.items()
    }
    assert offsets == {
        7: [4, 6, 8],
        8: [2, 7],
        0: [5],
    }
    assert [header.base_sequence for header in remembered[7]] == [2, 3, 4]


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
