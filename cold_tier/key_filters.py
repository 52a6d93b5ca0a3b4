"""The key filters of a segment, a section of its `.indexes` object: for each chunk, which keys none
of its records has (`record_format/key_filter.py`). Big-endian (docs/formats/segment-objects.md):

    0   magic "TLKF"              8   base offset i64          24       4 bytes a chunk
    4   format version u16 (1)    16  log CRC-32C u32          24 + 4n  CRC-32C u32 of all before
    6   entry size u16 (4)        20  chunk count u32          28 + 4n  the filters, end to end

    a chunk: size i32 of its filter; 0 if no record has a key, -1 if it is not known which have one

* A filter only ever leaves out chunks, so one that is wrong would hide records: nothing is used
  before its CRC, and that it is of this log, were checked.
* A segment may have none, and so may a chunk: they are read whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from tierlog.cold_tier.index_bundle import (
    ChunkTable,
    Directory,
    SectionKind,
    check_section,
)
from tierlog.cold_tier.table_layout import TableLayout
from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import CorruptObject
from tierlog.record_format.key_filter import holds_key

_TABLE: Final = TableLayout(
    "table of key filters", b"TLKF", struct.Struct(">4sHHqII"), struct.Struct(">i")
)
_NOT_KNOWN: Final = -1

assert (_TABLE.header.size, _TABLE.entry.size) == (24, 4)


class KeyFilters(NamedTuple):
    """By chunk; None: not known."""

    filters: Sequence[bytes | None]

    def may_hold(self, chunk: int, hashed: int) -> bool:
        """Whether a chunk may have a record of the key with this hash."""
        bits = self.filters[chunk]
        return bits is None or holds_key(bits, hashed)


def pack_key_filters(table: ChunkTable, filters: Sequence[bytes | None]) -> bytes:
    assert len(filters) == len(table.chunks), "one for each chunk"
    sizes = [(_NOT_KNOWN if bits is None else len(bits),) for bits in filters]
    head = _TABLE.pack(table.base_offset, table.log_crc32c, entries=sizes)
    return b"".join([head, *(bits for bits in filters if bits is not None)])


def find_key_filters(
    data: Buffer, directory: Directory, table: ChunkTable, *, file: str
) -> KeyFilters | None:
    """Of an `.indexes` object's bytes, which have them; None if there are none. Raises
    CorruptObject, UnknownFormatVersion.
    """
    section = directory.section(SectionKind.KEY_FILTERS)
    if section is None:
        return None
    body = check_section(section, data[section.position : section.end_position], file=file)
    return parse_key_filters(body, table, file=file)


def parse_key_filters(data: Buffer, table: ChunkTable, *, file: str) -> KeyFilters:
    """The filters of the segment that has this chunk table. Raises CorruptObject,
    UnknownFormatVersion.
    """
    (base_offset, log_crc), entries = _TABLE.unpack(data, file=file)
    if (base_offset, log_crc, len(entries)) != (
        table.base_offset,
        table.log_crc32c,
        len(table.chunks),
    ):
        raise CorruptObject("the key filters belong to another segment", file=file)
    sizes = [size for (size,) in entries]
    if min(sizes, default=0) < _NOT_KNOWN:
        raise CorruptObject("a key filter has a negative size", file=file)
    ends = accumulate((max(size, 0) for size in sizes), initial=_TABLE.size_bytes(len(sizes)))
    bounds = list(pairwise(ends))
    if len(data) != (bounds[-1][1] if bounds else _TABLE.size_bytes(0)):
        raise CorruptObject("the key filters' sizes do not add up", file=file)
    return KeyFilters(
        [
            None if size == _NOT_KNOWN else bytes(data[start:end])
            for size, (start, end) in zip(sizes, bounds, strict=True)
        ]
    )
