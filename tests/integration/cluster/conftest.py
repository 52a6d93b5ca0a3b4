"""Three served brokers for a module's tests, and a topic of `PARTITIONS` partitions for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_cluster import ServedCluster, served_cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def topic(cluster: ServedCluster, request: pytest.FixtureRequest) -> str:
    name = request.node.name[:80].replace("[", "-").strip("]")
    cluster.create(name, partitions=request.module.PARTITIONS)
    return name


@pytest.fixture(params=[0, 1, 2])
def api(cluster: ServedCluster, request: pytest.FixtureRequest) -> Iterator[httpx2.Client]:
    """A client of each broker in turn."""
    url = cluster.brokers[request.param].server.url
    with httpx2.Client(base_url=url, timeout=20) as client:
        yield client


@pytest.fixture
def third(tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker in a process of its own, to be started on `tmp_path`'s bucket, and killed."""
    root = tmp_path / "third"
    root.mkdir()
    flags = ("--join", "--heartbeat-interval-ms", "200", "--session-timeout-ms", "2000")
    broker = BrokerProcess(root, *flags, store=(tmp_path / "bucket").as_uri())
    yield broker
    broker.stop()
