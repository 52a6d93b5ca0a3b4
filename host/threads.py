"""Threads that start when there is work for them.

* One thread starts with the pool, so a process that may have no more threads refuses the pool, and
  not, later, a call. Where another thread may not start, the calls wait for those there are.
* `ThreadPoolExecutor` starts its threads in `submit`, which then raises after it has queued the
  call, and another thread makes it: a request that was answered with an error would take effect.
* A call wakes one thread, the one that was busy last. Those of a `queue.SimpleQueue` wake each
  other for nothing: whoever takes an item wakes the next one that waits, which finds none.
* A pool that nobody shut down is shut down at exit, after the calls it was given.
* A thread that is woken while another has Python's lock only waits for it: what an event loop
  starts is handed over at the end of its turn (`gathering`), when the others of that turn have
  found that it is started already.
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from functools import partial
from typing import Any, ParamSpec, TypeVar

from tierlog.record_format.errors import ShuttingDown, TooManyThreads

P = ParamSpec("P")
T = TypeVar("T")

log = logging.getLogger(__name__)

_Given = tuple[Future[Any] | None, Callable[[], Any]]


class Threads(Executor):
    """At most `most` threads. `at_once` start now: for calls that wait for each other."""

    def __init__(self, most: int, *, name: str, at_once: int = 1) -> None:
        """Raises TooManyThreads if the process may not have `at_once` more threads."""
        self._most, self._name = most, name
        self._lock = threading.Lock()  # of what follows
        self._calls: deque[_Given] = deque()
        self._threads: list[threading.Thread] = []
        self._idle: list[threading.Lock] = []  # the turn of each thread that has no call
        self._unfinished = 0  # calls that wait or run
        self._is_shut_down = self._is_short = False
        self._gathered: list[Callable[[], object]] = []
        self._gatherer = 0  # the id of the event loop's thread
        self._call_soon: Callable[[Callable[[], None]], object] = _no_loop
        atexit.register(self.shutdown)
        try:
            for _ in range(at_once):
                self._start_thread()
        except RuntimeError as error:
            self.shutdown()
            text = f"this process may not have {at_once} more threads: {error}"
            raise TooManyThreads(text) from error

    def submit(self, call: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        """Raises ShuttingDown after `shutdown`; in that case alone the call will not be made."""
        future: Future[T] = Future()
        self._hand_over(future, partial(call, *args, **kwargs))
        return future

    def start(self, call: Callable[[], object]) -> None:
        """As `submit`, for a call whose outcome nobody asks for. What it raises is reported."""
        if threading.get_ident() != self._gatherer:
            self._hand_over(None, call)
            return
        if not self._gathered:
            self._call_soon(self._hand_over_gathered)
        self._gathered.append(call)

    @contextmanager
    def gathering(self, call_soon: Callable[[Callable[[], None]], object]) -> Iterator[None]:
        """Hand over what this thread starts when its event loop has nothing else to do in this
        turn; `call_soon` is the loop's.
        """
        self._gatherer, self._call_soon = threading.get_ident(), call_soon
        try:
            yield
        finally:
            self._gatherer = 0
            self._hand_over_gathered()

    def _hand_over_gathered(self) -> None:
        calls, self._gathered = self._gathered, []
        for call in calls:
            self._hand_over(None, call)

    def _hand_over(self, future: Future[Any] | None, call: Callable[[], Any]) -> None:
        with self._lock:
            if self._is_shut_down:
                raise ShuttingDown(f"the broker stops: its threads {self._name} are shut down")
            self._calls.append((future, call))
            self._unfinished += 1
            if self._idle:
                self._idle.pop().release()
            elif len(self._threads) < min(self._unfinished, self._most):
                self._start_another()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """End the threads after the calls that were submitted, or, with `cancel_futures`, after
        those that run.
        """
        cancelled: list[Future[Any]] = []
        with self._lock:
            self._is_shut_down = True
            if cancel_futures:
                cancelled = [future for future, _ in self._calls if future is not None]
                self._calls.clear()
            while self._idle:
                self._idle.pop().release()
        atexit.unregister(self.shutdown)
        for future in cancelled:
            future.cancel()
        for thread in self._threads if wait else ():
            thread.join()

    def _start_another(self) -> None:
        try:
            self._start_thread()
        except RuntimeError as error:
            if not self._is_short:
                self._is_short = True
                log.warning(
                    "this process may have no more threads: calls of %s wait for those there are, "
                    "%d: %s",
                    self._name,
                    len(self._threads),
                    error,
                )

    def _start_thread(self) -> None:
        name = f"{self._name}_{len(self._threads)}"
        thread = threading.Thread(target=self._make_calls, name=name, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _make_calls(self) -> None:
        turn = threading.Lock()
        turn.acquire()
        while (given := self._next_call(turn)) is not None:
            future, call = given
            if future is None:
                make_and_report(call)
                with self._lock:
                    self._unfinished -= 1
            else:
                self._make(future, call)
            del given, future, call  # or an idle thread would keep the result alive

    def _next_call(self, turn: threading.Lock) -> _Given | None:
        """Waits until there is one. None: there is none, and will be none."""
        while True:
            with self._lock:
                if self._calls:
                    return self._calls.popleft()
                if self._is_shut_down:
                    return None
                self._idle.append(turn)
            turn.acquire()

    def _make(self, future: Future[Any], call: Callable[[], Any]) -> None:
        """What waits for the future may submit the next call at once: this thread is free then."""
        is_wanted = future.set_running_or_notify_cancel()
        result, failure = None, None
        try:
            result = call() if is_wanted else None
        except BaseException as error:  # noqa: BLE001  the future raises it
            failure = error
        with self._lock:
            self._unfinished -= 1
        if failure is not None:
            future.set_exception(failure)
            del future, failure  # breaks the reference cycle with its traceback
        elif is_wanted:
            future.set_result(result)


def _no_loop(_: Callable[[], None]) -> None:
    raise AssertionError("nothing is gathered")


def make_and_report(call: Callable[[], object]) -> None:
    """What it raises is reported as if the thread had died of it."""
    try:
        call()
    except Exception as bug:  # noqa: BLE001
        report = (type(bug), bug, bug.__traceback__, threading.current_thread())
        threading.excepthook(threading.ExceptHookArgs(report))


def begun() -> Future[Any]:
    """A future that whoever waits for it cannot cancel."""
    future: Future[Any] = Future()
    future.set_running_or_notify_cancel()
    return future


def failed(error: BaseException) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(error)
    return future


def run_in_daemon_thread(call: Callable[[], object], *, name: str) -> Future[None]:
    """Call it in a thread for which the process does not wait when it exits: a request to a store
    may take a minute to time out. In the caller's thread if the process may not have another.
    """
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised by `result`
            done.set_exception(error)

    try:
        threading.Thread(target=run, name=name, daemon=True).start()
    except RuntimeError:
        run()
    return done
