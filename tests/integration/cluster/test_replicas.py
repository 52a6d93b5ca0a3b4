"""Partitions with several replicas: the same files on each; when the leader is gone, another.

The brokers are in one process: a dead one is one that nobody reaches, and that reaches nobody.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.faulty_object_store import FailsAfter, FaultyObjectStore
from tests.fakes.records import iter_records
from tests.fakes.waiting import PATIENCE_S, until
from tests.integration.cluster.test_moving import append, produced, values_of
from tierlog.broker.broker import Broker
from tierlog.broker.cluster.shown_sets import Short
from tierlog.broker.membership.peers import LeaderReport
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replicas import elections
from tierlog.broker.replicas.elections import LOOK_PACE_MS, TURN_MS
from tierlog.broker.replication.messages import FetchedRows, PartitionFetch, ReplicaFetch
from tierlog.host.clock import wall_clock_ms
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    ConfigurationError,
    NotEnoughReplicas,
    NotReplicated,
    OutcomeUnknownError,
    PeerUnavailable,
)
from tierlog.record_format.produced import build_produced
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

NAMES, SESSION_MS = ("a", "b", "c"), 1_000


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[BrokerCluster]:
    """The parameter is its `replica.lag.time.max.ms`."""
    cluster, lag_ms = BrokerCluster(tmp_path), getattr(request, "param", 1_500)
    cluster.start_all(NAMES, session_timeout_ms=SESSION_MS, replica_lag_time_max_ms=lag_ms)
    yield cluster
    cluster.close()


def log_files(broker: Broker, topic: str, number: int) -> dict[str, bytes]:
    folder = broker.folder.path / f"{topic}-{number}"
    return {path.name: path.read_bytes().rstrip(b"\0") for path in sorted(folder.glob("*.log"))}


def in_sync(cluster: BrokerCluster, topic: str, number: int) -> list[int]:
    leader = cluster.leader(topic, number)
    place = (leader.topic(topic).record.topic_id, number)
    return cluster_of(leader).replicas.shown(place).in_sync


def is_led(cluster: BrokerCluster, topic: str, number: int) -> bool:
    return sum(number in one.topic(topic).partitions for one in cluster.running) == 1


def test_what_is_acknowledged_is_in_the_same_files_on_every_broker(cluster: BrokerCluster) -> None:
    first = cluster.running[0]
    first.create_topic("flights", partitions=3, replication_factor=3)
    until(lambda: all(is_led(cluster, "flights", number) for number in range(3)))
    assert len({node_id_of(cluster.leader("flights", number)) for number in range(3)}) == 3
    for number in range(3):
        partition = cluster.partition("flights", number)
        for value in range(20):
            append(partition, b"%d" % value)
        assert values_of(partition) == [b"%d" % value for value in range(20)]
        files = [log_files(broker, "flights", number) for broker in cluster.running]
        assert files[0] == files[1] == files[2]
        assert in_sync(cluster, "flights", number) == [0, 1, 2]


def test_another_leads_once_the_leader_is_gone_and_has_all_that_was_acknowledged(
    cluster: BrokerCluster,
) -> None:
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3)
    until(lambda: is_led(cluster, "flights", 0))
    old = cluster.leader("flights", 0)
    for value in range(10):
        append(cluster.partition("flights", 0), b"%d" % value)
    epoch = cluster.partition("flights", 0).offsets().leader_epoch
    cluster.lose(old)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    partition = cluster.partition("flights", 0)
    assert partition.offsets().leader_epoch > epoch
    append(partition, b"10")
    assert values_of(partition) == [b"%d" % value for value in range(11)]
    until(lambda: node_id_of(old) not in in_sync(cluster, "flights", 0), patience_s=30)


def test_a_dead_member_that_has_to_stay_is_not_shown_as_in_sync(cluster: BrokerCluster) -> None:
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3)
    until(lambda: is_led(cluster, "flights", 0))
    append(cluster.partition("flights", 0), b"before")
    leader = cluster.leader("flights", 0)
    others = [one for one in cluster.running if one is not leader]
    for one in others:
        cluster.lose(one)
    me, place = node_id_of(leader), (leader.topic("flights").record.topic_id, 0)
    until(lambda: in_sync(cluster, "flights", 0) == [me], patience_s=30)
    count = cluster_of(leader).sets.count_short
    until(lambda: count(leader.topics()) == Short(under_replicated=1, under_min_isr=1))
    shown = cluster_of(leader).replicas.shown(place)
    assert len(shown.replicas) == 3
    term = cluster.partition("flights", 0).term
    assert term is not None
    until(lambda: term.is_short)
    with pytest.raises(NotEnoughReplicas):
        append(cluster.partition("flights", 0), b"refused")


def test_a_broker_that_is_back_follows_and_is_in_sync_again(cluster: BrokerCluster) -> None:
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3)
    until(lambda: is_led(cluster, "flights", 0))
    old = cluster.leader("flights", 0)
    append(cluster.partition("flights", 0), b"before")
    cluster.stop(old)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    append(cluster.partition("flights", 0), b"meanwhile")
    cluster.start(old.folder.path.name)
    until(lambda: in_sync(cluster, "flights", 0) == [0, 1, 2], patience_s=30)
    append(cluster.partition("flights", 0), b"after")
    assert values_of(cluster.partition("flights", 0)) == [b"before", b"meanwhile", b"after"]
    files = [log_files(broker, "flights", 0) for broker in cluster.running]
    assert files[0] == files[1] == files[2]


def test_without_enough_replicas_nothing_is_appended(cluster: BrokerCluster) -> None:
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3)
    until(lambda: is_led(cluster, "flights", 0))
    partition = cluster.partition("flights", 0)
    leader = cluster.leader("flights", 0)
    append(partition, b"first")
    for other in [one for one in cluster.running if one is not leader]:
        cluster.lose(other)

    def is_refused() -> bool:
        end = partition.log_end_offset
        try:
            append(partition, b"refused")
        except NotEnoughReplicas:
            return partition.log_end_offset == end
        except NotReplicated:  # appended before the others were missed
            pass
        return False

    until(is_refused, patience_s=30)
    assert values_of(partition)[:1] == [b"first"]


def created(cluster: BrokerCluster, *, factor: int = 3, **config: int | str) -> Partition:
    cluster.running[0].create_topic(
        "flights", partitions=1, replication_factor=factor, config={"retention.ms": -1, **config}
    )
    until(lambda: is_led(cluster, "flights", 0))
    return cluster.partition("flights", 0)


def appended(cluster: BrokerCluster, values: range) -> None:
    for value in values:
        append(cluster.partition("flights", 0), b"%d" % value)


def values(cluster: BrokerCluster) -> list[int]:
    partition = cluster.partition("flights", 0)
    until(lambda: partition.high_watermark == partition.log_end_offset)
    return [int(value) for value in values_of(partition)]


def test_a_leader_hands_over_without_a_loss(cluster: BrokerCluster) -> None:
    created(cluster)
    for turn in range(6):
        appended(cluster, range(turn * 5, turn * 5 + 5))
        leader = cluster.leader("flights", 0)
        target = (node_id_of(leader) + 1) % 3
        cluster_of(leader).move("flights", 0, node_id=target)
        until(lambda: is_led(cluster, "flights", 0))
        assert node_id_of(cluster.leader("flights", 0)) == target
    assert values(cluster) == list(range(30))
    assert in_sync(cluster, "flights", 0) == [0, 1, 2]


def test_a_leader_that_was_cut_off_follows_and_gives_up_what_was_not_acknowledged(
    cluster: BrokerCluster,
) -> None:
    partition = created(cluster)
    appended(cluster, range(5))
    old = cluster.leader("flights", 0)
    cluster.lose(old)
    lost = partition.append(produced(b"lost"), acks=Acks.ALL)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    appended(cluster, range(5, 10))
    cluster.find(old)
    with pytest.raises(OutcomeUnknownError):  # LeaderChanged, or first NotReplicated
        lost.result(30)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)  # the old one has found out
    until(lambda: in_sync(cluster, "flights", 0) == [0, 1, 2], patience_s=30)
    append(cluster.partition("flights", 0), b"10")
    assert values(cluster) == list(range(11))
    files = [log_files(broker, "flights", 0) for broker in cluster.running]
    assert files[0] == files[1] == files[2]


@pytest.mark.parametrize(("cluster", "min_in_sync"), [(4_000, 1), (4_000, 2)], indirect=["cluster"])
def test_a_leader_whom_no_follower_reaches_gives_way_unless_it_may_go_on_alone(
    cluster: BrokerCluster, min_in_sync: int
) -> None:
    config = {"min.insync.replicas": min_in_sync}
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3, config=config)
    until(lambda: is_led(cluster, "flights", 0))
    leader = cluster.leader("flights", 0)
    append(cluster.partition("flights", 0), b"before")
    cluster.peers.cut.add(f"http://{leader.folder.path.name}:8640")
    if min_in_sync == 1:
        until(lambda: in_sync(cluster, "flights", 0) == [node_id_of(leader)], patience_s=30)
        assert cluster.leader("flights", 0) is leader
    else:
        until(lambda: 0 not in leader.topic("flights").partitions, patience_s=30)
        until(lambda: is_led(cluster, "flights", 0), patience_s=30)
        assert cluster.leader("flights", 0) is not leader
    append(cluster.partition("flights", 0), b"after")
    assert values_of(cluster.partition("flights", 0)) == [b"before", b"after"]


def test_a_leader_from_whom_members_fetch_only_other_partitions_leads_on(
    cluster: BrokerCluster,
) -> None:
    first, *others = cluster.running
    fetch = cluster.peers.fetch_replicas

    def fetch_without_one(url: str, request: ReplicaFetch, **given: Any) -> FetchedRows:
        named = [one for one in request.partitions if one.partition == 0]
        return fetch(url, replace(request, partitions=named), **given)

    cluster.peers.fetch_replicas = fetch_without_one  # type: ignore[method-assign]
    first.create_topic("flights", partitions=2, replicas={0: [0, 1, 2], 1: [0, 1, 2]})
    until(lambda: all(number in first.topic("flights").partitions for number in (0, 1)))
    term = first.partition("flights", 1).term
    assert term is not None
    until(lambda: term.unheard(for_ms=3 * SESSION_MS))
    assert first.partition("flights", 1).term is term
    assert not any(1 in one.topic("flights").partitions for one in others)


def test_whoever_leads_writes_to_the_bucket_and_verify_finds_nothing(
    cluster: BrokerCluster,
) -> None:
    created(cluster)
    for turn in range(3):
        appended(cluster, range(turn * 5, turn * 5 + 5))
        leader = cluster.leader("flights", 0)
        leader.offload("flights", wait_ms=20_000)
        assert cluster.partition("flights", 0).cold_end_offset == turn * 5 + 5
        cluster_of(leader).move("flights", 0, node_id=(node_id_of(leader) + 1) % 3)
        until(lambda: is_led(cluster, "flights", 0))
    leader = cluster.leader("flights", 0)
    leader.offload("flights", wait_ms=20_000)
    assert verify_topic(leader, "flights", deep=True).ok
    assert values(cluster) == list(range(15))


def test_a_trim_is_answered_once_no_member_returns_what_was_trimmed(
    cluster: BrokerCluster,
) -> None:
    created(cluster)
    appended(cluster, range(10))
    old = cluster.leader("flights", 0)
    old.trim("flights", 0, 7)
    cluster.lose(old)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert cluster.partition("flights", 0).log_start_offset == 7


def test_a_deleted_topic_leaves_no_file_on_any_broker(cluster: BrokerCluster) -> None:
    created(cluster)
    appended(cluster, range(3))
    brokers = list(cluster.running)
    cluster.running[1].delete_topic("flights")
    folders = [broker.folder.path for broker in brokers]
    until(lambda: not any(list(one.glob("flights-0*")) for one in folders), patience_s=30)
    assert not any(list((one / "tierlog/replicas").iterdir()) for one in folders)


def test_other_brokers_get_the_replicas_and_the_old_ones_give_them_up(
    cluster: BrokerCluster,
) -> None:
    created(cluster, factor=2)
    appended(cluster, range(5))
    leader = cluster.leader("flights", 0)
    (other,) = [one for one in (0, 1, 2) if one not in in_sync(cluster, "flights", 0)]
    kept = next(one for one in in_sync(cluster, "flights", 0) if one != node_id_of(leader))
    cluster_of(leader).replicas.moves.reassign(cluster.partition("flights", 0), [other, kept])
    until(lambda: not (leader.folder.path / "flights-0").exists(), patience_s=30)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert in_sync(cluster, "flights", 0) == sorted([other, kept])
    appended(cluster, range(5, 8))
    assert values(cluster) == list(range(8))


def test_followers_hear_that_the_last_record_is_committed_without_another_one(
    cluster: BrokerCluster,
) -> None:
    created(cluster)
    leader = cluster_of(cluster.leader("flights", 0))
    followers = [one for one in map(cluster_of, cluster.running) if one is not leader]
    fetch, asked = cluster.peers.fetch_replicas, list[PartitionFetch]()

    def fetch_and_note(url: str, request: ReplicaFetch, **given: Any) -> FetchedRows:
        asked.extend(request.partitions)
        return fetch(url, request, **given)

    cluster.peers.fetch_replicas = fetch_and_note  # type: ignore[method-assign]
    appended(cluster, range(3))
    found = [one for follower in followers for one in follower.replicas.not_led()]
    until(lambda: [one.high_watermark for one in found] == [3, 3])
    until(lambda: asked[-1].high_watermark == 3)
    behind = replace(asked[-1], high_watermark=2)
    (node_id,) = [
        cluster_of(one).members.me.node_id
        for one in cluster.running
        if behind.replica_id.startswith(one.folder.owner)
    ]
    request = ReplicaFetch(node_id=node_id, wait_ms=500, max_bytes=1 << 20, partitions=[behind])
    taken = leader.replicas.take_fetch(request)
    assert taken is not None
    assert taken.answer(is_over=False) == [], "it waits: there may be a record"
    (told,) = taken.answer(is_over=True)
    assert told.answer.high_watermark == 3


def test_at_rest_a_fetch_names_nothing_and_its_replicas_are_in_sync(cluster: BrokerCluster) -> None:
    created(cluster)
    appended(cluster, range(3))
    fetch, asked = cluster.peers.fetch_replicas, list[ReplicaFetch]()

    def fetch_and_note(url: str, request: ReplicaFetch, **given: Any) -> FetchedRows:
        asked.append(request)
        return fetch(url, request, **given)

    cluster.peers.fetch_replicas = fetch_and_note  # type: ignore[method-assign]
    names_nothing = lambda one: one.session_id and not one.partitions  # noqa: E731
    until(lambda: sum(map(bool, map(names_nothing, asked))) >= 4)
    assert in_sync(cluster, "flights", 0) == [0, 1, 2]
    appended(cluster, range(3, 5))
    assert values(cluster) == list(range(5))


def test_a_claim_without_an_answer_is_repeated_and_is_one_claim(cluster: BrokerCluster) -> None:
    created(cluster)
    appended(cluster, range(5))
    old = cluster.leader("flights", 0)
    for broker in cluster.running:
        cluster.stores[broker.folder.path.name].fail(
            "put", FailsAfter(OutcomeUnknownError), times=2, when=lambda key: "/replicas/" in key
        )
    cluster.lose(old)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    appended(cluster, range(5, 8))
    assert values(cluster) == list(range(8))


def test_the_preferred_replica_leads_again_once_it_is_in_sync(cluster: BrokerCluster) -> None:
    created(cluster)
    leader = cluster.leader("flights", 0)
    place = (leader.topic("flights").record.topic_id, 0)
    preferred = cluster_of(leader).replicas.shown(place).replicas[0]
    cluster_of(leader).move("flights", 0, node_id=(preferred + 1) % 3)
    until(lambda: is_led(cluster, "flights", 0))
    other = cluster.leader("flights", 0)
    assert node_id_of(other) != preferred

    def is_preferred() -> bool:
        for broker in cluster.running:  # as each does every `rebalance.interval.ms`
            cluster_of(broker).replicas.prefer()
        return leads(cluster) == preferred

    until(is_preferred, patience_s=30)


def test_a_new_partition_is_claimed_on_one_look_at_its_set(cluster: BrokerCluster) -> None:
    first, creator, _ = cluster.running
    asked = list[str]()

    def note(call: str, key: str) -> None:
        if "/replicas/" in key:
            asked.append(call)

    cluster.stores[first.folder.path.name].before_call = note
    creator.create_topic("flights", partitions=1, replicas={0: [0, 1, 2]})
    until(lambda: is_led(cluster, "flights", 0))
    assert asked[:4] == ["list", "get", "put", "list"]


def test_the_first_replica_of_a_new_partition_leads_it_though_others_look_before_it_is_told(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(elections, "TURN_MS", 0)
    first, creator, other = cluster.running
    tell, led_before = cluster.peers.send_news, list[bool]()

    def tell_late(url: str, *, assigned: Sequence[tuple[str, int]], **news: Any) -> LeaderReport:
        if assigned and not led_before:
            for one in (creator, other):
                cluster_of(one).look_after()
                assert all(map(cluster_of(one).replicas.has, assigned))
            led_before.append(any(0 in one.topic("flights").partitions for one in (creator, other)))
        return tell(url, assigned=assigned, **news)

    cluster.peers.send_news = tell_late  # type: ignore[method-assign]
    creator.create_topic("flights", partitions=1, replicas={0: [0, 1, 2]})
    until(lambda: is_led(cluster, "flights", 0))
    assert led_before == [False]
    assert (leads(cluster), cluster.partition("flights", 0).offsets().leader_epoch) == (0, 1)
    assert cluster.leader("flights", 0) is first


def test_a_hand_over_leaves_its_target_the_time_to_claim_before_the_preferred_replica(
    cluster: BrokerCluster,
) -> None:
    created(cluster)
    first = cluster.leader("flights", 0)
    place = (first.topic("flights").record.topic_id, 0)
    preferred, *others = cluster_of(first).replicas.shown(place).replicas
    if node_id_of(first) == preferred:
        cluster.lose(first)
        until(lambda: is_led(cluster, "flights", 0))
        cluster.find(first)
        until(lambda: is_led(cluster, "flights", 0) and in_sync(cluster, "flights", 0) == [0, 1, 2])
        first = cluster.leader("flights", 0)
    (target,) = [one for one in others if one != node_id_of(first)]
    (waits,) = [one for one in cluster.running if node_id_of(one) == preferred]
    until_it_may_look(cluster.stores[waits.folder.path.name])
    tell = cluster.peers.send_news

    def tell_late(url: str, *, assigned: Sequence[tuple[str, int]], **news: Any) -> LeaderReport:
        if place in assigned:
            with suppress(AssertionError):
                until(lambda: leads(cluster) == preferred, patience_s=TURN_MS / 2000)
        return tell(url, assigned=assigned, **news)

    cluster.peers.send_news = tell_late  # type: ignore[method-assign]
    cluster_of(first).move("flights", 0, node_id=target)
    until(lambda: leads(cluster) is not None)
    assert leads(cluster) == target


def test_reports_are_not_waited_for_from_a_broker_that_did_not_answer_the_last_time(
    cluster: BrokerCluster,
) -> None:
    asking, *others = cluster.running
    hangs, read = others[0], cluster.peers.read_leaders
    is_hanging, gate = threading.Event(), threading.Event()

    def read_late(url: str) -> LeaderReport:
        if cluster.peers.brokers[url] is not hangs:
            return read(url)
        if is_hanging.is_set():
            assert gate.wait(PATIENCE_S)
        raise PeerUnavailable("no answer")

    cluster.peers.read_leaders = read_late  # type: ignore[method-assign]
    cluster_of(asking).news.read_reports()
    is_hanging.set()
    with ThreadPoolExecutor(1) as threads:
        try:
            for _ in range(3):
                threads.submit(cluster_of(asking).news.read_reports).result(PATIENCE_S / 3)
        finally:
            gate.set()


def until_it_may_look(store: FaultyObjectStore) -> None:
    """At the set at once, since it has not for so long."""
    looked_s = [time.monotonic()]

    def note(_call: str, key: str) -> None:
        if "/replicas/" in key:
            looked_s.append(time.monotonic())

    store.before_call = note
    until(lambda: time.monotonic() - looked_s[-1] > LOOK_PACE_MS / 1000)


def leads(cluster: BrokerCluster) -> int | None:
    found = [one for one in cluster.running if 0 in one.topic("flights").partitions]
    return node_id_of(found[0]) if len(found) == 1 else None


def test_a_compacted_topic_keeps_its_newest_values_whoever_leads(cluster: BrokerCluster) -> None:
    created(
        cluster,
        **{
            "cleanup.policy": "compact",
            "min.cleanable.dirty.ratio": 0,
            "segment.bytes": 1 << 14,
            "delete.retention.ms": 0,
        },
    )
    wanted: dict[bytes, bytes] = {}
    for turn in range(6):
        partition = cluster.partition("flights", 0)
        for number in range(40):
            key, value = b"%d" % (number % 7 + turn % 3), b"%d" % turn * 400
            append_keyed(partition, key, value)
            wanted[key] = value
        compact_and_check(cluster, compacts=turn % 3 > 0)
        assert newest_of(partition) == wanted
        if turn % 2:
            hand_on(cluster)


def compact_and_check(cluster: BrokerCluster, *, compacts: bool) -> None:
    leader, partition = cluster.leader("flights", 0), cluster.partition("flights", 0)
    partition.upkeep.roll()
    if compacts:
        leader.background.compactor.run_round()
    leader.offload("flights", wait_ms=20_000)
    until(lambda: partition.is_mirrored)
    verified = verify_topic(leader, "flights", deep=True)
    assert verified.ok, verified.problems


def hand_on(cluster: BrokerCluster) -> None:
    leader = cluster.leader("flights", 0)
    cluster_of(leader).move("flights", 0, node_id=(node_id_of(leader) + 1) % 3)
    until(lambda: is_led(cluster, "flights", 0))
    partition = cluster.partition("flights", 0)
    until(lambda: partition.high_watermark == partition.log_end_offset)


def append_keyed(partition: Partition, key: bytes, value: bytes) -> None:
    batches = build_produced(
        [value], keys=[key], timestamps=[1_700_000_000_000], max_message_bytes=1 << 20
    )
    partition.append(batches, acks=Acks.ALL).result(20)


def newest_of(partition: Partition) -> dict[bytes, bytes]:
    found: dict[bytes, bytes] = {}
    offset = partition.log_start_offset
    while offset < partition.high_watermark:
        with closing(partition.read(offset, max_bytes=1 << 20)) as read:
            data = b"".join(piece.read() for piece in read.slices)
        for record in iter_records(data, from_offset=offset):
            found[bytes(record.key or b"")] = bytes(record.value or b"")
        offset = read.next_offset
    return found


def test_a_restored_folder_serves_what_had_replicas_alone(
    cluster: BrokerCluster, tmp_path: Path
) -> None:
    """It has none of the replicas: beside brokers that return there would be two leaders."""
    cluster.running[0].create_topic("flights", replication_factor=3)
    until(lambda: is_led(cluster, "flights", 0))
    append(cluster.partition("flights", 0), b"x")
    cluster.close()
    options = RestoreOptions(tmp_path / "restored", gap=1000, clock=wall_clock_ms)
    restore(open_store(cluster.bucket), options)
    with pytest.raises(ConfigurationError, match=r"flights.* has replicas .* without --join"):
        cluster.start("restored", meets=False)
    with closing(cluster.start_alone("restored")) as alone:
        assert append(alone.partition("flights", 0), b"y").base_offset >= 1000
