import asyncio
import gc
import threading
import weakref
from collections.abc import Callable, Collection
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest

from tierlog.api.http.context import AllCompleted


def running() -> Future[int]:
    future: Future[int] = Future()
    assert future.set_running_or_notify_cancel()
    return future


async def wait_for(futures: Collection[Future[Any]]) -> None:
    await AllCompleted(futures)


async def begun(futures: Collection[Future[Any]]) -> asyncio.Task[None]:
    task = asyncio.create_task(wait_for(futures))
    await asyncio.sleep(0)
    return task


async def turns_until_it_goes_on(
    end: Callable[[Future[int]], None], *, count: int, by_thread: bool
) -> int:
    futures = [running() for _ in range(count)]
    task = await begun(futures)
    for future in futures[:-1]:
        end(future)
    await asyncio.sleep(0)
    assert not task.done()
    if by_thread:
        thread = threading.Thread(target=end, args=(futures[-1],))
        thread.start()
        thread.join()  # it ends before the next iteration of the loop
    else:
        end(futures[-1])
    turns = 0
    while not task.done():
        await asyncio.sleep(0)
        turns += 1
    await task
    return turns


@pytest.mark.parametrize("by_thread", [True, False])
@pytest.mark.parametrize("count", [1, 3])
def test_a_task_resumes_one_loop_iteration_after_the_last_future_is_done(
    count: int, by_thread: bool
) -> None:
    def succeed(future: Future[int]) -> None:
        future.set_result(1)

    assert asyncio.run(turns_until_it_goes_on(succeed, count=count, by_thread=by_thread)) == 1


def test_a_failed_future_is_done_and_its_error_is_left_to_the_waiter() -> None:
    def fail(future: Future[int]) -> None:
        future.set_exception(OSError("disk"))

    assert asyncio.run(turns_until_it_goes_on(fail, count=2, by_thread=True)) == 1


def test_futures_that_are_already_done_do_not_wait() -> None:
    async def main() -> None:
        future = running()
        future.set_result(1)
        await asyncio.wait_for(wait_for([future]), timeout=30)

    asyncio.run(main())


def test_results_are_released_without_the_garbage_collector() -> None:
    async def main() -> weakref.ref[Future[int]]:
        future = running()
        task = await begun([future])
        future.set_result(1)
        await task
        return weakref.ref(future)

    gc.disable()
    try:
        assert asyncio.run(main())() is None
    finally:
        gc.enable()


def test_cancelling_the_task_cancels_queued_futures_but_not_running_ones() -> None:
    async def main() -> None:
        running_one, queued = running(), Future[int]()
        task = await begun([running_one, queued])
        task.cancel()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert queued.cancelled()
        running_one.set_result(1)  # later: no second wake-up
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    asyncio.run(main(), debug=True)


def test_a_future_cancelled_elsewhere_cancels_the_waiter() -> None:
    async def main() -> None:
        queued = Future[int]()
        task = await begun([queued])
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())


def test_a_cancellation_requested_before_the_wait_takes_effect() -> None:
    async def cancelled_already() -> None:
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await AllCompleted([running()])

    async def main() -> None:
        with pytest.raises(asyncio.CancelledError):
            await asyncio.create_task(cancelled_already())

    asyncio.run(main())


def test_threads_that_finish_at_the_same_time_wake_the_task_once() -> None:
    async def main() -> None:
        with ThreadPoolExecutor(8) as threads:
            for _ in range(500):
                gate = threading.Barrier(8)
                await asyncio.wait_for(
                    wait_for([threads.submit(gate.wait) for _ in range(8)]), timeout=30
                )

    asyncio.run(main())


class ClosesWhenItIsLookedAt(asyncio.SelectorEventLoop):
    stops = False

    def is_closed(self) -> bool:
        is_closed = super().is_closed()
        if self.stops:
            self.stops = False
            self.close()
        return is_closed


def test_a_loop_that_closes_while_a_thread_finishes_is_not_an_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    futures, loop = [running(), running()], ClosesWhenItIsLookedAt()

    async def wait() -> None:
        for future in futures:
            AllCompleted([future]).add_done_callback(lambda _: None, context=copy_context())

    loop.run_until_complete(wait())
    loop.stops = True
    futures[0].set_result(1)  # an exception in a callback is logged
    loop.stops = False
    loop.close()
    futures[1].set_result(1)
    assert caplog.records == []


def test_asyncio_timeouts_cancel_the_wait() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0):
                await AllCompleted([running()])

    asyncio.run(main())
