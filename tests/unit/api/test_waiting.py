"""Waiting for the end of a log, and the pages shared by readers there."""

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from tierlog.api.http.fetch.long_poll import AwaitedOffset, LongPoll
from tierlog.api.http.fetch.shared_pages import KEY_BYTES, PAGE_MAX_BYTES, RenderedPage, SharedPages
from tierlog.api.http.metrics.registry import HttpMetrics
from tierlog.api.serving.waiting_requests import WaitingRequests

AT_END = SimpleNamespace(at_end=True, size_bytes=100)
NOTHING = SimpleNamespace(at_end=True, size_bytes=0)
IN_THE_MIDDLE = SimpleNamespace(at_end=False, size_bytes=100)


class FakePartition:
    """The part of a partition that waiting uses."""

    is_defunct = False

    def __init__(self) -> None:
        self.high_watermark = 0
        self.asked: dict[int, tuple[int, Callable[[], None]]] = {}
        self.times_asked = 0

    def wait_beyond(self, offset: int, callback: Callable[[], None]) -> Callable[[], None]:
        self.times_asked += 1
        number = self.times_asked
        self.asked[number] = (offset, callback)
        return lambda: self.asked.pop(number, None)

    def rise_to(self, high_watermark: int) -> None:
        self.high_watermark = high_watermark
        due = [n for n, (offset, _) in self.asked.items() if offset < high_watermark]
        for number in due:
            self.asked.pop(number)[1]()


def run(case: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(case())  # type: ignore[arg-type]


def test_a_thousand_waiters_register_one_callback():
    async def case() -> None:
        partition: Any = FakePartition()
        waiting, woken = WaitingRequests(), []
        for number in range(1000):
            waiting.wait_beyond(partition, 7, lambda number=number: woken.append(number))
        assert partition.times_asked == 1
        partition.rise_to(7)
        await asyncio.sleep(0)
        assert not woken
        partition.rise_to(8)
        await asyncio.sleep(0)
        assert woken == list(range(1000))
        assert not partition.asked

    run(case)


def test_each_waiter_is_woken_once_by_its_own_offset():
    async def case() -> None:
        partition: Any = FakePartition()
        waiting, woken = WaitingRequests(), []
        for offset in (9, 3, 5):
            waiting.wait_beyond(partition, offset, lambda offset=offset: woken.append(offset))
        for high_watermark in (3, 4, 6, 20):
            partition.rise_to(high_watermark)
            await asyncio.sleep(0)
        assert woken == [3, 5, 9]

    run(case)


def test_a_late_waiter_is_woken_immediately():
    async def case() -> None:
        partition: Any = FakePartition()
        partition.high_watermark = 4
        woken: list[int] = []
        WaitingRequests().wait_beyond(partition, 3, lambda: woken.append(1))
        assert woken == [1]
        assert not partition.asked

    run(case)


def test_a_cancelled_waiter_leaves_nothing_behind_even_during_a_callback():
    async def case() -> None:
        partition: Any = FakePartition()
        waiting, woken = WaitingRequests(), []
        cancel = waiting.wait_beyond(partition, 3, lambda: woken.append("left"))
        partition.rise_to(9)  # the call is on its way to the loop
        cancel()
        cancel()
        partition.high_watermark = 0
        waiting.wait_beyond(partition, 20, lambda: woken.append("stays"))
        await asyncio.sleep(0)
        assert not woken
        partition.rise_to(21)
        await asyncio.sleep(0)
        assert woken == ["stays"]
        assert not partition.asked

    run(case)


def test_a_long_poll_asks_again_only_about_the_partitions_that_advanced():
    async def case() -> None:
        partitions: Any = [FakePartition() for _ in range(100)]
        exchange: Any = SimpleNamespace(wait_for_disconnect=asyncio.Event().wait)

        async def wait(*, risen_before: Any = (), risen_meanwhile: Any = ()) -> None:
            seen = [AwaitedOffset(one, one.high_watermark) for one in partitions]
            for one in risen_before:
                one.rise_to(one.high_watermark + 1)
            waiting = asyncio.create_task(poll.wait(seen))
            await asyncio.sleep(0)
            for one in risen_meanwhile:
                one.rise_to(one.high_watermark + 1)
            await asyncio.wait_for(waiting, 10)

        with LongPoll(WaitingRequests(), exchange, wait_ms=60_000) as poll:
            await wait(risen_meanwhile=partitions[7:9])
            await wait(risen_meanwhile=partitions[7:8])
            await wait(risen_before=partitions[9:10])
            await wait(risen_meanwhile=partitions[9:10])
            asked = {7: 3, 8: 2, 9: 2}
            assert [one.times_asked for one in partitions] == [asked.get(n, 1) for n in range(100)]
        assert not any(one.asked for one in partitions)

    run(case)


def written(content: bytes) -> RenderedPage:
    return RenderedPage(content, 5, len(content), 1)


def test_readers_at_the_end_share_one_page():
    async def case() -> None:
        counter = HttpMetrics().shared_pages
        pages, made = SharedPages(counter), []

        async def make() -> RenderedPage:
            await asyncio.sleep(0)
            made.append(1)
            return written(b"page")

        got = await asyncio.gather(*(pages.get(("a",), AT_END, make) for _ in range(50)))
        assert {page.content for page in got} == {b"page"}
        assert made == [1]
        counts = {
            s.labels["result"]: s.value for s in counter.collect()[0].samples if "total" in s.name
        }
        assert counts == {"hit": 49, "miss": 1}
        await pages.get(("a",), IN_THE_MIDDLE, make)
        assert made == [1, 1], "who reads old records reads alone"

    run(case)


def test_a_page_that_failed_is_rendered_by_the_next_reader():
    async def case() -> None:
        pages, tries = SharedPages(HttpMetrics().shared_pages), []

        async def make() -> RenderedPage:
            tries.append(1)
            await asyncio.sleep(0)
            if len(tries) == 1:
                raise OSError("once")
            return written(b"page")

        asked = [pages.get(("a",), AT_END, make) for _ in range(3)]
        got = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(got[0], OSError)
        assert [page.content for page in got[1:]] == [b"page", b"page"]
        assert len(tries) == 2

    run(case)


@pytest.mark.parametrize("size_bytes", [1, 10_000, 200_000])
def test_cached_pages_are_limited_in_bytes(size_bytes):
    async def case() -> None:
        pages = SharedPages(HttpMetrics().shared_pages, limit_bytes=100_000)

        async def make() -> RenderedPage:
            return written(b"x" * size_bytes)

        each = size_bytes + KEY_BYTES
        for number in range(500):
            await pages.get((number,), AT_END, make)
            assert pages.size_bytes <= 100_000
        assert pages.size_bytes == 100_000 // each * each

    run(case)


def test_a_page_too_large_to_cache_is_rendered_once_for_all_waiters():
    async def case() -> None:
        pages, made = SharedPages(HttpMetrics().shared_pages), []

        async def make() -> RenderedPage:
            await asyncio.sleep(0)
            made.append(1)
            return written(b"x" * (PAGE_MAX_BYTES + 1))

        got = await asyncio.gather(*(pages.get(("a",), AT_END, make) for _ in range(50)))
        assert len({id(page) for page in got}) == len(made) == 1
        assert pages.size_bytes == 0

    run(case)


def test_an_empty_page_is_not_cached():
    async def case() -> None:
        pages, made = SharedPages(HttpMetrics().shared_pages), []

        async def make() -> RenderedPage:
            made.append(1)
            return written(b"")

        for _ in range(3):
            await pages.get(("a",), NOTHING, make)
        assert (len(made), pages.size_bytes) == (3, 0)

    run(case)
