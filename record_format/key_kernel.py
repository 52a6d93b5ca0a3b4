"""Compaction's key table, compiled: add keys, choose a batch's records by them, copy those.

Rules that keep it honest:

* Only `compaction.make_key_table` imports this module: numba takes a second to import.
* Records are read and checked by `read_record`; `_copy_records` only gets what was checked.
* It mirrors `compaction.PlainKeyTable`; a test feeds both the same bytes.

The table uses open addressing with linear probing, in two columns: 64 bits of the key's hash, and
the offset relative to the start of the round, plus one (0 is a free slot). The hash is MurmurHash3
x64-128 with a seed; its first half chooses the slot, its second half is stored.
"""

from __future__ import annotations

import secrets
from typing import Any, Final

import numpy as np
from numba import types

from tierlog.record_format.batch import LOG_APPEND_TIME_BIT, BatchHeader
from tierlog.record_format.compaction import Choice
from tierlog.record_format.compiled import BYTES, READ_ONLY, compiled, copy_bytes, pointer_to
from tierlog.record_format.decode import corrupt_batch
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.record_kernel import read_record
from tierlog.record_format.record_walk import I64_MAX

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
_BATCH: Final = types.UniTuple(_I64, 4)  # records, base offset, last offset delta, base timestamp

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


@compiled(types.UniTuple(_I64, 2)(READ_ONLY, _BATCH, _I64, _I64, _I64, _U64, _PRINTS, _OFFSETS))
def _add_keys(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, batch, start_offset, used, max_keys, seed, prints, offsets
):
    """Add the keys of a batch's records from `start_offset` on; (status, slots now used)."""
    source, length = pointer_to(data), len(data)
    print_pointer, offset_pointer = pointer_to(prints), pointer_to(offsets)
    count, base_offset, last_delta, base_timestamp = batch
    at, offset_delta = np.int64(0), np.int64(-1)
    for _ in range(count):
        found = read_record(source, at, length, base_timestamp, offset_delta, last_delta)
        at, _, _, offset_delta, key_start, key_size = found[:6]
        if at < 0:
            return CORRUPT, used
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
    types.UniTuple(_I64, 5)(READ_ONLY, _BATCH, _I64, _I64, _I64, _U64, _PRINTS, _OFFSETS, _OUT)
)
def _choose_records(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, batch, start_offset, latest_offset, drop_tombstones, seed, prints, offsets, keep
):
    """Mark in `keep` which records stay; (status, how many, tombstones among them, their first and
    greatest timestamp).
    """
    source, length = pointer_to(data), len(data)
    print_pointer, offset_pointer = pointer_to(prints), pointer_to(offsets)
    count, base_offset, last_delta, base_timestamp = batch
    at, offset_delta = np.int64(0), np.int64(-1)
    kept, tombstones, first, greatest = 0, 0, 0, 0
    for number in range(count):
        found = read_record(source, at, length, base_timestamp, offset_delta, last_delta)
        at, timestamp, _, offset_delta, key_start, key_size, _, value_size = found[:8]
        if at < 0:
            return CORRUPT, 0, 0, 0, 0
        offset = base_offset + offset_delta
        stays = offset > latest_offset
        if not stays and key_size >= 0 and not (value_size < 0 and drop_tombstones):
            h1, h2 = hash_key(source, key_start, key_start + key_size, seed)
            slot = _slot(h1, h2, len(prints), print_pointer, offset_pointer)
            entry = np.int64(offsets[slot])
            stays = entry == 0 or offset - start_offset + 1 >= entry
        keep[number] = 1 if stays else 0
        if stays:
            if kept == 0 or timestamp > greatest:
                greatest = timestamp
            if kept == 0:
                first = timestamp
            kept += 1
            if value_size < 0:
                tombstones += 1
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
def _copy_records(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, count, keep, same_time, old_base, new_base, out
):
    """Write the kept records into `out`, their timestamps relative to `new_base` instead of
    `old_base` (with `same_time`, all are `old_base`); return the bytes written. `data` was checked
    by `_choose_records`.

    The bases may be further apart than 64 bits hold: the sums wrap, and each new delta fits.
    """
    source, length, target = pointer_to(data), len(data), pointer_to(out)
    at, to = np.int64(0), np.int64(0)
    for number in range(count):
        found = read_record(source, at, length, 0, -1, I64_MAX)
        at, delta, rest_at = found[:3]
        if keep[number]:
            delta = (0 if same_time else delta) + old_base - new_base
            rest = at - rest_at
            to = _put_varint(1 + _varint_size(delta) + rest, target, to)
            target[to] = 0
            to = _put_varint(delta, target, to + 1)
            copy_bytes(target, to, source, rest_at, rest)
            to += rest
    return to


SLOT_BYTES: Final = 12
LOAD_FACTOR: Final = 0.9  # Kafka's log.cleaner.io.buffer.load.factor
_VARINT_GROWTH: Final = 16  # at most this much longer is a record with another timestamp delta


class NativeKeyTable:
    """64 bits of hash and 32 bits of relative offset per slot."""

    def __init__(self, memory_bytes: int) -> None:
        self._slots = max(2, memory_bytes // SLOT_BYTES)
        self._max_keys = max(1, int(self._slots * LOAD_FACTOR))
        self._seed = np.uint64(secrets.randbits(64))
        self._prints = np.zeros(self._slots, np.uint64)
        self._offsets = np.zeros(self._slots, np.uint32)
        self._used = 0
        self.latest_offset = self.start_offset = -1

    def clear(self, *, start_offset: int) -> None:
        self._offsets[:] = 0
        self._used = 0
        self.start_offset, self.latest_offset = start_offset, -1

    def __len__(self) -> int:
        return self._used

    def add_batch_keys(self, data: bytes, header: BatchHeader) -> bool:
        status, self._used = _add_keys(
            np.frombuffer(data, np.uint8),
            _facts(header),
            self.start_offset,
            self._used,
            self._max_keys,
            self._seed,
            self._prints,
            self._offsets,
        )
        if status == CORRUPT:
            raise _corrupt(header)
        return bool(status == OK)

    def choose_records(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        keep = np.empty(header.record_count, np.uint8)
        status, count, tombstones, first, greatest = _choose_records(
            np.frombuffer(data, np.uint8),
            _facts(header),
            self.start_offset,
            self.latest_offset,
            drop_tombstones,
            self._seed,
            self._prints,
            self._offsets,
            keep,
        )
        if status == CORRUPT:
            raise _corrupt(header)
        return Choice(count, tombstones, first, greatest, keep)

    def copy_chosen(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        keep: Any = choice.keep
        if keep is None:
            keep = np.ones(header.record_count, np.uint8)
        stamped = bool(header.attributes & LOG_APPEND_TIME_BIT)
        old_base = header.max_timestamp if stamped else header.base_timestamp
        out = np.empty(len(data) + _VARINT_GROWTH * header.record_count, np.uint8)
        records = np.frombuffer(data, np.uint8)
        size = _copy_records(
            records, header.record_count, keep, stamped, old_base, base_timestamp, out
        )
        return out[:size].tobytes()


def _facts(header: BatchHeader) -> tuple[int, int, int, int]:
    return (
        header.record_count,
        header.base_offset,
        header.last_offset_delta,
        header.base_timestamp,
    )


def _corrupt(header: BatchHeader) -> CorruptBatch:
    return corrupt_batch("invalid records", header)
