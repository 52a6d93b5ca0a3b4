"""Group commit: one write and one flush for many producers.

* All appends queued for a partition become one write; one flush covers every append that was
  written before it began. During a flush, the next write proceeds.
* There is no thread per partition: the threads shared by all partitions make at most one write and
  one flush for each at a time.
* Appends that do not wait for a flush (acks 0 and 1) are flushed within `flush.ms`, or once
  `flush.messages` records are unflushed, by one timer shared by all partitions.
* In a replicated log acks=all waits for the high watermark: what is flushed is parked until then.
* Every future completes: with offsets, the error, or LogOfflineError, after which the outcome is
  unknown.
* `before_answers` is called before any group's offsets are given out; what it raises is given out
  in their place. It must be cheap, and may block: an owner that slept looks who owns the log now.
"""

from __future__ import annotations

import heapq
import itertools
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Final, NamedTuple

from tierlog.host.latency_histogram import LatencyHistogram
from tierlog.host.threads import make_and_report
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.log_writer import Acks, Append, AppendResult, LogWriter
from tierlog.record_format.errors import ShuttingDown, TierlogError

# Kafka's default of `flush.ms` exceeds the longest timeout of a lock.
MAX_FLUSH_DELAY_MS: Final = 24 * 3600 * 1000
NEVER_S: Final = math.inf
UNFLUSHED_SEGMENTS_MAX: Final = 16  # each holds a descriptor


class FlushTimer:
    """Runs callbacks after a delay, on one thread for all partitions of a broker.

    Callbacks must be quick: they hand work to other threads. One that fails does not affect
    the others.
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
        """Drop pending callbacks; the thread has ended when this returns."""
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
            make_and_report(callback)
            del callback  # until the next is due, it would keep a deleted log in memory

    def _ready(self) -> bool:
        return bool(self._due) and self._due[0][0] <= time.monotonic()


class CommitTimes:
    """How long appends and flushes take. `write`: one write of all queued appends. `flush`: one
    flush. `commit`: an append with acks=all, from its submission until it was on the medium, and
    that of all replicas in sync.
    """

    __slots__ = ("_asked_s", "commit", "flush", "write")

    def __init__(self) -> None:
        self.write, self.flush, self.commit = (LatencyHistogram() for _ in range(3))
        self._asked_s: dict[int, float] = {}  # by thread: since when it waits for the disk

    def begin(self) -> float:
        """The time; from now on this thread waits for a write or a flush."""
        self._asked_s[threading.get_ident()] = now_s = time.monotonic()
        return now_s

    def end(self) -> None:
        del self._asked_s[threading.get_ident()]

    def disk_wait_s(self) -> float:
        """For how long the disk has owed the answer to a write or a flush; 0 if it owes none."""
        now_s = time.monotonic()
        return now_s - min(list(self._asked_s.values()), default=now_s)


class _Queued(NamedTuple):
    append: Append
    acks: Acks
    future: Future[AppendResult]
    began_s: float


class _Unflushed(NamedTuple):
    result: AppendResult
    future: Future[AppendResult]
    began_s: float


_Answer = tuple[Future[AppendResult], AppendResult]


class GroupCommit:
    """The append queue of one partition. Thread-safe. `start` has a thread make a call; `times` may
    be shared by all partitions.
    """

    def __init__(
        self,
        writer: LogWriter,
        start: Callable[[Callable[[], None]], object],
        timer: FlushTimer,
        *,
        times: CommitTimes | None = None,
        before_answers: Callable[[], None] = lambda: None,
    ) -> None:
        self._writer, self._log = writer, writer.state
        self._start, self._timer = start, timer
        self._before_answers = before_answers
        self._times = times or CommitTimes()
        self._lock = threading.Lock()
        self._idle: threading.Condition | None = None  # created by `refuse`
        self._queue: list[_Queued] = []
        self._unflushed: list[_Unflushed] = []
        self._parked: list[_Unflushed] = []  # flushed, and above the high watermark
        self._is_told = False  # of each new high watermark
        self._failure: Callable[[], TierlogError] | None = None  # see `fail_parked`
        self._writing = self._flushing = self._flush_due = False
        self._timer_due_s = NEVER_S
        self._completing = 0  # flushes whose futures are not completed yet
        self._refusal: Callable[[], TierlogError] | None = None

    def submit(self, append: Append, *, acks: Acks) -> Future[AppendResult]:
        """Queue an append; does not block.

        The future completes when the records are in the page cache (NONE, LEADER) or flushed and
        below the high watermark (ALL). It fails with the error that rejected the append, that of
        `refuse` or `fail_parked`, or LogOfflineError.
        """
        future: Future[AppendResult] = Future()
        future.set_running_or_notify_cancel()  # not cancellable: it may be written already
        with self._lock:
            if self._refusal is not None:
                future.set_exception(self._refusal())
                return future
            self._queue.append(_Queued(append, acks, future, time.monotonic()))
            start = not self._writing
            self._writing = True
        if start:
            self._start(self._write_all)
        return future

    def request_flush(self) -> None:
        """Flush soon; returns immediately."""
        with self._lock:
            self._flush_due = True
            start = self._claim_flush()
        if start:
            self._start(self._flush_all)

    def refuse(
        self, refusal: Callable[[], TierlogError], *, timeout_s: float | None = None
    ) -> bool:
        """Refuse new appends with this error; True once all submitted ones have completed, False on
        timeout.
        """
        with self._lock:
            self._refusal = refusal
            self._idle = self._idle or threading.Condition(self._lock)
            return self._idle.wait_for(self._is_idle, timeout=timeout_s)

    def close(self, timeout_s: float | None = None) -> bool:
        """Refuse new appends for good, as `refuse` does."""
        return self.refuse(_shutting_down, timeout_s=timeout_s)

    def accept(self) -> None:
        """Accept appends again, after `refuse`."""
        with self._lock:
            self._refusal = self._failure

    def fail_parked(self, error: Callable[[], TierlogError]) -> None:
        """The leader stepped down: this error for all that is queued, not flushed or parked, whose
        outcome nobody knows, and for all that is submitted from now on.
        """
        with self._lock:
            self._refusal = self._failure = error
            waiting = [one.future for one in (*self._unflushed, *self._parked)]
            waiting += [queued.future for queued in self._queue]
            self._queue, self._unflushed, self._parked = [], [], []
            if self._is_told:
                self._writer.on_high_watermark.remove(self._release)
                self._is_told = False
            self._completing += 1
        for future in waiting:
            future.set_exception(error())
        self._finish_completing()

    def give_up_parked(self, error: Callable[[], TierlogError]) -> None:
        """Fail what is parked now: nobody can say when it will be committed."""
        with self._lock:
            waiting, self._parked = self._parked, []
            self._notify_if_idle()
        for parked in waiting:
            parked.future.set_exception(error())

    def _notify_if_idle(self) -> None:
        """Called under the lock."""
        if self._idle is not None:
            self._idle.notify_all()

    def _is_idle(self) -> bool:
        return not (self._writing or self._flushing or self._completing or self._parked)

    def _run_in_thread(self, work: Callable[[], None]) -> None:
        try:
            self._start(work)
        except ShuttingDown:  # while the disk hung
            work()

    # --- writing ----------------------------------------------------------------------------------

    def _write_all(self) -> None:
        """Write until the queue is empty or a flush is due. Then this thread flushes, and another
        writes what was queued meanwhile.
        """
        while True:
            with self._lock:
                group, self._queue = self._queue, []
            if group:
                self._write(group)
            with self._lock:
                flush = self._claim_flush()
                more = bool(self._queue)
                self._writing = more
                self._notify_if_idle()
            if flush:
                if more:
                    self._run_in_thread(self._write_all)
                self._flush_all()
            if flush or not more:
                return

    def _write(self, group: list[_Queued]) -> None:
        began_s = self._times.begin()
        try:
            outcomes = self._writer.append([queued.append for queued in group])
        except BaseException as bug:  # noqa: BLE001  raised by each future
            for queued in group:
                queued.future.set_exception(bug)
            return
        finally:
            self._times.end()
        self._times.write.observe(time.monotonic() - began_s)
        high_watermark = self._log.high_watermark
        answers: list[_Answer] = []
        unflushed: list[_Unflushed] = []
        for queued, outcome in zip(group, outcomes, strict=True):
            if isinstance(outcome, TierlogError):
                queued.future.set_exception(outcome)
            elif queued.acks is not Acks.ALL or outcome.last_offset < high_watermark:
                answers.append((queued.future, outcome))
            else:
                unflushed.append(_Unflushed(outcome, queued.future, queued.began_s))
        if unflushed:
            with self._lock:
                self._unflushed += unflushed
        if answers:
            self._ensure_flush_scheduled()  # first: an answer may have to wait
            self._answer(answers)

    def _answer(self, answers: list[_Answer]) -> None:
        try:
            self._before_answers()
        except BaseException as refusal:  # noqa: BLE001  raised by each future
            for future, _ in answers:
                future.set_exception(refusal)
            return
        for future, result in answers:
            future.set_result(result)

    def _ensure_flush_scheduled(self) -> None:
        """Make sure that appends that nobody waits for are flushed in time."""
        log = self._log
        unflushed_records = log.log_end_offset - log.flushed.offset
        if unflushed_records <= 0 or log.offline is not None:
            return
        delay_ms = min(log.config.flush_ms, MAX_FLUSH_DELAY_MS)
        due_s = time.monotonic() + delay_ms / 1000
        with self._lock:
            if unflushed_records >= log.config.flush_messages or _has_backlog(log):
                self._flush_due = True
                return
            if self._timer_due_s <= due_s:  # it is later only if `flush.ms` was lowered since
                return
            self._timer_due_s = due_s
        self._timer.call_after(delay_ms, self._on_timer)

    def _on_timer(self) -> None:
        with self._lock:
            self._timer_due_s = NEVER_S
        if self._log.flushed.offset < self._log.log_end_offset and self._log.offline is None:
            self.request_flush()

    # --- flushing ---------------------------------------------------------------------------------

    def _claim_flush(self) -> bool:
        """Whether the caller must flush. Called under the lock."""
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
            self._completing += 1
            self._flushing = False
            again = self._claim_flush()
        if again:  # start the next flush before completing futures
            self._run_in_thread(self._flush_all)
        self._complete(waiting, outcome)
        self._finish_completing()

    def _finish_completing(self) -> None:
        with self._lock:
            self._completing -= 1
            self._notify_if_idle()

    def _flush(self) -> int | BaseException:
        """The new recovery point, or the error for each waiting future."""
        began_s = self._times.begin()
        try:
            flushed = self._writer.flush()
        except BaseException as failure:  # noqa: BLE001
            return failure
        finally:
            self._times.end()
        self._times.flush.observe(time.monotonic() - began_s)
        return flushed

    def _complete(self, waiting: list[_Unflushed], outcome: int | BaseException) -> None:
        if isinstance(outcome, BaseException):
            for unflushed in waiting:
                unflushed.future.set_exception(outcome)
            return
        assert all(unflushed.result.last_offset < outcome for unflushed in waiting)
        if self._log.committed is None:
            self._acknowledge(waiting)
        else:
            self._park(waiting)

    def _acknowledge(self, waiting: list[_Unflushed]) -> None:
        now_s = time.monotonic()
        self._times.commit.observe_all([now_s - unflushed.began_s for unflushed in waiting])
        self._answer([(unflushed.future, unflushed.result) for unflushed in waiting])

    # --- waiting for the replicas -----------------------------------------------------------------

    def _park(self, waiting: list[_Unflushed]) -> None:
        with self._lock:
            failure = self._failure
            if failure is None:
                self._parked += waiting
                if not self._is_told:
                    self._writer.on_high_watermark.append(self._release)
                    self._is_told = True
        if failure is None:
            self._release(self._log.high_watermark)  # it may have risen before they were parked
            return
        for unflushed in waiting:
            unflushed.future.set_exception(failure())

    def _release(self, high_watermark: int) -> None:
        """Answer what is committed now."""
        with self._lock:
            parked = self._parked
            committed = [one for one in parked if one.result.last_offset < high_watermark]
            if not committed:
                return
            self._parked = [one for one in parked if one.result.last_offset >= high_watermark]
            self._completing += 1
        self._acknowledge(committed)
        self._finish_completing()


def _shutting_down() -> TierlogError:
    return ShuttingDown("the broker is shutting down")


def _has_backlog(log: LogState) -> bool:
    """Whether so many sealed segments await a flush that one is due regardless of `flush.ms`."""
    return len(log.unflushed) >= UNFLUSHED_SEGMENTS_MAX
