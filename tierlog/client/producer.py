"""`client.producer()`: the caller sends record by record; batches are sent in the background.

Each request in flight has a thread, and one more waits for the next batch; any number may call
`send`. Decisions are made in `batching` and `sender`.
"""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING, Final, Self
from weakref import WeakSet

from tierlog.client.batching import (
    Batching,
    Delivery,
    InterruptSafeCondition,
    PendingBatch,
    PreparedRecord,
    all_finished,
    check_topic_partition,
    prepare_record,
)
from tierlog.client.records import HeadersLike, Time, Value
from tierlog.client.sender import ProducerCore, Within
from tierlog.host.clock import monotonic_ms, wall_clock_ms
from tierlog.record_format.encode import NO_HEADERS
from tierlog.record_format.errors import Throttled

if TYPE_CHECKING:
    from tierlog.client.client import Client


FLUSH_AT_EXIT_S: Final = 10.0
_open_producers: Final[WeakSet[Producer]] = WeakSet()


@atexit.register
def _flush_open_producers() -> None:
    flush_at_exit(list(_open_producers))


def flush_at_exit(
    producers: Iterable[Producer], *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Send what is buffered, or report it as not sent. `FLUSH_AT_EXIT_S` limits all of them
    together, so they send at the same time.
    """
    deadline_s = clock() + FLUSH_AT_EXIT_S
    working = [producer for producer in producers if producer.stop_lingering()]
    for producer in working:
        producer.flush_or_fail(max(0.0, deadline_s - clock()))


class Producer(ProducerCore[Delivery]):
    """Batches records and sends them, each exactly once; a context manager.

    Leaving the context flushes. `send` returns a future for the record's offset. A producer that is
    not closed is flushed when the interpreter exits, for at most `FLUSH_AT_EXIT_S`.
    """

    _client: Client

    def __init__(
        self,
        client: Client,
        batching: Batching | None = None,
        *,
        room_timeout_s: float = 60.0,
        clock: Callable[[], int] = monotonic_ms,
        within: Within | None = None,
    ) -> None:
        super().__init__(client, batching, clock, Delivery.factory_for_batch, within)
        self._room_timeout_s = room_timeout_s
        self._condition = InterruptSafeCondition()
        self._process = os.getpid()
        self._threads: list[threading.Thread] = []
        self._working = 0  # threads that have not ended
        with self._condition:
            self._start_thread()
        _open_producers.add(self)

    def send(
        self,
        topic: str,
        value: Value,
        *,
        key: Value = None,
        timestamp: Time | None = None,
        headers: HeadersLike = NO_HEADERS,
        partition: int | None = None,
    ) -> Delivery:
        """Buffer one record. Waits if the buffer is full, then raises Throttled; in a future's
        callback, which runs in a thread that sends, at once.

        The future's result is a `RecordMetadata`, or the error. Raises TypeError for what is not a
        record, UnknownTopic, and RuntimeError after `close`.
        """
        self._check_thread()
        topic, partition = check_topic_partition(topic, partition)
        now_ms = self._clock()
        written_ms = wall_clock_ms()
        record = prepare_record(
            value, key=key, timestamp=timestamp, headers=headers, now_ms=written_ms
        )
        if partition is None and self._partitioner.claim_refresh(topic, now_ms=now_ms):
            self._client.run(self._describe(topic, now_ms))
        with self._condition:
            if not self._accumulator.has_room(record):
                self._wait_for_room(record)
            self._check_open()
            if partition is None:
                partition = self._partitioner.choose(topic, record)
            try:
                delivery, wake_sender = self._accumulator.buffer_record(
                    (topic, partition), record, now_ms=now_ms
                )
                if wake_sender:
                    self._condition.notify_all()
            except BaseException:  # Ctrl-C: the record may have been buffered
                self._condition.notify_all()
                raise
        return delivery

    def _wait_for_room(self, record: PreparedRecord) -> None:
        if threading.current_thread() in self._threads:
            raise Throttled("the buffer is full, and a future's callback cannot wait for room")
        if not self._condition.wait_for(
            lambda: self._accumulator.has_room(record), self._room_timeout_s
        ):
            raise Throttled(f"the buffer was full for {self._room_timeout_s:g} s")

    def flush(self, timeout_s: float | None = None) -> bool:
        """Send now what was sent before, and wait for the responses; False if `timeout_s` was not
        enough. Other threads may continue to send.

        Raises RuntimeError in a future's callback: it runs in a thread that sends.
        """
        if threading.current_thread() in self._threads:
            raise RuntimeError(
                "flush() cannot be called in a future's callback: it would wait for its own thread"
            )
        if not self._is_working:
            return self._accumulator.is_empty
        with self._condition:
            self._flushing += 1
            try:
                self._condition.notify_all()
                unfinished = self._accumulator.unfinished()
                self._condition.wait_for(
                    lambda: all_finished(unfinished) or not self._is_working, timeout_s
                )
                return all_finished(unfinished)
            finally:
                self._flushing -= 1

    def close(self) -> None:
        """Flush, and end the threads. The futures have the records' results."""
        self.flush()
        if self._is_working:
            with self._condition:
                self._closed = True
                self._condition.notify_all()
        if self._process == os.getpid():
            for thread in self._threads:  # also one that failed and is about to raise
                thread.join()
        _open_producers.discard(self)  # not before: an interrupted producer is flushed at exit

    def abandon(self, error: BaseException) -> None:
        """Fail what is buffered instead of sending it, and end."""
        with self._condition:
            self._accumulator.fail_queued(error)
        self.close()

    def stop_lingering(self) -> bool:
        """From now on, send every record at once; False if the producer cannot send any more."""
        if not self._is_working:
            return False
        with self._condition:
            self._flushing += 1
            self._condition.notify_all()
        return True

    def flush_or_fail(self, timeout_s: float) -> None:
        """Flush, then fail what is left, and what other threads have sent since."""
        self.flush(timeout_s)
        with self._condition:
            self._accumulator.fail_all(RuntimeError("the interpreter exited"))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check_thread(self) -> None:
        """Before the lock is taken: after a fork, the thread that holds it may not exist."""
        if not self._is_working:
            self._check_open()
            raise RuntimeError("a producer cannot be used after a fork; create one in this process")

    @property
    def _is_working(self) -> bool:
        """Not `Thread.is_alive`: Ctrl-C in it can make Python 3.11 consider the thread ended."""
        return self._working > 0 and self._process == os.getpid()

    # --- in the threads that send; with the lock held, but for `_work` and `_send_all` ------------

    def _start_thread(self) -> None:
        thread = threading.Thread(target=self._work, name="tierlog-producer", daemon=True)
        thread.start()
        self._threads.append(thread)
        self._working += 1

    def _work(self) -> None:
        try:
            self._send_all()
        finally:
            with self._condition:
                self._working -= 1
                self._condition.notify_all()

    def _send_all(self) -> None:
        while (pending := self._next()) is not None:
            try:
                self._client.run(self._deliver(pending))
            except BaseException as error:  # a bug, or its client was closed
                with self._condition:
                    self._failure = self._failure or error
                    self._accumulator.fail_queued(error, pending)
                raise
            finally:
                with self._condition:
                    self._accumulator.finish(pending)
                    self._condition.notify_all()

    def _next(self) -> PendingBatch[Delivery] | None:
        with self._condition:
            while True:
                now_ms = self._clock()
                pending = self._take_due(now_ms)
                if pending is not None:
                    self._leave_a_thread_waiting()
                if pending is not None or self._is_ending():
                    return pending
                due_ms = self._accumulator.next_due_ms()
                wait_s = None if due_ms is None else max(due_ms - now_ms, 1) / 1000
                self._idle += 1
                self._condition.wait(wait_s and min(wait_s, threading.TIMEOUT_MAX))
                self._idle -= 1

    def _leave_a_thread_waiting(self) -> None:
        """For batches of other partitions, while this thread waits for its response."""
        if not self._idle and len(self._threads) < self._batching.max_in_flight:
            with suppress(RuntimeError):  # no more threads, or the interpreter is shutting down
                self._start_thread()
