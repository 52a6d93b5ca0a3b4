"""A store that goes away under a running broker is told by /readyz, and so is its coming back."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from api.http.app import create_app
from api.http.server import RunningServer
from api.http.settings import HttpSettings
from broker import store_standing
from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from tests.integration.http.conftest import LIMITS, Api, records_path


def test_readyz_stays_200_and_lists_a_store_that_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_standing, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(store_standing, "LOOK_AGAIN_S", 0.1)
    root = tmp_path / "store"
    settings = BrokerSettings(data_dir=tmp_path / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open(settings, store=open_store(f"file://{root}"))
    try:
        with RunningServer(create_app(broker, LIMITS), LIMITS) as server:
            assert degraded_becomes(server.url, wanted=False) == []
            root.rename(tmp_path / "away")
            (told,) = degraded_becomes(server.url, wanted=True)
            assert told.startswith("store unavailable: ")
            (tmp_path / "away").rename(root)
            assert degraded_becomes(server.url, wanted=False) == []
    finally:
        broker.close()


def degraded_becomes(url: str, *, wanted: bool) -> list[str]:
    degraded: list[str] = []
    for _ in range(100):
        answer = httpx.get(f"{url}/readyz")
        assert answer.status_code == 200
        degraded = answer.json()["degraded"]
        if bool(degraded) == wanted:
            break
        time.sleep(0.1)
    return degraded


def test_what_waits_for_a_store_that_hangs_stands_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one thread of each kind, and what waits for the store has it."""
    store = open_store(f"file://{tmp_path / 'store'}")
    asked, answers = threading.Event(), threading.Event()
    get_range = store.get_range

    def hangs(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        answers.wait(20)
        return get_range(*args, **kwargs)

    http = HttpSettings(read_threads=1)
    settings = BrokerSettings(data_dir=tmp_path / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open(settings, store=store)
    try:
        with (
            RunningServer(create_app(broker, http), http) as server,
            Api(base_url=server.url, timeout=10) as api,
            ThreadPoolExecutor(1) as pool,
        ):
            topic = api.cold_topic()
            monkeypatch.setattr(store, "get_range", hangs)
            reading = pool.submit(httpx.get, server.url + records_path(topic), timeout=30)
            assert asked.wait(10)
            assert api.get("/metrics").status_code == 200
            end = broker.partition(topic, 0).offsets().local_log_start_offset
            assert api.get(f"/v1/topics/{topic}/partitions/0/segments/{end}").status_code == 200
            assert not answers.is_set()
            answers.set()
            assert reading.result().status_code == 200
    finally:
        answers.set()
        broker.close()


def test_what_writes_to_a_store_that_hangs_stands_in_nobodys_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is one thread of each kind, and who waits for an upload has it."""
    store = open_store(f"file://{tmp_path / 'store'}")
    asked, answers = threading.Event(), threading.Event()
    put_file = store.put_file

    def hangs(*args: Any, **kwargs: Any) -> Any:
        asked.set()
        answers.wait(20)
        return put_file(*args, **kwargs)

    monkeypatch.setattr(store, "put_file", hangs)
    http = HttpSettings(change_threads=1)
    settings = BrokerSettings(data_dir=tmp_path / "data", cache_bytes=1 << 20, disk_reserve_bytes=0)
    broker = Broker.open(settings, store=store)
    try:
        with (
            RunningServer(create_app(broker, http), http) as server,
            Api(base_url=server.url, timeout=10) as api,
            ThreadPoolExecutor(1) as pool,
        ):
            topic = api.topic()
            api.values(topic, "one")
            offload = f"{server.url}/v1/topics/{topic}/offload?wait_ms=20000"
            waiting = pool.submit(httpx.post, offload, timeout=30)
            assert asked.wait(10)
            commit = {"offsets": [{"topic": topic, "partition": 0, "offset": 1}]}
            assert api.put("/v1/groups/g/offsets", json=commit).status_code == 204
            assert api.delete(f"/v1/topics/{api.topic()}").status_code == 204
            assert not waiting.done()
            answers.set()
            assert waiting.result().json()["remaining_segments"] == 0
    finally:
        answers.set()
        broker.close()
