"""What is still valid in a corrupt sealed segment, and the segment without the rest.

* A batch counts if its checksum is valid and its offsets are possible: above the batch before it,
  below the next segment. The base offset has no checksum: of two batches that contradict each
  other, the one counts from which the next batch continues.
* After a corrupt batch, the next is where its length says. If none is there, the bytes are searched
  for a valid one that is followed by another or by the end of the file: a batch may also be the
  value of a record in another.
* Lost batches are replaced by an empty batch that spans their offsets, as compaction leaves them:
  no offset is assigned again, and readers skip it. The offsets of a lost file are treated alike, at
  the end of the segment before it.
* What the disk cannot read counts as corrupt.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, suppress
from typing import NamedTuple

from tierlog.hot_tier.batch_walk import CheckedBatch, LogBytes, checked_batches, one_large_batch
from tierlog.hot_tier.derived_files import read_entries
from tierlog.hot_tier.log_folder import LOG
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.open_files import FileReader, zero_filling_pread
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import Segment
from tierlog.hot_tier.segment_swap import CleanedSegment, new_cleaned_segment, swap
from tierlog.hot_tier.torn_tail import batch_places
from tierlog.record_format.batch import HEADER_SIZE, parse_header
from tierlog.record_format.compaction import Compacted, empty_batch
from tierlog.record_format.errors import CorruptBatch, UnknownSegment


class LostRange(NamedTuple):
    """Offsets [start_offset, end_offset), lost with `size_bytes` corrupt bytes at `position`. The
    range is empty if the bytes had no offsets of their own.
    """

    start_offset: int
    end_offset: int
    position: int
    size_bytes: int

    @property
    def spans_offsets(self) -> bool:
        return self.start_offset < self.end_offset


class SalvageScan:
    """One pass over a sealed segment of `size_bytes` with offsets [start_offset, end_offset).
    Raises OSError.
    """

    def __init__(
        self,
        log: LogBytes,
        *,
        size_bytes: int,
        start_offset: int,
        end_offset: int,
        reaches_end: bool,
    ) -> None:
        self._log, self._end_position = log, size_bytes
        self._start, self._limit = start_offset, end_offset
        self._reaches_end = reaches_end

    def __iter__(self) -> Iterator[CheckedBatch | LostRange]:
        """The batches that count, and the lost ranges between them, in order."""
        position, low = 0, self._start
        for batch in self._ordered():
            header = batch.header
            if header.position > position:
                yield LostRange(low, header.base_offset, position, header.position - position)
            yield batch
            position, low = header.end_position, header.next_offset
        if position < self._end_position or (self._reaches_end and low < self._limit):
            yield LostRange(low, self._limit, position, self._end_position - position)

    def _ordered(self) -> Iterator[CheckedBatch]:
        """The batches in range whose offsets increase."""
        held: CheckedBatch | None = None
        low = self._start
        batches = self._in_range()
        following = next(batches, None)
        while (batch := following) is not None:
            following = next(batches, None)
            first = batch.header.base_offset
            if held is not None and first >= held.header.next_offset:
                yield held
                low, held = held.header.next_offset, batch
            elif first >= low and (
                held is None or _is_confirmed(batch, following, instead_of=held)
            ):
                held = batch
        if held is not None:
            yield held

    def _in_range(self) -> Iterator[CheckedBatch]:
        position = 0
        while position < self._end_position:
            try:
                for batch in checked_batches(self._log, start=position, end=self._end_position):
                    position = batch.header.end_position
                    if self._is_in_range(batch):
                        yield batch
            except CorruptBatch:
                position = self._next_batch_after(position)

    def _is_in_range(self, batch: CheckedBatch) -> bool:
        return self._start <= batch.header.base_offset and batch.header.last_offset < self._limit

    def _next_batch_after(self, position: int) -> int:
        """Where the next batch begins after corrupt bytes at `position`; the end if there is
        none.
        """
        with suppress(CorruptBatch):
            size = min(HEADER_SIZE, self._end_position - position)
            end = parse_header(self._log.read(size, position), at=position).end_position
            if end == self._end_position or self._batch_at(end) is not None:
                return end
        first, last = self._start, self._limit - 1
        places = batch_places(
            self._log, position + 1, end=self._end_position, first=first, last=last
        )
        for found in places:
            batch = self._batch_at(found)
            if batch is not None and self._is_followed(batch):
                return found
        return self._end_position

    def _is_followed(self, batch: CheckedBatch) -> bool:
        end = batch.header.end_position
        return end == self._end_position or self._batch_at(end) is not None

    def _batch_at(self, position: int) -> CheckedBatch | None:
        """The batch there, if it is valid."""
        with suppress(CorruptBatch):
            batch = one_large_batch(self._log, position, end=self._end_position)
            return batch if self._is_in_range(batch) else None
        return None


def pieces_of(
    state: LogState, segment: Segment, *, reaches_end: bool
) -> Iterator[CheckedBatch | LostRange]:
    """As `SalvageScan`, of a segment up to its present end. Raises OSError."""
    files, end = state.files, segment.end
    file = files.open(segment.name(LOG))
    with closing(FileReader(file, zero_filling_pread(files.pread))) as log:
        yield from SalvageScan(
            log,
            size_bytes=end.size_bytes,
            start_offset=segment.base_offset,
            end_offset=end.next_offset,
            reaches_end=reaches_end,
        )


def fill_lost_ranges(
    pieces: Iterable[CheckedBatch | LostRange], *, epoch_of: Callable[[int], int | None]
) -> Iterator[Compacted]:
    """The batches that count, and an empty batch for each range of lost offsets."""
    for piece in pieces:
        if isinstance(piece, CheckedBatch):
            header = piece.header_in_chunk()
            body = memoryview(piece.chunk)[header.position : header.end_position]
            yield Compacted(header, body)
        elif piece.spans_offsets:
            epoch = epoch_of(piece.start_offset) or 0
            yield empty_batch(piece.start_offset, piece.end_offset, leader_epoch=epoch)


def _is_confirmed(
    batch: CheckedBatch, following: CheckedBatch | None, *, instead_of: CheckedBatch
) -> bool:
    """Whether the batch after it shows that this one is right and the held one is not."""
    if following is None:
        return False
    first = following.header.base_offset
    end = batch.header.next_offset
    return first == end or end <= first < instead_of.header.next_offset


class Salvage:
    """One sealed segment. `reaches_end`: offsets missing up to the next segment are lost too."""

    def __init__(
        self, state: LogState, reaper: Reaper, segment: Segment, *, reaches_end: bool
    ) -> None:
        self._state, self._reaper, self._segment = state, reaper, segment
        self._reaches_end = reaches_end

    def lost_ranges(self) -> list[LostRange]:
        """What is corrupt; empty if nothing is. Raises OSError."""
        pieces = pieces_of(self._state, self._segment, reaches_end=self._reaches_end)
        return [piece for piece in pieces if isinstance(piece, LostRange)]

    def rewrite(self) -> None:
        """Replace the segment by one without the lost batches. The caller makes sure that nobody
        reads its files by path meanwhile.

        Raises UnknownSegment if it was deleted meanwhile, Throttled (a compaction is in progress),
        CorruptIndex, DiskFull, LogOfflineError.
        """
        state, segment = self._state, self._segment
        try:
            with new_cleaned_segment(state, segment.base_offset) as cleaned:
                modified_ns = segment.path(LOG).stat().st_mtime_ns
                aborted, end_offset = read_entries(segment), segment.end.next_offset
                self._write(cleaned)
                cleaned.finish(next_offset=end_offset, aborted=aborted, modified_ns=modified_ns)
                if not swap(state, self._reaper, (segment,), cleaned, bucket_follows=False):
                    raise FileNotFoundError
        except FileNotFoundError as error:
            raise UnknownSegment(
                f"{state.name}: segment {segment.base_offset} was deleted"
            ) from error
        except OSError as error:
            raise disk_error(state, error) from error

    def _write(self, cleaned: CleanedSegment) -> None:
        pieces = pieces_of(self._state, self._segment, reaches_end=self._reaches_end)
        for batch in fill_lost_ranges(pieces, epoch_of=self._state.epochs.epoch_of):
            cleaned.add_batch(*batch)
