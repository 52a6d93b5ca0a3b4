"""A broker of a cluster is killed: its partitions answer 503, and all others are served."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tierlog.api.http.settings import HttpSettings

PARTITIONS = 6


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[ServedCluster]:
    http = HttpSettings(leader_wait_ms=200)
    with served_cluster(tmp_path, brokers=2, http=http) as cluster:
        yield cluster


def test_its_partitions_are_503_until_it_is_back_and_the_others_are_served(
    cluster: ServedCluster, third: BrokerProcess
) -> None:
    third.start()
    first = cluster.brokers[0]
    members = [cluster_of(one.broker).members for one in cluster.brokers]
    until(lambda: all(len(one.members()) == 3 for one in members))
    with httpx2.Client(base_url=first.server.url, timeout=20) as api:
        api.post("/v1/topics", json={"name": "t", "partitions": PARTITIONS})
        led = [one["leader"]["url"] for one in api.get("/v1/topics/t").json()["partitions"]]
        there = [n for n in range(PARTITIONS) if led[n] == third.url]
        assert len(there) == 2
        records = {"records": [{"partition": n, "value": "a"} for n in range(PARTITIONS)]}
        assert api.post("/v1/topics/t/records", json=records).status_code == 200
        third.kill()
        for number in range(PARTITIONS):
            path = f"/v1/topics/t/partitions/{number}/records"
            made = api.post(path, json={"records": [{"value": "b"}]})
            read = api.get(path)
            if number in there:
                codes = {made.json()["code"], read.json()["code"]}
                assert (made.status_code, read.status_code) == (503, 503)
                assert codes <= {"broker-unavailable", "leader-unknown"}
                assert "outcome" not in made.json()
            else:
                assert (made.status_code, read.status_code) == (200, 200)
        in_part = api.post("/v1/topics/t/records", json=records)
        assert in_part.status_code == 503
        assert [one["partition"] for one in in_part.json()["results"]] == [
            n for n in range(PARTITIONS) if n not in there
        ]
        described = api.get("/v1/topics/t").json()
        assert [one["partition"] for one in described["damaged_partitions"]] == there
        wanted = [{"topic": "t", "partition": n, "offset": 0} for n in range(PARTITIONS)]
        rows = api.post("/v1/fetch", json={"partitions": wanted}).json()["partitions"]
        assert [one["partition"] for one in rows if "error" in one] == there
        known = cluster_of(first.broker).members
        until(lambda: not all(one.is_alive for one in known.members()))
        for _ in range(PARTITIONS):  # records without a key go to what is led
            made = api.post("/v1/topics/t/records", json={"records": [{"value": "c"}]})
            assert made.status_code == 200, made.text
        third.start()
        path = f"/v1/topics/t/partitions/{there[0]}/records"
        until(lambda: api.get(path).status_code == 200)
        assert [one["value"] for one in api.get(path).json()["records"]] == ["a"]
