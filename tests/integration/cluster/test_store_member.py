"""The bucket as a replica in sync: what is acknowledged outlives each disk. The brokers are in one
process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of
from tests.fakes.faulty_object_store import FailsBefore
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import append, produced
from tests.integration.cluster.test_replicas import appended, created, in_sync, is_led, values
from tierlog.broker.broker import Broker
from tierlog.broker.cluster.shown_sets import Short
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.replication.in_sync import STORE
from tierlog.broker.replication.write_ahead_chain import ClosedChain, chain_folder
from tierlog.cli.bucket_reader import BucketReader
from tierlog.cold_tier.write_ahead_object import FENCE
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.replica_sets import ReplicaSet
from tierlog.object_store.open import open_store
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS_TOPIC
from tierlog.record_format.errors import NotEnoughReplicas, OutcomeUnknownError, TierlogError
from tierlog.repair.verify import verify_topic

FAST = {"session_timeout_ms": 1_000, "replica_lag_time_max_ms": 1_500, "store_flush_ms": 50}
ALWAYS = {"replication.store": "always"}


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    yield cluster
    cluster.close()


def set_of(cluster: BrokerCluster) -> ReplicaSet:
    broker = cluster.running[0]
    record = broker.topic("flights").record
    assert broker.cluster is not None
    found = broker.cluster.replicas._sets_of(record, 0).load_newest().found
    assert found is not None
    return found


def has_store(cluster: BrokerCluster) -> bool:
    """Whether it is in the set in force, as the leader knows it."""
    led = [one.topic("flights").partitions.get(0) for one in cluster.running]
    terms = [one.term for one in led if one is not None and one.term is not None]
    return any(STORE in term.lead.in_force.in_sync for term in terms)


def is_led_again(cluster: BrokerCluster) -> bool:
    return any(0 in one.topic("flights").partitions for one in cluster.running)


def alone(cluster: BrokerCluster) -> Broker:
    """Who has ten records, which are in the bucket too."""
    broker = cluster.start("a", **FAST)
    created(cluster, factor=1, **ALWAYS)
    until(lambda: has_store(cluster))
    appended(cluster, range(10))
    assert short_of(cluster) == Short()
    return broker


def short_of(cluster: BrokerCluster) -> Short:
    broker = cluster.running[0]
    now = cluster_of(broker)
    now.news.note_own()
    return now.sets.count_short([broker.topic("flights")])


def is_wal(key: str) -> bool:
    return key.startswith("wal/")


def test_a_lost_disk_loses_nothing(cluster: BrokerCluster) -> None:
    lost = alone(cluster)
    for name, count in (("b", 10), ("c", 12)):
        cluster.lose(lost)
        lost = cluster.start(name, **FAST)
        until(lambda: is_led_again(cluster))
        appended(cluster, range(count, count + 2))
        assert values(cluster) == list(range(count + 2))


def test_nothing_is_acknowledged_before_the_bucket_has_joined(cluster: BrokerCluster) -> None:
    broker = cluster.start("a", **FAST)
    cluster.stores["a"].fail("put", FailsBefore(), times=10**6, when=is_wal)
    partition = created(cluster, factor=1, **ALWAYS)
    with pytest.raises(NotEnoughReplicas):
        append(partition, b"0")
    cluster.stores["a"].heal()
    until(lambda: has_store(cluster), patience_s=30)
    append(broker.partition("flights", 0), b"0")


def test_what_the_bucket_does_not_have_is_not_acknowledged(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    store = cluster.stores["a"]
    store.fail("put", FailsBefore(), times=10**6, when=is_wal)
    waiting = broker.partition("flights", 0).append(produced(b"10"), acks=Acks.ALL)

    def is_refused() -> bool:
        try:
            append(broker.partition("flights", 0), b"never")
        except NotEnoughReplicas:
            return True
        except OutcomeUnknownError:
            return False
        raise AssertionError("it is acknowledged")

    until(is_refused, patience_s=30)
    assert broker.partition("flights", 0).high_watermark == 10
    with pytest.raises(OutcomeUnknownError):
        waiting.result(30)
    store.heal()
    until(lambda: broker.partition("flights", 0).high_watermark > 10)


def test_a_restart_goes_on_with_the_bucket_in_the_set(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    before = set_of(cluster)
    cluster.stop(broker)
    cluster.start("a", **FAST)
    until(lambda: is_led_again(cluster))
    after = set_of(cluster)
    assert after.leader_epoch > before.leader_epoch
    assert STORE in after.in_sync
    assert after.wal != before.wal
    appended(cluster, range(10, 15))
    assert values(cluster) == list(range(15))


def test_a_leader_that_was_paused_acknowledges_nothing_once_another_claimed(
    cluster: BrokerCluster,
) -> None:
    old = alone(cluster)
    partition = cluster.partition("flights", 0)
    cluster.lose(old)
    lost = partition.append(produced(b"lost"), acks=Acks.ALL)
    cluster.start("b", **FAST)
    until(lambda: is_led_again(cluster))
    appended(cluster, range(10, 15))
    cluster.find(old)
    with pytest.raises(OutcomeUnknownError):
        lost.result(30)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    assert values(cluster) == list(range(15))


def test_whose_chain_was_fenced_for_nothing_goes_on_with_another(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    chain = set_of(cluster).wal
    assert chain is not None
    ClosedChain(cluster.stores["a"], chain_folder(chain))
    appending = broker.partition("flights", 0).append(produced(b"10"), acks=Acks.ALL)
    appending.result(30)
    assert set_of(cluster).wal != chain
    cluster.lose(broker)
    cluster.start("b", **FAST)
    until(lambda: is_led_again(cluster))
    assert values(cluster) == list(range(11))


def test_the_bucket_stands_in_for_a_broker_that_is_gone(cluster: BrokerCluster) -> None:
    cluster.start_all("ab", **FAST)
    created(cluster, factor=2, **{"replication.store": "stand-in"})
    appended(cluster, range(5))
    assert not has_store(cluster)
    lost = cluster.leader("flights", 0)
    cluster.lose(lost)
    until(lambda: is_led(cluster, "flights", 0), patience_s=30)
    until(lambda: has_store(cluster), patience_s=30)
    appended(cluster, range(5, 10))
    cluster.find(lost)
    until(lambda: is_led(cluster, "flights", 0) and not has_store(cluster), patience_s=30)
    until(lambda: in_sync(cluster, "flights", 0) == [0, 1])
    appended(cluster, range(10, 15))
    assert values(cluster) == list(range(15))


def test_a_topic_that_has_records_gets_the_bucket_as_a_replica_and_loses_it_again(
    cluster: BrokerCluster,
) -> None:
    broker = cluster.start("a", **FAST)
    created(cluster, factor=1)
    appended(cluster, range(10))
    broker.alter_topic("flights", config=ALWAYS)
    until(lambda: has_store(cluster), patience_s=30)
    appended(cluster, range(10, 12))
    broker.alter_topic("flights", config={"replication.store": "none"})
    until(lambda: is_led(cluster, "flights", 0) and not has_store(cluster))
    appended(cluster, range(12, 15))
    assert values(cluster) == list(range(15))


def test_what_was_uploaded_is_not_read_from_the_chain(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    broker.offload("flights", wait_ms=20_000)
    until(lambda: broker.registry.unpublished(broker.topic("flights").record.topic_id) is None)
    appended(cluster, range(10, 12))
    broker.trim("flights", 0, 3)
    cluster.lose(broker)
    broker = cluster.start("b", **FAST)
    until(lambda: is_led_again(cluster))
    partition = cluster.partition("flights", 0)
    assert (partition.first_local_offset, partition.log_start_offset) == (10, 3)
    append(partition, b"12")
    broker.offload("flights", wait_ms=20_000)
    report = verify_topic(broker, "flights", deep=True)
    assert report.ok, report.problems


def test_it_is_known_that_a_leader_still_leads_though_nothing_is_written(
    cluster: BrokerCluster,
) -> None:
    broker = alone(cluster)
    broker.partition("flights", 0).confirm_leads().result(10)
    cluster.lose(broker)
    asked = broker.partition("flights", 0).confirm_leads()
    cluster.start("b", **FAST)
    until(lambda: is_led_again(cluster))
    cluster.find(broker)
    with pytest.raises(TierlogError):
        asked.result(30)


def test_objects_go_once_what_they_have_is_uploaded(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    for turn in range(3):
        appended(cluster, range(turn * 10 + 10, turn * 10 + 20))
    cluster_of(broker).collect_write_ahead()
    assert len(stored(cluster)) > 1
    kept = list(BucketReader(open_store(cluster.bucket)).write_ahead("flights"))
    assert {why for *_, why in kept} >= {"has records up to 40, and segments are offloaded to 0"}
    broker.offload("flights", wait_ms=20_000)
    cluster_of(broker).collect_write_ahead()
    assert len(stored(cluster)) == 1  # the newest shows where the chain ends
    cluster.stop(broker)
    broker = cluster.start("a", **FAST)
    until(lambda: is_led_again(cluster))
    cluster_of(broker).collect_write_ahead()
    assert stored(cluster) == []  # nobody writes that chain any more
    appended(cluster, range(40, 42))
    assert values(cluster) == list(range(42))


def stored(cluster: BrokerCluster) -> list[str]:
    """The write-ahead objects that are no fences."""
    store = open_store(cluster.bucket)
    return [one.key for one in store.list("wal/", limit=1000) if one.size_bytes > len(FENCE)]


def test_what_a_group_committed_outlives_the_disk_too(cluster: BrokerCluster) -> None:
    broker = alone(cluster)
    commit(broker, 3)
    broker.alter_topic(OFFSETS_TOPIC, config=ALWAYS)

    def is_stored() -> bool:
        led = broker.topic(OFFSETS_TOPIC).partitions.get(0)
        term = None if led is None else led.term
        return term is not None and STORE in term.lead.in_force.in_sync

    until(is_stored, patience_s=30)
    commit(broker, 7)
    cluster.lose(broker)
    broker = cluster.start("b", **FAST)
    until(lambda: 0 in broker.topic(OFFSETS_TOPIC).partitions, patience_s=30)
    until(lambda: broker.groups.committed("g"), patience_s=30)
    assert [one.offset for one in broker.groups.committed("g").values()] == [7]


def commit(broker: Broker, offset: int) -> None:
    broker.groups.commit_offsets("g", [NewOffset("flights", 0, offset)])
