"""How records become batches, and the futures that the records of a batch share."""

import asyncio
import threading
import traceback
from concurrent import futures

import pytest

from tests.fakes.tiny_broker import TinyBroker, client, record, refused
from tierlog.client.batching import (
    Accumulator,
    Batching,
    Delivery,
    InterruptSafeCondition,
    RecordMetadata,
)
from tierlog.record_format import errors


def test_only_one_batch_of_a_partition_is_in_flight():
    accumulator = Accumulator(Batching(linger_ms=10, batch_bytes=250), Delivery.factory_for_batch)
    for _ in range(4):
        accumulator.buffer_record(("t", 0), record(b"v" * 100), now_ms=0)
    first = accumulator.take_due(now_ms=0)
    assert first is not None
    assert accumulator.take_due(now_ms=100) is None
    accumulator.finish(first)
    second = accumulator.take_due(now_ms=0, flushing=True)
    assert second is not None
    accumulator.finish(second)
    while (more := accumulator.take_due(now_ms=0, flushing=True)) is not None:
        accumulator.finish(more)
    assert accumulator.is_empty
    assert accumulator.buffered_bytes == 0


def test_a_partition_that_is_always_full_does_not_starve_others():
    accumulator, sent = (
        Accumulator(Batching(linger_ms=10, batch_bytes=250), Delivery.factory_for_batch),
        [],
    )
    accumulator.buffer_record(("t", 0), record(b"v" * 200), now_ms=0)
    accumulator.buffer_record(("t", 1), record(b"v"), now_ms=0)
    for _ in range(4):
        accumulator.buffer_record(("t", 0), record(b"v" * 200), now_ms=0)
        pending = accumulator.take_due(now_ms=20)
        sent.append(pending.topic_partition[1])
        accumulator.finish(pending)
    assert sent == [0, 1, 0, 0]


def test_a_batch_is_due_after_its_linger_time():
    accumulator = Accumulator(Batching(linger_ms=10), Delivery.factory_for_batch)
    accumulator.buffer_record(("t", 0), record(b"v"), now_ms=5)
    assert accumulator.take_due(now_ms=14) is None
    assert accumulator.next_due_ms() == 15
    assert accumulator.take_due(now_ms=15) is not None


class ObservedCondition(InterruptSafeCondition):
    def __init__(self) -> None:
        super().__init__()
        self.wait_called = threading.Event()

    def wait(self, timeout: float | None = None) -> bool:
        self.wait_called.set()
        return super().wait(timeout)


def test_waiting_for_a_record_is_not_ended_by_another_of_its_batch():
    """The records of a batch share a condition, and are completed one by one."""
    condition, found = ObservedCondition(), []
    first, second = Delivery(condition), Delivery(condition)
    waiter = threading.Thread(target=lambda: found.append(second.result(10)))
    waiter.start()
    for delivery, offset in ((first, 5), (second, 6)):
        assert condition.wait_called.wait(10), "the waiter is not waiting"
        condition.wait_called.clear()
        delivery.set_result(RecordMetadata("t", 0, offset))
    waiter.join(10)
    assert found == [RecordMetadata("t", 0, 6)]


def test_a_delivery_is_a_future_of_the_standard_library():
    new = Delivery.factory_for_batch()
    first, second, late = new(), new(), new()
    first.set_result(RecordMetadata("t", 0, 5))
    second.set_exception(ValueError("no"))
    done, not_done = futures.wait([first, second, late], return_when=futures.FIRST_EXCEPTION)
    assert (done, not_done) == ({first, second}, {late})
    assert set(futures.as_completed([first, second], timeout=10)) == {first, second}
    for wait_briefly in (late.result, late.exception):
        with pytest.raises(TimeoutError):
            wait_briefly(0.001)
    assert not late.cancel()
    assert not late.done()

    async def wait() -> int:
        return (await asyncio.wrap_future(first)).offset

    assert asyncio.run(wait()) == 5


def test_the_shared_error_of_a_batch_does_not_grow_when_raised_again():
    broker = TinyBroker(refused(403, "forbidden"))
    with client(broker) as c, c.producer(Batching(linger_ms=60_000)) as producer:
        sent = [producer.send("t", "v", partition=0) for _ in range(3)]
    lengths = []
    for delivery in sent:
        with pytest.raises(errors.RequestError) as raised:
            delivery.result(0)
        lengths.append(len(traceback.format_exception(raised.value)))
    assert len(set(lengths)) == 1
