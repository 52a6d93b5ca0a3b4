"""Reads of the cold tier, answered like those of the hot one: with slices of local files.

* Every slice of an answer is open before the answer is given, and belongs to a chunk whose CRC-32C
  was right.
* A read waits for its first chunk; what else it wants is fetched meanwhile, from following segments
  too. An error in a later chunk ends the answer before it, and is reported to the next read.
* A chunk that proves bad while it is read is tried once more, from the bucket if need be: its file
  may have rotted since it came. If the bucket has it like that, it is CorruptObject.
* Chunks are the unit of skipping: what their table says about offsets and times is enough to skip
  one, and one that it does not know about is read.
* An answer without waiting is the same as one that waited: there is one path, which opens and walks
  chunks through two kinds of `_Access`.
* This file does not know manifests: it is given a segment, and those that follow.

Thread-safe; every call may block on the store.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, NamedTuple, TypeVar

from cold_tier.batch_finder import (
    AS_FAR_AS_NEEDED,
    WITHOUT_WAITING,
    BatchFinder,
    Steps,
    walk_batches,
)
from cold_tier.chunk_cache import ChunkCache
from cold_tier.chunk_fills import SPACE_WAIT_S, ChunkFills
from cold_tier.chunk_table import Chunk, ChunkTable
from cold_tier.object_store import ObjectStore
from cold_tier.open_transactions import aborted_transactions
from cold_tier.prefetch import Prefetcher
from cold_tier.ranged_reader import ChunkRef, RangedReader
from cold_tier.read_ahead import ReadAhead
from cold_tier.segment_indexes import ColdSegment, SegmentIndex, SegmentIndexes
from record_format.batch import BatchHeader, parse_header
from record_format.decode import first_at_time
from record_format.errors import CorruptBatch, CorruptDataError, CorruptObject, TierlogError
from record_format.file_slice import FileSlice, OpenFile, TierRead
from record_format.index_layouts import AbortedTxn

T = TypeVar("T")

END: Final = 2**63 - 1
REQUEST_BYTES: Final = 1024 * 1024  # what a GET in flight takes: a piece, and buffers below it
SLICES_MAX: Final = 16  # open files of one answer, however small segments are
AT_ONCE_MAX: Final = 4  # chunks that one answer holds open from its start


class ColdLimits(NamedTuple):
    """`requests_max` GETs in flight, within `memory_max_bytes`, whatever clients do; as much again
    for chunks that the disk has no room for.
    """

    requests_max: int = 32
    memory_max_bytes: int = 128 * 1024 * 1024

    @property
    def fills(self) -> int:
        return max(2, min(self.requests_max, self.memory_max_bytes // REQUEST_BYTES))


class _Access(NamedTuple):
    """How a read gets at bytes: `open` takes a chunk and whether others are held open already."""

    index_of: Callable[[ColdSegment], SegmentIndex]
    open: Callable[[ChunkRef, bool], OpenFile]
    steps: Steps


class _Answer:
    """What a read has come to so far."""

    __slots__ = ("end_offset", "left", "max_bytes", "next_offset", "slices")

    def __init__(self, offset: int, max_bytes: int, end_offset: int) -> None:
        self.end_offset = end_offset
        self.slices: list[FileSlice] = []
        self.next_offset, self.max_bytes, self.left = offset, max_bytes, max_bytes

    @property
    def is_full(self) -> bool:
        """Whether to stop: the last half of what is wanted is not worth waiting for another
        chunk.
        """
        enough = bool(self.slices) and self.left * 2 < self.max_bytes
        return enough or len(self.slices) >= SLICES_MAX

    def goes_on_after(self, segment: ColdSegment) -> bool:
        return not self.is_full and segment.last_offset < self.next_offset < self.end_offset

    def take(self, piece: FileSlice, next_offset: int) -> bool:
        """Whether there was room for it; for the first piece there always is."""
        if self.slices and piece.size_bytes > self.left:
            return False
        self.slices.append(piece)
        self.next_offset = next_offset
        self.left -= piece.size_bytes
        return True


class ColdReader:
    def __init__(
        self,
        store: ObjectStore,
        cache: ChunkCache,
        *,
        limits: ColdLimits = ColdLimits(),  # noqa: B008  immutable
        reader: RangedReader | None = None,
        indexes: SegmentIndexes | None = None,
    ) -> None:
        self._indexes = indexes or SegmentIndexes(store)
        self._reader = reader or RangedReader(store, requests_max=limits.fills)
        self._fills = ChunkFills(
            cache,
            self._reader,
            fills_max=limits.fills,
            memory_max_bytes=limits.memory_max_bytes,
        )
        self._finder = BatchFinder()
        self._prefetcher = Prefetcher(self._fills, self._indexes, ReadAhead())
        self._waiting = _Access(self._indexes.get, self._fetched, AS_FAR_AS_NEEDED)
        self._at_once = _Access(self._index_at_hand, self._cached, WITHOUT_WAITING)

    def close(self) -> None:
        self._prefetcher.close()
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
    ) -> TierRead:
        """Batches from the one that holds `offset` on, also out of the segments `following`.

        At least one batch, whatever `max_bytes`, unless none below `end_offset` is left.
        `following` is gone through more than once. Raises CorruptObject, MissingObject,
        StoreUnavailable, Throttled, DiskFull.
        """
        index = self._indexes.get(segment)
        ahead = self._prefetcher.begin(
            segment, index, offset, max_bytes=max_bytes, following=following
        )
        answer = _Answer(offset, max_bytes, end_offset)
        self._collect(answer, segment, index, following, access=self._waiting)
        self._prefetcher.ended(segment, answer.next_offset, done=ahead)
        return TierRead(tuple(answer.slices), answer.next_offset)

    def try_read(
        self,
        segment: ColdSegment,
        offset: int,
        *,
        max_bytes: int,
        end_offset: int = END,
        following: Iterable[ColdSegment] = (),
    ) -> TierRead | None:
        """As `read`, if nothing has to come from the store or the disk; None if something has.

        `following` may raise BlockingIOError if it would have to ask.
        """
        index = self._indexes.peek(segment)
        if index is None:
            return None
        answer = _Answer(offset, max_bytes, end_offset)
        try:
            self._collect(answer, segment, index, following, access=self._at_once)
        except BlockingIOError:
            return None
        ahead = self._prefetcher.begin(
            segment, index, offset, max_bytes=max_bytes, following=following
        )
        self._prefetcher.ended(segment, answer.next_offset, done=ahead)
        return TierRead(tuple(answer.slices), answer.next_offset)

    def _index_at_hand(self, segment: ColdSegment) -> SegmentIndex:
        index = self._indexes.peek(segment)
        if index is None:
            raise BlockingIOError(errno.EAGAIN, "the chunk table is not in memory")
        return index

    def _fetched(self, chunk: ChunkRef, holds_others: bool) -> OpenFile:
        # Who holds chunks open does not wait for room: two such could wait for each other.
        return self._fills.get(chunk, space_wait_s=0.0 if holds_others else SPACE_WAIT_S)

    def _cached(self, chunk: ChunkRef, _holds_others: bool) -> OpenFile:
        file = self._fills.cached(chunk)
        if file is None:
            raise BlockingIOError(errno.EAGAIN, "the chunk is not cached")
        return file

    def _collect(
        self,
        answer: _Answer,
        segment: ColdSegment,
        index: SegmentIndex,
        following: Iterable[ColdSegment],
        *,
        access: _Access,
    ) -> None:
        """Slices of one segment after the other, until there are enough. An error where there are
        some already is the next read's.
        """
        if segment.base_offset >= answer.end_offset:
            return
        try:
            self._collect_from(segment, index, answer, access)
            if not answer.goes_on_after(segment):
                return
            for another in following:
                if another.base_offset >= answer.end_offset:
                    return
                self._collect_from(another, access.index_of(another), answer, access)
                if not answer.goes_on_after(another):
                    return
        except TierlogError:
            if not answer.slices:
                raise

    def _collect_from(
        self, segment: ColdSegment, index: SegmentIndex, answer: _Answer, access: _Access
    ) -> None:
        """Slices of one chunk after the other, and the offset after them."""
        end_offset = min(answer.end_offset, segment.last_offset + 1)
        answer.next_offset = max(answer.next_offset, segment.base_offset)
        chunks = index.table.chunks
        for number in range(index.table.index_of(answer.next_offset), len(chunks)):
            if chunks[number].first_offset >= end_offset or answer.is_full:
                break
            if not self._take(index, number, answer, end_offset=end_offset, access=access):
                break
        answer.next_offset = _skip_gap(index.table, answer.next_offset, end_offset=end_offset)

    def _take(
        self,
        index: SegmentIndex,
        number: int,
        answer: _Answer,
        *,
        end_offset: int,
        access: _Access,
    ) -> bool:
        """Take what one chunk has; whether that goes to the chunk's end."""
        chunk, ref = index.table.chunks[number], index.chunks[number]

        def find(file: OpenFile) -> tuple[FileSlice, int] | None:
            walk = self._finder.of(ref, file, steps=access.steps)
            first = walk.find(answer.next_offset)
            if first is None or first.next_offset > end_offset:
                return None
            end, next_offset = chunk.size_bytes, chunk.last_offset + 1
            if end - first.position > answer.left or next_offset > end_offset:
                end, next_offset = walk.find_end(
                    first, max_bytes=answer.left, end_offset=end_offset
                )
            return FileSlice(file, first.position, end - first.position), next_offset

        found = self._look_into(ref, partial(access.open, ref, bool(answer.slices)), find)
        if found is None:
            return False
        piece, next_offset = found
        return answer.take(piece, next_offset) and (
            piece.position + piece.size_bytes == chunk.size_bytes
        )

    def _look_into(
        self, ref: ChunkRef, open_: Callable[[], OpenFile], look: Callable[[OpenFile], T]
    ) -> T:
        """Once more where the file proves bad. Raises as `look` where that is as it came."""
        file = open_()
        try:
            return look(file)
        except BlockingIOError:
            raise
        except (CorruptDataError, OSError):
            self._finder.forget(ref)
            file.report_corrupt()
        del file  # its room is another's
        return look(open_())

    def byte_range(self, segment: ColdSegment, *, start: int, end: int) -> Iterator[FileSlice]:
        """Bytes [start, end) of the log, chunk by chunk as they are asked for, one ahead.

        Raises as `read` does, when the failing chunk is reached.
        """
        index = self._indexes.get(segment)
        numbers = index.table.numbers_of(start, end)
        for number in numbers:
            if number + 1 in numbers:
                self._fills.prefetch(index.chunks[number + 1])
            file = self._fills.get(index.chunks[number])
            yield _part_of(index.table.chunks[number], file, start=start, end=end)
            del file  # its room is another's, while the next is waited for

    def cached_range(
        self, segment: ColdSegment, *, start: int, end: int
    ) -> tuple[FileSlice, ...] | None:
        """As `byte_range`, all at once and without waiting; None if a chunk is not cached, or
        the range takes more than a few.
        """
        index = self._indexes.peek(segment)
        if index is None:
            return None
        numbers = index.table.numbers_of(start, end)
        if len(numbers) > AT_ONCE_MAX:
            return None
        slices: list[FileSlice] = []
        for number in numbers:
            file = self._fills.cached(index.chunks[number])
            if file is None:
                return None
            slices.append(_part_of(index.table.chunks[number], file, start=start, end=end))
        return tuple(slices) or None

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
        timestamp is at or above `timestamp`; None if the segment has none.

        Timestamps need not rise. Raises as `read`.
        """
        index = self._indexes.get(segment)
        for number in range(index.table.index_of(start_offset), len(index.table.chunks)):
            chunk = index.table.chunks[number]
            if chunk.first_offset >= end_offset:
                return None
            if not _may_reach(chunk, timestamp):
                continue
            ref = index.chunks[number]
            look = partial(
                _first_in,
                chunk=chunk,
                timestamp=timestamp,
                start_offset=start_offset,
                log_key=segment.log_key,
            )
            found = self._look_into(ref, partial(self._fills.get, ref), look)
            if found is not None:
                return found if found[0] < end_offset else None
        return None

    # --- transactions -----------------------------------------------------------------------------

    def aborted_transactions(
        self, segments: Iterable[ColdSegment], *, start_offset: int, end_offset: int
    ) -> list[AbortedTxn]:
        """Those with records in [start_offset, end_offset), by the indexes of `segments`, which
        begin with the one that holds `start_offset`; as many as can name one are looked at.
        """
        return aborted_transactions(
            map(self._indexes.transactions, segments),
            start_offset=start_offset,
            end_offset=end_offset,
        )


def _skip_gap(table: ChunkTable, next_offset: int, *, end_offset: int) -> int:
    """Past what compaction removed: where the next batch begins, or the end."""
    number = table.index_of(next_offset)
    if number == len(table.chunks):
        return end_offset
    return min(max(next_offset, table.chunks[number].first_offset), end_offset)


def _part_of(chunk: Chunk, file: OpenFile, *, start: int, end: int) -> FileSlice:
    """What a chunk has of bytes [start, end) of its log."""
    first = max(start - chunk.position, 0)
    last = min(end - chunk.position, chunk.size_bytes)
    return FileSlice(file, first, last - first)


def _may_reach(chunk: Chunk, timestamp: int) -> bool:
    if chunk.record_count == 0:
        return False
    return chunk.max_timestamp is None or chunk.max_timestamp >= timestamp


def _first_in(
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
        body = FileSlice(file, place.position, place.size_bytes).read()
        yield parse_header(body), body
