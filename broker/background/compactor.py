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

The bucket follows (`follow_compaction`, which the copier calls): a compacted local segment replaces
the objects it was made from.

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
  history (an older copy of the folder), and would remove the rest.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple
from weakref import WeakKeyDictionary

import structlog

from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket import Bucket
from tierlog.broker.live_topics import LiveTopics
from tierlog.broker.partition import Partition
from tierlog.broker.rebuilt_segment import object_pieces, rebuilt_segment, snapshot_before
from tierlog.broker.settings import BrokerSettings
from tierlog.host.retry import backoff_s
from tierlog.hot_tier.cleaner import Cleanable, CleanerHooks, Interrupted
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.record_format.compaction import KeyTable, make_key_table
from tierlog.record_format.errors import (
    CorruptDataError,
    OffsetTrimmed,
    TierlogError,
    UnknownSegment,
)
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)

FIRST_WAIT_S = 60.0
MAX_WAIT_S = 3600.0
LOCK_WAIT_S = 0.2


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
                if not self._may_work_on(partition) or not has_cold_only(partition):
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
            if not partition.log.config.compacts:
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
        config = partition.log.config
        if has_cold_only(partition):
            return None
        cleanable = partition.log.sealed.cleanable(self._offsets.cleaned(partition))
        is_due = cleanable.is_due(
            min_dirty_ratio=config.min_cleanable_dirty_ratio,
            max_lag_ms=config.max_compaction_lag_ms,
            now_ms=self._clock(),
        )
        return cleanable if is_due else None

    def _may_work_on(self, partition: Partition) -> bool:
        if not partition.log.config.compacts or partition.log.offline:
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
                hooks = CleanerHooks(
                    stopping=self._stopping.is_set,
                    swapping=lambda: self._swapping(partition),
                    may_forget=self._may_forget(partition),
                )
                done = partition.log.sealed.clean(cleanable, table, hooks)
                self._offsets.end_round(partition, done.end_offset)
                log.info(
                    "partition compacted",
                    partition=str(partition),
                    epoch=partition.log.leader_epoch,
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
        return not partition.has_bucket or (was_cleaned and partition.log.sealed.mirrored)

    def _recovered(self, partition: Partition) -> None:
        self._backoff.pop(partition, None)
        self._failures.note("compaction", partition, failed=False)

    def _back_off(self, partition: Partition, error: Exception) -> None:
        if partition.is_deleted:
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

    @contextmanager
    def _swapping(self, partition: Partition) -> Iterator[frozenset[int]]:
        """Keep uploads from reading the files meanwhile. Yields the offsets that no segment may
        span, so that each local segment corresponds to whole entries of the manifest.
        """
        lock = partition.log.sealed.lock
        while not lock.acquire(timeout=LOCK_WAIT_S):
            if self._stopping.is_set():
                raise Interrupted
        try:
            yield _segment_boundaries(partition)
        finally:
            lock.release()


def _segment_boundaries(partition: Partition) -> frozenset[int]:
    """The bucket's end and the ends of its gaps. The bucket may have one more segment than is
    known, through a commit whose response was lost, or that a crash kept from being recorded.
    Segments are committed one by one, in order.
    """
    if not partition.has_bucket:
        return frozenset()
    views, end_offset = partition.log.segments(), partition.cold_end_offset
    may_be_cold = (v.last_offset + 1 for v in views if v.last_offset >= end_offset)
    return partition.segment_boundaries | {next(may_be_cold, end_offset)}


log = structlog.get_logger(__name__)


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
        entries = list(cold_only(partition))
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
        if entry.next_offset > partition.log.first_local_offset:
            raise CorruptDataError(
                f"ends at offset {entry.last_offset}, but the local log begins at "
                f"{partition.log.first_local_offset}",
                file=entry.log_key,
            )
        with rebuilt_segment(
            self._scratch, partition.log, entry, pieces, clock=self._clock, snapshot=snapshot
        ) as rebuilt:
            if entry.modified_ms >= 0:  # compaction and retention use it; else it counts as new
                modified_ns = entry.modified_ms * 1_000_000
                os.utime(rebuilt.files.log, ns=(modified_ns, modified_ns))
            return partition.log.sealed.prepend(
                rebuilt.files, epochs=rebuilt.epochs, crc32c=entry.log_crc32c
            )


def cold_only(partition: Partition) -> Iterator[SegmentEntry]:
    """The segments that are only in the bucket, oldest first."""
    local_start = partition.log.first_local_offset
    for entry in partition.cold_entries(partition.log.log_start_offset):
        if entry.base_offset >= local_start:
            return
        yield entry


def has_cold_only(partition: Partition) -> bool:
    """Whether there are segments only in the bucket. Called each round, so it reads a page only if
    the manifest itself does not tell.
    """
    manifest = partition.manifest
    if manifest is None:
        return False
    log_start = partition.log.log_start_offset
    oldest = manifest.find_run(log_start)
    if oldest is None or oldest.base_offset >= partition.log.first_local_offset:
        return False
    if oldest.base_offset >= log_start or isinstance(oldest, SegmentEntry):
        return True
    return next(cold_only(partition), None) is not None  # the log start lies within a page


def _until(stopping: Callable[[], bool], pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if stopping():
            raise Interrupted
        yield piece


def follow_compaction(partition: Partition, *, stopping: Callable[[], bool]) -> None:
    """Replace entries that differ. Raises what uploads and commits raise."""
    sealed = partition.log.sealed
    swap_sequence = sealed.swap_sequence
    for view in partition.log.segments():
        if stopping():
            return
        if view.sealed and view.last_offset < partition.cold_end_offset:
            _follow(partition, view, swap_sequence=swap_sequence)
    sealed.mark_mirrored(swap_sequence=swap_sequence)


def _follow(partition: Partition, view: SegmentView, *, swap_sequence: int) -> None:
    sealed = partition.log.sealed
    with sealed.lock:  # nothing is replaced within
        if sealed.swap_sequence != swap_sequence:
            return  # the segment may be newer than this pass
        try:
            _maybe_replace(partition, view)
        except (UnknownSegment, OffsetTrimmed, CorruptDataError):
            if view.base_offset in partition.log.base_offsets:
                raise  # otherwise retention has deleted it just now


def _maybe_replace(partition: Partition, view: SegmentView) -> None:
    files = partition.log.sealed.prepare_upload(view.base_offset)
    if files.last_offset >= partition.cold_end_offset:
        return
    reached = partition.cold_entries(files.base_offset)
    old = list(takewhile(lambda entry: entry.base_offset <= files.last_offset, reached))
    if not old or (len(old) == 1 and _same(partition, old[0], view)):
        return
    if old[0].base_offset < files.base_offset or old[-1].last_offset > files.last_offset:
        raise CorruptDataError(
            f"has offsets {files.base_offset} to {files.last_offset}, but the bucket has segments "
            f"of offsets {old[0].base_offset} to {old[-1].last_offset}: is this an older copy of "
            "the folder?",
            file=str(files.log),
        )
    entry = partition.replace_uploaded(old, files)
    log.info(
        "compacted segment offloaded",
        partition=str(partition),
        epoch=partition.log.leader_epoch,
        base_offset=entry.base_offset,
        replaced=len(old),
        size_bytes=entry.size_bytes,
    )


def _same(partition: Partition, entry: SegmentEntry, view: SegmentView) -> bool:
    # Last offsets may differ: a local segment ends where the next begins, an entry before a gap.
    there = (entry.base_offset, entry.size_bytes)
    if there != (view.base_offset, view.size_bytes):
        return False
    return entry.log_crc32c == partition.log.sealed.crc32c(view.base_offset)
