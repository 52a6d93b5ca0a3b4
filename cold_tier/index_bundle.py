"""The `.indexes` object: a segment's indexes, and all else that is needed to rebuild a log folder
from the bucket.

Big-endian (docs/formats/segment-objects.md):

    0   magic "TLIX"              24         section count u32
    4   format version u16 (1)    28         24 bytes a section
    6   entry size u16 (24)       28 + 24 n  CRC-32C u32 of all bytes before
    8   base offset i64           32 + 24 n  the sections, the chunk table first
    16  log size i64

    a section: kind u32, CRC-32C u32, position i64, size i64

* The chunk table is the first section and the manifest has its position: one ranged GET reads it
  alone, or with the directory in front of it.
* The other sections are Kafka's files unchanged: `.index`, `.timeindex`, `.txnindex`, `.snapshot`
  (the producer state at the END of the segment). An empty or missing section has size 0.
* The directory has each section's CRC-32C, and its own. Sections of unknown kinds are skipped; an
  unknown format version is an error that names it.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from enum import IntEnum
from typing import Final, NamedTuple

from tierlog.cold_tier.chunk_table import ChunkTable, pack_chunk_table, parse_chunk_table
from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptObject, UnknownFormatVersion

MAGIC: Final = b"TLIX"
FORMAT_VERSION: Final = 1

_HEADER: Final = struct.Struct(">4sHHqqI")
_ENTRY: Final = struct.Struct(">IIqq")
_CRC: Final = struct.Struct(">I")

assert (_HEADER.size, _ENTRY.size) == (28, 24)


class SectionKind(IntEnum):
    CHUNK_TABLE = 1
    OFFSET_INDEX = 2
    TIME_INDEX = 3
    TXN_INDEX = 4
    PRODUCER_SNAPSHOT = 5


class Section(NamedTuple):
    kind: int
    crc32c: int
    position: int
    size_bytes: int

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes


class Directory(NamedTuple):
    """The head of the object."""

    base_offset: int
    log_size_bytes: int
    sections: Mapping[int, Section]

    def section(self, kind: SectionKind) -> Section | None:
        """The section of a kind; None if it is missing or empty."""
        found = self.sections.get(kind)
        return found if found is not None and found.size_bytes else None


class IndexBundle(NamedTuple):
    """A packed bundle, and the position of its chunk table."""

    body: bytes
    crc32c: int
    chunk_table_position: int
    chunk_table_size: int


def pack_bundle(
    table: ChunkTable,
    *,
    offset_index: bytes,
    time_index: bytes,
    txn_index: bytes = b"",
    producer_snapshot: bytes = b"",
) -> IndexBundle:
    parts = {
        SectionKind.CHUNK_TABLE: pack_chunk_table(table),
        SectionKind.OFFSET_INDEX: offset_index,
        SectionKind.TIME_INDEX: time_index,
        SectionKind.TXN_INDEX: txn_index,
        SectionKind.PRODUCER_SNAPSHOT: producer_snapshot,
    }
    first = position = head_size(len(parts))
    head = _HEADER.pack(
        MAGIC, FORMAT_VERSION, _ENTRY.size, table.base_offset, table.log_size_bytes, len(parts)
    )
    for kind, part in parts.items():
        head += _ENTRY.pack(kind, crc32c_of(part), position, len(part))
        position += len(part)
    body = b"".join([head, _CRC.pack(crc32c_of(head)), *parts.values()])
    return IndexBundle(body, crc32c_of(body), first, len(parts[SectionKind.CHUNK_TABLE]))


def head_size(sections: int) -> int:
    return _HEADER.size + sections * _ENTRY.size + _CRC.size


def parse_directory(data: Buffer, *, file: str) -> Directory:
    """Parse the head, all of which is in `data`. Raises CorruptObject, UnknownFormatVersion."""
    if len(data) < head_size(0) or bytes(data[:4]) != MAGIC:
        raise CorruptObject("is not an index bundle", file=file)
    _, version, entry_size, base_offset, log_size, count = _HEADER.unpack_from(data)
    if version != FORMAT_VERSION:
        raise UnknownFormatVersion(
            f"index bundle has format version {version}; this tierlog supports {FORMAT_VERSION}",
            file=file,
        )
    end = head_size(count) - _CRC.size
    if entry_size != _ENTRY.size or len(data) < end + _CRC.size:
        raise CorruptObject("the directory is truncated", file=file)
    if crc32c_of(bytes(data[:end])) != _CRC.unpack_from(data, end)[0]:
        raise CorruptObject("the directory fails its CRC-32C", file=file)
    entries = _ENTRY.iter_unpack(bytes(data[_HEADER.size : end]))
    sections = [Section(*fields) for fields in entries]
    if any(one.position < end + _CRC.size or one.size_bytes < 0 for one in sections):
        raise CorruptObject("a section lies outside the object", file=file)
    return Directory(base_offset, log_size, {one.kind: one for one in sections})


def check_section(section: Section, data: Buffer, *, file: str) -> bytes:
    """The section's bytes. Raises CorruptObject if they do not match the directory."""
    body = bytes(data)
    if len(body) != section.size_bytes or crc32c_of(body) != section.crc32c:
        raise CorruptObject(
            f"section {section.kind} fails its CRC-32C", file=file, position=section.position
        )
    return body


class ParsedBundle(NamedTuple):
    """A whole bundle; missing sections are empty."""

    table: ChunkTable
    offset_index: bytes
    time_index: bytes
    txn_index: bytes
    producer_snapshot: bytes


def parse_bundle(data: Buffer, *, file: str) -> ParsedBundle:
    """Parse a whole `.indexes` object. Raises CorruptObject, UnknownFormatVersion."""
    directory = parse_directory(data, file=file)

    def part(kind: SectionKind) -> bytes:
        section = directory.section(kind)
        if section is None:
            return b""
        return check_section(section, data[section.position : section.end_position], file=file)

    table = parse_chunk_table(part(SectionKind.CHUNK_TABLE), file=file)
    if (table.base_offset, table.log_size_bytes) != directory[:2]:
        raise CorruptObject("the chunk table belongs to another segment", file=file)
    return ParsedBundle(table, *(part(kind) for kind in list(SectionKind)[1:]))
