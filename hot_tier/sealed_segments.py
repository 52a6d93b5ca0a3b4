"""A log's segments as others see them: what is known about each, reading the files of sealed ones,
and replacing them.

* Callers hold `lock` while they read files by the paths from `prepare_upload` (an upload, a
  repair), and around each replacement. The log's own lock is taken inside it, never the other way
  round.
* Look-ups take no lock: they are retried if a swap overlapped them (`read_consistently`).
* The bucket is updated some time after a replacement. Until then (`mirrored`) it may hold the old
  segments.
* Statistics that were not counted while appending (for segments found on disk) are counted on
  request by reading the segment, and kept.
* A gap between two segments: a crash can keep a later file and lose the end of an earlier one, and
  files can be lost; compaction leaves the same picture. The folder alone does not tell which; the
  recovery point does, or whether the log was ever compacted.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tierlog.host.file_slice import OpenFile
from tierlog.host.waiting import Wait
from tierlog.hot_tier.batch_walk import checked_batches, headers_of
from tierlog.hot_tier.border_check import check_whole, crc32c_of_segment
from tierlog.hot_tier.cleaner import Cleanable, CleanedRound, Cleaner, CleanerHooks, find_cleanable
from tierlog.hot_tier.closed_log import base_offsets
from tierlog.hot_tier.derived_files import ensure_snapshot, rebuild_indexes
from tierlog.hot_tier.log_folder import (
    LOG,
    UNMIRRORED,
    path_of,
)
from tierlog.hot_tier.log_reader import (
    bytes_below,
    file_of,
    largest_timestamp,
    log_reader_of,
    with_index_rebuild,
)
from tierlog.hot_tier.log_state import LogState, read_consistently
from tierlog.hot_tier.open_files import FileReader
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.salvage import Salvage
from tierlog.hot_tier.segment import Segment, SegmentFiles, segment_paths
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.hot_tier.segment_swap import prepend_segment
from tierlog.record_format.batch import NO_TIMESTAMP
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.compaction import KeyTable
from tierlog.record_format.decode import min_timestamp_of
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    CorruptIndex,
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
    sealed: bool  # and below the high watermark: its records will never change
    folder: Path
    crc32c: int | None
    age_ms: int | None

    @property
    def path(self) -> Path:
        """The log; made on request, because it takes longer than the rest of the view."""
        return path_of(self.folder, self.base_offset, LOG)


class OpenedSegment(NamedTuple):
    """A segment's bytes: `crc32c` covers all `size_bytes` of `file`, which it holds open; None for
    the active one, which grows.
    """

    size_bytes: int
    crc32c: int | None
    file: OpenFile
    next_offset: int

    def close(self) -> None:
        self.file.close()


class SegmentStats(NamedTuple):
    """`min_timestamp` is that of the records; None for an empty segment."""

    record_count: int
    min_timestamp: int | None
    max_timestamp: int


def views_of(state: LogState) -> list[SegmentView]:
    """All segments, oldest first."""
    end, items = state.high_watermark, state.segments.items
    views = [_view(state, segment, active=False, high_watermark=end) for segment in items[:-1]]
    return [*views, _view(state, items[-1], active=True, high_watermark=end)]


def view_bytes_below(state: LogState, view: SegmentView, end_offset: int) -> int:
    """How many bytes of a segment are below `end_offset`, as it was when `view` was made. Raises as
    `bytes_below`.
    """
    if view.last_offset < end_offset:  # checked first: compaction may have shrunk it
        return view.size_bytes
    number = state.segments.number_of(view.base_offset)
    segment = state.segments.items[max(number, 0)]
    if segment.base_offset != view.base_offset:
        return 0  # it was deleted
    return bytes_below(state, segment, end_offset)


def _view(state: LogState, segment: Segment, *, active: bool, high_watermark: int) -> SegmentView:
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
        sealed=not active and next_offset <= high_watermark,
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
        log = log_reader_of(state, segment)
        with closing(log), eio_as(CorruptBatch, file=segment.name(LOG)):
            count, smallest = _count(log, size_bytes=size_bytes)
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


class Gap(NamedTuple):
    """A segment ends at `next_offset`, and the one after it begins at a higher `base_offset`."""

    next_offset: int
    base_offset: int


def first_gap(folder: Path) -> Gap | None:
    """The first gap between two segments; skips segments with corrupt bytes. Raises OSError."""
    for base_offset, following in pairwise(base_offsets(folder)):
        next_offset = _next_offset(folder, base_offset)
        if next_offset is not None and next_offset < following:
            return Gap(next_offset, following)
    return None


def gap_after(state: LogState, segment: Segment) -> Gap | None:
    """The gap between the last batch of a sealed segment, found by the index, and the next segment.
    None also if the bytes there are corrupt or unreadable.
    """
    following = segment.end.next_offset

    def is_reached() -> bool:
        with closing(SegmentLookup(segment, state.files)) as lookup:
            return lookup.find_offset(following - 1) is not None

    try:
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            if with_index_rebuild(state, segment, is_reached):
                return None
            headers = segment.headers(state.files)
            next_offset = max(
                (header.next_offset for header in headers), default=segment.base_offset
            )
    except CorruptBatch:
        return None
    return Gap(next_offset, following) if next_offset < following else None


def _next_offset(folder: Path, base_offset: int) -> int | None:
    """The offset after the segment's last batch; None if its bytes are corrupt."""
    next_offset = base_offset
    try:
        for header in headers_of(path_of(folder, base_offset, LOG)):
            next_offset = header.next_offset
    except CorruptBatch:
        return None
    return next_offset


class SealedSegments:
    """See the module. Thread-safe. One per `PartitionLog`."""

    def __init__(self, state: LogState, reaper: Reaper) -> None:
        self._state, self._reaper = state, reaper
        self.lock = threading.Lock()

    def _find(self, base_offset: int) -> Segment:
        """Raises UnknownSegment."""
        segments = self._state.segments
        number = segments.number_of(base_offset)
        if number < 0 or segments.bases[number] != base_offset or number == len(segments.bases) - 1:
            raise UnknownSegment(f"{self._state.name} has no sealed segment {base_offset}")
        return segments.items[number]

    # --- reading ----------------------------------------------------------------------------------

    @property
    def readable_ranges(self) -> list[tuple[int, int]]:
        """(base offset, next offset) of the segments below the high watermark, oldest first; never
        waits for the disk.
        """
        end, items = self._state.high_watermark, self._state.segments.items[:-1]
        ranges = [(segment.base_offset, segment.end.next_offset) for segment in items]
        return [one for one in ranges if one[1] <= end]

    def crc32c(self, base_offset: int) -> int:
        """CRC-32C of a `.log`; reads all of it the first time. Raises UnknownSegment or
        OffsetTrimmed (it was deleted), CorruptDataError.
        """
        return read_consistently(self._state, lambda: self._crc32c(self._find(base_offset)))

    def _crc32c(self, segment: Segment) -> int:
        file_of(self._state, segment).close()
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            return crc32c_of_segment(self._state, segment)

    def open(self, base_offset: int, wait: Wait = Wait.WAIT) -> OpenedSegment:
        """A segment's bytes below the high watermark, with the file open. Raises as `crc32c`, and
        WouldBlock unless the file is open and its checksum known.
        """
        return read_consistently(
            self._state, lambda: self._open(self._find(base_offset), wait), wait
        )

    def _open(self, segment: Segment, wait: Wait) -> OpenedSegment:
        if segment.crc32c is None or segment.unchecked_below != segment.base_offset:
            wait.before("a segment is checked")
            self._check(segment)
            self._crc32c(segment)
        elif segment.damage is not None:
            raise segment.damage.error()
        end_offset = self._state.high_watermark
        if self._state.committed is not None and segment.end.next_offset > end_offset:
            size_bytes = bytes_below(self._state, segment, end_offset)
            return OpenedSegment(size_bytes, None, file_of(self._state, segment, wait), end_offset)
        file = file_of(self._state, segment, wait)
        crc32c = crc32c_of_segment(self._state, segment)
        return OpenedSegment(segment.end.size_bytes, crc32c, file, segment.end.next_offset)

    def prepare_upload(self, base_offset: int) -> SegmentFiles:
        """The files of a segment below the high watermark, to be read by path under `lock`: its
        batches checked, its indexes and snapshot rebuilt if they do not match.

        Raises CorruptDataError, UnknownSegment if it is not sealed and below the high watermark, or
        was deleted; LogOfflineError if the log was closed.
        """
        return read_consistently(self._state, lambda: self._prepare_upload(base_offset))

    def _prepare_upload(self, base_offset: int) -> SegmentFiles:
        state = self._state
        state.check_not_closed()
        segment = self._find(base_offset)
        if segment.end.next_offset > state.high_watermark:
            raise UnknownSegment(f"{state.name}: segment {base_offset} is above the high watermark")
        self._check(segment)
        try:
            self._check_indexes(segment)
            snapshot = ensure_snapshot(state, segment.end.next_offset)
        except FileNotFoundError:
            state.check_not_closed()
            self._find(base_offset)  # raises if it was deleted meanwhile
            raise
        return segment_paths(segment, snapshot=snapshot)

    def _check(self, segment: Segment) -> None:
        """Raises CorruptBatch, and as `file_of`."""
        file_of(self._state, segment).close()
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            check_whole(self._state, segment)

    def _check_indexes(self, segment: Segment) -> None:
        """Make sure that everything uploaded matches the log; a bad index is rebuilt first."""
        try:
            segment.check_index_files()
        except (CorruptIndex, FileNotFoundError):
            rebuild_indexes(self._state, segment)
        largest_timestamp(self._state, segment)  # compares it with the log

    def gap_after(self, base_offset: int) -> Gap | None:
        """See `sealed_segments`. Raises UnknownSegment or OffsetTrimmed (it was deleted)."""
        return read_consistently(
            self._state, lambda: gap_after(self._state, self._find(base_offset))
        )

    # --- replacing --------------------------------------------------------------------------------

    def cleanable(self, checkpoint: int | None) -> Cleanable:
        """What compaction may work on now; `checkpoint` is where the last round ended."""
        now_ms = self._state.clock()
        return read_consistently(
            self._state, lambda: find_cleanable(self._state, checkpoint, now_ms=now_ms)
        )

    def clean(
        self, cleanable: Cleanable, table: KeyTable, hooks: CleanerHooks | None = None
    ) -> CleanedRound:
        """One round of compaction; see `cleaner`. One at a time.

        Raises Interrupted or Throttled (nothing is lost), CorruptDataError, DiskFull,
        LogOfflineError.
        """
        return Cleaner(self._state, self._reaper, table, hooks or CleanerHooks()).clean_round(
            cleanable
        )

    def salvage(self, base_offset: int, *, reaches_end: bool) -> Salvage:
        """Repair of a segment with corrupt batches; see `salvage`. Raises UnknownSegment."""
        segment = self._find(base_offset)
        return Salvage(self._state, self._reaper, segment, reaches_end=reaches_end)

    def prepend(self, files: SegmentFiles, *, epochs: Sequence[EpochEntry], crc32c: int) -> bool:
        """Put a segment that was brought back from the other tier before the first one; see
        `segment_swap`.
        """
        return prepend_segment(self._state, files, epochs=epochs, crc32c=crc32c)

    # --- mirroring to the bucket ------------------------------------------------------------------

    @property
    def swap_sequence(self) -> int:
        """If it is even and the same before and after two look-ups, both saw the same segments."""
        return self._state.swap_sequence

    @property
    def mirrored(self) -> bool:
        """Whether the bucket is known to reflect every replacement."""
        return not self._state.unmirrored

    def mark_mirrored(self, *, swap_sequence: int) -> None:
        """Record that the bucket reflects all swaps, unless `swap_sequence` has changed since. If
        the record is lost, the segments are compared with the bucket once more.
        """
        state = self._state
        with state.lock:
            if swap_sequence == state.swap_sequence:
                state.unmirrored = False
                with suppress(OSError):
                    state.disk.unlink(state.folder / UNMIRRORED)
