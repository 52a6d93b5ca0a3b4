"""What `/metrics` of a broker of a cluster says of it."""

from __future__ import annotations

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster
from tests.fakes.waiting import until
from tierlog.api.http.metrics.table import METRICS
from tierlog.broker.replicas.replica import Role
from tierlog.record_format.errors import InvalidRequest

PARTITIONS = 3


def value(name: str, served: Served) -> float:
    """The sum over its labels."""
    lines = httpx2.get(f"{served.server.url}/metrics", timeout=20).text.splitlines()
    return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(name))


def test_metrics_count_brokers_leaders_hand_overs_and_what_is_passed_on(
    cluster: ServedCluster, topic: str
) -> None:
    first = cluster.brokers[0]

    assert value("tierlog_active_broker_count ", first) == len(cluster.brokers)
    assert value("tierlog_fenced_broker_count ", first) == 0
    until(lambda: value("tierlog_offline_partitions_count ", first) == 0)
    led = [value("tierlog_leader_count ", one) for one in cluster.brokers]
    assert sum(led) == sum(one.partitions for one in first.broker.list_topics(internal=True))
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    done = value('tierlog_hand_overs_total{result="done"}', leader)
    passed_on = value('tierlog_http_passed_on_total{result="answered"}', other)
    path = f"{other.server.url}/v1/topics/{topic}/partitions/0/records"
    assert httpx2.get(path, timeout=20).status_code == 200
    assert value('tierlog_http_passed_on_total{result="answered"}', other) == passed_on + 1
    cluster.move(topic, 0, other)
    assert value('tierlog_hand_overs_total{result="done"}', leader) == done + 1
    assert value("tierlog_hand_over_pause_seconds_count ", leader) == done + 1
    with pytest.raises(InvalidRequest):
        cluster_of(other.broker).move(topic, 0, node_id=99)
    named = {one.name for one in METRICS if one.in_cluster}
    shown = httpx2.get(f"{first.server.url}/metrics", timeout=20).text
    assert all(f"# HELP {name}" in shown for name in named)


def test_metrics_show_sets_of_replicas_elections_and_fetches(cluster: ServedCluster) -> None:
    brokers = cluster.brokers
    api = brokers[0].server.url
    elected = sum(value("tierlog_leader_election_seconds_count ", one) for one in brokers)
    body = {"name": "replicated", "partitions": 3, "replication_factor": 3}
    assert httpx2.post(f"{api}/v1/topics", json=body, timeout=20).status_code == 201
    until(lambda: all(cluster.knows(one, "replicated") for one in brokers))
    until(lambda: all(value("tierlog_replica_fetcher_max_lag ", one) == 0 for one in brokers))
    won = sum(value("tierlog_leader_election_seconds_count ", one) for one in brokers)
    assert won == elected + 3
    for one in brokers:
        until(lambda one=one: value("tierlog_replica_fetches_total{", one) > 0)
        until(lambda one=one: value("tierlog_under_replicated_partitions ", one) == 0)
    leader, slow = cluster.leader("replicated", 0), cluster.others("replicated", 0)[0]
    (replica,) = [
        found
        for place, found in cluster_of(slow.broker).replicas._replicas.items()
        if place[1] == 0 and found.topic == "replicated"
    ]
    shrunk = value("tierlog_isr_shrinks_total ", leader)
    grown = value("tierlog_isr_expands_total ", leader)
    replica.stop_following(Role.OFFLINE)  # as if its disk had failed
    records = {"records": [{"value": "x"}]}
    path = f"{leader.server.url}/v1/topics/replicated/partitions/0/records"
    assert httpx2.post(path, json=records, timeout=60).status_code == 200
    until(lambda: value("tierlog_isr_shrinks_total ", leader) == shrunk + 1)
    until(lambda: value("tierlog_under_replicated_partitions ", leader) == 1)
    until(lambda: value("tierlog_at_min_isr_partition_count ", leader) == 1)
    until(lambda: value("tierlog_replica_fetcher_max_lag ", slow) == 1)
    replica.role = Role.IDLE
    until(lambda: value("tierlog_isr_expands_total ", leader) == grown + 1)
    until(lambda: value("tierlog_replica_fetcher_max_lag ", slow) == 0)
    until(lambda: value("tierlog_under_replicated_partitions ", leader) == 0)
