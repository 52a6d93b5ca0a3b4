"""A filter of the keys of consecutive batches: which keys none of their records has. Of the others
it is wrong for fewer than one in a hundred.

Rules that keep it honest:

* It is a Bloom filter, and part of a format (docs/formats/segment-objects.md): the hash, the number
  of bits that a key sets, and which, never change. Only its size is the writer's choice.
* What has no keys has an empty filter. What cannot be read, or has very many records, has none.
* Making one has two implementations, the plain one here and the compiled one in `filter_kernel`.
  For every input both return the same bytes; a test feeds them the same batches. Which one is in
  use is set once per process, by `native.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Final

from tierlog.record_format.batch import Buffer, iter_headers
from tierlog.record_format.decode import expand, walk_batch
from tierlog.record_format.errors import CorruptBatch

BITS_SET: Final = 7  # by each key
BITS_PER_KEY: Final = 9.8  # 0.9% of the keys that are not in it seem to be
SIZE_MIN: Final = 8  # bytes; of the few bits of one or two keys, more would be the same by chance
SPARE_BYTES: Final = 2  # or it would be so, for 1.3%, up to some forty keys
KEYS_MAX: Final = 4 << 20  # of records with a key: 32 MiB of memory

_U64: Final = (1 << 64) - 1
_U32: Final = (1 << 32) - 1


def hash_key(key: bytes) -> int:
    """The first 64 bits of MurmurHash3 x64-128 with seed 0 (Austin Appleby, public domain)."""
    h1 = h2 = 0
    size = len(key)
    whole = size & ~15
    for at in range(0, whole, 16):
        h1 ^= _scrambled(int.from_bytes(key[at : at + 8], "little"), _C1, 31, _C2)
        h1 = ((_rotl(h1, 27) + h2) * 5 + 0x52DCE729) & _U64
        h2 ^= _scrambled(int.from_bytes(key[at + 8 : at + 16], "little"), _C2, 33, _C1)
        h2 = ((_rotl(h2, 31) + h1) * 5 + 0x38495AB5) & _U64
    h2 ^= _scrambled(int.from_bytes(key[whole + 8 :], "little"), _C2, 33, _C1) ^ size
    h1 ^= _scrambled(int.from_bytes(key[whole : whole + 8], "little"), _C1, 31, _C2) ^ size
    h1 = (h1 + h2) & _U64
    h2 = _mixed((h2 + h1) & _U64)
    return (_mixed(h1) + h2) & _U64


_C1: Final = 0x87C37B91114253D5
_C2: Final = 0x4CF5AD432745937F


def _rotl(value: int, bits: int) -> int:
    return (value << bits | value >> (64 - bits)) & _U64


def _scrambled(word: int, before: int, bits: int, behind: int) -> int:
    return _rotl(word * before & _U64, bits) * behind & _U64


def _mixed(value: int) -> int:
    value = (value ^ value >> 33) * 0xFF51AFD7ED558CCD & _U64
    value = (value ^ value >> 33) * 0xC4CEB9FE1A85EC53 & _U64
    return value ^ value >> 33


def holds_key(bits: Buffer, hashed: int) -> bool:
    """Whether a key may be in the filter, by its hash; False is certain."""
    return len(bits) > 0 and all(bits[at >> 3] & 1 << (at & 7) for at in _places(hashed, len(bits)))


def _places(hashed: int, size_bytes: int) -> Iterable[int]:
    """The bits of a key: double hashing by the two halves of its hash (Kirsch, Mitzenmacher)."""
    step, count = hashed >> 32, 8 * size_bytes
    return ((hashed + number * step & _U32) * count >> 32 for number in range(BITS_SET))


def filter_size(distinct: int) -> int:
    """The bytes of a filter of so many keys."""
    return max(SIZE_MIN, SPARE_BYTES - int(-distinct * BITS_PER_KEY // 8)) if distinct else 0


def make_filter(batches: Buffer) -> bytes | None:
    """The filter of whole batches; None if it is not known which keys they have."""
    return _in_use[0](batches, None)


def has_all_keys(bits: bytes, batches: Buffer) -> bool:
    """Whether a filter has the keys of all these batches, as far as is known."""
    own = _in_use[0](batches, len(bits) or None)
    if own is None:
        return True
    wanted, there = int.from_bytes(own), int.from_bytes(bits)
    return len(own) == len(bits) and wanted & there == wanted


def make_filter_plain(batches: Buffer, size_bytes: int | None) -> bytes | None:
    """`make_filter` in plain Python."""
    count, hashes = 0, set[int]()
    for header in iter_headers(batches):
        if header.is_control:
            continue
        try:
            records = expand(batches, header)
            fields = walk_batch(records, header, with_columns=True).fields
        except CorruptBatch:
            return None
        rows = zip(fields.key_starts, fields.key_ends, strict=True)
        keys = [records[start:end] for start, end in rows if start >= 0]
        count += len(keys)
        if count > KEYS_MAX:
            return None
        hashes.update(map(hash_key, set(keys)))
    bits = bytearray(filter_size(len(hashes)) if not hashes or size_bytes is None else size_bytes)
    for hashed in hashes:
        for at in _places(hashed, len(bits)):
            bits[at >> 3] |= 1 << (at & 7)
    return bytes(bits)


MakeFilter = Callable[[Buffer, int | None], bytes | None]
"""From batches, of a given size or else of the usual one; what has no keys has an empty one."""

_in_use: Final[list[MakeFilter]] = [make_filter_plain]


def use(make: MakeFilter) -> None:
    _in_use[0] = make
