"""The border: what this process did not write itself is checked before anybody relies on it.

* Recovery checks what a crash may have torn. Other segments that were found on disk are checked
  whole before their first read (`check_before_read`) or upload, never at the start: in a thread, a
  log's segments one at a time. Behind it reads trust: no checksum covers a base offset, and only
  the batches around it show that it is right.
* What does not check splits the segment into its sound parts. Reads stay within one; the offsets
  between them are CorruptBatch until a repair.
* Runs of plain batches come as columns (`header_run`), at most one from the start of each chunk;
  other batches come one by one. Both are verified: complete, checksum, increasing offsets.
* The base offset has no checksum: a batch that leaves a gap is trusted only if the next one
  continues from it. If the next one continues from before the gap, the batch that left the gap is
  corrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from typing import NamedTuple

from tierlog.host.waiting import Wait
from tierlog.hot_tier.batch_walk import (
    CHECK_CHUNK_BYTES,
    CheckedBatch,
    check_in_order,
    checked_in,
    one_large_batch,
)
from tierlog.hot_tier.log_folder import LOG
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import REMEMBERED_BATCHES
from tierlog.hot_tier.salvage import LostRange, pieces_of
from tierlog.hot_tier.segment import Damage, Part, Segment, SegmentEnd
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.batch_runs import HeaderRun, header_run
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch, eio_as
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET


def check_before_read(
    state: LogState, segment: Segment, *, from_offset: int, wait: Wait = Wait.WAIT
) -> Damage | None:
    """What is wrong with a segment, of which [from_offset, …) is about to be read; it is checked
    now if that was not done before. Raises WouldBlock, OSError.
    """
    if from_offset < segment.unchecked_below:
        wait.before("a segment is checked")
        with state.check_lock:
            if from_offset < segment.unchecked_below:
                segment.damage = find_damage(state, segment)
                segment.unchecked_below = segment.base_offset
    return segment.damage


def check_whole(state: LogState, segment: Segment) -> None:
    """Raise CorruptBatch unless all of a segment checks; OSError."""
    damage = check_before_read(state, segment, from_offset=segment.base_offset)
    if damage is not None:
        raise damage.error()


def find_damage(state: LogState, segment: Segment) -> Damage | None:
    """Read a segment from the disk and check it, up to its present end. Raises OSError."""
    end = segment.end
    position, found, has_gap = 0, segment.base_offset, False
    name = segment.name(LOG)
    try:
        with closing(segment.log_reader(state.files)) as log, eio_as(CorruptBatch, file=name):
            batches = BatchesInOrder(segment, log, size_bytes=end.size_bytes, limit=end.next_offset)
            for piece in batches:
                if isinstance(piece, PlacedRun):  # it ends below the limit
                    position, found = piece.end_position, piece.run.next_offset
                    continue
                check_in_order(piece.header, next_offset=found, end_offset=end.next_offset)
                has_gap |= piece.header.base_offset > found
                position, found = piece.header.end_position, piece.header.next_offset
    except CorruptBatch as bad:
        first = bad.with_location(file=name, position=position, offset=found)
        return Damage(first, _sound_parts(state, segment, end))
    return _find_difference(state, segment, end) if has_gap or found < end.next_offset else None


def _find_difference(state: LogState, segment: Segment, end: SegmentEnd) -> Damage | None:
    """In a segment with gaps a base offset may be wrong and yet in order. The bucket's checksum of
    the same bytes tells, but not which batch it is.
    """
    uploaded = (
        None if state.unmirrored else state.uploaded_crc32c(segment.base_offset, end.size_bytes)
    )
    if uploaded is None or crc32c_of_segment(state, segment) == uploaded:
        return None
    detail = "differs from its object in the bucket: a base offset may be wrong"
    bad = CorruptBatch(detail, file=segment.name(LOG), position=0, offset=segment.base_offset)
    return Damage(bad, ())


def crc32c_of_segment(state: LogState, segment: Segment) -> int:
    """CRC-32C of a sealed `.log`; reads all of it the first time. Raises OSError."""
    if segment.crc32c is None:
        value = 0
        with closing(segment.log_reader(state.files)) as log:
            for position in range(0, segment.end.size_bytes, CHECK_CHUNK_BYTES):
                size = min(CHECK_CHUNK_BYTES, segment.end.size_bytes - position)
                value = crc32c_of(log.read(size, position), value)
        segment.crc32c = value
    return segment.crc32c


def _sound_parts(state: LogState, segment: Segment, end: SegmentEnd) -> tuple[Part, ...]:
    parts: list[Part] = []
    start, start_offset = 0, segment.base_offset
    for piece in pieces_of(state, segment, reaches_end=False):
        if isinstance(piece, LostRange):
            if start < piece.position:
                parts.append(
                    Part(start, start_offset, SegmentEnd(piece.position, piece.start_offset))
                )
            start, start_offset = piece.position + piece.size_bytes, piece.end_offset
    if start < end.size_bytes:
        parts.append(Part(start, start_offset, end))
    return tuple(parts)


class PlacedRun(NamedTuple):
    """A run, and the position of its buffer in the file."""

    position: int
    run: HeaderRun

    @property
    def end_position(self) -> int:
        return self.position + self.run.ends[-1]


Piece = PlacedRun | CheckedBatch


class BatchesInOrder:
    """Can be iterated once. Raises CorruptBatch after the last valid batch."""

    def __init__(
        self, segment: Segment, log: FileReader, *, size_bytes: int, limit: int | None
    ) -> None:
        """`limit`: the base offset of the next segment; runs end below it."""
        self._log, self._end = log, size_bytes
        self._next_offset = segment.base_offset
        self._last_offset = segment.base_offset + MAX_RELATIVE_OFFSET
        self._last_of_run = self._last_offset
        if limit is not None:
            self._last_of_run = min(self._last_offset, limit - 1)
        self._held: CheckedBatch | None = None
        self._leaves_gap = False

    def __iter__(self) -> Iterator[Piece]:
        try:
            yield from self._pieces()
        except CorruptBatch:
            if self._held is not None:
                yield self._held
            raise
        if self._held is not None:
            yield self._held

    def _pieces(self) -> Iterator[Piece]:
        position = 0
        while position < self._end:
            chunk = self._log.read(min(CHECK_CHUNK_BYTES, self._end - position), position)
            consumed = 0
            run = header_run(
                chunk,
                base_offset=self._next_offset,
                last_offset=self._last_of_run,
                remember=REMEMBERED_BATCHES,
            )
            if run is not None:
                yield from self._release()
                yield PlacedRun(position, run)
                self._next_offset, consumed = run.next_offset, run.ends[-1]
            for checked in checked_in(chunk, position, start=consumed):
                yield from self._hold(checked)
                consumed = checked.start + checked.header.size_bytes
            if consumed == 0:
                large = one_large_batch(self._log, position, end=self._end)
                yield from self._hold(large)
                consumed = large.header.size_bytes
            position += consumed

    def _hold(self, checked: CheckedBatch) -> Iterator[Piece]:
        self._check_order(checked.header)
        yield from self._release()
        self._held = checked
        self._leaves_gap = checked.header.base_offset > self._next_offset
        self._next_offset = checked.header.next_offset

    def _release(self) -> Iterator[Piece]:
        held, self._held, self._leaves_gap = self._held, None, False
        if held is not None:
            yield held

    def _check_order(self, header: BatchHeader) -> None:
        if header.base_offset < self._next_offset and self._leaves_gap:
            self._held = None
        check_in_order(header, next_offset=self._next_offset, end_offset=self._last_offset + 1)
