"""Small segments of a partition with replicas: its leader merges them, and whoever leads next."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, node_id_of
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import append, move, values_of
from tests.integration.cluster.test_replicas import in_sync, is_led
from tierlog.broker.broker import Broker
from tierlog.broker.partition.partition import Partition
from tierlog.repair.verify import verify_topic

CONFIG = {
    "segment.bytes": 1 << 20,
    "retention.ms": -1,
    "local.retention.bytes": 0,
    "cold.merge.min.bytes": 240,  # four of those here have more, three have not
}
SEGMENTS = 8
VALUES = [b"%d" % number for number in range(SEGMENTS)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    cluster.start_all("abc", session_timeout_ms=1_000, replica_lag_time_max_ms=1_500)
    yield cluster
    cluster.close()


@pytest.fixture
def leader(cluster: BrokerCluster) -> Broker:
    """It has its small segments in the bucket alone, and its followers have them on their disks."""
    first = cluster.running[0]
    first.create_topic("flights", partitions=1, replication_factor=3, config=CONFIG)
    until(lambda: is_led(cluster, "flights", 0))
    partition = cluster.partition("flights", 0)
    for value in VALUES:
        append(partition, value)
        partition.upkeep.roll()
    until(lambda: in_sync(cluster, "flights", 0) == [0, 1, 2])
    found = cluster.leader("flights", 0)
    found.offload("flights", wait_ms=20_000)
    until(lambda: partition.offsets().local_log_start_offset == SEGMENTS)
    return found


def spans(partition: Partition) -> list[tuple[int, int]]:
    return [(one.base_offset, one.last_offset) for one in partition.cold_entries(0)]


def check(cluster: BrokerCluster) -> None:
    partition = cluster.partition("flights", 0)
    assert values_of(partition) == VALUES
    assert verify_topic(cluster.leader("flights", 0), "flights", deep=True).ok


def merge_all(cluster: BrokerCluster) -> None:
    """As the background does, on all brokers, once whoever leads has only the bucket's copy."""
    partition = cluster.partition("flights", 0)
    cluster.leader("flights", 0).offload("flights", wait_ms=20_000)  # it claims the partition
    partition.upkeep.delete_local(partition.cold_end_offset)
    for _ in range(SEGMENTS):
        for broker in cluster.running:
            broker.background.merger.run_round()


def test_the_leader_alone_merges_and_the_next_one_reads_it_whatever_is_on_its_disk(
    cluster: BrokerCluster, leader: Broker
) -> None:
    followers = [one for one in cluster.running if one is not leader]
    for broker in followers:
        broker.background.merger.run_round()
    assert spans(cluster.partition("flights", 0)) == [(one, one) for one in range(SEGMENTS)]
    merge_all(cluster)
    merged = spans(cluster.partition("flights", 0))
    assert len(merged) == 2
    check(cluster)
    move(cluster)
    until(lambda: is_led(cluster, "flights", 0))
    assert cluster.leader("flights", 0) in followers
    check(cluster)
    merge_all(cluster)
    assert spans(cluster.partition("flights", 0)) == merged
    check(cluster)


@pytest.mark.parametrize(
    ("call", "suffix"),
    [
        ("get_range", ".log"),
        ("put_file", ".log"),
        ("put", ".indexes"),
        ("head", ".indexes"),
        ("put", ".json"),
    ],
)
def test_a_leader_that_is_deposed_in_the_middle_commits_nothing_and_the_next_one_merges(
    cluster: BrokerCluster, leader: Broker, call: str, suffix: str
) -> None:
    """It still reaches the bucket, and goes on with the merge once another leads."""
    name, partition = leader.folder.path.name, leader.partition("flights", 0)
    is_there, may_go_on = threading.Event(), threading.Event()

    def wait_there(made: str, key: str) -> None:
        merges = threading.current_thread().name.startswith("merg")
        if merges and made == call and key.endswith(suffix):
            is_there.set()
            assert may_go_on.wait(60), "nobody else came to lead"

    cluster.stores[name].before_call = wait_there
    with ThreadPoolExecutor(1, initializer=name_thread) as threads:
        round_ = threads.submit(leader.background.merger.run_round)
        until(is_there.is_set)
        del cluster.peers.brokers[f"http://{name}:8640"]
        cluster.lost.append(leader)
        cluster.lines[name].is_cut = True
        until(lambda: is_led(cluster, "flights", 0), patience_s=30)
        now = cluster.partition("flights", 0)
        now.claim()  # what the old one commits before that is taken over
        may_go_on.set()
        round_.result(30)
    assert now is not partition
    assert node_id_of(cluster.leader("flights", 0)) != node_id_of(leader)
    assert spans(now) == [(one, one) for one in range(SEGMENTS)]
    check(cluster)
    merge_all(cluster)
    assert spans(now)[0] == (0, 3)
    check(cluster)


def name_thread() -> None:
    threading.current_thread().name = "merging"
