"""Compaction's inner loops, compiled: add keys to a table, choose a batch's records by that table.

Rules that keep it honest:

* Only `native_keys` imports this module: numba takes a second to import.
* `data` is never indexed past its end: each length is checked against its enclosing record first.
* It mirrors `key_table.PlainKeyTable`; a test feeds both the same bytes.

The table uses open addressing with linear probing, in two columns: 64 bits of the key's hash, and
the offset relative to the start of the round, plus one (0 is a free slot). The hash is MurmurHash3
x64-128 with a seed; its first half chooses the slot, its second half is stored.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from tierlog.record_format.compiled import compiled
from tierlog.record_format.kernel_bytes import (
    BYTES,
    READ_ONLY,
    copy_bytes,
    pointer_to,
    varint,
    varlong,
)

OK: Final = 0
CORRUPT: Final = 1
FULL: Final = 2

_OUT: Final = types.Array(types.uint8, 1, "C")
_PRINTS: Final = types.Array(types.uint64, 1, "C")
_OFFSETS: Final = types.Array(types.uint32, 1, "C")
_PRINT_POINTER: Final = types.CPointer(types.uint64)
_OFFSET_POINTER: Final = types.CPointer(types.uint32)
_I64: Final = types.int64
_U64: Final = types.uint64

_C1: Final = np.uint64(0x87C37B91114253D5)
_C2: Final = np.uint64(0x4CF5AD432745937F)
_M1: Final = np.uint64(0xFF51AFD7ED558CCD)
_M2: Final = np.uint64(0xC4CEB9FE1A85EC53)


@compiled(_U64(_U64, _I64), inline="always")
def _rotl(value, bits):  # type: ignore[no-untyped-def]
    return (value << np.uint64(bits)) | (value >> np.uint64(64 - bits))


@compiled(_U64(_U64))
def _mix(value):  # type: ignore[no-untyped-def]
    value ^= value >> np.uint64(33)
    value *= _M1
    value ^= value >> np.uint64(33)
    value *= _M2
    return value ^ (value >> np.uint64(33))


@compiled(_U64(BYTES, _I64, _I64))
def _little_endian(source, at, size):  # type: ignore[no-untyped-def]
    value = np.uint64(0)
    for i in range(size):
        value |= np.uint64(source[at + i]) << np.uint64(8 * i)
    return value


@compiled(types.UniTuple(_U64, 2)(BYTES, _I64, _I64, _U64))
def hash_key(source, start, end, seed):  # type: ignore[no-untyped-def]
    """MurmurHash3 x64-128 of source[start:end] (Austin Appleby, public domain)."""
    h1 = seed
    h2 = seed
    at = start
    while end - at >= 16:
        k1 = _little_endian(source, at, 8)
        k2 = _little_endian(source, at + 8, 8)
        h1 ^= _rotl(k1 * _C1, 31) * _C2
        h1 = (_rotl(h1, 27) + h2) * np.uint64(5) + np.uint64(0x52DCE729)
        h2 ^= _rotl(k2 * _C2, 33) * _C1
        h2 = (_rotl(h2, 31) + h1) * np.uint64(5) + np.uint64(0x38495AB5)
        at += 16
    if end - at > 8:
        h2 ^= _rotl(_little_endian(source, at + 8, end - at - 8) * _C2, 33) * _C1
    if end - at > 0:
        h1 ^= _rotl(_little_endian(source, at, min(end - at, 8)) * _C1, 31) * _C2
    size = np.uint64(end - start)
    h1 ^= size
    h2 ^= size
    h1 += h2
    h2 += h1
    h1 = _mix(h1)
    h2 = _mix(h2)
    h1 += h2
    h2 += h1
    return h1, h2


@compiled(_I64(_U64, _U64, _I64, _PRINT_POINTER, _OFFSET_POINTER))
def _slot(h1, h2, slots, prints, offsets):  # type: ignore[no-untyped-def]
    """The key's slot, or the free slot where it would go."""
    slot = np.int64(h1 % np.uint64(slots))
    while offsets[slot] != 0 and prints[slot] != h2:
        slot = np.int64(0) if slot + 1 == slots else slot + np.int64(1)
    return slot


@compiled(types.UniTuple(_I64, 6)(BYTES, _I64, _I64))
def _record(source, length, at):  # type: ignore[no-untyped-def]
    """(end, timestamp delta, position, offset delta, key start, key size); end is -1 if invalid.

    The position is that of the first byte after the timestamp delta. A null key has size -1.
    """
    bad = (-1, 0, 0, 0, 0, 0)
    size, at = varint(source, at, length)
    if at < 0 or size <= 0 or size > length - at:
        return bad
    end = at + size
    timestamp_delta, behind = varlong(source, at + 1, length)
    if behind < 0:
        return bad
    offset_delta, at = varint(source, behind, length)
    if at < 0:
        return bad
    key_size, at = varint(source, at, length)
    if at < 0 or key_size < -1 or key_size > end - at:
        return bad
    return end, timestamp_delta, behind, offset_delta, at, key_size


@compiled(types.UniTuple(_I64, 2)(READ_ONLY, _I64, _I64, _I64, _I64, _I64, _U64, _PRINTS, _OFFSETS))
def add_keys(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, count, base_offset, start_offset, used, max_keys, seed, prints, offsets
):
    """Add the keys of a batch's records from `start_offset` on; (status, slots now used)."""
    source, length = pointer_to(data), len(data)
    print_pointer, offset_pointer = pointer_to(prints), pointer_to(offsets)
    at = 0
    for _ in range(count):
        end, _delta, _behind, offset_delta, key_start, key_size = _record(source, length, at)
        if end < 0:
            return CORRUPT, used
        at = end
        offset = base_offset + offset_delta
        if key_size < 0 or offset < start_offset:
            continue
        if used >= max_keys or offset - start_offset >= 0xFFFFFFFF:
            return FULL, used
        h1, h2 = hash_key(source, key_start, key_start + key_size, seed)
        slot = _slot(h1, h2, len(prints), print_pointer, offset_pointer)
        if offsets[slot] == 0:
            prints[slot] = h2
            used += 1
        offsets[slot] = np.uint32(offset - start_offset + 1)
    return OK, used


@compiled(
    types.UniTuple(_I64, 5)(READ_ONLY, _I64, _I64, _I64, _I64, _I64, _U64, _PRINTS, _OFFSETS, _OUT)
)
def choose_records(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data,
    count,
    base_offset,
    start_offset,
    latest_offset,
    drop_tombstones,
    seed,
    prints,
    offsets,
    keep,
):
    """Mark in `keep` which records stay; (status, how many, tombstones among them, their first and
    greatest timestamp delta).
    """
    source, length = pointer_to(data), len(data)
    print_pointer, offset_pointer = pointer_to(prints), pointer_to(offsets)
    at = 0
    kept = 0
    tombstones = 0
    first = 0
    greatest = 0
    for number in range(count):
        end, delta, _behind, offset_delta, key_start, key_size = _record(source, length, at)
        if end < 0:
            return CORRUPT, 0, 0, 0, 0
        offset = base_offset + offset_delta
        value_size, behind = varint(source, key_start + max(key_size, 0), length)
        if behind < 0 or value_size < -1 or value_size > end - behind:
            return CORRUPT, 0, 0, 0, 0
        stays = offset > latest_offset
        if not stays and key_size >= 0 and not (value_size < 0 and drop_tombstones):
            h1, h2 = hash_key(source, key_start, key_start + key_size, seed)
            slot = _slot(h1, h2, len(prints), print_pointer, offset_pointer)
            entry = np.int64(offsets[slot])
            stays = entry == 0 or offset - start_offset + 1 >= entry
        keep[number] = 1 if stays else 0
        if stays:
            if kept == 0 or delta > greatest:
                greatest = delta
            if kept == 0:
                first = delta
            kept += 1
            if value_size < 0:
                tombstones += 1
        at = end
    if at != length:
        return CORRUPT, 0, 0, 0, 0
    return OK, kept, tombstones, first, greatest


@compiled(_I64(_I64, BYTES, _I64))
def _put_varint(value, out, at):  # type: ignore[no-untyped-def]
    raw = np.uint64(value << 1) ^ np.uint64(value >> 63)
    while raw > np.uint64(0x7F):
        out[at] = np.uint8((raw & np.uint64(0x7F)) | np.uint64(0x80))
        raw >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(raw)
    return at + 1


@compiled(_I64(_I64))
def _varint_size(value):  # type: ignore[no-untyped-def]
    raw = np.uint64(value << 1) ^ np.uint64(value >> 63)
    size = 1
    while raw > np.uint64(0x7F):
        raw >>= np.uint64(7)
        size += 1
    return size


@compiled(_I64(READ_ONLY, _I64, _OUT, _I64, _I64, _I64, _OUT))
def copy_records(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, count, keep, same_time, old_base, new_base, out
):
    """Write the kept records into `out`, their timestamps relative to `new_base` instead of
    `old_base` (with `same_time`, all are `old_base`); return the bytes written. `data` was checked
    by `choose_records`.

    The bases may be further apart than 64 bits hold: the sums wrap, and each new delta fits.
    """
    source, length, target = pointer_to(data), len(data), pointer_to(out)
    at = 0
    to = 0
    for number in range(count):
        end, delta, behind, _offset_delta, _key, _size = _record(source, length, at)
        if keep[number]:
            delta = (0 if same_time else delta) + old_base - new_base
            rest = end - behind
            to = _put_varint(1 + _varint_size(delta) + rest, target, to)
            target[to] = 0
            to = _put_varint(delta, target, to + 1)
            copy_bytes(target, to, source, behind, rest)
            to += rest
        at = end
    return to
