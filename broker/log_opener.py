"""Opens the logs of a data folder, each under a new leader epoch (`allocated_epochs`).

* What a checkpoint says was flushed, and what the bucket holds, was once in the log. A log that
  ends below that lost files, or is an older copy, and is refused (`_check_reaches`): continuing
  would assign offsets twice. So is one that a crash took as a whole (`_check_is_there`). If the
  bucket has all of it after a clean stop, it continues at the bucket's end.
* The log start is what the checkpoint says; for a log that is not in it, what the bucket says; and
  only for a log that is nowhere but here, where its first segment begins.
* Partitions that another folder owns are taken over at a start that is told to, before anything is
  served (`take_over`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import contextmanager, suppress

import structlog

from broker.bucket import Bucket
from broker.cold_log import ColdLog
from broker.damaged_partition import DamagedPartition, reason_of
from broker.data_folder import (
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
    format_topic_id_partition,
)
from broker.holes import lost_before
from broker.opened_log import OpenedLog
from broker.ownership.allocated_epochs import AllocatedEpochs
from broker.ownership.take_over import ATTEMPTS, PendingTakeOver, PendingTakeOvers, Reopen, TakeOver
from broker.partition import Partition
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRecord
from hot_tier import closed_log
from hot_tier.commit_times import CommitTimes
from hot_tier.disk import Disk
from hot_tier.durable_file import REAL_DISK
from hot_tier.file_names import LOG, path_of
from hot_tier.group_commit import FlushTimer, GroupCommit
from hot_tier.log import PartitionLog
from hot_tier.log_config import LogConfig
from hot_tier.log_folder import has_segments
from hot_tier.log_state import no_producer_snapshot
from hot_tier.open_files import OpenFiles
from record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    CorruptDataError,
    LogOfflineError,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

Wanted = tuple[TopicRecord, int]

_HOW_TO_GO_ON = (
    "`tierlog storage restore --tail` goes on above what may be lost, `tierlog storage repair` "
    "shows how to go on here"
)
OPENED_AT_ONCE = 8  # by threads of their own: appends do not wait for a thousand new partitions


class LogOpener:
    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        bucket: Bucket | None,
        executor: Executor,
        *,
        clock: Callable[[], int],
        check_room: Callable[[], None],
        disk: Disk = REAL_DISK,
    ) -> None:
        self._disk = disk
        self._folder, self._settings, self._bucket = folder, settings, bucket
        self._executor, self._clock = executor, clock
        self._check_room = check_room
        self._timer = FlushTimer()
        self._files = OpenFiles()
        self._recovery_points = folder.read_checkpoint(RECOVERY_POINTS)
        self._log_starts = folder.read_checkpoint(LOG_STARTS)
        self.epochs = AllocatedEpochs(folder)
        self.commit_times = CommitTimes()
        self._take_overs = PendingTakeOvers(folder)
        self._taken: list[str] = []

    def forget_checkpoints(self) -> None:
        """Rows that startup did not use belong to topics that are gone; a new one may get such a
        name.
        """
        self._recovery_points.clear()
        self._log_starts.clear()

    def forget_take_overs(self) -> None:
        """Those that are done, once the checkpoints are of the logs as they are now."""
        self._take_overs.remove(self._taken)
        self._taken.clear()

    def close_timer(self) -> None:
        self._timer.close()

    def open_partitions(
        self, wanted: Iterable[Wanted], *, at_start: bool = False
    ) -> list[Partition | DamagedPartition]:
        """Open or make them, side by side, and give each its epoch; in the order of `wanted`.

        At the start of a broker those of another owner are taken over, where that was told.
        A log that is there and cannot be opened is DamagedPartition; the others go on.
        """
        opened = self._open_side_by_side(wanted, at_start=at_start)
        whole = [one for one in opened if isinstance(one, OpenedLog)]
        with _closed_on_failure(whole):
            self.epochs.take(whole)
            self._take_over([one for one in whole if one.take_over is not None])
        return [
            one if isinstance(one, DamagedPartition) else self._partition(one) for one in opened
        ]

    def _open_side_by_side(
        self, wanted: Iterable[Wanted], *, at_start: bool
    ) -> list[OpenedLog | DamagedPartition]:
        with ThreadPoolExecutor(OPENED_AT_ONCE, thread_name_prefix="open") as threads:
            opening = [threads.submit(self._open, one, at_start=at_start) for one in wanted]
        with _closed_on_failure(one.result() for one in opening if one.exception() is None):
            return [one.result() for one in opening]

    def find_cold_log(self, record: TopicRecord, number: int) -> ColdLog | None:
        """That of a partition that is open without one, and may have one now."""
        cold = self._bucket.find_cold_log(record, number) if self._bucket is not None else None
        if cold is not None:
            self.epochs.prepare(cold, format_topic_id_partition(record.topic_id, number))
        return cold

    def reopen(
        self, record: TopicRecord, damaged: DamagedPartition, *, end_offset: int
    ) -> Partition | DamagedPartition:
        """Try again after a repair; what is at or above `end_offset` may be cut off."""
        place = (record.name, damaged.number)
        self._recovery_points[place] = min(damaged.recovery_point or 0, end_offset)
        if damaged.log_start_offset is not None:
            self._log_starts[place] = damaged.log_start_offset
        (opened,) = self.open_partitions([(record, damaged.number)])
        return opened

    def _partition(self, one: OpenedLog) -> Partition:
        commits = GroupCommit(one.log, self._executor, self._timer, times=self.commit_times)
        return Partition(one.log, commits, one.cold, check_room=self._check_room)

    def _open(self, wanted: Wanted, *, at_start: bool) -> OpenedLog | DamagedPartition:
        record, number = wanted
        place = (record.name, number)
        known = self._recovery_points.get(place), self._log_starts.get(place)
        is_new = not at_start and not self._folder.partition_folder(*place).exists()
        try:
            return self._open_whole(wanted, at_start=at_start)
        except (CorruptDataError, LogOfflineError, OSError) as error:
            name = f"{record.name}-{number}"
            if is_new or (reason := reason_of(error, name)) is None:
                raise
            log.error("partition is damaged", partition=name, error=str(reason))
            return DamagedPartition(*place, reason, *known)

    def _open_whole(self, wanted: Wanted, *, at_start: bool) -> OpenedLog:
        record, number = wanted
        config = LogConfig.parse(record.config)
        cold = self._bucket.find_cold_log(record, number) if self._bucket is not None else None
        cold_end = cold.end_offset if cold else 0
        place, name = (record.name, number), format_topic_id_partition(record.topic_id, number)
        checkpoint = flushed_end = self._recovery_points.pop(place, 0)
        # In the midst of a take-over files may have been cut since: everything is checked.
        recovery_point = 0 if self._take_overs.get(name) is not None else checkpoint
        log_start = self._log_start(place, cold)
        opened_before = False

        def open_log(border: int, log_start_at_least: int | None) -> PartitionLog:
            known = [one for one in (log_start, log_start_at_least) if one is not None]
            return PartitionLog.open(
                self._folder.partition_folder(*place),
                topic=record.name,
                partition=number,
                topic_id=record.topic_id,
                config=config,
                clock=self._clock,
                clean=self._folder.was_clean and not opened_before,
                recovery_point=min(recovery_point, border),
                flushed_end=min(flushed_end, border),
                log_start_offset=max(known, default=None),
                start_offset=cold_end,
                jitter_seed=name,
                disk=self._disk,
                open_files=self._files,
                fetch_producer_snapshot=cold.producers_before if cold else no_producer_snapshot,
            )

        take_over = self._take_over_of(
            wanted, cold, open_log, flushed_end=checkpoint, at_start=at_start
        )
        if take_over is None:
            flushed_end = max(checkpoint, cold_end)  # nothing goes up before it was flushed
            if at_start:
                self._check_is_there(wanted, reached=flushed_end, cold_end=cold_end)
        # Where an attempt died the first segment may begin past what the bucket holds.
        in_bucket = take_over.log_start_offset if take_over is not None else None
        opened = open_log(flushed_end, in_bucket if log_start is None else None)
        _tell_of_recovery(opened)
        opened_before = True
        if take_over is not None:
            return OpenedLog(take_over.align(opened), cold, take_over)
        if at_start:  # else it is new, or the loss was accepted
            self._check_reaches(opened, checkpoint, cold_end=cold_end)
        if opened.log_end_offset < cold_end:
            log.warning("log starts at the bucket's end", partition=str(opened), offset=cold_end)
            opened.truncate_fully_and_start_at(cold_end)
        self._step_over_lost(opened, cold)
        return OpenedLog(opened, cold, None)

    def _step_over_lost(self, opened: PartitionLog, cold: ColdLog | None) -> None:
        try:
            before = lost_before(opened, cold.manifest if cold else None)
            if before is None:
                return
            opened.delete_local(before)
        except (TierlogError, OSError) as error:  # a full disk, say; the janitor looks too
            log.error("a local segment is missing", partition=str(opened), error=str(error))
            return
        log.error(
            "a local segment is missing: the bucket is read instead",
            partition=str(opened),
            before_offset=before,
        )

    def _check_is_there(self, wanted: Wanted, *, reached: int, cold_end: int) -> None:
        """Raises CorruptBatch if a crash took a log as a whole: what it held above its last
        checkpoint and the bucket's end is not known, and its offsets would be given again.
        """
        record, number = wanted
        folder = self._folder.partition_folder(record.name, number)
        was_opened = bool(self.epochs.of(format_topic_id_partition(record.topic_id, number)))
        if self._folder.was_clean or not was_opened or has_segments(folder):
            return
        raise CorruptBatch(
            f"the log is gone: no segment is left, and it had reached offset {reached} or more "
            f"(the bucket ends at {cold_end}). {_HOW_TO_GO_ON}",
            file=str(path_of(folder, cold_end, LOG)),
            offset=cold_end,
        )

    def _check_reaches(self, opened: PartitionLog, checkpoint: int, *, cold_end: int) -> None:
        """Raises CorruptBatch if the log ends below what had been in it. After a clean stop,
        which says where it ended, it may where the bucket has all.
        """
        end, reached = opened.log_end_offset, max(checkpoint, cold_end)
        if end >= reached or (self._folder.was_clean and checkpoint == cold_end):
            return
        opened.close()
        raise CorruptBatch(
            f"the log ends here, but it had reached offset {reached} (the bucket ends at "
            f"{cold_end}): files are missing, or were cut, or the folder is an older copy. "
            f"{_HOW_TO_GO_ON}",
            file=str(path_of(opened.folder, opened.active_base_offset, LOG)),
            offset=end,
        )

    def _log_start(self, place: tuple[str, int], cold: ColdLog | None) -> int | None:
        checkpointed = self._log_starts.pop(place, None)
        in_bucket = cold.manifest.log_start_offset if cold and cold.manifest else None
        known = [start for start in (checkpointed, in_bucket) if start is not None]
        return max(known) if known else None

    # --- taking over ------------------------------------------------------------------------------

    def _take_over_of(
        self,
        wanted: Wanted,
        cold: ColdLog | None,
        reopen: Reopen,
        *,
        flushed_end: int,
        at_start: bool,
    ) -> TakeOver | None:
        """What is to be taken over: begun already, or another's and `--take-over` was given."""
        record, number = wanted
        name = format_topic_id_partition(record.topic_id, number)
        pending = self._take_overs.get(name)
        may_begin = at_start and self._settings.take_over and cold is not None
        if pending is None and not may_begin:
            return None
        if cold is None:
            raise ConfigurationError(
                f"{record.name}-{number} was restored from a bucket: start with that --store"
            )
        self._require_store(f"{record.name}-{number}")
        noted = pending or PendingTakeOver(gap=self._settings.restore_offset_gap)
        found = TakeOver(
            cold,
            noted,
            self.epochs.of(name),
            owner=self._folder.owner,
            flushed_end=flushed_end,
            reopen=reopen,
        )
        found.look()
        if pending is None:
            if not found.is_foreign:
                return None
            self._take_overs.add(name, noted)
        closed_log.finish_interrupted_split(self._folder.partition_folder(record.name, number))
        return found

    def _require_store(self, partition: str) -> None:
        assert self._bucket is not None, "a cold log is of a bucket"
        try:
            self._bucket.store_status.require_store()
        except StoreUnavailable as error:
            raise ConfigurationError(
                f"{partition}: a take-over begins with the bucket, which does not answer: {error}"
            ) from error

    def _take_over(self, opened: list[OpenedLog]) -> None:
        """Commit the claims; where another was faster, look again and go on from there."""
        names = [one.name for one in opened]
        for _ in range(ATTEMPTS):
            opened = [one for one in opened if not one.commit_take_over()]
            if not opened:
                self._taken += names
                return
            for one in opened:
                one.look_again()
            self.epochs.take(opened)
        raise ConfigurationError(
            f"{opened[0].log}: another broker goes on claiming it while it is taken over; stop that"
        )


def _tell_of_recovery(opened: PartitionLog) -> None:
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
def _closed_on_failure(opened: Iterable[OpenedLog | DamagedPartition]) -> Iterator[None]:
    """All of them go on, or none stays open."""
    try:
        yield
    except Exception:
        for one in opened:
            if isinstance(one, OpenedLog):
                with suppress(TierlogError):
                    one.log.close()
        raise
