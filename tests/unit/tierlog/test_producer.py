"""The producers against a minimal broker: order, sequences, retries, buffer limits."""

import asyncio
import gc
import itertools
import logging
import os
import signal
import sys
import threading
import time
import traceback
from concurrent import futures
from contextlib import contextmanager, suppress
from functools import partial
from itertools import pairwise
from random import Random

import httpx
import msgspec
import pytest

import tierlog
from record_format import errors
from record_format.batch import iter_headers
from record_format.decode import decode_batch
from tests.fakes.waiting import until
from tierlog.client import AnswerLost, Batching, BrokerUnreachable, RetryPolicy, responses
from tierlog.client import producer as producers
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import (
    RECORD_OVERHEAD_BYTES,
    Accumulator,
    Delivery,
    RecordMetadata,
    prepare_record,
)
from tierlog.client.partitioner import Partitioner
from tierlog.client.producer import Producer

record = partial(prepare_record, key=None, timestamp=None, headers=(), now_ms=1)
QUICK = RetryPolicy(attempts=3, first_pause_s=0.0, max_pause_s=0.5)


class TinyBroker:
    """Two partitions; recognises duplicates by producer and sequence, like the real one.

    `faults`: for each produce in turn, None, a response to return instead of it, or "lost" or
    "shutdown": the batch is appended, but the connection breaks or the broker stops.
    """

    def __init__(self, *faults) -> None:
        self.faults, self.logs, self.seen = list(faults), {0: [], 1: []}, {}
        self.identities = 0

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/producers":
            self.identities += 1
            return httpx.Response(
                200, json={"producer_id": 2**33 + self.identities, "producer_epoch": 0}
            )
        if request.method == "GET":
            return httpx.Response(200, json=description())
        fault = self.faults.pop(0) if self.faults else None
        if isinstance(fault, httpx.Response):
            return fault
        response = self.append(int(request.url.path.split("/")[5]), request.content)
        if fault == "lost":
            raise httpx.ReadError("gone", request=request)
        if fault == "shutdown":
            return httpx.Response(503, json={"code": "shutting-down", "outcome": "unknown"})
        return response

    def append(self, partition: int, body: bytes) -> httpx.Response:
        (header,) = iter_headers(body)
        key = (partition, header.producer_id, header.base_sequence)
        duplicate = key in self.seen
        if not duplicate:
            expected = sum(1 for p, i, _ in self.seen if (p, i) == key[:2])
            self.seen[key] = len(self.logs[partition])
            self.logs[partition] += [r.value for r in decode_batch(body, header)]
            assert header.base_sequence >= expected
        base = self.seen[key]
        result = {
            "partition": partition,
            "base_offset": base,
            "last_offset": base + header.record_count - 1,
            "records": header.record_count,
            "duplicate": duplicate,
        }
        return httpx.Response(200, json={"topic": "t", "results": [result], "warnings": []})


def description(*numbers, damaged=(), name="t"):
    zeros = dict.fromkeys(responses.PartitionDescription.__struct_fields__, 0)
    return {
        "name": name,
        "topic_id": "x",
        "config": {},
        "effective_config": {},
        "partitions": [{**zeros, "partition": number} for number in numbers or (0, 1)],
        "damaged_partitions": [{"partition": number, "detail": "bad"} for number in damaged],
    }


def topic(name, count):
    return msgspec.convert(description(*range(count), name=name), responses.TopicDescription)


def refused(status: int, code: str) -> httpx.Response:
    """A problem document, or without a `code` a gateway's response."""
    return httpx.Response(status, json={"code": code, "detail": code} if code else {})


def client(broker: TinyBroker) -> tierlog.Client:
    return tierlog.Client(retries=QUICK, transport=httpx.MockTransport(broker))


def test_records_arrive_in_order_and_futures_have_their_offsets():
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(batch_bytes=400)) as producer:
        futures = [producer.send("t", f"v{n}", partition=1) for n in range(100)]
    assert broker.logs[1] == [b"v%d" % n for n in range(100)]
    assert [f.result(0).offset for f in futures] == list(range(100))
    assert len(broker.seen) > 2


def test_lost_responses_do_not_duplicate_records():
    broker = TinyBroker("lost", "lost", None, refused(503, "starting"), "lost")
    with client(broker) as c, c.producer(Batching(batch_bytes=300)) as producer:
        for n in range(50):
            producer.send("t", f"v{n}", partition=0)
    assert broker.logs[0] == [b"v%d" % n for n in range(50)]
    assert broker.identities == 1


def test_a_refused_batch_fails_alone_and_its_sequence_is_reused(caplog):
    broker = TinyBroker(refused(413, "record-too-large"))
    with client(broker) as c, c.producer() as producer:
        first = producer.send("t", "too large", partition=0)
        producer.flush()
        second = producer.send("t", "fits", partition=0)
    with pytest.raises(errors.RecordTooLarge):
        first.result(0)
    assert "a batch of 1 records for t-0 failed: record-too-large" in caplog.text
    assert second.result(0).offset == 0
    assert broker.identities == 1


def test_a_broker_that_responded_before_is_waited_for():
    broker = TinyBroker(None, *["lost"] * 20, refused(502, ""), refused(503, "starting"))
    with client(broker) as c, c.producer() as producer:
        for n in range(3):
            producer.send("t", f"{n}", partition=0)
            producer.flush()
    assert broker.logs[0] == [b"0", b"1", b"2"]
    assert broker.identities == 1


@pytest.mark.parametrize("attempt_s", [0.5, 30])
def test_a_batch_is_retried_until_its_delivery_timeout(attempt_s):
    """By time, not by attempts: with a frozen broker an attempt takes long."""
    broker, now_s, all_sent = TinyBroker(None, *["lost"] * 1000), [0.0], threading.Event()

    def timed(request: httpx.Request) -> httpx.Response:
        if broker.faults[0]:
            assert all_sent.wait(60), "all records have the same age"
            now_s[0] += attempt_s
        return broker(request)

    policy = RetryPolicy(attempts=3, first_pause_s=0.0, clock=lambda: now_s[0])
    batching = Batching(batch_bytes=100, delivery_timeout_s=120)
    with tierlog.Client(retries=policy, transport=httpx.MockTransport(timed)) as c:
        producer = Producer(c, batching, clock=lambda: int(now_s[0] * 1000))
        sent = [producer.send("t", bytes(100), partition=0) for _ in range(6)]
        all_sent.set()
        assert producer.flush()
        assert 120 <= now_s[0] <= 120 + attempt_s
        del broker.faults[:-1]
        broker.faults[0] = None
        sent.append(producer.send("t", b"later", partition=0))
        producer.close()
    kinds = [type(delivery.exception(0)).__name__ for delivery in sent]
    assert kinds == ["NoneType", "AnswerLost", *["BrokerUnreachable"] * 4, "NoneType"]
    assert "not sent" in str(sent[2].exception(0))


def test_a_batch_aged_by_a_slow_broker_is_still_sent():
    now_s, slow = [0.0], refused(429, "throttled")
    broker = TinyBroker(None, slow, slow, None, slow, slow)

    def timed(request: httpx.Request) -> httpx.Response:
        now_s[0] += 200
        return broker(request)

    policy = RetryPolicy(attempts=3, first_pause_s=0.0)
    with tierlog.Client(retries=policy, transport=httpx.MockTransport(timed)) as c:
        producer = Producer(c, Batching(batch_bytes=100), clock=lambda: int(now_s[0] * 1000))
        sent = [producer.send("t", bytes(100), partition=0) for _ in range(3)]
        producer.close()
    assert [delivery.result(0).offset for delivery in sent] == [0, 1, 2]


def test_a_batch_too_large_for_its_topic_is_split():
    too_large = {"code": "record-too-large", "limit_bytes": 500, "size_bytes": 1500}
    broker = TinyBroker()

    def limited(request: httpx.Request) -> httpx.Response:
        if len(request.content) > 500:
            return httpx.Response(413, json={**too_large, "size_bytes": len(request.content)})
        return broker(request)

    with client(limited) as c, c.producer() as producer:
        values = [bytes([n]) * (600 if n == 17 else n) for n in range(40)]
        sent = [producer.send("t", value, partition=0) for value in values]
    with pytest.raises(errors.RecordTooLarge):
        sent.pop(17).result(0)
    assert broker.logs[0] == values[:17] + values[18:]
    assert [delivery.result(0).offset for delivery in sent] == list(range(39))
    assert broker.identities == 1


@pytest.mark.parametrize("faults", [("lost", "lost", "lost"), (refused(409, "producer-fenced"),)])
def test_an_unknown_outcome_makes_the_producer_take_a_new_id(faults):
    broker = TinyBroker(*faults)
    with client(broker) as c, c.producer() as producer:
        first = producer.send("t", "a", partition=0)
        producer.flush()
        second = producer.send("t", "b", partition=0)
    with pytest.raises((AnswerLost, errors.ProducerFenced)):
        first.result(0)
    assert second.result(0).partition == 0
    assert broker.identities == 2


@pytest.mark.parametrize("refusal", [(401, "unauthorized"), (413, "record-too-large")])
@pytest.mark.parametrize("fault", ["lost", "shutdown"])
def test_a_sequence_whose_retry_is_refused_is_not_reused(fault, refusal):
    broker = TinyBroker(fault, refused(*refusal))
    with client(broker) as c, c.producer(Batching(linger_ms=10_000)) as producer:
        first = [producer.send("t", value, partition=0) for value in "ab"]
        producer.flush()
        second = [producer.send("t", value, partition=0) for value in "cd"]
    assert all(isinstance(delivery.exception(0), AnswerLost) for delivery in first), (
        "they were appended"
    )
    assert refusal[1] in str(first[0].exception(0))
    assert [delivery.result(0).offset for delivery in second] == [2, 3]
    assert broker.logs[0] == [b"a", b"b", b"c", b"d"]
    assert broker.identities == 2


def test_a_batch_that_was_never_sent_fails_with_broker_unreachable():
    def no_producer_ids(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/producers":
            raise httpx.ReadError("gone", request=request)
        return httpx.Response(200, json=description())

    with client(no_producer_ids) as c, c.producer() as producer:
        sent = producer.send("t", "a")
    assert isinstance(sent.exception(0), BrokerUnreachable)


def test_a_batch_interrupted_by_a_shutdown_is_retried():
    broker = TinyBroker("shutdown")
    with client(broker) as c, c.producer() as producer:
        sent = producer.send("t", "a", partition=0)
    assert sent.result(0).offset == 0
    assert broker.logs[0] == [b"a"]


def test_records_with_a_key_share_its_partition_and_others_fill_batches():
    partitioner = Partitioner(batch_bytes=10_000)
    partitioner.update(topic("t", 12), now_ms=0)
    keyed = [partitioner.choose("t", record(b"v", key=b"k")) for _ in range(5)]
    assert len(set(keyed)) == 1
    keyless = [partitioner.choose("t", record(b"v" * 100)) for _ in range(500)]
    assert sum(a != b for a, b in pairwise(keyless)) <= 6
    assert len(set(keyless)) > 3


def test_a_damaged_partition_does_not_change_the_partition_of_a_key():
    partitioner, found = Partitioner(batch_bytes=100), []
    for shape in (description(0, 1, 2, 3), description(0, 3, damaged=(1, 2))):
        partitioner.update(msgspec.convert(shape, responses.TopicDescription), now_ms=0)
        found.append([partitioner.choose("t", record(b"", key=b"%d" % n)) for n in range(50)])
    assert found[0] == found[1]
    keyless = {partitioner.choose("t", record(b"v" * 100)) for _ in range(9)}
    assert keyless == {0, 3}


@pytest.mark.parametrize("fault", [(503, "starting"), (502, "")])
def test_new_partitions_are_found_after_a_refresh(fault):
    now_ms, broker = [0], GrowingBroker()
    broker.fault = fault
    with client(broker) as c, Producer(c, clock=lambda: now_ms[0]) as producer:

        def partitions_used():
            sent = [producer.send("t", "v", key=str(n)) for n in range(20)]
            producer.flush()
            return {delivery.result(0).partition for delivery in sent}

        assert partitions_used() == {0}
        broker.partitions = (0, 1)
        assert partitions_used() == {0}
        now_ms[0] += 300_000
        broker.partitions = None  # cannot be loaded now: the known ones are used
        assert partitions_used() == {0}
        now_ms[0] += 300_000
        broker.partitions = (0, 1)
        assert partitions_used() == {0, 1}


def test_a_topic_with_fewer_partitions_is_described_again_once_one_is_unknown():
    broker = GrowingBroker()
    broker.partitions = (0, 1)

    def respond(request: httpx.Request) -> httpx.Response:
        if "/partitions/1/" in request.url.path and broker.partitions == (0,):
            return refused(404, "unknown-partition")
        return broker(request)

    def send_keys() -> list[Delivery]:
        sent = [producer.send("t", "v", key=str(n)) for n in range(20)]
        producer.flush()
        return sent

    with client(respond) as c, c.producer() as producer:
        assert {delivery.result(0).partition for delivery in send_keys()} == {0, 1}
        broker.partitions = (0,)  # the topic is deleted, and created again
        assert {type(delivery.exception(0)) for delivery in send_keys()} == {
            type(None),
            errors.UnknownPartition,
        }
        assert {delivery.result(0).partition for delivery in send_keys()} == {0}


def test_only_one_of_many_senders_refreshes_a_topic():
    partitioner = Partitioner(batch_bytes=100)
    assert all(partitioner.claim_refresh("t", now_ms=0) for _ in range(2))
    partitioner.update(topic("t", 2), now_ms=0)
    assert not partitioner.claim_refresh("t", now_ms=299_999)
    assert [partitioner.claim_refresh("t", now_ms=300_000) for _ in range(3)] == [
        True,
        False,
        False,
    ]


class GrowingBroker(TinyBroker):
    partitions = (0,)
    fault = (503, "starting")

    def __call__(self, request: httpx.Request) -> httpx.Response:
        if request.method != "GET":
            return super().__call__(request)
        if self.partitions is None:
            return refused(*self.fault)
        return httpx.Response(200, json=description(*self.partitions))


def test_many_small_producers_spread_over_all_partitions():
    first = []
    for number in range(200):
        partitioner = Partitioner(batch_bytes=10_000)
        partitioner.update(topic("t", 4), now_ms=0)
        first.append(partitioner.choose("t", record(b"%d" % number)))
    assert set(first) == {0, 1, 2, 3}


def test_each_topic_starts_at_a_random_partition_and_takes_turns():
    partitioner = Partitioner(batch_bytes=100, first=lambda count: count - 1)
    for name, count in (("t", 3), ("u", 5)):
        partitioner.update(topic(name, count), now_ms=0)
        filled = [partitioner.choose(name, record(b"v" * 100)) for _ in range(count)]
        assert filled == [count - 1, *range(count - 1)]


def test_a_full_buffer_blocks_send_until_its_timeout():
    release = threading.Event()
    broker = TinyBroker()

    def slow(request: httpx.Request) -> httpx.Response:
        if request.method == "POST" and request.url.path.endswith("/records"):
            release.wait(10)
        return broker(request)

    with tierlog.Client(retries=QUICK, transport=httpx.MockTransport(slow)) as c:
        producer = tierlog.client.Producer(
            c, Batching(linger_ms=0, buffer_bytes=20 * RECORD_OVERHEAD_BYTES), room_timeout_s=0.05
        )
        fill = (producer.send("t", b"x" * 100, partition=0) for _ in range(100))
        with pytest.raises(errors.Throttled):
            list(fill)
        release.set()
        producer.close()
    assert 15 <= len(broker.logs[0]) <= 20


def test_a_sending_loop_yields_to_other_tasks():
    broker = TinyBroker()

    async def send() -> int:
        transport = httpx.MockTransport(broker)
        async with (
            tierlog.AsyncClient(transport=transport) as client,
            client.producer(Batching(linger_ms=0, buffer_bytes=1 << 40)) as producer,
        ):
            for _ in range(20_000):
                await producer.send("t", b"x", partition=0)
            return len(broker.logs[0])

    assert asyncio.run(send()) > 0, "batches were sent during the loop"
    assert len(broker.logs[0]) == 20_000


def test_a_callback_may_send_but_not_wait():
    broker, results = TinyBroker(), []

    def callback(delivery) -> None:
        results.append(producer.send("t", "second", partition=1))
        for wait in (producer.flush, producer.close):
            with pytest.raises(RuntimeError, match="future's callback"):
                wait()
            results.append(wait)
        results.append(producer in producers._open_producers)

    with client(broker) as c, c.producer() as producer:
        producer.send("t", "first", partition=0).add_done_callback(callback)
    assert results[0].result(10).partition == 1
    assert results[1:] == [producer.flush, producer.close, True], "it is still flushed at exit"
    assert producer not in producers._open_producers


def test_a_callback_does_not_wait_for_room_that_only_its_own_thread_makes():
    broker, refusals = TinyBroker(refused(403, "forbidden")), []

    def send_again(_) -> None:
        with pytest.raises(errors.Throttled, match="callback") as caught:
            producer.send("t", "again", partition=0)
        refusals.append(caught.value)

    with client(broker) as c:
        batching = Batching(linger_ms=60_000, buffer_bytes=4 * RECORD_OVERHEAD_BYTES)
        producer = Producer(c, batching, room_timeout_s=10)
        for _ in range(3):
            producer.send("t", "v", partition=0).add_done_callback(send_again)
        assert producer.flush(5)
        producer.close()
    assert len(refusals) == 3


def test_at_exit_producers_are_flushed_together_within_one_limit():
    class TakesSixSeconds(Producer):
        def flush_or_fail(self, timeout_s: float) -> None:
            until(lambda: all(broker.logs[0] for broker in brokers))
            limits.append(timeout_s)
            now_s[0] += 6
            super().flush_or_fail(timeout_s)

    brokers, limits, now_s = [TinyBroker() for _ in range(3)], [], [100.0]
    clients = [client(broker) for broker in brokers]
    lingering = [TakesSixSeconds(c, Batching(linger_ms=600_000)) for c in clients]
    for producer in lingering:
        producer.send("t", "v", partition=0)
    producers.flush_at_exit(lingering, clock=lambda: now_s[0])
    assert limits == [10, 4, 0]
    for producer, c in zip(lingering, clients, strict=True):
        producer.close()
        c.close()


class ObservedCondition(threading.Condition):
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


def test_a_cancelled_future_does_not_affect_its_batch():
    broker = TinyBroker()

    async def send() -> int:
        transport = httpx.MockTransport(broker)
        async with tierlog.AsyncClient(transport=transport) as c, c.producer() as producer:
            dropped = await producer.send("t", "dropped", partition=0)
            kept = await producer.send("t", "kept", partition=0)
            dropped.cancel()
            return (await kept).offset

    assert asyncio.run(send()) == 1
    assert broker.logs[0] == [b"dropped", b"kept"]


def test_only_one_batch_of_a_partition_is_in_flight():
    accumulator = Accumulator(Batching(linger_ms=10, batch_bytes=250), Delivery.factory_for_batch)
    for _ in range(4):
        accumulator.add(("t", 0), record(b"v" * 100), now_ms=0)
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
    accumulator.add(("t", 0), record(b"v" * 200), now_ms=0)
    accumulator.add(("t", 1), record(b"v"), now_ms=0)
    for _ in range(4):
        accumulator.add(("t", 0), record(b"v" * 200), now_ms=0)
        pending = accumulator.take_due(now_ms=20)
        sent.append(pending.topic_partition[1])
        accumulator.finish(pending)
    assert sent == [0, 1, 0, 0]


def test_a_clock_set_back_does_not_delay_records(monkeypatch):
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(linger_ms=1)) as producer:
        sent = []
        for at in (10**12, 10**12 - 3_600_000):
            monkeypatch.setattr(time, "time_ns", lambda at=at: at * 1_000_000)
            sent.append(producer.send("t", "v", partition=0))
        assert sent[1].result(10).offset == 1


def test_a_batch_is_due_after_its_linger_time():
    accumulator = Accumulator(Batching(linger_ms=10), Delivery.factory_for_batch)
    accumulator.add(("t", 0), record(b"v"), now_ms=5)
    assert accumulator.take_due(now_ms=14) is None
    assert accumulator.next_due_ms() == 15
    assert accumulator.take_due(now_ms=15) is not None


def test_the_asynchronous_producer_behaves_the_same():
    broker = TinyBroker("lost")

    async def send() -> list[int]:
        transport = httpx.MockTransport(broker)
        async with (
            tierlog.AsyncClient(retries=QUICK, transport=transport) as c,
            c.producer(Batching(batch_bytes=300, compression="zstd")) as producer,
        ):
            futures = [await producer.send("t", f"v{n}", partition=0) for n in range(30)]
            await producer.flush()
            return [(await future).offset for future in futures]

    assert asyncio.run(send()) == list(range(30))
    assert broker.logs[0] == [b"v%d" % n for n in range(30)]


@pytest.mark.parametrize("batching", [Batching(), Batching(batch_bytes=500, buffer_bytes=9_000)])
@pytest.mark.parametrize("partition", [0, None])
def test_concurrent_sends_keep_their_order(batching, partition):
    values = [b"v%d" % n for n in range(300)]

    class OnePartition(TinyBroker):
        described = 0

        def __call__(self, request: httpx.Request) -> httpx.Response:
            if request.method != "GET":
                return super().__call__(request)
            self.described += 1
            return httpx.Response(200, json=description(0))

    async def send() -> None:
        async with (
            tierlog.AsyncClient(transport=httpx.MockTransport(broker)) as c,
            AsyncProducer(c, batching, clock=lambda: next(calls) // 10) as producer,
        ):
            await asyncio.gather(*(producer.send("t", v, partition=partition) for v in values))

    broker, calls = OnePartition(), itertools.count()
    asyncio.run(send())
    assert broker.logs[0] == values
    assert broker.described == (partition is None)


def test_concurrent_sends_share_the_error_of_an_unknown_topic():
    described = []

    def respond(request: httpx.Request) -> httpx.Response:
        described.append(request)
        return refused(404, "unknown-topic")

    async def send() -> list[object]:
        async with (
            tierlog.AsyncClient(transport=httpx.MockTransport(respond)) as c,
            c.producer() as producer,
        ):
            together = [producer.send("t", "v") for _ in range(50)]
            failed = await asyncio.gather(*together, return_exceptions=True)
            with pytest.raises(errors.UnknownTopic):
                await producer.send("t", "v")
            return failed

    assert {type(one) for one in asyncio.run(send())} == {errors.UnknownTopic}
    assert len(described) == 2, "once for those that were sent together, and again later"


@pytest.mark.parametrize("end", [Producer.flush, Producer.close])
def test_flush_and_close_return_while_others_send(end):
    broker, ended = TinyBroker(), threading.Event()

    def busy(request: httpx.Request) -> httpx.Response:
        if not ended.is_set():
            with suppress(RuntimeError):  # closed
                sent.append(producer.send("t", f"{len(sent)}", partition=0))
        return broker(request)

    with client(busy) as c:
        producer, sent = c.producer(), []
        first = producer.send("t", "first", partition=1)
        ending = threading.Thread(target=end, args=(producer,), daemon=True)
        ending.start()
        ending.join(10)
        returned, placed = not ending.is_alive(), first.done()
        ended.set()
        producer.close()
    assert returned
    assert placed
    assert [delivery.result(0).offset for delivery in sent] == list(range(len(sent)))


@pytest.mark.parametrize("end", [AsyncProducer.flush, AsyncProducer.aclose])
def test_asynchronous_flush_and_aclose_return_while_others_send(end):
    broker = TinyBroker()

    async def send() -> None:
        async def busy(request: httpx.Request) -> httpx.Response:
            if not ended.is_set():
                with suppress(RuntimeError):  # closed
                    sent.append(await producer.send("t", f"{len(sent)}", partition=0))
            return broker(request)

        ended, sent = asyncio.Event(), []
        async with tierlog.AsyncClient(transport=httpx.MockTransport(busy)) as c:
            producer = c.producer()
            first = await producer.send("t", "first", partition=1)
            try:
                async with asyncio.timeout(10):
                    await end(producer)
                assert first.done()
            finally:
                ended.set()
                await producer.aclose()
        assert [delivery.result().offset for delivery in sent] == list(range(len(sent)))

    asyncio.run(send())


def test_send_refuses_an_invalid_record_and_others_are_delivered():
    broker = TinyBroker()
    with client(broker) as c, c.producer() as producer:
        before = producer.send("t", "before", partition=0, headers={"a": "b"})
        for wrong in ({"value": {"a": 1}}, {"value": "v", "headers": {"a": 1}}):
            with pytest.raises(TypeError, match="expected bytes, text or None"):
                producer.send("t", partition=0, **wrong)
        for time in (-5, 2**63, "1969-12-31T23:00:00Z"):
            with pytest.raises(errors.InvalidRequest, match="timestamp must be between 0 and"):
                producer.send("t", "v", partition=0, timestamp=time)
        after = producer.send("t", bytearray(b"after"), partition=0)
    assert [before.result(0).offset, after.result(0).offset] == [0, 1]
    assert broker.logs[0] == [b"before", b"after"]
    with pytest.raises(RuntimeError, match="closed"):
        producer.send("t", "too late", partition=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"partition": "0"}, "partition: expected a number or None, not str"),
        ({"topic": b"t", "partition": 0}, "topic: expected text, not bytes"),
    ],
)
def test_topic_and_partition_must_have_their_types(arguments, message):
    """Another type would be another partition with its own sequences, and a record be lost as a
    duplicate.
    """
    given = {"topic": "t", "value": "second"} | arguments
    broker = TinyBroker()
    with client(broker) as c, c.producer() as producer:
        producer.send("t", "first", partition=0).result(10)
        with pytest.raises(TypeError, match=message):
            producer.send(**given)

    async def send() -> None:
        async with tierlog.AsyncClient() as c, c.producer() as producer:
            await producer.send(**given)

    with pytest.raises(TypeError, match=message):
        asyncio.run(send())


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_producer_refuses_to_work_after_a_fork_even_with_its_lock_held():
    broker, locked, forked = TinyBroker(), threading.Event(), threading.Event()

    def hold() -> None:
        with producer._condition:
            locked.set()
            forked.wait(10)

    with client(broker) as c, c.producer(Batching(linger_ms=60_000)) as producer:
        producer.send("t", "of the parent", partition=0)
        holder = threading.Thread(target=hold)
        holder.start()
        locked.wait(10)
        child = os.fork()
        if not child:
            signal.alarm(10)
            try:
                assert not producer.flush()
                producer.close()
                producer.send("t", "of the child", partition=0)
            except RuntimeError as error:
                os._exit(7 if "fork" in str(error) else 8)
            finally:
                os._exit(9)
        forked.set()
        holder.join()
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert broker.logs[0] == [b"of the parent"]


def test_giving_up_on_one_record_does_not_affect_others():
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(linger_ms=60_000)) as producer:
        first, second = (producer.send("t", value, partition=0) for value in "ab")
        assert not first.cancel()
        producer.flush()
        assert [first.result(0).offset, second.result(0).offset] == [0, 1]

    async def send() -> list[int]:
        c = tierlog.AsyncClient(transport=httpx.MockTransport(TinyBroker()))
        async with c, c.producer(Batching(linger_ms=60_000)) as producer:
            first, second = [await producer.send("t", value, partition=0) for value in "ab"]
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(first, 0)
            await producer.flush()
            after = await producer.send("t", "c", partition=0)
            await producer.flush()
            return [(await delivery).offset for delivery in (second, after)]

    assert broker.logs[0] == [b"a", b"b"]
    assert asyncio.run(send()) == [1, 2]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_closing_the_client_fails_waiting_records():
    c = client(TinyBroker())
    producer = c.producer(Batching(linger_ms=60_000))
    sent = [producer.send("t", "v", partition=partition) for partition in (0, 1)]
    c.close()
    assert producer.flush(timeout_s=10)
    for delivery in sent:
        assert isinstance(delivery.exception(10), RuntimeError)
    with pytest.raises(RuntimeError, match="create a new one"):
        producer.send("t", "v", partition=0)
    producer.close()


def test_closing_the_asynchronous_client_fails_waiting_records():
    async def send() -> list[BaseException | None]:
        c = tierlog.AsyncClient(retries=QUICK, transport=httpx.MockTransport(TinyBroker()))
        producer = c.producer(Batching(linger_ms=60_000))
        sent = [await producer.send("t", "v", partition=partition) for partition in (0, 1)]
        await c.aclose()
        await producer.flush()
        with pytest.raises(RuntimeError, match="create a new one"):
            await producer.send("t", "v", partition=0)
        with pytest.raises(RuntimeError):
            await producer.aclose()
        return list(await asyncio.gather(*sent, return_exceptions=True))

    async def send_within_10_s() -> list[BaseException | None]:
        async with asyncio.timeout(10):
            return await send()

    assert all(isinstance(error, RuntimeError) for error in asyncio.run(send_within_10_s()))


@pytest.fixture
def ctrl_c(monkeypatch):
    """`with ctrl_c(after_s=…)`: a signal that raises KeyboardInterrupt after that time.

    Python ignores what is raised in destructors and garbage collector callbacks; so do we.
    """
    original_hook = sys.unraisablehook

    def ignore_interrupts(unraisable):
        if not isinstance(unraisable.exc_value, KeyboardInterrupt):
            original_hook(unraisable)

    def interrupt(*_):
        raise KeyboardInterrupt

    @contextmanager
    def interrupted(*, after_s):
        try:
            signal.setitimer(signal.ITIMER_REAL, after_s)
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    monkeypatch.setattr(sys, "unraisablehook", ignore_interrupts)
    before = signal.signal(signal.SIGALRM, interrupt)
    yield interrupted
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("linger_ms", [0, 2])
def test_an_interrupt_in_send_loses_no_record_and_close_returns(ctrl_c, linger_ms):
    """As in a notebook: a cell is interrupted, and the producer is used again."""
    random, numbers, sent = Random(linger_ms), itertools.count(), {}
    broker = TinyBroker()
    with client(broker) as c:
        producer = c.producer(Batching(linger_ms=linger_ms))
        for _ in range(400):
            with suppress(KeyboardInterrupt), ctrl_c(after_s=random.uniform(30e-6, 300e-6)):
                # Limited, because Python may ignore the interrupt.
                for n in itertools.islice(numbers, 5_000):
                    sent[n] = producer.send("t", f"{n}", partition=0)
            n = next(numbers)
            sent[n] = producer.send("t", f"{n}", partition=0)
            sent[n].result(10)  # sent without a flush
        closing = threading.Thread(target=producer.close, daemon=True)
        closing.start()
        closing.join(10)
        assert not closing.is_alive()
        assert producer._accumulator.buffered_bytes == 0
    arrived = [int(value) for value in broker.logs[0]]
    assert arrived == sorted(set(arrived))
    assert {n: arrived[sent[n].result(0).offset] for n in sent} == {n: n for n in sent}


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


def test_a_cancelled_close_still_sends_everything():
    broker = TinyBroker()

    async def run():
        release = asyncio.Event()

        async def slow(request):
            await release.wait()
            return broker(request)

        transport = httpx.MockTransport(slow)
        async with tierlog.AsyncClient(retries=QUICK, transport=transport) as c:
            producer = c.producer()
            deliveries = [await producer.send("t", f"{n}", partition=0) for n in range(3)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.aclose()
            release.set()
            assert [(await delivery).offset for delivery in deliveries] == [0, 1, 2]
            await asyncio.wait_for(asyncio.shield(producer._task), 10)

    asyncio.run(run())
    assert broker.logs[0] == [b"0", b"1", b"2"]


def test_cancelling_the_producers_task_fails_a_waiting_send():
    async def send() -> None:
        client = tierlog.AsyncClient(transport=httpx.MockTransport(TinyBroker()))
        producer = client.producer(Batching(linger_ms=60_000, buffer_bytes=1000))
        await producer.send("t", "v", partition=0)
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(RuntimeError, match="create a new one"):
            async with asyncio.timeout(10):
                await producer.send("t", b"larger than the free buffer" * 40, partition=0)

    asyncio.run(send())


def test_unawaited_failures_are_not_reported_by_asyncio(caplog):
    # A log record of the failed batch would keep the futures alive.
    caplog.set_level(logging.CRITICAL)
    reports = []

    async def send() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        transport = httpx.MockTransport(TinyBroker(refused(404, "unknown-topic")))
        async with tierlog.AsyncClient(transport=transport) as c, c.producer() as producer:
            for _ in range(3):
                await producer.send("t", "v", partition=0)

    asyncio.run(send())
    gc.collect()
    assert not reports


def test_unsupported_options_are_refused():
    with pytest.raises(errors.InvalidRequest, match="brotli"):
        Batching(compression="brotli")
    with pytest.raises(errors.InvalidRequest, match="acks=0"):
        Batching(acks="0")
    assert Batching().codec == 0


def test_records_lost_with_a_cancelled_producer_are_logged(caplog):
    async def leave_open():
        client = tierlog.AsyncClient(transport=httpx.MockTransport(TinyBroker()))
        producer = client.producer(Batching(linger_ms=60_000))
        return await producer.send("t", b"v", partition=0)

    delivery = asyncio.run(leave_open())
    assert "1 records of a producer were not sent" in caplog.text
    assert delivery.cancelled() or delivery.exception() is not None
