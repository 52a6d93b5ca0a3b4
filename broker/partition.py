"""A partition, which hides its tiers: what may be done with it, and who may.

* Reads are `TieredReads`' own: they take no lock, and wait for no write.
* Every write first asks whether this folder still owns the partition, and before it is answered
  again (`OwnerCheck`).
* Everything here may block except `append`, `offsets`, and what is given Wait.NEVER.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from typing import NamedTuple

import structlog

from tierlog.broker.cold_log import ColdLog, EmptyColdTier
from tierlog.broker.tiered_reads import ReportingDefunct, TieredReads
from tierlog.broker.waiters import Waiters
from tierlog.host.file_slice import FileSlice
from tierlog.host.waiting import Wait
from tierlog.hot_tier.group_commit import GroupCommit
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_state import Offsets
from tierlog.hot_tier.log_writer import Acks, Append, AppendResult
from tierlog.hot_tier.segment import SegmentFiles
from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest, OffsetGap
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.errors import (
    ConfigurationError,
    FencedError,
    StoreUnavailable,
    TierlogError,
    UnknownTopic,
)
from tierlog.record_format.produced import ProducedBatches
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)

MAX_OFFSET = 2**63 - 1


class EpochEnd(NamedTuple):
    """`end_offset`: the first that was not assigned under this leader epoch."""

    epoch: int
    end_offset: int


class Partition:
    """One partition of the broker. Thread-safe. `commits` makes the queue of its appends; what it
    is given is called before they are answered.
    """

    def __init__(
        self,
        log: PartitionLog,
        cold: ColdLog | None,
        *,
        commits: Callable[[Callable[[], None]], GroupCommit],
        check_room: Callable[[], None],
    ) -> None:
        self.log = log
        self.topic, self.number, self.topic_id = log.topic, log.partition, log.topic_id
        self._cold: ColdLog | EmptyColdTier = cold or EmptyColdTier(str(self))
        self._reads = TieredReads(log, self._cold.reads, served=self)
        self.read, self.offset_for_timestamp = self._reads.read, self._reads.offset_for_timestamp
        self.max_timestamp = self._reads.max_timestamp
        self._commits, self._check_room = commits(self._before_answers), check_room
        self._waiters = Waiters()
        self.is_deleted = False
        log.writer.on_high_watermark.append(self._waiters.wake)

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    # --- offsets ----------------------------------------------------------------------------------

    def offsets(self) -> Offsets:
        return self.log.offsets

    @property
    def high_watermark(self) -> int:
        return self.log.high_watermark

    def epochs(self) -> list[EpochEntry]:
        """Where each leader epoch began, in both tiers, oldest first; the last is the one in force,
        also before its first record.
        """
        now, local = self.offsets(), self.log.epochs
        oldest = local[0].epoch if local else now.leader_epoch
        manifest = self._cold.manifest
        begun = {} if manifest is None else {one.epoch: one.start_offset for one in manifest.epochs}
        found = [EpochEntry(*one) for one in begun.items() if one[0] < oldest]
        for epoch, start_offset in local:  # the first may have begun below the local log start
            found.append(EpochEntry(epoch, min(start_offset, begun.get(epoch, start_offset))))
        if not found or found[-1].epoch < now.leader_epoch:
            found.append(EpochEntry(now.leader_epoch, now.log_end_offset))
        return found

    def epoch_of(self, offset: int) -> int:
        """The leader epoch under which this offset was assigned; -1 if that is not known."""
        begun = [entry.epoch for entry in self.epochs() if entry.start_offset <= offset]
        return begun[-1] if begun else -1

    def end_of_epoch(self, epoch: int) -> EpochEnd:
        """Where this leader epoch ended, or the newest one below it that is known, as in Kafka's
        LeaderEpochFileCache; (-1, -1) if there is no such epoch yet.
        """
        epochs = self.epochs()
        if epoch < 0 or epoch > epochs[-1].epoch:
            return EpochEnd(-1, -1)
        if epoch == epochs[-1].epoch:
            return EpochEnd(epoch, self.log.log_end_offset)
        number = bisect_right([entry.epoch for entry in epochs], epoch)
        known = epochs[number - 1].epoch if number else epoch
        return EpochEnd(known, epochs[number].start_offset)

    @property
    def is_offline(self) -> bool:
        """Whether its disk failed: what was flushed is still read."""
        return self.log.offline

    @property
    def leadership_lost(self) -> str | None:
        """The reason why this folder may no longer serve the partition, or None."""
        return self._cold.leadership_lost

    @property
    def is_defunct(self) -> bool:
        """Whether no call is served any more: the topic was deleted, or leadership was lost."""
        return self.is_deleted or self.leadership_lost is not None

    @property
    def offloads(self) -> bool:
        """Whether sealed segments are copied to the bucket: not if remote storage was turned off
        after the partition was claimed there.
        """
        return self.has_bucket and self.log.config.remote_storage_enable

    def check_exists(self) -> None:
        """Raises UnknownTopic if the topic was deleted."""
        if self.is_deleted:
            raise UnknownTopic(self.topic)

    def check_leadership(self) -> None:
        """Raises UnknownTopic if it was deleted, FencedError if another broker owns it."""
        self.check_exists()
        reason = self.leadership_lost
        if reason:
            raise FencedError(f"leadership lost: {reason}")

    def look_for_owner(self, *, in_time: bool = False) -> None:
        """Check that no other folder became the owner; `in_time`: for no longer than an answer may
        wait. Raises FencedError, UnknownTopic, StoreUnavailable, and what a look at a damaged
        manifest raises.
        """
        try:
            self._cold.look_for_owner(log_end_offset=self.log.log_end_offset, in_time=in_time)
        finally:
            if self.leadership_lost:
                self.wake_all()

    def _before_answers(self) -> None:
        """Raises FencedError, UnknownTopic. A healthy owner only compares two clock values."""
        if not self._cold.is_owner_look_due:
            return
        try:
            self.look_for_owner(in_time=True)
        except (FencedError, UnknownTopic):
            raise
        except (StoreUnavailable, ConfigurationError):
            pass  # `/readyz` says so
        except (TierlogError, OSError) as error:  # damage is not a claim
            log.warning("ownership check failed", partition=str(self), error=str(error))

    def claim(self) -> None:
        """Become the owner in the bucket, unless it is already. Raises FencedError,
        StoreUnavailable.
        """
        is_new = self._cold.claim(
            log_start_offset=self.log.log_start_offset, log_end_offset=self.log.log_end_offset
        )
        if is_new:  # it may have been trimmed meanwhile
            self._cold.follow_log_start(self.log.log_start_offset)

    def check_claim(self) -> None:
        """Raise FencedError if a claim would. Changes nothing."""
        self._cold.check_claim(log_end_offset=self.log.log_end_offset)

    def reporting_defunct(self) -> ReportingDefunct:
        return ReportingDefunct(self)

    # --- the bucket -------------------------------------------------------------------------------
    # Without one the cold tier is empty: `EmptyColdTier` says what that means for each of these.

    @property
    def cold(self) -> ColdLog | None:
        """For repairs and listings, which work on the bucket itself; None without one."""
        return self._cold if isinstance(self._cold, ColdLog) else None

    def use_bucket(self, cold: ColdLog | None) -> None:
        """Remote storage was turned on for a topic that had none."""
        if cold is not None:
            self._cold, self._reads.cold = cold, cold.reads

    @property
    def has_bucket(self) -> bool:
        """Whether something of the partition was, or will be, written to a bucket."""
        return self._cold.exists

    @property
    def is_claimed(self) -> bool:
        """Whether nothing remains to be claimed."""
        return self._cold.is_claimed

    @property
    def owner_looked_ms(self) -> int:
        """When the last look at the owner began, on the clock of `OwnerCheck`."""
        return self._cold.owner_looked_ms

    @property
    def is_store_reachable(self) -> bool:
        """As last observed; False without a store."""
        return self._cold.is_store_reachable

    def recheck_store(self) -> bool:
        """Contact the store, unless it is known to be unreachable; whether it is reachable."""
        return self._cold.recheck_store()

    def check_clock(self) -> None:
        """Raises ClockSkewTooLarge if there is a store, and it refuses this machine's clock."""
        self._cold.check_clock()

    @property
    def is_busy(self) -> bool:
        """Whether something is being uploaded, or the manifest changed."""
        return self._cold.is_busy

    @property
    def manifest(self) -> Manifest | None:
        """The manifest last seen in force. Immutable: readers take it once."""
        return self._cold.manifest

    @property
    def gaps(self) -> tuple[OffsetGap, ...]:
        """The gaps of the manifest last seen in force."""
        manifest = self._cold.manifest
        return manifest.gaps if manifest is not None else ()

    @property
    def cold_end_offset(self) -> int:
        """Every record from the log start up to it is in the bucket; 0 if none is."""
        return self._cold.end_offset

    @property
    def cold_size_bytes(self) -> int:
        return self._cold.size_bytes

    @property
    def uploaded_end_offset(self) -> int:
        """The bucket has the local segments below it; 0 until it mirrors compaction."""
        return self._cold.end_offset if self.log.sealed.mirrored else 0

    @property
    def segment_boundaries(self) -> frozenset[int]:
        """Offsets that no segment may span: the end of the cold tier and the ends of its gaps."""
        return self._cold.segment_boundaries

    def cold_entries(self, from_offset: int) -> Iterator[SegmentEntry]:
        """Entries of the manifest in force that end at or above `from_offset`, oldest first."""
        return self._cold.reads.cold_entries(from_offset)

    def oldest_cold_entries(self, from_offset: int) -> Iterator[SegmentEntry]:
        """As `cold_entries`, for callers that repeatedly need only the first one."""
        return self._cold.reads.oldest_cold_entries(from_offset)

    def find_cold_entry(self, offset: int, wait: Wait) -> SegmentEntry | None:
        """The entry that holds `offset`, or the next one. Raises WouldBlock."""
        return self._cold.reads.find_entry(offset, wait)

    def cold_bytes(
        self, entry: SegmentEntry, *, start: int, end: int, wait: Wait
    ) -> Iterator[FileSlice]:
        """Bytes [start, end) of a segment's log; each chunk is fetched when it is requested."""
        assert isinstance(self._cold, ColdLog), "the entry is of a bucket"
        return self._cold.reads.byte_range(entry, start=start, end=end, wait=wait)

    def manifest_version(self, version: int | None) -> Manifest:
        """The manifest in force, or that version. Raises UnknownManifestVersion."""
        return self._cold.reads.manifest_version(version)

    def manifest_entries(self, manifest: Manifest, *, from_offset: int) -> Iterator[SegmentEntry]:
        """As `cold_entries`, for any version of the manifest."""
        return self._cold.reads.manifest_entries(manifest, from_offset=from_offset)

    def manifest_history(self, *, after: int, limit: int) -> list[VersionStat]:
        """Versions above `after` that still exist, oldest first. One LIST."""
        return self._cold.reads.manifest_history(after=after, limit=limit)

    @property
    def pins(self) -> Pins | None:
        """Those of its manifests; None without a bucket."""
        return self._cold.pins

    def object_key(self, key: str) -> str:
        """The whole key of an object that the manifest names."""
        return self._cold.reads.object_key(key)

    def check_change(self, now: LogConfig, changed: LogConfig) -> None:
        """Refuse a setting that cannot apply while some segments are only in the bucket."""
        self._cold.check_change(
            now,
            changed,
            log_start_offset=self.log.log_start_offset,
            first_local_offset=self.log.first_local_offset,
        )

    def record_trim(self, before_offset: int) -> None:
        """Record, durably, a trim that is about to move the log start."""
        self._cold.record_trim(before_offset)

    def follow_log_start(self, log_start_offset: int) -> None:
        """Advance the log start in the bucket."""
        self._cold.follow_log_start(log_start_offset)

    def merge_manifest_pages(self) -> None:
        self._cold.merge_pages()

    def resolve_failed_commit(self) -> None:
        """Find out whether a failed commit has landed. Raises FencedError, StoreUnavailable."""
        self._cold.resolve_failed_commit()

    def offload_segment(self, files: SegmentFiles) -> SegmentEntry:
        """Upload one sealed segment, commit it, and read the commit back."""
        assert isinstance(self._cold, ColdLog), "there is no bucket to copy it to"
        return self._cold.offload(files)

    def replace_uploaded(self, old: Sequence[SegmentEntry], files: SegmentFiles) -> SegmentEntry:
        """Upload the segment that compaction made of `old`, and commit it in their place."""
        assert isinstance(self._cold, ColdLog), "there is no bucket to copy it to"
        return self._cold.replace_compacted(old, files)

    def garbage_plan(self, policy: GarbagePolicy) -> GarbagePlan | None:
        """What `collect_garbage` would delete now; None if there is no manifest."""
        return self._cold.garbage_plan(policy)

    def collect_garbage(self, policy: GarbagePolicy) -> int:
        """Delete the objects that no manifest version needs any more; the number deleted."""
        return self._cold.collect_garbage(policy)

    # --- writing ----------------------------------------------------------------------------------

    def append(
        self, batches: ProducedBatches, *, acks: Acks, expected_offset: int | None = None
    ) -> Future[AppendResult]:
        """Queue the batches for the next group commit; does not block.

        The future completes with the offsets once `acks` is met, or with an error. Raises what
        `check_writable` does.
        """
        self.check_writable()
        return self._commits.submit(Append(batches, expected_offset), acks=acks)

    def check_writable(self) -> None:
        """Raises UnknownTopic, FencedError, DiskFull, and LogOfflineError if the log is offline
        already.
        """
        self.check_leadership()
        self._check_room()
        self.log.raise_if_offline()

    def update_config(self, config: LogConfig) -> None:
        self.log.update_config(config)
        if self.log.high_watermark < self.log.log_end_offset:
            self._commits.request_flush()  # by the new `flush.ms`, it may be due

    def stop_appends(self, timeout_s: float) -> None:
        """Refuse new appends, and wait for the accepted ones, but no longer than this."""
        self._commits.close(timeout_s)

    # --- reading ----------------------------------------------------------------------------------
    # `read`, `offset_for_timestamp` and `max_timestamp` are `TieredReads`' own.

    def wait_beyond(self, offset: int, callback: Callable[[], None]) -> Callable[[], object]:
        """Call `callback` once, from any thread, when the high watermark is above `offset`, or the
        partition `is_defunct`.

        It is called at once if that is already so. Returns a function that cancels it; a cancelled
        callback may still be running.
        """
        cancel = self._waiters.add_waiter(offset, callback)
        # Checked after it was added, so that no advance is missed; and only for this offset,
        # because thousands may be waiting.
        if (offset < self.log.high_watermark or self.is_defunct) and cancel():
            callback()
        return cancel

    def retire(self) -> None:
        """The topic was deleted: refuse every call from now on, and wake all waiters."""
        self.is_deleted = True
        self._cold.retire()
        self.wake_all()

    def wake_all(self) -> None:
        """Wake all waiters, once the partition `is_defunct`."""
        self._waiters.wake(MAX_OFFSET)
