"""Records on their way to becoming batches: the core under both producers, without I/O or threads.

Rules that keep it honest:

* One batch per partition is in flight at a time, so records stay in the order they were sent in.
* What is waiting is bounded by `buffer_bytes`, including what Python needs for it; a caller that
  sends too fast waits for room.
* Whoever stops waiting for a record (`cancel`, a timeout around `await`) only stops waiting: the
  record is still sent.
* What cannot be a record is refused in `outgoing`, when it is handed in: inside a batch it would
  make its neighbours fail.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from operator import attrgetter, index
from threading import Condition, RLock
from types import TracebackType
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from record_format.batch import HEADER_SIZE
from record_format.codecs import CODEC_IDS
from record_format.encode import NO_HEADERS, Headers, record_size
from record_format.errors import InvalidRequest
from tierlog.client.calls import Acks, check_acks
from tierlog.client.exchange import RESTART_S
from tierlog.client.records import GivenHeaders, Value, to_bytes, to_headers
from tierlog.client.times import Time, time_of_record

log = logging.getLogger(__name__)

TopicPartition = tuple[str, int]
# What Python keeps for a record that waits, beside its bytes: of small ones it is nearly all.
OBJECTS_BYTES: Final = 512


class Placed(NamedTuple):
    """Where a record was appended."""

    topic: str
    partition: int
    offset: int


class Changed(Condition):
    """A condition that Ctrl-C cannot leave locked: Condition takes and gives back its lock in
    Python, between whose steps a signal's exception may come; a lock of C's alone has no such gap.
    """

    def __init__(self) -> None:
        self._own = RLock()
        super().__init__(self._own)

    __enter__ = property(attrgetter("_own.__enter__"))
    __exit__ = property(attrgetter("_own.__exit__"))


class Delivery(Future[Placed]):
    """What becomes of a record; cannot be cancelled. Those of a batch share one condition: with one
    each, they would be most of a record's cost in memory and in garbage collection.
    """

    def __init__(self, condition: Condition) -> None:
        self._condition = condition
        self._state = "RUNNING"
        self._result = self._exception = None
        self._waiters: list[Any] = []
        self._done_callbacks: list[Callable[[Future[Placed]], object]] = []
        self._raised_at: TracebackType | None = None

    @staticmethod
    def of_a_batch() -> Callable[[], Delivery]:
        condition = Changed()
        return lambda: Delivery(condition)

    def cancelled(self) -> bool:
        return False

    def result(self, timeout: float | None = None) -> Placed:
        self._wait(timeout)
        error = super().exception(0)
        if error is None:
            return super().result(0)
        try:  # one error for the whole batch: it would grow by each record that raises it
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
        """A future waits once; this one is woken for its neighbours too."""
        with self._condition:
            self._condition.wait_for(self.done, timeout)


class Settled(Protocol):
    """A future: a `Delivery`, or one of asyncio."""

    def done(self) -> bool: ...
    def cancelled(self) -> bool: ...
    def set_result(self, result: Placed, /) -> None: ...
    def set_exception(self, exception: BaseException, /) -> None: ...
    def exception(self) -> BaseException | None: ...


Told = TypeVar("Told", bound=Settled)


@dataclass(frozen=True, slots=True, kw_only=True)
class Batching:
    """How records are gathered. `batch_bytes` is before compression.

    `delivery_timeout_s`: how long after it was due a batch is retried, if the broker had answered
    the one before; like Kafka's delivery.timeout.ms.
    """

    linger_ms: int = 5
    batch_bytes: int = 512 << 10
    buffer_bytes: int = 32 << 20
    compression: str = "none"
    acks: Acks = "all"
    delivery_timeout_s: float = RESTART_S

    def __post_init__(self) -> None:
        if self.compression not in CODEC_IDS:
            known = ", ".join(CODEC_IDS)
            raise InvalidRequest(f"compression {self.compression!r}: one of {known}")
        if check_acks(self.acks) == "0":
            raise InvalidRequest(
                "with acks=0 nothing is awaited, so a record's result would never be known"
            )

    @property
    def codec(self) -> int:
        return CODEC_IDS[self.compression]


class Outgoing(NamedTuple):
    """A record with all that is decided about it. `size_bytes` is its size in a batch."""

    value: bytes | None
    key: bytes | None
    timestamp: int
    headers: Headers
    size_bytes: int


@dataclass(slots=True)
class Pending(Generic[Told]):
    """One batch being gathered, or in flight: columns of equal length."""

    place: TopicPartition
    due_ms: int
    new_delivery: Callable[[], Told]
    values: list[bytes | None] = field(default_factory=list)
    keys: list[bytes | None] = field(default_factory=list)
    timestamps: list[int] = field(default_factory=list)
    headers: list[Headers] = field(default_factory=list)
    deliveries: list[Told] = field(default_factory=list)
    size_bytes: int = HEADER_SIZE

    def __len__(self) -> int:
        return len(self.values)

    @property
    def held_bytes(self) -> int:
        return self.size_bytes - HEADER_SIZE + len(self) * OBJECTS_BYTES

    def add(self, record: Outgoing) -> Told:
        delivery = self.new_delivery()
        try:
            self.values.append(record.value)
            self.keys.append(record.key)
            self.timestamps.append(record.timestamp)
            self.headers.append(record.headers)
            self.size_bytes += record.size_bytes
            self.deliveries.append(delivery)
        except BaseException:  # Ctrl-C: the record is one of the batch as a whole, or not at all
            for column in (self.values, self.keys, self.timestamps, self.headers):
                del column[len(self.deliveries) :]
            raise
        return delivery

    def settle(self, base_offset: int) -> None:
        for offset, delivery in enumerate(self.deliveries, base_offset):
            if not delivery.cancelled():
                delivery.set_result(Placed(*self.place, offset))

    def fail(self, error: BaseException) -> int:
        """How many had not been told yet. The batch is told of: asyncio need not tell of each
        record whose future nobody awaits.
        """
        told = 0
        for delivery in self.deliveries:
            if not delivery.done():
                delivery.set_exception(error)
                delivery.exception()
                told += 1
        return told

    def part(self, start: int, end: int) -> Pending[Told]:
        columns = (self.values, self.keys, self.timestamps, self.headers, self.deliveries)
        cut: Any = (column[start:end] for column in columns)
        return Pending(self.place, self.due_ms, self.new_delivery, *cut)


class Accumulator(Generic[Told]):
    """What waits, by partition. Not thread-safe: whoever drives it holds a lock, or is one task.

    `of_a_batch` gives, for each batch, what makes its records' futures.
    """

    def __init__(self, batching: Batching, of_a_batch: Callable[[], Callable[[], Told]]) -> None:
        self._batching, self._of_a_batch = batching, of_a_batch
        self._queues: dict[TopicPartition, deque[Pending[Told]]] = {}
        self._under_way: dict[TopicPartition, Pending[Told]] = {}
        self.held_bytes = 0

    def has_room(self, record: Outgoing) -> bool:
        """A record larger than the buffer has room if nothing else is held."""
        held_bytes = self.held_bytes + record.size_bytes + OBJECTS_BYTES
        return self.held_bytes <= 0 or held_bytes <= self._batching.buffer_bytes

    def add(self, place: TopicPartition, record: Outgoing, *, now_ms: int) -> tuple[Told, bool]:
        """The record's future, and whether the sender has to look: a batch was begun, or is
        full.
        """
        queue = self._queues.get(place)
        if queue is None:
            queue = self._queues[place] = deque()
        limit, size = self._batching.batch_bytes, record.size_bytes
        begun = not queue or queue[-1].size_bytes + size > limit
        if begun:
            due_ms = now_ms + self._batching.linger_ms
            pending = Pending(place, due_ms, self._of_a_batch())
            delivery = pending.add(record)
            queue.append(pending)  # never an empty one, whenever Ctrl-C comes
        else:
            pending = queue[-1]
            delivery = pending.add(record)
        self.held_bytes += size + OBJECTS_BYTES
        return delivery, begun or pending.size_bytes >= limit

    def take_due(self, *, now_ms: int, flushing: bool = False) -> Pending[Told] | None:
        """A batch that should go now: full, lingered long enough, or everything when flushing.

        Partitions take turns: one that is always full does not keep others from being sent.
        """
        for place, queue in self._queues.items():
            if not queue or place in self._under_way:
                continue
            if flushing or len(queue) > 1 or self._is_due(queue[0], now_ms):
                self._under_way[place] = queue.popleft()
                self._queues[place] = self._queues.pop(place)
                return self._under_way[place]
        return None

    def _is_due(self, pending: Pending[Told], now_ms: int) -> bool:
        return now_ms >= pending.due_ms or pending.size_bytes >= self._batching.batch_bytes

    def finish(self, pending: Pending[Told]) -> None:
        """Make room for others, once the batch's deliveries are settled."""
        del self._under_way[pending.place]
        if not self._queues[pending.place]:
            del self._queues[pending.place]
        self.held_bytes -= pending.held_bytes
        if not self._queues:
            self.held_bytes = 0  # Ctrl-C in the middle of `add` left it wrong by one record

    def fail_all(self, error: BaseException) -> None:
        """For a sender that can send no more: fails all that is waiting or in flight, so that
        nobody waits for ever.
        """
        held = (*self._under_way.values(), *itertools.chain(*self._queues.values()))
        lost = sum([pending.fail(error) for pending in held])
        if lost:
            log.warning(
                "%d records of a producer were not sent, or not seen to be: %r", lost, error
            )
        for queue in self._queues.values():
            while queue:
                self.held_bytes -= queue.popleft().held_bytes

    def next_due_ms(self) -> int | None:
        """When something becomes due by lingering; None if nothing waits."""
        waiting = [
            queue[0].due_ms
            for place, queue in self._queues.items()
            if queue and place not in self._under_way
        ]
        return min(waiting, default=None)

    @property
    def is_empty(self) -> bool:
        return not self._under_way and not any(self._queues.values())


def place_of(topic: str, partition: int | None) -> tuple[str, int | None]:
    """As sequences are counted: one partition under two names would have two of them, and what is
    sent under the second be taken for a repeat. Raises TypeError.
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


def outgoing(
    value: Value,
    *,
    key: Value,
    timestamp: Time | None,
    headers: GivenHeaders,
    now_ms: int,
) -> Outgoing:
    """Raises TypeError, and InvalidRequest for a time."""
    plain, plain_key = to_bytes(value, name="value"), to_bytes(key, name="key")
    written_ms = now_ms if timestamp is None else time_of_record(timestamp)
    pairs = to_headers(headers) if headers else NO_HEADERS
    return Outgoing(plain, plain_key, written_ms, pairs, record_size(plain, plain_key, pairs))
