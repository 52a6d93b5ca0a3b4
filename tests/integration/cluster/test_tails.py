"""Tails through each broker of a cluster, while partitions are handed over."""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.fakes.served_cluster import ServedCluster
from tests.fakes.waiting import until
from tests.integration.http.test_tail import Events

PARTITIONS = 3


def produce(api: httpx2.Client, topic: str, *values: str) -> None:
    """Each to every partition."""
    records = [{"partition": n, "value": value} for value in values for n in range(PARTITIONS)]
    made = api.post(f"/v1/topics/{topic}/records", json={"records": records})
    assert made.status_code == 200, made.text


def place(event: dict[str, str]) -> tuple[int, int, str]:
    data = json.loads(event["data"])
    return data["partition"], data["offset"], data["value"]


def test_a_tail_of_a_topic_has_all_partitions_and_resumes(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    produce(api, topic, "a", "b")
    path = f"/v1/topics/{topic}/tail"
    with api.stream("GET", path, params={"offset": "earliest"}) as response:
        seen = Events(response).take(4)
    with api.stream("GET", path, headers={"last-event-id": seen[-1]["id"]}) as response:
        events = Events(response)
        rest = events.take(2)
        produce(api, topic, "c")
        rest += events.take(3)
    got = [place(one) for one in seen + rest]
    expected = [(n, at, v) for n in range(PARTITIONS) for at, v in enumerate("abc")]
    assert sorted(got) == expected
    for number in range(PARTITIONS):
        assert [at for n, at, _ in got if n == number] == [0, 1, 2]
    with api.stream("GET", path) as response:  # from the end of each
        produce(api, topic, "d")
        assert sorted(place(one) for one in Events(response).take(3)) == [
            (n, 3, "d") for n in range(PARTITIONS)
        ]
    refused = api.get(path, params={"offset": "99"})
    assert (refused.status_code, refused.json()["code"]) == (416, "offset-past-end")


def test_a_tail_of_a_partition_begins_as_at_its_leader(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    produce(api, topic, "a", "b")
    for number in range(PARTITIONS):
        path = f"/v1/topics/{topic}/partitions/{number}/tail"
        with api.stream("GET", path, headers={"last-event-id": "0"}) as response:
            assert response.headers["log-next-offset"] == "1"
            assert response.headers["log-high-watermark"] == "2"
            (event,) = Events(response).take(1)
        assert (event["id"], place(event)) == ("1", (number, 1, "b"))
        answer = api.get(path, params={"offset": "9"})
        assert (answer.status_code, answer.json()["high_watermark"]) == (416, 2)
    until(lambda: not any(one.app.context.waiting.count for one in cluster.brokers))


@pytest.mark.parametrize("whole_topic", [True, False])
def test_a_tail_goes_on_over_hand_overs_without_loss_or_repetition(
    cluster: ServedCluster, topic: str, whole_topic: bool
) -> None:
    """Through a broker that leads the partition, leads it no more, and leads it again."""
    watched = cluster.brokers[0]
    stop = threading.Event()
    produced: list[int] = []

    def keep_producing() -> None:
        with httpx2.Client(base_url=cluster.brokers[1].server.url, timeout=20) as api:
            while not stop.is_set():
                produce(api, topic, str(len(produced)))
                produced.append(len(produced))

    path = f"/v1/topics/{topic}/tail" if whole_topic else f"/v1/topics/{topic}/partitions/0/tail"
    with (
        ThreadPoolExecutor(1) as pool,
        httpx2.stream("GET", f"{watched.server.url}{path}?offset=0", timeout=30) as response,
    ):
        events = Events(response)
        producing = pool.submit(keep_producing)
        seen = events.take(1)
        for to in (1, 2, 0, 1, 0):
            if cluster.leader(topic, 0) is not cluster.brokers[to]:
                cluster.move(topic, 0, cluster.brokers[to])
            seen += events.take(4)
        stop.set()
        producing.result(20)
        count = len(produced) * (PARTITIONS if whole_topic else 1)
        seen += events.take(count - len(seen))
    for number in range(PARTITIONS if whole_topic else 1):
        got = [place(one)[1:] for one in seen if place(one)[0] == number]
        assert got == [(n, str(n)) for n in produced]
    if whole_topic:
        assert seen[-1]["id"] == ",".join(f"{n}:{produced[-1]}" for n in range(PARTITIONS))
    until(lambda: not any(one.app.context.waiting.count for one in cluster.brokers))


def test_a_direct_client_is_told_that_the_partition_has_moved(
    cluster: ServedCluster, topic: str
) -> None:
    leader = cluster.leader(topic, 0)
    url = f"{leader.server.url}/v1/topics/{topic}/partitions/0/tail"
    with httpx2.stream("GET", url, headers={"tierlog-route": "direct"}, timeout=30) as response:
        cluster.move(topic, 0, cluster.others(topic)[0])
        (event,) = Events(response).take(1)
    assert event["event"] == "error"
    assert json.loads(event["data"])["code"] in ("not-leader", "leader-unknown")


def test_a_tail_sees_partitions_that_are_added(cluster: ServedCluster, topic: str) -> None:
    with (
        httpx2.Client(base_url=cluster.brokers[0].server.url, timeout=20) as api,
        api.stream("GET", f"/v1/topics/{topic}/tail") as response,
    ):
        events = Events(response)
        grown = api.patch(f"/v1/topics/{topic}", json={"partitions": 6})
        assert grown.status_code == 200, grown.text
        record = {"records": [{"partition": n, "value": "x"} for n in range(6)]}
        made = api.post(f"/v1/topics/{topic}/records", json=record)
        assert made.status_code == 200, made.text
        assert sorted(place(one)[0] for one in events.take(6)) == list(range(6))
