"""Copies sealed segments to the bucket: rolled -> uploaded -> committed -> local copy deletable.

* Segments of a partition are uploaded in order, one at a time, and `offload.concurrency` partitions
  in parallel. After each segment the partition goes to the end of the queue, so that one that is
  written as fast as it uploads does not starve a quiet one. A partition that fails is retried with
  back-off and jitter and does not delay the others. If the next segment is corrupt or missing on
  local disk, the partition waits for a repair and is reported (`blocked`). A store outage is logged
  once, by `store_status`, not for each partition.
* Nothing is uploaded before the partition is claimed, and no object counts before a manifest that
  names it is committed. Objects that were uploaded but not committed are orphans; the janitor
  collects them.
* If compaction replaced segments, the bucket follows (`mirror`), but only once it has everything
  that compaction relied on.
* The copier never deletes a local file: retention does, by the manifest in force.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import msgspec
import structlog

from tierlog.broker.background.mirror import follow_compaction
from tierlog.broker.holes import Holes
from tierlog.broker.partition import Partition
from tierlog.broker.task_failures import TaskFailures
from tierlog.host.threads import Threads
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptBatch,
    CorruptDataError,
    FencedError,
    LogOfflineError,
    OffsetTrimmed,
    OutcomeUnknownError,
    ShuttingDown,
    StoreUnavailable,
    TierlogError,
    UnknownSegment,
)

log = structlog.get_logger(__name__)

FIRST_BACKOFF_S = 0.5
MAX_BACKOFF_S = 30.0
MAX_SCAN_BACKOFF_S = 600.0  # each attempt reads the segment up to its corrupt batch
_FILE_ERRORS = (CorruptDataError, OffsetTrimmed)  # corrupt or missing files: need a repair
_STORE_ERRORS = (StoreUnavailable, OutcomeUnknownError, ConfigurationError)


class Offloaded(msgspec.Struct, frozen=True):
    uploaded_segments: int
    uploaded_bytes: int
    remaining_segments: int


class _Work:
    """The copier's state of one partition. Guarded by the copier's lock."""

    __slots__ = (
        "blocked",
        "failures",
        "not_before",
        "replaced_below",
        "running",
        "unreadable",
        "uploaded_bytes",
        "uploaded_segments",
    )

    def __init__(self) -> None:
        self.failures = 0
        self.blocked: str | None = None  # the corrupt or missing file
        self.not_before = 0.0
        self.unreadable: list[int] = []  # the base offset of the segment that is waited for
        self.replaced_below: tuple[int, int] | None = None  # see `_may_mirror`
        self.running: Future[None] | None = None
        self.uploaded_segments = 0
        self.uploaded_bytes = 0


class Copier:
    """`run_round` submits the partitions that are due and returns; a thread pool uploads."""

    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        *,
        concurrency: int,
        holes: Holes,
        failures: TaskFailures,
    ) -> None:
        self._partitions, self._holes, self._failures = partitions, holes, failures
        self._pool = Threads(concurrency, name="offload")
        self._work: dict[Partition, _Work] = {}
        self._changed = threading.Condition()
        self._stopping = False

    def run_round(self) -> None:
        now = time.monotonic()
        live = set(self._partitions())
        with self._changed:
            for gone in self._work.keys() - live:
                if self._work[gone].running is None:
                    del self._work[gone]
                    self._changed.notify_all()
            for partition in live:
                work = self._work.setdefault(partition, _Work())
                is_waiting = now < work.not_before and not _is_past_unreadable(partition, work)
                if work.running is not None or is_waiting or self._stopping:
                    continue
                if _has_work(partition):
                    work.running = self._pool.submit(self._copy, partition, work)
                else:
                    self._forget_failure(partition, work)

    def _forget_failure(self, partition: Partition, work: _Work) -> None:
        """What could not be uploaded need not be any more: it was trimmed, or has expired."""
        if work.failures:
            work.failures, work.blocked = 0, None
            self._failures.note("offload", partition, failed=False)

    def reset_backoff(self, partitions: Iterable[Partition]) -> None:
        """Retry these at once: an operator asked for it."""
        with self._changed:
            for partition in partitions:
                if partition in self._work:
                    self._work[partition].not_before = 0.0

    def blocked(self) -> dict[Partition, str]:
        """The partitions that are not uploaded until they are repaired, and the reason."""
        with self._changed:
            return {one: work.blocked for one, work in self._work.items() if work.blocked}

    def progress(self, partitions: Iterable[Partition]) -> Offloaded:
        """Uploads since the process started, and the sealed segments that are still local only."""
        partitions = list(partitions)
        with self._changed:
            work = [self._work.get(partition) or _Work() for partition in partitions]
        return Offloaded(
            sum(one.uploaded_segments for one in work),
            sum(one.uploaded_bytes for one in work),
            sum(len(_pending(partition)) for partition in partitions),
        )

    def wait_until_done(self, partitions: Iterable[Partition], *, timeout_s: float) -> bool:
        """Wait until every sealed segment is uploaded, or the topic is deleted. Returns False at
        the timeout, or when the copier is stopped.
        """
        partitions = list(partitions)

        def done() -> bool:
            return all(_is_done(partition) for partition in partitions)

        with self._changed:
            self._changed.wait_for(lambda: self._stopping or done(), timeout_s)
            return done()

    def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Wait until no upload or claim is in progress. Returns False at the timeout."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(work.running is None for work in self._work.values()), timeout_s
            )

    def stop(self) -> None:
        """Begin no new claim or upload, and release the threads that wait for one."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """As `stop`, and wait for claims and uploads in progress."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _copy(self, partition: Partition, work: _Work) -> None:
        """One turn of a partition. If more is to be done, it goes to the end of the queue."""
        failure: Exception | None = None
        more = is_outage = False
        try:
            with self._failures.noting("offload", partition):
                more = self._copy_next(partition, work)
        except (TierlogError, OSError) as error:
            failure = error if not partition.is_deleted else None  # its files are being deleted
            is_outage = isinstance(failure, _STORE_ERRORS) and self._is_store_down(partition)
        except Exception as bug:
            log.exception("offload failed: a bug", partition=str(partition))
            failure = bug
        finally:
            with self._changed:
                work.running = None
                work.failures = work.failures + 1 if failure else 0
                if failure is None or isinstance(failure, _FILE_ERRORS):  # otherwise not checked
                    work.blocked = str(failure) if failure else None
                if more and not self._stopping:
                    work.running = self._pool.submit(self._copy, partition, work)
                is_corrupt = isinstance(failure, CorruptBatch)
                work.unreadable = _pending(partition)[:1] if is_corrupt else []
                if failure:
                    work.not_before = time.monotonic() + _backoff_s(failure, work.failures)
                self._changed.notify_all()
        if failure is not None and not is_outage and not isinstance(failure, ShuttingDown):
            _log_failure(partition, failure, retry_in_s=work.not_before - time.monotonic())

    def _is_store_down(self, partition: Partition) -> bool:
        """Keeps a thousand partitions from all logging the same outage."""
        assert partition.cold is not None
        try:
            return not partition.cold.store_status.recheck()
        except TierlogError:  # an unexpected response; or the store was closed
            return self._stopping

    def _copy_next(self, partition: Partition, work: _Work) -> bool:
        """Claim, catch up, and upload the oldest segment. Returns whether there may be more."""
        cold = partition.cold
        assert cold is not None
        if self._stopping:
            return False
        partition.claim()
        cold.resolve_failed_commit()
        # Trims commit it themselves, but if one failed, records below may be gone here by now.
        cold.follow_log_start(partition.log.log_start_offset)
        pending = _pending(partition)
        if not partition.log.sealed.mirrored and (not pending or _may_mirror(partition, work)):
            follow_compaction(partition, stopping=lambda: self._stopping)
            if not partition.log.sealed.mirrored:
                return True  # another turn
        if not pending or self._stopping:
            return False
        self._holes.check(partition, pending[0])
        with partition.log.sealed.lock:
            try:
                entry = cold.offload(partition.log.sealed.files(pending[0]))
            except (UnknownSegment, OffsetTrimmed, CorruptDataError) as error:
                if pending[0] not in partition.log.base_offsets:
                    return True  # compaction or retention removed it just now
                if isinstance(error, _FILE_ERRORS):
                    raise
                # The log still has the segment, so the broker did not remove the file.
                raise CorruptDataError(str(error), file=str(partition.log.folder)) from error
        log.info(
            "segment offloaded",
            partition=str(partition),
            epoch=partition.log.leader_epoch,
            base_offset=pending[0],
            size_bytes=entry.size_bytes,
        )
        with self._changed:
            work.uploaded_segments += 1
            work.uploaded_bytes += entry.size_bytes
        return True


def _is_past_unreadable(partition: Partition, work: _Work) -> bool:
    """Whether the segment that could not be read need not be uploaded any more: it was trimmed, or
    has expired. Those after it do not wait.
    """
    return bool(work.unreadable) and work.unreadable[0] not in _pending(partition)


def _backoff_s(failure: Exception, failures: int) -> float:
    max_s = MAX_SCAN_BACKOFF_S if isinstance(failure, CorruptBatch) else MAX_BACKOFF_S
    ceiling = min(max_s, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 11))
    return ceiling * (0.5 + random.random() / 2)


def _has_work(partition: Partition) -> bool:
    cold = partition.cold
    if cold is None or partition.leadership_lost or partition.log.offline:
        return False
    return (
        not cold.ownership.claimed or not partition.log.sealed.mirrored or bool(_pending(partition))
    )


def _may_mirror(partition: Partition, work: _Work) -> bool:
    """Whether the bucket has everything that compaction relied on. Compaction drops a value for a
    newer one; while that is above the bucket's end, the older one is all that survives a lost disk.
    """
    cold, swap_sequence = partition.cold, partition.log.sealed.swap_sequence
    assert cold is not None
    if work.replaced_below is None or work.replaced_below[0] != swap_sequence:
        # In this order: replacements so far relied on segments that are sealed by now.
        work.replaced_below = (swap_sequence, partition.log.active_base_offset)
    return cold.end_offset >= work.replaced_below[1]


def _is_done(partition: Partition) -> bool:
    if partition.is_deleted:
        return True
    return not _pending(partition) and (partition.cold is None or partition.log.sealed.mirrored)


def _pending(partition: Partition) -> list[int]:
    """Base offsets of the segments that are sealed, flushed, and not in the manifest in force.

    Empty if remote storage was turned off. Never waits for the disk: it runs under the copier's
    lock, for which `/readyz` waits too.
    """
    if partition.cold is None or not partition.offloads:
        return []
    if partition.log.active_base_offset <= partition.cold.end_offset:
        return []  # the usual case, and cheap: every sealed segment is in the bucket
    end_offset = partition.cold.end_offset
    return [
        base_offset
        for base_offset, next_offset in partition.log.sealed.flushed_ranges
        # By its end: a trim into a segment moves the bucket's end into it.
        if next_offset > max(end_offset, base_offset)
    ]


def _log_failure(partition: Partition, failure: Exception, *, retry_in_s: float) -> None:
    fatal = isinstance(failure, FencedError | LogOfflineError)
    log.warning(
        "offload stopped" if fatal else "offload failed, will retry",
        partition=str(partition),
        epoch=partition.log.leader_epoch,
        error=str(failure) or type(failure).__name__,
        retry_in_s=None if fatal else round(retry_in_s, 1),
    )
