"""Brokers that are drained, removed, and given their share: on real files, and over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.waiting import until
from tierlog.broker.broker import Broker
from tierlog.record_format.errors import BrokerInUse, ConfigurationError, UnknownBroker


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    yield cluster
    cluster.close()


def led_by(broker: Broker) -> int:
    return sum(1 for _ in broker.partitions())


def test_a_drained_broker_gives_all_away_and_gets_nothing_also_after_a_restart(
    cluster: BrokerCluster,
) -> None:
    a, b, c = cluster.start_all("abc")
    a.create_topic("flights", partitions=6)
    cluster_of(a).moves.set_draining(node_id_of(c), draining=True)
    until(lambda: (led_by(a), led_by(b), led_by(c)) == (3, 3, 0))
    c = cluster.restart(c)
    assert cluster_of(c).members.me.state == "draining"
    b.create_topic("more", partitions=4)
    assert led_by(c) == 0
    cluster_of(b).moves.set_draining(node_id_of(c), draining=False)
    assert cluster_of(c).members.me.state == "running"
    cluster.meet()
    plan = cluster_of(a).moves.plan_balance()
    assert {move.target for move in plan} == {node_id_of(c)}
    cluster_of(a).moves.run_moves(plan)
    assert sorted(map(led_by, (a, b, c))) == [3, 3, 4]


def test_now_and_then_one_broker_gives_each_its_share(cluster: BrokerCluster) -> None:
    a = cluster.start("a", rebalance_interval_ms=100)
    a.create_topic("flights", partitions=4)
    b = cluster.start("b", rebalance_interval_ms=100)
    until(lambda: (led_by(a), led_by(b)) == (2, 2))


def test_only_a_broker_that_stopped_without_partitions_is_removed_and_for_ever(
    cluster: BrokerCluster,
) -> None:
    a, b = cluster.start_all("ab")
    a.create_topic("flights", partitions=2)
    node_id, members = node_id_of(b), cluster_of(a).members
    with pytest.raises(BrokerInUse, match="runs"):
        cluster_of(a).remove(node_id)
    with pytest.raises(UnknownBroker):
        cluster_of(a).remove(7)
    cluster.stop(b)
    with pytest.raises(BrokerInUse, match="has flights-"):
        cluster_of(a).remove(node_id)
    with pytest.raises(BrokerInUse, match="does not answer"):
        cluster_of(a).moves.set_draining(node_id, draining=True)
    b = cluster.start("b")
    cluster_of(b).moves.set_draining(node_id, draining=True)
    until(lambda: led_by(b) == 0)
    cluster.stop(b)
    cluster_of(a).remove(node_id)
    assert members.member(node_id) is None
    with pytest.raises(ConfigurationError, match="was removed"):
        cluster.start("b")
    assert node_id_of(cluster.start("c")) == node_id, "the number is free again"
