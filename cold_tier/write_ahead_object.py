"""An object of a write-ahead chain: what partitions of one broker got since the one before it
(docs/formats/write-ahead.md). Big-endian:

    0   magic "TLWA"              16  CRC-32C u32 of object size and slice count
    4   format version u16 (1)    20  slice count u32
    6   entry size u16 (56)       24         56 bytes a slice
    8   object size i64           24 + 56 n  CRC-32C u32 of all bytes before
                                  28 + 56 n  the slices' record batches, one after the other

    a slice:
    0   topic id, 16 bytes    20  leader epoch i32    32  end offset i64            48  size u32
    16  partition u32         24  base offset i64     40  segment base offset i64   52  CRC-32C u32

* A slice is of one segment. It may have no batches: it says that at this time its writer led.
* A fence is an object without slices: the same bytes, whoever made it.
* An object that is shorter than it says is what a store kept of a PUT that was interrupted, and of
  which nothing was acknowledged: it counts as an object, and has no slices.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tierlog.cold_tier.table_layout import TableLayout
from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptObject

_HEAD: Final = TableLayout(
    "write-ahead object", b"TLWA", struct.Struct(">4sHHqII"), struct.Struct(">16sIiqqqII")
)
_SIZE_AND_COUNT: Final = struct.Struct(">qI")
assert (_HEAD.header.size, _HEAD.entry.size) == (24, 56)

FIRST_READ_BYTES: Final = 16 * 1024  # the heads of up to 290 slices


class Place(NamedTuple):
    topic_id: bytes
    partition: int


class Part(NamedTuple):
    """What goes into an object: the batches [base_offset, end_offset) of a partition, of the
    segment that begins at `segment_base_offset`, written under `epoch`.
    """

    place: Place
    epoch: int
    base_offset: int
    end_offset: int
    segment_base_offset: int
    data: Buffer


class StoredPart(NamedTuple):
    """Where a part lies in its object."""

    place: Place
    epoch: int
    base_offset: int
    end_offset: int
    segment_base_offset: int
    position: int
    size_bytes: int
    crc32c: int


def pack_parts(parts: Sequence[Part]) -> bytes:
    """The object; a fence of no parts."""
    entries = [(*one.place, *one[1:5], len(one.data), crc32c_of(one.data)) for one in parts]
    size_bytes = _HEAD.size_bytes(len(parts)) + sum(len(one.data) for one in parts)
    check = crc32c_of(_SIZE_AND_COUNT.pack(size_bytes, len(parts)))
    return b"".join([_HEAD.pack(size_bytes, check, entries=entries), *(one.data for one in parts)])


FENCE: Final = pack_parts([])


def read_parts(
    read: Callable[[int, int], bytes], *, size_bytes: int, file: str
) -> list[StoredPart]:
    """The parts of an object of this size, by its head; `read` returns the bytes [start, end).
    Raises CorruptObject, UnknownFormatVersion, and what `read` does.
    """
    if size_bytes < len(FENCE):
        return []  # interrupted
    data = read(0, min(size_bytes, FIRST_READ_BYTES))
    *_, told_bytes, check, count = _HEAD.header.unpack_from(data)
    if check != crc32c_of(_SIZE_AND_COUNT.pack(told_bytes, count)):
        _HEAD.unpack(data, file=file)  # another version, or no such object
        raise CorruptObject("its size and count fail their CRC-32C", file=file)
    if size_bytes < told_bytes:
        return []
    if (head_bytes := _HEAD.size_bytes(count)) > len(data):
        data += read(len(data), head_bytes)
    _, entries = _HEAD.unpack(data, file=file)
    found, position = list[StoredPart](), head_bytes
    for topic_id, partition, epoch, base, end, segment_base, part_bytes, crc in entries:
        place = Place(topic_id, partition)
        found.append(StoredPart(place, epoch, base, end, segment_base, position, part_bytes, crc))
        position += part_bytes
    if position != told_bytes or size_bytes != told_bytes:
        raise CorruptObject(f"its parts end at {position} of {size_bytes}", file=file)
    return found
