import threading

import pytest

from tierlog.host.started_threads import started_threads
from tierlog.record_format.errors import TooManyThreads


def test_all_threads_run_before_the_first_call() -> None:
    with started_threads(3, name="some") as threads:
        both = threading.Barrier(3)
        assert sorted(threads.map(lambda _: both.wait(5), range(3))) == [0, 1, 2]
        assert sum(one.name.startswith("some") for one in threading.enumerate()) == 3


def test_threads_that_were_started_end_if_another_may_not(monkeypatch: pytest.MonkeyPatch) -> None:
    start, started = threading.Thread.start, []

    def limited(thread: threading.Thread) -> None:
        if len(started) == 2:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    with pytest.raises(TooManyThreads, match="3 more threads"):
        started_threads(3, name="some")
    assert not any(thread.is_alive() for thread in started)
