"""A partition that one folder has alone gets a set of replicas: where that stops half-way, and what
else happens meanwhile. The brokers are in one process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import LOST, append, move
from tests.integration.cluster.test_reassigning import (
    check_whole,
    is_settled,
    place_of,
    reassignments_of,
    set_of,
)
from tests.integration.cluster.test_replicas import appended, created, is_led, values
from tierlog.broker.broker import Broker
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.replicas.kept_file import KeptFiles
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.host.clock import wall_clock_ms
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    ConfigurationError,
    InvalidConfig,
    InvalidReplicaAssignment,
    LeaderUnknown,
    RetriableError,
    ShuttingDown,
    TierlogError,
)
from tierlog.repair.restore import RestoreOptions, restore

ALL = [0, 1, 2]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    cluster.start_all("abc", session_timeout_ms=1_000, replica_lag_time_max_ms=1_500)
    yield cluster
    cluster.close()


def alone(cluster: BrokerCluster) -> Broker:
    """Who has ten records of which there is no other copy."""
    created(cluster, factor=1, **{"local.retention.ms": -2})
    appended(cluster, range(10))
    return cluster.leader("flights", 0)


def ask(owner: Broker) -> None:
    cluster_of(owner).reassign("flights", 0, ALL)


def check_gets_replicas(cluster: BrokerCluster, count: int = 10) -> None:
    reassignments_of(cluster.running[0]).begin(place_of(cluster), ALL)
    until(lambda: is_settled(cluster, ALL), patience_s=30)
    appended(cluster, range(count, count + 5))
    check_whole(cluster, count + 5)


def end(*_: object) -> None:
    raise ShuttingDown("the process ends here")


@pytest.mark.parametrize(
    ("where", "what", "is_replica"),
    [
        (LiveTopics, "leave", False),
        (LiveTopics, "retire_partition", True),
        (LogOpener, "replicate", True),
    ],
)
def test_a_broker_that_ends_in_the_middle_goes_on_with_all_of_it(
    cluster: BrokerCluster,
    monkeypatch: pytest.MonkeyPatch,
    where: type,
    what: str,
    is_replica: bool,
) -> None:
    owner = alone(cluster)
    with monkeypatch.context() as patch:
        patch.setattr(where, what, end)
        patch.setattr(KeptFiles, "forget", lambda *_: None)  # a crash does not tidy up
        with pytest.raises(ShuttingDown):
            ask(owner)
        cluster.stop(owner)
    cluster.start(owner.folder.path.name, session_timeout_ms=1_000)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert (cluster.partition("flights", 0).term is not None) is is_replica
    assert values(cluster) == list(range(10))
    check_gets_replicas(cluster)


@pytest.mark.parametrize("fault", [FailsBefore(), LOST, FailsAfter()], ids=["down", "lost", "late"])
@pytest.mark.parametrize("restarts", [False, True])
def test_a_first_version_without_an_answer_is_written_until_it_is_there(
    cluster: BrokerCluster, fault: FailsBefore | FailsAfter, restarts: bool
) -> None:
    """Until then nobody leads, and nothing else becomes of it."""
    owner = alone(cluster)
    name = owner.folder.path.name
    store = cluster.stores[name]
    store.fail("put", fault, times=10**9, when=_is_set)
    for call in ("get", "head", "list"):  # but the look that finds none
        store.fail(call, FailsBefore(), times=10**9, when=lambda key: _is_set(key) and _sent(store))
    with pytest.raises(TierlogError):
        ask(owner)
    with pytest.raises(LeaderUnknown):
        owner.partition("flights", 0)
    for broker in [one for one in cluster.running if one is not owner]:
        cluster_of(broker).look_after()  # nobody takes it for a new one
    assert not any(0 in one.topic("flights").partitions for one in cluster.running)
    if restarts:
        cluster.stop(owner)
        cluster.start(name, session_timeout_ms=1_000)
    store.heal()
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert values(cluster) == list(range(10))
    check_gets_replicas(cluster)


def _is_set(key: str) -> bool:
    return "/replicas/" in key


def _sent(store: FaultyObjectStore) -> bool:
    return any(call == "put" and _is_set(key) for call, key in store.calls)


def test_while_its_owner_is_down_nobody_else_has_it_and_then_it_is_the_owner_again(
    cluster: BrokerCluster,
) -> None:
    owner = alone(cluster)
    place, name = place_of(cluster), owner.folder.path.name
    cluster.stop(owner)
    other = cluster.running[0]
    for broker in cluster.running:
        cluster_of(broker).look_after()
    with pytest.raises(RetriableError):
        cluster_of(other).moves.reassign(place, ALL)
    cluster.start(name, session_timeout_ms=1_000)
    assert cluster.partition("flights", 0).term is None
    check_gets_replicas(cluster)


def test_one_that_is_being_handed_over_is_given_replicas_where_it_arrives(
    cluster: BrokerCluster,
) -> None:
    owner = alone(cluster)
    partition = owner.partition("flights", 0)
    refusal = pytest.raises(LeaderUnknown, match="handed over already")
    with cluster_of(owner).hand_over.alone(partition), refusal:
        ask(owner)
    move(cluster)
    assert cluster.leader("flights", 0) is not owner
    check_gets_replicas(cluster)


def test_whoever_was_its_owner_and_was_removed_serves_it_never_again(
    cluster: BrokerCluster,
) -> None:
    """Its claim is the manifest's newest: the one who leads has uploaded nothing yet."""
    owner = alone(cluster)
    others = [one for one in ALL if one != node_id_of(owner)]
    owner.offload("flights", wait_ms=20_000)
    reassignments_of(owner).begin(place_of(cluster), others)
    until(lambda: is_settled(cluster, sorted(others)), patience_s=30)
    until(lambda: not (owner.folder.path / "flights-0").exists(), patience_s=30)
    for broker in [one for one in cluster.running if one is not owner]:
        cluster.lose(broker)
    again = cluster.restart(owner)
    for _ in range(2):
        cluster_of(again).look_after()
    assert 0 not in again.topic("flights").partitions
    for broker in list(cluster.lost):
        cluster.find(broker)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert values(cluster) == list(range(10))


def test_writes_go_on_while_replicas_are_added_and_need_two_of_them_from_then_on(
    cluster: BrokerCluster,
) -> None:
    owner = alone(cluster)
    others = [one for one in cluster.running if one is not owner]
    for one in others:
        cluster.lines[one.folder.path.name].is_cut = True  # it copies nothing
    ask(owner)
    assert set_of(cluster).in_sync == [node_id_of(owner)]
    appended(cluster, range(10, 15))
    with pytest.raises(InvalidReplicaAssignment, match="no such broker"):
        cluster_of(owner).reassign("flights", 0, [0, 1, 2, 9])
    cluster_of(owner).reassign("flights", 0, [])  # cancelled: it is alone again, in its set
    until(lambda: is_settled(cluster, [node_id_of(owner)]))
    appended(cluster, range(15, 20))
    for one in others:
        cluster.lines[one.folder.path.name].is_cut = False
    check_gets_replicas(cluster, 20)
    until(lambda: owner.topic("flights").record.replication_factor == 3, patience_s=30)


def test_partitions_of_one_topic_may_have_a_set_and_have_none(cluster: BrokerCluster) -> None:
    """A stop hands over what is alone, and what has one replica waits for its broker."""
    first = cluster.running[0]
    first.create_topic("flights", partitions=3, config={"retention.ms": -1})
    until(lambda: all(is_led(cluster, "flights", one) for one in range(3)))
    for number in range(3):
        append(cluster.partition("flights", number), b"%d" % number)
    topic_id, asked = place_of(cluster)[0], reassignments_of(first)
    asked.begin((topic_id, 0), ALL)
    asked.begin((topic_id, 1), ALL)
    until(lambda: len(set_of(cluster).in_sync) == 3, patience_s=30)
    until(lambda: len(cluster_of(first).leaders.sets()) == 2, patience_s=30)
    until(lambda: not asked.list_ongoing(), patience_s=30)
    asked.begin((topic_id, 1), [1])
    until(lambda: set_of(cluster, 1).replicas == [1], patience_s=30)
    until(lambda: not asked.list_ongoing(), patience_s=30)
    until(
        lambda: {one.topic("flights").record.replication_factor for one in cluster.running} == {3}
    )
    until(lambda: all(is_led(cluster, "flights", one) for one in range(3)), patience_s=30)
    only, alone = cluster.leader("flights", 1), cluster.leader("flights", 2)
    assert (node_id_of(only), alone.partition("flights", 2).term) == (1, None)
    cluster_of(alone).leave(timeout_s=20)
    until(lambda: is_led(cluster, "flights", 2))
    assert cluster.leader("flights", 2) is not alone
    cluster_of(only).leave(timeout_s=20)
    assert cluster.leader("flights", 1) is only
    until(lambda: all(is_led(cluster, "flights", one) for one in range(3)), patience_s=30)
    for number in range(3):
        assert cluster.partition("flights", number).high_watermark == 1


def test_while_a_topic_has_replicas_what_is_alone_in_it_is_not_taken_for_new(
    cluster: BrokerCluster,
) -> None:
    first = cluster.running[0]
    first.create_topic("flights", partitions=3, config={"retention.ms": -1})
    until(lambda: all(is_led(cluster, "flights", one) for one in range(3)))
    owner = cluster.leader("flights", 1)
    append(owner.partition("flights", 1), b"x")
    reassignments_of(first).begin(place_of(cluster), ALL)
    until(lambda: is_settled(cluster, ALL), patience_s=30)
    until(
        lambda: {one.topic("flights").record.replication_factor for one in cluster.running} == {3}
    )
    cluster.lose(owner)
    others = cluster.running
    until(
        lambda: all(
            not cluster_of(one).members.find_member(node_id_of(owner)).is_alive for one in others
        )
    )
    place = place_of(cluster)[0], 1
    for broker in others:
        cluster_of(broker).news.read_reports()
        assert cluster_of(broker).leaders.find_leader(place) is None
        cluster_of(broker).look_after()
        assert not cluster_of(broker).replicas.has_set(broker.topic("flights").record, 1)
    cluster.find(owner)
    append(cluster.partition("flights", 1), b"y")
    assert cluster.partition("flights", 1).high_watermark == 2


def test_a_folder_that_was_restored_does_not_join_beside_its_replicas(
    cluster: BrokerCluster, tmp_path: Path
) -> None:
    owner = alone(cluster)
    with pytest.raises(InvalidConfig):
        owner.alter_topic("flights", config={"min.insync.replicas": 2})
    reassignments_of(owner).begin(place_of(cluster), [0, 1])
    until(lambda: is_settled(cluster, [0, 1]), patience_s=30)
    reassignments_of(owner).begin(place_of(cluster), [1])
    until(lambda: is_settled(cluster, [1]), patience_s=30)
    cluster.leader("flights", 0).offload("flights", wait_ms=20_000)
    until(lambda: owner.topic("flights").record.replication_factor == 1, patience_s=30)
    options = RestoreOptions(tmp_path / "restored", gap=1000, clock=wall_clock_ms)
    restore(open_store(cluster.bucket), options)
    with pytest.raises(ConfigurationError, match=r"flights.* has replicas .* without --join"):
        cluster.start("restored", meets=False)
