"""Calls to others that go together: each is answered, whatever becomes of the one who sends."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from tierlog.broker.membership.gathered_calls import GatheredCalls
from tierlog.host.threads import Threads
from tierlog.record_format.errors import ShuttingDown


@pytest.fixture
def threads() -> Iterator[Threads]:
    threads = Threads(1, name="calls")
    yield threads
    threads.shutdown(wait=True)


def test_a_bug_of_who_sends_is_told_to_who_waits_and_the_next_call_goes(threads: Threads) -> None:
    def send(_to: str, asked: list[int]) -> Sequence[int]:
        return [10 // one for one in asked]

    calls = GatheredCalls[str, int, int](send, threads=threads, most=5)
    with pytest.raises(ZeroDivisionError):
        calls.give("a", 0).result(10)
    assert calls.give("a", 2).result(10) == 5


def test_one_that_shuts_down_refuses_all(threads: Threads) -> None:
    calls = GatheredCalls[str, int, int](lambda _to, asked: asked, threads=threads, most=5)
    threads.shutdown(wait=True)
    for _ in range(2):
        with pytest.raises(ShuttingDown):
            calls.give("a", 1).result(10)
