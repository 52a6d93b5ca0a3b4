"""Replicas that are given to other brokers: by an order, a drain, a balance; also while the leader
dies. The brokers are in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.waiting import until
from tests.integration.cluster.test_replicas import (
    appended,
    created,
    is_led,
    log_files,
    values,
)
from tierlog.broker.broker import Broker
from tierlog.broker.cluster.placement import Move
from tierlog.broker.cluster.reassignments import Reassignments
from tierlog.broker.replication.messages import ShownSet
from tierlog.record_format.errors import (
    BrokerInUse,
    InvalidConfig,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    NoReassignment,
)
from tierlog.repair.verify import verify_topic


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    """Four brokers, 0 to 3."""
    cluster = BrokerCluster(tmp_path)
    cluster.start_all("abcd", session_timeout_ms=1_000, replica_lag_time_max_ms=1_500)
    yield cluster
    cluster.close()


def create(cluster: BrokerCluster, replicas: dict[int, list[int]]) -> None:
    config = {"retention.ms": -1}  # what is appended has old timestamps
    first, count = cluster.running[0], len(replicas)
    first.create_topic("flights", partitions=count, replicas=replicas, config=config)


def place_of(cluster: BrokerCluster) -> tuple[str, int]:
    return (cluster.running[0].topic("flights").record.topic_id, 0)


def reassignments_of(broker: Broker) -> Reassignments:
    cluster_of(broker).news.read_reports()
    return cluster_of(broker).reassignments


def set_of(cluster: BrokerCluster, number: int = 0) -> ShownSet:
    """By its leader."""
    until(lambda: is_led(cluster, "flights", number), patience_s=30)
    leader = cluster.leader("flights", number)
    return cluster_of(leader).replicas.shown((place_of(cluster)[0], number))


def is_settled(cluster: BrokerCluster, replicas: list[int]) -> bool:
    found = set_of(cluster)
    return (found.replicas, found.in_sync) == (replicas, sorted(replicas))


def written(broker: Broker) -> dict[str, bytes]:
    """A leader begins a segment with its term: its followers when there is a record in it."""
    return {name: data for name, data in log_files(broker, "flights", 0).items() if data}


def check_whole(cluster: BrokerCluster, count: int) -> None:
    """All was read once, in order, and is in the same files on each replica from where it begins,
    and nowhere else.
    """
    assert values(cluster) == list(range(count))
    has = {node_id_of(one): one for one in cluster.running}
    replicas = set_of(cluster).replicas
    gone = [one.folder.path / "flights-0" for node, one in has.items() if node not in replicas]
    until(lambda: not any(one.exists() for one in gone), patience_s=30)
    files = [written(has[one]) for one in replicas if one in has]
    shared = set.intersection(*map(set, files))  # a new one may begin where the bucket ends
    assert max(files[0]) in shared
    assert all(one[name] == files[0][name] for one in files for name in shared)
    leader = cluster.leader("flights", 0)
    leader.offload("flights", wait_ms=20_000)
    assert verify_topic(leader, "flights", deep=True).ok


def test_any_broker_takes_the_order_and_the_new_replicas_are_the_same_files(
    cluster: BrokerCluster,
) -> None:
    create(cluster, {0: [0, 1]})
    appended(cluster, range(10))
    for turn, wanted in enumerate(([2, 3], [3, 0, 1], [1, 3], [3, 1])):
        asked = reassignments_of(cluster.running[turn])
        asked.begin(place_of(cluster), wanted)
        until(lambda w=wanted: is_settled(cluster, w), patience_s=30)
        appended(cluster, range(10 + 5 * turn, 15 + 5 * turn))
        check_whole(cluster, 15 + 5 * turn)
        until(lambda a=asked: a.list_ongoing() == {})


def test_the_topic_has_as_many_replicas_as_its_first_partition_and_new_ones_get_as_many(
    cluster: BrokerCluster,
) -> None:
    first = cluster.running[0]
    create(cluster, {0: [0, 1]})
    until(lambda: is_settled(cluster, [0, 1]))
    reassignments_of(first).begin(place_of(cluster), [2, 1, 0])

    def factors() -> set[int]:
        return {one.topic("flights").record.replication_factor for one in cluster.running}

    until(lambda: factors() == {3}, patience_s=30)
    first.alter_topic("flights", partitions=2)
    until(lambda: is_led(cluster, "flights", 1), patience_s=30)
    leader = cluster.leader("flights", 1)
    found = cluster_of(leader).replicas.shown((place_of(cluster)[0], 1))
    assert len(found.replicas) == 3
    cluster_of(first).moves.set_draining(3, draining=True)
    cluster.lose(cluster.running[2])
    cluster_of(first).members.refresh()
    until(lambda: len(cluster_of(first)._may_lead()) == 2, patience_s=30)
    with pytest.raises(InvalidReplicationFactor):
        first.alter_topic("flights", partitions=3)


def stuck(cluster: BrokerCluster, wanted: list[int]) -> None:
    """A reassignment of [0, 1, 2] that cannot end: broker 3 is gone, and only it knows."""
    create(cluster, {0: [0, 1, 2]})
    until(lambda: is_settled(cluster, [0, 1, 2]))
    appended(cluster, range(5))
    cluster.lines["d"].is_cut = True  # it reaches nobody, and so copies nothing
    reassignments_of(cluster.running[1]).begin(place_of(cluster), wanted)
    until(lambda: list(set_of(cluster).adding) == [3])


def test_whoever_leads_next_goes_on_with_it(cluster: BrokerCluster) -> None:
    stuck(cluster, [3, 1, 2])
    old = cluster.leader("flights", 0)
    cluster.lose(old)
    assert (set_of(cluster).adding, set_of(cluster).removing) == ([3], [0])
    appended(cluster, range(5, 10))
    cluster.lines["d"].is_cut = False
    until(lambda: is_settled(cluster, [3, 1, 2]), patience_s=30)
    cluster.find(old)
    until(lambda: not (old.folder.path / "flights-0").exists(), patience_s=30)
    check_whole(cluster, 10)


def test_it_is_listed_while_nobody_leads_the_partition(cluster: BrokerCluster) -> None:
    """`kafka-reassign-partitions.sh --verify` would say that it is complete."""
    stuck(cluster, [3, 1, 2])
    place, old = place_of(cluster), cluster.leader("flights", 0)
    asked = reassignments_of(cluster.running[1])
    cluster.lose(old)
    listed = [asked.list_ongoing().get(place)]
    until(lambda: listed.append(asked.list_ongoing().get(place)) or is_led(cluster, "flights", 0))
    assert {one and tuple(one.adding) for one in listed} == {(3,)}
    cluster.lines["d"].is_cut = False
    until(lambda: asked.list_ongoing() == {}, patience_s=30)
    assert is_settled(cluster, [3, 1, 2])


def test_one_that_is_cancelled_ends_although_a_replica_of_before_is_gone(
    cluster: BrokerCluster,
) -> None:
    stuck(cluster, [3, 0, 1])
    cluster.lose(next(one for one in cluster.running if node_id_of(one) == 2))
    asked = reassignments_of(cluster.running[1])
    assert {place: one.adding for place, one in asked.list_ongoing().items()} == {
        place_of(cluster): (3,)
    }
    asked.cancel(place_of(cluster))
    until(lambda: set_of(cluster).replicas == [0, 1, 2] and not set_of(cluster).removing)
    with pytest.raises(NoReassignment):
        asked.cancel(place_of(cluster))
    appended(cluster, range(5, 8))
    assert values(cluster) == list(range(8))


def test_what_a_removed_replica_has_said_does_not_count_when_it_is_added_again(
    cluster: BrokerCluster,
) -> None:
    """It has given up its log (H9): the new one has to copy it first."""
    create(cluster, {0: [0, 1]})
    until(lambda: is_settled(cluster, [0, 1]))
    appended(cluster, range(5))
    asked, again = reassignments_of(cluster.running[0]), cluster.running[1]
    asked.begin(place_of(cluster), [0, 2])
    until(lambda: is_settled(cluster, [0, 2]), patience_s=30)
    until(lambda: not (again.folder.path / "flights-0").exists(), patience_s=30)
    cluster.lines["b"].is_cut = True  # it reaches nobody, and so copies nothing
    asked.begin(place_of(cluster), [0, 2, 1])
    until(lambda: set_of(cluster).replicas == [0, 2, 1])
    cluster_of(cluster.leader("flights", 0)).replicas.run_round()
    appended(cluster, range(5, 10))
    assert (set_of(cluster).adding, set_of(cluster).in_sync) == ([1], [0, 2])
    cluster.lines["b"].is_cut = False
    until(lambda: is_settled(cluster, [0, 2, 1]), patience_s=30)
    check_whole(cluster, 10)


def test_a_broker_that_starts_opens_no_log_of_what_it_was_removed_from(
    cluster: BrokerCluster,
) -> None:
    create(cluster, {0: [0, 1]})
    until(lambda: is_settled(cluster, [0, 1]))
    appended(cluster, range(5))
    reassignments_of(cluster.running[2]).begin(place_of(cluster), [1, 2])
    until(lambda: is_settled(cluster, [1, 2]), patience_s=30)
    removed = cluster.running[0]
    folder = removed.folder.path / "flights-0"
    until(lambda: not folder.exists(), patience_s=30)
    cluster.stop(removed)
    again = cluster.start("a", meets=False)
    assert not folder.exists()
    assert not cluster_of(again).replicas.has(place_of(cluster))
    cluster.meet()
    reassignments_of(cluster.running[0]).begin(place_of(cluster), [1, 2, 0])
    until(lambda: is_settled(cluster, [1, 2, 0]), patience_s=30)
    check_whole(cluster, 5)


@pytest.mark.parametrize(
    ("wanted", "why"),
    [
        ([0, 9], "no such broker"),
        ([0, 0], "more than once"),
        ([], "empty"),
        ([0, 1, 3], "no such broker"),  # it is drained
    ],
)
def test_brokers_that_may_not_have_replicas_are_refused(
    cluster: BrokerCluster, wanted: list[int], why: str
) -> None:
    create(cluster, {0: [0, 1]})
    until(lambda: is_settled(cluster, [0, 1]))
    cluster_of(cluster.running[3]).moves.set_draining(3, draining=True)
    cluster.meet()
    with pytest.raises(InvalidReplicaAssignment, match=why):
        reassignments_of(cluster.running[0]).begin(place_of(cluster), wanted)
    with pytest.raises(NoReassignment):
        reassignments_of(cluster.running[1]).cancel(place_of(cluster))


def test_fewer_replicas_than_have_to_be_in_sync_are_enough_if_there_are_no_more(
    cluster: BrokerCluster,
) -> None:
    created(cluster, factor=3, **{"min.insync.replicas": 3})
    asked = reassignments_of(cluster.running[0])
    for turn, wanted in enumerate(([0, 1], [1])):
        asked.begin(place_of(cluster), wanted)
        until(lambda w=wanted: is_settled(cluster, w), patience_s=30)
        appended(cluster, range(turn, turn + 1))
    leader = cluster.leader("flights", 0)
    until(lambda: leader.topic("flights").record.replication_factor == 1, patience_s=30)
    leader.alter_topic("flights", config={"retention.ms": 10**9})
    with pytest.raises(InvalidConfig, match=r"min\.insync\.replicas is 2"):
        leader.alter_topic("flights", config={"min.insync.replicas": 2})


def test_the_only_replica_is_handed_over_and_stays_the_only_one(cluster: BrokerCluster) -> None:
    created(cluster, factor=1)
    target = min({0, 1} - {node_id_of(cluster.leader("flights", 0))})
    asked = reassignments_of(cluster.running[3])
    asked.begin(place_of(cluster), [target])
    until(lambda: asked.list_ongoing() == {}, patience_s=30)
    assert node_id_of(cluster.leader("flights", 0)) == target
    assert cluster.partition("flights", 0).term is None


def test_an_order_that_comes_as_one_before_it_ends_is_carried_out(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    created(cluster, factor=1)
    first, second = sorted({0, 1, 2} - {node_id_of(cluster.leader("flights", 0))})[:2]
    asked = reassignments_of(cluster.running[3])
    moves, orders = asked._moves, [second]
    run_moves = moves.run_moves

    def run_and_order(planned: list[Move]) -> object:
        done = run_moves(planned)
        if orders:
            asked.begin(place_of(cluster), [orders.pop()])
        return done

    monkeypatch.setattr(moves, "run_moves", run_and_order)
    asked.begin(place_of(cluster), [first])
    until(lambda: not orders and asked.list_ongoing() == {}, patience_s=30)
    assert node_id_of(cluster.leader("flights", 0)) == second


def test_the_only_replica_gets_others_and_is_the_only_one_again(cluster: BrokerCluster) -> None:
    """Whoever is asked, and also where it was not before."""
    created(cluster, factor=1, **{"local.retention.ms": -2})
    for turn, wanted in enumerate(([0, 1, 2], [3], [3, 0], [0], [1], [1, 2, 3])):
        appended(cluster, range(5 * turn, 5 * turn + 5))
        asked = reassignments_of(cluster.running[turn % 4])
        asked.begin(place_of(cluster), wanted)
        until(lambda w=wanted: is_settled(cluster, w), patience_s=30)
        until(lambda a=asked: a.list_ongoing() == {})
        check_whole(cluster, 5 * turn + 5)


def test_a_drained_broker_has_no_replica_in_the_end_and_is_given_none(
    cluster: BrokerCluster,
) -> None:
    first = cluster.running[0]
    create(cluster, {0: [3, 0, 1], 1: [0, 1, 3], 2: [0, 1, 2]})
    until(lambda: all(is_led(cluster, "flights", number) for number in range(3)))
    appended(cluster, range(10))
    drained = cluster.running[3]
    cluster_of(first).moves.set_draining(3, draining=True)
    until(lambda: not list(drained.folder.path.glob("flights-*")), patience_s=30)
    until(lambda: is_settled(cluster, [2, 0, 1]), patience_s=30)
    first.create_topic("more", partitions=4, replication_factor=3)
    until(lambda: all(is_led(cluster, "more", number) for number in range(4)))
    assert not list(drained.folder.path.glob("more-*"))
    drained = cluster.restart(drained)
    cluster.meet()
    assert cluster_of(first).leaders.count_replicas()[3] == 0
    assert not list(drained.folder.path.glob("*-0"))
    check_whole(cluster, 10)


def test_without_another_broker_a_drained_one_keeps_its_replicas_until_there_is_one(
    cluster: BrokerCluster,
) -> None:
    gone = cluster.running[2]
    create(cluster, {0: [0, 1, 3]})
    until(lambda: is_settled(cluster, [0, 1, 3]))
    cluster.stop(gone)
    cluster.meet()
    first = cluster.running[0]
    cluster_of(first).moves.set_draining(3, draining=True)
    assert cluster_of(first).moves.plan_drain(3) == []
    appended(cluster, range(3))
    assert is_settled(cluster, [0, 1, 3])
    cluster.start("c", session_timeout_ms=1_000)
    until(lambda: is_settled(cluster, [0, 1, 2]), patience_s=30)
    check_whole(cluster, 3)


def test_a_broker_that_is_in_a_set_is_not_removed(cluster: BrokerCluster) -> None:
    created(cluster, factor=3)
    first = cluster.running[0]
    for name, node_id in (("b", 1), ("c", 2), ("d", 3)):
        if node_id in set_of(cluster).replicas[1:]:
            other = next(one for one in cluster.running if one.folder.path.name == name)
            cluster.stop(other)
            with pytest.raises(BrokerInUse, match=f"broker {node_id} has flights-0"):
                cluster_of(first).remove(node_id)
            return
    pytest.fail("no broker follows")


def test_a_balance_spreads_replicas_and_who_is_to_lead(cluster: BrokerCluster) -> None:
    first = cluster.running[0]
    create(cluster, {number: [0, 1, 2] for number in range(4)})
    until(lambda: all(is_led(cluster, "flights", number) for number in range(4)))
    appended(cluster, range(5))
    moves = cluster_of(first).moves
    for _ in range(20):
        if not (plan := moves.plan_balance()):
            break
        moves.run_moves(plan[:1])
    assert moves.plan_balance() == []

    def is_spread() -> bool:
        cluster.meet()
        counts = cluster_of(first).leaders.count_replicas()
        ongoing = cluster_of(first).reassignments.list_ongoing()
        return not ongoing and [counts[one] for one in range(4)] == [3] * 4

    until(is_spread, patience_s=30)
    firsts = [led.replicas[0] for led in cluster_of(first).leaders.sets().values()]
    assert sorted(firsts) == [0, 1, 2, 3]
    assert values(cluster) == list(range(5))
