"""What keeps a partition in order over both tiers: rolls, deletions, uploads, garbage, repairs.

* For the background tasks and the repairs: what produces and fetches are made of is `Partition`'s.
* Whoever reads local files by their paths (an upload, a repair) does so within `files_held`, in
  which compaction replaces none. The log's own lock is taken inside it.
* A partition without a bucket has a cold tier that is empty. What writes to the bucket blocks on
  the store, and raises FencedError, StoreUnavailable, OutcomeUnknownError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from itertools import takewhile

import msgspec

from tierlog.broker.bucket.cold_log import ColdLog, EmptyColdTier
from tierlog.cold_tier.merged_segment import MergedFiles
from tierlog.cold_tier.ranged_reader import WHOLE_PIECE_BYTES, piece_ranges
from tierlog.host.file_slice import pread_exactly
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.salvage import Salvage
from tierlog.hot_tier.sealed_segments import Gap, SegmentView
from tierlog.hot_tier.segment import SegmentFiles
from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
from tierlog.manifest.state import Manifest, PageSource
from tierlog.record_format.errors import (
    CorruptDataError,
    InvalidRequest,
    OffsetTrimmed,
    UnknownSegment,
)
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry


class PartitionUpkeep:
    """Of one partition. Thread-safe."""

    __slots__ = ("_cold", "_log")

    def __init__(self, log: PartitionLog, cold: ColdLog | EmptyColdTier) -> None:
        self._log, self._cold = log, cold

    # --- the log on disk --------------------------------------------------------------------------

    def close_log(self) -> bool:
        """Flush and close it; whether this was a clean shutdown."""
        return self._log.close()

    def release_log(self) -> PartitionLog:
        """For whoever serves it from now on."""
        return self._log

    def abandon_log(self) -> None:
        """Close it without flushing: it is about to be deleted, or nothing was appended."""
        self._log.abandon()

    def move_log_start(self, offset: int) -> int:
        """Advance the log start, which is in its checkpoint already; returns it. Raises
        OffsetPastEnd above the high watermark, LogOfflineError if the log was closed.
        """
        return self._log.trim(offset)

    def roll(self) -> bool:
        """Seal the active segment, unless it is empty. Raises DiskFull, LogOfflineError."""
        return self._log.roll()

    def maybe_roll(self) -> bool:
        """Seal the active segment if it has had records for `offload.max.lag.ms`."""
        return self._log.maybe_roll()

    def delete_local(self, before_offset: int) -> list[int]:
        """Delete the sealed segments that end at or below it and the high watermark; returns where
        they began.
        """
        return self._log.delete_local(before_offset)

    def delete_below_log_start(self) -> None:
        """Delete the local segments that a crash or a failed commit left behind."""
        start = self._log.log_start_offset
        if self._log.first_local_offset < start:
            self._log.delete_local(start)

    def reap(self, *, at_once: bool = False) -> int:
        """Unlink what was deleted `file.delete.delay.ms` ago (`at_once`: all of it); returns how
        many segments. Raises OSError; the next call tries again.
        """
        return self._log.reap(at_once=at_once)

    def expire_producers(self, *, idle_ms: int) -> int:
        """Forget idempotent producers that have been idle for so long; returns how many."""
        return self._log.expire_producers(idle_ms=idle_ms)

    def readable_ranges(self) -> list[tuple[int, int]]:
        """(base offset, next offset) of the sealed segments below the high watermark, oldest first.
        Never waits for the disk.
        """
        return self._log.sealed.readable_ranges

    # --- what is wrong with it --------------------------------------------------------------------

    def gap_after(self, base_offset: int) -> Gap | None:
        """Offsets between this sealed segment's last batch and the next segment, if any. Raises
        UnknownSegment or OffsetTrimmed (it was deleted).
        """
        return self._log.sealed.gap_after(base_offset)

    def is_lost(self, view: SegmentView) -> bool:
        """Whether the file is missing, and compaction is not just replacing it."""
        before = self._log.sealed.swap_sequence
        is_missing = not view.path.exists()
        return is_missing and before % 2 == 0 and before == self._log.sealed.swap_sequence

    def readable_bytes(self, view: SegmentView) -> int:
        """How many bytes of the segment are below the high watermark."""
        return self._log.readable_bytes(view)

    def files_held(self) -> AbstractContextManager[object]:
        """Within it no sealed segment is replaced or uploaded; they may still be deleted."""
        return self._log.sealed.lock

    def delete_flushed(self, before_offset: int) -> None:
        """As `delete_local`, after a flush: a segment that is not flushed is not deleted."""
        self._log.writer.flush()
        self._log.delete_local(before_offset)

    def salvage(self, base_offset: int, *, reaches_end: bool) -> Salvage:
        """The repair of a segment with corrupt batches. Raises UnknownSegment."""
        return self._log.sealed.salvage(base_offset, reaches_end=reaches_end)

    def local_pieces(self, entry: SegmentEntry) -> Iterator[bytes]:
        """The bytes that the local log has at the entry's offsets, also below the log start. Raises
        UnknownSegment, OffsetTrimmed, CorruptDataError.
        """
        log, offset = self._log, entry.base_offset
        if log.first_local_offset <= offset < log.log_start_offset:  # reads refuse such offsets
            with closing(log.sealed.open(offset)) as whole:
                for start, end in piece_ranges(whole.size_bytes):
                    yield pread_exactly(whole.file, end - start, start)
            return
        if offset < log.local_log_start_offset or entry.next_offset > log.high_watermark:
            raise log.offsets.trimmed(f"{log}: offset {offset} is not on local disk")
        while offset < entry.next_offset:
            read = log.read_hot(offset, max_bytes=WHOLE_PIECE_BYTES, end_offset=entry.next_offset)
            if not read.slices:
                return
            with closing(read):
                yield from (piece.read() for piece in read.slices)
            offset = read.next_offset

    # --- uploads ----------------------------------------------------------------------------------

    def pending_uploads(self) -> list[int]:
        """Base offsets of the segments that are sealed, below the high watermark, and not in the
        manifest in force.

        Empty if remote storage was turned off. Never waits for the disk: it runs under the copier's
        lock, for which `/readyz` waits too.
        """
        if not (self._cold.exists and self._log.config.remote_storage_enable):
            return []
        end_offset = self._cold.end_offset
        if self._log.active_base_offset <= end_offset:
            return []  # the usual case, and cheap: every sealed segment is in the bucket
        return [
            base_offset
            for base_offset, next_offset in self._log.sealed.readable_ranges
            # By its end: a trim into a segment moves the bucket's end into it.
            if next_offset > max(end_offset, base_offset)
        ]

    def upload_segment(self, base_offset: int) -> SegmentEntry | None:
        """Upload one sealed segment, commit it, and read the commit back; None if compaction or
        retention removed it just now. Raises CorruptDataError, OffsetTrimmed.
        """
        assert isinstance(self._cold, ColdLog), "there is no bucket to copy it to"
        with self.files_held():
            try:
                return self._cold.offload(self._log.sealed.prepare_upload(base_offset))
            except (UnknownSegment, OffsetTrimmed, CorruptDataError) as error:
                if base_offset not in self._log.base_offsets:
                    return None
                if not isinstance(error, UnknownSegment):
                    raise
                # The log still has the segment, so the broker did not remove the file.
                raise CorruptDataError(str(error), file=str(self._log.folder)) from error

    @property
    def uploaded_end_offset(self) -> int:
        """The bucket has the local segments below it; 0 until it mirrors compaction."""
        return self._cold.end_offset if self._log.sealed.mirrored else 0

    # --- the bucket -------------------------------------------------------------------------------

    def recheck_store(self) -> bool:
        """Contact the store, unless it is known to be unreachable; whether it is reachable."""
        return self._cold.recheck_store()

    def check_clock(self) -> None:
        """Raises ClockSkewTooLarge if there is a store, and it refuses this machine's clock."""
        self._cold.check_clock()

    def record_trim(self, before_offset: int) -> None:
        """Record, durably, a trim that is about to move the log start."""
        self._cold.record_trim(before_offset)

    def follow_log_start(self) -> None:
        """Advance the log start in the bucket to that on disk."""
        self._cold.follow_log_start(self._log.log_start_offset)

    def merge_manifest_pages(self) -> None:
        self._cold.merge_pages()

    def mergeable_entries(self, from_offset: int) -> Iterator[SegmentEntry]:
        """The bucket's segments that end at or above `from_offset` and of which nothing is on local
        disk, oldest first: each local segment begins and ends where some in the bucket do.
        """
        local_start = self._log.first_local_offset
        below = max(from_offset, self._log.log_start_offset)
        for entry in self._cold.reads.cold_entries(below):
            if entry.next_offset > local_start:
                return
            yield entry

    def replace_merged(self, run: Sequence[SegmentEntry], files: MergedFiles) -> None:
        """Upload what `run` was merged to, and commit it in their place."""
        assert isinstance(self._cold, ColdLog), "there is no bucket to merge in"
        self._cold.replace_merged(run, files)

    def merge_plan(self, runs: list[list[SegmentEntry]]) -> MergePlan:
        """Of these runs, with what their merged segments are made with."""
        return self._required_cold_log.merge_plan(
            runs, index_interval_bytes=self._log.config.index_interval_bytes
        )

    def commit_merged(self, merged: SegmentEntry) -> None:
        """Commit what was uploaded elsewhere in place of what it was merged of; nothing if that was
        done before.
        """
        cold = self._required_cold_log
        following = self.mergeable_entries(merged.base_offset)
        run = list(takewhile(lambda one: one.base_offset <= merged.last_offset, following))
        if len(run) != 1 or not run[0].same_bytes(merged):
            cold.commit_merged(run, merged)

    @property
    def _required_cold_log(self) -> ColdLog:
        if not isinstance(self._cold, ColdLog):
            raise InvalidRequest(f"{self._log} has no segments in a bucket")
        return self._cold

    def resolve_failed_commit(self) -> None:
        """Find out whether a failed commit has landed."""
        self._cold.resolve_failed_commit()

    def garbage_plan(self, policy: GarbagePolicy) -> GarbagePlan | None:
        """What `collect_garbage` would delete now; None if there is no manifest."""
        return self._cold.garbage_plan(policy)

    def collection_plan(self, policy: GarbagePolicy, manifest: Manifest) -> GarbagePlan:
        """As `garbage_plan`, for the manifest in force that was just loaded."""
        assert isinstance(self._cold, ColdLog), "the manifest is of a bucket"
        return self._cold.collection_plan(manifest, policy)

    def collect_garbage(self, policy: GarbagePolicy) -> int:
        """Delete the objects that no manifest version needs any more; the number deleted."""
        return self._cold.collect_garbage(policy)

    def commit_repair(self, repair: Callable[[Manifest, PageSource], Manifest]) -> None:
        """Commit what the repair makes of the manifest in force and its pages."""
        assert isinstance(self._cold, ColdLog), "there is no bucket to repair"
        pages = self._cold.pages
        self._cold.commit_transition(lambda manifest: repair(manifest, pages))

    def replace_objects(
        self,
        files: SegmentFiles,
        entry: SegmentEntry,
        repair: Callable[[Manifest, SegmentEntry, PageSource], Manifest],
    ) -> None:
        """Upload an entry's objects again under a new name, and commit them in their place."""
        assert isinstance(self._cold, ColdLog), "there is no bucket to repair"
        with self._cold.uploading(entry.base_offset):
            new = msgspec.structs.replace(
                self._cold.upload_files(files),
                last_offset=entry.last_offset,
                modified_ms=entry.modified_ms,
            )
            self.commit_repair(lambda manifest, pages: repair(manifest, new, pages))
