"""`tierlog.AsyncClient`: the calls of `tierlog.Client`, awaited.

Nothing is decided here: `calls` says what is sent and read, `exchange` when it is sent again,
`cursor` what is read next. This file sends and waits. One client serves any number of tasks of one
event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import httpx

from record_format.errors import RetriableError, TierlogError
from tierlog.client import answers, calls, group_calls
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start
from tierlog.client.cursor import PartitionCursor
from tierlog.client.exchange import NO_RETRIES, Call, Outcome, Pause, RetryPolicy, Steps, exchange
from tierlog.client.follow import Turns, begin
from tierlog.client.group_calls import GroupPlace
from tierlog.client.methods import awaited
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.records import ConsumedRecord
from tierlog.client.stopping import Requests, Trace
from tierlog.client.times import Time, to_ms
from tierlog.client.transport import AT_A_TIME, Connection, to_outcome, to_reply
from tierlog.client.wire import Reply, Request

T = TypeVar("T")


class AsyncClient:
    """A connection to one broker; an async context manager. See `Client` for what calls mean."""

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = Connection(
            server=server,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            timeout_s=timeout_s,
        )
        self.retries = retries or RetryPolicy()
        self._http, self._waiting = self._connection.clients(httpx.AsyncClient, transport)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._turns = asyncio.Semaphore(AT_A_TIME)
        self._reading_for: set[GroupPlace] = set()
        self._committing = asyncio.Lock()
        self._requests = Requests()

    def __repr__(self) -> str:
        return self._connection.shown(self)

    async def aclose(self) -> None:
        """As `Client.close`: who broke off an `async for` may not have been told of it yet."""
        try:
            for place in list(self._reading_for):
                with suppress(TierlogError):
                    await self._commit(place)
        finally:
            await self._http.aclose()
            await self._waiting.aclose()
            await self._requests.stop()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- topics

    create_topic = awaited(calls.create_topic)
    list_topics = awaited(calls.list_topics)
    describe_topic = awaited(calls.describe_topic)
    alter_topic = awaited(calls.alter_topic)
    delete_topic = awaited(calls.delete_topic)

    # --- produce

    produce = awaited(calls.produce)
    produce_encoded = awaited(calls.produce_encoded)
    produce_batches = awaited(calls.produce_batches)
    init_producer = awaited(calls.init_producer)

    def producer(self, batching: Batching | None = None) -> AsyncProducer:
        """Record by record, gathered into batches, each appended exactly once."""
        return AsyncProducer(self, batching)

    # --- fetch

    fetch = awaited(calls.fetch)
    fetch_batches = awaited(calls.fetch_batches)

    async def consume(
        self,
        topic: str,
        *,
        partitions: Sequence[int] | None = None,
        offset: Start | Mapping[int, Start] = "earliest",
        end_offset: int | None = None,
        timestamp: Time | None = None,
        follow: bool = False,
        group: str | None = None,
        limits: Limits = DEFAULT_LIMITS,
    ) -> AsyncGenerator[ConsumedRecord, None]:
        place = None
        if group is not None:
            place = GroupPlace(group, topic, timestamp=timestamp, now_s=time.monotonic())
        first = PartitionCursor(
            topic,
            timestamp=to_ms(timestamp),
            end_offset=end_offset,
            follow=follow,
            limits=limits,
        )
        steps = begin(first, partitions, offset, place=place, retries=self.retries)
        turns = await self.run(steps)
        if place is not None:
            async with aclosing(self._consume_for(place, turns)) as records:
                async for record in records:
                    yield record
            return
        while turn := turns.next_turn(time.monotonic()):
            for record in turn.take(await self.run(turn.steps)):
                yield record

    async def _consume_for(
        self, place: GroupPlace, turns: Turns
    ) -> AsyncGenerator[ConsumedRecord, None]:
        self._reading_for.add(place)
        try:
            while turn := turns.next_turn(time.monotonic()):
                for record in turn.take(await self.run(turn.steps)):
                    place.hand_out(record)
                    yield record
                if turn.cursor is not None:
                    place.finish(turn.cursor)
                if (commit := place.due_commit(time.monotonic())) is not None:
                    await self.run(exchange(commit, turns.policy))
        except BaseException:
            with suppress(TierlogError):
                await self._commit(place)
            raise
        finally:
            self._reading_for.discard(place)
        await self._commit(place)

    async def _commit(self, place: GroupPlace) -> None:
        async with self._committing:  # who closes the client waits for one that is under way
            commit = place.commit()
            if commit is not None and not self._http.is_closed:
                await self.call(commit)

    # --- groups

    commit_offsets = awaited(group_calls.commit_offsets)
    group = awaited(group_calls.group)
    groups = awaited(group_calls.groups)
    delete_group = awaited(group_calls.delete_group)

    # --- offsets, segments, storage

    offsets = awaited(calls.offsets)
    offset_for_timestamp = awaited(calls.offset_for_timestamp)
    manifest = awaited(calls.manifest)
    storage_report = awaited(calls.storage_report)
    metrics = awaited(calls.metrics)
    verify = awaited(calls.verify)
    offload = awaited(calls.offload)
    trim = awaited(calls.trim)

    async def segments(
        self, topic: str, partition: int, *, from_offset: int | None = None
    ) -> AsyncGenerator[answers.Segment, None]:
        while True:
            page = await self.call(calls.segments_page(topic, partition, from_offset=from_offset))
            for segment in page.segments:
                yield segment
            if page.next_from_offset is None:
                return
            from_offset = page.next_from_offset

    # --- health

    async def is_alive(self) -> bool:
        try:
            return await self.run(exchange(calls.is_alive(), NO_RETRIES))
        except (RetriableError, UnexpectedAnswer):
            return False

    async def readiness(self) -> answers.Readiness:
        return await self.run(exchange(calls.readiness(), NO_RETRIES))

    # --- driving

    async def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return await self.run(exchange(call, self.retries))

    async def run(self, steps: Steps[T]) -> T:
        """Do what a conversation asks for, step by step, until it has its answer."""
        loop = asyncio.get_running_loop()
        if (self._loop or loop) is not loop:
            raise RuntimeError("this client belongs to another event loop: create one in each")
        self._loop = loop
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                answer: T = done.value
                return answer
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                outcome = None
            else:
                outcome = await self._transmit(step)

    async def _transmit(self, request: Request) -> Reply | Outcome:
        if request.extra_wait_s:
            send = partial(self._send, self._waiting, request)
            return await self._requests.run(send, at_end=lambda: None)
        await self._turns.acquire()
        send = partial(self._send, self._http, request)
        return await self._requests.run(send, at_end=self._turns.release)

    async def _send(
        self, http: httpx.AsyncClient, request: Request, trace: Trace
    ) -> Reply | Outcome:
        sent = self._connection.sent_as(request)
        try:
            return to_reply(await http.request(**sent, extensions={"trace": trace}))
        except httpx.RequestError as error:
            return to_outcome(error)
