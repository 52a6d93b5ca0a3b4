"""Moves sealed segments to the bucket: rolled -> uploaded -> committed -> local may go.

* Segments of a partition are uploaded in order, one at a time; `offload.concurrency` partitions
  side by side. After each segment it is the next partition's turn: one that is written to as fast
  as it uploads does not keep a quiet one from the bucket. A partition that fails waits with
  back-off and jitter and does not hold up the others. One whose next segment rotted on local disk,
  or is missing, waits until it is repaired; that is reported (`blocked`). That the store is
  away, for which all wait, is told once, and not by the copier.
* Nothing is uploaded before the partition is claimed, and nothing counts before the manifest that
  names it was committed. What was uploaded and not committed is an orphan; the janitor collects it.
* If compaction replaced segments, the bucket follows (`mirror`), but only once it has everything
  that compaction relied on.
* The copier never deletes a local file: retention does, by the manifest in force.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor

import msgspec
import structlog

from broker.background.mirror import follow_compaction
from broker.holes import Holes
from broker.partition import Partition
from record_format.errors import (
    ConfigurationError,
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
_OF_FILES = (CorruptDataError, OffsetTrimmed)  # that are bad, or gone: a repair's to mend
_OF_THE_STORE = (StoreUnavailable, OutcomeUnknownError, ConfigurationError)


class Offloaded(msgspec.Struct, frozen=True):
    uploaded_segments: int
    uploaded_bytes: int
    remaining_segments: int


class _Work:
    """What the copier knows of one partition. Guarded by the copier's lock."""

    __slots__ = (
        "blocked",
        "failures",
        "not_before",
        "replaced_below",
        "running",
        "uploaded_bytes",
        "uploaded_segments",
    )

    def __init__(self) -> None:
        self.failures = 0
        self.blocked: str | None = None  # by what does not check
        self.not_before = 0.0
        self.replaced_below: tuple[int, int] | None = None  # see `_may_follow`
        self.running: Future[None] | None = None
        self.uploaded_segments = 0
        self.uploaded_bytes = 0


class Copier:
    """`run_round` starts what is due and returns; the uploads run in a pool of its own."""

    def __init__(
        self,
        partitions: Callable[[], Iterable[Partition]],
        *,
        concurrency: int,
        holes: Holes,
        store_answers: Callable[[], bool],
    ) -> None:
        self._partitions, self._holes = partitions, holes
        self._store_answers = store_answers
        self._pool = ThreadPoolExecutor(concurrency, thread_name_prefix="offload")
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
                due = work.running is None and now >= work.not_before and not self._stopping
                if due and _has_work(partition):
                    work.running = self._pool.submit(self._copy, partition, work)

    def reset_backoff(self, partitions: Iterable[Partition]) -> None:
        """Forget the back-off of these: somebody asked."""
        with self._changed:
            for partition in partitions:
                if partition in self._work:
                    self._work[partition].not_before = 0.0

    def blocked(self) -> dict[Partition, str]:
        """The partitions of which nothing is uploaded before they are repaired, and why."""
        with self._changed:
            return {one: work.blocked for one, work in self._work.items() if work.blocked}

    def progress(self, partitions: Iterable[Partition]) -> Offloaded:
        """Uploaded since the start of the process, and what is still rolled and local only."""
        partitions = list(partitions)
        with self._changed:
            work = [self._work.get(partition) or _Work() for partition in partitions]
        return Offloaded(
            sum(one.uploaded_segments for one in work),
            sum(one.uploaded_bytes for one in work),
            sum(len(_pending(partition)) for partition in partitions),
        )

    def wait_until_done(self, partitions: Iterable[Partition], *, timeout_s: float) -> bool:
        """Wait until nothing rolled is local only, or the topic is deleted; False if the time is
        over, or the copier is stopped, first.
        """
        partitions = list(partitions)

        def done() -> bool:
            return all(_is_done(partition) for partition in partitions)

        with self._changed:
            self._changed.wait_for(lambda: self._stopping or done(), timeout_s)
            return done()

    def wait_until_idle(self, *, timeout_s: float) -> bool:
        """Wait until no upload and no claim is under way; False when the time is over first."""
        with self._changed:
            return self._changed.wait_for(
                lambda: all(work.running is None for work in self._work.values()), timeout_s
            )

    def stop(self) -> None:
        """No new claim and no upload begins, and nobody waits for one any more."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def close(self) -> None:
        """As `stop`, and wait for those in progress."""
        self.stop()
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _copy(self, partition: Partition, work: _Work) -> None:
        """One turn of a partition; where more is to be done, another at the end of the queue."""
        failure: Exception | None = None
        more = untold = False
        try:
            more = self._copy_next(partition, work)
        except (TierlogError, OSError) as error:
            failure = error if not partition.is_deleted else None  # with all that it has
            untold = isinstance(failure, _OF_THE_STORE) and self._is_store_away()
        except Exception as bug:
            log.exception("offload failed: a bug", partition=str(partition))
            failure = bug
        finally:
            with self._changed:
                work.running = None
                work.failures = work.failures + 1 if failure else 0
                if failure is None or isinstance(failure, _OF_FILES):  # else nobody looked
                    work.blocked = str(failure) if failure else None
                if more and not self._stopping:
                    work.running = self._pool.submit(self._copy, partition, work)
                if failure:
                    work.not_before = time.monotonic() + _backoff_s(work.failures)
                self._changed.notify_all()
        if failure is not None and not untold and not isinstance(failure, ShuttingDown):
            _report(partition, failure, retry_in_s=work.not_before - time.monotonic())

    def _is_store_away(self) -> bool:
        """Asked before the next begins: there may be a thousand, and they would all say so."""
        try:
            return not self._store_answers()
        except TierlogError:  # it does, with what nobody expects; or it was closed
            return self._stopping

    def claim(self, partition: Partition) -> None:
        """Become the owner in the bucket, now. Raises FencedError, StoreUnavailable."""
        cold, log = partition.cold, partition.log
        assert cold is not None, "there is nothing to claim without a bucket"
        if cold.ownership.claim(
            log_start_offset=log.log_start_offset, log_end_offset=log.log_end_offset
        ):
            cold.follow_log_start(log.log_start_offset)  # a trim before the claim left it behind

    def _copy_next(self, partition: Partition, work: _Work) -> bool:
        """What comes before any upload, and the oldest segment; whether there may be another."""
        cold = partition.cold
        assert cold is not None
        if self._stopping:
            return False
        self.claim(partition)
        cold.settle()
        # Who moves it tells the bucket himself; but what lies below may be gone from here by now.
        cold.follow_log_start(partition.log.log_start_offset)
        pending = _pending(partition)
        if not partition.log.sealed.mirrored and (not pending or _may_follow(partition, work)):
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
                    return True  # compaction, or retention, took it just now
                if isinstance(error, _OF_FILES):
                    raise
                # None of us took its file.
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


def _backoff_s(failures: int) -> float:
    ceiling = min(MAX_BACKOFF_S, FIRST_BACKOFF_S * 2.0 ** min(failures - 1, 10))
    return ceiling * (0.5 + random.random() / 2)


def _has_work(partition: Partition) -> bool:
    cold = partition.cold
    if cold is None or partition.leadership_lost or partition.log.offline:
        return False
    return (
        not cold.ownership.claimed or not partition.log.sealed.mirrored or bool(_pending(partition))
    )


def _may_follow(partition: Partition, work: _Work) -> bool:
    """Whether the bucket has all that compaction went by: it drops a value for a newer one, which
    may lie above the bucket's end, and then the older one is all that a lost disk would leave.
    """
    cold, swap_sequence = partition.cold, partition.log.sealed.swap_sequence
    assert cold is not None
    if work.replaced_below is None or work.replaced_below[0] != swap_sequence:
        # In this order: what was replaced up to now went by segments that are sealed now.
        work.replaced_below = (swap_sequence, partition.log.active_base_offset)
    return cold.end_offset >= work.replaced_below[1]


def _is_done(partition: Partition) -> bool:
    if partition.is_deleted:
        return True
    return not _pending(partition) and (partition.cold is None or partition.log.sealed.mirrored)


def _pending(partition: Partition) -> list[int]:
    """Base offsets of the segments that are sealed, flushed, and not in the manifest in force.

    None where remote storage was turned off.
    """
    if partition.cold is None or not partition.offloads:
        return []
    if partition.log.active_base_offset <= partition.cold.end_offset:
        return []  # all that is sealed is covered: the usual case, and cheap
    end_offset = partition.cold.end_offset
    return [
        segment.base_offset
        for segment in partition.log.segments()
        if segment.sealed  # and flushed
        # By its end: a trim into the middle of a segment moves the bucket's end into it.
        and segment.last_offset >= max(end_offset, segment.base_offset)
    ]


def _report(partition: Partition, failure: Exception, *, retry_in_s: float) -> None:
    fatal = isinstance(failure, FencedError | LogOfflineError)
    log.warning(
        "offload stopped" if fatal else "offload waits",
        partition=str(partition),
        epoch=partition.log.leader_epoch,
        error=str(failure) or type(failure).__name__,
        retry_in_s=None if fatal else round(retry_in_s, 1),
    )
