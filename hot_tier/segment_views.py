"""What others may know of the segments of a log: facts, checksums, and the files of a sealed one.

Facts that were not counted while appending (a segment found on disk) are counted when asked for, by
reading the segment; they are then kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple

from crc32c import crc32c

from hot_tier.file_names import (
    LOG,
    OFFSET_INDEX,
    TIME_INDEX,
    TRANSACTION_INDEX,
)
from hot_tier.index_rebuild import rebuild_indexes
from hot_tier.log_reader import largest_timestamp
from hot_tier.log_state import LogState
from hot_tier.producer_snapshots import mend_snapshot
from hot_tier.record_times import least_timestamp
from hot_tier.segment import Segment
from record_format.errors import CorruptIndex, UnknownSegment
from record_format.file_slice import OpenFile

READ_BYTES: Final = 1 << 20


class SegmentView(NamedTuple):
    """One local segment. None: not known without reading it (`segment_facts`, `segment_crc32c`)."""

    base_offset: int
    last_offset: int  # base - 1 where it is empty
    size_bytes: int
    record_count: int | None
    min_timestamp: int | None
    max_timestamp: int
    active: bool
    sealed: bool  # and flushed whole: it will never change
    path: Path
    crc32c: int | None


class OpenedSegment(NamedTuple):
    """A sealed segment's bytes: `crc32c` is of all `size_bytes` of `file`."""

    size_bytes: int
    crc32c: int
    file: OpenFile


class SegmentFacts(NamedTuple):
    """`min_timestamp` is over the records; None for an empty segment."""

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The files of a sealed segment, and what an upload says of them.

    `snapshot` is the producers' state at the end of the segment: the file of the next base offset.
    """

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int | None  # None: not known without reading it
    min_timestamp: int | None
    max_timestamp: int
    leader_epoch: int
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path | None
    snapshot: Path


class SegmentViews:
    def __init__(self, state: LogState) -> None:
        self._state = state

    def all(self) -> list[SegmentView]:
        state = self._state
        flushed = state.flushed.offset
        items = state.segments.items
        views = [self._view(segment, active=False, flushed=flushed) for segment in items[:-1]]
        return [*views, self._view(items[-1], active=True, flushed=flushed)]

    def _view(self, segment: Segment, *, active: bool, flushed: int) -> SegmentView:
        size_bytes, next_offset = segment.end
        return SegmentView(
            base_offset=segment.base_offset,
            last_offset=next_offset - 1,
            size_bytes=size_bytes,
            record_count=segment.record_count,
            min_timestamp=segment.min_timestamp,
            max_timestamp=largest_timestamp(self._state, segment),
            active=active,
            sealed=not active and next_offset <= flushed,
            path=segment.path(LOG),
            crc32c=segment.crc32c,
        )

    def sealed(self, base_offset: int) -> Segment:
        """Raises UnknownSegment."""
        state = self._state
        segments = state.segments
        number = segments.number_of(base_offset)
        if number < 0 or segments.bases[number] != base_offset or number == len(segments.bases) - 1:
            raise UnknownSegment(f"{state.name} has no sealed segment {base_offset}")
        return segments.items[number]

    def facts(self, base_offset: int) -> SegmentFacts:
        """Facts of any local segment. Raises UnknownSegment, CorruptBatch."""
        segments = self._state.segments
        number = segments.number_of(base_offset)
        if number < 0 or segments.bases[number] != base_offset:
            raise UnknownSegment(f"{self._state.name} has no segment {base_offset}")
        segment = segments.items[number]
        end = segment.end
        count, least = segment.record_count, segment.min_timestamp
        if count is None or (least is None and count):
            count, least = self._count(segment, size_bytes=end.size_bytes)
            if number < len(segments.items) - 1:
                segment.record_count, segment.min_timestamp = count, least
        return SegmentFacts(
            base_offset=base_offset,
            last_offset=end.next_offset - 1,
            size_bytes=end.size_bytes,
            record_count=count,
            min_timestamp=least,
            max_timestamp=largest_timestamp(self._state, segment),
        )

    def _count(self, segment: Segment, *, size_bytes: int) -> tuple[int, int | None]:
        read_at = segment.log_reader(self._state.files)
        return least_timestamp(read_at, size_bytes=size_bytes, file=segment.path(LOG))

    def crc32c(self, base_offset: int) -> int:
        segment = self.sealed(base_offset)
        if segment.crc32c is None:
            read_at = segment.log_reader(self._state.files)
            value = 0
            for position in range(0, segment.end.size_bytes, READ_BYTES):
                size = min(READ_BYTES, segment.end.size_bytes - position)
                value = crc32c(read_at(size, position), value)
            segment.crc32c = value
        return segment.crc32c

    def open_sealed(self, base_offset: int) -> OpenedSegment:
        crc = self.crc32c(base_offset)
        segment = self.sealed(base_offset)
        return OpenedSegment(segment.end.size_bytes, crc, self._state.files.open(segment.name(LOG)))

    def opened_sealed(self, base_offset: int) -> OpenedSegment | None:
        segments = self._state.segments
        number = segments.number_of(base_offset)
        if not 0 <= number < len(segments.bases) - 1 or segments.bases[number] != base_offset:
            return None
        segment = segments.items[number]
        file = self._state.files.opened(segment.name(LOG))
        if file is None or segment.crc32c is None:
            return None
        return OpenedSegment(segment.end.size_bytes, segment.crc32c, file)

    def files(self, base_offset: int) -> SegmentFiles:
        """Raises UnknownSegment where it is not sealed and flushed, or was deleted, LogOfflineError
        where the log was closed.
        """
        state = self._state
        state.check_shut()
        segment = self.sealed(base_offset)
        if segment.end.next_offset > state.flushed.offset:
            raise UnknownSegment(f"{state.name}: segment {base_offset} is not flushed yet")
        self._check_indexes(segment)
        last_offset = segment.end.next_offset - 1
        transactions = segment.path(TRANSACTION_INDEX) if segment.has_transactions else None
        return SegmentFiles(
            base_offset=base_offset,
            last_offset=last_offset,
            size_bytes=segment.end.size_bytes,
            record_count=segment.record_count,
            min_timestamp=segment.min_timestamp,
            max_timestamp=largest_timestamp(state, segment),
            leader_epoch=state.epochs.epoch_of(last_offset) or 0,
            log=segment.path(LOG),
            index=segment.path(OFFSET_INDEX),
            timeindex=segment.path(TIME_INDEX),
            txnindex=transactions,
            snapshot=mend_snapshot(state, segment.end.next_offset),
        )

    def _check_indexes(self, segment: Segment) -> None:
        """What is uploaded fits the log, all of it; a bad index is made anew first."""
        try:
            segment.check_index_files()
        except (CorruptIndex, FileNotFoundError):
            rebuild_indexes(self._state, segment)
