"""Who may join, who may take over, and what a cluster costs at rest."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster, cluster_of, node_id_of
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import append
from tierlog.broker.membership import members
from tierlog.hot_tier.log_writer import LogWriter
from tierlog.record_format.errors import ConfigurationError, FencedError


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    yield cluster
    cluster.close()


def test_nobody_joins_before_the_broker_that_was_alone(cluster: BrokerCluster) -> None:
    alone = cluster.start_alone("a")
    alone.create_topic("flights")
    alone.offload("flights", wait_ms=20_000)
    until(lambda: not alone.registry.live()[0].dirty)
    with pytest.raises(ConfigurationError, match="'flights' for example: start that broker's"):
        cluster.start("b")
    alone.close()
    a, b = cluster.start_all("ab")
    assert [one.topic("flights").record.version for one in (a, b)] == [1, 1]


def test_a_take_over_is_announced_and_ends_the_leadership_of_the_other(
    cluster: BrokerCluster,
) -> None:
    a = cluster.start("a", fence_check_ms=200)
    a.create_topic("flights", partitions=3)
    partition = a.partition("flights", 1)
    append(partition, b"x")
    a.offload("flights", wait_ms=20_000)
    until(lambda: a.bucket is not None and a.bucket.silence.all_looked_ms > 0)
    # As an operator does with a copy whose original he believes dead.
    shutil.copytree(a.folder.path, cluster.root / "copy")
    (cluster.root / "copy" / "tierlog" / "node.json").unlink()
    copy = cluster.start_alone("copy", take_over=True)
    until(lambda: partition.leadership_lost is not None)
    with pytest.raises(FencedError):
        append(partition, b"y")
    copy.close()


def test_at_rest_the_number_of_partitions_costs_no_request(cluster: BrokerCluster) -> None:
    a = cluster.start("a", fence_check_ms=200)
    a.create_topic("flights", partitions=40)
    assert a.bucket is not None
    silence, store = a.bucket.silence, cluster.stores["a"]

    def of_partitions_during_a_look() -> list[str]:
        store.calls.clear()
        seen = silence.all_looked_ms
        until(lambda: silence.all_looked_ms > seen)
        return [key for _, key in store.calls if key.startswith("topics/")]

    until(lambda: not a.registry.live()[0].dirty)
    until(lambda: not of_partitions_during_a_look())
    assert [of_partitions_during_a_look() for _ in range(5)] == [[]] * 5


def test_a_look_that_the_store_does_not_answer_excuses_all(cluster: BrokerCluster) -> None:
    a = cluster.start("a", fence_check_ms=200)
    a.create_topic("flights", partitions=2)
    until(lambda: a.bucket is not None and a.bucket.silence.all_looked_ms > 0)
    cluster.stores["a"].go_down()
    until(lambda: a.bucket is not None and a.bucket.silence.reason is not None)
    for _ in range(5):
        append(a.partition("flights", 0), b"x")
    cluster.stores["a"].heal()
    until(lambda: a.bucket is not None and a.bucket.silence.reason is None)
    assert cluster_of(a).find_leader(a.topic("flights").record.topic_id, 0) is not None


def test_a_broker_that_joins_is_known_to_the_others_at_once(cluster: BrokerCluster) -> None:
    a = cluster.start("a")
    cluster.start("b", meets=False)
    until(lambda: len(cluster_of(a).members.members()) == 2, patience_s=5)
    a.create_topic("flights", partitions=2)
    assert sorted(one.topic("flights").numbers for one in cluster.running) == [[0, 1], [0, 1]]


def test_a_broker_whose_disk_hangs_is_dead_to_the_others_until_it_answers(
    cluster: BrokerCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = cluster.start_all("ab")
    a.create_topic("flights", partitions=2)
    partition, answers = cluster.partition("flights", 0), threading.Event()
    hanging = cluster.leader("flights", 0)
    (other,) = [one for one in (a, b) if one is not hanging]
    flush = LogWriter.flush

    def hang(writer: LogWriter) -> int:
        assert answers.wait(60)
        return flush(writer)

    monkeypatch.setattr(LogWriter, "flush", hang)
    monkeypatch.setattr(members, "HANGS_S", 0.2)
    monkeypatch.setattr(members, "LOOK_PACE_MS", 200)

    def is_seen() -> bool:
        seen = cluster_of(other).members.member(node_id_of(hanging))
        return seen is not None and seen.is_alive

    with ThreadPoolExecutor(1) as pool:
        appended = pool.submit(append, partition, b"x")
        until(lambda: appended.done() or not is_seen())
        assert not appended.done()
        answers.set()
        assert appended.result(20).base_offset == 0
    until(is_seen)
    append(partition, b"y")
