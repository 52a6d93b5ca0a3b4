import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.faulty_object_store import FaultyObjectStore
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium, find_chromium
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.object_store.open import open_store

PHONE, TABLE = 390, 1280


class Console(httpx2.Client):
    """A client of a broker with a console, and calls to fill it."""

    broker: Broker
    store: FaultyObjectStore | None
    url: str
    _names = itertools.count()

    def topic(self, name: str, partitions: int = 1, **config: Any) -> str:
        wanted = {key.replace("_", "."): value for key, value in config.items()}
        body = {"name": name, "partitions": partitions, "config": wanted}
        assert self.post("/v1/topics", json=body).status_code == 201
        return name

    def produce(self, topic: str, *records: Any) -> None:
        response = self.post(f"/v1/topics/{topic}/records", json={"records": records})
        assert response.status_code == 200, response.text

    def two_tiers(self, name: str) -> str:
        """200 records of 100 bytes, a second apart; the older ones only in the bucket."""
        self.topic(name, segment_bytes=2048, local_retention_bytes=6000, retention_ms=-1)
        for start in range(0, 200, 20):
            self.produce(
                name,
                *(
                    {
                        "key": f"key {n}",
                        "value": {"n": n, "pad": "x" * 60},
                        "timestamp": 1_372_900_000_000 + n * 1000,
                        "headers": [{"name": "source", "value": f"tower {n}"}],
                    }
                    for n in range(start, start + 20)
                ),
            )
        result = self.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
        assert result.json()["remaining_segments"] == 0, result.text
        self.produce(name, {"key": "newest", "value": "only on disk"})
        return name

    def claimed(self, topic: str) -> str:
        """Wait until every partition has a manifest."""
        partitions = self.broker.topic(topic).all_partitions()
        until(lambda: all(one.manifest is not None for one in partitions))
        return topic

    def set_down(self, down: bool) -> None:
        assert self.store is not None
        if down:
            self.store.go_down()
        else:
            self.store.heal()


@contextmanager
def open_console(
    root: Path,
    *,
    bucket: bool = True,
    tokens: Path | None = None,
    http: HttpSettings | None = None,
) -> Iterator[Console]:
    store = FaultyObjectStore(open_store(f"file://{root / 'bucket'}")) if bucket else None
    http = replace(http or HttpSettings(), console_sample_ms=100, tokens_file=tokens)
    with (
        served_broker(root / "data", store=store, http=http, cache_bytes=64 << 20) as served,
        Console(base_url=served.server.url, timeout=30) as console,
    ):
        console.broker, console.store, console.url = served.broker, store, served.server.url
        yield console


@pytest.fixture(scope="module")
def console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    with open_console(tmp_path_factory.mktemp("console")) as console:
        yield console


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("needs chromium")
    with Chromium(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    """Fails the test if the page logs anything, a script fails or a policy is violated."""
    chromium.emulate(width=TABLE)
    chromium.open("about:blank")
    chromium.expected.clear()
    yield chromium
    unexpected = [
        complaint
        for complaint in chromium.complaints
        if not any(part in complaint for part in chromium.expected)
    ]
    assert unexpected == []


def enter_token(browser: Chromium, token: str) -> None:
    browser.until("document.querySelector('#ask-token')?.open")
    browser.until("document.activeElement.name === 'token'")
    browser.type(token)
    browser.press("Enter")
