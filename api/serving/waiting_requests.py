"""Requests that wait until a partition's high watermark advances, through either door.

* Without a thread or polling: a waiting request is an entry for each partition.
* A partition has one callback, however many requests wait for its high watermark. The thread that
  flushes makes one call to the event loop, not one per waiting client: producers do not pay for the
  number of readers.
* Used on the event loop only, except for the callback that is registered with a partition.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import TypeVar

from tierlog.api.serving.workers import call_on_loop
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.topics import Topic
from tierlog.record_format.errors import TierlogError

T = TypeVar("T")
A = TypeVar("A")

Wake = Callable[[], object]


class WaitingRequests:
    """All long polls and tails of this process, and what they wait for, by partition."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, _Waiting] = {}
        self._cancels: set[Callable[[], None]] = set()
        self.is_stopping = False  # the server is

    @property
    def count(self) -> int:
        return len(self._cancels)

    def add_cancel(self, cancel: Callable[[], None]) -> None:
        """`cancel` is called when the server stops; immediately if it is stopping already."""
        self._cancels.add(cancel)
        if self.is_stopping:
            cancel()

    def discard_cancel(self, cancel: Callable[[], None]) -> None:
        self._cancels.discard(cancel)

    def stop(self) -> None:
        """Have every long poll respond with what it has, and end every tail."""
        self.is_stopping = True
        for cancel in list(self._cancels):
            cancel()

    def answer_later(
        self,
        begin: Callable[[Callable[[T], None]], None],
        build: Callable[[T], A],
        *,
        stop: Callable[[], A],
    ) -> asyncio.Future[A]:
        """What `build`, on the event loop, makes of the value that `begin`'s callback is called
        with, from any thread. If the server stops before, it is what `stop` returns, or the error
        that it raises.
        """
        loop = asyncio.get_running_loop()
        later: asyncio.Future[A] = loop.create_future()

        def complete(value: T) -> None:
            if not later.done():
                later.set_result(build(value))

        def reply(value: T) -> None:
            call_on_loop(loop, complete, value)

        def cancel() -> None:
            if not later.done():
                try:
                    later.set_result(stop())
                except TierlogError as error:
                    later.set_exception(error)

        self.add_cancel(cancel)
        later.add_done_callback(lambda _: self.discard_cancel(cancel))
        if not later.done():
            begin(reply)
        return later

    def wait_beyond(self, partition: Partition, offset: int, wake: Wake) -> Callable[[], None]:
        """Call `wake` once, when the high watermark is above `offset` or the partition has been
        closed for good; immediately if that is already so.

        Returns a function that cancels the wait; it may be called at any time and more than once.
        """
        waiting = self._partitions.get(partition)
        if waiting is None:
            waiting = self._partitions[partition] = _Waiting(partition)
        number = waiting.add_waiter(offset, wake)

        def cancel() -> None:
            if waiting.remove_waiter(number) and self._partitions.get(partition) is waiting:
                del self._partitions[partition]

        return cancel

    def wake_all(self, partition: Partition) -> None:
        """Wake all requests that wait for `partition`: it changed in another way."""
        waiting = self._partitions.get(partition)
        if waiting is not None:
            waiting.wake_all()

    def wake_topic(self, topic: Topic) -> None:
        """Wake all requests that wait for a partition of it: it has new ones."""
        for partition in list(topic.partitions.values()):
            self.wake_all(partition)


class _Waiting:
    """The requests that wait for one partition."""

    __slots__ = ("_cancel", "_generation", "_loop", "_lowest", "_numbers", "_partition", "_waiters")

    def __init__(self, partition: Partition) -> None:
        self._partition, self._loop = partition, asyncio.get_running_loop()
        self._waiters: dict[int, tuple[int, Wake]] = {}
        self._numbers = itertools.count()
        self._cancel: Callable[[], object] | None = None
        self._lowest = 0  # the offset that the callback is registered for
        self._generation = 0  # of the callback

    def add_waiter(self, offset: int, wake: Wake) -> int:
        number = next(self._numbers)
        if offset < self._partition.high_watermark or self._partition.is_defunct:
            wake()
            return number
        self._waiters[number] = (offset, wake)
        if self._cancel is None or offset < self._lowest:
            self._register(offset)
        return number

    def remove_waiter(self, number: int) -> bool:
        """Remove a waiter. Returns whether none is left."""
        self._waiters.pop(number, None)
        if self._waiters:
            return False
        self._unregister()
        return True

    def wake_all(self) -> None:
        self._unregister()
        wakes = [wake for _, wake in self._waiters.values()]
        self._waiters.clear()
        for wake in wakes:
            wake()

    def _register(self, offset: int) -> None:
        self._unregister()
        self._generation += 1
        generation, self._lowest = self._generation, offset

        def callback() -> None:
            call_on_loop(self._loop, self._wake, generation)

        self._cancel = self._partition.wait_beyond(offset, callback)

    def _unregister(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _wake(self, generation: int) -> None:
        if generation != self._generation or self._cancel is None:
            return  # an earlier callback, which was already running when it was cancelled
        self._cancel = None
        high_watermark, is_defunct = self._partition.high_watermark, self._partition.is_defunct
        due = [
            n for n, (offset, _) in self._waiters.items() if is_defunct or offset < high_watermark
        ]
        wakes = [self._waiters.pop(number)[1] for number in due]
        if self._waiters:
            self._register(min(offset for offset, _ in self._waiters.values()))
        for wake in wakes:
            wake()
