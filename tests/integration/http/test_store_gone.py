"""A store that goes away under a running broker is told by /readyz, and so is its coming back."""

import time
from pathlib import Path

import httpx
import pytest

from api.http.app import create_app
from api.http.server import RunningServer
from broker import bucket
from broker.broker import Broker
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from tests.integration.http.conftest import LIMITS


def test_readyz_stays_200_and_lists_a_store_that_went_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(bucket, "LOOK_AGAIN_S", 0.1)
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
