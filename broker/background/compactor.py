"""Compacts the topics whose cleanup policy asks for it, one partition at a time, dirtiest first.

* A partition that fails is retried with back-off and does not delay the others.
* How far the log is clean is recorded at the end of a round (`CompactionOffsets`): after a crash a
  round is repeated, which is idempotent.
* Recovery points are saved after the dirty part is determined and before it is cleaned: a segment
  with gaps must not be above them, where recovery would take a gap for a loss.
* A tombstone is not dropped before the bucket mirrors the earlier rounds: it may still hold the
  deleted value, and `restore --tail` would append the log above the bucket's end, without the
  tombstone.
* A compacted topic stays on disk entirely. After a restore, or a repair that set a corrupt segment
  aside, the front of it is only in the bucket: it cannot be compacted, and no tombstone is dropped
  while it may hold the deleted value. So it is downloaded first (`Rehydrator`), newest segment
  first, each attached once it is complete and verified, so that progress survives a crash. Reads
  are served from either tier meanwhile, and the disk reserve is respected.
* The first round after that drops no tombstone either: it removes the value only from disk, and the
  tombstone may be on disk alone.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import structlog

from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.rebuilt_segment import object_pieces, rebuilt_segment, snapshot_before
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.retry import backoff_s
from tierlog.hot_tier.cleaner import Cleanable, Interrupted
from tierlog.record_format.compaction import KeyTable, make_key_table
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)

FIRST_WAIT_S = 60.0
MAX_WAIT_S = 3600.0


class _Failed(NamedTuple):
    """Failures of a partition in a row, and when the last one was."""

    times: int
    since_ms: int

    @property
    def wait_ms(self) -> int:
        return int(1000 * backoff_s(self.times, first_s=FIRST_WAIT_S, max_s=MAX_WAIT_S))


class Compactor:
    def __init__(
        self,
        topics: LiveTopics,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        failures: TaskFailures,
        rehydrate: Rehydrator | None,
    ) -> None:
        self._topics, self._settings, self._clock = topics, settings, clock
        self._offsets = topics.compaction_offsets
        self._rehydrate, self._failures = rehydrate, failures
        self._backoff: WeakKeyDictionary[Partition, _Failed] = WeakKeyDictionary()
        self._stopping = threading.Event()

    def stop(self) -> None:
        """Interrupt the round in progress, consistently."""
        self._stopping.set()

    def run_round(self) -> None:
        """Clean every partition that is due. The key table is allocated only for the round."""
        self._rehydrate_all()
        due = self._due()
        if not due:
            return
        table = make_key_table(self._settings.log_cleaner_dedupe_buffer_bytes)
        for partition, _ in due:
            if self._stopping.is_set():
                return
            self._clean(partition, table)

    def _rehydrate_all(self) -> None:
        """Download missing segments. Such a log is then cleaned from its start again."""
        for partition in list(self._topics.partitions()):
            if self._rehydrate is None or self._stopping.is_set():
                return
            try:
                if not self._may_work_on(partition):
                    continue
                if partition.term is not None:
                    partition.compaction.give_up_merged()
                if not partition.compaction.has_cold_only():
                    continue
                self._topics.checkpoints.save()
                self._offsets.start_over(partition)
                self._rehydrate(partition, stopping=self._stopping.is_set)
            except Interrupted:
                return
            except Exception as error:  # noqa: BLE001  it is logged, and delays no other partition
                self._back_off(partition, error)

    def _due(self) -> list[tuple[Partition, Cleanable]]:
        """Dirtiest first."""
        found = []
        for partition in list(self._topics.partitions()):
            if not partition.config.compacts:
                self._recovered(partition)  # if compaction was turned off
            if not self._may_work_on(partition):
                continue
            try:
                cleanable = self._cleanable(partition)
            except (TierlogError, OSError) as error:
                self._back_off(partition, error)
                continue
            if cleanable is None:
                self._recovered(partition)
            else:
                found.append((partition, cleanable))
        return sorted(found, key=lambda one: one[1].dirty_ratio, reverse=True)

    def _cleanable(self, partition: Partition) -> Cleanable | None:
        """What to clean; None if it is not due, or some segments are only in the bucket."""
        config = partition.config
        if partition.compaction.has_cold_only():
            return None
        cleanable = partition.compaction.cleanable(self._offsets.cleaned(partition))
        is_due = cleanable.is_due(
            min_dirty_ratio=config.min_cleanable_dirty_ratio,
            max_lag_ms=config.max_compaction_lag_ms,
            now_ms=self._clock(),
        )
        return cleanable if is_due else None

    def _may_work_on(self, partition: Partition) -> bool:
        if not partition.config.compacts or partition.is_offline:
            return False
        if partition.leadership_lost:
            return False
        failed = self._backoff.get(partition)
        # If the clock was set back, do not wait for as long as it was ahead.
        return failed is None or not 0 <= self._clock() - failed.since_ms < failed.wait_ms

    def _clean(self, partition: Partition, table: KeyTable) -> None:
        """Clean in passes until nothing is dirty: the table may not hold all keys at once."""
        try:
            while (cleanable := self._cleanable(partition)) is not None:
                self._topics.checkpoints.save()
                self._offsets.begin_round(partition, cleanable.end_offset)  # before the first gap
                done = partition.compaction.clean(
                    cleanable,
                    table,
                    stopping=self._stopping.is_set,
                    may_forget=self._may_forget(partition),
                )
                self._offsets.end_round(partition, done.end_offset)
                log.info(
                    "partition compacted",
                    partition=str(partition),
                    epoch=partition.offsets().leader_epoch,
                    from_offset=cleanable.first_dirty_offset,
                    end_offset=done.end_offset,
                    read_bytes=done.read_bytes,
                    written_bytes=done.written_bytes,
                )
                if done.complete:
                    break
            self._recovered(partition)
        except Interrupted:
            return  # the next round repeats it
        except Exception as error:  # noqa: BLE001  it is logged, and delays no other partition
            self._back_off(partition, error)

    def _may_forget(self, partition: Partition) -> bool:
        """Whether tombstones past their horizon may be dropped; see the module."""
        was_cleaned = self._offsets.cleaned(partition) is not None
        return not partition.has_bucket or (was_cleaned and partition.is_mirrored)

    def _recovered(self, partition: Partition) -> None:
        self._backoff.pop(partition, None)
        self._failures.note("compaction", partition, failed=False)

    def _back_off(self, partition: Partition, error: Exception) -> None:
        if partition.is_gone:
            return  # its files are being deleted
        self._failures.note("compaction", partition, failed=True)
        failures = self._backoff.get(partition, _Failed(0, 0)).times + 1
        self._backoff[partition] = failed = _Failed(failures, self._clock())
        log.warning(
            "compaction failed, will retry",
            partition=str(partition),
            error=str(error) or type(error).__name__,
            retry_in_ms=failed.wait_ms,
            exc_info=None if isinstance(error, (TierlogError, OSError)) else error,
        )


class Rehydrator:
    """`scratch`: an exclusive folder on the disk of the logs. One call at a time."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        scratch: Path,
        clock: Callable[[], int],
        check_room: Callable[[int], None],
    ) -> None:
        self._bucket, self._scratch, self._clock = bucket, scratch, clock
        self._check_room = check_room

    def __call__(self, partition: Partition, *, stopping: Callable[[], bool]) -> None:
        """Download all missing segments. Raises Interrupted, StoreUnavailable, ConfigurationError,
        DiskFull, CorruptDataError, LogOfflineError.
        """
        store = self._bucket.store_status.require_store()
        entries = list(partition.compaction.cold_only())
        for before, entry in reversed(list(zip([None, *entries], entries, strict=False))):
            self._check_room(entry.size_bytes)
            snapshot = snapshot_before(store, entry, before)
            pieces = _until(stopping, object_pieces(store, entry))
            if not self._attach(partition, entry, pieces, snapshot=snapshot):
                return  # retention or a trim has deleted it and everything below
            log.info(
                "segment rehydrated",
                partition=str(partition),
                base_offset=entry.base_offset,
                size_bytes=entry.size_bytes,
            )

    def _attach(
        self,
        partition: Partition,
        entry: SegmentEntry,
        pieces: Iterator[bytes],
        *,
        snapshot: bytes | None,
    ) -> bool:
        partition.compaction.check_ends_before_local(entry)
        with rebuilt_segment(
            self._scratch, partition, entry, pieces, clock=self._clock, snapshot=snapshot
        ) as rebuilt:
            if entry.modified_ms >= 0:  # compaction and retention use it; else it counts as new
                modified_ns = entry.modified_ms * 1_000_000
                os.utime(rebuilt.files.log, ns=(modified_ns, modified_ns))
            return partition.compaction.attach(
                rebuilt.files, epochs=rebuilt.epochs, crc32c=entry.log_crc32c
            )


def _until(stopping: Callable[[], bool], pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if stopping():
            raise Interrupted
        yield piece
