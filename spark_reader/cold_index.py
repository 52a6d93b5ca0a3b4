"""Looks up chunks, timestamps and transactions in the indexes of cold segments.

Segments and chunks whose timestamp range is unknown are searched. Timestamps are in no order, so
each row's own is compared again when it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import groupby

from tierlog.cold_tier.index_bundle import Chunk, SectionKind
from tierlog.cold_tier.ranged_reader import read_chunk
from tierlog.cold_tier.segment_lookup import SegmentIndexes
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.decode import first_at_time
from tierlog.record_format.errors import CorruptBatch, MissingObject
from tierlog.record_format.record_walk import RowFilter
from tierlog.record_format.segment_entry import SegmentEntry
from tierlog.spark_reader.splits import (
    ChunkPiece,
    chunk_matches,
    chunk_may_match,
    join_pieces,
)


def chunk_pieces(
    indexes: SegmentIndexes,
    entry: SegmentEntry,
    row_filter: RowFilter,
    hashes: Collection[int] | None = None,
) -> Iterator[ChunkPiece]:
    """What of a segment may have rows that match, and one of these keys: whole chunks, and the
    spans of a chunk that the filter cuts, those together of which all rows match. One GET for all
    that is needed of the indexes; or two, of keys in a segment that is cut.
    """
    spans = indexes.load_spans(entry) if is_cut(entry, row_filter) else None
    filters = None if hashes is None else indexes.load_key_filters(entry)
    index = indexes.load_index(entry)
    for number, piece in enumerate(map(ChunkPiece, index.chunks, index.table.chunks)):
        if not chunk_may_match(piece.chunk, row_filter):
            continue
        if filters is not None and not any(filters.may_hold(number, one) for one in hashes or ()):
            continue
        if spans is None or chunk_matches(piece.chunk, row_filter):
            yield piece
        else:
            wanted = (one for one in spans.within(piece.chunk) if chunk_may_match(one, row_filter))
            for _, alike in groupby(wanted, lambda one: chunk_matches(one, row_filter)):
                yield from join_pieces(piece.of(span) for span in alike)


def count_rows(indexes: SegmentIndexes, entry: SegmentEntry, row_filter: RowFilter) -> int | None:
    """How many rows a segment has, if the filter wants them all and what is in memory tells it."""
    if not indexes.has_index(entry) or not row_filter.holds_range(*_range_of(entry)):
        return None
    table = indexes.load_index(entry).table
    return None if table.has_transactions else table.record_count  # which has control batches


def may_match(entry: SegmentEntry, row_filter: RowFilter) -> bool:
    """Whether a segment may hold a row of the time range."""
    return row_filter.may_match(entry.min_timestamp, entry.known_max_timestamp)


def is_cut(entry: SegmentEntry, row_filter: RowFilter) -> bool:
    """Whether some rows of a segment may match, and others not."""
    of = _range_of(entry)
    return row_filter.may_match_range(*of) and not row_filter.holds_range(*of)


def _range_of(entry: SegmentEntry) -> tuple[int, int, int | None, int | None]:
    return entry.base_offset, entry.last_offset, entry.min_timestamp, entry.known_max_timestamp


def first_open_transaction(indexes: SegmentIndexes, entry: SegmentEntry) -> int | None:
    """The first offset of the oldest transaction that is open at the segment's end; None if none
    is.
    """
    data = indexes.load_section(entry, SectionKind.PRODUCER_SNAPSHOT)
    producers = parse_snapshot(data, file=entry.indexes_key) if data else []
    first_offsets = [producer.current_txn_first_offset for producer in producers]
    return min((offset for offset in first_offsets if offset >= 0), default=None)


def first_offset(
    store: ObjectStore,
    indexes: SegmentIndexes,
    entries: Iterable[SegmentEntry],
    row_filter: RowFilter,
    *,
    missing: Callable[[MissingObject], None],
) -> int | None:
    """The first offset from the filter's start offset on whose record is at or after its start
    timestamp; None if there is none.

    Timestamps are in no order, so every chunk that is not known to be older is read. `missing` is
    called for a segment that cannot be read because an object is missing.
    """
    for entry in entries:
        if not may_match(entry, row_filter):
            continue
        try:
            found = _first_in_segment(store, indexes, entry, row_filter)
        except MissingObject as error:
            missing(error)
        else:
            if found is not None:
                return found
    return None


def _first_in_segment(
    store: ObjectStore, indexes: SegmentIndexes, entry: SegmentEntry, row_filter: RowFilter
) -> int | None:
    for piece in chunk_pieces(indexes, entry, row_filter):
        if _begins_with_match(piece.chunk, row_filter):
            return piece.chunk.first_offset
        if (found := _first_in_chunk(store, piece, row_filter)) is not None:
            return found
    return None


def _begins_with_match(chunk: Chunk, row_filter: RowFilter) -> bool:
    """Whether it is known that the chunk's first offset is that of a record, which matches."""
    may_lack = chunk.has_gap or chunk.has_transactions or not chunk.record_count
    return not may_lack and chunk_matches(chunk, row_filter)


def _first_in_chunk(store: ObjectStore, piece: ChunkPiece, row_filter: RowFilter) -> int | None:
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
