"""The key tables of compaction: both give the same results within their memory limit."""

import random

import numpy as np
import pytest
from numba import njit

from tierlog.record_format.batch import HEADER_SIZE, iter_headers, parse_header, set_checksum
from tierlog.record_format.compaction import (
    PLAIN_ENTRY_BYTES,
    BatchRetention,
    BatchRetentionResult,
    Choice,
    PlainKeyTable,
    TombstonePolicy,
    compact_batch,
    make_key_table,
)
from tierlog.record_format.compiled import pointer_to
from tierlog.record_format.decode import decode_batch, expand
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.key_kernel import hash_key
from tierlog.record_format.produced import ProduceLimits, check_produced

RETENTION = BatchRetentionResult(BatchRetention.DELETE_EMPTY)
POLICY = TombstonePolicy(now_ms=5000, delete_retention_ms=100)


def log_of(seed: int, batches: int = 60) -> bytes:
    rng, log, offset = random.Random(seed), bytearray(), 0
    for _ in range(batches):
        count = rng.choice((1, 3, 50))
        log += encode_batch(
            [rng.choice((None, b"", rng.randbytes(20))) for _ in range(count)],
            keys=[
                rng.choice((None, b"", rng.randbytes(1), b"k%d" % rng.randint(0, 99)))
                for _ in range(count)
            ],
            timestamps=[rng.randint(0, 1 << 41) for _ in range(count)],
            headers=[rng.choice(((), (("a", b"x"),))) for _ in range(count)],
            codec=rng.randint(0, 4),
            base_offset=offset,
        )
        offset += count
    return bytes(log)


def fill(table, log: bytes, start: int):
    table.clear(start_offset=start)
    for header in iter_headers(log):
        if header.last_offset >= start:
            assert table.add_batch_keys(expand(log, header), header)
            table.latest_offset = header.last_offset


@pytest.mark.parametrize("seed", range(5))
def test_both_tables_keep_the_same_records(seed):
    log = log_of(seed)
    tables = (make_key_table(1 << 20), PlainKeyTable(1 << 20))
    for table in tables:
        fill(table, log, 100)
    assert len(tables[0]) == len(tables[1])
    for header in iter_headers(log):
        native, plain = (
            compact_batch(log, header, RETENTION, table=t, policy=POLICY) for t in tables
        )
        assert (native is None) == (plain is None)
        if native is not None:
            assert native.header == plain.header
            assert bytes(native.body) == bytes(plain.body)


@pytest.mark.parametrize("make", [make_key_table, PlainKeyTable])
def test_only_the_last_record_of_a_key_is_kept(make):
    log = log_of(9)
    table = make(1 << 20)
    fill(table, log, 0)
    records = [r for h in iter_headers(log) for r in decode_batch(log, h)]
    last = {record.key: record for record in records if record.key is not None}
    kept = []
    for header in iter_headers(log):
        batch = compact_batch(log, header, RETENTION, table=table, policy=POLICY)
        if batch is not None:
            kept += decode_batch(batch.body, batch.header._replace(position=0))
    assert kept == sorted(last.values(), key=lambda record: record.offset)


@pytest.mark.parametrize("make", [make_key_table, PlainKeyTable])
def test_timestamps_2_to_the_63_apart_are_preserved(make):
    end = 2**63 - 1
    batch = encode_batch([b"1", b"2", b"3"], keys=[b"a", b"b", b"a"], timestamps=[end, -1, end])
    table = make(1 << 20)
    fill(table, bytes(batch), 0)
    left = compact_batch(batch, parse_header(batch), RETENTION, table=table, policy=POLICY)
    records = decode_batch(left.body, left.header)
    assert [(record.value, record.timestamp) for record in records] == [(b"2", -1), (b"3", end)]


@pytest.mark.parametrize("make", [make_key_table, PlainKeyTable])
def test_a_delete_horizon_more_than_2_to_the_63_after_the_base_timestamp_is_set(make):
    """A producer may choose any base timestamp: what counts is its sum with the deltas."""
    plain = encode_batch([None], keys=[b"a"], timestamps=[7])
    header, choice = parse_header(plain), Choice(1, 1, 7, 7, keep=None)
    base = 7 - (2**63 - 1)
    records = PlainKeyTable(0).copy_chosen(
        expand(plain, header), header, choice, base_timestamp=base
    )
    head = header._replace(base_timestamp=base, size_bytes=HEADER_SIZE + len(records)).pack()
    batch = bytearray(head + records)
    set_checksum(batch)
    assert check_produced(batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=9)).headers
    table = make(1 << 16)
    fill(table, bytes(batch), 0)
    left = compact_batch(batch, parse_header(batch), RETENTION, table=table, policy=POLICY)
    assert left.header.base_timestamp == 5100
    assert [(r.timestamp, r.value) for r in decode_batch(left.body, left.header)] == [(7, None)]


@pytest.mark.parametrize("make", [make_key_table, PlainKeyTable])
def test_a_full_table_rejects_further_keys(make):
    table = make(40 * PLAIN_ENTRY_BYTES)
    table.clear(start_offset=0)
    count = 10_000
    batch = encode_batch(
        [b"v"] * count, keys=[b"%d" % n for n in range(count)], timestamps=[1] * count
    )
    header = parse_header(batch)
    assert not table.add_batch_keys(expand(batch, header), header)
    assert len(table) < 1000


@pytest.mark.parametrize("make", [make_key_table, PlainKeyTable])
def test_a_tombstone_is_kept_until_its_delete_horizon(make):
    batch = encode_batch([None, b"v"], keys=[b"a", b"b"], timestamps=[7, 9])
    table = make(1 << 16)
    fill(table, bytes(batch), 0)
    first = compact_batch(batch, parse_header(batch), RETENTION, table=table, policy=POLICY)
    assert first.header.has_delete_horizon
    assert first.header.base_timestamp == 5100
    assert [(r.timestamp, r.value) for r in decode_batch(first.body, first.header)] == [
        (7, None),
        (9, b"v"),
    ]
    before = TombstonePolicy(now_ms=5099, delete_retention_ms=100)
    assert compact_batch(first.body, first.header, RETENTION, table=table, policy=before) == first
    at = TombstonePolicy(now_ms=5100, delete_retention_ms=100)
    later = compact_batch(first.body, first.header, RETENTION, table=table, policy=at)
    assert [r.value for r in decode_batch(later.body, later.header)] == [b"v"]
    assert (later.header.base_offset, later.header.last_offset) == (0, 1)
    assert later.header.base_timestamp == 5100


def test_records_with_invalid_lengths_are_refused():
    batch = encode_batch([b"value"] * 3, keys=[b"k"] * 3, timestamps=[1, 2, 3])
    header = parse_header(batch)
    data = expand(batch, header)
    for make in (make_key_table, PlainKeyTable):
        table, refused = make(1 << 16), 0
        table.clear(start_offset=0)
        for position in range(len(data)):
            for value in (0x00, 0x7F, 0xFF):
                bad = data[:position] + bytes([value]) + data[position + 1 :]
                try:
                    table.add_batch_keys(bad, header)
                    table.choose_records(bad, header, drop_tombstones=False)
                except CorruptBatch:
                    refused += 1
        assert refused > 20


@njit
def _hashed(data, seed):
    return hash_key(pointer_to(data), 0, len(data), seed)


def test_the_hash_is_murmur3():
    text = b"The quick brown fox jumps over the lazy dog"  # a test vector of the reference
    assert _hashed(np.frombuffer(text, np.uint8), np.uint64(0)) == (
        0xE34BBC7BBC071B6C,
        0x7A433CA9C49A9347,
    )
