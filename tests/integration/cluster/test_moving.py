"""Partitions of a cluster: created on all brokers, found from each, handed over without loss."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore
from tests.fakes.records import iter_records
from tests.fakes.waiting import until
from tierlog.broker.broker import Broker
from tierlog.broker.cluster import hand_over
from tierlog.broker.cluster.hand_over import HandOver, Moved
from tierlog.broker.cluster.news import News
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.log_writer import Acks, AppendResult
from tierlog.manifest.versions import PUT_ATTEMPTS
from tierlog.record_format.consumer_offsets import TOPIC
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    InvalidConfig,
    InvalidReplicaAssignment,
    InvalidReplicationFactor,
    LeaderUnknown,
    NotLeader,
    OutcomeUnknownError,
    ShuttingDown,
    StoreUnavailable,
    TopicExists,
    UnknownTopic,
)
from tierlog.record_format.produced import (
    ProducedBatches,
    ProduceLimits,
    build_produced,
    check_produced,
)
from tierlog.repair.verify import verify_topic


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    yield cluster
    cluster.close()


LOST = FailsBefore(lambda key: OutcomeUnknownError(f"{key}: lost"))  # it did not arrive


def produced(*values: bytes) -> ProducedBatches:
    return build_produced(
        list(values),
        timestamps=[1_700_000_000_000] * len(values),
        max_message_bytes=1 << 20,
    )


def append(partition: Partition, *values: bytes, timeout_s: float = 20) -> AppendResult:
    return partition.append(produced(*values), acks=Acks.ALL).result(timeout_s)


def append_once(partition: Partition, *, sequence: int) -> AppendResult:
    batch = encode_batch(
        [b"%d" % sequence],
        timestamps=[1],
        producer_id=1 << 33,
        producer_epoch=0,
        base_sequence=sequence,
    )
    produced = check_produced(batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=1))
    return partition.append(produced, acks=Acks.ALL).result(20)


def values_of(partition: Partition) -> list[bytes]:
    found: list[bytes] = []
    offset = partition.log_start_offset
    while offset < partition.high_watermark:
        with closing(partition.read(offset, max_bytes=1 << 20)) as read:
            data = b"".join(piece.read() for piece in read.slices)
        found += [bytes(record.value or b"") for record in iter_records(data, from_offset=offset)]
        offset = read.next_offset
    return found


class Writer:
    """Appends to `flights-0`, wherever it is led, one record after the other."""

    def __init__(self, cluster: BrokerCluster) -> None:
        self._cluster, self._stop = cluster, threading.Event()
        self.acknowledged: list[tuple[int, bytes]] = []
        self._thread = threading.Thread(target=self._write)

    def __enter__(self) -> Writer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _write(self) -> None:
        while not self._stop.is_set():
            value = b"%d" % len(self.acknowledged)
            for broker in self._cluster.running:
                with suppress(NotLeader, LeaderUnknown):
                    result = append(broker.partition("flights", 0), value)
                    self.acknowledged.append((result.base_offset, value))
                    break

    def wait_for(self, more: int) -> None:
        before = len(self.acknowledged)
        until(lambda: len(self.acknowledged) >= before + more)

    def values_in_order(self) -> list[bytes]:
        assert [offset for offset, _ in self.acknowledged] == list(range(len(self.acknowledged)))
        return [value for _, value in self.acknowledged]


def move(cluster: BrokerCluster, topic: str = "flights", number: int = 0) -> Moved:
    """To the next broker in line."""
    old = cluster.leader(topic, number)
    others = sorted(node_id_of(one) for one in cluster.running if one is not old)
    later = [node_id for node_id in others if node_id > node_id_of(old)]
    return cluster_of(old).move(topic, number, node_id=(later or others)[0])


def two_with(cluster: BrokerCluster, *values: bytes) -> tuple[Broker, Broker]:
    """The leader of `flights-0` with these records, and another broker."""
    brokers = cluster.start_all("ab")
    brokers[0].create_topic("flights", partitions=1, config={"retention.ms": -1})
    leader = cluster.leader("flights", 0)
    for value in values:
        append(leader.partition("flights", 0), value)
    (other,) = [one for one in brokers if one is not leader]
    return leader, other


# --- topics ---------------------------------------------------------------------------------------


def test_a_topic_has_leaders_on_all_brokers_and_each_broker_knows_them(
    cluster: BrokerCluster,
) -> None:
    brokers = cluster.start_all("abc")
    brokers[1].create_topic("flights", partitions=12)
    led = [sorted(broker.topic("flights").partitions) for broker in brokers]
    assert sorted(number for numbers in led for number in numbers) == list(range(12))
    assert [len(numbers) for numbers in led] == [4, 4, 4]
    cluster.meet()
    for broker in brokers:
        for number in range(12):
            leader = cluster.leader("flights", number)
            if leader is broker:
                continue
            with pytest.raises(NotLeader) as refusal:
                broker.partition("flights", number)
            assert refusal.value.node_id == node_id_of(leader)
            assert refusal.value.url == cluster_of(leader).members.me.url


def test_a_new_partition_is_assigned_on_one_look_at_its_manifest(cluster: BrokerCluster) -> None:
    first, _ = cluster.start_all("ab")
    calls = cluster.stores["a"].calls
    calls.clear()
    first.create_topic("flights", partitions=1)
    assert [call for call, key in calls if "/0/manifest/" in key][:2] == ["list", "put"]


def test_of_fifty_creations_of_a_name_one_succeeds(cluster: BrokerCluster) -> None:
    brokers = cluster.start_all("abc")
    together = threading.Barrier(50)

    def create(number: int) -> bool:
        together.wait()
        with suppress(TopicExists):
            brokers[number % 3].create_topic("flights", partitions=2)
            return True
        return False

    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(create, range(50))) == 1
    for broker in brokers:
        until(lambda broker=broker: broker.topic("flights").numbers == [0, 1])
    assert len({broker.topic("flights").record.topic_id for broker in brokers}) == 1


def test_of_changes_of_a_topic_at_the_same_time_none_is_lost(cluster: BrokerCluster) -> None:
    brokers = cluster.start_all("abc")
    brokers[0].create_topic("flights", partitions=1)
    changes = [{"retention.ms": 7}, {"segment.bytes": 99_999}, {"flush.ms": 3}]
    with ThreadPoolExecutor(4) as pool:
        altered = [
            pool.submit(broker.alter_topic, "flights", config=config)
            for broker, config in zip(brokers, changes, strict=True)
        ]
        altered.append(pool.submit(brokers[1].alter_topic, "flights", partitions=5))
        for one in altered:
            one.result()
    expected = {"retention.ms": 7, "segment.bytes": 99_999, "flush.ms": 3}
    for broker in brokers:
        until(lambda broker=broker: broker.topic("flights").config.overrides == expected)
        assert broker.topic("flights").numbers == [0, 1, 2, 3, 4]
    for number in range(5):
        assert cluster.partition("flights", number).config.overrides == expected


def test_a_topic_is_deleted_on_all_brokers_with_its_objects(cluster: BrokerCluster) -> None:
    brokers = cluster.start_all("abc")
    brokers[0].create_topic("flights", partitions=3)
    for number in range(3):
        append(cluster.partition("flights", number), b"x")
    for broker in brokers:
        broker.offload("flights", wait_ms=20_000)
    brokers[2].delete_topic("flights")
    for broker in brokers:
        with pytest.raises(UnknownTopic):
            broker.topic("flights")
    until(lambda: not cluster.stores["a"].list("topics/", limit=1))
    brokers[1].create_topic("flights", partitions=1)
    assert values_of(cluster.partition("flights", 0)) == []


def test_a_broker_that_was_down_follows_what_it_missed(cluster: BrokerCluster) -> None:
    a, b = cluster.start_all("ab")
    a.create_topic("old", partitions=2)
    a.create_topic("kept", partitions=2)
    append(cluster.partition("kept", 0), b"x")
    kept = [number for number in range(2) if cluster.leader("kept", number) is b]
    cluster.stop(b)
    a.delete_topic("old")
    a.create_topic("new", partitions=2)
    assert sorted(a.topic("new").partitions) == [0, 1], "none is assigned to a broker that is down"
    b = cluster.start("b")
    assert {one.name for one in b.list_topics()} == {"kept", "new"}
    assert sorted(b.topic("kept").partitions) == kept


def test_a_folder_that_was_alone_brings_its_topics_into_the_cluster(cluster: BrokerCluster) -> None:
    alone = cluster.start_alone("a")
    alone.create_topic("flights", partitions=2)
    append(alone.partition("flights", 0), b"x")
    alone.close()
    a, b = cluster.start_all("ab")
    assert b.topic("flights").numbers == [0, 1]
    assert values_of(a.partition("flights", 0)) == [b"x"]
    assert append(a.partition("flights", 0), b"y").base_offset == 1
    with pytest.raises(NotLeader):
        b.partition("flights", 0)


# --- moving ---------------------------------------------------------------------------------------


def test_a_partition_moves_with_all_of_its_records(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster, *(b"%d" % number for number in range(10)))
    partition = old.partition("flights", 0)
    assert move(cluster).end_offset == 10
    taken = new.partition("flights", 0)
    assert append(taken, b"10").base_offset == 10
    assert values_of(taken) == [b"%d" % number for number in range(11)]
    assert not (old.folder.path / "flights-0").exists()
    for use in (lambda: old.partition("flights", 0), lambda: append(partition, b"late")):
        with pytest.raises(NotLeader):
            use()
    verified = verify_topic(new, "flights", deep=True)
    assert verified.problems == []


def test_under_writers_no_record_is_lost_doubled_or_reordered(cluster: BrokerCluster) -> None:
    cluster.start_all("abc")[0].create_topic("flights", config={"retention.ms": -1})
    with Writer(cluster) as writer:
        for _ in range(12):
            writer.wait_for(5)
            move(cluster)
    assert values_of(cluster.partition("flights", 0)) == writer.values_in_order()


def test_a_rolling_restart_loses_nothing_and_hands_all_over_first(cluster: BrokerCluster) -> None:
    brokers = cluster.start_all("abc")
    brokers[0].create_topic("flights", config={"retention.ms": -1})
    brokers[0].create_topic("others", partitions=7)
    with Writer(cluster) as writer:
        for name in "abc":
            writer.wait_for(5)
            (broker,) = [one for one in cluster.running if one.folder.path.name == name]
            cluster_of(broker).leave(timeout_s=20)
            assert not list(broker.partitions())
            cluster.restart(broker)
        writer.wait_for(5)
    assert values_of(cluster.partition("flights", 0)) == writer.values_in_order()
    assert sum(len(one.topic("others").partitions) for one in cluster.running) == 7


def test_a_producer_is_recognised_by_the_next_leader(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster)
    for sequence in range(3):
        append_once(old.partition("flights", 0), sequence=sequence)
    move(cluster)
    again = append_once(new.partition("flights", 0), sequence=2)
    assert (again.base_offset, again.duplicate) == (2, True)
    assert append_once(new.partition("flights", 0), sequence=3).base_offset == 3


def test_a_trimmed_log_starts_where_it_did(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster, b"0", b"1", b"2")
    old.trim("flights", 0, 2)
    move(cluster)
    assert values_of(new.partition("flights", 0)) == [b"2"]
    assert new.partition("flights", 0).log_start_offset == 2


def test_offsets_of_groups_move_with_their_log(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster, b"0", b"1", b"2")
    old.groups.log.ensure_topic()
    coordinator = cluster.leader(TOPIC, 0)
    coordinator.groups.commit_offsets("etl", [NewOffset("flights", 0, 2)])
    (other,) = [one for one in (old, new) if one is not coordinator]
    move(cluster, TOPIC)
    assert [(one.offset, one.lag) for one in other.groups.group("etl")] == [(2, 1)]
    other.groups.commit_offsets("etl", [NewOffset("flights", 0, 3)])
    with pytest.raises(NotLeader):
        coordinator.groups.commit_offsets("etl", [NewOffset("flights", 0, 1)])
    with pytest.raises(NotLeader):
        coordinator.groups.group("etl")
    move(cluster, TOPIC)
    assert [one.offset for one in coordinator.groups.group("etl")] == [3]


def test_a_coordinator_hears_of_topics_that_others_change(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster, b"0")
    old.groups.log.ensure_topic()
    coordinator = cluster.leader(TOPIC, 0)
    (other,) = [one for one in (old, new) if one is not coordinator]
    other.create_topic("more", partitions=1)
    offsets = [NewOffset("flights", 0, 1), NewOffset("more", 0, 0)]
    coordinator.groups.commit_offsets("etl", offsets)
    other.delete_topic("flights")
    assert [one.topic for one in coordinator.groups.group("etl")] == ["more"]
    other.create_topic("flights", partitions=2)
    assert [one.topic for one in coordinator.groups.group("etl")] == ["more"]
    assert coordinator.topic("flights").numbers == [0, 1]


# --- and what goes wrong meanwhile ----------------------------------------------------------------


def test_a_commit_whose_answer_was_lost_is_found_out(cluster: BrokerCluster) -> None:
    old, new = two_with(cluster, b"0")
    old.offload("flights", wait_ms=20_000)
    cluster.stores[old.folder.path.name].fail(
        "put", FailsAfter(), when=lambda key: "/manifest/" in key
    )
    move(cluster)
    assert values_of(new.partition("flights", 0)) == [b"0"]


@pytest.mark.parametrize(
    "fault",
    [FailsBefore(), LOST, FailsAfter(), None],
    ids=["refused", "lost", "answer lost", "answered"],
)
@pytest.mark.parametrize("read_fails", [False, True])
def test_whatever_becomes_of_the_commit_the_partition_is_in_one_place(
    cluster: BrokerCluster,
    monkeypatch: pytest.MonkeyPatch,
    fault: FailsBefore | FailsAfter | None,
    read_fails: bool,
) -> None:
    """The PUT is refused; it is lost; its answer is; or all that follows it is."""
    old, new = two_with(cluster, b"0")
    store, partition = cluster.stores[old.folder.path.name], old.partition("flights", 0)
    commit, is_committing = hand_over._commit, False

    def commit_with_faults(*given: Any) -> None:
        nonlocal is_committing
        is_committing = True
        if fault is not None:
            store.fail("put", fault, when=_is_manifest)
        if read_fails:
            for call in ("get", "head", "list"):
                store.fail(call, FailsBefore(), times=2, when=_is_manifest)
        commit(*given)

    def is_refused(call: str, key: str) -> None:
        if is_committing and call == "put" and _is_manifest(key):
            with pytest.raises(LeaderUnknown):  # nothing comes after what the commit says
                append(partition, b"late")

    monkeypatch.setattr(hand_over, "_commit", commit_with_faults)
    monkeypatch.setattr(hand_over, "ASK_AGAIN_S", 0.02)
    store.before_call = is_refused
    if isinstance(fault, FailsBefore) and fault is not LOST:
        with pytest.raises(StoreUnavailable):
            move(cluster)
        assert append(partition, b"1").base_offset == 1, "at once: nothing was sent"
        is_committing = False
        store.heal()
        monkeypatch.undo()
    move(cluster)
    there = new.partition("flights", 0)
    append(there, b"2")
    assert values_of(there)[:: len(values_of(there)) - 1] == [b"0", b"2"]
    with pytest.raises(NotLeader):
        append(partition, b"late")


def _is_manifest(key: str) -> bool:
    return "/manifest/" in key


def test_a_commit_that_lands_after_it_was_not_found_moves_the_partition(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That the version is not there decides nothing: it may be on its way."""
    old, new = two_with(cluster, b"0")
    store, partition = cluster.stores[old.folder.path.name], old.partition("flights", 0)
    late, commit = list[tuple[str, bytes]](), hand_over._commit
    put = store.put

    def put_late(key: str, body: bytes, **options: Any) -> Any:
        if not _is_manifest(key):
            return put(key, body, **options)
        late.append((key, body))
        if len(late) <= PUT_ATTEMPTS:
            raise OutcomeUnknownError(f"{key}: lost")
        if len(late) == PUT_ATTEMPTS + 1:
            put(*late[0], if_absent=True)  # now the first of them arrives
        return put(key, body, **options)

    def commit_late(*given: Any) -> None:
        store.put = put_late
        commit(*given)

    monkeypatch.setattr(hand_over, "_commit", commit_late)
    monkeypatch.setattr(hand_over, "ASK_AGAIN_S", 0.02)
    move(cluster)
    assert len(late) > PUT_ATTEMPTS
    there = new.partition("flights", 0)
    assert append(there, b"1").base_offset == 1
    with pytest.raises(NotLeader):
        append(partition, b"late")


def test_while_the_store_is_down_nothing_moves_and_nothing_is_refused(
    cluster: BrokerCluster,
) -> None:
    old, _ = two_with(cluster, b"0")
    cluster.stores[old.folder.path.name].go_down()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand_over, "CATCH_UP_S", 0.1)
        with pytest.raises(Exception, match=r"in time|down"):
            move(cluster)
    assert append(old.partition("flights", 0), b"1").base_offset == 1
    cluster.stores[old.folder.path.name].heal()
    until(lambda: old.bucket is not None and old.bucket.store_status.recheck())
    move(cluster)
    assert values_of(cluster.partition("flights", 0)) == [b"0", b"1"]


def test_a_broker_that_ends_before_the_commit_is_the_leader_again(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = two_with(cluster, b"0")

    def end(*_: object) -> None:
        raise ShuttingDown("the process ends here")

    monkeypatch.setattr(hand_over, "_commit", end)
    with pytest.raises(ShuttingDown):
        move(cluster)
    monkeypatch.undo()
    again = cluster.restart(old)
    assert append(again.partition("flights", 0), b"1").base_offset == 1
    assert values_of(again.partition("flights", 0)) == [b"0", b"1"]
    cluster.meet()
    with pytest.raises(NotLeader):
        other.partition("flights", 0)


def test_a_broker_that_ends_after_the_commit_has_lost_the_partition(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = two_with(cluster, b"0")
    commit = hand_over._commit

    def commit_and_end(*given: object) -> None:
        commit(*given)  # type: ignore[arg-type]
        raise ShuttingDown("the process ends here")

    monkeypatch.setattr(hand_over, "_commit", commit_and_end)
    with pytest.raises(ShuttingDown):
        move(cluster)
    monkeypatch.undo()
    again = cluster.restart(old)
    assert not (again.folder.path / "flights-0").exists(), "the bucket has all of it"
    cluster_of(other).look_after()
    assert values_of(other.partition("flights", 0)) == [b"0"]
    assert append(other.partition("flights", 0), b"1").base_offset == 1


def test_what_was_assigned_to_a_broker_that_died_goes_to_another(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, dying = two_with(cluster, b"0")
    monkeypatch.setattr(News, "name_to_lead", lambda *_, **__: None)
    cluster_of(old).move("flights", 0, node_id=node_id_of(dying))
    monkeypatch.undo()
    cluster.stop(dying)
    third = cluster.start("c")
    until(lambda: _looks(third, old))
    assert values_of(cluster.partition("flights", 0)) == [b"0"]


def _looks(*brokers: Broker) -> bool:
    for broker in brokers:
        cluster_of(broker).members.refresh()
        cluster_of(broker).look_after()
    return any(broker.topic("flights").partitions for broker in brokers)


def test_one_hand_over_of_a_partition_at_a_time(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, other = two_with(cluster, b"0")
    assign, meanwhile = HandOver._assign, list[str]()

    def assign_twice(self: HandOver, *given: object) -> None:
        with pytest.raises(LeaderUnknown, match="already"):
            cluster_of(old).move("flights", 0, node_id=node_id_of(other))
        meanwhile.append("refused")
        assign(self, *given)  # type: ignore[arg-type]

    monkeypatch.setattr(HandOver, "_assign", assign_twice)
    move(cluster)
    assert meanwhile == ["refused"]


# --- balance --------------------------------------------------------------------------------------


def test_a_new_broker_gets_its_share_and_one_that_is_drained_has_nothing(
    cluster: BrokerCluster,
) -> None:
    a, b = cluster.start_all("ab")
    a.create_topic("flights", partitions=9)
    for number in range(9):
        append(cluster.partition("flights", number), b"%d" % number)
    c = cluster.start("c")
    cluster_of(b).moves.run_moves(cluster_of(b).moves.plan_balance())
    assert [len(one.topic("flights").partitions) for one in (a, b, c)] == [3, 3, 3]
    cluster.meet()
    cluster_of(c).moves.run_moves(cluster_of(c).moves.plan_drain(node_id_of(a)))
    assert not a.topic("flights").partitions
    assert not list(a.folder.path.glob("flights-*"))
    for number in range(9):
        assert values_of(cluster.partition("flights", number)) == [b"%d" % number]


def test_a_topic_has_as_many_replicas_as_there_are_brokers_at_most(cluster: BrokerCluster) -> None:
    a, b = cluster.start_all("ab")
    with pytest.raises(InvalidReplicationFactor, match=r"only 2 broker\(s\)"):
        a.create_topic("flights", replication_factor=3)
    with pytest.raises(UnknownTopic):
        b.topic("flights")
    chosen = node_id_of(b)
    a.create_topic("flights", partitions=2, replicas={0: [chosen], 1: [chosen]})
    a.alter_topic("flights", partitions=3, replicas={2: [node_id_of(a)]})
    assert (list(b.topic("flights").partitions), list(a.topic("flights").partitions)) == (
        [0, 1],
        [2],
    )
    with pytest.raises(InvalidReplicaAssignment, match="which have 1 replica"):
        a.alter_topic("flights", partitions=4, replicas={3: [chosen, node_id_of(a)]})
    with pytest.raises(InvalidConfig, match=r"min\.insync\.replicas is 2"):
        a.alter_topic("flights", config={"min.insync.replicas": 2})


def test_a_leader_publishes_the_topic_that_its_creator_did_not_live_to_publish(
    cluster: BrokerCluster,
) -> None:
    creator, leader = cluster.start_all("ab")
    is_topic = lambda key: key.startswith("topics/") and "/topic/" in key  # noqa: E731
    cluster.stores["a"].fail("put", FailsBefore(), times=10**6, when=is_topic)
    creator.create_topic("flights", replicas={0: [node_id_of(leader)]})
    cluster.lose(creator)
    (problem,) = verify_topic(leader, "flights").problems
    assert "would not find the topic" in problem.detail
    tasks, calls = leader.background, cluster.stores["b"].calls
    tasks.bucket_round()
    tasks.copy_round()
    assert not verify_topic(leader, "flights").problems
    before = [key for _, key in calls if is_topic(key)]
    tasks.bucket_round()
    tasks.copy_round()
    assert [key for _, key in calls if is_topic(key)] == before, "it looks once"


def test_an_internal_topic_waits_until_there_are_brokers_for_its_replicas(
    cluster: BrokerCluster,
) -> None:
    a = cluster.start("a", offsets_topic_replication_factor=2)
    with pytest.raises(LeaderUnknown, match="cannot be created yet"):
        a.groups.log.ensure_topic()
