"""`tierlog.Client` and `tierlog.AsyncClient`: the broker from Python, a call at a time or awaited.

* Only I/O happens here: `calls` defines requests and results, `exchange` retries, `scheduling` what
  is fetched next.
* What both clients have is written once, in `_BrokerClient`; a call of `calls` or `group_calls` is
  a method with the call's parameters, defaults and docstring.
* A `Client` may be shared between threads; after a fork, parent and child have connections of their
  own. An `AsyncClient` serves any number of tasks of one event loop.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Mapping, Sequence
from contextlib import aclosing, suppress
from functools import partial, wraps
from inspect import Parameter, signature
from pathlib import Path
from threading import Event, Thread
from typing import Any, Generic, ParamSpec, Protocol, Self, TypeVar, cast, overload

import httpx2

from tierlog.client import calls, cluster_calls, group_calls, responses, transactions
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching
from tierlog.client.exchange import Call, NotSent, Outcome, Pause, RetryPolicy, Steps, exchange
from tierlog.client.membership import DEFAULT_MEMBERSHIP, Member, Membership
from tierlog.client.problems import UnexpectedAnswer
from tierlog.client.producer import Producer
from tierlog.client.progress import GroupProgress, PartitionCursor
from tierlog.client.records import ConsumedRecord, Time, to_ms
from tierlog.client.routing import Routes
from tierlog.client.scheduling import FetchSchedule, schedule_fetches
from tierlog.client.transactions import AsyncTransaction, Transaction
from tierlog.client.transport import ConnectionConfig, to_outcome, to_response
from tierlog.client.wire import DEFAULT_LIMITS, Limits, Request, Response, Start
from tierlog.client.workarounds import is_closed_at_once
from tierlog.record_format.errors import (
    InvalidRequest,
    RetriableError,
    TierlogError,
    did_you_mean,
)

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)
Transport = TypeVar("Transport", httpx2.BaseTransport, httpx2.AsyncBaseTransport)
Records = TypeVar("Records")


def naming_the_nearest(function: Callable[P, T]) -> Callable[P, T]:
    """An argument that the function does not have is a TypeError with the nearest that it has."""

    @wraps(function)
    def checked(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            known = signature(function).parameters
            for name in kwargs.keys() - known.keys():
                raise TypeError(f"{error}{did_you_mean(name, known)}") from None
            raise

    return checked


class CallMethod(Protocol[P, T_co]):
    """A call as a method: an `AsyncClient` returns a coroutine of its result."""

    @overload
    def __get__(self, client: Client, kind: object) -> Callable[P, T_co]: ...
    @overload
    def __get__(
        self, client: AsyncClient, kind: object
    ) -> Callable[P, Coroutine[Any, Any, T_co]]: ...
    @overload
    def __get__(self, client: None, kind: object) -> Callable[..., Any]: ...


def method(make: Callable[P, Call[T]]) -> CallMethod[P, T]:
    make_checked = naming_the_nearest(make)

    @wraps(make)
    def make_call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return self.call(make_checked(*args, **kwargs))

    # What `help` and notebooks show: with `self`, and the call's result as the return type.
    of_call = signature(make)
    make_call.__signature__ = of_call.replace(  # type: ignore[attr-defined]
        parameters=[Parameter("self", Parameter.POSITIONAL_ONLY), *of_call.parameters.values()],
        return_annotation=of_call.return_annotation.removeprefix("Call[").removesuffix("]"),
    )
    return cast("CallMethod[P, T]", make_call)


class _BrokerClient(Generic[Transport, Records]):
    """How both clients connect, and their calls. `Records`: what `consume` returns."""

    _active_groups: Mapping[GroupProgress, object]

    @naming_the_nearest
    def __init__(
        self,
        server: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        token_file: str | Path | None = None,
        ca_file: str | Path | None = None,
        timeout_s: float = 30.0,
        retries: RetryPolicy | None = None,
        transport: Transport | None = None,
    ) -> None:
        self._connection = ConnectionConfig(
            server=server,
            token=token,
            token_file=token_file,
            ca_file=ca_file,
            timeout_s=timeout_s,
        )
        self._routes = Routes(self._connection.servers)
        self.retries = retries or RetryPolicy()
        self._transport: Transport | None = transport
        self._connect()

    def _connect(self) -> None:
        raise NotImplementedError

    def __repr__(self) -> str:
        return self._connection.describe(self)

    create_topic = method(calls.create_topic)
    list_topics = method(calls.list_topics)
    describe_topic = method(calls.describe_topic)
    find_schema = method(calls.find_schema)
    find_schema_version = method(calls.find_schema_version)
    alter_topic = method(calls.alter_topic)
    delete_topic = method(calls.delete_topic)

    produce = method(calls.produce)
    produce_encoded = method(calls.produce_encoded)
    produce_batches = method(calls.produce_batches)
    init_producer = method(calls.init_producer)

    begin_transactions = method(transactions.begin_transactions)
    list_transactions = method(transactions.list_transactions)
    describe_transaction = method(transactions.describe_transaction)

    fetch = method(calls.fetch)
    fetch_batches = method(calls.fetch_batches)

    @naming_the_nearest
    def consume(
        self,
        topic: str,
        *,
        partitions: Sequence[int] | None = None,
        offset: Start | Mapping[int, Start] = "earliest",
        end_offset: int | Mapping[int, int] | None = None,
        timestamp: Time | None = None,
        follow: bool = False,
        group: str | None = None,
        membership: Membership = DEFAULT_MEMBERSHIP,
        limits: Limits = DEFAULT_LIMITS,
    ) -> Records:
        """Iterate over the records of the partitions (default: all), in order in each partition.

        Ends at each partition's high watermark (with `read_committed`: last stable offset) as of
        its first fetch; with `end_offset`, there, once it is written; with `follow`, never. Without
        `follow`, partitions are read one after another. Following all partitions includes those
        that are added later, within five minutes.

        With `group`, it joins the group, reads the partitions that the group assigns to it, and
        leaves at the end (`membership`); with `partitions` too, it reads these without being a
        member. Reading continues from the group's committed offsets (`offset` is for partitions
        without one), and offsets are committed along the way and at the end: see `group_calls`.

        Raises GroupRefused if the group cannot be joined, or as no member if it has members.
        """
        template = PartitionCursor(
            topic,
            timestamp=to_ms(timestamp),
            end_offset=end_offset,
            follow=follow,
            limits=limits,
        )
        return self._consume(
            schedule_fetches(
                template,
                partitions,
                offset,
                group=group,
                membership=membership,
                retries=self.retries,
            )
        )

    def _consume(self, steps: Steps[FetchSchedule]) -> Records:
        raise NotImplementedError

    def _holder_of(self, record: ConsumedRecord) -> GroupProgress:
        """Whose loop has this record. Raises InvalidRequest."""
        for progress in self._active_groups:
            if progress.in_hand is record:
                return progress
        raise InvalidRequest("not the record that a loop over consume(group=...) got last")

    commit_offsets = method(group_calls.commit_offsets)
    group = method(group_calls.group)
    groups = method(group_calls.groups)
    delete_group = method(group_calls.delete_group)

    describe_cluster = method(cluster_calls.describe_cluster)
    led_partitions = method(cluster_calls.led_partitions)
    move_leader = method(cluster_calls.move_leader)
    reassign = method(cluster_calls.reassign)
    cancel_reassignment = method(cluster_calls.cancel_reassignment)
    list_reassignments = method(cluster_calls.list_reassignments)
    rebalance = method(cluster_calls.rebalance)
    drain_broker = method(cluster_calls.drain_broker)
    undrain_broker = method(cluster_calls.undrain_broker)
    remove_broker = method(cluster_calls.remove_broker)

    offsets = method(calls.offsets)
    offset_for_timestamp = method(calls.offset_for_timestamp)
    manifest = method(calls.manifest)
    storage_report = method(calls.storage_report)
    metrics = method(calls.metrics)
    verify = method(calls.verify)
    offload = method(calls.offload)
    merge = method(calls.merge)
    merge_plan = method(calls.merge_plan)
    commit_merged = method(calls.commit_merged)
    trim = method(calls.trim)
    readiness = method(calls.readiness)


class Client(_BrokerClient[httpx2.BaseTransport, Generator[ConsumedRecord, None, None]]):
    """A client of a broker, or of a cluster; a context manager. Raises the errors of
    `tierlog.errors`.

    `server` is `http://HOST:PORT` or `https://HOST:PORT`, or several, in a list or with commas
    between them: then requests go to the broker that leads a partition, and to others while one is
    down. `ca_file` is the certificate authority,
    if the system does not trust the broker's. `token`, or the content of `token_file`, is sent with
    each request. Defaults are taken from TIERLOG_SERVER (else http://127.0.0.1:8640),
    TIERLOG_TOKEN, TIERLOG_TOKEN_FILE and TIERLOG_CA_FILE, as on the command line. `timeout_s`
    bounds each request; `retries` applies to reads, and to writes that were refused or not sent.
    """

    def _connect(self) -> None:
        self._http, self._long_poll = self._connection.clients(httpx2.Client, self._transport)
        self._active_groups: dict[GroupProgress, tuple[Event, Callable[[], None]]] = {}
        self._process = os.getpid()  # last: until then the parent's connections are not ours

    def close(self) -> None:
        """Commit what was consumed for groups, leave them, and close the connections."""
        if self._process != os.getpid():
            return  # the parent's connections; their locks may be held by threads that are not here
        for progress in list(self._active_groups):
            self._end(progress)
        self._http.close()
        self._long_poll.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def producer(self, batching: Batching | None = None) -> Producer:
        """A producer takes records one by one, batches them, and appends each exactly once."""
        return Producer(self, batching)

    def transaction(
        self,
        transactional_id: str,
        *,
        timeout_ms: int | None = None,
        batching: Batching | None = None,
    ) -> Transaction:
        """For the transactions of this id, one after the other: each `with` is one.

        The first fences whoever used the id before. The broker aborts a transaction that is in
        progress for `timeout_ms` (a minute).
        """
        return Transaction(self, transactional_id, timeout_ms=timeout_ms, batching=batching)

    def _consume(self, steps: Steps[FetchSchedule]) -> Generator[ConsumedRecord, None, None]:
        schedule = self.run(steps)
        if schedule.progress is not None:
            yield from self._consume_for(schedule.progress, schedule)
            return
        while fetch := schedule.next_call(time.monotonic()):
            yield from fetch.to_records(self.run(fetch.steps))

    def _consume_for(
        self, progress: GroupProgress, schedule: FetchSchedule
    ) -> Generator[ConsumedRecord, None, None]:
        try:
            while True:
                self._begin(progress)
                if not (fetch := schedule.next_call(time.monotonic())):
                    return
                for record in fetch.to_records(self.run(fetch.steps)):
                    progress.hand_out(record, time.monotonic())
                    yield record
                    if not progress.take_back():
                        break
        finally:
            self._end(progress)

    def _begin(self, progress: GroupProgress) -> None:
        """Send heartbeats from now on, unless they are. After a fork, this is another member."""
        if self._process != os.getpid():
            self._connect()
        if progress in self._active_groups:
            return
        progress.forget_membership()
        stop, end = Event(), partial(self._end, progress)
        self._active_groups[progress] = stop, end
        atexit.register(end)  # a loop that nobody closed would keep others waiting for its session
        if progress.member is not None:
            work = self._send_heartbeats
            Thread(
                target=work, args=(progress.member, stop), name="group-heartbeats", daemon=True
            ).start()

    def _send_heartbeats(self, member: Member, stop: Event) -> None:
        while not stop.wait(member.settings.heartbeat_interval_s):
            try:
                self.run(member.stay(time.monotonic()))
            except RuntimeError:
                if not self._http.is_closed:
                    raise
                return

    def _end(self, progress: GroupProgress) -> None:
        """Commit, and leave. Not after a fork: then it is the other process that is a member."""
        if self._process != os.getpid() or progress not in self._active_groups:
            return
        try:
            with progress.logging_what_is_lost():
                self._commit(progress)
            if (leave := progress.leave()) is not None:
                with suppress(TierlogError):
                    self.call(leave)
        finally:
            stop, end = self._active_groups.pop(progress)
            stop.set()
            atexit.unregister(end)

    def _commit(self, progress: GroupProgress) -> None:
        if not self._http.is_closed and (commit := progress.commit_consumed()) is not None:
            self.call(commit)

    def commit_consumed(self, record: ConsumedRecord) -> None:
        """Commit all that a loop over `consume(group=...)` got, including this record, its last:
        for a loop that is left on it. Raises GroupRefused if others read its partition by now.
        """
        progress = self._holder_of(record)
        progress.consumed_in_hand()
        self._commit(progress)

    def segments(
        self, topic: str, partition: int, *, from_offset: int | None = None
    ) -> Generator[responses.Segment, None, None]:
        """Iterate over the segments, oldest first."""
        while True:
            page = self.call(calls.segments_page(topic, partition, from_offset=from_offset))
            yield from page.segments
            if page.next_from_offset is None:
                return
            from_offset = page.next_from_offset

    def is_alive(self) -> bool:
        """Whether a broker responds. Not retried."""
        try:
            return self.call(calls.is_alive())
        except (RetriableError, UnexpectedAnswer):
            return False

    def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return responses.shown_warnings(self.run(exchange(call, self.retries)))

    def run(self, steps: Steps[T]) -> T:
        """Perform the steps of an exchange, and return its result."""
        outcome, steps = None, self._routes.follow(steps)
        while True:
            try:
                step = steps.send(outcome)
            except StopIteration as done:
                result: T = done.value
                return result
            if isinstance(step, Pause):
                time.sleep(step.seconds)
                outcome = None
            else:
                outcome = self._transmit(step)

    def _transmit(self, request: Request) -> Response | Outcome:
        if self._process != os.getpid() and not self._http.is_closed:
            # On connections shared after a fork, one process would read the other's responses.
            self._connect()
        http = self._long_poll if request.extra_wait_s else self._http
        try:
            return to_response(http.request(**self._connection.http_arguments(request)))
        except httpx2.RequestError as error:
            return to_outcome(error)


class AsyncClient(_BrokerClient[httpx2.AsyncBaseTransport, AsyncGenerator[ConsumedRecord, None]]):
    """As `Client`, with calls that are awaited; an async context manager."""

    def _connect(self) -> None:
        self._http, self._long_poll = self._connection.clients(httpx2.AsyncClient, self._transport)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._active_groups: dict[GroupProgress, asyncio.Task[None] | None] = {}
        self._committing = asyncio.Lock()

    async def aclose(self) -> None:
        """As `Client.close`. The generator of an abandoned `async for` may not be closed yet."""
        try:
            for progress in list(self._active_groups):
                await self._end(progress)
        finally:
            await self._http.aclose()
            await self._long_poll.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    def producer(self, batching: Batching | None = None) -> AsyncProducer:
        """As `Client.producer`."""
        return AsyncProducer(self, batching)

    def transaction(
        self,
        transactional_id: str,
        *,
        timeout_ms: int | None = None,
        batching: Batching | None = None,
    ) -> AsyncTransaction:
        """As `Client.transaction`."""
        return AsyncTransaction(self, transactional_id, timeout_ms=timeout_ms, batching=batching)

    async def _consume(self, steps: Steps[FetchSchedule]) -> AsyncGenerator[ConsumedRecord, None]:
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
        heartbeats = None
        if progress.member is not None:
            heartbeats = asyncio.create_task(self._send_heartbeats(progress.member))
        self._active_groups[progress] = heartbeats
        try:
            while fetch := schedule.next_call(time.monotonic()):
                for record in fetch.to_records(await self.run(fetch.steps)):
                    progress.hand_out(record, time.monotonic())
                    yield record
                    if not progress.take_back():
                        break
        finally:
            await self._end(progress)

    async def _send_heartbeats(self, member: Member) -> None:
        while True:
            await asyncio.sleep(member.settings.heartbeat_interval_s)
            await self.run(member.stay(time.monotonic()))

    async def _end(self, progress: GroupProgress) -> None:
        if progress not in self._active_groups:
            return
        try:
            with progress.logging_what_is_lost():
                await self._commit(progress)
            if (leave := progress.leave()) is not None:
                with suppress(TierlogError):
                    await self.call(leave)
        finally:
            heartbeats = self._active_groups.pop(progress, None)
            if heartbeats is not None:
                heartbeats.cancel()

    async def _commit(self, progress: GroupProgress) -> None:
        async with self._committing:  # `aclose` waits for a commit in flight
            commit = progress.commit_consumed()
            if commit is not None and not self._http.is_closed:
                await self.call(commit)

    async def commit_consumed(self, record: ConsumedRecord) -> None:
        progress = self._holder_of(record)
        progress.consumed_in_hand()
        await self._commit(progress)

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

    async def is_alive(self) -> bool:
        try:
            return await self.call(calls.is_alive())
        except (RetriableError, UnexpectedAnswer):
            return False

    async def call(self, call: Call[T]) -> T:
        """Make any call of `tierlog.client.calls`."""
        return responses.shown_warnings(await self.run(exchange(call, self.retries)))

    async def run(self, steps: Steps[T]) -> T:
        """Perform the steps of an exchange, and return its result."""
        loop = asyncio.get_running_loop()
        if (self._loop or loop) is not loop:
            raise RuntimeError(
                "this client belongs to another event loop: create one client per event loop"
            )
        self._loop = loop
        outcome, steps = None, self._routes.follow(steps)
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
