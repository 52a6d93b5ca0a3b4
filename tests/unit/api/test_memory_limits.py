"""Whose turn it is to decode."""

import asyncio
from contextlib import AbstractAsyncContextManager, AsyncExitStack

import pytest

from tierlog.api.http.memory_limits import PAGE_BASE_BYTES, DecodingMemory

MIB = 1 << 20


async def in_steps(*steps: asyncio.Task[None]) -> list[bool]:
    """Which of the tasks are done once none can go on."""
    for _ in range(10):
        await asyncio.sleep(0)
    return [step.done() for step in steps]


class Holders:
    def __init__(self) -> None:
        self.held: list[AsyncExitStack] = []

    def hold(self, memory: AbstractAsyncContextManager[None]) -> asyncio.Task[None]:
        stack = AsyncExitStack()
        self.held.append(stack)

        async def enter() -> None:
            await stack.enter_async_context(memory)

        return asyncio.create_task(enter())


def test_who_asks_first_is_served_first_and_nobody_waits_for_ever() -> None:
    async def run() -> None:
        memory, holders = DecodingMemory(2 * PAGE_BASE_BYTES), Holders()
        first = holders.hold(memory.for_page(0))
        large = holders.hold(memory.for_page(100 * MIB))  # more than all
        small = holders.hold(memory.for_page(0))
        assert await in_steps(first, large, small) == [True, False, False]
        await holders.held[0].aclose()
        assert await in_steps(large, small) == [True, False]
        await holders.held[1].aclose()
        assert await in_steps(small) == [True]
        await holders.held[2].aclose()
        assert memory.held == 0

    asyncio.run(run())


def test_streams_leave_half_to_pages() -> None:
    async def run() -> None:
        memory, holders = DecodingMemory(4 * PAGE_BASE_BYTES), Holders()
        streams = [holders.hold(memory.for_stream(PAGE_BASE_BYTES)) for _ in range(3)]
        page = holders.hold(memory.for_page(0))
        assert await in_steps(*streams, page) == [True, True, False, True]
        await holders.held[0].aclose()
        assert await in_steps(streams[2]) == [True]

    asyncio.run(run())


def test_who_gives_up_holds_nothing() -> None:
    async def run() -> None:
        memory, holders = DecodingMemory(PAGE_BASE_BYTES), Holders()
        first = holders.hold(memory.for_page(0))
        gone, next_one = (holders.hold(memory.for_page(0)) for _ in range(2))
        await in_steps(first, gone, next_one)
        gone.cancel()
        assert await in_steps(gone, next_one) == [True, False]
        await holders.held[0].aclose()
        assert await in_steps(next_one) == [True]
        with pytest.raises(asyncio.CancelledError):
            await gone
        await holders.held[2].aclose()
        assert memory.held == 0

    asyncio.run(run())


def test_what_expands_far_takes_turns_beside_streams_that_nobody_reads() -> None:
    async def run() -> None:
        memory, holders = DecodingMemory(4 * PAGE_BASE_BYTES), Holders()
        stream = holders.hold(memory.for_stream(2 * PAGE_BASE_BYTES))
        expansions = [holders.hold(memory.for_expansion(2 * PAGE_BASE_BYTES)) for _ in range(2)]
        assert await in_steps(stream, *expansions) == [True, True, False]
        page = holders.hold(memory.for_page(0))
        assert await in_steps(page) == [False]
        await holders.held[1].aclose()
        assert await in_steps(page, expansions[1]) == [True, False], "the page asked first"

    asyncio.run(run())
