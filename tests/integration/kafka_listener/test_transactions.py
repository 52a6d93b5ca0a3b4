"""Transactions by real clients: what is committed is seen whole, and nothing else."""

import uuid
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import ConsumerGroupTopicPartitions
from confluent_kafka.admin import AdminClient

from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.client.client import Client
from tierlog.client.wire import Limits
from tierlog.record_format.kafka_messages.messages import (
    DescribeTransactionsRequest,
    ListTransactionsRequest,
    WriteTxnMarkersRequest,
)

COPY = "copy"


def address(served: Served) -> str:
    return f"127.0.0.1:{served.kafka_port}"


def transactional(served: Served, transactional_id: str = COPY, **more: object):
    producer = confluent_kafka.Producer(
        {
            "bootstrap.servers": address(served),
            "log_level": 0,
            "transactional.id": transactional_id,
            **{name.replace("_", "."): value for name, value in more.items()},
        }
    )
    producer.init_transactions(20)
    return producer


def committed_values(served: Served, topic: str) -> list[bytes]:
    return values(served, topic, isolation="read_committed")


def values(served: Served, topic: str, *, isolation: str) -> list[bytes]:
    """Of all partitions, in the order in which a client gets them."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address(served),
            "group.id": f"reader-{uuid.uuid4()}",
            "isolation.level": isolation,
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    found, ended = [], set()
    count = served.broker.topic(topic).record.partitions
    consumer.assign([confluent_kafka.TopicPartition(topic, number, 0) for number in range(count)])
    try:
        while len(ended) < count:
            message = consumer.poll(20)
            assert message is not None, "nothing came"
            if message.error():
                assert message.error().code() == confluent_kafka.KafkaError._PARTITION_EOF
                ended.add(message.partition())
            else:
                found.append(message.value())
        return found
    finally:
        consumer.close()


def test_what_is_committed_is_seen_and_what_is_aborted_is_not(served: Served) -> None:
    served.broker.create_topic("flights", partitions=3)
    producer = transactional(served)
    for number in range(6):
        producer.begin_transaction()
        for index in range(10):
            producer.produce("flights", b"%d-%d" % (number, index), partition=index % 3)
        producer.flush(20)
        (producer.commit_transaction if number % 2 else producer.abort_transaction)(20)
    wanted = sorted(b"%d-%d" % (number, index) for number in (1, 3, 5) for index in range(10))
    until(lambda: sorted(committed_values(served, "flights")) == wanted)
    assert len(values(served, "flights", isolation="read_uncommitted")) == 60
    limits = Limits(isolation="read_committed")
    with Client(served.server.url) as client:
        found = [one.value for one in client.consume("flights", limits=limits)]
    assert sorted(found) == wanted


def test_an_open_transaction_hides_what_follows_it(served: Served) -> None:
    served.broker.create_topic("flights")
    first, second = transactional(served, "first"), transactional(served, "second")
    first.begin_transaction()
    first.produce("flights", b"slow")
    first.flush(20)
    second.begin_transaction()
    second.produce("flights", b"fast")
    second.flush(20)
    second.commit_transaction(20)
    assert committed_values(served, "flights") == []
    first.commit_transaction(20)
    until(lambda: committed_values(served, "flights") == [b"slow", b"fast"])


def test_a_producer_with_the_same_id_fences_the_one_before_and_aborts_its_transaction(
    served: Served,
) -> None:
    served.broker.create_topic("flights")
    zombie = transactional(served)
    zombie.begin_transaction()
    zombie.produce("flights", b"of a zombie")
    zombie.flush(20)
    heir = transactional(served)
    heir.begin_transaction()
    heir.produce("flights", b"of its heir")
    heir.commit_transaction(20)
    with pytest.raises(confluent_kafka.KafkaException) as refused:
        zombie.commit_transaction(20)
    assert refused.value.args[0].fatal()
    until(lambda: committed_values(served, "flights") == [b"of its heir"])


def test_a_transaction_that_takes_too_long_is_aborted(served: Served) -> None:
    served.broker.create_topic("flights")
    producer = transactional(served, transaction_timeout_ms=1000)
    producer.begin_transaction()
    producer.produce("flights", b"late")
    producer.flush(20)
    partition = served.broker.topic("flights").partition(0)
    assert partition.offsets().last_stable_offset == 0
    until(lambda: partition.offsets().last_stable_offset == 2)
    assert committed_values(served, "flights") == []
    with pytest.raises(confluent_kafka.KafkaException):
        producer.commit_transaction(20)


def test_offsets_count_with_the_transaction_that_commits_them(served: Served) -> None:
    served.broker.create_topic("in")
    served.broker.create_topic("out")
    admin = AdminClient({"bootstrap.servers": address(served)})
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": address(served),
            "group.id": COPY,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    plain = confluent_kafka.Producer({"bootstrap.servers": address(served)})
    for number in range(10):
        plain.produce("in", b"%d" % number)
    plain.flush(20)
    consumer.subscribe(["in"])
    producer = transactional(served)

    def copy(*, commit: bool) -> None:
        producer.begin_transaction()
        messages = []
        while len(messages) < 5:
            messages += consumer.consume(5 - len(messages), 20)
        for message in messages:
            producer.produce("out", message.value())
        producer.send_offsets_to_transaction(
            consumer.position(consumer.assignment()), consumer.consumer_group_metadata(), 20
        )
        (producer.commit_transaction if commit else producer.abort_transaction)(20)

    def committed() -> int:
        asked = [ConsumerGroupTopicPartitions(COPY, [confluent_kafka.TopicPartition("in", 0)])]
        found = admin.list_consumer_group_offsets(asked, require_stable=True)[COPY].result(20)
        return found.topic_partitions[0].offset

    copy(commit=True)
    until(lambda: committed() == 5)
    copy(commit=False)
    until(lambda: committed() == 5)  # markers follow the decision
    assert committed_values(served, "out") == [b"%d" % number for number in range(5)]
    consumer.close()


def test_a_restart_goes_on_with_transactions_in_progress_and_producers(tmp_path: Path) -> None:
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        served.broker.create_topic("flights")
        producer = transactional(served, "kept")
        producer.begin_transaction()
        producer.produce("flights", b"committed")
        producer.commit_transaction(20)
        open_one = transactional(served, "open", transaction_timeout_ms=60_000)
        open_one.begin_transaction()
        open_one.produce("flights", b"open")
        open_one.flush(20)
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        partition = served.broker.topic("flights").partition(0)
        assert partition.offsets().last_stable_offset == 2
        assert committed_values(served, "flights") == [b"committed"]
        transactional(served, "open")  # aborts what it left
        until(lambda: partition.offsets().last_stable_offset == 4)
        assert committed_values(served, "flights") == [b"committed"]
        found = served.broker.transactions.coordinator.describe("kept")
        assert found is not None
        assert found.state.shown == "CompleteCommit"


def test_a_transaction_that_hangs_is_named_and_an_administrator_ends_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Its coordinator's state is gone, as after a restore of a bucket that lacked it."""
    data = tmp_path / "data"
    with served_broker(data, kafka=KafkaSettings()) as served:
        served.broker.create_topic("flights")
        producer = transactional(served, "lost")
        producer.begin_transaction()
        producer.produce("flights", b"open")
        producer.flush(20)
    with served_broker(data, kafka=KafkaSettings()) as served:
        served.broker.delete_topic("__transaction_state")
    with served_broker(data, kafka=KafkaSettings()) as served:
        partition = served.broker.topic("flights").partition(0)
        served.broker.transactions.run_round()
        assert "a transaction hangs" in capfd.readouterr().out
        (hanging,) = partition.producers()
        marker = WriteTxnMarkersRequest.WritableTxnMarker(
            producer_id=hanging.producer_id,
            producer_epoch=hanging.epoch,
            transaction_result=False,
            topics=[WriteTxnMarkersRequest.WritableTxnMarkerTopic("flights", [0])],
        )
        with KafkaCaller(served.kafka_port) as caller:
            answer = caller.ask(WriteTxnMarkersRequest([marker]), 1)
        assert answer.markers[0].topics[0].partitions[0].error_code == 0
        assert partition.offsets().last_stable_offset == 2
        assert committed_values(served, "flights") == []


def test_transactions_are_listed_by_state_producer_age_and_pattern(served: Served) -> None:
    served.broker.create_topic("flights")
    open_one = transactional(served, "flights-open")
    open_one.begin_transaction()
    open_one.produce("flights", b"x")
    open_one.flush(20)
    transactional(served, "other")

    with KafkaCaller(served.kafka_port) as caller:

        def listed(**filters: object) -> list[str]:
            found = caller.ask(ListTransactionsRequest(**filters), 2)
            assert found.error_code == 0
            return sorted(one.transactional_id for one in found.transaction_states)

        assert listed() == ["flights-open", "other"]
        assert listed(state_filters=["Ongoing"]) == ["flights-open"]
        assert listed(transactional_id_pattern="oth.*|nobody") == ["other"]
        assert listed(transactional_id_pattern="oth") == []
        assert listed(duration_filter=3_600_000) == []
        (found,) = caller.ask(DescribeTransactionsRequest(["flights-open"]), 0).transaction_states
        assert (found.transaction_state, found.topics[0].partitions) == ("Ongoing", [0])
        assert listed(producer_id_filters=[found.producer_id]) == ["flights-open"]
        refused = caller.ask(ListTransactionsRequest(transactional_id_pattern="("), 2)
        assert refused.error_code == Code.INVALID_REGULAR_EXPRESSION
        answer = caller.ask(ListTransactionsRequest(state_filters=["Odd"]), 2)
        assert answer.unknown_state_filters == ["Odd"]
