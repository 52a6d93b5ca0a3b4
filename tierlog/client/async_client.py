"""`tierlog.AsyncClient`: the calls of `tierlog.Client`, awaited.

Only I/O happens here: `calls` defines requests and results, `exchange` retries, `scheduling` what
is fetched next. A client serves any number of tasks of one event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import Self, TypeVar

import httpx2

from tierlog.client import calls, group_calls, responses
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching
from tierlog.client.calls import DEFAULT_LIMITS, Limits, Start
from tierlog.client.exchange import (
    NO_RETRIES,
    Call,
    NotSent,
    Outcome,
    Pause,
    RetryPolicy,
    Steps,
    async_method,
    exchange,
)
from tierlog.client.group_calls import GroupProgress
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.records import ConsumedRecord, Time, to_ms
from tierlog.client.scheduling import FetchSchedule, PartitionCursor, schedule_fetches
from tierlog.client.transport import ConnectionConfig, to_outcome, to_response
from tierlog.client.wire import Request, Response
from tierlog.client.workarounds import is_closed_at_once
from tierlog.record_format.errors import RetriableError, TierlogError

T = TypeVar("T")


class AsyncClient:
    """A client of one broker; an async context manager. See `Client` for the calls."""

    def __init__(
        self,
        server: str | None = None,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: httpx2.AsyncBaseTransport | None = None,
    ) -> None:
        self._connection = ConnectionConfig(
            server=server,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            timeout_s=timeout_s,
        )
        self.retries = retries or RetryPolicy()
        self._http, self._long_poll = self._connection.clients(httpx2.AsyncClient, transport)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._active_groups: set[GroupProgress] = set()
        self._committing = asyncio.Lock()

    def __repr__(self) -> str:
        return self._connection.describe(self)

    async def aclose(self) -> None:
        """As `Client.close`. The generator of an abandoned `async for` may not be closed yet."""
        try:
            for progress in list(self._active_groups):
                with suppress(TierlogError):
                    await self._commit(progress)
        finally:
            await self._http.aclose()
            await self._long_poll.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    # --- topics

    create_topic = async_method(calls.create_topic)
    list_topics = async_method(calls.list_topics)
    describe_topic = async_method(calls.describe_topic)
    alter_topic = async_method(calls.alter_topic)
    delete_topic = async_method(calls.delete_topic)

    # --- produce

    produce = async_method(calls.produce)
    produce_encoded = async_method(calls.produce_encoded)
    produce_batches = async_method(calls.produce_batches)
    init_producer = async_method(calls.init_producer)

    def producer(self, batching: Batching | None = None) -> AsyncProducer:
        """As `Client.producer`."""
        return AsyncProducer(self, batching)

    # --- fetch

    fetch = async_method(calls.fetch)
    fetch_batches = async_method(calls.fetch_batches)

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
        template = PartitionCursor(
            topic,
            timestamp=to_ms(timestamp),
            end_offset=end_offset,
            follow=follow,
            limits=limits,
        )
        steps = schedule_fetches(template, partitions, offset, group=group, retries=self.retries)
        schedule = await self.run(steps)
        if schedule.progress is not None:
            async with aclosing(self._consume_for(schedule.progress, schedule)) as records:
                async for record in records:
                    yield record
            return
        while fetch := schedule.next_call(time.monotonic()):
            for record in fetch.to_records(await self.run(fetch.steps)):
                yield record

    async def _consume_for(
        self, progress: GroupProgress, schedule: FetchSchedule
    ) -> AsyncGenerator[ConsumedRecord, None]:
        self._active_groups.add(progress)
        try:
            while fetch := schedule.next_call(time.monotonic()):
                for record in fetch.to_records(await self.run(fetch.steps)):
                    progress.consumed_before(record)
                    yield record
        except BaseException:
            with suppress(TierlogError):
                await self._commit(progress)
            raise
        finally:
            self._active_groups.discard(progress)
        await self._commit(progress)

    async def _commit(self, progress: GroupProgress) -> None:
        async with self._committing:  # `aclose` waits for a commit in flight
            commit = progress.commit()
            if commit is not None and not self._http.is_closed:
                await self.call(commit)

    # --- groups

    commit_offsets = async_method(group_calls.commit_offsets)
    group = async_method(group_calls.group)
    groups = async_method(group_calls.groups)
    delete_group = async_method(group_calls.delete_group)

    # --- offsets, segments, storage

    offsets = async_method(calls.offsets)
    offset_for_timestamp = async_method(calls.offset_for_timestamp)
    manifest = async_method(calls.manifest)
    storage_report = async_method(calls.storage_report)
    metrics = async_method(calls.metrics)
    verify = async_method(calls.verify)
    offload = async_method(calls.offload)
    trim = async_method(calls.trim)

    async def segments(
        self, topic: str, partition: int, *, from_offset: int | None = None
    ) -> AsyncGenerator[responses.Segment, None]:
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

    async def readiness(self) -> responses.Readiness:
        return await self.run(exchange(calls.readiness(), NO_RETRIES))

    # --- driving

    async def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return await self.run(exchange(call, self.retries))

    async def run(self, steps: Steps[T]) -> T:
        """Perform the steps of an exchange, and return its result."""
        loop = asyncio.get_running_loop()
        if (self._loop or loop) is not loop:
            raise RuntimeError(
                "this client belongs to another event loop: create one client per event loop"
            )
        self._loop = loop
        outcome: Outcome = None
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Pause):
                await asyncio.sleep(step.seconds)
                outcome = None
            else:
                outcome = await self._transmit(step)

    async def _transmit(self, request: Request) -> Response | Outcome:
        http = self._long_poll if request.extra_wait_s else self._http
        try:
            return to_response(await http.request(**self._connection.http_arguments(request)))
        except httpx2.RequestError as error:
            return to_outcome(error)
        except AttributeError as error:
            if not is_closed_at_once(error):
                raise
            return NotSent(f"{http.base_url.netloc.decode()}: the connection was closed")
