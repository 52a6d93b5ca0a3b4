"""What `/metrics` of a broker of a cluster says of it."""

from __future__ import annotations

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster
from tests.fakes.waiting import until
from tierlog.api.http.metrics.table import METRICS
from tierlog.record_format.errors import InvalidRequest

PARTITIONS = 3


def test_metrics_count_brokers_leaders_hand_overs_and_what_is_passed_on(
    cluster: ServedCluster, topic: str
) -> None:
    first = cluster.brokers[0]

    def value(name: str, served: Served = first) -> float:
        lines = httpx2.get(f"{served.server.url}/metrics", timeout=20).text.splitlines()
        return sum(float(one.rpartition(" ")[2]) for one in lines if one.startswith(name))

    assert value("tierlog_active_broker_count ") == len(cluster.brokers)
    assert value("tierlog_fenced_broker_count ") == 0
    until(lambda: value("tierlog_offline_partitions_count ") == 0)
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
