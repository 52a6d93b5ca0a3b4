"""Producer: what `send` takes, the buffer, the futures and their callbacks."""

import asyncio
import math
import threading
import time
from functools import partial

import httpx2
import pytest

import tierlog
from tests.fakes.tiny_broker import QUICK, TinyBroker, client, refused
from tierlog.client import producer as producers
from tierlog.client.batching import RECORD_OVERHEAD_BYTES, Batching
from tierlog.client.producer import Producer
from tierlog.record_format import errors


def test_records_arrive_in_order_and_futures_have_their_offsets():
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(batch_bytes=400)) as producer:
        futures = [producer.send("t", f"v{n}", partition=1) for n in range(100)]
    assert broker.logs[1] == [b"v%d" % n for n in range(100)]
    assert [f.result(0).offset for f in futures] == list(range(100))
    assert len(broker.seen) > 2


def test_a_full_buffer_blocks_send_until_its_timeout():
    release = threading.Event()
    broker = TinyBroker()

    def slow(request: httpx2.Request) -> httpx2.Response:
        if request.method == "POST" and request.url.path.endswith("/records"):
            release.wait(10)
        return broker(request)

    with tierlog.Client(retries=QUICK, transport=httpx2.MockTransport(slow)) as c:
        producer = tierlog.Producer(
            c, Batching(linger_ms=0, buffer_bytes=20 * RECORD_OVERHEAD_BYTES), room_timeout_s=0.05
        )
        fill = (producer.send("t", b"x" * 100, partition=0) for _ in range(100))
        with pytest.raises(errors.Throttled):
            list(fill)
        release.set()
        producer.close()
    assert 15 <= len(broker.logs[0]) <= 20


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


def test_a_clock_set_back_does_not_delay_records(monkeypatch):
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(linger_ms=1)) as producer:
        sent = []
        for at in (10**12, 10**12 - 3_600_000):
            monkeypatch.setattr(time, "time_ns", lambda at=at: at * 1_000_000)
            sent.append(producer.send("t", "v", partition=0))
        assert sent[1].result(10).offset == 1


@pytest.mark.parametrize("linger_ms", [2**63 - 1, math.inf])
def test_a_producer_may_linger_until_it_is_flushed(monkeypatch, linger_ms):
    broker, waiting, wait = TinyBroker(), threading.Event(), threading.Condition.wait

    def wait_as_told(condition, timeout=None):
        if timeout is not None:
            waiting.set()
        return wait(condition, timeout)

    with client(broker) as c, c.producer(Batching(linger_ms=linger_ms)) as producer:
        monkeypatch.setattr(producer._condition, "wait", partial(wait_as_told, producer._condition))
        sent = producer.send("t", "v", partition=0)
        assert waiting.wait(10)
        assert producer.flush(10)
        assert sent.result(0).offset == 0


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


def test_giving_up_on_one_record_does_not_affect_others():
    broker = TinyBroker()
    with client(broker) as c, c.producer(Batching(linger_ms=60_000)) as producer:
        first, second = (producer.send("t", value, partition=0) for value in "ab")
        assert not first.cancel()
        producer.flush()
        assert [first.result(0).offset, second.result(0).offset] == [0, 1]

    async def send() -> list[int]:
        c = tierlog.AsyncClient(transport=httpx2.MockTransport(TinyBroker()))
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


def test_unsupported_options_are_refused():
    with pytest.raises(errors.InvalidRequest, match="brotli"):
        Batching(compression="brotli")
    with pytest.raises(errors.InvalidRequest, match="acks=0"):
        Batching(acks="0")
    with pytest.raises(errors.InvalidRequest, match="max_in_flight"):
        Batching(max_in_flight=0)
    assert Batching().codec == 0


@pytest.mark.parametrize("batching", [Batching(), Batching(max_in_flight=2)])
def test_batches_of_different_partitions_are_in_flight_together_if_allowed(batching):
    broker, in_flight, most = TinyBroker(), set(), []
    together = threading.Event()

    def slow(request: httpx2.Request) -> httpx2.Response:
        if not request.url.path.endswith("/records"):
            return broker(request)
        partition = request.url.path.split("/")[5]
        assert partition not in in_flight, "else records could change their order"
        in_flight.add(partition)
        most.append(len(in_flight))
        if len(in_flight) == batching.max_in_flight:
            together.set()
        assert together.wait(10)
        in_flight.remove(partition)
        return broker(request)

    with client(slow) as c, c.producer(batching) as producer:
        sent = [producer.send("t", f"{n}", partition=n % 2) for n in range(40)]
        producer.flush()
        sent += [producer.send("t", f"{n}", partition=n % 2) for n in range(40, 80)]
    assert max(most) == batching.max_in_flight
    for partition in (0, 1):
        mine = range(partition, 80, 2)
        assert broker.logs[partition] == [b"%d" % n for n in mine]
        assert [sent[n].result(0).offset for n in mine] == list(range(40))
