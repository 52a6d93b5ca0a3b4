"""The valid batches of a `.log` file whose end is not trusted, in order from its start.

* Runs of plain batches come as columns (`header_run`), at most one from the start of each chunk;
  other batches come one by one. Both are verified: complete, checksum, increasing offsets.
* The base offset has no checksum: a batch that leaves a gap is trusted only if the next one
  continues from it. If the next one continues from before the gap, the batch that left the gap is
  corrupt.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from tierlog.hot_tier.batch_walk import (
    CHECK_CHUNK_BYTES,
    CheckedBatch,
    check_in_order,
    checked_in,
    one_large_batch,
)
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.producer_state import REMEMBERED_BATCHES
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.header_run import HeaderRun, header_run
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET


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

    def __init__(self, segment: Segment, log: FileReader, *, limit: int | None) -> None:
        """`limit`: the base offset of the next segment; runs end below it."""
        self._log, self._end = log, segment.end.size_bytes
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
