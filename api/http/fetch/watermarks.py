"""One question per partition, however many requests wait for its high watermark.

* The thread that flushes makes one call to the event loop, not one for each waiting client: the
  producer does not wait for the readers.
* On the event loop only, except for the one callback that a partition is given.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable

from broker.partition import Partition

Wake = Callable[[], object]


class Watermarks:
    """All waiting requests of this process, by partition."""

    def __init__(self) -> None:
        self._partitions: dict[Partition, _Waiting] = {}

    def wait_beyond(self, partition: Partition, offset: int, wake: Wake) -> Callable[[], None]:
        """Call `wake` once when the high watermark is above `offset` or the partition is over; at
        once if it is already.

        Returns the function that cancels it, which may be called at any time and more than once.
        """
        waiting = self._partitions.get(partition)
        if waiting is None:
            waiting = self._partitions[partition] = _Waiting(partition)
        number = waiting.add(offset, wake)

        def cancel() -> None:
            if waiting.drop(number) and self._partitions.get(partition) is waiting:
                del self._partitions[partition]

        return cancel

    def look_again(self, partition: Partition) -> None:
        """Wake all who wait for `partition`: something else in their response has changed."""
        waiting = self._partitions.get(partition)
        if waiting is not None:
            waiting.wake_all()


class _Waiting:
    """The requests that wait for one partition."""

    __slots__ = ("_cancel", "_loop", "_lowest", "_numbers", "_partition", "_round", "_waiters")

    def __init__(self, partition: Partition) -> None:
        self._partition, self._loop = partition, asyncio.get_running_loop()
        self._waiters: dict[int, tuple[int, Wake]] = {}
        self._numbers = itertools.count()
        self._cancel: Callable[[], object] | None = None
        self._lowest = 0  # offset above which the partition calls back
        self._round = 0  # of registering the callback

    def add(self, offset: int, wake: Wake) -> int:
        number = next(self._numbers)
        if offset < self._partition.log.high_watermark or self._partition.is_defunct:
            wake()
            return number
        self._waiters[number] = (offset, wake)
        if self._cancel is None or offset < self._lowest:
            self._ask(offset)
        return number

    def drop(self, number: int) -> bool:
        """Remove one; whether nobody waits any more."""
        self._waiters.pop(number, None)
        if self._waiters:
            return False
        self._stop_asking()
        return True

    def wake_all(self) -> None:
        self._stop_asking()
        wakes = [wake for _, wake in self._waiters.values()]
        self._waiters.clear()
        for wake in wakes:
            wake()

    def _ask(self, offset: int) -> None:
        self._stop_asking()
        self._round += 1
        this_round, self._lowest = self._round, offset

        def called() -> None:
            try:
                self._loop.call_soon_threadsafe(self._wake, this_round)
            except RuntimeError:  # the loop is closed: the server has stopped
                assert self._loop.is_closed()

        self._cancel = self._partition.wait_beyond(offset, called)

    def _stop_asking(self) -> None:
        if self._cancel is not None:
            self._cancel()
            self._cancel = None

    def _wake(self, of_round: int) -> None:
        if of_round != self._round or self._cancel is None:
            return  # a callback of an earlier round, already running when that was cancelled
        self._cancel = None
        high_watermark, is_defunct = self._partition.log.high_watermark, self._partition.is_defunct
        due = [
            n for n, (offset, _) in self._waiters.items() if is_defunct or offset < high_watermark
        ]
        wakes = [self._waiters.pop(number)[1] for number in due]
        if self._waiters:
            self._ask(min(offset for offset, _ in self._waiters.values()))
        for wake in wakes:
            wake()
