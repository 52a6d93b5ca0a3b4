"""Whole brokers that join: what they register, what they refuse, how they see each other end."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import DirectPeers, cluster_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.faulty_object_store import FaultyObjectStore
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import ConfigurationError

SOON = {"heartbeat_interval_ms": 100, "session_timeout_ms": 1000}
SOON_FLAGS = ("--join", "--heartbeat-interval-ms", "100", "--session-timeout-ms", "1000")


def settings(path: Path, **given: object) -> BrokerSettings:
    whole = {"advertised_url": "http://127.0.0.1:8640", "disk_reserve_bytes": 0, **SOON, **given}
    return BrokerSettings(data_dir=path, **whole)  # type: ignore[arg-type]


def bucket(tmp_path: Path) -> FaultyObjectStore:
    return FaultyObjectStore(open_store((tmp_path / "bucket").as_uri()))


def test_a_broker_registers_where_it_listens_and_says_that_it_stopped(tmp_path: Path) -> None:
    given = {"cluster_join": True, "broker_zone": "eu-1b", **SOON}
    with served_broker(tmp_path / "b", store=bucket(tmp_path), **given) as second:
        others = cluster_of(second.broker).members
        kafka = KafkaSettings()
        with served_broker(tmp_path / "a", store=bucket(tmp_path), kafka=kafka, **given) as first:
            members = cluster_of(first.broker).members
            until(lambda: len(members.members()) == 2)
            other, me = members.members()
            assert (me.url, me.kafka) == (first.server.url, f"127.0.0.1:{first.kafka_port}")
            assert (other.url, other.kafka, other.zone) == (second.server.url, "", "eu-1b")
        others.refresh()
        (_, left) = others.members()
        assert (left.state, left.is_alive) == ("stopped", False)


@pytest.mark.parametrize(
    ("ends", "returns"),
    [
        (lambda process: process.kill(), lambda process: process.start()),
        (
            lambda process: process.process.send_signal(signal.SIGSTOP),
            lambda process: process.process.send_signal(signal.SIGCONT),
        ),
    ],
    ids=["killed", "paused"],
)
def test_a_broker_that_is_gone_is_seen_to_be_and_so_is_its_return(
    tmp_path: Path,
    ends: Callable[[BrokerProcess], None],
    returns: Callable[[BrokerProcess], None],
) -> None:
    (tmp_path / "other").mkdir()
    process = BrokerProcess(
        tmp_path / "other", *SOON_FLAGS, store=(tmp_path / "bucket").as_uri()
    ).start()
    try:
        given = {"cluster_join": True, **SOON}
        with served_broker(tmp_path / "a", store=bucket(tmp_path), **given) as served:
            members = cluster_of(served.broker).members
            until(lambda: members.member(0) is not None)
            seen = members.member(0)
            assert seen is not None
            assert (seen.url, seen.is_alive, members.me.node_id) == (process.url, True, 1)
            ends(process)

            def is_alive() -> bool:
                members.refresh()
                now = members.member(0)
                return now is not None and now.is_alive

            until(lambda: not is_alive())
            returns(process)
            until(is_alive)
            assert members.membership_lost is None
    finally:
        process.stop()


def test_a_data_folder_that_is_started_twice_is_refused(tmp_path: Path) -> None:
    given = settings(tmp_path / "a", cluster_join=True)
    broker = Broker.open(given, store=bucket(tmp_path), peers=DirectPeers())
    try:
        with pytest.raises(ConfigurationError, match="in use by another broker"):
            Broker.open(given, store=bucket(tmp_path), peers=DirectPeers())
    finally:
        broker.close()


def test_without_join_there_is_no_request_no_file_and_no_thread_of_the_cluster(
    tmp_path: Path,
) -> None:
    store = bucket(tmp_path)
    broker = Broker.open(settings(tmp_path / "a"), store=store, peers=DirectPeers())
    try:
        assert broker.cluster is None
        broker.background.copy_round()
        names = {thread.name for thread in threading.enumerate()}
        assert names.isdisjoint({"heartbeat", "members", "cluster"})
    finally:
        broker.close()
    assert not [key for _, key in store.calls if key.startswith("cluster/")]
    assert not (tmp_path / "a" / "tierlog" / "node.json").exists()


def test_a_folder_that_has_joined_is_not_served_without_the_cluster(tmp_path: Path) -> None:
    Broker.open(
        settings(tmp_path / "a", cluster_join=True), store=bucket(tmp_path), peers=DirectPeers()
    ).close()
    with pytest.raises(ConfigurationError, match="start it with --join"):
        Broker.open(settings(tmp_path / "a"), store=bucket(tmp_path), peers=DirectPeers())


def test_a_folder_with_topics_does_not_change_its_cluster(tmp_path: Path) -> None:
    Broker.open(settings(tmp_path / "a"), store=bucket(tmp_path), peers=DirectPeers()).close()
    alone = Broker.open(settings(tmp_path / "b"), store=None)
    alone.create_topic("t")
    alone.close()
    with pytest.raises(ConfigurationError, match="belongs to cluster"):
        Broker.open(
            settings(tmp_path / "b", cluster_join=True), store=bucket(tmp_path), peers=DirectPeers()
        )


@pytest.mark.parametrize(
    ("given", "refusal"),
    [
        ({"allow_single_writer_store": True}, "needs a store with atomic conditional writes"),
        ({"advertised_url": None}, "needs advertised.url"),
        ({"advertised_url": "http://0.0.0.0:8640"}, "cannot reach 'http://0.0.0.0:8640'"),
        ({"advertised_url": "broker-1:8640"}, "cannot reach 'broker-1:8640'"),
        ({"advertised_url": "http://[fe80::1"}, "cannot reach"),
        ({"advertised_kafka": "[::]:9092"}, "needs kafka.advertised"),
        ({"session_timeout_ms": 199}, "below twice heartbeat.interval.ms"),
    ],
)
def test_settings_with_which_no_cluster_works_are_refused(
    tmp_path: Path, given: dict[str, object], refusal: str
) -> None:
    store = bucket(tmp_path)
    with pytest.raises(ConfigurationError, match=refusal):
        Broker.open(
            settings(tmp_path / "a", cluster_join=True, **given), store=store, peers=DirectPeers()
        )
    assert not [key for _, key in store.calls if key.startswith("cluster/")]


def test_a_cluster_needs_a_store(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="--join needs --store"):
        Broker.open(settings(tmp_path / "a", cluster_join=True), store=None)
    assert not (tmp_path / "a").exists()
