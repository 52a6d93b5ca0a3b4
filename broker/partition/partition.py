"""A partition, which hides its tiers: what may be done with it, and who may.

* Reads are `TieredReads`' own: they take no lock, and wait for no write.
* Every write first asks whether this folder still owns the partition, and before it is answered
  again (`OwnerCheck`).
* Everything here may block except `append`, `offsets`, and what is given Wait.NEVER.
* Nobody outside is given a tier. What keeps both in order, `upkeep` and `compaction` do: for the
  background tasks and the repairs.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import structlog

from tierlog.broker.bucket.cold_log import ColdLog, EmptyColdTier
from tierlog.broker.partition.compaction import PartitionCompaction
from tierlog.broker.partition.tiered_reads import Read, ReportingDefunct, TieredReads
from tierlog.broker.partition.upkeep import PartitionUpkeep
from tierlog.broker.replication.waiters import Waiters
from tierlog.host.file_slice import FileSlice
from tierlog.host.waiting import Wait
from tierlog.hot_tier.group_commit import GroupCommit
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_state import Offsets
from tierlog.hot_tier.log_writer import Acks, Append, AppendResult
from tierlog.hot_tier.producer_state import Producer, Verify
from tierlog.hot_tier.sealed_segments import OpenedSegment, SegmentView
from tierlog.manifest.invariants import InvalidTransition
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest, OffsetGap
from tierlog.manifest.versions import VersionStat
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.decode import EndMarker
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    FencedError,
    LeaderChanged,
    LeaderUnknown,
    OffsetMismatch,
    OffsetTrimmed,
    StoreUnavailable,
    TierlogError,
    UnknownSegment,
    UnknownTopic,
    WatermarkUnknown,
)
from tierlog.record_format.produced import ProducedBatches
from tierlog.record_format.segment_entry import SegmentEntry

if TYPE_CHECKING:
    from tierlog.broker.replication.term import Term

log = structlog.get_logger(__name__)

MAX_OFFSET = 2**63 - 1


class EpochEnd(NamedTuple):
    """`end_offset`: the first that was not assigned under this leader epoch."""

    epoch: int
    end_offset: int


class Readable(Protocol):
    """What a read over HTTP needs of a partition: of one that this broker leads, or of what is in
    the bucket of another's (`broker.cluster.cold_partitions`).
    """

    topic: str
    number: int
    topic_id: str

    @property
    def is_end_known(self) -> bool:
        """Whether the log ends at `high_watermark`; else it ends there or above."""
        ...

    @property
    def high_watermark(self) -> int: ...
    @property
    def log_start_offset(self) -> int: ...
    @property
    def is_defunct(self) -> bool: ...
    def offsets(self) -> Offsets: ...
    def check_leadership(self) -> None: ...
    def check_exists(self) -> None: ...
    def reporting_defunct(self) -> ReportingDefunct: ...
    @property
    def read(self) -> Read: ...
    @property
    def offset_for_timestamp(self) -> Callable[[int], tuple[int, int] | None]: ...
    def led_here(self) -> Partition:
        """For who waits for more. Raises NotLeader, LeaderUnknown."""
        ...

    def open_local_segment(self, base_offset: int, wait: Wait, /) -> OpenedSegment | None: ...
    def find_cold_entry(self, offset: int, wait: Wait, /) -> SegmentEntry | None: ...
    def cold_bytes(
        self, entry: SegmentEntry, *, start: int, end: int, wait: Wait
    ) -> Iterator[FileSlice]: ...


class Partition:
    """One partition of the broker. Thread-safe. `commits` makes the queue of its appends; what it
    is given is called before they are answered.
    """

    is_end_known: Final = True

    def __init__(
        self,
        log: PartitionLog,
        cold: ColdLog | None,
        *,
        commits: Callable[[Callable[[], None]], GroupCommit],
        check_room: Callable[[], None],
    ) -> None:
        self._log, self.config = log, log.config
        self.topic, self.number, self.topic_id = log.topic, log.partition, log.topic_id
        self._cold: ColdLog | EmptyColdTier = cold or EmptyColdTier(str(self))
        self._reads = TieredReads(log, self._cold.reads, served=self)
        self.upkeep = PartitionUpkeep(log, self._cold)
        self.compaction = PartitionCompaction(log, self._cold)
        self.read, self.offset_for_timestamp = self._reads.read, self._reads.offset_for_timestamp
        self.max_timestamp, self.find_key = self._reads.max_timestamp, self._reads.find_key
        self._commits, self._check_room = commits(self._before_answers), check_room
        self._waiters = Waiters()
        self.term: Term | None = None  # of a replica that leads others
        self.on_claimed: Callable[[Manifest | None], None] = lambda _: None
        self.lasting = threading.RLock()  # held by what a hand-over has to wait for
        self._gone: Callable[[], TierlogError] | None = None
        log.writer.on_high_watermark.append(self._waiters.wake)

    def __str__(self) -> str:
        return f"{self.topic}-{self.number}"

    # --- offsets ----------------------------------------------------------------------------------

    def offsets(self) -> Offsets:
        return self._log.offsets

    @property
    def high_watermark(self) -> int:
        return self._log.high_watermark

    @property
    def flushed_end(self) -> int:
        """Everything below it is on the medium: the recovery point."""
        return self._log.flushed_end

    @property
    def log_start_offset(self) -> int:
        return self._log.log_start_offset

    @property
    def log_end_offset(self) -> int:
        return self._log.log_end_offset

    @property
    def first_local_offset(self) -> int:
        """Where the local segments begin; they may hold records below the log start."""
        return self._log.first_local_offset

    def is_at_end(self, offset: int) -> bool:
        """Whether nothing that may be read is at `offset`, but something will be."""
        return self._log.high_watermark <= offset <= self._log.log_end_offset

    def epochs(self) -> list[EpochEntry]:
        """Where each leader epoch began, in both tiers, oldest first; the last is the one in force,
        also before its first record.
        """
        now, local = self.offsets(), self._log.epochs
        oldest = local[0].epoch if local else now.leader_epoch
        manifest = self._cold.manifest
        begun = {} if manifest is None else {one.epoch: one.start_offset for one in manifest.epochs}
        found = [EpochEntry(*one) for one in begun.items() if one[0] < oldest]
        for epoch, start_offset in local:  # the first may have begun below the local log start
            found.append(EpochEntry(epoch, min(start_offset, begun.get(epoch, start_offset))))
        if not found or found[-1].epoch < now.leader_epoch:
            found.append(EpochEntry(now.leader_epoch, now.log_end_offset))
        return found

    def epochs_without_gap(self) -> list[EpochEntry]:
        """As `epochs`, from the first of those that are all known: what was trimmed and never
        uploaded may have had others.
        """
        found, local = self.epochs(), self._log.epochs
        first = local[0] if local else found[-1]
        if self.cold_end_offset >= first.start_offset:
            return found
        return [first, *(one for one in found if one.epoch > first.epoch)]

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
            return EpochEnd(epoch, self._log.log_end_offset)
        number = bisect_right([entry.epoch for entry in epochs], epoch)
        known = epochs[number - 1].epoch if number else epoch
        return EpochEnd(known, epochs[number].start_offset)

    @property
    def is_offline(self) -> bool:
        """Whether its disk failed: what was flushed is still read."""
        return self._log.offline

    @property
    def leadership_lost(self) -> str | None:
        """The reason why this folder may no longer serve the partition, or None."""
        return self._cold.leadership_lost

    @property
    def is_defunct(self) -> bool:
        """Whether no call is served any more: it `is_gone`, or leadership was lost."""
        return self.is_gone or self.leadership_lost is not None

    @property
    def is_gone(self) -> bool:
        """Whether it left this broker: its topic was deleted, or it was handed over."""
        return self._gone is not None

    @property
    def offloads(self) -> bool:
        """Whether sealed segments are copied to the bucket: not if remote storage was turned off
        after the partition was claimed there.
        """
        return self.has_bucket and self.config.remote_storage_enable

    def check_exists(self) -> None:
        """Raises UnknownTopic if the topic was deleted; NotLeader or LeaderUnknown if the partition
        was handed over.
        """
        if self._gone is not None:
            raise self._gone()

    def check_end_known(self) -> None:
        """Raises WatermarkUnknown: it leads since a moment ago, and what was committed before may
        reach further than is known (KIP-207).
        """
        if self.term is not None and not self.term.is_settled:
            raise WatermarkUnknown(f"{self}: its new leader does not know its end yet")

    def confirm_end(self, wait: Wait) -> None:
        """Returns once nothing is committed above the high watermark, as of now: whoever reads
        there may have heard of it from the next leader. Raises WatermarkUnknown, LeaderUnknown.
        """
        self.check_end_known()
        if self.term is not None:
            wait.before("its replicas say whether it still leads")
            self.term.confirm().result()

    def confirm_leads(self) -> Future[None]:
        """Completes once it is known that nobody else led when this was called, and that all is
        known that was committed before (H8); at once without replicas. Fails with LeaderUnknown.
        """
        if self.term is not None:
            return self.term.confirm()
        known: Future[None] = Future()
        known.set_result(None)
        return known

    def check_leadership(self) -> None:
        """Raises as `check_exists`; FencedError if another folder owns it, or LeaderUnknown if it
        has replicas.
        """
        self.check_exists()
        reason = self.leadership_lost
        if reason and self.term is not None:  # its set says who leads: it is asked in a moment
            raise LeaderUnknown(f"{self}: {reason}", retry_after_s=1)
        if reason:
            raise FencedError(f"leadership lost: {reason}")

    def look_for_owner(self, *, in_time: bool = False) -> None:
        """Check that no other folder became the owner; `in_time`: for no longer than an answer may
        wait. Raises FencedError, UnknownTopic, StoreUnavailable, and what a look at a damaged
        manifest raises.
        """
        try:
            self._cold.look_for_owner(log_end_offset=self._log.log_end_offset, in_time=in_time)
        finally:
            if self.leadership_lost:
                self.wake_all()

    def _before_answers(self) -> None:
        """Raises FencedError, UnknownTopic. A healthy owner only compares two clock values. What
        replicas have committed is theirs, whoever owns the manifest.
        """
        if self.term is not None or not self._cold.is_owner_look_due:
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
            log_start_offset=self._log.log_start_offset, log_end_offset=self._log.log_end_offset
        )
        if is_new:  # both may have been trimmed meanwhile, the bucket by a leader of before
            self._cold.follow_log_start(self._log.log_start_offset)
            self.on_claimed(self.manifest)

    def load_manifest(self) -> None:
        """Know the manifest in force. Raises StoreUnavailable, CorruptDataError, OSError."""
        if isinstance(self._cold, ColdLog) and (manifest := self._cold.load_newest()) is not None:
            self._cold.bucket_state.record_manifest(manifest)

    def check_claim(self) -> None:
        """Raise FencedError if a claim would. Changes nothing."""
        self._cold.check_claim(log_end_offset=self._log.log_end_offset)

    def reporting_defunct(self) -> ReportingDefunct:
        return ReportingDefunct(self)

    # --- local disk -------------------------------------------------------------------------------

    @property
    def folder(self) -> Path:
        return self._log.folder

    @property
    def size_bytes(self) -> int:
        """Of its local segments."""
        return self._log.size_bytes

    @property
    def appended_bytes(self) -> int:
        """Since the log was opened."""
        return self._log.appended_bytes

    @property
    def appended_records(self) -> int:
        """Since the log was opened."""
        return self._log.appended_records

    @property
    def cut_files(self) -> Sequence[Path]:
        """Where its start kept what it cut off after the last whole batch."""
        return self._log.recovery.cut_files

    def producers(self) -> list[Producer]:
        """The idempotent producers that are remembered. Takes the log's lock."""
        return self._log.producers()

    def local_segments(self) -> list[SegmentView]:
        """Those on local disk, oldest first; the last is active."""
        return self._log.segments()

    def counted(self, view: SegmentView) -> SegmentView:
        """As `view`, with what is not known without reading the segment; without it if the segment
        was deleted meanwhile, or is damaged.
        """
        found = view
        try:
            if view.record_count is None:
                found = view._replace(**self._log.segment_stats(view.base_offset)._asdict())
            if found.crc32c is None and not view.active:
                found = found._replace(crc32c=self._log.sealed.crc32c(view.base_offset))
        except (UnknownSegment, OffsetTrimmed, CorruptDataError):
            return view
        return found

    def open_local_segment(self, base_offset: int, wait: Wait) -> OpenedSegment | None:
        """A local segment's bytes, the active one's up to the high watermark; None if it is not on
        disk, or below the log start. Raises CorruptDataError, WouldBlock.
        """
        if base_offset == self._log.active_base_offset:
            wait.before("the active segment is opened")
            active = self._log.open_active(base_offset)
            if active is not None:
                return active
        if base_offset < self._log.first_local_offset:
            return None
        try:
            opened = self._log.sealed.open(base_offset, wait)
        except (UnknownSegment, OffsetTrimmed, FileNotFoundError):
            return None  # it left the disk
        if opened.next_offset > self._log.log_start_offset:
            return opened
        opened.close()
        return None

    # --- the bucket -------------------------------------------------------------------------------
    # Without one the cold tier is empty: `EmptyColdTier` says what that means for each of these.

    def use_bucket(self, cold: ColdLog | None) -> None:
        """Remote storage was turned on for a topic that had none."""
        if cold is not None:
            self._cold, self._reads.cold = cold, cold.reads
            self.upkeep = PartitionUpkeep(self._log, cold)
            self.compaction = PartitionCompaction(self._log, cold)

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
    def is_mirrored(self) -> bool:
        """Whether the bucket is known to reflect every segment that compaction replaced."""
        return self._log.sealed.mirrored

    @property
    def cold_size_bytes(self) -> int:
        return self._cold.size_bytes

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
            log_start_offset=self._log.log_start_offset,
            first_local_offset=self._log.first_local_offset,
        )

    # --- writing ----------------------------------------------------------------------------------

    def append(
        self,
        batches: ProducedBatches,
        *,
        acks: Acks,
        expected_offset: int | None = None,
        verify: Verify | None = None,
    ) -> Future[AppendResult]:
        """Queue the batches for the next group commit; does not block. `verify` is asked if they
        begin a transaction.

        The future completes with the offsets once `acks` is met, or with an error. Raises what
        `check_writable` does, and NotEnoughReplicas.
        """
        self.check_writable()
        term = self.term
        if term is not None and acks is Acks.ALL:
            term.check_enough()
        queued = self._commits.submit(Append(batches, expected_offset, verify=verify), acks=acks)
        if term is None or expected_offset is None:
            return queued
        return self._with_confirmed_mismatch(queued, term)

    def _with_confirmed_mismatch(
        self, queued: Future[AppendResult], term: Term
    ) -> Future[AppendResult]:
        """As `queued`; but it is refused for the log's end only if that is the end of whoever leads
        (H8), and committed. Otherwise LeaderUnknown.
        """
        answered: Future[AppendResult] = Future()
        answered.set_running_or_notify_cancel()

        def answer(queued: Future[AppendResult]) -> None:
            refusal = queued.exception()
            if refusal is None:
                answered.set_result(queued.result())
            elif isinstance(refusal, OffsetMismatch):
                self._commits.request_flush()  # of what acks=1 has not, or nothing of it is told
                confirmed = term.confirm(up_to=refusal.log_end_offset)
                confirmed.add_done_callback(
                    lambda one: answered.set_exception(one.exception() or refusal)
                )
            else:
                answered.set_exception(refusal)

        queued.add_done_callback(answer)
        return answered

    def append_marker(self, batches: ProducedBatches, marker: EndMarker) -> Future[AppendResult]:
        """Queue the end of a producer's transaction, which `batches` holds; as `append`, with
        acks=all.
        """
        self.check_writable()
        return self._commits.submit(Append(batches, marker=marker), acks=Acks.ALL)

    def check_writable(self) -> None:
        """Raises UnknownTopic, FencedError, DiskFull, and LogOfflineError if the log is offline
        already.
        """
        self.check_leadership()
        self._check_room()
        self._log.raise_if_offline()

    def update_config(self, config: LogConfig) -> None:
        self._log.update_config(config)
        self._cold.filters_keys = config.key_filter
        self.config = config
        if self._log.flushed_end < self._log.log_end_offset:
            self._commits.request_flush()  # by the new `flush.ms`, it may be due

    def stop_appends(self, timeout_s: float) -> None:
        """Refuse new appends for good, and wait for the accepted ones, but no longer than this."""
        if self.term is not None:  # nobody fetches any more, and then nothing is committed
            self.fail_appends(lambda: LeaderChanged(f"{self}: the broker is shutting down"))
        self._commits.close(timeout_s)

    def refuse_appends(self, refusal: Callable[[], TierlogError], *, timeout_s: float) -> bool:
        """Refuse new appends with this error; whether the accepted ones are complete, for which it
        waits no longer than this.
        """
        return self._commits.refuse(refusal, timeout_s=timeout_s)

    def fail_appends(self, error: Callable[[], TierlogError]) -> None:
        """It leads no longer: fail what is not acknowledged yet. It may be there all the same."""
        self._commits.fail_parked(error)

    def give_up_waiting(self, error: Callable[[], TierlogError]) -> None:
        """Fail what is flushed here and waits for replicas that are gone."""
        self._commits.give_up_parked(error)

    def accept_appends(self) -> None:
        self._commits.accept()

    def assign_to(self, folder: str) -> None:
        """Let only this data folder claim the partition. Call it once nothing is appended any more;
        repeat it, or find out whether it took effect, until it does not fail. Raises
        InvalidTransition unless the bucket has all records; FencedError, StoreUnavailable,
        OutcomeUnknownError.
        """
        assert isinstance(self._cold, ColdLog), "a partition without a bucket stays where it is"
        with self.upkeep.files_held():  # no compaction changes what the bucket has to mirror
            if not self.is_mirrored:
                raise InvalidTransition(f"{self}: the bucket does not mirror compaction yet")
            self._cold.follow_log_start(self._log.log_start_offset)
            self._cold.assign_to(folder, log_end_offset=self._log.log_end_offset)

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
        if (offset < self._log.high_watermark or self.is_defunct) and cancel():
            callback()
        return cancel

    def led_here(self) -> Partition:
        return self

    def retire(self, gone: Callable[[], TierlogError] | None = None) -> None:
        """The topic was deleted, or, with `gone`, the partition handed over: refuse every call from
        now on, and wake all waiters.
        """
        self._gone = gone or (lambda: UnknownTopic(self.topic))
        self._log.writer.on_high_watermark.remove(self._waiters.wake)
        self._cold.retire()
        self.wake_all()

    def wait_for_trim(self, *, timeout_s: float) -> None:
        """Wait until no replica that may lead next returns a record below the log start. Raises
        NotEnoughReplicas: it is trimmed here, and perhaps not everywhere.
        """
        if self.term is not None:
            self.term.wait_for_trim(timeout_s=timeout_s)

    def wake_all(self) -> None:
        """Wake all waiters, once the partition `is_defunct`."""
        self._waiters.wake(MAX_OFFSET)
