"""The `.indexes` object: a segment's indexes, and all else that is needed to rebuild a log folder
from the bucket. Big-endian (docs/formats/segment-objects.md):

    0   magic "TLIX"              24         section count u32
    4   format version u16 (1)    28         24 bytes a section
    6   entry size u16 (24)       28 + 24 n  CRC-32C u32 of all bytes before
    8   base offset i64           32 + 24 n  the sections, the chunk table first
    16  log size i64

    a section: kind u32, CRC-32C u32, position i64, size i64

The chunk table has the parts that can be fetched, verified and skipped individually:

    0   magic "TLCT"             20  log size i64            32 + 56 n   CRC-32C u32 over all before
    4   format version u16 (1)   28  chunk count u32
    6   entry size u16 (56)
    8   base offset i64
    16  log CRC-32C u32

    an entry:
    0   position i64        16  first offset i64    32  min timestamp i64   48  CRC-32C u32
    8   size u32            24  last offset i64     40  max timestamp i64   52  flags u32
    12  record count u32

* The chunk table is the first section and the manifest has its position: one ranged GET reads it
  alone, or with the directory in front of it.
* The other sections are Kafka's files unchanged: `.index`, `.timeindex`, `.txnindex`, `.snapshot`
  (the producer state at the END of the segment). An empty or missing section has size 0. Spans and
  key filters (`key_filters.py`) come next to the chunk table, since those who need one need both.
  Sections of unknown kinds are skipped.
* The chunks of a small segment have spans: a second chunk table, whose entries are parts of chunks.
  Who wants little of a chunk reads those. A chunk is what is cached, filtered by key and verified.
* Chunks lie end to end from 0 to the log's size, each of whole batches, offsets rising.
* A timestamp range covers the records themselves. If a bound is unknown its flag is not set, and it
  is not used for skipping. A record without a timestamp counts as -1.
* Nothing is accepted unless its CRC and these rules hold; an unknown format version is an error
  that names it.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum, IntFlag
from operator import attrgetter
from typing import Final, NamedTuple

from tierlog.cold_tier.table_layout import TableLayout
from tierlog.record_format.batch import Buffer
from tierlog.record_format.crc32c import crc32c_joined, crc32c_of
from tierlog.record_format.errors import CorruptObject

_TABLE: Final = TableLayout(
    "chunk table", b"TLCT", struct.Struct(">4sHHqIqI"), struct.Struct(">qIIqqqqII")
)
_DIRECTORY: Final = TableLayout(
    "bundle of indexes", b"TLIX", struct.Struct(">4sHHqqI"), struct.Struct(">IIqq")
)

assert [(one.header.size, one.entry.size) for one in (_TABLE, _DIRECTORY)] == [(32, 56), (28, 24)]


class ChunkFlags(IntFlag):
    HAS_GAP = 1
    """Offsets are missing inside or before the chunk: compaction removed records."""
    MIN_TIMESTAMP_KNOWN = 2
    MAX_TIMESTAMP_KNOWN = 4
    HAS_TRANSACTIONS = 8
    """Some batch is transactional or a control batch."""


_KNOWN_FLAGS: Final = 15


class Chunk(NamedTuple):
    position: int
    size_bytes: int
    first_offset: int
    last_offset: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int | None
    crc32c: int
    has_gap: bool
    has_transactions: bool

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes


def join_chunks(chunks: Sequence[Chunk]) -> Chunk:
    """One entry for chunks that lie end to end, at least one."""
    first, last = chunks[0], chunks[-1]
    if first is last:
        return first
    crc = first.crc32c
    for chunk in chunks[1:]:
        crc = crc32c_joined(crc, chunk.crc32c, second_bytes=chunk.size_bytes)
    return Chunk(
        position=first.position,
        size_bytes=last.end_position - first.position,
        first_offset=first.first_offset,
        last_offset=last.last_offset,
        record_count=sum(chunk.record_count for chunk in chunks),
        min_timestamp=_of_all(min, [one.min_timestamp for one in chunks if one.record_count]),
        max_timestamp=_of_all(max, [one.max_timestamp for one in chunks if one.record_count]),
        crc32c=crc,
        has_gap=any(chunk.has_gap for chunk in chunks),
        has_transactions=any(chunk.has_transactions for chunk in chunks),
    )


_position: Final = attrgetter("position")
_end_position: Final = attrgetter("end_position")


class ChunkTable:
    """The chunks of one segment's log. Immutable."""

    __slots__ = (
        *("_last_offsets", "base_offset", "chunks", "has_transactions"),
        *("log_crc32c", "log_size_bytes"),
    )

    def __init__(
        self,
        chunks: Sequence[Chunk],
        *,
        base_offset: int,
        log_size_bytes: int,
        log_crc32c: int,
    ) -> None:
        self.chunks = tuple(chunks)
        self.base_offset = base_offset
        self.log_size_bytes, self.log_crc32c = log_size_bytes, log_crc32c
        self.has_transactions = any(chunk.has_transactions for chunk in self.chunks)
        self._last_offsets = [chunk.last_offset for chunk in self.chunks]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ChunkTable) and pack_chunk_table(self) == pack_chunk_table(other)

    __hash__ = None  # type: ignore[assignment]

    @property
    def record_count(self) -> int:
        return sum(chunk.record_count for chunk in self.chunks)

    @property
    def min_timestamp(self) -> int | None:
        """The minimum over all records; None if there are none, or if any chunk's is unknown."""
        return _of_all(min, [chunk.min_timestamp for chunk in self.chunks if chunk.record_count])

    @property
    def max_timestamp(self) -> int | None:
        return _of_all(max, [chunk.max_timestamp for chunk in self.chunks if chunk.record_count])

    def index_of(self, offset: int) -> int:
        """The first chunk that ends at or after `offset`; the number of chunks if none does."""
        return bisect_left(self._last_offsets, offset)

    def within(self, chunk: Chunk) -> tuple[Chunk, ...]:
        """Of a table of spans: those of this chunk."""
        numbers = self.numbers_of(chunk.position, chunk.end_position)
        return self.chunks[numbers.start : numbers.stop]

    def numbers_of(self, start: int, end: int) -> range:
        """The numbers of the chunks that overlap bytes [start, end)."""
        first = bisect_right(self.chunks, start, key=_end_position)
        return range(first, bisect_left(self.chunks, end, lo=first, key=_position))


def _of_all(choose: Callable[[list[int]], int], bounds: Sequence[int | None]) -> int | None:
    known = [bound for bound in bounds if bound is not None]
    return choose(known) if known and len(known) == len(bounds) else None


def pack_chunk_table(table: ChunkTable) -> bytes:
    return _TABLE.pack(
        table.base_offset,
        table.log_crc32c,
        table.log_size_bytes,
        entries=[_entry_of(chunk) for chunk in table.chunks],
    )


def parse_chunk_table(data: Buffer, *, file: str) -> ChunkTable:
    """Raises CorruptObject, UnknownFormatVersion."""
    (base_offset, log_crc, log_size), entries = _TABLE.unpack(data, file=file)
    if len(data) != _TABLE.size_bytes(len(entries)):
        raise CorruptObject("the chunk table's length does not match its count", file=file)
    chunks = [_chunk_of(entry) for entry in entries]
    problem = _disorder(chunks, base_offset=base_offset, log_size_bytes=log_size)
    if problem:
        raise CorruptObject(f"chunk table: {problem}", file=file)
    return ChunkTable(chunks, base_offset=base_offset, log_size_bytes=log_size, log_crc32c=log_crc)


def _entry_of(chunk: Chunk) -> tuple[int, ...]:
    flags = ChunkFlags.HAS_GAP * chunk.has_gap
    flags |= ChunkFlags.HAS_TRANSACTIONS * chunk.has_transactions
    flags |= ChunkFlags.MIN_TIMESTAMP_KNOWN * (chunk.min_timestamp is not None)
    flags |= ChunkFlags.MAX_TIMESTAMP_KNOWN * (chunk.max_timestamp is not None)
    return (
        chunk.position,
        chunk.size_bytes,
        chunk.record_count,
        chunk.first_offset,
        chunk.last_offset,
        chunk.min_timestamp if chunk.min_timestamp is not None else 0,
        chunk.max_timestamp if chunk.max_timestamp is not None else 0,
        chunk.crc32c,
        flags,
    )


def _chunk_of(entry: tuple[int, ...]) -> Chunk:
    position, size, count, first, last, low, high, crc, flags = entry
    return Chunk(
        position=position,
        size_bytes=size,
        first_offset=first,
        last_offset=last,
        record_count=count,
        min_timestamp=low if flags & ChunkFlags.MIN_TIMESTAMP_KNOWN else None,
        max_timestamp=high if flags & ChunkFlags.MAX_TIMESTAMP_KNOWN else None,
        crc32c=crc,
        has_gap=bool(flags & ChunkFlags.HAS_GAP) or flags > _KNOWN_FLAGS,
        has_transactions=bool(flags & ChunkFlags.HAS_TRANSACTIONS),
    )


def _disorder(chunks: Sequence[Chunk], *, base_offset: int, log_size_bytes: int) -> str:
    position, next_offset = 0, base_offset
    for number, chunk in enumerate(chunks):
        if chunk.position != position or chunk.size_bytes == 0:
            return f"chunk {number} does not begin where the previous one ends"
        if not next_offset <= chunk.first_offset <= chunk.last_offset:
            return f"the offsets of chunk {number} are out of order"
        position, next_offset = chunk.end_position, chunk.last_offset + 1
    return "" if position == log_size_bytes else f"ends at {position} of {log_size_bytes} bytes"


class SectionKind(IntEnum):
    CHUNK_TABLE = 1
    OFFSET_INDEX = 2
    TIME_INDEX = 3
    TXN_INDEX = 4
    PRODUCER_SNAPSHOT = 5
    KEY_FILTERS = 6
    SPANS = 7


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
    spans: Sequence[Chunk] = (),
    key_filters: bytes = b"",
) -> IndexBundle:
    parts = {
        SectionKind.CHUNK_TABLE: pack_chunk_table(table),
        **({SectionKind.SPANS: pack_spans(table, spans)} if spans else {}),
        **({SectionKind.KEY_FILTERS: key_filters} if key_filters else {}),
        SectionKind.OFFSET_INDEX: offset_index,
        SectionKind.TIME_INDEX: time_index,
        SectionKind.TXN_INDEX: txn_index,
        SectionKind.PRODUCER_SNAPSHOT: producer_snapshot,
    }
    first = position = _DIRECTORY.size_bytes(len(parts))
    sections = []
    for kind, part in parts.items():
        sections.append(Section(kind, crc32c_of(part), position, len(part)))
        position += len(part)
    head = _DIRECTORY.pack(table.base_offset, table.log_size_bytes, entries=sections)
    body = b"".join([head, *parts.values()])
    return IndexBundle(body, crc32c_of(body), first, len(parts[SectionKind.CHUNK_TABLE]))


def parse_directory(data: Buffer, *, file: str) -> Directory:
    """Parse the head, all of which is in `data`. Raises CorruptObject, UnknownFormatVersion."""
    (base_offset, log_size), entries = _DIRECTORY.unpack(data, file=file)
    sections, end = [Section(*entry) for entry in entries], _DIRECTORY.size_bytes(len(entries))
    if any(one.position < end or one.size_bytes < 0 for one in sections):
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


def pack_spans(table: ChunkTable, spans: Sequence[Chunk]) -> bytes:
    return pack_chunk_table(
        ChunkTable(
            spans,
            base_offset=table.base_offset,
            log_size_bytes=table.log_size_bytes,
            log_crc32c=table.log_crc32c,
        )
    )


def parse_spans(data: Buffer, table: ChunkTable, *, file: str) -> ChunkTable:
    """The spans of the segment that has this chunk table. Raises CorruptObject,
    UnknownFormatVersion.
    """
    spans = parse_chunk_table(data, file=file)
    if (spans.base_offset, spans.log_size_bytes, spans.log_crc32c) != (
        table.base_offset,
        table.log_size_bytes,
        table.log_crc32c,
    ):
        raise CorruptObject("the spans belong to another segment", file=file)
    if not set(map(_position, table.chunks)).issubset(map(_position, spans.chunks)):
        raise CorruptObject("a span is of two chunks", file=file)
    return spans


class ParsedBundle(NamedTuple):
    """What of a whole bundle a log folder is rebuilt from; missing sections are empty."""

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
    return ParsedBundle(table, *map(part, _FILES))


_FILES: Final = (
    SectionKind.OFFSET_INDEX,
    SectionKind.TIME_INDEX,
    SectionKind.TXN_INDEX,
    SectionKind.PRODUCER_SNAPSHOT,
)
