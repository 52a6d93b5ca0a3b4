"""Looks up chunks, timestamps and transactions in the indexes of cold segments.

Segments and chunks whose timestamp range is unknown are searched. Timestamps are in no order, so
each row's own is compared again when it is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from cold_tier.index_bundle import SectionKind
from cold_tier.object_store import ObjectStore
from cold_tier.ranged_reader import read_chunk
from cold_tier.segment_indexes import SegmentIndexes
from manifest.state import SegmentEntry
from record_format.batch import iter_headers
from record_format.decode import first_at_time
from record_format.errors import CorruptBatch
from record_format.producer_snapshot import parse_snapshot
from record_format.row_filter import RowFilter
from spark_reader.plan import ChunkPiece


def pieces(indexes: SegmentIndexes, entry: SegmentEntry) -> Iterator[ChunkPiece]:
    index = indexes.get(entry)
    return map(ChunkPiece, index.chunks, index.table.chunks)


def may_match(entry: SegmentEntry, row_filter: RowFilter) -> bool:
    """Whether a segment may hold a row of the time range."""
    return row_filter.may_match(entry.min_timestamp, entry.known_max_timestamp)


def first_open_transaction(indexes: SegmentIndexes, entry: SegmentEntry) -> int | None:
    """The first offset of the oldest transaction that is open at the segment's end; None if none
    is.
    """
    data = indexes.section(entry, SectionKind.PRODUCER_SNAPSHOT)
    producers = parse_snapshot(data, file=entry.indexes_key) if data else []
    first_offsets = [producer.current_txn_first_offset for producer in producers]
    return min((offset for offset in first_offsets if offset >= 0), default=None)


def offset_for_timestamp(
    store: ObjectStore,
    indexes: SegmentIndexes,
    entries: Iterable[SegmentEntry],
    *,
    timestamp: int,
    log_start_offset: int,
) -> int | None:
    """The offset of the first record at or after `timestamp`; None if there is none.

    Timestamps are in no order, so every chunk that is not known to be older is read.
    """
    row_filter = RowFilter(start_offset=log_start_offset, start_timestamp=timestamp)
    for entry in entries:
        for piece in pieces(indexes, entry) if may_match(entry, row_filter) else ():
            if piece.chunk.last_offset < log_start_offset:
                continue
            if not row_filter.may_match(piece.chunk.min_timestamp, piece.chunk.max_timestamp):
                continue
            if (found := _first_offset(store, piece, row_filter)) is not None:
                return found
    return None


def _first_offset(store: ObjectStore, piece: ChunkPiece, row_filter: RowFilter) -> int | None:
    data = read_chunk(store, piece.ref)
    try:
        for header in iter_headers(data):
            found = first_at_time(
                data,
                header,
                timestamp=row_filter.start_timestamp,
                start_offset=row_filter.start_offset,
            )
            if found is not None:
                return found[0]
    except CorruptBatch as error:
        position = piece.ref.position + (error.position or 0)
        raise error.with_location(file=piece.ref.log_key, position=position) from None
    return None
