"""A broker that was away has the same files as the others, and Kafka's dump tool nothing to say."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fakes.broker_cluster import BrokerCluster
from tests.fakes.real_kafka import RealKafka, complaints
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import append
from tests.integration.cluster.test_replicas import in_sync, is_led

pytestmark = pytest.mark.kafka


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[BrokerCluster]:
    cluster = BrokerCluster(tmp_path)
    cluster.start_all(("a", "b", "c"), session_timeout_ms=1_000, replica_lag_time_max_ms=1_500)
    yield cluster
    cluster.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """The logs, and the indexes of segments that are not written any more."""
    found = {path.name: path.read_bytes().rstrip(b"\0") for path in folder.glob("*.log")}
    sealed = {name.removesuffix(".log") for name in sorted(found)[:-1]}
    kinds = (folder.glob("*index"), folder.glob("*.snapshot"))
    for path in (one for kind in kinds for one in kind if one.stem in sealed):
        found[path.name] = path.read_bytes()
    return found


def test_a_broker_that_returned_has_the_files_of_the_others_and_kafka_no_complaint(
    cluster: BrokerCluster, kafka: RealKafka
) -> None:
    cluster.running[0].create_topic("flights", partitions=1, replication_factor=3)
    for turn in range(3):
        until(lambda: is_led(cluster, "flights", 0), patience_s=30)
        until(lambda: in_sync(cluster, "flights", 0) == [0, 1, 2], patience_s=30)
        old = cluster.leader("flights", 0)
        append(cluster.partition("flights", 0), b"before %d" % turn)
        cluster.stop(old)
        until(lambda: is_led(cluster, "flights", 0), patience_s=30)
        append(cluster.partition("flights", 0), b"meanwhile %d" % turn)
        cluster.start(old.folder.path.name)
    until(lambda: in_sync(cluster, "flights", 0) == [0, 1, 2], patience_s=30)
    append(cluster.partition("flights", 0), b"after")
    folders = [one.folder.path / "flights-0" for one in cluster.running]
    files = [files_of(folder) for folder in folders]
    assert files[0] == files[1] == files[2]
    for folder in folders:
        assert complaints(kafka.dump(folder / name for name in sorted(files[0]))) == []
