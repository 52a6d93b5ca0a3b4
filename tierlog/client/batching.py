"""Gathers records into batches: the core of both producers, without I/O or threads.

Rules that keep it honest:

* One batch per partition is in flight at a time, so records stay in the order in which they were
  sent.
* Buffered records are bounded by `buffer_bytes`, including their overhead in Python; a caller that
  sends too fast waits for room.
* Cancelling the wait for a record (`cancel`, a timeout around `await`) does not cancel the record:
  it is still sent.
* What is not a valid record is refused by `prepare_record`, before it is buffered: inside a batch
  it would make the other records fail.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter, index
from threading import Condition, RLock
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from tierlog.client.exchange import RESTART_TIMEOUT_S
from tierlog.client.records import HeadersLike, Time, Value, time_of_record, to_bytes, to_headers
from tierlog.client.wire import Acks, check_acks
from tierlog.record_format.batch import HEADER_SIZE
from tierlog.record_format.codecs import CODEC_IDS
from tierlog.record_format.encode import NO_HEADERS, Headers, record_size
from tierlog.record_format.errors import InvalidRequest

log = logging.getLogger(__name__)

TopicPartition = tuple[str, int]
# Python objects of a buffered record, besides its bytes: for small records, nearly all its memory.
RECORD_OVERHEAD_BYTES: Final = 512


class RecordMetadata(NamedTuple):
    """Where a record was appended."""

    topic: str
    partition: int
    offset: int


class InterruptSafeCondition(Condition):
    """A condition that Ctrl-C cannot leave locked. `Condition` acquires and releases its lock in
    Python, where the exception of a signal may come between two steps; the lock's own methods are
    atomic.
    """

    def __init__(self) -> None:
        self._own = RLock()
        self.process = os.getpid()
        super().__init__(self._own)

    __enter__ = property(attrgetter("_own.__enter__"))
    __exit__ = property(attrgetter("_own.__exit__"))


class Delivery(Future[RecordMetadata]):
    """A record's future; it cannot be cancelled. The futures of a batch share one condition: one
    each would account for most of a record's memory and garbage collection.
    """

    _condition: InterruptSafeCondition

    def __init__(self, condition: InterruptSafeCondition) -> None:
        self._condition = condition
        self._state = "RUNNING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[RecordMetadata]], object]] = []
        self._raised_at: TracebackType | None = None

    @staticmethod
    def factory_for_batch() -> Callable[[], Delivery]:
        condition = InterruptSafeCondition()
        return lambda: Delivery(condition)

    def cancelled(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> RecordMetadata:
        self._wait(timeout)
        error = super().exception(0)
        if error is None:
            return super().result(0)
        try:  # a batch's futures share the error: each raise would lengthen its traceback
            raise error.with_traceback(self._raised_at)
        finally:
            del error, self

    def set_exception(self, exception: BaseException | None) -> None:
        self._raised_at = None if exception is None else exception.__traceback__
        super().set_exception(exception)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        self._wait(timeout)
        return super().exception(0)

    def _wait(self, timeout: float | None) -> None:
        """Loops, unlike `Future`: the condition is also notified for the batch's other records.

        Raises RuntimeError after a fork, where nobody would notify it.
        """
        if self._state != "FINISHED" and self._condition.process != os.getpid():
            raise RuntimeError("the record was sent before a fork: its result is in that process")
        with self._condition:
            self._condition.wait_for(self.done, timeout)


class RecordFuture(Protocol):
    """A `Delivery`, or a future of asyncio."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def set_result(self, result: RecordMetadata, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def exception(self) -> BaseException | None: ...


FutureT = TypeVar("FutureT", bound=RecordFuture)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How records are batched. `batch_bytes` is before compression.

    `max_in_flight`: how many batches, each of another partition, await their responses at a time.
    More than one shortens the delay if the broker is far away, and takes more CPU, because batches
    then wait less and are smaller. `delivery_timeout_s`: how long a batch is retried after it was
    due, if the broker had responded before; Kafka's delivery.timeout.ms.
    """

    linger_ms: int = 5
    batch_bytes: int = 512 << 10
    buffer_bytes: int = 32 << 20
    compression: str = "none"
    acks: Acks = "all"
    max_in_flight: int = 1
    delivery_timeout_s: float = RESTART_TIMEOUT_S

    def __post_init__(self) -> None:
        if self.compression not in CODEC_IDS:
            known = ", ".join(CODEC_IDS)
            raise InvalidRequest(f"compression must be one of {known}, not {self.compression!r}")
        if self.max_in_flight < 1:
            raise InvalidRequest(f"max_in_flight must be at least 1, not {self.max_in_flight}")
        if check_acks(self.acks) == "0":
            raise InvalidRequest(
                "acks=0 is not supported by a producer: no record would ever get its offset"
            )

    @property
    def codec(self) -> int:
        return CODEC_IDS[self.compression]


class PreparedRecord(NamedTuple):
    """A validated record as it is encoded. `size_bytes` is its size in a batch."""

    value: bytes | None
    key: bytes | None
    timestamp: int
    headers: Headers
    size_bytes: int


@dataclass(slots=True)
class PendingBatch(Generic[FutureT]):
    """A batch being filled, or in flight: columns of equal length."""

    topic_partition: TopicPartition
    due_ms: int
    new_future: Callable[[], FutureT]
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    futures: list[FutureT] = field(default_factory=list)
    size_bytes: int = HEADER_SIZE
    is_finished: bool = False  # all futures are resolved, and its memory is released

    def __len__(self) -> int:
        return len(self.values)

    @property
    def buffered_bytes(self) -> int:
        return self.size_bytes - HEADER_SIZE + len(self) * RECORD_OVERHEAD_BYTES

    def add_record(self, record: PreparedRecord) -> FutureT:
        future = self.new_future()
        try:
            self.values.append(record.value)
            self.keys.append(record.key)
            self.timestamps.append(record.timestamp)
            self.headers.append(record.headers)
            self.size_bytes += record.size_bytes
            self.futures.append(future)
        except BaseException:  # Ctrl-C: the record is added to all columns or to none
            for column in (self.values, self.keys, self.timestamps, self.headers):
                del column[len(self.futures) :]
            raise
        return future

    def complete(self, base_offset: int) -> None:
        for offset, future in enumerate(self.futures, base_offset):
            if not future.cancelled():
                future.set_result(RecordMetadata(*self.topic_partition, offset))

    def fail(self, error: BaseException) -> int:
        """Fail the unresolved futures; return how many there were. The exceptions are marked as
        retrieved: failed batches are logged, so asyncio need not log each record's future.
        """
        failed = 0
        for future in self.futures:
            if not future.done():
                future.set_exception(error)
                future.exception()
                failed += 1
        return failed

    def slice(self, start: int, end: int) -> PendingBatch[FutureT]:
        columns = (self.values, self.keys, self.timestamps, self.headers, self.futures)
        sliced: Any = (column[start:end] for column in columns)
        return PendingBatch(self.topic_partition, self.due_ms, self.new_future, *sliced)


class Accumulator(Generic[FutureT]):
    """The pending batches of each partition. Not thread-safe: used under a lock, or by one task.

    `new_factory` returns, for each batch, the function that creates its records' futures.
    """

    def __init__(
        self, batching: Batching, new_factory: Callable[[], Callable[[], FutureT]]
    ) -> None:
        self._batching, self._new_factory = batching, new_factory
        self._queues: dict[TopicPartition, deque[PendingBatch[FutureT]]] = {}
        self._in_flight: dict[TopicPartition, PendingBatch[FutureT]] = {}
        self.buffered_bytes = 0

    def has_room(self, record: PreparedRecord) -> bool:
        """A record larger than the buffer has room if nothing else is buffered."""
        buffered_bytes = self.buffered_bytes + record.size_bytes + RECORD_OVERHEAD_BYTES
        return self.buffered_bytes <= 0 or buffered_bytes <= self._batching.buffer_bytes

    def buffer_record(
        self, topic_partition: TopicPartition, record: PreparedRecord, *, now_ms: int
    ) -> tuple[FutureT, bool]:
        """The record's future, and whether to wake the sender: a batch was opened, or is full."""
        queue = self._queues.get(topic_partition)
        if queue is None:
            queue = self._queues[topic_partition] = deque()
        limit, size = self._batching.batch_bytes, record.size_bytes
        is_new_batch = not queue or queue[-1].size_bytes + size > limit
        if is_new_batch:
            due_ms = now_ms + self._batching.linger_ms
            pending = PendingBatch(topic_partition, due_ms, self._new_factory())
            future = pending.add_record(record)
            queue.append(pending)  # last: Ctrl-C must not leave an empty batch
        else:
            pending = queue[-1]
            future = pending.add_record(record)
        self.buffered_bytes += size + RECORD_OVERHEAD_BYTES
        return future, is_new_batch or pending.size_bytes >= limit

    def take_due(self, *, now_ms: int, flushing: bool = False) -> PendingBatch[FutureT] | None:
        """A batch that is due: full, past its linger time, or any when flushing.

        Partitions take turns: one that is always full does not starve the others.
        """
        for topic_partition, queue in self._queues.items():
            if not queue or topic_partition in self._in_flight:
                continue
            if flushing or len(queue) > 1 or self._is_due(queue[0], now_ms):
                self._in_flight[topic_partition] = queue.popleft()
                self._queues[topic_partition] = self._queues.pop(topic_partition)
                return self._in_flight[topic_partition]
        return None

    def _is_due(self, pending: PendingBatch[FutureT], now_ms: int) -> bool:
        return now_ms >= pending.due_ms or pending.size_bytes >= self._batching.batch_bytes

    def finish(self, pending: PendingBatch[FutureT]) -> None:
        """Release the batch's memory and its partition, once its futures are resolved."""
        pending.is_finished = True
        del self._in_flight[pending.topic_partition]
        if not self._queues[pending.topic_partition]:
            del self._queues[pending.topic_partition]
        self.buffered_bytes -= pending.buffered_bytes
        if not self._queues:
            self.buffered_bytes = 0  # Ctrl-C during `buffer_record` leaves it wrong by one record

    def fail_all(self, error: BaseException) -> None:
        """Fail what is queued or in flight, when nothing can be sent or awaited any more."""
        self.fail_queued(error, *self._in_flight.values())

    def fail_queued(self, error: BaseException, *in_flight: PendingBatch[FutureT]) -> None:
        """Fail what is queued and these batches, when nothing can be sent any more: nobody may wait
        for ever. Others in flight may still be answered.
        """
        queued = itertools.chain(*self._queues.values())
        failed = sum([pending.fail(error) for pending in [*in_flight, *queued]])
        if failed:
            log.warning(
                "%d records of a producer were not sent, or not confirmed: %r", failed, error
            )
        for queue in self._queues.values():
            while queue:
                pending = queue.popleft()
                pending.is_finished = True
                self.buffered_bytes -= pending.buffered_bytes

    def next_due_ms(self) -> int | None:
        """When the next batch's linger time ends; None if none is pending."""
        waiting = [
            queue[0].due_ms
            for topic_partition, queue in self._queues.items()
            if queue and topic_partition not in self._in_flight
        ]
        return min(waiting, default=None)

    def unfinished(self) -> list[PendingBatch[FutureT]]:
        """The batches of all records that were added so far and are not resolved: what a flush
        waits for. Later ones do not concern it, or it would not end while others send.
        """
        return [*self._in_flight.values(), *itertools.chain(*self._queues.values())]

    @property
    def is_empty(self) -> bool:
        return not self._in_flight and not any(self._queues.values())


def all_finished(batches: list[PendingBatch[Any]]) -> bool:
    return all(pending.is_finished for pending in batches)


def check_topic_partition(topic: str, partition: int | None) -> tuple[str, int | None]:
    """Normalize a record's topic and partition, by which sequences are counted: under two forms of
    one partition, the broker would take the second's batches for duplicates. Raises TypeError.
    """
    if not isinstance(topic, str):
        raise TypeError(f"topic: expected text, not {type(topic).__name__}")
    if partition is None:
        return topic, None
    try:
        return topic, index(partition)
    except TypeError:
        kind = type(partition).__name__
        raise TypeError(f"partition: expected a number or None, not {kind}") from None


def prepare_record(
    value: Value,
    *,
    key: Value,
    timestamp: Time | None,
    headers: HeadersLike,
    now_ms: int,
) -> PreparedRecord:
    """Validate and convert a record. Raises TypeError, and InvalidRequest for a timestamp."""
    value_bytes, key_bytes = to_bytes(value, name="value"), to_bytes(key, name="key")
    timestamp_ms = now_ms if timestamp is None else time_of_record(timestamp)
    pairs = to_headers(headers) if headers else NO_HEADERS
    size_bytes = record_size(value_bytes, key_bytes, pairs)
    return PreparedRecord(value_bytes, key_bytes, timestamp_ms, pairs, size_bytes)
