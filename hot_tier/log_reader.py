"""Reads of one log. They take no lock and wait for no flush.

* A read starts with the batch that contains its offset and ends with a whole batch below
  `end_offset`.
* Bytes that this process found on disk are checked before they are first read (`border_check`).
* A corrupt index is rebuilt once and the look-up retried; a corrupt batch is an error.
* If a file was deleted during a read, OffsetTrimmed is raised: the other tier may have it. If it is
  missing but was not deleted, CorruptDataError is raised; batches before it are returned first.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from contextlib import closing
from itertools import accumulate
from typing import TypeVar

from tierlog.host.file_slice import FileSlice, OpenFile, TierRead, close_all
from tierlog.host.waiting import Wait
from tierlog.hot_tier.batch_walk import checked_batches
from tierlog.hot_tier.border_check import check_before_read
from tierlog.hot_tier.derived_files import read_entries, rebuild_for_reading
from tierlog.hot_tier.log_folder import LOG, TRANSACTION_INDEX
from tierlog.hot_tier.log_state import LogState, MaxTimestamps, Segments
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES, Segment, SegmentEnd
from tierlog.hot_tier.segment_lookup import SegmentLookup, find_largest_timestamp
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.decode import first_at_time
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    CorruptIndex,
    OffsetTrimmed,
    eio_as,
)
from tierlog.record_format.index_layouts import AbortedTxn

T = TypeVar("T")

MAX_SLICES = 64


def read_slices(
    state: LogState, offset: int, *, max_bytes: int, end_offset: int, wait: Wait = Wait.WAIT
) -> TierRead:
    """Batches below `end_offset`, starting with the one that contains `offset`; at least one if
    there is one. Raises WouldBlock if they cannot be found without waiting.

    The result is empty at the end of the log, and if only offsets without batches remain. Raises
    OffsetTrimmed (below the first local segment or the log start), OffsetPastEnd, CorruptDataError.
    """
    segments = state.segments
    _check_range(state, segments, offset, end_offset)
    number = segments.number_of(offset)
    slices: list[FileSlice] = []
    try:
        next_offset = _collect(
            state,
            segments.items[number : number + MAX_SLICES],
            slices,
            offset,
            max_bytes=max_bytes,
            end_offset=end_offset,
            wait=wait,
        )
    except BaseException:
        close_all(slices)
        raise
    return TierRead(tuple(slices), next_offset)


def _collect(
    state: LogState,
    items: Sequence[Segment],
    slices: list[FileSlice],
    offset: int,
    *,
    max_bytes: int,
    end_offset: int,
    wait: Wait,
) -> int:
    """Add to `slices`; returns the offset after them."""
    next_offset, left_bytes = offset, max_bytes
    for segment in items:
        if next_offset >= end_offset or (slices and left_bytes <= 0):
            break
        try:
            found = slice_of_segment(
                state, segment, next_offset, max_bytes=left_bytes, end_offset=end_offset, wait=wait
            )
        except CorruptDataError:
            if not slices:
                raise
            break
        if found is None:
            if not slices and segment.end.next_offset <= end_offset:
                # No batch: the segment ends in offsets that compaction or a gap left empty.
                next_offset = max(next_offset, segment.end.next_offset)
            continue
        piece, end = found
        if slices and piece.size_bytes > left_bytes:
            piece.close()
            break
        slices.append(piece)
        next_offset, left_bytes = end, left_bytes - piece.size_bytes
        if next_offset < segment.end.next_offset:
            break  # a limit was reached within the segment
    return next_offset


def _check_range(state: LogState, segments: Segments, offset: int, end_offset: int) -> None:
    start = max(segments.bases[0], state.log_start_offset)
    if offset < start:
        raise state.offsets.trimmed(f"offset {offset} is below the local log start {start}")
    if offset > end_offset:
        raise state.offsets.past_end(f"offset {offset} is above {end_offset}")


def slice_of_segment(
    state: LogState,
    segment: Segment,
    offset: int,
    *,
    max_bytes: int,
    end_offset: int,
    wait: Wait,
) -> tuple[FileSlice, int] | None:
    """The segment's slice and the offset after it; None if it has none."""

    def look_up() -> tuple[FileSlice, int] | None:
        damage = check_before_read(state, segment, from_offset=offset, wait=wait)
        part = damage.part_at(offset) if damage else None
        lookup, found = SegmentLookup(segment, state.files, part, wait=wait), None
        try:
            first = lookup.find_offset(offset)
            if first is None or first.last_offset >= end_offset:
                return None
            end = None
            if segment is state.active.segment and damage is None:
                end = _flushed_end(
                    state, segment, first, max_bytes=max_bytes, end_offset=end_offset
                )
            if end is None:
                end = lookup.find_end(first, max_bytes=max_bytes, end_offset=end_offset)
            size_bytes = end.size_bytes - first.position
            found = FileSlice(lookup.log.file, first.position, size_bytes), end.next_offset
            return found
        finally:
            if found is None:  # otherwise the slice is the file's holder now
                lookup.close()

    return with_index_rebuild(state, segment, look_up, wait)


def _flushed_end(
    state: LogState, segment: Segment, first: BatchHeader, *, max_bytes: int, end_offset: int
) -> SegmentEnd | None:
    """Where a read of the active segment up to the high watermark ends, without a scan: the usual
    request of tailing readers. Not used for sealed segments, which compaction may have replaced by
    shorter ones.
    """
    flushed = state.flushed
    within = first.position + max_bytes >= flushed.position
    if flushed.offset == end_offset and flushed.base_offset == segment.base_offset and within:
        return SegmentEnd(flushed.position, flushed.offset)
    return None


def bytes_below(state: LogState, segment: Segment, end_offset: int) -> int:
    """How many bytes of a segment are whole batches below `end_offset`. Raises as `read_slices`."""
    flushed = state.flushed
    if flushed.offset == end_offset and flushed.base_offset == segment.base_offset:
        return flushed.position
    if end_offset <= segment.base_offset:
        return 0
    found = slice_of_segment(
        state,
        segment,
        segment.base_offset,
        max_bytes=MAX_SEGMENT_BYTES,
        end_offset=end_offset,
        wait=Wait.WAIT,
    )
    if found is None:
        return 0
    found[0].close()
    return found[0].size_bytes


def with_index_rebuild(
    state: LogState, segment: Segment, look_up: Callable[[], T], wait: Wait = Wait.WAIT
) -> T:
    """The result of `look_up`; if the index is corrupt it is rebuilt and the look-up repeated.

    Raises WouldBlock, OffsetTrimmed if the segment was deleted meanwhile, CorruptDataError, also
    for a `.log` that the disk cannot read.
    """
    try:
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            try:
                return look_up()
            except CorruptIndex:
                wait.before("an index is rebuilt")
                rebuild_for_reading(state, segment)
                return look_up()
    except FileNotFoundError:
        raise _missing_segment_error(state, segment) from None


def file_of(state: LogState, segment: Segment, wait: Wait = Wait.WAIT) -> OpenFile:
    """A segment's `.log`; the caller closes it. Raises as `_missing_segment_error`, CorruptBatch if
    the disk cannot open it, and WouldBlock.
    """
    try:
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            return state.files.open(segment.name(LOG), wait)
    except FileNotFoundError:
        raise _missing_segment_error(state, segment) from None


def log_reader_of(state: LogState, segment: Segment) -> FileReader:
    """As `Segment.log_reader`. Raises as `file_of`."""
    return FileReader(file_of(state, segment), state.files.pread)


def _missing_segment_error(
    state: LogState, segment: Segment, suffix: str = LOG
) -> OffsetTrimmed | CorruptDataError:
    """The error for a missing segment file: deleted, or lost. A deleted segment leaves the log
    before its files are renamed.
    """
    if segment in state.segments.items and not state.closed:
        return CorruptDataError("is missing: the file was lost", file=segment.name(suffix))
    return state.offsets.trimmed(f"segment {segment.base_offset} was deleted")


# --- by time --------------------------------------------------------------------------------------


def offset_for_timestamp(
    state: LogState, timestamp: int, *, end_offset: int
) -> tuple[int, int] | None:
    """(offset, timestamp) of the first local record at or after `timestamp`, below `end_offset`."""
    segments = state.segments
    start_offset = max(segments.bases[0], state.log_start_offset)
    first = max(
        segments.number_of(start_offset), _first_segment_reaching(state, segments, timestamp)
    )
    for segment in segments.items[first:]:
        if segment.base_offset >= end_offset:
            return None
        if largest_timestamp(state, segment) < timestamp:
            continue
        found = _find_in_segment(state, segment, timestamp, start_offset)
        if found is not None:
            return found if found[0] < end_offset else None
    return None


def _first_segment_reaching(state: LogState, segments: Segments, timestamp: int) -> int:
    """Index of the first segment by whose end `timestamp` was reached; at most that of the active
    one.

    The running maxima of the segments' largest timestamps are kept until the list of segments
    changes.
    """
    known = state.max_timestamps_so_far
    if known is None or known.segments is not segments:
        sealed = (largest_timestamp(state, segment) for segment in segments.items[:-1])
        known = MaxTimestamps(segments, tuple(accumulate(sealed, max)))
        state.max_timestamps_so_far = known
    return bisect_left(known.maxima, timestamp)


def max_timestamp(state: LogState) -> int:
    return max(largest_timestamp(state, segment) for segment in state.segments.items)


def largest_timestamp(state: LogState, segment: Segment) -> int:
    known = segment.largest
    if known is None:
        known = with_index_rebuild(
            state, segment, lambda: find_largest_timestamp(segment, state.files)
        )
    return known.timestamp


def _find_in_segment(
    state: LogState, segment: Segment, timestamp: int, start_offset: int
) -> tuple[int, int] | None:
    def look_up() -> tuple[int, int] | None:
        offset = max(start_offset, segment.base_offset)
        damage = check_before_read(state, segment, from_offset=offset)
        part = damage.part_at(offset) if damage else None
        with closing(SegmentLookup(segment, state.files, part)) as lookup:
            for header in lookup.batches_from_time(timestamp, start_offset=start_offset):
                found = _find_in_batch(lookup.log, header, timestamp, start_offset)
                if found:
                    return found
        if damage and part is not damage.parts[-1]:
            raise damage.error()
        return None

    return with_index_rebuild(state, segment, look_up)


def _find_in_batch(
    log: FileReader, header: BatchHeader, timestamp: int, start_offset: int
) -> tuple[int, int] | None:
    batch = next(checked_batches(log, start=header.position, end=header.end_position))
    return first_at_time(
        batch.chunk, batch.header_in_chunk(), timestamp=timestamp, start_offset=start_offset
    )


# --- transactions ---------------------------------------------------------------------------------


def aborted_transactions(
    state: LogState, offset: int, *, end_offset: int, wait: Wait = Wait.WAIT
) -> list[AbortedTxn]:
    """Aborted transactions with records in [offset, end_offset), by their markers' offsets. Raises
    OffsetTrimmed if a segment was deleted meanwhile; WouldBlock if an index has to be read.
    """
    segments = state.segments
    found: list[AbortedTxn] = []
    for segment in segments.items[max(segments.number_of(offset), 0) :]:
        if segment.has_transactions and segment.aborted is None:
            wait.before("a transaction index is read")
        try:
            entries = read_entries(segment)
        except FileNotFoundError:
            raise _missing_segment_error(state, segment, TRANSACTION_INDEX) from None
        for entry in entries:
            if entry.last_offset >= offset and entry.first_offset < end_offset:
                found.append(entry)
            if entry.last_stable_offset >= end_offset:
                return found  # later markers end transactions that began after the range
    return found
