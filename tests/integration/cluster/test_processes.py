"""Three brokers as processes, on a folder and on a real S3 server: restarted one after another,
added and drained under a load, and cut off from the bucket.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx2
import pytest

from tests.fakes.cluster_processes import ClusterOfProcesses, Load, cluster_of_processes
from tests.fakes.waiting import until

KINDS = ["folder", pytest.param("s3", marks=pytest.mark.s3)]
pytestmark = pytest.mark.parametrize("cluster", KINDS, indirect=True, scope="module")


@pytest.fixture(scope="module")
def cluster(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[ClusterOfProcesses]:
    with cluster_of_processes(tmp_path_factory.mktemp("cluster"), request.param) as cluster:
        yield cluster


def test_twelve_partitions_are_led_by_all_three_and_written_and_read_through_any(
    cluster: ClusterOfProcesses,
) -> None:
    cluster.create("twelve", partitions=12)
    assert sorted(cluster.leaders("twelve")) == [0] * 4 + [1] * 4 + [2] * 4
    for broker in cluster.brokers:
        for number in range(12):
            path, record = f"/v1/topics/twelve/partitions/{number}/records", {"value": broker.url}
            cluster.call(broker, "POST", path, json={"records": [record]})
    for broker in cluster.brokers:
        for number in range(12):
            read = cluster.call(broker, "GET", f"/v1/topics/twelve/partitions/{number}/records")
            assert [one["value"] for one in read["records"]] == [one.url for one in cluster.brokers]
    cluster.verify("twelve")


@pytest.mark.parametrize("hand_overs", [4, pytest.param(100, marks=pytest.mark.soak)])
def test_hand_overs_under_a_load_cost_a_pause(cluster: ClusterOfProcesses, hand_overs: int) -> None:
    """Prints for how long appends were refused."""
    topic = f"moved-{hand_overs}"
    cluster.create(topic, partitions=3)
    pauses_ms = list[int]()
    with Load(cluster, topic, partitions=3) as load:
        for turn in range(hand_overs):
            led = cluster.leaders(topic)[turn % 3]
            pauses_ms.append(cluster.move(topic, turn % 3, (led + random.randint(1, 2)) % 3))
            load.wait_for_more(10)
    pauses_ms.sort()
    print(f"{hand_overs} hand-overs: appends paused {pauses_ms[-10:]} ms at most")
    cluster.verify(topic)


@pytest.mark.soak
def test_over_a_rolling_restart_a_consumer_that_follows_never_ends(
    cluster: ClusterOfProcesses,
) -> None:
    cluster.create("rolled", partitions=6)
    with Load(cluster, "rolled", partitions=6) as load:
        for broker in cluster.brokers:
            assert broker.stop() == 0
            load.wait_for_more()
            broker.start()
            until(lambda: all(cluster.sees_all_alive(one) for one in cluster.brokers))
            load.wait_for_more()
    cluster.verify("rolled")


@pytest.mark.parametrize("seconds", [3, pytest.param(60, marks=pytest.mark.soak)])
def test_while_the_bucket_is_cut_off_all_is_produced_and_nothing_moves(
    cluster: ClusterOfProcesses, seconds: int
) -> None:
    topic = f"cut-{seconds}"
    cluster.create(topic, partitions=6, **{"offload.max.lag.ms": 1000})
    led, stop = cluster.leaders(topic), threading.Event()
    made = [[0] * 6 for _ in cluster.brokers]

    def produce(asked: int) -> None:
        broker = cluster.brokers[asked]
        with httpx2.Client(timeout=30) as http:
            while not stop.is_set():
                for number in range(6):
                    url = f"{broker.url}/v1/topics/{topic}/partitions/{number}/records"
                    answer = http.post(url, json={"records": [{"value": "x" * 100}]})
                    assert answer.status_code == 200, answer.text
                    made[asked][number] += 1

    with ThreadPoolExecutor(3) as pool:
        producing = [pool.submit(produce, asked) for asked in range(3)]
        until(lambda: min(map(min, made)) > 2 or any(one.done() for one in producing))
        cluster.bucket.cut()
        try:
            before, began_s = [list(row) for row in made], time.monotonic()
            move = {"node_id": (led[0] + 1) % 3}
            path = f"{cluster.brokers[0].url}/v1/topics/{topic}/partitions/0/leader"
            refused = pool.submit(cluster.http.post, path, json=move, timeout=600)
            until(lambda: time.monotonic() - began_s > seconds, patience_s=seconds + 30)
            grown = [
                [now - then for now, then in zip(*rows, strict=True)]
                for rows in zip(made, before, strict=True)
            ]
            assert min(map(min, grown)) > 2, "everywhere, through each broker"
            assert cluster.leaders(topic) == led
            assert all(map(cluster.sees_all_alive, cluster.brokers)), "none is taken for dead"
        finally:
            cluster.bucket.mend()
            stop.set()
        for one in producing:
            one.result(60)
        assert refused.result(600).status_code in (200, 503)
    until(lambda: -1 not in cluster.leaders(topic))
    cluster.verify(topic)
    state = cluster.call(cluster.brokers[1], "GET", f"/v1/topics/{topic}")
    ends = [one["log_end_offset"] for one in state["partitions"]]
    assert ends == [sum(row[number] for row in made) for number in range(6)]


@pytest.mark.soak
def test_a_broker_is_added_and_one_drained_under_a_load(cluster: ClusterOfProcesses) -> None:
    cluster.create("grown", partitions=12)
    with Load(cluster, "grown", partitions=12) as load:
        added = cluster.add()
        cluster.call(added, "POST", "/v1/cluster/rebalance", json={"max_moves": 100})
        until(lambda: sorted(cluster.leaders("grown")) == [one for one in range(4) for _ in "abc"])
        load.wait_for_more()
        cluster.call(added, "POST", "/v1/cluster/brokers/1/drain", json={})
        drained = cluster.brokers[1].root / "data"
        until(lambda: not list(drained.glob("*-*[0-9]")), patience_s=60)
        load.wait_for_more()
        assert 1 not in cluster.leaders("grown")
    cluster.verify("grown")
    path = f"{added.url}/v1/cluster/brokers/1/drain"
    assert cluster.http.delete(path).status_code == 204
