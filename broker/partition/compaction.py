"""Compaction of one partition: what may be cleaned, what is only in the bucket, and how the bucket
follows. `background.compactor` decides when.

* Compaction replaces segments on local disk first, independently of the store, and leaves a marker
  in the partition's folder. While the marker exists, the bucket may hold the segments from before:
  complete and correct, only larger.
* Segments to replace are found by comparison, so that a crash, a lost response or a store that was
  down only cost another pass. Compaction never merges segments across the point where the cold tier
  ends, or may end, so every local segment below it corresponds to whole entries of the manifest.
* One transition per segment: no manifest version contains half of a replacement.
* In offset order, and within one pass only segments from before it: a segment whose tombstone was
  removed must not be in the bucket while the value that it deleted still is. So a pass ends if
  compaction replaces something meanwhile.
* A local segment only replaces whole entries. One that covers part of an entry belongs to another
  history (an older copy of the folder), and would remove the rest. Of entries that were merged when
  the topic was not compacted nothing is local: see `give_up_merged`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import takewhile

import structlog

from tierlog.broker.bucket.cold_log import ColdLog, EmptyColdTier
from tierlog.hot_tier.cleaner import Cleanable, CleanedRound, CleanerHooks, Interrupted
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.hot_tier.segment import SegmentFiles
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.compaction import KeyTable
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed, UnknownSegment
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)

LOCK_WAIT_S = 0.2


class PartitionCompaction:
    """Of one partition; one thread compacts, one follows."""

    __slots__ = ("_cold", "_has_borders_of_bucket", "_log", "_relied_on")

    def __init__(self, log: PartitionLog, cold: ColdLog | EmptyColdTier) -> None:
        self._log, self._cold = log, cold
        self._relied_on = (-1, 0)  # see `may_be_followed`
        self._has_borders_of_bucket = False

    def follow_bucket(self) -> None:
        """A replica begins to lead: give up what the leader before compacted, and is here as it was
        before; it is read from the bucket, and brought back. So is what this one compacted when it
        led last and the bucket does not mirror. Call it when the manifest in force is known. Raises
        OSError.
        """
        manifest = self._cold.manifest
        if manifest is None:
            return
        is_mirrored = self._log.sealed.mirrored
        before = manifest.compacted_before if is_mirrored else manifest.end_offset
        if before <= self._log.first_local_offset:
            return
        with self._log.sealed.lock:
            swap_sequence = self._log.sealed.swap_sequence
            self._log.delete_local(before)
            self._log.sealed.mark_mirrored(swap_sequence=swap_sequence)

    # --- on disk ----------------------------------------------------------------------------------

    def cleanable(self, checkpoint: int | None) -> Cleanable:
        """What compaction may work on now; `checkpoint` is where the last round ended."""
        return self._log.sealed.cleanable(checkpoint)

    def clean(
        self,
        cleanable: Cleanable,
        table: KeyTable,
        *,
        stopping: Callable[[], bool],
        may_forget: bool,
    ) -> CleanedRound:
        """One round; `may_forget` the tombstones that are past their horizon. Raises Interrupted,
        Throttled, CorruptDataError, DiskFull, LogOfflineError.
        """
        hooks = CleanerHooks(stopping, lambda: self._swapping(stopping), may_forget)
        return self._log.sealed.clean(cleanable, table, hooks)

    @contextmanager
    def _swapping(self, stopping: Callable[[], bool]) -> Iterator[frozenset[int]]:
        """Keep uploads from reading the files meanwhile. Yields the offsets that no segment may
        span, so that each local segment corresponds to whole entries of the manifest.
        """
        lock = self._log.sealed.lock
        while not lock.acquire(timeout=LOCK_WAIT_S):
            if stopping():
                raise Interrupted
        try:
            yield self._segment_boundaries()
        finally:
            lock.release()

    def _segment_boundaries(self) -> frozenset[int]:
        """The bucket's end and the ends of its gaps. The bucket may have one more segment than is
        known, through a commit whose response was lost, or that a crash kept from being recorded.
        Segments are committed one by one, in order.
        """
        if not self._cold.exists:
            return frozenset()
        views, end_offset = self._log.segments(), self._cold.end_offset
        may_be_cold = (v.last_offset + 1 for v in views if v.last_offset >= end_offset)
        return self._cold.segment_boundaries | {next(may_be_cold, end_offset)}

    # --- what is only in the bucket ---------------------------------------------------------------

    def give_up_merged(self) -> None:
        """Delete the local segments that are a part of one in the bucket, which is then brought
        back. A leader merges only what it has deleted from its disk, but its followers delete it
        later, and one of them may lead by then. Looks once: compacted topics are not merged. Raises
        StoreUnavailable, CorruptDataError, OSError.
        """
        if self._has_borders_of_bucket:
            return
        bases = [view.base_offset for view in self._log.segments()]
        spans = [
            entry.next_offset
            for entry in self._cold.reads.cold_entries(bases[0])
            if any(entry.base_offset < base < entry.next_offset for base in bases)
        ]
        if spans:
            with self._log.sealed.lock:
                self._log.delete_local(spans[-1])
        self._has_borders_of_bucket = True

    def cold_only(self) -> Iterator[SegmentEntry]:
        """The segments that are only in the bucket, oldest first."""
        local_start = self._log.first_local_offset
        for entry in self._cold.reads.cold_entries(self._log.log_start_offset):
            if entry.base_offset >= local_start:
                return
            yield entry

    def has_cold_only(self) -> bool:
        """Whether there are segments only in the bucket. Called each round, so it reads a page only
        if the manifest itself does not tell.
        """
        manifest = self._cold.manifest
        if manifest is None:
            return False
        log_start = self._log.log_start_offset
        oldest = manifest.find_run(log_start)
        if oldest is None or oldest.base_offset >= self._log.first_local_offset:
            return False
        if oldest.base_offset >= log_start or isinstance(oldest, SegmentEntry):
            return True
        return next(self.cold_only(), None) is not None  # the log start lies within a page

    def check_ends_before_local(self, entry: SegmentEntry) -> None:
        """Raises CorruptDataError if the entry, which begins below the local log, overlaps it."""
        local_start = self._log.first_local_offset
        if entry.next_offset > local_start:
            raise CorruptDataError(
                f"ends at offset {entry.last_offset}, but the local log begins at {local_start}",
                file=entry.log_key,
            )

    def attach(self, files: SegmentFiles, *, epochs: Sequence[EpochEntry], crc32c: int) -> bool:
        """Put a segment that was brought back before the first local one; False if retention or a
        trim has deleted it and everything below.
        """
        return self._log.sealed.prepend(files, epochs=epochs, crc32c=crc32c)

    # --- in the bucket ----------------------------------------------------------------------------

    @property
    def may_be_followed(self) -> bool:
        """Whether the bucket has everything that compaction relied on. Compaction drops a value for
        a newer one; while that is above the bucket's end, the older one is all that survives a lost
        disk.
        """
        swap_sequence = self._log.sealed.swap_sequence
        if self._relied_on[0] != swap_sequence:
            # In this order: replacements so far relied on segments that are sealed by now.
            self._relied_on = (swap_sequence, self._log.active_base_offset)
        return self._cold.end_offset >= self._relied_on[1]

    def follow(self, *, stopping: Callable[[], bool]) -> None:
        """Replace the bucket's entries that differ. Raises what uploads and commits raise."""
        sealed = self._log.sealed
        swap_sequence = sealed.swap_sequence
        for view in self._log.segments():
            if stopping():
                return
            if view.sealed and view.last_offset < self._cold.end_offset:
                self._follow(view, swap_sequence=swap_sequence)
        sealed.mark_mirrored(swap_sequence=swap_sequence)

    def _follow(self, view: SegmentView, *, swap_sequence: int) -> None:
        sealed = self._log.sealed
        with sealed.lock:  # nothing is replaced within
            if sealed.swap_sequence != swap_sequence:
                return  # the segment may be newer than this pass
            try:
                self._maybe_replace(view)
            except (UnknownSegment, OffsetTrimmed, CorruptDataError):
                if view.base_offset in self._log.base_offsets:
                    raise  # otherwise retention has deleted it just now

    def _maybe_replace(self, view: SegmentView) -> None:
        assert isinstance(self._cold, ColdLog), "there is no bucket that could follow"
        files = self._log.sealed.prepare_upload(view.base_offset)
        if files.last_offset >= self._cold.end_offset:
            return
        reached = self._cold.reads.cold_entries(files.base_offset)
        old = list(takewhile(lambda entry: entry.base_offset <= files.last_offset, reached))
        if not old or (len(old) == 1 and self._is_same(old[0], view)):
            return
        if old[0].base_offset < files.base_offset or old[-1].last_offset > files.last_offset:
            raise CorruptDataError(
                f"has offsets {files.base_offset} to {files.last_offset}, but the bucket has "
                f"segments of offsets {old[0].base_offset} to {old[-1].last_offset}: is this an "
                "older copy of the folder?",
                file=str(files.log),
            )
        entry = self._cold.replace_compacted(old, files)
        log.info(
            "compacted segment offloaded",
            partition=str(self._log),
            epoch=self._log.leader_epoch,
            base_offset=entry.base_offset,
            replaced=len(old),
            size_bytes=entry.size_bytes,
        )

    def _is_same(self, entry: SegmentEntry, view: SegmentView) -> bool:
        # Last offsets may differ: a local segment ends where the next begins, an entry before a gap
        there = (entry.base_offset, entry.size_bytes)
        if there != (view.base_offset, view.size_bytes):
            return False
        return entry.log_crc32c == self._log.sealed.crc32c(view.base_offset)
