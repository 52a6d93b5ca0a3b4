"""Reads of the cold tier, answered as those of the hot one: with slices of local files.

* Every slice of an answer is open before the answer is given, and of a chunk whose CRC-32C was
  right.
* A read waits for its first chunk; what it wants beyond is on its way meanwhile. An error in a
  later chunk ends the answer before it, and is the next read's.
* Chunks are the unit of skipping: what their table says of offsets and times is enough to leave one
  alone, and what it does not know is looked into.
* What may be answered without waiting is the very answer that waiting would give: one path, which
  opens chunks and walks them by two kinds of `_Access`.
* This file does not know manifests: a segment is given, and with it what follows, for read-ahead.

Thread-safe; every call may block on the store.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Final, NamedTuple

from cold_tier.batch_finder import (
    AS_FAR_AS_NEEDED,
    WITHOUT_WAITING,
    BatchFinder,
    Steps,
    walk_batches,
)
from cold_tier.chunk_cache import ChunkCache
from cold_tier.chunk_fills import ROOM_WAIT_S, ChunkFills
from cold_tier.chunk_table import Chunk
from cold_tier.index_bundle import SectionKind
from cold_tier.object_store import ObjectStore
from cold_tier.ranged_reader import ChunkRef, FetchCounts, RangedReader
from cold_tier.read_ahead import Ahead, ReadAhead
from cold_tier.segment_indexes import ColdSegment, SegmentIndex, SegmentIndexes
from record_format.batch import BatchHeader, parse_header
from record_format.decode import expand, walk_batch
from record_format.errors import CorruptBatch, CorruptObject, TierlogError
from record_format.file_slice import FileSlice, OpenFile
from record_format.index_layouts import AbortedTxn, parse_txn_index

__all__ = ["ColdLimits", "ColdRead", "ColdReader", "ColdSegment"]

END: Final = 2**63 - 1
REQUEST_BYTES: Final = 1024 * 1024  # what a GET in flight takes: a piece, and buffers below it
SEGMENTS_AHEAD: Final = 2
AT_ONCE_MAX: Final = 4  # chunks that one answer holds open from its start
TASKS_AHEAD: Final = 32


class ColdLimits(NamedTuple):
    """`requests_max` GETs in flight, within `memory_max_bytes`, whatever clients do."""

    requests_max: int = 32
    memory_max_bytes: int = 128 * 1024 * 1024

    @property
    def fills(self) -> int:
        return max(2, min(self.requests_max, self.memory_max_bytes // REQUEST_BYTES))


class ColdRead(NamedTuple):
    """Whole batches; the first may begin below the offset asked for.

    `next_offset` is where the next read begins; slices may be empty where compaction left nothing.
    """

    slices: tuple[FileSlice, ...]
    next_offset: int


@dataclass(frozen=True)
class _Wanted:
    """`end_offset` is within the segment."""

    segment: ColdSegment
    index: SegmentIndex
    offset: int
    end_offset: int


class _Access(NamedTuple):
    """How a read gets at bytes: `open` takes a chunk and whether others are held open already."""

    open: Callable[[ChunkRef, bool], OpenFile]
    steps: Steps


class _Part(NamedTuple):
    piece: FileSlice
    next_offset: int
    at_chunk_end: bool


class AbortedTxns(NamedTuple):
    """`complete`: transactions that overlap the range cannot be named by a later segment."""

    transactions: tuple[AbortedTxn, ...]
    complete: bool


class ColdReader:
    def __init__(
        self,
        store: ObjectStore,
        cache: ChunkCache,
        *,
        limits: ColdLimits = ColdLimits(),  # noqa: B008  immutable
        reader: RangedReader | None = None,
        indexes: SegmentIndexes | None = None,
        read_ahead: ReadAhead | None = None,
    ) -> None:
        self._indexes = indexes or SegmentIndexes(store)
        self._reader = reader or RangedReader(store, requests_max=limits.fills)
        self._fills = ChunkFills(cache, self._reader, fills_max=limits.fills)
        self._finder = BatchFinder()
        self._read_ahead = read_ahead or ReadAhead()
        self._ahead_pool = ThreadPoolExecutor(SEGMENTS_AHEAD, thread_name_prefix="cold-ahead")
        self._ahead_slots = threading.BoundedSemaphore(TASKS_AHEAD)
        self._closed = False
        self._waiting = _Access(self._fetched, AS_FAR_AS_NEEDED)
        self._at_once = _Access(self._cached, WITHOUT_WAITING)

    @property
    def counts(self) -> FetchCounts:
        return self._reader.counts

    def close(self) -> None:
        self._closed = True
        self._ahead_pool.shutdown(wait=True, cancel_futures=True)
        self._fills.close()
        self._reader.close()

    # --- by offset --------------------------------------------------------------------------------

    def read(
        self,
        segment: ColdSegment,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int = END,
        following: Iterable[ColdSegment] = (),
    ) -> ColdRead:
        """Batches from the one that holds `offset` on, to the segment's end at most.

        At least one batch, whatever `max_bytes`, unless none below `end_offset` is left. Raises
        CorruptObject, MissingObject, StoreUnavailable, Throttled, DiskFull.
        """
        index = self._indexes.get(segment)
        wanted = _Wanted(segment, index, offset, min(end_offset, segment.last_offset + 1))
        ahead = self._fetch_ahead(wanted, following)
        read = self._collect(wanted, max_bytes, access=self._waiting)
        self._read_ahead.note(segment.folder, read.next_offset, done=ahead)
        return read

    def try_read(
        self,
        segment: ColdSegment,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int = END,
        following: Iterable[ColdSegment] = (),
    ) -> ColdRead | None:
        """As `read`, where nothing has to come from the store or the disk; None where it has."""
        index = self._indexes.peek(segment)
        if index is None:
            return None
        wanted = _Wanted(segment, index, offset, min(end_offset, segment.last_offset + 1))
        try:
            read = self._collect(wanted, max_bytes, access=self._at_once)
        except BlockingIOError:
            return None
        ahead = self._fetch_ahead(wanted, following)
        self._read_ahead.note(segment.folder, read.next_offset, done=ahead)
        return read

    def _fetched(self, chunk: ChunkRef, holds_others: bool) -> OpenFile:
        # Who holds chunks open does not wait for room: two such could wait for each other.
        return self._fills.get(chunk, room_wait_s=0.0 if holds_others else ROOM_WAIT_S)

    def _cached(self, chunk: ChunkRef, _holds_others: bool) -> OpenFile:
        file = self._fills.cached(chunk)
        if file is None:
            raise BlockingIOError(errno.EAGAIN, "the chunk is not cached")
        return file

    def _collect(self, wanted: _Wanted, max_bytes: int, *, access: _Access) -> ColdRead:
        """Slices of one chunk after the other, and the offset after them."""
        chunks = wanted.index.table.chunks
        slices: list[FileSlice] = []
        next_offset, left = wanted.offset, max_bytes
        for number in range(wanted.index.table.index_of(next_offset), len(chunks)):
            # The last half of what is wanted is not worth the wait for another chunk.
            if chunks[number].first_offset >= wanted.end_offset or (
                slices and left * 2 < max_bytes
            ):
                break
            try:
                part = self._part(wanted, number, next_offset, max_bytes=left, access=access)
            except TierlogError:
                if not slices:
                    raise
                break
            if part is None or (slices and part.piece.size_bytes > left):
                break
            slices.append(part.piece)
            next_offset, left = part.next_offset, left - part.piece.size_bytes
            if not part.at_chunk_end:
                break
        next_offset = self._after(wanted.index, next_offset, end_offset=wanted.end_offset)
        return ColdRead(tuple(slices), next_offset)

    def _part(
        self, wanted: _Wanted, number: int, offset: int, *, max_bytes: int, access: _Access
    ) -> _Part | None:
        """What one chunk has of it; None where its first batch is not below the end."""
        chunk, ref = wanted.index.table.chunks[number], wanted.index.ref(wanted.segment, number)
        file = access.open(ref, offset > wanted.offset)
        first = self._finder.find(
            ref, file, offset, first_offset=chunk.first_offset, steps=access.steps
        )
        if first is None or first.next_offset > wanted.end_offset:
            return None
        rest = chunk.size_bytes - first.position
        if rest <= max_bytes and chunk.last_offset < wanted.end_offset:
            return _Part(FileSlice(file, first.position, rest), chunk.last_offset + 1, True)
        end, next_offset = self._finder.find_end(
            ref,
            file,
            first,
            max_bytes=max_bytes,
            end_offset=wanted.end_offset,
            steps=access.steps,
        )
        piece = FileSlice(file, first.position, end - first.position)
        return _Part(piece, next_offset, end == chunk.size_bytes)

    @staticmethod
    def _after(index: SegmentIndex, next_offset: int, *, end_offset: int) -> int:
        """Past what compaction removed: where the next batch begins, or the end."""
        number = index.table.index_of(next_offset)
        if number == len(index.table.chunks):
            return end_offset
        first = index.table.chunks[number].first_offset
        return min(max(next_offset, first), end_offset)

    def byte_range(self, segment: ColdSegment, *, start: int, end: int) -> Iterator[FileSlice]:
        """Bytes [start, end) of the log, chunk by chunk as they are asked for, one ahead.

        Raises as `read`, where the chunk that fails is reached.
        """
        index = self._indexes.get(segment)
        chunks = index.table.chunks
        for number, chunk in enumerate(chunks):
            if chunk.end_position <= start or chunk.position >= end:
                continue
            if number + 1 < len(chunks) and chunk.end_position < end:
                self._fills.prefetch(index.ref(segment, number + 1))
            file = self._fills.get(index.ref(segment, number))
            first = max(start - chunk.position, 0)
            last = min(end - chunk.position, chunk.size_bytes)
            yield FileSlice(file, first, last - first)

    def cached_range(
        self, segment: ColdSegment, *, start: int, end: int
    ) -> tuple[FileSlice, ...] | None:
        """As `byte_range`, all at once and without waiting; None where a chunk is not cached, or
        the range takes more than a few.
        """
        index = self._indexes.peek(segment)
        if index is None:
            return None
        wanted = [
            number
            for number, chunk in enumerate(index.table.chunks)
            if chunk.end_position > start and chunk.position < end
        ]
        slices: list[FileSlice] = []
        for number in wanted if len(wanted) <= AT_ONCE_MAX else ():
            file = self._fills.cached(index.ref(segment, number))
            if file is None:
                return None
            chunk = index.table.chunks[number]
            first, last = (
                max(start - chunk.position, 0),
                min(end - chunk.position, chunk.size_bytes),
            )
            slices.append(FileSlice(file, first, last - first))
        return tuple(slices) or None

    # --- ahead ------------------------------------------------------------------------------------

    def _fetch_ahead(self, wanted: _Wanted, following: Iterable[ColdSegment]) -> Ahead:
        """Begin with what the reader will want; what was done.

        The chunk that is wanted now goes first, so that no guess stands before it.
        """
        window, settled = self._read_ahead.before(wanted.segment.folder, wanted.offset)
        number = wanted.index.table.index_of(wanted.offset)
        asked = (wanted.segment.log_key, number, window)
        if not window or settled == asked:
            return Ahead(window, settled)
        end = min(number + 1 + window, len(wanted.index.table.chunks))
        begun = [
            self._fills.prefetch(wanted.index.ref(wanted.segment, guess))
            for guess in range(number, end)
        ]
        beyond = number + 1 + window - end
        if beyond > 0:
            begun.append(self._begin_beyond(following, beyond))
        return Ahead(window, asked if all(begun) else None)

    def _begin_beyond(self, following: Iterable[ColdSegment], chunks: int) -> bool:
        if self._closed or not self._ahead_slots.acquire(blocking=False):
            return False
        self._ahead_pool.submit(self._fetch_beyond, iter(following), chunks)
        return True

    def _fetch_beyond(self, following: Iterator[ColdSegment], chunks: int) -> None:
        """Read ahead into the segments that follow. What fails here is the reader's to meet."""
        try:
            with suppress(TierlogError):
                for segment in islice(following, SEGMENTS_AHEAD):
                    index = self._indexes.get(segment)
                    for number in range(min(chunks, len(index.table.chunks))):
                        self._fills.prefetch(index.ref(segment, number))
                    chunks -= len(index.table.chunks)
                    if chunks <= 0:
                        return
        finally:
            self._ahead_slots.release()

    # --- by time ----------------------------------------------------------------------------------

    def offset_for_timestamp(
        self,
        segment: ColdSegment,
        timestamp: int,
        *,
        start_offset: int = 0,
        end_offset: int = END,
    ) -> tuple[int, int] | None:
        """Offset and timestamp of the first record, by offset, in [start_offset, end_offset) whose
        timestamp is at or above `timestamp`; None where the segment has none.

        Timestamps need not rise. Raises as `read`.
        """
        index = self._indexes.get(segment)
        for number in range(index.table.index_of(start_offset), len(index.table.chunks)):
            chunk = index.table.chunks[number]
            if chunk.first_offset >= end_offset:
                return None
            if not _may_reach(chunk, timestamp):
                continue
            ref = index.ref(segment, number)
            file = self._fills.get(ref)
            for header, body in _batches(file, chunk, segment.log_key):
                found = _first_at(header, body, timestamp, start_offset, segment.log_key)
                if found is not None:
                    return found if found[0] < end_offset else None
        return None

    # --- transactions -----------------------------------------------------------------------------

    def aborted_transactions(
        self, segment: ColdSegment, *, start_offset: int, end_offset: int
    ) -> AbortedTxns:
        """Aborted transactions of the segment's index that overlap [start_offset, end_offset).

        Where the answer is not complete, later segments may name more (their markers come later).
        """
        section = self._indexes.section(segment, SectionKind.TXN_INDEX)
        found: list[AbortedTxn] = []
        for entry in parse_txn_index(
            section, base_offset=segment.base_offset, file=segment.indexes_key
        ):
            if entry.last_offset >= start_offset and entry.first_offset < end_offset:
                found.append(entry)
            if entry.last_stable_offset >= end_offset:
                return AbortedTxns(tuple(found), complete=True)
        return AbortedTxns(tuple(found), complete=False)


def _may_reach(chunk: Chunk, timestamp: int) -> bool:
    if chunk.record_count == 0:
        return False
    return chunk.max_timestamp is None or chunk.max_timestamp >= timestamp


def _batches(file: OpenFile, chunk: Chunk, log_key: str) -> Iterator[tuple[BatchHeader, bytes]]:
    for place in walk_batches(file, 0, chunk.size_bytes, log_key=log_key):
        body = FileSlice(file, place.position, place.size_bytes).read()
        yield parse_header(body), body


def _first_at(
    header: BatchHeader, body: bytes, timestamp: int, start_offset: int, log_key: str
) -> tuple[int, int] | None:
    """The first record of a batch from `start_offset` on that is at or above `timestamp`."""
    if header.max_timestamp < timestamp or header.last_offset < start_offset:
        return None
    try:
        fields = walk_batch(expand(body, header), header, with_columns=True).fields
    except CorruptBatch as error:
        raise CorruptObject(error.detail, file=log_key, offset=header.base_offset) from error
    assert fields is not None
    for delta, given in zip(fields.offset_deltas, fields.timestamps, strict=True):
        stamped = header.max_timestamp if header.timestamp_type else given
        offset = header.base_offset + delta
        if offset >= start_offset and stamped >= timestamp:
            return offset, stamped
    return None
