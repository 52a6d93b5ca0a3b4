"""What every handler is given: the broker, the limits, and the threads for blocking calls.

* `read`, `read_cold`, `write`, `write_cold` and `compute` make a call in one of the `Workers`.
* Everything else here is used only on the event loop and needs no lock.
"""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import sys
import time
import types
from collections.abc import Awaitable, Callable, Collection, Coroutine, Generator
from concurrent.futures import Executor, Future
from functools import partial
from typing import TYPE_CHECKING, Any, Final, ParamSpec, Protocol, TypeVar

from tierlog.api.http.access.check import Access
from tierlog.api.http.exchange import Exchange, record_time
from tierlog.api.http.fetch.shared_pages import SharedPages
from tierlog.api.http.memory_limits import DecodingMemory, InflightBytes, UnsentResponses
from tierlog.api.http.metrics.coordinator_metrics import CoordinatorMetrics
from tierlog.api.http.metrics.registry import BrokerMetrics, HttpMetrics, KafkaMetrics
from tierlog.api.http.problems import Problem, path_shortener, to_problem
from tierlog.api.http.responses import AnyResponse
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.kafka_counts import KafkaCounts
from tierlog.api.serving.waiting_requests import WaitingRequests
from tierlog.api.serving.workers import Workers, call_on_loop, close_late
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Readable
from tierlog.broker.partition.segment_listing import SegmentBytes
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.host.waiting import Wait, WouldBlock

if TYPE_CHECKING:
    from tierlog.api.http.cluster.gateway import Gateway

P = ParamSpec("P")
T = TypeVar("T")
InTier = TypeVar("InTier", Fetched, SegmentBytes)
InTier_co = TypeVar("InTier_co", Fetched, SegmentBytes, covariant=True)
UNKNOWN_SIZE: Final = sys.maxsize  # of a compressed body: expanding it may take too long


class ImmediateCall(Protocol[InTier_co]):
    """A read that raises WouldBlock if it would wait and may not."""

    def __call__(self, *, wait: Wait) -> InTier_co: ...


class ReadQuery(Protocol):
    """How much a query reads. With `committed` it reads up to the last stable offset."""

    @property
    def max_bytes(self) -> int: ...
    @property
    def committed(self) -> bool: ...


class Context:
    def __init__(self, broker: Broker, settings: HttpSettings) -> None:
        self.broker, self.settings = broker, settings
        self.shorten_paths = path_shortener(broker.settings.data_dir)
        self.metrics = HttpMetrics()
        self.kafka_counts = KafkaCounts()
        self.waiting = WaitingRequests()
        self.pages = SharedPages(self.metrics.shared_pages)
        self.inflight = InflightBytes(settings.inflight_max_bytes)
        self.decoding = DecodingMemory(settings.decoding_max_bytes)
        self.workers = Workers(
            read_threads=settings.read_threads,
            write_threads=settings.write_threads,
            parse_threads=settings.parse_threads,
            search_threads=settings.search_threads,
        )
        readers = self.workers.readers
        self.unsent = UnsentResponses(broker.settings.data_dir, readers, self.inflight)
        self.access = Access(settings, self.workers.parsers)
        self.immediate = ImmediateHandlers()
        self.gateway: Gateway | None = None  # in a cluster
        self._register_metrics()

    def _register_metrics(self) -> None:
        metrics = self.metrics
        metrics.register(BrokerMetrics(self.broker))
        metrics.register(CoordinatorMetrics(self.broker))
        metrics.register(KafkaMetrics(self.kafka_counts))
        metrics.sample("tierlog_http_waiting_requests", lambda: self.waiting.count)
        metrics.sample("tierlog_http_inflight_bytes", lambda: self.inflight.held)
        metrics.sample("tierlog_http_unsent_memory_bytes", lambda: self.unsent.held.memory_bytes)
        metrics.sample("tierlog_http_unsent_disk_bytes", lambda: self.unsent.held.disk_bytes)
        metrics.sample("tierlog_http_shared_pages_bytes", lambda: self.pages.size_bytes)

    async def read(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that may wait for the disk."""
        return await self._timed(self.workers.readers, partial(call, *args, **kwargs))

    async def read_cold(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that may wait for the bucket."""
        return await self._timed(self.workers.cold_readers, partial(call, *args, **kwargs))

    async def read_batches(self, partition: Readable, offset: int, query: ReadQuery) -> Fetched:
        """Read the partition's batches from `offset` on."""
        call = partial(partition.read, offset, max_bytes=query.max_bytes, committed=query.committed)
        return await self.read_partition(partition, offset, call)

    async def read_partition(
        self, partition: Readable, offset: int, call: ImmediateCall[InTier]
    ) -> InTier:
        """Make the call here if everything is in memory, otherwise in a thread of the tier that
        holds this offset.
        """
        began_s = time.perf_counter()
        try:
            found = call(wait=Wait.NEVER)
        except WouldBlock:
            threads = self.workers.threads_for(partition, offset)
            found = await self.run_in(threads, partial(call, wait=Wait.WAIT))
        record_time("broker" if found.tier == "hot" else "store", began_s)
        return found

    async def read_at(self, partition: Readable, offset: int, call: Callable[[], T]) -> T:
        """Run a call that may wait for the tier that holds this offset."""
        return await self._timed(self.workers.threads_for(partition, offset), call)

    async def _timed(self, threads: Executor, call: Callable[[], T]) -> T:
        began_s = time.perf_counter()
        try:
            return await self.run_in(threads, call)
        finally:
            record_time("broker", began_s)

    async def write(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that writes to disk."""
        return await self.run_in(self.workers.writers, partial(call, *args, **kwargs))

    async def write_cold(self, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a call that waits for the bucket, or for another such call."""
        return await self.run_in(self.workers.cold_writers, partial(call, *args, **kwargs))

    async def compute(self, size_bytes: int, call: Callable[[], T]) -> T:
        """Run work on a few bytes on the event loop, and work on many in a thread."""
        began_s = time.perf_counter()
        try:
            if size_bytes <= self.settings.inline_max_bytes:
                return call()
            return await self.run_in(self.workers.parsers, call)
        finally:
            record_time("encode", began_s)

    async def run_in(self, threads: Executor, call: Callable[[], T]) -> T:
        """Run a call in a thread, with this request's context: its log lines carry the id. If the
        request is cancelled meanwhile, files that come late are closed.
        """
        await self.immediate.until_task()
        future = threads.submit(contextvars.copy_context().run, call)
        try:
            await AllCompleted([future])
            return future.result()
        except asyncio.CancelledError:
            close_late(future)
            raise
        finally:
            del future  # breaks the reference cycle with an exception's traceback

    def problem(self, exchange: Exchange, error: Exception, *, writing: bool = False) -> Problem:
        """The problem document of an error; see `problems.to_problem`."""
        bucket = self.broker.bucket
        full_key = str if bucket is None else bucket.store.full_key
        return to_problem(
            error,
            request_id=exchange.request_id,
            writing=writing,
            full_key=full_key,
            shorten=self.shorten_paths,
        )

    def close(self) -> None:
        self.workers.close()


class ImmediateHandlers:
    """Begins a handler in the parser's callback: if it need not wait, no task is made for it.

    A handler is written once. Before it waits it calls `until_task`, and goes on from there in the
    request's task, which has the request's context, and from which the client's disconnect is seen.
    """

    def __init__(self) -> None:
        self._has_no_task = False  # while a handler is begun nothing else runs on the event loop

    def begin(
        self, handler: Coroutine[Any, Any, AnyResponse]
    ) -> tuple[AnyResponse | None, Awaitable[AnyResponse] | None]:
        """What the handler returned, or the rest of it, to be awaited in a task."""
        self._has_no_task = True
        try:
            awaited = handler.send(None)
        except StopIteration as done:
            return done.value, None
        finally:
            self._has_no_task = False
        return None, _resumed(handler, awaited)

    async def until_task(self) -> None:
        """Go on in the request's task; call before a wait."""
        if self._has_no_task:
            await _NextIteration()


class _NextIteration:
    def __await__(self) -> Generator[None, None, None]:
        yield  # a task that is given nothing goes on in the next iteration of the loop


@types.coroutine
def _resumed(coroutine: Coroutine[Any, Any, T], awaited: Any) -> Generator[Any, Any, T]:
    """The rest of a coroutine that waits for `awaited`: `await` begins only new ones."""
    while True:
        try:
            sent = yield awaited
        except BaseException as error:  # noqa: BLE001  it is the coroutine's
            resume = partial(coroutine.throw, error)
        else:
            resume = partial(coroutine.send, sent)
        try:
            awaited = resume()
        except StopIteration as done:
            result: T = done.value
            return result


class AllCompleted:
    """Awaited once, by a task, until all futures are done: with a result, an error, or cancelled.

    `asyncio.wrap_future` takes one more iteration of the event loop and `gather` another, and each
    serves all other tasks: beside readers that keep a core busy, a durable produce then takes half
    as long again. Here the task continues in the next iteration.

    Has the part of asyncio's future interface (`asyncio.isfuture`) that a task uses. If the task is
    cancelled, futures that have not started are cancelled too. The futures refer to this object for
    ever, so it drops its references to them at the end: or results would stay in memory until
    the garbage collector runs.
    """

    _asyncio_future_blocking = False  # asyncio's own flag: true while a task waits for this

    def __init__(self, futures: Collection[Future[Any]]) -> None:
        assert futures, "without any, nothing would end the wait"
        self._futures, self._count = futures, itertools.count(1)
        self._last = len(futures)
        self._loop = asyncio.get_running_loop()
        self._is_cancelled = False

    def __await__(self) -> Generator[AllCompleted, None, None]:
        self._asyncio_future_blocking = True
        yield self

    # --- the interface that a task uses -----------------------------------------------------------

    def get_loop(self) -> asyncio.AbstractEventLoop:
        return self._loop

    def add_done_callback(
        self, callback: Callable[[AllCompleted], object], *, context: contextvars.Context
    ) -> None:
        self._callback: Callable[[AllCompleted], object] | None = callback
        self._context = context
        for future in self._futures:
            future.add_done_callback(self._one_done)

    def cancel(self, msg: object = None) -> bool:  # noqa: ARG002  asyncio's signature
        self._is_cancelled = True
        for future in self._futures:
            future.cancel()
        self._loop.call_soon(self._wake, context=self._context)
        return True

    def result(self) -> None:
        futures, self._futures = self._futures, ()
        if self._is_cancelled or any(future.cancelled() for future in futures):
            raise asyncio.CancelledError

    # --- from the futures' threads back to the loop -----------------------------------------------

    def _one_done(self, _: Future[Any]) -> None:
        # `next` is atomic: exactly one of several threads sees the last number.
        if next(self._count) == self._last:
            call_on_loop(self._loop, self._wake, context=self._context)

    def _wake(self) -> None:
        callback, self._callback = self._callback, None
        if callback is not None:  # else it was cancelled before the threads were done
            callback(self)
