"""Looks after what is there: rolls by time, retention in both tiers, checkpoints, full disks.

* A local segment is deleted only if the manifest in force covers it, if it is below the durable log
  start, or if remote storage is off (DESIGN.md, invariant 1). That rule is in one function:
  `removable_end`.
* The log start moves on disk first (checkpoint, fsync), then in the manifest, then files and
  objects go: a crash in between leaves something to delete again, never something that is missing.
* Nothing goes by its age while the store refuses this machine's clock. Where there is no store, or
  none that says so, the clock is believed.
* A trim waits for the bucket as long as a caller's patience allows, and is left to a thread of its
  own then; what that does not get done is caught up with in a round (`follow_log_start`).
* What may ask the store has rounds of its own: a store that hangs does not keep the disk from being
  tidied. While it is known not to answer it is not asked, because each partition would wait for it:
  the log start moves on disk, and the bucket follows later.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from functools import partial
from itertools import chain
from weakref import WeakKeyDictionary

import structlog

from broker.background.retention import UNLIMITED, Limits, SegmentFacts, expired_end
from broker.cold_log import ColdLog
from broker.holes import Holes
from broker.partition import Partition
from broker.settings import BrokerSettings
from hot_tier.segment_views import SegmentView
from manifest.garbage import GarbagePolicy
from manifest.paging import live_size_bytes
from record_format.errors import (
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
NEVER_OLD = 2**63 - 1
TRIM_WAIT_S = 15.0  # clients wait for half a minute
TRIMS_MAX = 8  # of partitions, in the bucket at once


class Janitor:
    """`move_log_start` gives the new one once it is durable, before anything is deleted."""

    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        holes: Holes,
        move_log_start: Callable[[Partition, int], int],
    ) -> None:
        self._partitions, self._settings, self._clock = partitions, settings, clock
        self._holes = holes
        self._move_log_start = move_log_start
        self.policy = GarbagePolicy(
            grace_ms=settings.gc_grace_ms, keep_min=settings.manifest_versions_min
        )
        self._stopping = threading.Event()
        self._trims = ThreadPoolExecutor(TRIMS_MAX, thread_name_prefix="trim")
        self._trimming: dict[ColdLog, threading.Event] = {}
        self._collected_ms: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()  # or looked

    def stop(self) -> None:
        """The round in progress ends with the partition that it is at."""
        self._stopping.set()

    def close(self) -> None:
        """As `stop`, and wait for what is still done in the bucket."""
        self.stop()
        self._trims.shutdown(wait=True, cancel_futures=True)

    def disk_round(self) -> None:
        """One look at every partition; what fails in one does not hold up the others."""
        self._look_at_each(self._look_after_disk)
        self._look_at_each(self._holes.look)

    def bucket_round(self) -> None:
        """The same for what may ask the store, which may hang at each of them."""
        self._look_at_each(self._look_after_bucket)

    def _look_at_each(self, look: Callable[[Partition], None]) -> None:
        for partition in list(self._partitions()):
            if self._stopping.is_set():
                return
            try:
                look(partition)
            except (LogOfflineError, UnknownTopic):
                # Reported when it went offline; nothing can be done until restart. Or deleted.
                continue
            except (TierlogError, OSError) as error:
                log.warning("retention waits", partition=str(partition), error=str(error))
            except Exception:
                log.exception("retention failed: a bug", partition=str(partition))

    def maintain(self, partition: Partition) -> None:
        """Roll what is due, apply both tiers' retention, unlink what was deleted a while ago, and
        tidy the bucket.
        """
        self._look_after_disk(partition)
        self._look_after_bucket(partition)

    def _look_after_disk(self, partition: Partition) -> None:
        if partition.is_defunct:
            return
        partition.log.maybe_roll()
        self._finish_deletion(partition)
        self._retain_local(partition)
        self._reap(partition)
        partition.log.expire_producers(idle_ms=self._settings.producer_id_expiration_ms)
        if partition.cold is None:
            self._retain(partition)

    def _look_after_bucket(self, partition: Partition) -> None:
        if partition.is_defunct or partition.cold is None:
            return
        if not partition.cold.store_answers:
            self._retain(partition)
            return
        try:
            partition.cold.follow_log_start(partition.log.log_start_offset)
            self._retain(partition)
            partition.cold.merge_pages()  # what fails from here on holds up no retention
        finally:
            self._maybe_collect(partition)

    def _reap(self, partition: Partition) -> None:
        """One that cannot be unlinked keeps nothing else from being looked after."""
        try:
            partition.log.reap()
        except OSError as error:
            log.warning("deleted files stay", partition=str(partition), error=str(error))

    def _finish_deletion(self, partition: Partition) -> None:
        """Of local files below the log start, which a crash, or a bucket that refused, left."""
        start = partition.log.log_start_offset
        if partition.log.first_local_offset >= start:
            return
        oldest = local_facts(partition)[0]
        if oldest.end_offset <= start and not oldest.active:
            partition.log.delete_local(start)

    def trim(self, partition: Partition, before_offset: int) -> int:
        """Move the log start: durable when this returns, in the bucket too if that answers soon."""
        told = partial(self._trim_in_bucket, partition.cold) if partition.cold else None
        return self._advance(partition, before_offset, in_bucket=told)

    def _trim_in_bucket(self, cold: ColdLog, start: int) -> None:
        """Raises StoreUnavailable if it takes longer than TRIM_WAIT_S: it may yet be done then."""
        give_up_s, over = time.monotonic() + TRIM_WAIT_S, threading.Event()
        # One of a partition at a time: those that wait for it would hold up all others.
        while (ahead := self._trimming.setdefault(cold, over)) is not over:
            _in_time(ahead.wait(_left_s(give_up_s)))
        try:
            trimming = self._trims.submit(self._do_trim, cold, start, over)
        except RuntimeError as error:
            del self._trimming[cold]
            raise ShuttingDown(str(error)) from error
        try:
            _in_time(wait([trimming], _left_s(give_up_s)).done)
            trimming.result()
        finally:
            del trimming  # it and an error would keep each other alive

    def _do_trim(self, cold: ColdLog, start: int, over: threading.Event) -> None:
        try:
            cold.trim(start)
        finally:
            del self._trimming[cold]
            over.set()

    def _advance(
        self, partition: Partition, before_offset: int, *, in_bucket: Callable[[int], None] | None
    ) -> int:
        start = self._move_log_start(partition, before_offset)
        if in_bucket is not None:
            try:
                in_bucket(start)
            except (RetriableError, OutcomeUnknownError) as error:
                log.warning(
                    "log start not in the bucket", partition=str(partition), error=str(error)
                )
        partition.log.delete_local(start)
        return start

    def _maybe_collect(self, partition: Partition) -> None:
        """Garbage in the bucket, now and then: listing a partition's objects costs requests."""
        now_ms = self._clock()
        last_ms = self._collected_ms.setdefault(partition, now_ms)
        # Also after a clock was set back, that had been ahead.
        is_due = not 0 <= now_ms - last_ms < self._collect_every_ms
        if partition.cold is None or partition.is_defunct or not is_due:
            return
        self._collected_ms[partition] = now_ms
        try:
            gone = partition.cold.collect(self.policy)
        except UnknownTopic:
            return  # deleted meanwhile
        except (TierlogError, OSError) as error:
            log.warning("garbage collection waits", partition=str(partition), error=str(error))
            return
        except Exception:
            log.exception("garbage collection failed: a bug", partition=str(partition))
            return
        if gone:
            log.info("garbage collected", partition=str(partition), objects=gone)

    @property
    def _collect_every_ms(self) -> int:
        return max(MIN_COLLECT_MS, self._settings.gc_grace_ms // 24)

    def _retain(self, partition: Partition) -> None:
        config = partition.log.config
        if not config.deletes:
            return
        limits = Limits(config.retention_ms, config.retention_bytes)
        local = local_facts(partition)
        end = expired_end(
            chain(cold_facts(partition, local), local),
            limits,
            total_bytes=total_bytes(partition, local),
            now_ms=self._clock(),
        )
        if end is None:
            return
        cold = partition.cold
        if cold is not None and limits.retention_ms != UNLIMITED:
            cold.check_clock()
        if local and local[-1].active and end == local[-1].end_offset:
            try:
                partition.log.roll()
            except DiskFull:
                end = local[-1].base_offset  # what is sealed makes room
                if end <= partition.log.log_start_offset:
                    raise
        start = min(end, partition.log.high_watermark)
        log.info("retention", partition=str(partition), log_start_offset=start)
        tells = cold is not None and cold.store_answers
        self._advance(partition, start, in_bucket=cold.drop_expired if cold and tells else None)

    def _retain_local(self, partition: Partition) -> None:
        config = partition.log.config
        if config.compacts or partition.cold is None:
            return
        limits = Limits(config.effective_local_retention_ms, config.effective_local_retention_bytes)
        segments = [fact for fact in local_facts(partition) if not fact.active]
        sizes = sum(fact.size_bytes for fact in segments)
        active_bytes = partition.log.size_bytes - sizes
        if limits.retention_bytes >= 0:  # the active segment counts, and stays
            limits = limits._replace(retention_bytes=max(0, limits.retention_bytes - active_bytes))
        end = expired_end(segments, limits, total_bytes=sizes, now_ms=self._clock())
        end = min(end or 0, removable_end(partition))
        if end > partition.log.local_log_start_offset:
            partition.log.delete_local(end)
            log.info("local segments let go", partition=str(partition), before_offset=end)

    def relieve_disk(self, missing_bytes: int) -> bool:
        """Let the oldest covered segment of each partition go, whatever its retention.

        A partition that fails does not hold up the others.
        """
        freed = 0
        for partition in list(self._partitions()):
            try:
                freed += self._let_oldest_go(partition)
            except (TierlogError, OSError) as error:
                log.warning("no segment let go", partition=str(partition), error=str(error))
            if freed >= missing_bytes:
                break
        return freed > 0

    def _let_oldest_go(self, partition: Partition) -> int:
        """How many bytes it freed."""
        oldest = next((fact for fact in local_facts(partition) if not fact.active), None)
        covered = partition.cold is not None and not partition.log.config.compacts
        if oldest is None or not covered or oldest.end_offset > removable_end(partition):
            return 0
        if not partition.log.delete_local(oldest.end_offset):
            return 0  # not before the next flush
        partition.log.reap(at_once=True)
        log.warning("segment let go: the disk is full", partition=str(partition))
        return oldest.size_bytes


def _left_s(give_up_s: float) -> float:
    return max(0.0, give_up_s - time.monotonic())


def _in_time(done: object) -> None:
    if not done:
        raise StoreUnavailable(f"no answer within {TRIM_WAIT_S:g} s")


def removable_end(partition: Partition) -> int:
    """Below this offset the disk may forget: the manifest in force has it, or the log start is
    above. If the bucket has not followed a compaction, it has what was there before.
    """
    cold = partition.cold
    covered_end = cold.end_offset if cold is not None and partition.log.sealed.mirrored else 0
    return max(covered_end, partition.log.log_start_offset)


def _age_timestamp(segment: SegmentView) -> int:
    """Of a segment whose records have no time that of its file, as in Kafka."""
    if segment.max_timestamp >= 0:
        return segment.max_timestamp
    try:
        return segment.path.stat().st_mtime_ns // 1_000_000
    except FileNotFoundError:
        return NEVER_OLD  # deleted meanwhile: the next round sees what is left


def local_facts(partition: Partition) -> list[SegmentFacts]:
    return [
        SegmentFacts(
            base_offset=segment.base_offset,
            end_offset=segment.last_offset + 1,
            size_bytes=segment.size_bytes,
            age_timestamp=_age_timestamp(segment),
            active=segment.active,
        )
        for segment in partition.log.segments()
    ]


def total_bytes(partition: Partition, local: Sequence[SegmentFacts]) -> int:
    """Of both tiers, each segment once: the manifest's sums, and what of the local ones it does not
    count. Reads pages only if the manifest counts too much: before the bucket followed compaction,
    or a log start that moved while the store was down.
    """
    log_start = partition.log.log_start_offset
    manifest = partition.cold.manifest if partition.cold is not None else None
    is_behind = manifest is not None and manifest.log_start_offset < log_start
    if manifest is None or is_behind or not partition.log.sealed.mirrored:
        segments = chain(cold_facts(partition, local), local)
        return sum(fact.size_bytes for fact in segments)
    newest = (*manifest.pages, *manifest.segments)[-1:]
    counted_end = newest[0].next_offset if newest else 0
    not_counted = (fact.size_bytes for fact in local if fact.base_offset >= counted_end)
    return live_size_bytes(manifest) + sum(not_counted)


def cold_facts(partition: Partition, local: Sequence[SegmentFacts]) -> Iterator[SegmentFacts]:
    """Those below the local ones, oldest first; a page of the manifest is read when it is reached.

    Where nothing is known of a segment's age it stays.
    """
    if partition.cold is None:
        return
    local_start = local[0].base_offset if local else partition.log.log_end_offset
    for entry in partition.cold.oldest_first(partition.log.log_start_offset):
        if entry.base_offset >= local_start:
            return
        yield SegmentFacts(
            base_offset=entry.base_offset,
            end_offset=entry.next_offset,
            size_bytes=entry.size_bytes,
            age_timestamp=entry.age_timestamp if entry.age_timestamp >= 0 else NEVER_OLD,
            active=False,
        )
