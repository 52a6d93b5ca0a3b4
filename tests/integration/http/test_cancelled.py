"""Cancelled tasks of `tierlog.AsyncClient`, against a real broker."""

import asyncio

import httpx
import pytest

import tierlog
from tests.integration.http.conftest import Api

ONE_CONNECTION = httpx.Limits(max_connections=1)


def test_requests_cancelled_at_any_point_return_their_connection(api: Api) -> None:
    """With a pool of one: httpx's own does not get it back from every cancelled request."""
    topic = api.topic()
    waiting = tierlog.Limits(wait_ms=20)

    async def cancel_repeatedly() -> str:
        transport = httpx.AsyncHTTPTransport(limits=ONE_CONNECTION)
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


class HangingTransport(httpx.AsyncHTTPTransport):
    """Hangs in the first offset commit."""

    hung = is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
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
