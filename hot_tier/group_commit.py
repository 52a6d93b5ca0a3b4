"""Many producers, one write and one flush.

* All appends that wait for a partition become one write; one flush covers every append that was
  written before it began. While a flush runs, the next write proceeds.
* No thread per partition: the work runs in the executor that all partitions share, as at most one
  writing and one flushing task per partition.
* An append that is not waited for (acks 0 and 1) is flushed within `flush.ms`, or once
  `flush.messages` records wait, by the one timer that all partitions share.
* A future gets an answer in every case: offsets, the refusal, or LogOfflineError, after which the
  outcome is unknown.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from typing import Final, NamedTuple, Protocol

from hot_tier.append import Acks, Append, AppendResult
from hot_tier.commit_times import CommitTimes
from hot_tier.log_config import LogConfig
from record_format.errors import ShuttingDown, TierlogError

# Kafka's default of `flush.ms` is longer than this platform can wait.
LONGEST_WAIT_MS: Final = 24 * 3600 * 1000
NEVER_S: Final = math.inf


class CommitLog(Protocol):
    """What group commit needs of a log."""

    @property
    def config(self) -> LogConfig: ...
    @property
    def log_end_offset(self) -> int: ...
    @property
    def high_watermark(self) -> int: ...
    @property
    def offline(self) -> bool: ...
    @property
    def wants_flush(self) -> bool: ...
    def append(self, appends: list[Append]) -> list[AppendResult | TierlogError]: ...
    def flush(self) -> int: ...


class FlushTimer:
    """Calls back after a while, for all partitions of a broker, on one thread.

    Callbacks must be quick: they hand work to an executor. One that fails does not keep others from
    being called.
    """

    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="flush-timer", daemon=True)
        self._thread.start()

    def call_after(self, delay_ms: int, callback: Callable[[], None]) -> None:
        due = time.monotonic() + delay_ms / 1000
        with self._changed:
            heapq.heappush(self._due, (due, next(self._numbers), callback))
            if self._due[0][0] == due:
                self._changed.notify()

    def close(self) -> None:
        """Drop what is due later; the thread has ended when this returns."""
        with self._changed:
            self._closed = True
            self._changed.notify()
        self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._closed and not self._ready():
                    wait_s = self._due[0][0] - time.monotonic() if self._due else None
                    self._changed.wait(wait_s)
                if self._closed:
                    return
                callback = heapq.heappop(self._due)[2]
            try:
                callback()
            except Exception as bug:  # noqa: BLE001  told as that of a thread that ends by it
                told = (type(bug), bug, bug.__traceback__, self._thread)
                threading.excepthook(threading.ExceptHookArgs(told))

    def _ready(self) -> bool:
        return bool(self._due) and self._due[0][0] <= time.monotonic()


class _Submitted(NamedTuple):
    append: Append
    acks: Acks
    future: Future[AppendResult]
    began_s: float


class _Unflushed(NamedTuple):
    result: AppendResult
    future: Future[AppendResult]
    began_s: float


class GroupCommit:
    """The queue of one partition's appends. Thread-safe. `times` may be shared by many."""

    def __init__(
        self,
        log: CommitLog,
        executor: Executor,
        timer: FlushTimer,
        *,
        times: CommitTimes | None = None,
    ) -> None:
        self._log, self._executor, self._timer = log, executor, timer
        self._times = times or CommitTimes()
        self._lock = threading.Lock()
        self._idle: threading.Condition | None = None  # made by who waits for it, at the end
        self._submitted: list[_Submitted] = []
        self._unflushed: list[_Unflushed] = []
        self._writing = self._flushing = self._flush_due = False
        self._timer_due_s = NEVER_S
        self._answering = 0  # flushes that are done, but whose producers are not answered yet
        self._closed = False

    def submit(self, append: Append, *, acks: Acks) -> Future[AppendResult]:
        """Queue an append; does not block.

        The future is done when the records are in the page cache (NONE, LEADER) or flushed (ALL).
        It fails with what refused the append, ShuttingDown after `close`, or LogOfflineError.
        """
        future: Future[AppendResult] = Future()
        future.set_running_or_notify_cancel()  # nobody can cancel it: it may be written
        with self._lock:
            if self._closed:
                future.set_exception(ShuttingDown("the broker is shutting down"))
                return future
            self._submitted.append(_Submitted(append, acks, future, time.monotonic()))
            start = not self._writing
            self._writing = True
        if start:
            self._executor.submit(self._write_all)
        return future

    def request_flush(self) -> None:
        """Flush soon; returns at once."""
        with self._lock:
            self._flush_due = True
            start = self._claim_flush()
        if start:
            self._executor.submit(self._flush_all)

    def close(self, timeout_s: float | None = None) -> bool:
        """Accept no more appends; True when all that were submitted have been answered."""
        with self._lock:
            self._closed = True
            self._idle = self._idle or threading.Condition(self._lock)
            return self._idle.wait_for(self._is_idle, timeout=timeout_s)

    def _may_be_idle(self) -> None:
        """Under the lock."""
        if self._idle is not None:
            self._idle.notify_all()

    def _is_idle(self) -> bool:
        return not (self._writing or self._flushing or self._answering)

    def _hand_on(self, work: Callable[[], None]) -> None:
        try:
            self._executor.submit(work)
        except RuntimeError:  # the pool's only word for: shut down, while the disk hung
            work()

    # --- writing ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Write until nothing waits, or until a flush is due: then the thread that wrote flushes,
        and another writes what came meanwhile.
        """
        while True:
            with self._lock:
                group, self._submitted = self._submitted, []
            if group:
                self._write(group)
            with self._lock:
                flush = self._claim_flush()
                more = bool(self._submitted)
                self._writing = more
                self._may_be_idle()
            if flush:
                if more:
                    self._hand_on(self._write_all)
                self._flush_all()
            if flush or not more:
                return

    def _write(self, group: list[_Submitted]) -> None:
        began_s = time.monotonic()
        log = self._log
        try:
            outcomes = log.append([one.append for one in group])
        except BaseException as bug:  # noqa: BLE001  it is raised where each of them is awaited
            for one in group:
                one.future.set_exception(bug)
            return
        self._times.write.observe(time.monotonic() - began_s)
        high_watermark = log.high_watermark
        answered = False
        unflushed: list[_Unflushed] = []
        for one, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, TierlogError):
                one.future.set_exception(outcome)
            elif one.acks is not Acks.ALL or outcome.last_offset < high_watermark:
                answered = True
                one.future.set_result(outcome)
            else:
                unflushed.append(_Unflushed(outcome, one.future, one.began_s))
        if unflushed:
            with self._lock:
                self._unflushed += unflushed
        if answered:
            self._bound_the_wait()

    def _bound_the_wait(self) -> None:
        """See that what nobody waits for is flushed in time."""
        log = self._log
        unflushed_records = log.log_end_offset - log.high_watermark
        if unflushed_records <= 0 or log.offline:
            return
        delay_ms = min(log.config.flush_ms, LONGEST_WAIT_MS)
        due_s = time.monotonic() + delay_ms / 1000
        with self._lock:
            if unflushed_records >= log.config.flush_messages or log.wants_flush:
                self._flush_due = True
                return
            if self._timer_due_s <= due_s:  # later only where `flush.ms` was made shorter since
                return
            self._timer_due_s = due_s
        self._timer.call_after(delay_ms, self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer_due_s = NEVER_S
        if self._log.high_watermark < self._log.log_end_offset and not self._log.offline:
            self.request_flush()

    # --- flushing ---------------------------------------------------------------------------------

    def _claim_flush(self) -> bool:
        """Whether the caller has to flush; under the lock."""
        if self._flushing or not (self._unflushed or self._flush_due):
            return False
        self._flushing = True
        return True

    def _flush_all(self) -> None:
        with self._lock:
            waiting, self._unflushed = self._unflushed, []
            self._flush_due = False
        outcome = self._flush()
        with self._lock:
            self._answering += 1
            self._flushing = False
            again = self._claim_flush()
        if again:  # the disk does not wait while this flush's producers are answered
            self._hand_on(self._flush_all)
        self._answer(waiting, outcome)
        with self._lock:
            self._answering -= 1
            self._may_be_idle()

    def _flush(self) -> int | BaseException:
        """The new high watermark, or the error that each waiting producer gets."""
        began_s = time.monotonic()
        try:
            high_watermark = self._log.flush()
        except BaseException as failure:  # noqa: BLE001
            return failure
        self._times.flush.observe(time.monotonic() - began_s)
        return high_watermark

    def _answer(self, waiting: list[_Unflushed], outcome: int | BaseException) -> None:
        if isinstance(outcome, BaseException):
            for one in waiting:
                one.future.set_exception(outcome)
            return
        now_s = time.monotonic()
        self._times.commit.observe_all([now_s - one.began_s for one in waiting])
        for one in waiting:
            assert one.result.last_offset < outcome
            one.future.set_result(one.result)
