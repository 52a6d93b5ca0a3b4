"""A log's sealed segments: reading their files, and replacing them.

* Callers hold `lock` while they read files by the paths from `prepare_upload` (an upload, a
  repair), and around each replacement. The log's own lock is taken inside it, never the other way
  round.
* Look-ups take no lock: they are retried if a swap overlapped them (`seqlock`).
* The bucket is updated some time after a replacement. Until then (`mirrored`) it may hold the old
  segments.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress

from tierlog.hot_tier.border_check import check_whole, crc32c_of_segment
from tierlog.hot_tier.cleanable import Cleanable, find_cleanable
from tierlog.hot_tier.cleaner import CleanedRound, Cleaner, CleanerHooks
from tierlog.hot_tier.file_names import LOG, UNMIRRORED
from tierlog.hot_tier.index_rebuild import rebuild_indexes
from tierlog.hot_tier.log_reader import file_of, largest_timestamp
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.prepend import prepend_segment
from tierlog.hot_tier.producer_snapshots import ensure_snapshot
from tierlog.hot_tier.reaper import Reaper
from tierlog.hot_tier.salvage import Salvage
from tierlog.hot_tier.segment import Segment
from tierlog.hot_tier.segment_gaps import Gap, gap_after
from tierlog.hot_tier.segment_views import OpenedSegment, SegmentFiles, segment_paths
from tierlog.hot_tier.seqlock import read_consistently
from tierlog.record_format.batch_compaction import KeyTable
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.errors import CorruptBatch, CorruptIndex, UnknownSegment, eio_as


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
    def flushed_ranges(self) -> list[tuple[int, int]]:
        """(base offset, next offset) of the segments that are flushed, oldest first; never waits
        for the disk.
        """
        flushed, items = self._state.flushed.offset, self._state.segments.items[:-1]
        ranges = [(segment.base_offset, segment.end.next_offset) for segment in items]
        return [one for one in ranges if one[1] <= flushed]

    def crc32c(self, base_offset: int) -> int:
        """CRC-32C of a `.log`; reads all of it the first time. Raises UnknownSegment or
        OffsetTrimmed (it was deleted), CorruptDataError.
        """
        return read_consistently(self._state, lambda: self._crc32c(self._find(base_offset)))

    def _crc32c(self, segment: Segment) -> int:
        file_of(self._state, segment)
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            return crc32c_of_segment(self._state, segment)

    def open(self, base_offset: int) -> OpenedSegment:
        """A segment's bytes, with the file open. Raises as `crc32c`."""
        return read_consistently(self._state, lambda: self._open(self._find(base_offset)))

    def _open(self, segment: Segment) -> OpenedSegment:
        self._check(segment)
        crc = self._crc32c(segment)
        return OpenedSegment(segment.end.size_bytes, crc, file_of(self._state, segment))

    def try_open(self, base_offset: int) -> OpenedSegment | None:
        """As `open`, if the file is open and its checksum known; None if the disk would be
        needed.
        """
        try:
            return read_consistently(
                self._state, lambda: self._try_open(base_offset), blocking=False
            )
        except BlockingIOError:
            return None

    def _try_open(self, base_offset: int) -> OpenedSegment | None:
        try:
            segment = self._find(base_offset)
        except UnknownSegment:
            return None
        file = self._state.files.get(segment.name(LOG))
        is_checked = segment.unchecked_below == segment.base_offset and segment.damage is None
        if file is None or segment.crc32c is None or not is_checked:
            return None
        return OpenedSegment(segment.end.size_bytes, segment.crc32c, file)

    def prepare_upload(self, base_offset: int) -> SegmentFiles:
        """The files of a flushed segment, to be read by path under `lock`: its batches checked, its
        indexes and snapshot rebuilt if they do not match.

        Raises CorruptDataError, UnknownSegment if it is not sealed and flushed, or was deleted;
        LogOfflineError if the log was closed.
        """
        return read_consistently(self._state, lambda: self._prepare_upload(base_offset))

    def _prepare_upload(self, base_offset: int) -> SegmentFiles:
        state = self._state
        state.check_not_closed()
        segment = self._find(base_offset)
        if segment.end.next_offset > state.flushed.offset:
            raise UnknownSegment(f"{state.name}: segment {base_offset} is not flushed yet")
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
        file_of(self._state, segment)
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
        """See `segment_gaps`. Raises UnknownSegment or OffsetTrimmed (it was deleted)."""
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
        return Cleaner(self._state, self._reaper, table, hooks or CleanerHooks()).run(cleanable)

    def salvage(self, base_offset: int, *, reaches_end: bool) -> Salvage:
        """Repair of a segment with corrupt batches; see `salvage`. Raises UnknownSegment."""
        segment = self._find(base_offset)
        return Salvage(self._state, self._reaper, segment, reaches_end=reaches_end)

    def prepend(self, files: SegmentFiles, *, epochs: Sequence[EpochEntry], crc32c: int) -> bool:
        """Put a segment that was brought back from the other tier before the first one; see
        `prepend`.
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
