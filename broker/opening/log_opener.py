"""Opens the logs of a data folder, each under a new leader epoch (`AllocatedEpochs`).

* Whatever a checkpoint says was flushed, and whatever the bucket holds, was once in the log. A log
  that ends below that lost files or is an older copy, and is refused (`_check_reaches`): continuing
  would assign offsets twice. A log that a crash removed entirely is refused too (`_check_exists`).
  After a clean stop, if the bucket has everything, the log continues at the bucket's end.
* The log start comes from the checkpoint; without one, from the bucket; and for a log that exists
  only here, from its first segment.
* Partitions that another folder owns are taken over only at a start with `--take-over`, before
  anything is served (`take_over`).
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import wait
from contextlib import contextmanager
from enum import Enum, auto

import structlog

from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.data_folder.data_folder import (
    DataFolder,
    format_topic_id_partition,
    with_suffix,
)
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.opening.opened_log import AllocatedEpochs, LogSpec, OpenedLog, Wanted
from tierlog.broker.opening.take_over import ATTEMPTS, PendingTakeOver, PendingTakeOvers, TakeOver
from tierlog.broker.partition.damaged_partition import DamagedPartition, reason_of
from tierlog.broker.partition.holes import lost_before
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.host.disk import Disk, is_disk_full
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.threads import Threads
from tierlog.hot_tier import closed_log
from tierlog.hot_tier.group_commit import CommitTimes, FlushTimer, GroupCommit
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_folder import LOG, has_segments, path_of
from tierlog.hot_tier.open_files import OpenFiles
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.manifest.state import EpochStart
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    CorruptDataError,
    DiskFull,
    LogOfflineError,
    MissingObject,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

_HOW_TO_CONTINUE = (
    "`tierlog storage restore --tail` continues above what may be lost; `tierlog storage repair` "
    "shows how to continue with this folder"
)


class Assignment(Enum):
    """Who may claim a partition of the cluster: nobody yet, another folder, or this one, to which
    it was assigned, or from which it was not taken after all.
    """

    NONE = auto()
    ELSEWHERE = auto()
    HERE = auto()
    STILL_HERE = auto()

    @property
    def is_here(self) -> bool:
        return self in (Assignment.HERE, Assignment.STILL_HERE)


OPEN_THREADS = 8  # a pool of its own: appends do not wait for a thousand new partitions


class LogOpener:
    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        bucket: Bucket | None,
        start: Callable[[Callable[[], None]], object],
        *,
        clock: Callable[[], int],
        check_room: Callable[[], None],
        disk: Disk = REAL_DISK,
    ) -> None:
        self._disk = disk
        self._folder, self._settings, self._bucket = folder, settings, bucket
        self._start, self._clock = start, clock
        self._check_reserve = check_room
        self._without_epoch: list[OpenedLog] = []
        self._files = OpenFiles()
        self.epochs = AllocatedEpochs(folder)
        self.commit_times = CommitTimes()
        self._take_overs = PendingTakeOvers(folder)
        self._timer = FlushTimer()  # last: it starts a thread
        self._committed_take_overs: list[str] = []
        self.has_opened_logs = False

    @property
    def has_taken_over(self) -> bool:
        return bool(self._committed_take_overs)

    def forget_take_overs(self) -> None:
        """Drop the completed take-overs, once the checkpoints describe the logs as they now are."""
        self._take_overs.remove(self._committed_take_overs)
        self._committed_take_overs.clear()

    def forget_topics_but(self, topic_ids: Collection[str]) -> None:
        """Forget the epochs and take-overs of topics that no longer exist."""
        self.epochs.forget_all_but(topic_ids)
        self._take_overs.forget_all_but(topic_ids)

    def call_after(self, delay_ms: int, callback: Callable[[], None]) -> None:
        """By the broker's one timer. `callback` must be quick."""
        self._timer.call_after(delay_ms, callback)

    def close_timer(self) -> None:
        self._timer.close()

    def open_partitions(self, wanted: Sequence[Wanted]) -> list[Partition | DamagedPartition]:
        """Open or create the logs in parallel and allocate an epoch to each; in the order of
        `wanted`.

        At the start of a broker, partitions of another owner are taken over if `--take-over` was
        given. An existing log that cannot be opened yields a DamagedPartition; the others proceed.
        """
        self.has_opened_logs = True
        opened = self._open_in_parallel(wanted)
        sound = [one for one in opened if isinstance(one, OpenedLog)]
        with _abandoned_on_failure(sound):
            self._allocate_epochs(sound, at_start=all(one.at_start for one in wanted))
            self._commit_take_overs([one for one in sound if one.take_over is not None])
        return [
            one if isinstance(one, DamagedPartition) else self._partition(one) for one in opened
        ]

    def _allocate_epochs(self, opened: list[OpenedLog], *, at_start: bool) -> None:
        """At a start on a full disk the logs are served for reading until there is room."""
        try:
            self.epochs.allocate(opened)
        except OSError as error:
            takes_over = any(one.take_over is not None for one in opened)
            if takes_over or not (at_start and is_disk_full(error)):
                raise
            log.error("no room to record epochs: writes are refused", error=str(error))
            self._without_epoch = opened

    def allocate_waiting_epochs(self) -> None:
        """Try again once there may be room. Raises OSError."""
        if self._without_epoch:
            self.epochs.allocate(self._without_epoch)
            self._without_epoch = []

    def _check_room(self) -> None:
        """Raises DiskFull."""
        self._check_reserve()
        if self._without_epoch:
            raise DiskFull("there is no room to record the epoch of new records", retry_after_s=2)

    def _open_in_parallel(self, wanted: Sequence[Wanted]) -> list[OpenedLog | DamagedPartition]:
        count = max(1, min(OPEN_THREADS, len(wanted)))
        with Threads(count, name="open") as threads:
            try:
                opening = [threads.submit(self._open, one) for one in wanted]
                wait(opening)
            except BaseException:  # a signal: open no more
                threads.shutdown(cancel_futures=True)
                raise
        with _abandoned_on_failure(one.result() for one in opening if one.exception() is None):
            return [one.result() for one in opening]

    def find_cold_log(self, record: TopicRecord, number: int) -> ColdLog | None:
        """The cold log of an open partition that had none and may have one now, ready to claim."""
        cold = self._cold_log(record, number)
        if cold is not None:
            self.epochs.prepare(cold, format_topic_id_partition(record.topic_id, number))
        return cold

    def open_replica(self, wanted: Wanted) -> OpenedLog | DamagedPartition:
        """Open or create the log of a replica, whose epochs are its leader's. Raises what creating
        one does.
        """
        self.has_opened_logs = True
        return self._open(wanted._replace(is_replica=True))

    def replicate(self, partition: Partition, record: TopicRecord) -> OpenedLog:
        """The log of a partition that this folder had alone, and that is served no more: from now
        on it is a replica's, and all that it has is committed. Raises LogOfflineError.
        """
        opened = partition.upkeep.release_log()
        opened.writer.flush()
        opened.replicate(opened.flushed_end)
        return OpenedLog(opened, self._cold_log(record, partition.number), None)

    def lead(self, log: PartitionLog, record: TopicRecord, *, epoch: int) -> Partition:
        """What serves a replica's log from now on: it is elected to lead under this epoch."""
        cold = self._cold_log(record, log.partition)
        if cold is not None:
            owner = self._folder.owner
            begun = [EpochStart(one.epoch, one.start_offset, owner) for one in log.epochs]
            kept = tuple(one for one in begun if one.epoch < epoch)
            now = EpochStart(epoch, log.log_end_offset, owner)
            cold.ownership.prepare(owner, (*kept, now), take_over=False, elected=True)
        return self._partition(OpenedLog(log, cold, None))

    def find_assignment(self, record: TopicRecord, number: int) -> Assignment:
        """Whether this folder may claim a partition of the cluster, by the manifest in force, which
        is recorded if it may. Raises StoreUnavailable, CorruptDataError.
        """
        cold = self._cold_log(record, number)
        manifest = cold.load_newest() if cold is not None else None
        if cold is None or manifest is None:
            return Assignment.NONE
        if manifest.assigned_to != self._folder.owner and (
            manifest.assigned_to or not cold.bucket_state.knows(manifest)
        ):
            return Assignment.ELSEWHERE
        cold.bucket_state.record_manifest(manifest)
        return Assignment.HERE if manifest.assigned_to else Assignment.STILL_HERE

    def remove_files(self, record: TopicRecord, number: int) -> None:
        """Of a partition that another broker of the cluster has now. Raises OSError."""
        path = self._folder.partition_folder(record.name, number)
        if path.exists():
            gone = with_suffix(path, f".{record.topic_id}-delete")
            path.rename(gone)
            REAL_DISK.sync_folder(self._folder.path)
            shutil.rmtree(gone)

    def forget_recorded(self, record: TopicRecord, number: int) -> None:
        """Forget what the folder recorded of a partition that it does not have any more."""
        assert self._bucket is not None, "a partition without a bucket stays where it is"
        self._bucket.forget_partition(record, number)

    def reopen(
        self, record: TopicRecord, damaged: DamagedPartition, *, end_offset: int, cuts: bool
    ) -> Partition | DamagedPartition:
        """Try again after a repair. What is at or above `end_offset` may be truncated, if the
        repair cuts also whole batches.
        """
        wanted = Wanted(
            record,
            damaged.number,
            recovery_point=min(damaged.recovery_point or 0, end_offset),
            log_start_offset=damaged.log_start_offset,
            flushed_end=end_offset,
            may_cut_from=end_offset if cuts else None,
        )
        return self.open_partitions([wanted])[0]

    def _cold_log(self, record: TopicRecord, number: int) -> ColdLog | None:
        return self._bucket.find_cold_log(record, number) if self._bucket is not None else None

    def _partition(self, one: OpenedLog) -> Partition:
        def commits(before_answers: Callable[[], None]) -> GroupCommit:
            return GroupCommit(
                one.log.writer,
                self._start,
                self._timer,
                times=self.commit_times,
                before_answers=before_answers,
            )

        return Partition(one.log, one.cold, commits=commits, check_room=self._check_room)

    def _open(self, wanted: Wanted) -> OpenedLog | DamagedPartition:
        place = (wanted.record.name, wanted.number)
        is_new = not wanted.at_start and not self._folder.partition_folder(*place).exists()
        try:
            spec = self._spec(wanted)
            _check_explained(spec)
            take_over = self._find_take_over(spec)
            if take_over is not None:
                return self._open_for_take_over(spec, take_over)
            return OpenedLog(self._open_own(spec), spec.cold, None)
        except (CorruptDataError, LogOfflineError, OSError) as error:
            name = f"{wanted.record.name}-{wanted.number}"
            if is_new or (reason := reason_of(error, name)) is None:
                raise
            log.error("partition is damaged", partition=name, error=str(reason))
            return DamagedPartition(*place, reason, wanted.recovery_point, wanted.log_start_offset)

    def _spec(self, wanted: Wanted) -> LogSpec:
        record, number, checkpoint = wanted.record, wanted.number, wanted.recovery_point or 0
        cold = self._cold_log(record, number)
        manifest = cold.manifest if cold is not None else None
        starts = (wanted.log_start_offset, manifest.log_start_offset if manifest else None)
        cold_end, flushed_end = cold.end_offset if cold else 0, wanted.flushed_end
        if flushed_end is None and wanted.is_replica:
            flushed_end = checkpoint  # what the bucket has may be of a leader that it follows
        if flushed_end is None:
            # The bucket's end was flushed as well: nothing is uploaded before it is flushed.
            flushed_end = max(checkpoint, cold_end)
        # During a take-over, files may have been cut since the checkpoint: everything is checked.
        name = format_topic_id_partition(record.topic_id, number)
        is_taken_over = self._take_overs.get(name) is not None
        return LogSpec(
            folder=self._folder.partition_folder(record.name, number),
            record=record,
            number=number,
            at_start=wanted.at_start,
            is_replica=wanted.is_replica,
            cold=cold,
            checkpoint=checkpoint,
            request=OpenRequest(
                clean=self._folder.was_clean,
                recovery_point=0 if is_taken_over else checkpoint,
                flushed_end=flushed_end,
                log_start_offset=max((at for at in starts if at is not None), default=None),
                start_offset=cold_end,
                may_cut_from=wanted.may_cut_from,
            ),
            clock=self._clock,
            disk=self._disk,
            open_files=self._files,
        )

    def _open_own(self, spec: LogSpec) -> PartitionLog:
        """Open a log of which this folder is the owner, or is to become the first."""
        if spec.at_start:
            self._check_exists(spec)
        opened = spec.open()
        _log_recovery(opened)
        if spec.at_start:  # otherwise the log is new, or its loss was accepted
            _check_reaches(opened, spec)
        if opened.log_end_offset < spec.cold_end:
            log.warning(
                "log starts at the bucket's end", partition=str(opened), offset=spec.cold_end
            )
            producers = spec.cold.reads.producers_before(spec.cold_end) if spec.cold else None
            opened.truncate_fully_and_start_at(spec.cold_end, producers)
        _skip_missing_segment(opened, spec.cold)
        return opened

    def _check_exists(self, spec: LogSpec) -> None:
        """Raises CorruptBatch if a crash removed the whole log: what it held above its last
        checkpoint and the bucket's end is unknown, and its offsets would be assigned again.
        """
        was_opened = bool(self.epochs.of(spec.name))
        if spec.request.clean or not was_opened or has_segments(spec.folder):
            return
        reached = max(spec.checkpoint, spec.cold_end)
        raise CorruptBatch(
            f"the log is gone: no segment is left, and it had reached offset {reached} or more "
            f"(the bucket ends at {spec.cold_end}). {_HOW_TO_CONTINUE}",
            file=str(path_of(spec.folder, spec.cold_end, LOG)),
            offset=spec.cold_end,
        )

    # --- taking over ------------------------------------------------------------------------------

    def _find_take_over(self, spec: LogSpec) -> TakeOver | None:
        """The take-over that was begun earlier, or that `--take-over` asks for, if any."""
        cold, pending = spec.cold, self._take_overs.get(spec.name)
        may_begin = spec.at_start and self._settings.take_over and cold is not None
        may_begin = may_begin and not spec.is_replica
        if pending is None and not may_begin:
            return None
        if cold is None:
            raise ConfigurationError(
                f"{spec} was restored from a bucket: start with that bucket as --store"
            )
        self._require_store(spec)
        wanted = pending or PendingTakeOver(gap=self._settings.restore_offset_gap)
        take_over = TakeOver(
            cold,
            wanted,
            self.epochs.of(spec.name),
            owner=self._folder.owner,
            flushed_end=spec.checkpoint,
            reopen=spec.reopen,
        )
        try:
            take_over.reload()
        except MissingObject:
            if pending is not None or cold.has_manifest():
                raise
            return None  # nothing is left, as after a deletion of the topic: nobody owns it
        if pending is None:
            if not (take_over.is_foreign or take_over.is_of_a_copy):
                return None
            self._take_overs.add_pending(spec.name, wanted)
        closed_log.finish_interrupted_split(spec.folder)
        return take_over

    def _open_for_take_over(self, spec: LogSpec, take_over: TakeOver) -> OpenedLog:
        opened = spec.open_for_take_over(take_over.log_start_offset)
        _log_recovery(opened)
        return OpenedLog(take_over.align(opened), spec.cold, take_over)

    def _require_store(self, spec: LogSpec) -> None:
        assert self._bucket is not None, "a cold log belongs to a bucket"
        try:
            self._bucket.store_status.require_store()
        except StoreUnavailable as error:
            raise ConfigurationError(
                f"{spec}: a take-over needs the bucket, which does not respond: {error}"
            ) from error

    def _commit_take_overs(self, opened: list[OpenedLog]) -> None:
        """Commit the claims; where another owner was faster, reload its manifest and retry."""
        names = [one.name for one in opened]
        for _ in range(ATTEMPTS):
            opened = [one for one in opened if not one.commit_take_over()]
            if not opened:
                self._committed_take_overs += names
                return
            for one in opened:
                one.reload_manifest()
            self.epochs.allocate(opened)
        raise ConfigurationError(
            f"{opened[0].log}: another broker keeps claiming it during the take-over; stop that "
            "broker"
        )


def _check_explained(spec: LogSpec) -> None:
    """Raises CorruptBatch for a log of Kafka's whose gaps recovery would take for lost tails."""
    if spec.number in spec.record.unclean:
        raise CorruptBatch(
            "Kafka was not shut down cleanly, and the log has gaps, or may have, that only its "
            "clean shutdown or its checkpoints explain: start and stop Kafka on the data folder, "
            "with `tierlog/` moved elsewhere meanwhile, or copy all that Kafka has there",
            file=str(spec.folder),
        )


def _check_reaches(opened: PartitionLog, spec: LogSpec) -> None:
    """Raises CorruptBatch if the log ends below what it had held. After a clean stop, which
    recorded where the log ended, it may, if the bucket has everything.
    """
    end, reached = opened.log_end_offset, spec.checkpoint
    reached = reached if spec.is_replica else max(reached, spec.cold_end)
    if end >= reached or (spec.request.clean and spec.checkpoint == spec.cold_end):
        return
    opened.close()
    raise CorruptBatch(
        f"the log ends here, but it had reached offset {reached} (the bucket ends at "
        f"{spec.cold_end}): files are missing or were cut, or the folder is an older copy. "
        f"{_HOW_TO_CONTINUE}",
        file=str(path_of(opened.folder, opened.active_base_offset, LOG)),
        offset=end,
    )


def _skip_missing_segment(opened: PartitionLog, cold: ColdLog | None) -> None:
    """Read from the bucket up to a local segment whose file is missing."""
    try:
        before = lost_before(opened, cold.manifest if cold else None)
        if before is None:
            return
        opened.delete_local(before)
    except (TierlogError, OSError) as error:  # a full disk, for example; the janitor tries again
        log.error("a local segment is missing", partition=str(opened), error=str(error))
        return
    log.error(
        "a local segment is missing: the bucket is read instead",
        partition=str(opened),
        before_offset=before,
    )


def _log_recovery(opened: PartitionLog) -> None:
    report = opened.recovery
    if report.checked_bytes:
        log.info(
            "log recovered",
            partition=str(opened),
            checked_bytes=report.checked_bytes,
            rewritten_bytes=report.rewritten_bytes,
        )
    if report.truncate_reason:
        log.warning(
            "log was cut",
            partition=str(opened),
            file=report.truncated_file,
            position=report.truncated_position,
            cut_bytes=report.truncated_bytes,
            removed_segments=report.removed_segments,
            reason=report.truncate_reason,
        )


@contextmanager
def _abandoned_on_failure(opened: Iterable[OpenedLog | DamagedPartition]) -> Iterator[None]:
    """Close every log, without a flush, if one fails."""
    try:
        yield
    except Exception:
        for one in opened:
            if isinstance(one, OpenedLog):
                one.log.abandon()
        raise
