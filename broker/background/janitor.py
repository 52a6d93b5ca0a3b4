"""Maintains partitions: retention in both tiers, trims, rolls by time, room on a full disk.

* A local segment is deleted only if the manifest in force covers it, if it is below the durable log
  start, or if remote storage is off (DESIGN.md, invariant 1). That rule is in one function:
  `removable_end`.
* The log start moves on disk first (checkpoint, fsync), then in the manifest, then files and
  objects are deleted: a crash in between leaves something to delete, never something missing.
* Nothing expires by age while the store refuses this machine's clock. Without a store, or if it
  does not refuse, the clock is trusted.
* Work that may contact the store has its own rounds, so that a hanging store does not stop work on
  the disk. A store known to be unreachable is not contacted, because each partition would wait for
  it: the log start moves on disk, and the bucket follows later.
* A trim is committed in the bucket in a thread of its own, and waited for only as long as a client
  would (`BucketTrims`). What it then fails to do, a later round makes up for.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from functools import partial
from itertools import chain
from typing import Final
from weakref import WeakKeyDictionary

import structlog

from tierlog.broker.background.retention import (
    UNLIMITED,
    Limits,
    cold_facts,
    expired_end,
    local_facts,
    total_bytes,
)
from tierlog.broker.background.task_failures import PartitionTask, TaskFailures
from tierlog.broker.partition.holes import Holes
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topics import Topic
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.host.threads import Threads
from tierlog.manifest.garbage import GarbagePlan, GarbagePolicy
from tierlog.record_format.errors import (
    ConfigurationError,
    DiskFull,
    LogOfflineError,
    OutcomeUnknownError,
    RetriableError,
    ShuttingDown,
    StoreUnavailable,
    TierlogError,
    UnknownTopic,
)

log = structlog.get_logger(__name__)

MIN_COLLECT_MS = 60_000


class Janitor:
    def __init__(
        self,
        topics: LiveTopics,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        holes: Holes,
        failures: TaskFailures,
    ) -> None:
        self._topics, self._settings, self._clock = topics, settings, clock
        self._holes, self._failures = holes, failures
        self.policy = GarbagePolicy(
            grace_ms=settings.gc_grace_ms, keep_min=settings.manifest_versions_min
        )
        self._stopping = threading.Event()
        self._trims = BucketTrims()
        self._collected_ms: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()  # last attempt

    def stop(self) -> None:
        """End the round in progress after its current partition."""
        self._stopping.set()

    def close(self) -> None:
        """As `stop`, and wait for trims that are being committed."""
        self.stop()
        self._trims.close()

    def disk_round(self) -> None:
        """Work that never contacts the store. A partition that fails does not delay the others."""
        self._for_each_partition("disk-retention", self._maintain_disk)
        self._for_each_partition("hole-check", self._holes.check_next)

    def bucket_round(self) -> None:
        """Work that may contact the store, and may hang there."""
        self._for_each_partition("bucket-retention", self._maintain_bucket)
        for partition in list(self._topics.partitions()):
            if not self._stopping.is_set():
                self._maybe_collect(partition)

    def _for_each_partition(
        self, task: PartitionTask, maintain: Callable[[Partition], None]
    ) -> None:
        for partition in list(self._topics.partitions()):
            if self._stopping.is_set():
                return
            try:
                with self._failures.noting(task, partition):
                    maintain(partition)
            except (LogOfflineError, UnknownTopic):
                continue  # offline until a restart, and reported as such; or deleted meanwhile
            except (TierlogError, OSError) as error:
                log.warning(
                    "retention failed, will retry", partition=str(partition), error=str(error)
                )
            except Exception:
                log.exception("retention failed: a bug", partition=str(partition))

    def maintain(self, partition: Partition) -> None:
        """Apply the retention of both tiers, unlink deleted files after their delay, roll if due,
        and merge manifest pages.
        """
        self._maintain_disk(partition)
        self._maintain_bucket(partition)

    def _maintain_disk(self, partition: Partition) -> None:
        if partition.is_defunct:
            return
        partition.upkeep.delete_below_log_start()
        self._apply_local_retention(partition)
        self._reap(partition)
        partition.upkeep.expire_producers(idle_ms=self._settings.producer_id_expiration_ms)
        if not partition.has_bucket:
            self._apply_retention(partition)
        partition.upkeep.maybe_roll()  # last: a full disk may refuse it until the above made room

    def _maintain_bucket(self, partition: Partition) -> None:
        if partition.is_defunct or not partition.has_bucket:
            return
        if not partition.is_store_reachable:
            self._apply_retention(partition)
            return
        partition.upkeep.follow_log_start()
        self._apply_retention(partition)
        partition.upkeep.merge_manifest_pages()  # last: its failure must not delay retention

    def _reap(self, partition: Partition) -> None:
        """Unlink deleted files; a failure does not stop the other work."""
        try:
            partition.upkeep.reap()
        except OSError as error:
            log.warning("deleted files not unlinked", partition=str(partition), error=str(error))

    def trim_partition(self, partition: Partition, before_offset: int) -> int:
        """Advance the log start: durable when this returns, also in the bucket if it is fast."""
        partition.upkeep.record_trim(before_offset)
        in_bucket = partial(self._trims.commit_trim, partition) if partition.has_bucket else None
        return self._advance(partition, before_offset, in_bucket=in_bucket)

    def _advance(
        self, partition: Partition, before_offset: int, *, in_bucket: Callable[[], None] | None
    ) -> int:
        start = self._topics.checkpoints.move_log_start(
            partition, before_offset, move=partition.upkeep.move_log_start
        )
        if in_bucket is not None:
            try:
                in_bucket()
            except (RetriableError, OutcomeUnknownError) as error:
                log.warning("log start not committed", partition=str(partition), error=str(error))
        partition.upkeep.delete_local(start)
        return start

    def _maybe_collect(self, partition: Partition) -> None:
        """Collect garbage in the bucket, rarely: listing a partition's objects costs requests."""
        now_ms = self._clock()
        last_ms = self._collected_ms.setdefault(partition, now_ms)
        # Due also after the clock was set back.
        is_due = not 0 <= now_ms - last_ms < self._collect_every_ms(partition)
        if partition.is_defunct or not is_due or not partition.is_store_reachable:
            return
        self._collected_ms[partition] = now_ms
        try:
            with self._failures.noting("garbage-collection", partition):
                gone = partition.upkeep.collect_garbage(self.policy)
        except UnknownTopic:
            return  # deleted meanwhile
        except (TierlogError, OSError) as error:
            log.warning(
                "garbage collection failed, will retry",
                partition=str(partition),
                error=str(error),
            )
            return
        except Exception:
            log.exception("garbage collection failed: a bug", partition=str(partition))
            return
        if gone:
            log.info("garbage collected", partition=str(partition), objects=gone)

    def collect_topic(self, topic: Topic, *, apply: bool) -> dict[int, GarbagePlan]:
        """Each partition's garbage; with `apply` it is deleted. Raises FencedError."""
        plans: dict[int, GarbagePlan] = {}
        refused = DeferredErrors(ConfigurationError)  # for objects that may not be deleted
        for number, partition in topic.partitions.items():
            if not partition.has_bucket:
                continue
            partition.claim() if apply else partition.check_claim()
            if (plan := partition.upkeep.garbage_plan(self.policy)) is not None:
                plans[number] = plan
            if apply:
                with refused:
                    partition.upkeep.collect_garbage(self.policy)
        refused.raise_first()
        return plans

    def _collect_every_ms(self, partition: Partition) -> int:
        """Of a partition at rest, whose last removals were collected, only pins can expire."""
        often_ms, manifest = (
            max(MIN_COLLECT_MS, self._settings.gc_grace_ms // 24),
            partition.manifest,
        )
        if manifest is None:
            return often_ms
        is_quiet = self._clock() - manifest.created_ms > self._settings.gc_grace_ms + 2 * often_ms
        return max(often_ms, self._settings.gc_grace_ms) if is_quiet else often_ms

    def _apply_retention(self, partition: Partition) -> None:
        config = partition.config
        if not config.deletes:
            return
        limits = Limits(config.retention_ms, config.retention_bytes)
        local = local_facts(partition)
        has_size_limit = limits.retention_bytes != UNLIMITED
        end = expired_end(
            chain(cold_facts(partition, local), local),
            limits,
            total_bytes=total_bytes(partition, local) if has_size_limit else 0,
            now_ms=self._clock(),
        )
        if end is None:
            return
        if limits.retention_ms != UNLIMITED:
            partition.upkeep.check_clock()
        if local and local[-1].active and end == local[-1].end_offset:
            try:
                partition.upkeep.roll()
            except DiskFull:
                end = local[-1].base_offset  # deleting the sealed segments makes room
                if end <= partition.log_start_offset:
                    raise
        start = min(end, partition.high_watermark)
        log.info("retention", partition=str(partition), log_start_offset=start)
        in_bucket = partition.upkeep.follow_log_start if partition.is_store_reachable else None
        self._advance(partition, start, in_bucket=in_bucket)

    def _apply_local_retention(self, partition: Partition) -> None:
        config = partition.config
        if config.compacts:
            return
        limits = Limits(config.effective_local_retention_ms, config.effective_local_retention_bytes)
        segments = [fact for fact in local_facts(partition) if not fact.active]
        sizes = sum(fact.size_bytes for fact in segments)
        active_bytes = partition.size_bytes - sizes
        if limits.retention_bytes >= 0:  # the active segment counts, but stays
            limits = limits._replace(retention_bytes=max(0, limits.retention_bytes - active_bytes))
        end = expired_end(segments, limits, total_bytes=sizes, now_ms=self._clock())
        end = min(end or 0, removable_end(partition))
        if end > max(partition.first_local_offset, partition.log_start_offset):
            partition.upkeep.delete_local(end)
            log.info("local segments deleted", partition=str(partition), before_offset=end)

    def relieve_disk(self, missing_bytes: int) -> bool:
        """Delete the oldest local segment of each partition that is in the bucket, until enough is
        free, whatever its retention. A partition that fails does not delay the others.
        """
        freed = 0
        for partition in list(self._topics.partitions()):
            try:
                freed += self._delete_oldest(partition)
            except (TierlogError, OSError) as error:
                log.warning("no segment deleted", partition=str(partition), error=str(error))
            if freed >= missing_bytes:
                break
        return freed > 0

    def _delete_oldest(self, partition: Partition) -> int:
        """Delete the oldest local segment if it is in the bucket; the bytes freed."""
        oldest = next((fact for fact in local_facts(partition) if not fact.active), None)
        compacts = partition.config.compacts
        if oldest is None or compacts or oldest.end_offset > removable_end(partition):
            return 0
        if not partition.upkeep.delete_local(oldest.end_offset):
            return 0  # not before the next flush
        partition.upkeep.reap(at_once=True)
        log.warning("local segment deleted: the disk is full", partition=str(partition))
        return oldest.size_bytes


def removable_end(partition: Partition) -> int:
    """Local segments below this offset may be deleted: the manifest in force has them, or they are
    below the log start. Until the bucket mirrors a compaction it has other bytes, so none may.
    """
    return max(partition.upkeep.uploaded_end_offset, partition.log_start_offset)


TRIM_WAIT_S: Final = 15.0  # clients time out after half a minute
TRIMS_MAX: Final = 8  # concurrent commits, of different partitions


class BucketTrims:
    """Thread-safe."""

    def __init__(self) -> None:
        self._threads = Threads(TRIMS_MAX, name="trim")
        self._in_progress: dict[Partition, threading.Event] = {}

    def close(self) -> None:
        """Wait for the trims so far, which a closed store refuses; no other is accepted."""
        self._threads.shutdown()

    def commit_trim(self, partition: Partition) -> None:
        """Raises StoreUnavailable if it takes longer than TRIM_WAIT_S; it may still succeed."""
        deadline_s, done = time.monotonic() + TRIM_WAIT_S, threading.Event()
        while (ahead := self._in_progress.setdefault(partition, done)) is not done:
            _check_in_time(ahead.wait(_left_s(deadline_s)))
        try:
            trimming = self._threads.submit(self._trim, partition, done)
        except ShuttingDown:
            self._in_progress.pop(partition, None)
            raise
        try:
            _check_in_time(wait([trimming], _left_s(deadline_s)).done)
            trimming.result()
        finally:
            del trimming  # breaks the reference cycle of the future and its exception

    def _trim(self, partition: Partition, done: threading.Event) -> None:
        try:
            partition.upkeep.follow_log_start()
        finally:
            self._in_progress.pop(partition, None)
            done.set()


def _left_s(deadline_s: float) -> float:
    return max(0.0, deadline_s - time.monotonic())


def _check_in_time(done: object) -> None:
    if not done:
        raise StoreUnavailable(f"no response within {TRIM_WAIT_S:g} s")
