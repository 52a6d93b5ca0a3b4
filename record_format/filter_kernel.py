"""Makes filters of keys, compiled, for `key_filter`.

Rules that keep it honest:

* Only `native.load` has this module imported: numba takes a second to import.
* Records are read and checked by `read_record`, keys are hashed by `hash_key`.
* It mirrors `key_filter.make_filter_plain`, which runs on what fails a check here.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from tierlog.record_format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    HEADER_SIZE,
    MIN_RECORD_SIZE,
    Buffer,
    parse_header,
)
from tierlog.record_format.compiled import READ_ONLY, batch_header, compiled, pointer_to
from tierlog.record_format.decode import expand
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.key_filter import BITS_SET, KEYS_MAX, filter_size, make_filter_plain
from tierlog.record_format.key_kernel import hash_key
from tierlog.record_format.record_kernel import read_record

_I64: Final = types.int64
_HASHES: Final = types.Array(types.uint64, 1, "C")
_PLACES: Final = types.Array(_I64, 1, "C")
_BITS: Final = types.Array(types.uint8, 1, "C")


_BATCH: Final = types.UniTuple(_I64, 3)  # records, last offset delta, base timestamp


@compiled(_I64(READ_ONLY, _I64, _I64, _BATCH, _HASHES, _I64))
def _hash_keys(data, at, end, batch, hashes, used):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Append the hashes of the keys of the batch's records, which fill data[at:end]; how many
    hashes there are then, or -1 if the records are invalid.
    """
    source, delta = pointer_to(data), np.int64(-1)
    count, last_delta, base_timestamp = batch
    for _ in range(count):
        found = read_record(source, at, end, base_timestamp, delta, last_delta)
        at, _, _, delta, key, key_size = found[:6]
        if at < 0:
            return np.int64(-1)
        if key_size >= 0:
            hashes[used] = hash_key(source, key, key + key_size, np.uint64(0))[0]
            used += 1
    return used if at == end else np.int64(-1)


@compiled(types.UniTuple(_I64, 2)(READ_ONLY, _HASHES, _PLACES))
def _hash_batches(data, hashes, compressed):  # type: ignore[no-untyped-def]
    """(how many hashes, or -1 if something is invalid; how many compressed batches): those are
    left out, and their positions noted.
    """
    source, at, used, left_out = pointer_to(data), np.int64(0), np.int64(0), np.int64(0)
    while len(data) - at >= HEADER_SIZE:
        header = batch_header(source, at)
        size, _, _, attributes, last_delta, base_timestamp = header[:6]
        count, valid = header[8:]
        if not valid or size > len(data) - at:
            return np.int64(-1), left_out
        if not attributes & CONTROL_BIT and attributes & CODEC_MASK:
            compressed[left_out] = at
            left_out += 1
        elif not attributes & CONTROL_BIT:
            batch = (count, last_delta, base_timestamp)
            used = _hash_keys(data, at + HEADER_SIZE, at + size, batch, hashes, used)
            if used < 0:
                return used, left_out
        at += size
    return used, left_out


@compiled(_I64(_HASHES, _HASHES))
def _make_distinct(hashes, slots):  # type: ignore[no-untyped-def]
    """Move the distinct ones of the hashes to their front; how many there are. `slots` are zeros,
    two to the power of something, and more than there are hashes.
    """
    mask, kept = np.uint64(len(slots) - 1), 0
    has_zero = False
    for number in range(len(hashes)):
        hashed = hashes[number]
        slot = hashed & mask
        while slots[slot] != 0 and slots[slot] != hashed:
            slot = (slot + np.uint64(1)) & mask
        if slots[slot] == hashed and (hashed != 0 or has_zero):
            continue
        has_zero = has_zero or hashed == 0
        slots[slot] = hashed
        hashes[kept] = hashed
        kept += 1
    return kept


@compiled(types.void(_HASHES, _BITS))
def _set_bits(hashes, bits):  # type: ignore[no-untyped-def]
    count = np.uint64(8 * len(bits))
    low = np.uint64(0xFFFFFFFF)
    for hashed in hashes:
        step = hashed >> np.uint64(32)
        for number in range(BITS_SET):
            at = (((hashed + np.uint64(number) * step) & low) * count) >> np.uint64(32)
            bits[at >> np.uint64(3)] |= np.uint8(1) << np.uint8(at & np.uint64(7))


def make_filter_native(batches: Buffer, size_bytes: int | None) -> bytes | None:
    """`key_filter.make_filter_plain`, compiled."""
    compressed = np.empty(len(batches) // HEADER_SIZE, np.int64)
    hashes = np.empty(len(batches) // MIN_RECORD_SIZE, np.uint64)
    used, left_out = _hash_batches(np.frombuffer(batches, np.uint8), hashes, compressed)
    if used < 0:
        return make_filter_plain(batches, size_bytes)
    parts = [hashes[:used]]
    for at in compressed[:left_out].tolist():
        found = _hash_compressed(batches, at)
        if found is None:
            return None
        parts.append(found)
        used += len(found)
        if used > KEYS_MAX:
            return None
    if used > KEYS_MAX:
        return None
    hashes = np.concatenate(parts)
    slots = np.zeros(1 << (2 * used).bit_length(), np.uint64)
    distinct = _make_distinct(hashes, slots)
    size_bytes = filter_size(distinct) if not distinct or size_bytes is None else size_bytes
    bits = np.zeros(size_bytes, np.uint8)
    _set_bits(hashes[:distinct], bits)
    return bits.tobytes()


def _hash_compressed(batches: Buffer, at: int) -> np.ndarray | None:
    header = parse_header(batches, at)
    try:
        records = expand(batches, header)
    except CorruptBatch:
        return None
    if header.record_count * MIN_RECORD_SIZE > len(records):
        return None
    hashes = np.empty(header.record_count, np.uint64)
    batch = (header.record_count, header.last_offset_delta, header.base_timestamp)
    used = _hash_keys(np.frombuffer(records, np.uint8), 0, len(records), batch, hashes, 0)
    return hashes[:used] if used >= 0 else None
