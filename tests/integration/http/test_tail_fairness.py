"""Tails far from the log end: other tasks run meanwhile, and the tails end promptly."""

import asyncio
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.waiting import until
from tests.integration.http.conftest import records_path, served
from tierlog.api.http.context import Context
from tierlog.api.http.exchange import Exchange
from tierlog.api.http.fetch import tail
from tierlog.api.http.fetch.tail import tail_partition
from tierlog.api.http.responses import StreamResponse
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.produced import build_produced

PAGES = 20
VALUE = "x" * 40_000  # a page holds one


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
def test_a_tail_of_a_disconnected_client_stops_reading(tmp_path: Path, loop: str) -> None:
    with served(tmp_path, HttpSettings(), loop=loop) as server:
        body = {"records": [{"value": "x" * 500_000}] * 2}
        for _ in range(24):
            assert httpx2.post(server.url + records_path("t"), json=body).status_code == 200
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect(("127.0.0.1", server.port))
            path = "/v1/topics/t/partitions/0/tail?offset=earliest"
            sock.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            assert sock.recv(12) == b"HTTP/1.1 200"

        def metrics() -> str:
            return httpx2.get(f"{server.url}/metrics").text

        until(lambda: "tierlog_http_requests_in_progress 1.0" in metrics())  # this request
        name = 'tierlog_fetched_bytes_total{tier="hot"}'
        fetched = next(line for line in metrics().splitlines() if line.startswith(name))
        assert float(fetched.rpartition(" ")[2]) < 24_000_000


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[Broker]:
    broker = Broker.open(BrokerSettings(data_dir=tmp_path, disk_reserve_bytes=0), store=None)
    broker.create_topic("t")
    for _ in range(PAGES + 2):
        batch = build_produced([b"x" * 40_000], timestamps=[1], max_message_bytes=1 << 20)
        broker.partition("t", 0).append(batch, acks=Acks.ALL).result(10)
    yield broker
    broker.close()


async def never() -> Any:
    await asyncio.Event().wait()


async def tail_from_the_start(context: Context) -> StreamResponse:
    """A tail from offset 0 whose opening comment was read, of a client that never disconnects."""
    exchange = Exchange({"method": "GET", "headers": [], "query_string": b"offset=earliest"})
    exchange.params = {"topic": "t", "partition": "0"}
    exchange.receive = never
    response = await tail_partition(context, exchange)
    assert isinstance(response, StreamResponse)
    await anext(response.parts)
    return response


def test_a_tail_yields_to_other_tasks_between_pages(broker: Broker) -> None:
    async def count_turns() -> int:
        context, loop, turns = Context(broker, HttpSettings()), asyncio.get_running_loop(), 0
        stream = await tail_from_the_start(context)

        def turn() -> None:
            nonlocal turns
            turns += 1
            loop.call_soon(turn)

        loop.call_soon(turn)
        for _ in range(PAGES):
            await anext(stream.parts)
        await stream.parts.aclose()
        context.close()
        return turns

    assert asyncio.run(count_turns()) >= PAGES - 1


def test_a_topics_tail_is_sent_in_small_parts_although_each_id_names_all_partitions(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker.create_topic("wide", partitions=30)
    batch = build_produced([b""] * 100, timestamps=[1] * 100, max_message_bytes=1 << 20)
    broker.partition("wide", 7).append(batch, acks=Acks.ALL).result(10)
    monkeypatch.setattr(tail, "PAGE_BYTES", 1000)

    async def parts_until_the_last_record() -> list[bytes]:
        context, parts = Context(broker, HttpSettings()), []
        exchange = Exchange({"method": "GET", "headers": [], "query_string": b"offset=earliest"})
        exchange.params, exchange.receive = {"topic": "wide"}, never
        response = await tail.tail_topic(context, exchange)
        assert isinstance(response, StreamResponse)
        async for part in response.parts:
            parts.append(part)
            if b'"offset":99' in part:
                break
        await response.parts.aclose()
        context.close()
        return parts

    parts = asyncio.run(parts_until_the_last_record())
    assert max(map(len, parts)) < 2000
    ids = [line for part in parts for line in part.splitlines() if line.startswith(b"id: ")]
    assert ids[0] == b"id: " + b",".join(b"%d:%d" % (n, 0 if n == 7 else -1) for n in range(30))
    assert [int(one.split(b",7:")[1].split(b",")[0]) for one in ids] == list(range(100))


def test_a_topics_tail_that_is_catching_up_includes_added_partitions(broker: Broker) -> None:
    async def parts_before_the_new_partition() -> int:
        context = Context(broker, HttpSettings())
        exchange = Exchange({"method": "GET", "headers": [], "query_string": b"offset=earliest"})
        exchange.params, exchange.receive = {"topic": "t"}, never
        response = await tail.tail_topic(context, exchange)
        assert isinstance(response, StreamResponse)
        for _ in range(2):  # the opening comment and the first page
            await anext(response.parts)
        broker.alter_topic("t", partitions=2)
        batch = build_produced([b""], timestamps=[1], max_message_bytes=1 << 20)
        broker.partition("t", 1).append(batch, acks=Acks.ALL).result(10)
        parts = 0
        while b'"partition":1' not in await anext(response.parts):
            parts += 1
        await response.parts.aclose()
        context.close()
        return parts

    assert asyncio.run(parts_before_the_new_partition()) < PAGES // 2


def test_a_tail_that_is_catching_up_ends_at_shutdown(broker: Broker) -> None:
    async def pages_after_stop() -> int:
        context = Context(broker, HttpSettings())
        stream = await tail_from_the_start(context)
        await anext(stream.parts)
        context.waiting.stop()
        context.close()
        return len([page async for page in stream.parts])

    assert asyncio.run(pages_after_stop()) == 0


def test_a_tail_skips_a_gap_at_the_log_end_and_waits(
    broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    partition = broker.partition("t", 0)
    end = partition.offsets().high_watermark

    async def next_parts() -> list[bytes]:
        context = Context(broker, HttpSettings(heartbeat_ms=50))
        stream = await tail_from_the_start(context)
        async with asyncio.timeout(10):
            parts = [await anext(stream.parts) for _ in range(3)]
        context.close()
        return parts

    nothing = partition.read(0, max_bytes=1)._replace(slices=(), next_offset=end)
    reads: list[int] = []

    def read_nothing(offset: int, **_: Any) -> Fetched:
        reads.append(offset)
        return nothing

    monkeypatch.setattr(partition, "read", read_nothing)
    assert asyncio.run(next_parts()) == [b":\n\n"] * 3, "the heartbeats of a waiting tail"
    assert reads == [0], "a waiting tail does not read"
