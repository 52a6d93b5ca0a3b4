"""`client.producer()`: the caller sends record by record; batches go out in the background.

One thread sends; any number may call `send`. Nothing is decided here: see `batching`, `sender`.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable
from typing import Final, Protocol, Self, TypeVar
from weakref import WeakSet

from record_format.clock import monotonic_ms, wall_clock_ms
from record_format.encode import NO_HEADERS
from record_format.errors import Throttled, TierlogError
from tierlog.client.answers import TopicDescription
from tierlog.client.batching import (
    Accumulator,
    Batching,
    Changed,
    Delivery,
    Outgoing,
    Pending,
    outgoing,
    place_of,
)
from tierlog.client.exchange import RetryPolicy, Steps
from tierlog.client.partitioner import Partitioner
from tierlog.client.records import GivenHeaders, Value
from tierlog.client.sender import Sender
from tierlog.client.times import Time

T = TypeVar("T")

FLUSH_AT_EXIT_S: Final = 10.0
_open: Final[WeakSet[Producer]] = WeakSet()


@atexit.register
def _flush_what_is_open() -> None:
    for producer in list(_open):
        producer.end()


class Runner(Protocol):
    """What a producer needs of a client."""

    retries: RetryPolicy

    def run(self, steps: Steps[T]) -> T: ...
    def describe_topic(self, topic: str) -> TopicDescription: ...


class Producer:
    """Gathers records into batches and sends them, each exactly once; a context manager.

    Leaving the context flushes. `send` returns a future that says where the record was appended. A
    producer that nobody closes is flushed when the interpreter exits, for `FLUSH_AT_EXIT_S` at
    most.
    """

    def __init__(
        self,
        client: Runner,
        batching: Batching | None = None,
        *,
        room_timeout_s: float = 60.0,
        clock: Callable[[], int] = monotonic_ms,
    ) -> None:
        self._client = client
        self._batching = batching or Batching()
        self._room_timeout_s = room_timeout_s
        self._clock = clock
        self._waiting = Accumulator(self._batching, Delivery.of_a_batch)
        self._partitioner = Partitioner(batch_bytes=self._batching.batch_bytes)
        self._sender = Sender(self._batching)
        self._changed = Changed()
        self._flushing = 0
        self._closed = False
        self._failure: BaseException | None = None
        self._process = os.getpid()
        self._ended = False
        self._thread = threading.Thread(target=self._work, name="tierlog-producer", daemon=True)
        self._thread.start()
        _open.add(self)

    def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: GivenHeaders = NO_HEADERS,
        partition: int | None = None,
    ) -> Delivery:
        """Hand over one record. Waits if the buffer is full; raises Throttled after a while.

        The future has the result: a `Placed`, or the error. Raises TypeError for what is not a
        record, UnknownTopic, and RuntimeError after `close`.
        """
        self._check_thread()
        topic, partition = place_of(topic, partition)
        now_ms = self._clock()
        written_ms = wall_clock_ms()
        record = outgoing(value, key=key, timestamp=timestamp, headers=headers, now_ms=written_ms)
        if partition is None and self._partitioner.claims_look(topic, now_ms=now_ms):
            self._learn(topic, now_ms)
        with self._changed:
            if not self._waiting.has_room(record):
                self._wait_for_room(record)
            self._check_open()
            if partition is None:
                partition = self._partitioner.choose(topic, record)
            try:
                delivery, is_news = self._waiting.add((topic, partition), record, now_ms=now_ms)
                if is_news:
                    self._changed.notify_all()
            except BaseException:  # Ctrl-C: the record may have been handed over
                self._changed.notify_all()
                raise
        return delivery

    def _wait_for_room(self, record: Outgoing) -> None:
        if not self._changed.wait_for(lambda: self._waiting.has_room(record), self._room_timeout_s):
            raise Throttled(f"no room for a record within {self._room_timeout_s} s")

    def _learn(self, topic: str, now_ms: int) -> None:
        try:
            self._partitioner.learn(self._client.describe_topic(topic), now_ms=now_ms)
        except TierlogError as error:
            self._partitioner.keep(topic, error)

    def flush(self, timeout_s: float | None = None) -> bool:
        """Send everything now, and wait for the answers; False if the time was not enough.

        Raises RuntimeError in a future's callback: it runs in the thread that would have to send.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a future's callback cannot wait for the producer that called it")
        if not self._is_working:
            return self._waiting.is_empty
        with self._changed:
            self._flushing += 1
            try:
                self._changed.notify_all()
                self._changed.wait_for(
                    lambda: self._waiting.is_empty or not self._is_working, timeout_s
                )
                return self._waiting.is_empty
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Flush, and end the thread. The futures say what became of the records."""
        self.flush()
        _open.discard(self)  # who was interrupted is flushed when the interpreter ends
        if self._is_working:
            with self._changed:
                self._closed = True
                self._changed.notify_all()
        if self._process == os.getpid():
            self._thread.join()  # also one that failed, and is about to say so

    def end(self) -> None:
        """The interpreter exits: what was handed over is sent, or reported as not sent."""
        if self._is_working and not self.flush(FLUSH_AT_EXIT_S):
            with self._changed:
                self._waiting.fail_all(RuntimeError("the interpreter ended"))

    def __repr__(self) -> str:
        return f"<Producer of {self._client!r}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_open(self) -> None:
        if self._failure is not None:
            raise RuntimeError("the producer failed; create a new one") from self._failure
        if self._closed:
            raise RuntimeError("the producer is closed")

    def _check_thread(self) -> None:
        """Ahead of the lock, which behind a fork nobody may be left to give back."""
        if not self._is_working:
            self._check_open()
            raise RuntimeError(
                "the producer's thread stayed behind a fork; make one in this process"
            )

    @property
    def _is_working(self) -> bool:
        """Not `is_alive`, after which Ctrl-C can make Python 3.11 take a thread for ended."""
        return not self._ended and self._process == os.getpid()

    def _work(self) -> None:
        try:
            self._send_all()
        finally:
            with self._changed:
                self._ended = True
                self._changed.notify_all()

    def _send_all(self) -> None:
        while (pending := self._next()) is not None:
            policy = self._client.retries
            steps = self._sender.deliver(pending, policy, now_ms=self._clock())
            try:
                self._client.run(steps)
            except BaseException as error:  # a bug, or its client was closed
                with self._changed:
                    self._failure = error
                    self._waiting.fail_all(error)
                raise
            finally:
                with self._changed:
                    self._waiting.finish(pending)
                    self._changed.notify_all()

    def _next(self) -> Pending[Delivery] | None:
        with self._changed:
            while True:
                now_ms = self._clock()
                flushing = self._flushing > 0 or self._closed  # nothing is left behind
                pending = self._waiting.take_due(now_ms=now_ms, flushing=flushing)
                if pending is not None or self._closed:
                    return pending
                due_ms = self._waiting.next_due_ms()
                self._changed.wait(None if due_ms is None else max(due_ms - now_ms, 1) / 1000)
