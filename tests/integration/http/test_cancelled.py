"""Tasks of `tierlog.AsyncClient` that are cancelled, against a real broker."""

import asyncio

import httpx
import pytest

import tierlog
from tests.integration.http.conftest import Api

ONE = httpx.Limits(max_connections=1)


def test_requests_that_are_cancelled_at_any_moment_keep_no_connection(api: Api) -> None:
    """Out of one: httpx's pool does not get it back from every request that is cancelled."""
    topic = api.topic()
    waiting = tierlog.Limits(wait_ms=20)

    async def ask() -> str:
        one = httpx.AsyncHTTPTransport(limits=ONE)
        async with tierlog.AsyncClient(str(api.base_url), timeout_s=5, transport=one) as client:
            for turns in range(100):
                asked = [
                    asyncio.create_task(client.describe_topic(topic)),
                    asyncio.create_task(client.fetch(topic, 0, offset=0, limits=waiting)),
                    asyncio.create_task(client.describe_topic(topic)),
                ]
                for _ in range(turns):
                    await asyncio.sleep(0)
                for task in asked:
                    task.cancel()
                await asyncio.gather(*asked, return_exceptions=True)
            return (await client.describe_topic(topic)).name

    assert asyncio.run(ask()) == topic


class Hangs(httpx.AsyncHTTPTransport):
    """At the first commit."""

    hung = is_closed = False

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "PUT" and not self.hung:
            self.hung = True
            await asyncio.Event().wait()
        return await super().handle_async_request(request)

    async def aclose(self) -> None:
        self.is_closed = True
        await super().aclose()


def test_closing_a_client_is_cut_short_and_still_closes_its_connections(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a", "b")

    async def leave() -> bool:
        transport = Hangs()
        client = tierlog.AsyncClient(str(api.base_url), transport=transport)
        reading = client.consume(topic, group="hurried")
        assert [(await anext(reading)).offset for _ in range(2)] == [0, 1]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await client.aclose()
        await reading.aclose()
        return transport.is_closed

    assert asyncio.run(leave())
