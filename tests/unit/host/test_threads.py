import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError
from functools import partial
from queue import SimpleQueue
from threading import get_ident

import pytest

from tests.fakes.waiting import until
from tierlog.host.threads import Threads
from tierlog.record_format.errors import ShuttingDown, TooManyThreads


def count(name: str) -> int:
    return sum(one.name.startswith(name) for one in threading.enumerate())


@pytest.fixture
def permits(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """As many threads as it has entries may start."""
    start, left = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if not left:
            raise RuntimeError("can't start new thread")
        left.pop()
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    return left


def test_threads_start_when_there_is_work_for_them() -> None:
    release = threading.Event()
    with Threads(3, name="some") as threads:
        assert count("some") == 1
        for _ in range(5):
            assert threads.submit(int).result(5) == 0
        assert count("some") == 1
        calls = [threads.submit(release.wait, 5) for _ in range(5)]
        assert count("some") == 3
        release.set()
        assert all(call.result(5) for call in calls)
    assert count("some") == 0


def test_a_call_is_made_by_the_thread_that_was_busy_last() -> None:
    """The others sleep on: waking them costs as much as a small append."""
    with Threads(3, name="some") as threads:
        releases = [threading.Event() for _ in range(3)]
        calls = [threads.submit(lambda one: one.wait(5) and get_ident(), one) for one in releases]
        for number, (release, call) in enumerate(zip(releases, calls, strict=True), 1):
            release.set()
            last = call.result(5)
            until(lambda number=number: len(threads._idle) == number)
        for _ in range(20):
            assert threads.submit(get_ident).result(5) == last
            until(lambda: len(threads._idle) == 3)


def test_threads_that_wait_for_each_other_start_at_once() -> None:
    with Threads(3, name="some", at_once=3) as threads:
        all_there = threading.Barrier(3)
        assert sorted(threads.map(lambda _: all_there.wait(5), range(3))) == [0, 1, 2]


def test_a_pool_is_refused_if_its_first_threads_may_not_start(permits: list[None]) -> None:
    permits += [None] * 2
    with pytest.raises(TooManyThreads, match="3 more threads"):
        Threads(3, name="some", at_once=3)
    assert count("some") == 0


def test_calls_wait_for_the_threads_there_are_if_another_may_not_start(
    permits: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    permits += [None]
    release = threading.Event()
    with Threads(3, name="some") as threads:
        first, *others = [threads.submit(release.wait, 5) for _ in range(3)]
        assert count("some") == 1
        assert not any(call.done() for call in (first, *others))
        release.set()
        assert all(call.result(5) for call in (first, *others))
    assert caplog.text.count("may have no more threads") == 1


def test_a_shutdown_makes_the_calls_that_wait_or_cancels_them() -> None:
    for cancels in (False, True):
        begun, release = threading.Event(), threading.Event()
        threads = Threads(1, name="some")
        running = threads.submit(lambda: begun.set() or release.wait(5))  # noqa: B023
        waiting = threads.submit(int)
        assert begun.wait(5)
        threads.shutdown(wait=False, cancel_futures=cancels)
        with pytest.raises(ShuttingDown, match="threads some are shut down"):
            threads.submit(int)
        release.set()
        threads.shutdown()
        assert running.result() is True
        if cancels:
            with pytest.raises(CancelledError):
                waiting.result()
        else:
            assert waiting.result() == 0


def test_a_pool_keeps_neither_results_nor_failures_alive() -> None:
    class Result:
        pass

    class Failure(Exception):
        pass

    def fail() -> None:
        raise Failure

    gc.disable()
    try:
        with Threads(1, name="some") as threads:
            kept = weakref.ref(threads.submit(Result).result(5))
            failed = weakref.ref(threads.submit(fail).exception(5))
            threads.submit(int).result(5)  # the thread has let go of both
            assert kept() is None
            assert failed() is None
    finally:
        gc.enable()


def test_what_an_event_loop_starts_is_handed_over_at_the_end_of_its_turn() -> None:
    soon: list[Callable[[], None]] = []
    made: SimpleQueue[str] = SimpleQueue()
    with Threads(1, name="some") as threads:
        with threads.gathering(soon.append):
            for name in "first", "second":
                threads.start(partial(made.put, name))
            other = threading.Thread(target=threads.start, args=(partial(made.put, "another's"),))
            other.start()
            assert made.get(timeout=5) == "another's"
            assert made.empty()
            (end_turn,) = soon
            end_turn()
            assert [made.get(timeout=5) for _ in range(2)] == ["first", "second"]
            threads.start(partial(made.put, "the loop ends"))
            assert len(soon) == 2, "a turn of its own"
        assert made.get(timeout=5) == "the loop ends"
        soon.pop()()
        threads.start(partial(made.put, "afterwards"))
        assert made.get(timeout=5) == "afterwards"
        assert made.empty()
        other.join()


def test_a_started_call_that_fails_is_reported_and_its_thread_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    raised: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", raised.append)
    with Threads(1, name="some") as threads:
        threads.start(lambda: 1 / 0)
        assert threads.submit(int).result(5) == 0
        assert count("some") == 1
    assert [failure.exc_type for failure in raised] == [ZeroDivisionError]
