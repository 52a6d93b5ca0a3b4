"""Copies sealed segments to the bucket: rolled -> uploaded -> committed -> local copy deletable.

* What becomes of a partition is decided by one table (`next_state`); `Copier` only looks, takes
  turns and executes. It never deletes a local file: retention does, by the manifest in force.
* Segments of a partition are uploaded in order, one at a time, and `offload.concurrency` partitions
  in parallel. After each segment the partition goes to the end of the queue, so that one that is
  written as fast as it uploads does not starve a quiet one.
* Nothing is uploaded before the partition is claimed, and no object counts before a manifest that
  names it is committed. Objects that were uploaded but not committed are orphans; the janitor
  collects them.
* If compaction replaced segments, the bucket follows (`partition.compaction`), but only once it has
  everything that compaction relied on.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from enum import Enum, auto
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.partition.holes import Holes
from tierlog.broker.partition.partition import Partition
from tierlog.host.retry import backoff_s
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
)

log = structlog.get_logger(__name__)

FIRST_WAIT_S: Final = 0.5
MAX_WAIT_S: Final = 30.0
MAX_SCAN_WAIT_S: Final = 600.0  # each attempt reads the segment up to its corrupt batch
_FILE_ERRORS = (CorruptDataError, OffsetTrimmed)  # corrupt or missing files: need a repair
_STORE_ERRORS = (StoreUnavailable, OutcomeUnknownError, ConfigurationError)


class State(Enum):
    IDLE = auto()
    QUEUED = auto()  # its turn is queued, or being taken
    WAITING = auto()  # its last turn failed


class Outcome(Enum):
    # of a look at a partition that is not queued
    DUE = auto()  # something is to be done, and its wait is over
    NOTHING = auto()  # what failed need not be done any more: it was trimmed, or has expired
    ASKED = auto()  # an operator wants it retried at once
    # of a turn
    MORE = auto()  # done, and there may be more
    DONE = auto()  # nothing is left; or the topic was deleted, or the copier stops
    STOPPED = auto()  # interrupted by the shutdown
    STORE_DOWN = auto()  # logged once, by `store_status`, not for each partition
    FAILED = auto()
    DAMAGED = auto()  # a file is missing or corrupt: a repair is needed
    UNREADABLE = auto()  # a batch of the next segment is corrupt


class Work(NamedTuple):
    """What the copier knows of a partition. `blocked`: the corrupt or missing file, until a turn
    finds it whole. `unreadable`: the segment that is waited for, by its base offset.
    """

    state: State = State.IDLE
    failures: int = 0  # in a row
    blocked: str | None = None
    unreadable: int | None = None
    not_before_s: float = 0.0


class _Row(NamedTuple):
    state: State
    failures: Literal["kept", "reset", "counted"] = "kept"
    blocked: Literal["kept", "cleared", "set"] = "kept"
    max_wait_s: float = 0.0
    is_logged: bool = False


_ROWS: Final[Mapping[tuple[State, Outcome], _Row]] = {
    (State.IDLE, Outcome.DUE): _Row(State.QUEUED),
    (State.IDLE, Outcome.NOTHING): _Row(State.IDLE, "reset", "cleared"),
    (State.IDLE, Outcome.ASKED): _Row(State.IDLE),
    (State.WAITING, Outcome.DUE): _Row(State.QUEUED),
    (State.WAITING, Outcome.NOTHING): _Row(State.IDLE, "reset", "cleared"),
    (State.WAITING, Outcome.ASKED): _Row(State.IDLE),
    (State.QUEUED, Outcome.ASKED): _Row(State.QUEUED),
    (State.QUEUED, Outcome.MORE): _Row(State.QUEUED, "reset", "cleared"),
    (State.QUEUED, Outcome.DONE): _Row(State.IDLE, "reset", "cleared"),
    (State.QUEUED, Outcome.STOPPED): _Row(State.WAITING, "counted", "kept", MAX_WAIT_S),
    (State.QUEUED, Outcome.STORE_DOWN): _Row(State.WAITING, "counted", "kept", MAX_WAIT_S),
    (State.QUEUED, Outcome.FAILED): _Row(State.WAITING, "counted", "kept", MAX_WAIT_S, True),
    (State.QUEUED, Outcome.DAMAGED): _Row(State.WAITING, "counted", "set", MAX_WAIT_S, True),
    (State.QUEUED, Outcome.UNREADABLE): _Row(
        State.WAITING, "counted", "set", MAX_SCAN_WAIT_S, True
    ),
}


def next_state(
    work: Work,
    outcome: Outcome,
    *,
    now_s: float = 0.0,
    jitter: float = 1.0,
    reason: str = "",
    oldest: int | None = None,
) -> Work:
    """What becomes of a partition. `reason` says why a turn failed; `oldest` is the segment that is
    next. An outcome that a state cannot have is a KeyError.
    """
    row = _ROWS[work.state, outcome]
    failures = {"kept": work.failures, "reset": 0, "counted": work.failures + 1}[row.failures]
    wait_s = backoff_s(failures, first_s=FIRST_WAIT_S, max_s=row.max_wait_s, jitter=jitter)
    return Work(
        row.state,
        failures,
        {"kept": work.blocked, "cleared": None, "set": reason}[row.blocked],
        oldest if outcome is Outcome.UNREADABLE else None,
        now_s + wait_s if row.state is State.WAITING else 0.0,
    )


def outcome_of(failure: Exception) -> Outcome:
    """Of a turn that raised; the caller knows whether the store is down."""
    if isinstance(failure, ShuttingDown):
        return Outcome.STOPPED
    if isinstance(failure, CorruptBatch):
        return Outcome.UNREADABLE
    return Outcome.DAMAGED if isinstance(failure, _FILE_ERRORS) else Outcome.FAILED


class Offloaded(msgspec.Struct, frozen=True):
    uploaded_segments: int
    uploaded_bytes: int
    remaining_segments: int


class _Turn(NamedTuple):
    """`unreadable`: the base offset of the segment that could not be read."""

    outcome: Outcome
    failure: BaseException | None = None
    unreadable: int | None = None


class _Offload:
    """A partition's work, and its uploads so far. Guarded by the copier's lock."""

    __slots__ = ("uploaded_bytes", "uploaded_segments", "work")

    def __init__(self) -> None:
        self.work = Work()
        self.uploaded_segments = 0
        self.uploaded_bytes = 0


class Copier:
    """`run_round` queues the partitions that are due and returns; a thread pool takes the turns."""

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
        self._offloads: dict[Partition, _Offload] = {}
        self._changed = threading.Condition()
        self._stopping = False

    def run_round(self) -> None:
        live, now_s = set(self._partitions()), time.monotonic()
        with self._changed:
            for gone in self._offloads.keys() - live:
                if self._offloads[gone].work.state is not State.QUEUED:
                    del self._offloads[gone]
                    self._changed.notify_all()
            for partition in live:
                offload = self._offloads.setdefault(partition, _Offload())
                found = _look(partition, offload.work, now_s=now_s)
                if found is not None and not self._stopping:
                    self._advance(partition, offload, next_state(offload.work, found))

    def _advance(self, partition: Partition, offload: _Offload, after: Work) -> None:
        """Execute what `next_state` decided."""
        if after.state is State.QUEUED:
            self._pool.submit(self._take_turn, partition, offload)
        if offload.work.failures and not after.failures:
            self._failures.note("offload", partition, failed=False)
        offload.work = after

    def reset_backoff(self, partitions: Iterable[Partition]) -> None:
        """Retry these at once: an operator asked for it."""
        with self._changed:
            for partition in partitions:
                if offload := self._offloads.get(partition):
                    offload.work = next_state(offload.work, Outcome.ASKED)

    def blocked(self) -> dict[Partition, str]:
        """The partitions that are not uploaded until they are repaired, and the reason."""
        with self._changed:
            return {
                one: offload.work.blocked
                for one, offload in self._offloads.items()
                if offload.work.blocked
            }

    def progress(self, partitions: Iterable[Partition]) -> Offloaded:
        """Uploads since the process started, and the sealed segments that are still local only."""
        partitions = list(partitions)
        with self._changed:
            offloads = [self._offloads.get(partition) or _Offload() for partition in partitions]
        return Offloaded(
            sum(one.uploaded_segments for one in offloads),
            sum(one.uploaded_bytes for one in offloads),
            sum(len(partition.upkeep.pending_uploads()) for partition in partitions),
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
                lambda: all(one.work.state is not State.QUEUED for one in self._offloads.values()),
                timeout_s,
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

    def _take_turn(self, partition: Partition, offload: _Offload) -> None:
        """One turn of a partition. If more is to be done, it goes to the end of the queue."""
        try:
            turn = self._try_turn(partition, offload)
        except BaseException as bug:  # whatever it is: it must not stay queued for ever
            log.exception("offload failed: a bug", partition=str(partition))
            turn = _Turn(Outcome.FAILED, bug)
        with self._changed:
            if turn.outcome is Outcome.MORE and self._stopping:
                turn = _Turn(Outcome.DONE)
            is_logged = _ROWS[offload.work.state, turn.outcome].is_logged
            after = next_state(
                offload.work,
                turn.outcome,
                now_s=time.monotonic(),
                jitter=random.random(),
                reason=str(turn.failure),
                oldest=turn.unreadable,
            )
            self._advance(partition, offload, after)
            self._changed.notify_all()
        if turn.failure is not None and is_logged:
            _log_failure(partition, turn.failure, retry_in_s=after.not_before_s - time.monotonic())

    def _try_turn(self, partition: Partition, offload: _Offload) -> _Turn:
        try:
            with self._failures.noting("offload", partition):
                more = self._copy_next(partition, offload)
        except (TierlogError, OSError) as error:
            if partition.is_gone:  # its files are being deleted
                return _Turn(Outcome.DONE)
            if isinstance(error, _STORE_ERRORS) and self._is_store_down(partition):
                return _Turn(Outcome.STORE_DOWN, error)
            outcome = outcome_of(error)
            unreadable = None
            if outcome is Outcome.UNREADABLE:
                unreadable = next(iter(partition.upkeep.pending_uploads()), None)
            return _Turn(outcome, error, unreadable)
        return _Turn(Outcome.MORE if more else Outcome.DONE)

    def _is_store_down(self, partition: Partition) -> bool:
        """Keeps a thousand partitions from all logging the same outage."""
        try:
            return not partition.upkeep.recheck_store()
        except TierlogError:  # an unexpected response; or the store was closed
            return self._stopping

    def _copy_next(self, partition: Partition, offload: _Offload) -> bool:
        """Claim, catch up, and upload the oldest segment. Returns whether there may be more."""
        if self._stopping:
            return False
        partition.claim()
        upkeep, compaction = partition.upkeep, partition.compaction
        upkeep.resolve_failed_commit()
        # Trims commit it themselves, but if one failed, records below may be gone here by now.
        upkeep.follow_log_start()
        pending = upkeep.pending_uploads()
        if not partition.is_mirrored and (not pending or compaction.may_be_followed):
            compaction.follow(stopping=lambda: self._stopping)
            if not partition.is_mirrored:
                return True  # another turn
        if not pending or self._stopping:
            return False
        self._holes.check(partition, pending[0])
        entry = upkeep.upload_segment(pending[0])
        if entry is None:
            return True
        log.info(
            "segment offloaded",
            partition=str(partition),
            epoch=partition.offsets().leader_epoch,
            base_offset=pending[0],
            size_bytes=entry.size_bytes,
        )
        with self._changed:
            offload.uploaded_segments += 1
            offload.uploaded_bytes += entry.size_bytes
        return True


def _look(partition: Partition, work: Work, *, now_s: float) -> Outcome | None:
    """What a round finds; None if there is nothing to decide: queued, or its wait is not over."""
    if work.state is State.QUEUED:
        return None
    # What could not be read may have been trimmed, or expired: what comes after it does not wait.
    is_past = (
        work.unreadable is not None and work.unreadable not in partition.upkeep.pending_uploads()
    )
    if now_s < work.not_before_s and not is_past:
        return None
    return Outcome.DUE if _has_work(partition) else Outcome.NOTHING


def _has_work(partition: Partition) -> bool:
    if not partition.has_bucket or partition.leadership_lost or partition.is_offline:
        return False
    if not partition.is_claimed or not partition.is_mirrored:
        return True
    return bool(partition.upkeep.pending_uploads())


def _is_done(partition: Partition) -> bool:
    if partition.is_gone:
        return True
    is_followed = not partition.has_bucket or partition.is_mirrored
    return is_followed and not partition.upkeep.pending_uploads()


def _log_failure(partition: Partition, failure: BaseException, *, retry_in_s: float) -> None:
    fatal = isinstance(failure, FencedError | LogOfflineError)
    log.warning(
        "offload stopped" if fatal else "offload failed, will retry",
        partition=str(partition),
        epoch=partition.offsets().leader_epoch,
        error=str(failure) or type(failure).__name__,
        retry_in_s=None if fatal else round(retry_in_s, 1),
    )
