"""What the bucket says of a partition's segments: chunk tables, aborted and open transactions.

Rules that keep it honest:

* Nothing is believed that fails its checksum; a segment object never changes, so what was read of
  it is kept for the process, up to a limit.
* Only the parts that are needed are fetched: the directory and the chunk table lie next to each
  other, the other sections are asked for one by one.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from cold_tier.chunk_table import Chunk, ChunkTable, parse_chunk_table
from cold_tier.index_bundle import (
    Directory,
    SectionKind,
    check_section,
    parse_directory,
)
from cold_tier.object_store import ObjectStore
from cold_tier.ranged_reader import FETCH_POLICY, ChunkRef, read_chunk
from manifest.state import SegmentEntry
from record_format.cut import Cut
from record_format.errors import CorruptObject
from record_format.index_layouts import AbortedTxn, parse_txn_index
from record_format.producer_snapshot import parse_snapshot
from spark_reader.plan import ChunkPiece

KEPT_CHUNKS: Final = 200_000


class SegmentIndex(NamedTuple):
    """The head of a segment's `.indexes` object."""

    entry: SegmentEntry
    directory: Directory
    table: ChunkTable


class _Kept:
    """The indexes read so far, least recently used out first. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[tuple[str, str], SegmentIndex] = OrderedDict()
        self._chunks = 0

    def get(self, key: tuple[str, str]) -> SegmentIndex | None:
        with self._lock:
            if key in self._indexes:
                self._indexes.move_to_end(key)
            return self._indexes.get(key)

    def put(self, key: tuple[str, str], index: SegmentIndex) -> None:
        with self._lock:
            if key not in self._indexes:
                self._indexes[key] = index
                self._chunks += len(index.table.chunks)
            while self._chunks > KEPT_CHUNKS and len(self._indexes) > 1:
                _, oldest = self._indexes.popitem(last=False)
                self._chunks -= len(oldest.table.chunks)


_kept: Final = _Kept()


def read_index(store: ObjectStore, entry: SegmentEntry) -> SegmentIndex:
    """The segment's chunk table and directory. Raises CorruptObject, MissingObject, and more."""
    key = (store.url, entry.indexes_key)
    index = _kept.get(key)
    if index is None:
        index = _fetch_index(store, entry)
        _kept.put(key, index)
    return index


def _fetch_index(store: ObjectStore, entry: SegmentEntry) -> SegmentIndex:
    file = entry.indexes_key
    start, end = entry.chunk_table_position, entry.chunk_table_position + entry.chunk_table_size
    head = _get(store, file, 0, end)
    table = parse_chunk_table(head[start:end], file=file)
    facts = (table.base_offset, table.log_size_bytes, table.log_crc32c)
    if facts != (entry.base_offset, entry.size_bytes, entry.log_crc32c):
        raise CorruptObject("the chunk table is of another segment", file=file)
    return SegmentIndex(entry, parse_directory(head, file=file), table)


def _get(store: ObjectStore, key: str, start: int, end: int) -> bytes:
    return FETCH_POLICY.run(lambda: b"".join(store.get_range(key, start, end)))


def _section(store: ObjectStore, index: SegmentIndex, kind: SectionKind) -> bytes:
    """Empty where there is none."""
    section = index.directory.section(kind)
    if section is None:
        return b""
    file = index.entry.indexes_key
    data = _get(store, file, section.position, section.end_position)
    return check_section(section, data, file=file)


def pieces(index: SegmentIndex) -> Iterator[ChunkPiece]:
    for number, chunk in enumerate(index.table.chunks):
        yield ChunkPiece(
            log_key=index.entry.log_key,
            number=number,
            position=chunk.position,
            size_bytes=chunk.size_bytes,
            crc32c=chunk.crc32c,
            first_offset=chunk.first_offset,
            last_offset=chunk.last_offset,
            min_timestamp=chunk.min_timestamp,
            max_timestamp=chunk.max_timestamp,
        )


def chunk_ref(piece: ChunkPiece) -> ChunkRef:
    return ChunkRef(
        log_key=piece.log_key,
        key=(piece.log_key, piece.number),
        position=piece.position,
        size_bytes=piece.size_bytes,
        crc32c=piece.crc32c,
    )


def aborted_transactions(store: ObjectStore, index: SegmentIndex) -> list[AbortedTxn]:
    """The transactions whose abort markers lie in the segment."""
    data = _section(store, index, SectionKind.TXN_INDEX)
    return parse_txn_index(data, base_offset=index.entry.base_offset, file=index.entry.indexes_key)


def first_open_transaction(store: ObjectStore, index: SegmentIndex) -> int | None:
    """Where the oldest transaction begins that is open at the segment's end; None: none is."""
    data = _section(store, index, SectionKind.PRODUCER_SNAPSHOT)
    producers = parse_snapshot(data, file=index.entry.indexes_key) if data else []
    begun = [one.current_txn_first_offset for one in producers]
    return min((offset for offset in begun if offset >= 0), default=None)


def first_at_time(
    store: ObjectStore, entries: Iterable[SegmentEntry], *, timestamp: int, log_start_offset: int
) -> int | None:
    """The offset of the first record at or after `timestamp`, by reading at most what may hold it.

    Times are in no order, so every chunk that is not known to be older is looked into.
    """
    for entry in entries:
        # -1: no time is known of it, or no record has one.
        if entry.max_timestamp != -1 and entry.max_timestamp < timestamp:
            continue
        index = read_index(store, entry)
        for piece, chunk in zip(pieces(index), index.table.chunks, strict=True):
            if chunk.last_offset < log_start_offset or _is_older(chunk, timestamp):
                continue
            cut = Cut(start_offset=log_start_offset, start_timestamp=timestamp)
            found = _first_offset(store, piece, cut)
            if found is not None:
                return found
    return None


def _is_older(chunk: Chunk, timestamp: int) -> bool:
    return chunk.max_timestamp is not None and chunk.max_timestamp < timestamp


def _first_offset(store: ObjectStore, piece: ChunkPiece, cut: Cut) -> int | None:
    from record_format.arrow import ArrowDecoder, DecodeRequest  # few plans need the kernels

    decoder = ArrowDecoder(DecodeRequest("", 0, columns=("offset",), cut=cut))
    data = read_chunk(store, chunk_ref(piece))
    for batch in decoder.decode(data, file=piece.log_key, position=piece.position):
        offset: int = batch.column(0)[0].as_py()
        return offset
    return None
