"""What /metrics says of groups, share groups and transactions, under Kafka's names."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest
from confluent_kafka import Consumer, Producer
from prometheus_client.parser import text_string_to_metric_families

from tests.fakes.served_broker import Served, served_broker
from tests.fakes.share_member import ShareMember
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Served]:
    given = {
        "kafka": KafkaSettings(),
        "group_share_assignment_interval_ms": 0,
        **settings,
    }
    with served_broker(folder, **given) as served:
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as served:
        served.broker.create_topic("t", partitions=1)
        yield served


def value(served: Served, name: str, **labels: str) -> float:
    text = httpx2.get(f"{served.server.url}/metrics").text
    found = [
        sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == f"tierlog_{name}" and labels.items() <= sample.labels.items()
    ]
    assert found, (name, labels)
    return sum(found)


def groups(served: Served, protocol: str, state: str) -> float:
    return value(served, "group_count", protocol=protocol, state=state)


def rebalances(served: Served, protocol: str) -> float:
    return value(served, "group_rebalances_total", protocol=protocol)


def commit(served: Served, group: str) -> None:
    offsets = {"offsets": [{"topic": "t", "partition": 0, "offset": 0}]}
    path = f"{served.server.url}/v1/groups/{group}/offsets"
    assert httpx2.put(path, json=offsets).status_code == 204


def produce(served: Served, count: int, **settings: Any) -> Producer:
    address = {"bootstrap.servers": f"127.0.0.1:{served.kafka_port}", "log_level": 0}
    producer = Producer(address | settings)
    for _ in range(count):
        producer.produce("t", b"x", partition=0)
    assert producer.flush(20) == 0
    return producer


def test_groups_are_counted_by_type_and_state_and_their_rebalances(served: Served) -> None:
    assert groups(served, "classic", "Empty") == 0
    commit(served, "only offsets")
    assert groups(served, "classic", "Empty") == 1
    for protocol in ("classic", "consumer"):
        settings = {
            "bootstrap.servers": f"127.0.0.1:{served.kafka_port}",
            "group.id": protocol,
            "group.protocol": protocol,
        }
        assert rebalances(served, protocol) == 0
        with closing(Consumer(settings)) as consumer:
            consumer.subscribe(["t"])
            until(lambda: consumer.poll(0.1) is None and consumer.assignment())
            until(lambda: groups(served, protocol, "Stable") == 1)  # noqa: B023
            assert rebalances(served, protocol) == 1
    with ShareMember(served.kafka_port, "m", "t").join():
        assert groups(served, "share", "Stable") == 1
        group = httpx2.get(f"{served.server.url}/v1/groups/g").json()
        assert 1 <= rebalances(served, "share") <= group["generation"], "each that was written"


def test_offsets_are_counted_as_they_are_committed_expire_and_are_deleted(tmp_path: Path) -> None:
    with serving(tmp_path / "data", offsets_retention_minutes=1) as served:
        served.broker.create_topic("t", partitions=1)
        for group in ("old", "gone", "kept"):
            commit(served, group)
        commit(served, "kept")
        assert value(served, "num_offsets") == 3
        assert value(served, "offset_commits_total") == 4
        assert httpx2.delete(f"{served.server.url}/v1/groups/gone").status_code == 204
        assert value(served, "offset_deletions_total") == 1
        assert value(served, "num_offsets") == 2
        later_ms = served.broker.clock() + 120_000
        served.broker.groups._clock = lambda: later_ms
        commit(served, "kept")
        served.broker.groups.expire_offsets()
        assert value(served, "offset_expirations_total") == 1
        assert value(served, "num_offsets") == 1
        assert groups(served, "classic", "Empty") == 1


@contextmanager
def given_ten(served: Served) -> Iterator[ShareMember]:
    """A member of a share group that has ten records of twenty."""
    served.broker.create_topic("t", partitions=1)
    served.broker.alter_group("g", {"share.auto.offset.reset": "earliest"})
    produce(served, 20)
    with ShareMember(served.kafka_port, "m", "t").join() as member:
        member.fetch(max_records=10, share_acquire_mode=1)
        yield member


def test_a_share_groups_records_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served, given_ten(served) as member:
        assert value(served, "share_in_flight_message_count") == 10
        member.fetch({member.places[0]: [(0, 3, 1), (4, 4, 3)]}, max_records=0)
        for kind, count in (("Accept", 4), ("Reject", 1), ("Release", 0)):
            name = "share_record_acknowledgements_total"
            assert value(served, name, ack_type=kind) == count
        assert value(served, "share_in_flight_message_count") == 5
        assert value(served, "share_acquisition_lock_timeouts_total") == 0


def test_records_that_a_member_keeps_for_too_long_are_counted(tmp_path: Path) -> None:
    settings = {"group_share_record_lock_duration_ms": 300}
    with serving(tmp_path / "data", **settings) as served, given_ten(served):
        until(lambda: value(served, "share_acquisition_lock_timeouts_total") == 10)


def test_transactions_are_counted_by_state_and_when_they_take_too_long(tmp_path: Path) -> None:
    with serving(tmp_path / "data", transaction_max_timeout_ms=60_000) as served:
        served.broker.create_topic("t", partitions=1)
        settings = {"transactional.id": "slow", "transaction.timeout.ms": 1000}
        slow = Producer(
            {"bootstrap.servers": f"127.0.0.1:{served.kafka_port}", "log_level": 0} | settings
        )
        slow.init_transactions(20)
        slow.begin_transaction()
        assert value(served, "transactional_ids", state="Empty") == 1
        slow.produce("t", b"x", partition=0)
        slow.flush(20)
        assert value(served, "transaction_timeouts_total") == 0
        until(lambda: value(served, "transaction_timeouts_total") == 1)
        until(lambda: value(served, "transactional_ids", state="CompleteAbort") == 1)
        assert value(served, "transactional_ids", state="Ongoing") == 0


def test_a_partition_whose_transaction_is_older_than_any_may_be_is_counted(
    served: Served,
) -> None:
    producer = Producer(
        {
            "bootstrap.servers": f"127.0.0.1:{served.kafka_port}",
            "transactional.id": "late",
            "log_level": 0,
        }
    )
    producer.init_transactions(20)
    producer.begin_transaction()
    producer.produce("t", b"x", partition=0)
    producer.flush(20)
    name = "partitions_with_late_transactions_count"
    assert value(served, name) == 0
    producer.abort_transaction(20)
    producer.begin_transaction()
    producer.produce("t", b"x", partition=0, timestamp=1)
    producer.flush(20)
    assert value(served, name) == 1
    producer.abort_transaction(20)
    until(lambda: value(served, name) == 0)


def test_the_loading_of_coordinators_partitions_is_timed(tmp_path: Path) -> None:
    topic = "__consumer_offsets"
    with serving(tmp_path / "data", offsets_topic_num_partitions=3) as served:
        assert value(served, "coordinator_num_partitions", topic=topic) == 0
        served.broker.create_topic("t", partitions=1)
        commit(served, "g")
    with serving(tmp_path / "data") as served:
        loaded = {"topic": topic, "state": "active"}
        until(lambda: value(served, "coordinator_num_partitions", **loaded) == 3)
        assert value(served, "partition_load_time_seconds_count", topic=topic) == 3
        assert value(served, "coordinator_num_partitions", topic=topic) == 3
