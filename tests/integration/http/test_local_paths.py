"""Corruption is reported to clients without the place of the data folder on the broker's disk."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.damage import flip
from tests.integration.http.conftest import Api, api_of, records_path
from tierlog.broker.data_folder.data_folder import CLEAN_SHUTDOWN

LOG = "00000000000000000000.log"
PLACE = "unsaid"  # no word of a console page


@pytest.fixture(params=[PLACE, f"a {PLACE} place", f"{PLACE} (v1)/~x"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    folder: Path = tmp_path / request.param
    folder.mkdir(parents=True)
    return folder


@pytest.fixture
def damaged(root: Path) -> Iterator[Api]:
    """Topic t has a damaged partition; topic rotten has an open one, with a segment whose bytes
    changed after the start.
    """
    with api_of(root) as api:
        api.post("/v1/topics", json={"name": "t"})
        api.values("t", 1)
    (root / "data" / CLEAN_SHUTDOWN).unlink()
    flip(root / "data" / "t-0" / LOG, -1)
    with api_of(root) as api:
        config = {"segment.bytes": 1024, "remote.storage.enable": False}
        api.post("/v1/topics", json={"name": "rotten", "config": config})
        for _ in range(3):
            api.values("rotten", "x" * 900)
        flip(root / "data" / "rotten-0" / LOG, -1)
        yield api


REQUESTS = [
    ("GET", "/readyz", "t"),
    ("GET", "/v1/topics/t", "t"),
    ("GET", records_path("t"), "t"),
    ("POST", "/v1/topics/t/verify", "t"),
    ("GET", "/console/overview", "t"),
    ("GET", "/console/topics/t", "t"),
    ("GET", records_path("rotten"), "rotten"),
    ("POST", "/v1/topics/rotten/verify?deep=1", "rotten"),
]


def test_corruption_is_reported_without_the_place_of_the_data_folder(damaged: Api) -> None:
    for method, path, topic in REQUESTS:
        response = damaged.request(method, path)
        assert f"{topic}-0/{LOG}: position " in response.text, path
        assert PLACE not in response.text, path
