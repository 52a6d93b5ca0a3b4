"""`client.producer()` of the asynchronous client: see `producer`.

Concurrent calls of `send` for a topic take turns, in the order in which they were made: each may
have to wait for the topic's description, for room, or for other tasks.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Self

from tierlog.client.batching import (
    Batching,
    PendingBatch,
    PreparedRecord,
    RecordMetadata,
    all_finished,
    check_topic_partition,
    prepare_record,
)
from tierlog.client.records import HeadersLike, Time, Value
from tierlog.client.sender import ProducerCore, Within
from tierlog.host.clock import monotonic_ms, wall_clock_ms
from tierlog.record_format.encode import NO_HEADERS
from tierlog.record_format.errors import TierlogError

if TYPE_CHECKING:
    from tierlog.client.client import AsyncClient

_Pending = PendingBatch[asyncio.Future[RecordMetadata]]


class _Turns(asyncio.Lock):
    """Of the calls of `send` for one topic. `error`: why it cannot be described, which those that
    waited for their turn meanwhile need not try again.
    """

    error: TierlogError | None = None


class AsyncProducer(ProducerCore[asyncio.Future[RecordMetadata]]):
    """Batches records and sends them, each exactly once; an async context manager.

    `await send(...)` waits only for room in the buffer, and returns a future for the record's
    offset.
    """

    _client: AsyncClient

    def __init__(
        self,
        client: AsyncClient,
        batching: Batching | None = None,
        *,
        clock: Callable[[], int] = monotonic_ms,
        within: Within | None = None,
    ) -> None:
        super().__init__(
            client, batching, clock, lambda: asyncio.get_running_loop().create_future, within
        )
        self._finished = asyncio.Event()  # set for a moment, whenever a batch is finished
        self._turns: defaultdict[str, _Turns] = defaultdict(_Turns)
        self._wake = asyncio.Event()  # for the sending tasks
        self._yielded_ms = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: HeadersLike = NO_HEADERS,
        partition: int | None = None,
    ) -> asyncio.Future[RecordMetadata]:
        """Buffer one record; waits if the buffer is full."""
        topic, partition = check_topic_partition(topic, partition)
        written_ms = wall_clock_ms()
        record = prepare_record(
            value, key=key, timestamp=timestamp, headers=headers, now_ms=written_ms
        )
        turns = self._turns[topic]
        async with turns:
            now_ms = self._clock()
            if partition is None:
                await self._describe_in_turn(topic, turns, now_ms)
            if not self._tasks:
                self._start_task()
            await self._wait_for_room(record, now_ms)
            self._check_open()
            if partition is None:
                partition = self._partitioner.choose(topic, record)
            future, wake_sender = self._accumulator.buffer_record(
                (topic, partition), record, now_ms=now_ms
            )
        if wake_sender:
            self._wake.set()
        return future

    async def _describe_in_turn(self, topic: str, turns: _Turns, now_ms: int) -> None:
        """Describe the topic to the partitioner, if it is unknown or was described long ago."""
        if turns.error is not None:
            raise turns.error.with_traceback(None)
        if not self._partitioner.claim_refresh(topic, now_ms=now_ms):
            return
        try:
            await self._client.run(self._describe(topic, now_ms))
        except TierlogError as error:
            turns.error = error
            del self._turns[topic]  # later calls try again
            raise

    async def _wait_for_room(self, record: PreparedRecord, now_ms: int) -> None:
        """Also yield once a millisecond: else a loop over `send` would starve other tasks."""
        if now_ms != self._yielded_ms:
            self._yielded_ms = now_ms
            await asyncio.sleep(0)
        if not self._accumulator.has_room(record):
            await self._wait_until(lambda: self._accumulator.has_room(record))

    async def flush(self) -> None:
        """Send now what was sent before, and wait for the responses. Other tasks may continue to
        send.
        """
        self._flushing += 1
        self._wake.set()
        unfinished = self._accumulator.unfinished()
        try:
            await self._wait_until(lambda: all_finished(unfinished))
        finally:
            self._flushing -= 1

    async def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        """Until the end of a batch makes it true."""
        while not is_reached():
            await self._finished.wait()

    async def aclose(self) -> None:
        """Flush, and end the tasks, which run to their end even if the caller is cancelled."""
        try:
            await self.flush()
        finally:
            self._closed = True
            self._wake.set()
        for task in self._tasks:
            await asyncio.shield(task)

    async def abandon(self, error: BaseException) -> None:
        """Fail what is buffered instead of sending it, and end."""
        self._accumulator.fail_queued(error)
        await self.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- in the tasks that send -------------------------------------------------------------------

    def _start_task(self) -> None:
        in_flight: list[_Pending] = []  # at most one
        task = asyncio.create_task(self._work(in_flight), name="tierlog-producer")
        task.add_done_callback(partial(self._on_end, in_flight))
        self._tasks.append(task)

    async def _work(self, in_flight: list[_Pending]) -> None:
        while (pending := await self._next()) is not None:
            in_flight.append(pending)
            await self._client.run(self._deliver(pending))
            self._finish(in_flight)

    def _on_end(self, in_flight: list[_Pending], task: asyncio.Task[None]) -> None:
        """Not in the task itself: one that is cancelled before its first step does nothing."""
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is not None:  # cancelled, a bug, or the client was closed
            self._failure = self._failure or error
            self._accumulator.fail_queued(error, *in_flight)
            self._wake.set()
            self._finish(in_flight)

    def _finish(self, in_flight: list[_Pending]) -> None:
        while in_flight:
            self._accumulator.finish(in_flight.pop())
        self._finished.set()
        self._finished.clear()

    async def _next(self) -> _Pending | None:
        while True:
            self._wake.clear()
            now_ms = self._clock()
            pending = self._take_due(now_ms)
            if pending is not None:
                self._leave_a_task_waiting()
            if pending is not None or self._is_ending():
                return pending
            due_ms = self._accumulator.next_due_ms()
            self._idle += 1
            try:
                with suppress(TimeoutError):
                    async with asyncio.timeout(
                        None if due_ms is None else (due_ms - now_ms) / 1000
                    ):
                        await self._wake.wait()
            finally:
                self._idle -= 1

    def _leave_a_task_waiting(self) -> None:
        """For batches of other partitions, while this task waits for its response."""
        if not self._idle and len(self._tasks) < self._batching.max_in_flight:
            self._start_task()
