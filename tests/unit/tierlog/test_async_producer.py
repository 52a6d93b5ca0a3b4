"""AsyncProducer: as the other, and what only concerns tasks: turns, cancelling, closing."""

import asyncio
import gc
import itertools
import logging
from contextlib import suppress

import httpx2
import pytest

import tierlog
from tests.fakes.tiny_broker import QUICK, TinyBroker, description, refused
from tierlog.client.async_producer import AsyncProducer
from tierlog.client.batching import Batching
from tierlog.record_format import errors


def test_the_asynchronous_producer_behaves_the_same():
    broker = TinyBroker("lost")

    async def send() -> list[int]:
        transport = httpx2.MockTransport(broker)
        async with (
            tierlog.AsyncClient(retries=QUICK, transport=transport) as c,
            c.producer(Batching(batch_bytes=300, compression="zstd")) as producer,
        ):
            futures = [await producer.send("t", f"v{n}", partition=0) for n in range(30)]
            await producer.flush()
            return [(await future).offset for future in futures]

    assert asyncio.run(send()) == list(range(30))
    assert broker.logs[0] == [b"v%d" % n for n in range(30)]


@pytest.mark.parametrize("max_in_flight", [1, 2])
def test_asynchronous_batches_are_in_flight_together_if_allowed(max_in_flight):
    broker, in_flight, most, together = TinyBroker(), [], [], asyncio.Event()

    async def slow(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/records"):
            partition = request.url.path.split("/")[5]
            in_flight.append(partition)
            assert len(set(in_flight)) == len(in_flight), "else records could change their order"
            most.append(len(in_flight))
            if len(in_flight) == max_in_flight:
                together.set()
            await asyncio.wait_for(together.wait(), 10)
            in_flight.remove(partition)
        return broker(request)

    async def send() -> list[int]:
        transport = httpx2.MockTransport(slow)
        async with (
            tierlog.AsyncClient(retries=QUICK, transport=transport) as c,
            c.producer(Batching(max_in_flight=max_in_flight)) as producer,
        ):
            sent = [await producer.send("t", f"{n}", partition=n % 2) for n in range(40)]
            await producer.flush()
            return [(await future).offset for future in sent]

    assert asyncio.run(send()) == [n // 2 for n in range(40)]
    assert max(most) == max_in_flight


def test_a_producer_survives_a_connection_closed_at_once_under_uvloop():
    """Where a broker stops. anyio then asks a socket that is None for its peer."""
    broker, closed = TinyBroker(), iter([None])

    def respond(request: httpx2.Request) -> httpx2.Response:
        if request.url.path.endswith("/records"):
            for socket in closed:
                socket.getpeername()
        return broker(request)

    async def send() -> int:
        transport = httpx2.MockTransport(respond)
        async with (
            tierlog.AsyncClient(retries=QUICK, transport=transport) as c,
            c.producer() as producer,
        ):
            return (await (await producer.send("t", "v", partition=0))).offset

    assert asyncio.run(send()) == 0


def test_a_sending_loop_yields_to_other_tasks():
    broker = TinyBroker()

    async def send() -> int:
        transport = httpx2.MockTransport(broker)
        async with (
            tierlog.AsyncClient(transport=transport) as client,
            client.producer(Batching(linger_ms=0, buffer_bytes=1 << 40)) as producer,
        ):
            for _ in range(20_000):
                await producer.send("t", b"x", partition=0)
            return len(broker.logs[0])

    assert asyncio.run(send()) > 0, "batches were sent during the loop"
    assert len(broker.logs[0]) == 20_000


@pytest.mark.parametrize("batching", [Batching(), Batching(batch_bytes=500, buffer_bytes=9_000)])
@pytest.mark.parametrize("partition", [0, None])
def test_concurrent_sends_keep_their_order(batching, partition):
    values = [b"v%d" % n for n in range(300)]

    class OnePartition(TinyBroker):
        described = 0

        def __call__(self, request: httpx2.Request) -> httpx2.Response:
            if request.method != "GET":
                return super().__call__(request)
            self.described += 1
            return httpx2.Response(200, json=description(0))

    async def send() -> None:
        async with (
            tierlog.AsyncClient(transport=httpx2.MockTransport(broker)) as c,
            AsyncProducer(c, batching, clock=lambda: next(calls) // 10) as producer,
        ):
            await asyncio.gather(*(producer.send("t", v, partition=partition) for v in values))

    broker, calls = OnePartition(), itertools.count()
    asyncio.run(send())
    assert broker.logs[0] == values
    assert broker.described == (partition is None)


def test_concurrent_sends_share_the_error_of_an_unknown_topic():
    described = []

    async def respond(request: httpx2.Request) -> httpx2.Response:
        described.append(request)
        await asyncio.sleep(0)
        return refused(404, "unknown-topic")

    async def send() -> list[object]:
        async with (
            tierlog.AsyncClient(transport=httpx2.MockTransport(respond)) as c,
            c.producer() as producer,
        ):
            together = [producer.send("t", "v") for _ in range(50)]
            failed = await asyncio.gather(*together, return_exceptions=True)
            with pytest.raises(errors.UnknownTopic):
                await producer.send("t", "v")
            return failed

    assert {type(one) for one in asyncio.run(send())} == {errors.UnknownTopic}
    assert len(described) == 2, "once for those that were sent together, and again later"


def test_a_cancelled_future_does_not_affect_its_batch():
    broker = TinyBroker()

    async def send() -> int:
        transport = httpx2.MockTransport(broker)
        async with tierlog.AsyncClient(transport=transport) as c, c.producer() as producer:
            dropped = await producer.send("t", "dropped", partition=0)
            kept = await producer.send("t", "kept", partition=0)
            dropped.cancel()
            return (await kept).offset

    assert asyncio.run(send()) == 1
    assert broker.logs[0] == [b"dropped", b"kept"]


@pytest.mark.parametrize("end", [AsyncProducer.flush, AsyncProducer.aclose])
def test_asynchronous_flush_and_aclose_return_while_others_send(end):
    broker = TinyBroker()

    async def send() -> None:
        async def busy(request: httpx2.Request) -> httpx2.Response:
            if not ended.is_set():
                with suppress(RuntimeError):  # closed
                    sent.append(await producer.send("t", f"{len(sent)}", partition=0))
            return broker(request)

        ended, sent = asyncio.Event(), []
        async with tierlog.AsyncClient(transport=httpx2.MockTransport(busy)) as c:
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


def test_closing_the_asynchronous_client_fails_waiting_records():
    async def send() -> list[BaseException | None]:
        c = tierlog.AsyncClient(retries=QUICK, transport=httpx2.MockTransport(TinyBroker()))
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


def test_a_cancelled_close_still_sends_everything():
    broker = TinyBroker()

    async def run():
        release = asyncio.Event()

        async def slow(request):
            await release.wait()
            return broker(request)

        transport = httpx2.MockTransport(slow)
        async with tierlog.AsyncClient(retries=QUICK, transport=transport) as c:
            producer = c.producer()
            deliveries = [await producer.send("t", f"{n}", partition=0) for n in range(3)]
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await producer.aclose()
            release.set()
            assert [(await delivery).offset for delivery in deliveries] == [0, 1, 2]
            await asyncio.wait_for(asyncio.gather(*producer._tasks), 10)

    asyncio.run(run())
    assert broker.logs[0] == [b"0", b"1", b"2"]


def test_cancelling_the_producers_task_fails_a_waiting_send():
    async def send() -> None:
        client = tierlog.AsyncClient(transport=httpx2.MockTransport(TinyBroker()))
        producer = client.producer(Batching(linger_ms=60_000, buffer_bytes=1000))
        await producer.send("t", "v", partition=0)
        (task,) = asyncio.all_tasks() - {asyncio.current_task()}
        asyncio.get_running_loop().call_soon(task.cancel)
        with pytest.raises(RuntimeError, match="create a new one"):
            async with asyncio.timeout(10):
                await producer.send("t", b"larger than the free buffer" * 40, partition=0)

    asyncio.run(send())


def test_a_task_that_is_cancelled_before_it_begins_fails_its_records():
    async def send() -> None:
        client = tierlog.AsyncClient(transport=httpx2.MockTransport(TinyBroker()))
        producer = AsyncProducer(client, clock=lambda: 0)  # `send` does not yield
        delivery = await producer.send("t", "v", partition=0)
        (task,) = producer._tasks
        task.cancel()
        async with asyncio.timeout(10):
            await producer.flush()
        with pytest.raises(asyncio.CancelledError):
            delivery.result()

    asyncio.run(send())


def test_unawaited_failures_are_not_reported_by_asyncio(caplog):
    # A log record of the failed batch would keep the futures alive.
    caplog.set_level(logging.CRITICAL)
    reports = []

    async def send() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: reports.append(context))
        transport = httpx2.MockTransport(TinyBroker(refused(404, "unknown-topic")))
        async with tierlog.AsyncClient(transport=transport) as c, c.producer() as producer:
            for _ in range(3):
                await producer.send("t", "v", partition=0)

    asyncio.run(send())
    gc.collect()
    assert not reports


def test_records_lost_with_a_cancelled_producer_are_logged(caplog):
    async def leave_open():
        client = tierlog.AsyncClient(transport=httpx2.MockTransport(TinyBroker()))
        producer = client.producer(Batching(linger_ms=60_000))
        return await producer.send("t", b"v", partition=0)

    delivery = asyncio.run(leave_open())
    assert "1 records of a producer were not sent" in caplog.text
    assert delivery.cancelled() or delivery.exception() is not None
