"""Reads the cold tier and returns, like the hot tier, slices of local files.

* Every slice of a result is open before it is returned, and belongs to a chunk whose CRC-32C was
  verified.
* A read waits for its first chunk; meanwhile the others that it needs are fetched, from following
  segments too. An error in a later chunk ends the result before it, and is raised by the next read.
* If a chunk turns out to be corrupt while it is read, it is read once more, from the bucket if
  necessary, since its file may have decayed. If the bucket's copy is corrupt, it is CorruptObject.
* Chunks are the unit of skipping: a chunk is skipped if the chunk table's offsets and timestamps
  rule it out. If they are unknown, it is read.
* This module does not know manifests: it is given a segment and those that follow.

Thread-safe; calls may block on the store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing
from functools import partial
from typing import Final, NamedTuple, TypeVar

from tierlog.cold_tier.aborted_transactions import aborted_transactions
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.chunk_fills import SPACE_WAIT_S, ChunkFills, Prefetcher
from tierlog.cold_tier.index_bundle import Chunk, ChunkTable
from tierlog.cold_tier.key_search import Beyond, FiltersAhead, KeySearch
from tierlog.cold_tier.ranged_reader import ChunkRef, RangedReader
from tierlog.cold_tier.segment_lookup import BatchFinder, SegmentIndex, SegmentIndexes, walk_batches
from tierlog.host.file_slice import FileSlice, OpenFile, TierRead, close_all, pread_exactly
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import BatchHeader, parse_header
from tierlog.record_format.decode import first_at_time
from tierlog.record_format.errors import CorruptBatch, CorruptDataError, CorruptObject, TierlogError
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.segment_entry import SegmentEntry

T = TypeVar("T")

MAX_OFFSET: Final = 2**63 - 1
REQUEST_BYTES: Final = 1024 * 1024  # memory of a GET in flight: a piece, and the buffers below it
SLICES_MAX: Final = 16  # open files of one result, however small the segments are
OPEN_AT_ONCE_MAX: Final = 4  # chunks of a byte range


class ColdLimits(NamedTuple):
    """At most `requests_max` GETs are in flight, within `memory_max_bytes`; the same amount of
    memory again is allowed for chunks that the disk has no space for.
    """

    requests_max: int = 32
    memory_max_bytes: int = 128 * 1024 * 1024

    @property
    def fills(self) -> int:
        return max(2, min(self.requests_max, self.memory_max_bytes // REQUEST_BYTES))


class _Result:
    """The slices that a read has collected so far."""

    __slots__ = ("end_offset", "max_bytes", "next_offset", "remaining_bytes", "slices", "wait")

    def __init__(self, offset: int, max_bytes: int, end_offset: int, wait: Wait) -> None:
        self.end_offset, self.wait = end_offset, wait
        self.slices: list[FileSlice] = []
        self.next_offset, self.max_bytes, self.remaining_bytes = offset, max_bytes, max_bytes

    @property
    def is_full(self) -> bool:
        """Whether to stop. Once more than half of `max_bytes` is there, the rest is not worth
        waiting for another chunk.
        """
        enough = bool(self.slices) and self.remaining_bytes * 2 < self.max_bytes
        return enough or len(self.slices) >= SLICES_MAX

    def continues_after(self, segment: SegmentEntry) -> bool:
        return not self.is_full and segment.last_offset < self.next_offset < self.end_offset

    def maybe_add(self, piece: FileSlice, next_offset: int) -> bool:
        """Add a slice if it fits; otherwise close it. The first one always does."""
        if self.slices and piece.size_bytes > self.remaining_bytes:
            piece.close()
            return False
        self.slices.append(piece)
        self.next_offset = next_offset
        self.remaining_bytes -= piece.size_bytes
        return True

    def to_read(self) -> TierRead:
        return TierRead(tuple(self.slices), self.next_offset)


class ColdReader:
    def __init__(
        self,
        store: ObjectStore,
        cache: ChunkCache,
        *,
        limits: ColdLimits = ColdLimits(),  # noqa: B008  immutable
        reader: RangedReader | None = None,
    ) -> None:
        self._indexes = SegmentIndexes(store)
        self._reader = reader or RangedReader(store, requests_max=limits.fills)
        self._fills = ChunkFills(
            cache,
            self._reader,
            fills_max=limits.fills,
            memory_max_bytes=limits.memory_max_bytes,
        )
        self._finder = BatchFinder()
        self._prefetcher = Prefetcher(self._fills, self._indexes)
        self._filters_ahead = FiltersAhead(self._indexes)

    def close(self) -> None:
        self._filters_ahead.close()
        self._prefetcher.close()
        self._fills.close()
        self._reader.close()

    # --- by offset --------------------------------------------------------------------------------

    def read_segments(
        self,
        segment: SegmentEntry,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int = MAX_OFFSET,
        following: Iterable[SegmentEntry] = (),
        wait: Wait = Wait.WAIT,
    ) -> TierRead:
        """Batches starting with the one that holds `offset`, continuing into `following` segments.

        Returns at least one batch, whatever `max_bytes`, unless none is left below `end_offset`.
        `following` is iterated more than once, and may raise WouldBlock. Raises CorruptObject,
        MissingObject, StoreUnavailable, Throttled, DiskFull, and WouldBlock if that would have to
        wait for the store or the disk.
        """
        index = self._indexes.load_index(segment, wait)
        prefetch = partial(
            self._prefetcher.begin_read,
            segment,
            index,
            offset,
            max_bytes=max_bytes,
            end_offset=end_offset,
            following=following,
        )
        ahead = prefetch() if wait is Wait.WAIT else None
        result = _Result(offset, max_bytes, end_offset, wait)
        try:
            self._collect(result, segment, index, following)
            # A read that did not wait sends no request unless it found something.
            self._prefetcher.end_read(segment, result.next_offset, ahead or prefetch())
        except BaseException:
            close_all(result.slices)
            raise
        return result.to_read()

    def _collect(
        self,
        result: _Result,
        segment: SegmentEntry,
        index: SegmentIndex,
        following: Iterable[SegmentEntry],
    ) -> None:
        """Collect slices, segment by segment, until there are enough. An error after the first
        slice is left to the next read.
        """
        if segment.base_offset >= result.end_offset:
            return
        try:
            self._collect_from(segment, index, result)
            if not result.continues_after(segment):
                return
            for another in following:
                if another.base_offset >= result.end_offset:
                    return
                self._collect_from(another, self._indexes.load_index(another, result.wait), result)
                if not result.continues_after(another):
                    return
        except TierlogError:
            if not result.slices:
                raise

    def _collect_from(self, segment: SegmentEntry, index: SegmentIndex, result: _Result) -> None:
        """Collect slices of one segment, chunk by chunk, and advance `next_offset`."""
        end_offset = min(result.end_offset, segment.last_offset + 1)
        result.next_offset = max(result.next_offset, segment.base_offset)
        chunks = index.table.chunks
        for number in range(index.table.index_of(result.next_offset), len(chunks)):
            if chunks[number].first_offset >= end_offset or result.is_full:
                break
            if not self._collect_chunk(index, number, result, end_offset=end_offset):
                break
        result.next_offset = _skip_gap(index.table, result.next_offset, end_offset=end_offset)

    def _collect_chunk(
        self,
        index: SegmentIndex,
        number: int,
        result: _Result,
        *,
        end_offset: int,
    ) -> bool:
        """Collect a slice of one chunk. Whether it extends to the chunk's end."""
        chunk, ref = index.table.chunks[number], index.chunks[number]

        def find(file: OpenFile) -> tuple[FileSlice, int] | None:
            walk = self._finder.walk_chunk(ref, file, result.wait)
            first = walk.find_batch(result.next_offset)
            if first is None or first.next_offset > end_offset:
                return None
            end, next_offset = chunk.size_bytes, chunk.last_offset + 1
            if end - first.position > result.remaining_bytes or next_offset > end_offset:
                end, next_offset = walk.find_end(
                    first, max_bytes=result.remaining_bytes, end_offset=end_offset
                )
            return FileSlice(file.share(), first.position, end - first.position), next_offset

        # A read that holds chunks open must not wait for space: two of them could deadlock.
        space_wait_s = 0.0 if result.slices else SPACE_WAIT_S
        open_ = partial(self._fills.open_chunk, ref, space_wait_s=space_wait_s, wait=result.wait)
        found = self._retry_if_corrupt(ref, open_, find)
        if found is None:
            return False
        piece, next_offset = found
        return result.maybe_add(piece, next_offset) and (
            piece.position + piece.size_bytes == chunk.size_bytes
        )

    def _retry_if_corrupt(
        self, ref: ChunkRef, open_: Callable[[], OpenFile], look: Callable[[OpenFile], T]
    ) -> T:
        """Call `look` with the chunk's file, and once more with a verified one if it is corrupt."""
        with closing(open_()) as file:
            try:
                return look(file)
            except WouldBlock:
                raise
            except (CorruptDataError, OSError):
                self._finder.forget(ref)
                file.report_corrupt()
        with closing(open_()) as file:
            return look(file)

    def byte_range(
        self, segment: SegmentEntry, *, start: int, end: int, wait: Wait = Wait.WAIT
    ) -> Iterator[FileSlice]:
        """Bytes [start, end) of the log, chunk by chunk on demand, with one chunk of read-ahead.
        The caller closes each slice.

        Raises what `read` does, when the failing chunk is reached. Who never waits has all slices
        open at once: WouldBlock for more than `OPEN_AT_ONCE_MAX`.
        """
        index = self._indexes.load_index(segment, wait)
        numbers = index.table.numbers_of(start, end)
        if len(numbers) > OPEN_AT_ONCE_MAX:
            wait.before("many chunks are sent")
        for number in numbers:
            if number + 1 in numbers and wait is Wait.WAIT:
                self._fills.prefetch(index.chunks[number + 1])
            file = self._fills.open_chunk(index.chunks[number], wait=wait)
            yield _overlap(index.table.chunks[number], file, start=start, end=end)

    # --- by key -----------------------------------------------------------------------------------

    def find_chunk_with_key(
        self,
        segment: SegmentEntry,
        offset: int,
        search: KeySearch,
        *,
        end_offset: int = MAX_OFFSET,
        beyond: Beyond,
    ) -> tuple[int, int]:
        """What of the first chunk that ends at or after `offset`, begins below `end_offset`, and
        may have the key: [from, below), which ends where a batch ends. Empty, where the segment
        ends, or at `end_offset`, if none may. Raises as `read_segments` does.
        """
        search.load_ahead(segment, beyond, self._filters_ahead.begin_load)
        filters = self._indexes.load_key_filters(segment)
        index = self._indexes.load_index(segment)
        for number in range(index.table.index_of(offset), len(index.chunks)):
            chunk = index.table.chunks[number]
            if chunk.first_offset >= end_offset:
                break
            if filters is None or filters.may_hold(number, search.key_hash):
                search.note_found(segment)
                return max(offset, chunk.first_offset), chunk.last_offset + 1
        search.note_lacking(segment)
        end = max(offset, min(end_offset, segment.next_offset))
        return end, end

    # --- by time ----------------------------------------------------------------------------------

    def offset_for_timestamp(
        self,
        segment: SegmentEntry,
        timestamp: int,
        *,
        start_offset: int = 0,
        end_offset: int = MAX_OFFSET,
    ) -> tuple[int, int] | None:
        """Offset and timestamp of the first record, by offset, in [start_offset, end_offset) whose
        timestamp is at or above `timestamp`; None if the segment has none.

        Timestamps need not be in order. Raises what `read` does.
        """
        index = self._indexes.load_index(segment)
        for number in range(index.table.index_of(start_offset), len(index.table.chunks)):
            chunk = index.table.chunks[number]
            if chunk.first_offset >= end_offset:
                return None
            if not _may_contain(chunk, timestamp):
                continue
            ref = index.chunks[number]
            look = partial(
                _first_at_time,
                chunk=chunk,
                timestamp=timestamp,
                start_offset=start_offset,
                log_key=segment.log_key,
            )
            found = self._retry_if_corrupt(ref, partial(self._fills.open_chunk, ref), look)
            if found is not None:
                return found if found[0] < end_offset else None
        return None

    # --- transactions -----------------------------------------------------------------------------

    def aborted_transactions(
        self, segments: Iterable[SegmentEntry], *, start_offset: int, end_offset: int
    ) -> list[AbortedTxn]:
        """The aborted transactions with records in [start_offset, end_offset). `segments` starts
        with the one that holds `start_offset`; it is read as far as an entry may lie.
        """
        return aborted_transactions(
            map(self._indexes.transactions, segments),
            start_offset=start_offset,
            end_offset=end_offset,
        )

    def first_open_offset(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> int | None:
        """Where the oldest transaction began that is open at the end of the segment: that end if
        none is; None if it is not known. Raises as `read_segments` does.
        """
        producers = self._indexes.find_producers(segment, wait)
        if producers is None:
            return None
        return min(producers.open_transactions.values(), default=segment.next_offset)


def _skip_gap(table: ChunkTable, next_offset: int, *, end_offset: int) -> int:
    """Skip offsets that compaction removed: where the next batch begins, or `end_offset`."""
    number = table.index_of(next_offset)
    if number == len(table.chunks):
        return end_offset
    return min(max(next_offset, table.chunks[number].first_offset), end_offset)


def _overlap(chunk: Chunk, file: OpenFile, *, start: int, end: int) -> FileSlice:
    """The part of a chunk that lies in bytes [start, end) of its log."""
    first = max(start - chunk.position, 0)
    last = min(end - chunk.position, chunk.size_bytes)
    return FileSlice(file, first, last - first)


def _may_contain(chunk: Chunk, timestamp: int) -> bool:
    if chunk.record_count == 0:
        return False
    return chunk.max_timestamp is None or chunk.max_timestamp >= timestamp


def _first_at_time(
    file: OpenFile, *, chunk: Chunk, timestamp: int, start_offset: int, log_key: str
) -> tuple[int, int] | None:
    for header, body in _batches(file, chunk, log_key):
        try:
            found = first_at_time(body, header, timestamp=timestamp, start_offset=start_offset)
        except CorruptBatch as error:
            raise CorruptObject(error.detail, file=log_key, offset=header.base_offset) from error
        if found is not None:
            return found
    return None


def _batches(file: OpenFile, chunk: Chunk, log_key: str) -> Iterator[tuple[BatchHeader, bytes]]:
    for place in walk_batches(file, 0, chunk.size_bytes, log_key=log_key):
        body = pread_exactly(file, place.size_bytes, place.position)
        yield parse_header(body), body
