"""Looks after what is there: rolls by time, retention in both tiers, checkpoints, full disks.

* A local segment goes only below what the manifest in force covers, or below the durable log start,
  or where remote storage is off (DESIGN.md, invariant 1). That rule stands in one function:
  `removable_end`.
* The log start moves on disk first (checkpoint, fsync), then in the manifest, then files and
  objects go: a crash in between leaves something to delete again, never something that is missing.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable

import structlog

from broker.partition import Partition
from broker.retention import Limits, SegmentFacts, expired_end
from broker.settings import BrokerSettings
from record_format.errors import LogOfflineError, RetriableError, TierlogError

log = structlog.get_logger(__name__)


class Janitor:
    """`save_log_starts` makes all log starts durable; it is called before anything is deleted."""

    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        save_log_starts: Callable[[], None],
    ) -> None:
        self._partitions, self._settings, self._clock = partitions, settings, clock
        self._save_log_starts = save_log_starts

    def run_round(self) -> None:
        """One look at every partition; a partition that fails does not hold up the others."""
        for partition in list(self._partitions()):
            try:
                self.look_after(partition)
            except LogOfflineError:
                continue  # reported when it went offline; nothing can be done until restart
            except TierlogError as error:
                log.warning("retention waits", partition=str(partition), error=str(error))
        self._relieve_disk()

    def look_after(self, partition: Partition) -> None:
        """Roll what is due, apply both tiers' retention, unlink what was deleted a while ago."""
        if partition.leadership_lost:
            return
        partition.log.maybe_roll(self._clock())
        self._retain(partition)
        self._retain_local(partition)
        partition.log.reap(self._clock())

    def advance_log_start(self, partition: Partition, before_offset: int) -> int:
        """Trim: durable on disk when this returns, in the bucket as soon as the store is up."""
        start = partition.log.trim(before_offset)
        self._save_log_starts()
        if partition.cold is not None:
            try:
                partition.cold.trim(start)
            except RetriableError as error:
                log.warning(
                    "trim not in the bucket yet", partition=str(partition), error=str(error)
                )
        partition.log.delete_local(start)
        return start

    def _retain(self, partition: Partition) -> None:
        config = partition.log.config
        if not config.deletes:
            return
        limits = Limits(config.retention_ms, config.retention_bytes)
        segments = facts_of(partition)
        end = expired_end(segments, limits, now_ms=self._clock())
        if end is None:
            return
        if segments[-1].active and end == segments[-1].end_offset:
            partition.log.roll(reason="retention")
        start = min(end, partition.log.high_watermark)
        log.info("retention", partition=str(partition), log_start_offset=start)
        self.advance_log_start(partition, start)

    def _retain_local(self, partition: Partition) -> None:
        config = partition.log.config
        if config.compacts or partition.cold is None:
            return
        limits = Limits(config.effective_local_retention_ms, config.effective_local_retention_bytes)
        segments = [fact for fact in local_facts(partition) if not fact.active]
        active_bytes = partition.log.size_bytes - sum(fact.size_bytes for fact in segments)
        if limits.retention_bytes >= 0:  # the active segment counts, and stays
            limits = limits._replace(retention_bytes=max(0, limits.retention_bytes - active_bytes))
        end = expired_end(segments, limits, now_ms=self._clock())
        end = min(end or 0, removable_end(partition))
        if end > partition.log.local_log_start_offset:
            partition.log.delete_local(end)
            log.info("local segments let go", partition=str(partition), before_offset=end)

    def _relieve_disk(self) -> None:
        """Below the reserve the oldest covered segments go, whatever their retention."""
        reserve = self._settings.disk_reserve_bytes or 0
        while _free_bytes(self._settings) < reserve:
            freed = False
            for partition in list(self._partitions()):
                if partition.cold is None or partition.log.config.compacts:
                    continue
                oldest = next((f for f in local_facts(partition) if not f.active), None)
                if oldest and oldest.end_offset <= removable_end(partition):
                    partition.log.delete_local(oldest.end_offset)
                    partition.log.reap(self._clock(), at_once=True)
                    freed = True
            if not freed:
                return


def removable_end(partition: Partition) -> int:
    """Below this offset the disk may forget: the manifest in force has it, or the log start is
    above.
    """
    covered = partition.cold.end_offset if partition.cold is not None else 0
    return max(covered, partition.log.log_start_offset)


def local_facts(partition: Partition) -> list[SegmentFacts]:
    return [
        SegmentFacts(
            base_offset=segment.base_offset,
            end_offset=segment.last_offset + 1,
            size_bytes=segment.size_bytes,
            max_timestamp=segment.max_timestamp,
            active=segment.active,
        )
        for segment in partition.log.segments()
    ]


def facts_of(partition: Partition) -> list[SegmentFacts]:
    """Both tiers, oldest first: the cold ones below the local log start, then the local ones."""
    local = local_facts(partition)
    if partition.cold is None:
        return local
    local_start = local[0].base_offset if local else partition.log.log_end_offset
    cold = [
        SegmentFacts(
            base_offset=entry.base_offset,
            end_offset=entry.next_offset,
            size_bytes=entry.size_bytes,
            max_timestamp=entry.age_timestamp,
            active=False,
        )
        for entry in partition.cold.entries(partition.log.log_start_offset)
        if entry.base_offset < local_start
    ]
    return cold + local


def _free_bytes(settings: BrokerSettings) -> int:
    disk = os.statvfs(settings.data_dir)
    return disk.f_frsize * disk.f_bavail
