"""`client.producer()` of the asynchronous client: the producer of `producer.py`, awaited."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, Self, TypeVar

from record_format.clock import monotonic_ms, wall_clock_ms
from record_format.encode import NO_HEADERS
from record_format.errors import TierlogError
from tierlog.client.answers import TopicDescription
from tierlog.client.batching import (
    Accumulator,
    Batching,
    Pending,
    Placed,
    outgoing,
    place_of,
)
from tierlog.client.exchange import RetryPolicy, Steps
from tierlog.client.partitioner import Partitioner
from tierlog.client.records import GivenHeaders, Value
from tierlog.client.sender import Sender
from tierlog.client.times import Time

T = TypeVar("T")


class AsyncRunner(Protocol):
    """What a producer needs of a client."""

    retries: RetryPolicy

    async def run(self, steps: Steps[T]) -> T: ...
    async def describe_topic(self, topic: str) -> TopicDescription: ...


class AsyncProducer:
    """Gathers records into batches and sends them, each exactly once; an async context manager.

    `await send(...)` only waits for room, and returns a future that says where the record was
    appended.
    """

    def __init__(
        self,
        client: AsyncRunner,
        batching: Batching | None = None,
        *,
        clock: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._client = client
        self._batching = batching or Batching()
        self._clock = clock
        self._waiting = Accumulator(
            self._batching, lambda: asyncio.get_running_loop().create_future
        )
        self._partitioner = Partitioner(batch_bytes=self._batching.batch_bytes)
        self._sender = Sender(self._batching)
        self._changed = asyncio.Condition()  # what waits became less
        self._news = asyncio.Event()  # for the task that sends
        self._flushing = 0
        self._turn_ms = 0
        self._task: asyncio.Task[None] | None = None
        self._closed = False
        self._failure: BaseException | None = None

    async def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: GivenHeaders = NO_HEADERS,
        partition: int | None = None,
    ) -> asyncio.Future[Placed]:
        """Hand over one record; waits if the buffer is full."""
        topic, partition = place_of(topic, partition)
        now_ms = self._clock()
        written_ms = wall_clock_ms()
        record = outgoing(value, key=key, timestamp=timestamp, headers=headers, now_ms=written_ms)
        if partition is None and self._partitioner.claims_look(topic, now_ms=now_ms):
            await self._learn(topic, now_ms)
        if self._task is None:
            self._task = asyncio.create_task(self._work(), name="tierlog-producer")
        if now_ms != self._turn_ms:  # or a loop over `send` would keep all else from running
            self._turn_ms = now_ms
            await asyncio.sleep(0)
        if not self._waiting.has_room(record):
            async with self._changed:
                await self._changed.wait_for(lambda: self._waiting.has_room(record))
        self._check_open()
        if partition is None:
            partition = self._partitioner.choose(topic, record)
        placed, is_news = self._waiting.add((topic, partition), record, now_ms=now_ms)
        if is_news:
            self._news.set()
        return placed

    async def _learn(self, topic: str, now_ms: int) -> None:
        try:
            self._partitioner.learn(await self._client.describe_topic(topic), now_ms=now_ms)
        except TierlogError as error:
            self._partitioner.keep(topic, error)

    async def flush(self) -> None:
        """Send everything now, and wait for the answers."""
        async with self._changed:
            self._flushing += 1
            self._news.set()
            try:
                await self._changed.wait_for(lambda: self._waiting.is_empty)
            finally:
                self._flushing -= 1

    async def aclose(self) -> None:
        """Flush, and end the task, which goes on to the end if whoever waits here is cancelled."""
        try:
            await self.flush()
        finally:
            self._closed = True
            self._news.set()
        if self._task is not None:
            await asyncio.shield(self._task)

    def __repr__(self) -> str:
        return f"<AsyncProducer of {self._client!r}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the producer failed; create a new one") from self._failure
        if self._closed:
            raise RuntimeError("the producer is closed")

    async def _work(self) -> None:
        try:
            while (pending := await self._next()) is not None:
                await self._send(pending)
        except BaseException as error:  # cancelled, a bug, or its client was closed
            self._failure = error
            self._waiting.fail_all(error)
            async with self._changed:
                self._changed.notify_all()
            raise

    async def _send(self, pending: Pending[asyncio.Future[Placed]]) -> None:
        policy = self._client.retries
        steps = self._sender.deliver(pending, policy, now_ms=self._clock())
        try:
            await self._client.run(steps)
        except BaseException as error:
            self._failure = error
            self._waiting.fail_all(error)  # before it is finished: it is one of them
            raise
        finally:
            async with self._changed:
                self._waiting.finish(pending)
                self._changed.notify_all()

    async def _next(self) -> Pending[asyncio.Future[Placed]] | None:
        while True:
            self._news.clear()
            now_ms = self._clock()
            flushing = self._flushing > 0 or self._closed  # nothing is left behind
            pending = self._waiting.take_due(now_ms=now_ms, flushing=flushing)
            if pending is not None or self._closed:
                return pending
            due_ms = self._waiting.next_due_ms()
            with suppress(TimeoutError):
                async with asyncio.timeout(None if due_ms is None else (due_ms - now_ms) / 1000):
                    await self._news.wait()
