"""What other packages may know about the segments of a log, as immutable values.

Statistics that were not counted while appending (for segments found on disk) are counted on request
by reading the segment, and kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.batch_walk import checked_batches
from tierlog.hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX, path_of
from tierlog.hot_tier.log_reader import largest_timestamp, log_reader_of
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.batch import NO_TIMESTAMP
from tierlog.record_format.decode import min_timestamp_of
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    OffsetTrimmed,
    UnknownSegment,
    eio_as,
)


class SegmentView(NamedTuple):
    """One local segment. None: unknown without reading it. `age_ms`: since its first record; also
    None if it is empty, or was sealed before the log was opened.
    """

    base_offset: int
    last_offset: int  # base - 1 if it is empty
    size_bytes: int
    record_count: int | None
    min_timestamp: int | None
    max_timestamp: int
    active: bool
    sealed: bool  # and flushed: it will never change
    folder: Path
    crc32c: int | None
    age_ms: int | None

    @property
    def path(self) -> Path:
        """The log; made on request, because it takes longer than the rest of the view."""
        return path_of(self.folder, self.base_offset, LOG)


class OpenedSegment(NamedTuple):
    """A sealed segment's bytes: `crc32c` covers all `size_bytes` of `file`."""

    size_bytes: int
    crc32c: int
    file: OpenFile


class SegmentStats(NamedTuple):
    """`min_timestamp` is that of the records; None for an empty segment."""

    record_count: int
    min_timestamp: int | None
    max_timestamp: int


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The files of a sealed segment.

    `snapshot` holds the producers at the end of the segment: the file at the next base offset.
    """

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int | None  # None: unknown without reading it
    min_timestamp: int | None
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path | None
    snapshot: Path


def segment_paths(segment: Segment, *, snapshot: Path) -> SegmentFiles:
    """Only names the files, and looks at none."""
    return SegmentFiles(
        base_offset=segment.base_offset,
        last_offset=segment.end.next_offset - 1,
        size_bytes=segment.end.size_bytes,
        record_count=segment.record_count,
        min_timestamp=segment.min_timestamp,
        log=segment.path(LOG),
        index=segment.path(OFFSET_INDEX),
        timeindex=segment.path(TIME_INDEX),
        txnindex=segment.path(TRANSACTION_INDEX) if segment.has_transactions else None,
        snapshot=snapshot,
    )


def views_of(state: LogState) -> list[SegmentView]:
    """All segments, oldest first."""
    flushed, items = state.flushed.offset, state.segments.items
    views = [_view(state, segment, active=False, flushed=flushed) for segment in items[:-1]]
    return [*views, _view(state, items[-1], active=True, flushed=flushed)]


def _view(state: LogState, segment: Segment, *, active: bool, flushed: int) -> SegmentView:
    size_bytes, next_offset = segment.end
    first_ms = segment.first_append_ms
    return SegmentView(
        base_offset=segment.base_offset,
        last_offset=next_offset - 1,
        size_bytes=size_bytes,
        record_count=segment.record_count,
        min_timestamp=segment.min_timestamp,
        max_timestamp=_largest_timestamp(state, segment),
        active=active,
        sealed=not active and next_offset <= flushed,
        folder=segment.folder,
        crc32c=segment.crc32c,
        age_ms=None if first_ms is None else state.monotonic_clock() - first_ms,
    )


def _largest_timestamp(state: LogState, segment: Segment) -> int:
    """-1 also if the segment is damaged or was just deleted: that must not keep anyone from listing
    the others.
    """
    try:
        return largest_timestamp(state, segment)
    except (CorruptDataError, OffsetTrimmed):
        return NO_TIMESTAMP


def stats_of(state: LogState, base_offset: int) -> SegmentStats:
    """Statistics of any local segment. Raises UnknownSegment or OffsetTrimmed (it was deleted),
    CorruptDataError.
    """
    segments = state.segments
    number = segments.number_of(base_offset)
    if number < 0 or segments.bases[number] != base_offset:
        raise UnknownSegment(f"{state.name} has no segment {base_offset}")
    segment = segments.items[number]
    count, smallest = segment.record_count, segment.min_timestamp
    if count is None or (smallest is None and count):
        size_bytes = segment.end.size_bytes
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            count, smallest = _count(log_reader_of(state, segment), size_bytes=size_bytes)
        if number < len(segments.items) - 1:
            segment.record_count, segment.min_timestamp = count, smallest
    return SegmentStats(count, smallest, largest_timestamp(state, segment))


def _count(log: FileReader, *, size_bytes: int) -> tuple[int, int | None]:
    """(records, smallest timestamp) of all batches; None without a record. Raises CorruptBatch."""
    count, smallest = 0, None
    for checked in checked_batches(log, end=size_bytes):
        count += checked.header.record_count
        try:
            of_batch = min_timestamp_of(checked.chunk, checked.header_in_chunk())
        except CorruptBatch as bad:
            raise checked.with_location(bad, file=log.name) from None
        if of_batch is not None and (smallest is None or of_batch < smallest):
            smallest = of_batch
    return count, smallest
