"""A store that fails or hangs under a running broker."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tests.integration.http.conftest import Api, records_path
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.broker.bucket import store_status
from tierlog.object_store.open import open_store


def test_readyz_stays_200_and_lists_an_unavailable_store(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_status, "POLL_S", 0.02)
    monkeypatch.setattr(store_status, "RETRY_S", 0.02)
    root = tmp_path / "store"
    with served_broker(tmp_path / "data", store=open_store(f"file://{root}")) as one:

        def degraded() -> list[str]:
            response = httpx2.get(f"{one.server.url}/readyz")
            assert response.status_code == 200
            reasons: list[str] = response.json()["degraded"]
            return reasons

        assert degraded() == []
        root.rename(tmp_path / "away")
        until(degraded)
        assert degraded()[0].startswith("store unavailable: ")
        assert "\ntierlog_degraded 1.0\n" in httpx2.get(f"{one.server.url}/metrics").text
        (tmp_path / "away").rename(root)
        until(lambda: degraded() == [])


def test_a_store_is_checked_soon_after_a_failed_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_status, "POLL_S", 3600.0)
    monkeypatch.setattr(store_status, "RETRY_S", 0.02)
    root = tmp_path / "store"
    with (
        served_broker(tmp_path / "data", store=open_store(f"file://{root}")) as one,
        Api(base_url=one.server.url, timeout=30) as api,
    ):
        version = f"/v1/topics/{api.cold_topic()}/partitions/0/manifest?version=1"
        root.rename(tmp_path / "away")
        assert api.get(version).status_code == 503
        until(lambda: api.get("/readyz").json()["degraded"])


class BlockedCall:
    """A store call that blocks until it is released."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.called, self.released, self._call = threading.Event(), threading.Event(), call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.called.set()
        self.released.wait(20)
        return self._call(*args, **kwargs)


@contextmanager
def served_with_one_thread(
    tmp_path: Path, name: str
) -> Iterator[tuple[Broker, Api, Callable[[], BlockedCall]]]:
    """A broker with one thread per pool; the last item yielded blocks the store's `name`."""
    store = open_store(f"file://{tmp_path / 'store'}")
    call = BlockedCall(getattr(store, name))

    def block() -> BlockedCall:
        setattr(store, name, call)
        return call

    http = HttpSettings(read_threads=1, write_threads=1)
    with (
        served_broker(tmp_path / "data", store=store, http=http) as one,
        Api(base_url=one.server.url, timeout=30) as api,
    ):
        try:
            yield one.broker, api, block
        finally:
            call.released.set()


def test_reads_from_a_hanging_store_block_nothing_else(tmp_path: Path) -> None:
    with (
        served_with_one_thread(tmp_path, "get_range") as (broker, api, block),
        ThreadPoolExecutor(1) as pool,
    ):
        topic = api.cold_topic()
        blocked = block()
        reading = pool.submit(api.get, records_path(topic))
        assert blocked.called.wait(10)
        assert api.get("/metrics").status_code == 200
        end = broker.partition(topic, 0).offsets().local_log_start_offset
        assert api.get(f"/v1/topics/{topic}/partitions/0/segments/{end}").status_code == 200
        assert not reading.done()
        blocked.released.set()
        assert reading.result().status_code == 200


def test_writes_to_a_hanging_store_block_nothing_else(tmp_path: Path) -> None:
    with (
        served_with_one_thread(tmp_path, "put_file") as (_, api, block),
        ThreadPoolExecutor(1) as pool,
    ):
        blocked = block()
        topic = api.topic()
        api.values(topic, "one")
        waiting = pool.submit(api.post, f"/v1/topics/{topic}/offload?wait_ms=20000")
        assert blocked.called.wait(10)
        commit = {"offsets": [{"topic": topic, "partition": 0, "offset": 1}]}
        assert api.put("/v1/groups/g/offsets", json=commit).status_code == 204
        assert api.delete(f"/v1/topics/{api.topic()}").status_code == 204
        assert not waiting.done()
        blocked.released.set()
        assert waiting.result().json()["remaining_segments"] == 0
