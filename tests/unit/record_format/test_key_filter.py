"""Filters of keys: both implementations make the same, none lacks a key, and they are small."""

import random

import pytest

from tierlog.record_format import filter_kernel, key_filter
from tierlog.record_format.batch import CONTROL_BIT, set_checksum
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.filter_kernel import make_filter_native
from tierlog.record_format.key_filter import (
    has_all_keys,
    hash_key,
    holds_key,
    make_filter_plain,
)

BOTH = pytest.mark.parametrize("make", [make_filter_plain, make_filter_native])


def batches_of(keys, *, codec=0, batch_records=100):
    body = bytearray()
    for start in range(0, len(keys), batch_records):
        part = keys[start : start + batch_records]
        body += encode_batch(
            [b"value"] * len(part),
            keys=part,
            timestamps=[1] * len(part),
            base_offset=start,
            codec=codec,
        )
    return bytes(body)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (b"", 0),
        (b"hello", 0xCBD8A7B341BD9B02),
        (b"The quick brown fox jumps over the lazy dog", 0xE34BBC7BBC071B6C),
    ],
)
def test_a_key_is_hashed_as_murmurhash3_says(key, expected):
    assert hash_key(key) == expected


@pytest.mark.parametrize("seed", range(4))
def test_both_implementations_make_the_same_filter_and_it_has_every_key(seed):
    dice = random.Random(seed)
    kinds = (None, b"", b"\0", *(dice.randbytes(size) for size in range(40)))
    keys = [dice.choice(kinds) for _ in range(dice.choice((1, 7, 900)))]
    body = b"".join(
        batches_of(keys, codec=codec, batch_records=dice.choice((1, 100))) for codec in range(5)
    )
    bits = make_filter_native(body, None)
    assert bits == make_filter_plain(body, None)
    assert all(holds_key(bits, hash_key(key)) for key in keys if key is not None)
    larger = make_filter_native(body, 999)
    assert larger == make_filter_plain(body, 999)
    assert has_all_keys(larger, body)


MILLION = pytest.param(1_000_000, marks=pytest.mark.soak)
ASKED = 10_000


@pytest.mark.parametrize("distinct", [1, 2, 3, 4, 5, 8, 13, 30, 300, 3000, MILLION])
def test_fewer_than_one_in_a_hundred_other_keys_seem_to_be_there(distinct):
    """Of as many filters as it takes to ask so often; each has its keys twice, and null."""
    asked = found = 0
    while asked < ASKED:
        keys = [b"user-%d-%d" % (asked, number) for number in range(distinct)]
        bits = make_filter_native(batches_of([*keys, None, *keys]), None)
        assert len(bits) < max(9, 1.25 * distinct + 3)
        others = [b"user-%d-%d" % (asked, -number) for number in range(1, 21 + distinct)]
        found += sum(holds_key(bits, hash_key(key)) for key in others[:ASKED])
        asked += len(others[:ASKED])
    assert found < asked / 100


@pytest.mark.parametrize("distinct", [1, 16, 64, 128])
def test_so_it_is_of_keys_of_one_byte(distinct):
    dice, asked, found = random.Random(distinct), 0, 0
    while asked < ASKED:
        all_keys = [bytes([number]) for number in range(256)]
        dice.shuffle(all_keys)
        keys, others = all_keys[:distinct], all_keys[distinct:]
        bits = make_filter_native(batches_of(keys), None)
        assert all(holds_key(bits, hash_key(key)) for key in keys)
        assert len(bits) < max(9, 1.25 * distinct + 3)
        found += sum(holds_key(bits, hash_key(key)) for key in others)
        asked += len(others)
    assert found < asked / 100


@BOTH
def test_records_without_a_key_and_control_batches_are_not_in_it(make):
    marker = bytearray(batches_of([b"\0\0\0\1"]))
    marker[22] |= CONTROL_BIT
    set_checksum(marker)
    assert make(batches_of([None] * 5) + bytes(marker), None) == b""
    assert not holds_key(b"", hash_key(b"\0\0\0\1"))


@BOTH
@pytest.mark.parametrize("codec", [0, 4])
def test_of_records_that_cannot_be_read_nothing_is_known(make, codec):
    body = bytearray(batches_of([b"key"] * 3, codec=codec))
    body[61:70] = b"\xff" * 9
    set_checksum(body)
    assert make(bytes(body), None) is None


@BOTH
@pytest.mark.parametrize("codec", [0, 4])
def test_of_very_many_records_nothing_is_known(make, codec, monkeypatch):
    monkeypatch.setattr(key_filter, "KEYS_MAX", 10)
    monkeypatch.setattr(filter_kernel, "KEYS_MAX", 10)
    assert make(batches_of([b"key"] * 10, codec=codec, batch_records=6), None)
    assert make(batches_of([b"key"] * 11, codec=codec, batch_records=6), None) is None


def test_a_filter_that_lacks_a_key_is_found_out():
    body = batches_of([b"key"])
    bits = make_filter_plain(body, None)
    first = next(at for at in range(8) if bits[0] & 1 << at)
    assert not has_all_keys(bytes([bits[0] & ~(1 << first)]) + bits[1:], body)
    assert not has_all_keys(b"", body)
    assert has_all_keys(b"\xff", body)
