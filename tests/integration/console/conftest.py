import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.settings import HttpSettings
from broker.broker import Broker
from cold_tier.open import open_store
from tests.fakes.faulty_object_store import FaultyObjectStore
from tests.fakes.served_broker import served_broker
from tests.integration.console.chromium import Chromium, find_chromium

PHONE, TABLE = 390, 1280


class House(httpx.Client):
    """A broker with a console, and calls to fill it."""

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
        answer = self.post(f"/v1/topics/{topic}/records", json={"records": records})
        assert answer.status_code == 200, answer.text

    def two_tiers(self, name: str) -> str:
        """200 records of 100 bytes, a second apart; the older ones in the bucket alone."""
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
        done = self.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
        assert done.json()["remaining_segments"] == 0, done.text
        self.produce(name, {"key": "newest", "value": "on disk alone"})
        return name

    def set_down(self, down: bool) -> None:
        assert self.store is not None
        if down:
            self.store.go_down()
        else:
            self.store.heal()


@contextmanager
def open_house(root: Path, *, bucket: bool = True, tokens: Path | None = None) -> Iterator[House]:
    store = FaultyObjectStore(open_store(f"file://{root / 'bucket'}")) if bucket else None
    http = HttpSettings(console_sample_ms=100, tokens_file=tokens)
    with (
        served_broker(root / "data", store=store, http=http, cache_bytes=64 << 20) as one,
        House(base_url=one.server.url, timeout=30) as house,
    ):
        house.broker, house.store, house.url = one.broker, store, one.server.url
        yield house


@pytest.fixture(scope="module")
def house(tmp_path_factory: pytest.TempPathFactory) -> Iterator[House]:
    with open_house(tmp_path_factory.mktemp("house")) as house:
        yield house


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    program = find_chromium()
    if program is None:
        pytest.skip("there is no chromium on this machine")
    with Chromium(program, tmp_path_factory.mktemp("chromium")) as browser:
        yield browser


@pytest.fixture
def browser(chromium: Chromium) -> Iterator[Chromium]:
    """Whatever a test does, the page logs nothing, no script fails and no policy is broken."""
    chromium.look(width=TABLE)
    chromium.open("about:blank")
    chromium.expected.clear()
    yield chromium
    found = [one for one in chromium.complaints if not any(e in one for e in chromium.expected)]
    assert found == []
