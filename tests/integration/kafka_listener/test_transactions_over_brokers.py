"""Transactions whose coordinator and partitions are on different brokers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import confluent_kafka
import pytest

from tests.fakes.kafka_brokers import (
    PARTITIONS,
    Brokers,
    addresses,
    leader_of,
    move,
    three_brokers,
)
from tests.fakes.waiting import until
from tests.integration.kafka_listener.test_transactions import committed_values, transactional
from tierlog.broker.topics.coordinator_log import home_number
from tierlog.broker.transaction_coordinator.transactions import TOPIC
from tierlog.client.client import Client
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS

COPY = "copy"


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with three_brokers(tmp_path) as brokers:
        yield brokers


def fill(producer: confluent_kafka.Producer, what: bytes) -> None:
    for number in range(PARTITIONS):
        producer.produce("flights", b"%s-%d" % (what, number), partition=number)
    producer.flush(20)


def wanted(*whats: bytes) -> list[bytes]:
    return sorted(b"%s-%d" % (what, number) for what in whats for number in range(PARTITIONS))


def coordinator_number(brokers: Brokers) -> int:
    return home_number(COPY, brokers[0].broker.topic(TOPIC))


def test_what_is_committed_over_three_brokers_is_seen_and_what_is_aborted_is_not(
    brokers: Brokers,
) -> None:
    producer = transactional(brokers[0])
    for number in range(4):
        producer.begin_transaction()
        fill(producer, b"%d" % number)
        (producer.commit_transaction if number % 2 else producer.abort_transaction)(20)
    for one in brokers:
        until(lambda it=one: sorted(committed_values(it, "flights")) == wanted(b"1", b"3"))
    number = coordinator_number(brokers)
    epoch = leader_of(brokers, TOPIC, number).broker.partition(TOPIC, number).offsets()
    for place in range(PARTITIONS):
        partition = leader_of(brokers, "flights", place).broker.partition("flights", place)
        (known,) = partition.producers()
        assert known.coordinator_epoch == epoch.leader_epoch


def test_a_transaction_goes_on_where_its_coordinator_has_moved(brokers: Brokers) -> None:
    producer = transactional(brokers[0])
    producer.begin_transaction()
    fill(producer, b"before")
    move(brokers, TOPIC, coordinator_number(brokers))
    fill(producer, b"after")
    producer.commit_transaction(30)
    until(lambda: sorted(committed_values(brokers[1], "flights")) == wanted(b"before", b"after"))


def test_a_transaction_goes_on_where_its_partitions_have_moved(brokers: Brokers) -> None:
    producer = transactional(brokers[0])
    producer.begin_transaction()
    fill(producer, b"before")
    for number in range(PARTITIONS):
        move(brokers, "flights", number)
    fill(producer, b"after")
    producer.commit_transaction(30)
    until(lambda: sorted(committed_values(brokers[1], "flights")) == wanted(b"before", b"after"))


def test_offsets_are_committed_with_the_transaction_wherever_the_group_is(
    brokers: Brokers,
) -> None:
    producer = transactional(brokers[0])
    place = confluent_kafka.TopicPartition("flights", 0, 7)
    for number in range(3):  # groups of each of its partitions
        group = next(
            f"group-{one}"
            for one in range(100)
            if (number == home_of_group(brokers, f"group-{one}"))
        )
        consumer = confluent_kafka.Consumer(
            {"bootstrap.servers": addresses(brokers[:1]), "group.id": group}
        )
        producer.begin_transaction()
        fill(producer, group.encode())
        metadata = consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction([place], metadata, 20)
        producer.commit_transaction(20)

        def is_committed(consumer: confluent_kafka.Consumer = consumer) -> bool:
            (found,) = consumer.committed([confluent_kafka.TopicPartition("flights", 0)], 20)
            return found.offset == 7

        until(is_committed)
        consumer.close()


def home_of_group(brokers: Brokers, group: str) -> int:
    for one in brokers:
        one.broker.groups.log.ensure_topic()
    return home_number(group, brokers[0].broker.topic(CONSUMER_OFFSETS))


def test_clients_that_add_no_partitions_themselves_have_them_added(brokers: Brokers) -> None:
    """KIP-890: the leaders ask the coordinator."""
    with Client(brokers[0].server.url) as client:
        transaction = client.transaction(COPY)
        with transaction:
            for number in range(PARTITIONS):
                transaction.produce("flights", [b"kept-%d" % number], partition=number)
        with suppress(InterruptedError), transaction:
            for number in range(PARTITIONS):
                transaction.produce("flights", [b"gone-%d" % number], partition=number)
            raise InterruptedError
    until(lambda: sorted(committed_values(brokers[1], "flights")) == wanted(b"kept"))
