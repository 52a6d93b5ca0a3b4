import itertools
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.faulty_object_store import FaultyObjectStore
from tests.fakes.openapi_document import OpenApiDocument
from tests.fakes.served_broker import RunningServer, served_broker
from tests.fakes.waiting import until
from tierlog.api.http.server import Tls
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.open import open_store

BATCHES = "application/vnd.apache.kafka.recordbatch.v2"
NDJSON = "application/x-ndjson"

LIMITS = HttpSettings(body_max_bytes=4 << 20, expanded_max_bytes=8 << 20, records_max=50_000)


class Api(httpx2.Client):
    """A client of a real broker on real files."""

    broker: Broker
    store: FaultyObjectStore
    port: int
    document: OpenApiDocument | None = None
    _names = itertools.count()

    def request(self, *args: Any, **kwargs: Any) -> httpx2.Response:
        response = super().request(*args, **kwargs)
        if self.document is not None:
            self.document.check(response)
        return response

    def topic(self, partitions: int = 1, **config: Any) -> str:
        name = f"topic-{next(self._names)}"
        wanted = {key.replace("_", "."): value for key, value in config.items()}
        body = {"name": name, "partitions": partitions, "config": wanted}
        assert self.post("/v1/topics", json=body).status_code == 201
        return name

    def produce(self, topic: str, *records: Any, **params: Any) -> httpx2.Response:
        return self.post(f"/v1/topics/{topic}/records", json={"records": records}, params=params)

    def values(self, topic: str, *values: Any, partition: int = 0) -> Any:
        body = {"records": [{"value": value} for value in values]}
        response = self.post(records_path(topic, partition), json=body)
        assert response.status_code == 200, response.text
        return response.json()["results"][0]

    def fetch(
        self, topic: str, partition: int = 0, *, accept: str = "application/json", **params: Any
    ) -> httpx2.Response:
        return self.get(records_path(topic, partition), params=params, headers={"accept": accept})

    def cold_topic(self, values: int = 200) -> str:
        """A topic of which only the active segment is on local disk."""
        name = self.topic(segment_bytes=2048, local_retention_ms=0, retention_ms=-1)
        for value in range(values):
            if value % 20 == 0:
                batch = [{"value": f"{n:060}"} for n in range(value, value + 20)]
                assert self.produce(name, *batch).status_code == 200
        done = self.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
        assert done.json()["remaining_segments"] == 0, done.text
        return name


def records_path(topic: str, partition: int = 0) -> str:
    return f"/v1/topics/{topic}/partitions/{partition}/records"


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_of(tmp_path_factory.mktemp("broker"), loop="uvloop") as client:
        yield client


@contextmanager
def api_of(
    root: Path, *, loop: str = "auto", cache_bytes: int = 64 << 20, chunk_bytes: int = 8 << 20
) -> Iterator[Api]:
    store = FaultyObjectStore(open_store(f"file://{root / 'bucket'}"))
    cache = {"cache_bytes": cache_bytes, "cache_chunk_bytes": chunk_bytes}
    with (
        served_broker(root / "data", store=store, http=LIMITS, loop=loop, **cache) as served,
        Api(base_url=served.server.url, timeout=30) as client,
    ):
        client.broker, client.store, client.port = served.broker, store, served.server.port
        client.document = OpenApiDocument(client.get("/openapi.json").json())
        yield client


@contextmanager
def served(
    root: Path, settings: HttpSettings, *, loop: str = "auto", tls: Tls | None = None
) -> Iterator[RunningServer]:
    with served_broker(root / "data", http=settings, loop=loop, tls=tls) as served:
        served.broker.create_topic("t")
        yield served.server


def take_over(api: Api, topic: str, root: Path) -> None:
    """Another broker, on a copy of the data folder, claims the topic in the bucket."""
    api.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
    shutil.copytree(root / "data", root / "copy")
    copy = Broker.open(
        BrokerSettings(data_dir=root / "copy", disk_reserve_bytes=0), store=api.store
    )
    until(lambda: copy.partition(topic, 0).is_claimed)
    copy.close()
    api.broker.background.fence_checker.run_round()


@pytest.fixture
def store_down(api: Api) -> Iterator[None]:
    api.store.go_down()
    yield
    api.store.heal()


def problem(response: httpx2.Response, status: int, code: str) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert response.headers["x-request-id"]
    document: dict[str, Any] = response.json()
    assert document["code"] == code, document
    assert document["status"] == status
    assert document["type"] == f"urn:tierlog:problem:{code}"
    assert document["title"]
    assert document["detail"]
    return document


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"
