"""Cancelled tasks of `tierlog.AsyncClient`, against a real broker."""

import asyncio

import httpx2
import pytest

import tierlog
from tests.integration.http.conftest import Api
from tierlog.client.exchange import NO_RETRIES

ONE_CONNECTION = httpx2.Limits(max_connections=1)


def test_requests_cancelled_at_any_point_return_their_connection(api: Api) -> None:
    """With a pool of one: one that is lost is missed by every request after it."""
    topic = api.topic()
    waiting = tierlog.Limits(wait_ms=20)

    async def cancel_repeatedly() -> str:
        transport = httpx2.AsyncHTTPTransport(limits=ONE_CONNECTION)
        async with tierlog.AsyncClient(
            str(api.base_url), timeout_s=5, transport=transport
        ) as client:
            for turns in range(100):
                tasks = [
                    asyncio.create_task(client.describe_topic(topic)),
                    asyncio.create_task(client.fetch(topic, 0, offset=0, limits=waiting)),
                    asyncio.create_task(client.describe_topic(topic)),
                ]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            return (await client.describe_topic(topic)).name

    assert asyncio.run(cancel_repeatedly()) == topic


def test_requests_wait_for_a_connection_for_longer_than_for_a_response(api: Api) -> None:
    topic, waiting = api.topic(), tierlog.Limits(wait_ms=300)

    async def fetch_in_turn() -> list[int]:
        transport = httpx2.AsyncHTTPTransport(limits=ONE_CONNECTION)
        async with tierlog.AsyncClient(
            str(api.base_url), timeout_s=1, retries=NO_RETRIES, transport=transport
        ) as client:
            fetches = [client.fetch(topic, 0, offset=0, limits=waiting) for _ in range(5)]
            return [fetched.next_offset for fetched in await asyncio.gather(*fetches)]

    assert asyncio.run(fetch_in_turn()) == [0] * 5


class HangingTransport(httpx2.AsyncHTTPTransport):
    """Hangs in the first offset commit."""

    hung = is_closed = False

    async def handle_async_request(self, request: httpx2.Request) -> httpx2.Response:
        if request.method == "PUT" and not self.hung:
            self.hung = True
            await asyncio.Event().wait()
        return await super().handle_async_request(request)

    async def aclose(self) -> None:
        self.is_closed = True
        await super().aclose()


def test_a_cancelled_close_still_closes_the_connections(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a", "b")

    async def close_with_timeout() -> bool:
        transport = HangingTransport()
        client = tierlog.AsyncClient(str(api.base_url), transport=transport)
        reading = client.consume(topic, group="g")
        assert [(await anext(reading)).offset for _ in range(2)] == [0, 1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.aclose()
        await reading.aclose()
        return transport.is_closed

    assert asyncio.run(close_with_timeout())
