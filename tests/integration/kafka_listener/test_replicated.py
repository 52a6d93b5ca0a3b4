"""Kafka's clients on a topic with three replicas, while its brokers are killed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import confluent_kafka
from confluent_kafka.admin import AdminClient, NewTopic

from tests.fakes.kafka_brokers import three_processes
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.client.client import Client
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.kafka_messages.messages import (
    DescribeTopicPartitionsRequest,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)

PARTITIONS = 3
ALL = {0, 1, 2}
MORE = b"more"  # not of those that are counted


def shown(port: int) -> list[MetadataResponse.MetadataResponsePartition]:
    with KafkaCaller(port) as caller:
        answer = caller.ask(MetadataRequest(topics=None), 12)
    (topic,) = [one for one in answer.topics if one.name == "flights"]
    return topic.partitions


def produce(ports: str, numbers: Sequence[int]) -> None:
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": ports, "enable.idempotence": True, "log_level": 0}
    )
    for number in numbers:
        producer.produce("flights", b"%d" % number, partition=number % PARTITIONS)
    assert producer.flush(60) == 0


def read_all(ports: str, count: int) -> list[int]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": ports,
            "group.id": "none",  # two brokers are too few for the topic of groups
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("flights", n, 0) for n in range(PARTITIONS)])
    found = list[int]()

    def has_all() -> bool:
        for message in consumer.consume(count, timeout=1):
            assert message.error() is None
            if message.value() != MORE:
                found.append(int(message.value()))
        return len(found) >= count

    until(has_all, patience_s=60)
    consumer.close()
    return found


def produce_once(port: int, number: int) -> int:
    """The code that this broker answers an acks=all Produce to one partition with."""
    data = ProduceRequest.PartitionProduceData(
        index=number, records=bytes(encode_batch([MORE], timestamps=[1]))
    )
    topic = ProduceRequest.TopicProduceData(name="flights", partition_data=[data])
    request = ProduceRequest(acks=-1, timeout_ms=1_000, topic_data=[topic])
    with KafkaCaller(port) as caller:
        (found,) = caller.ask(request, 9).responses[0].partition_responses
    return found.error_code


def test_what_was_acknowledged_outlives_brokers_and_too_few_of_them_refuse_writes(
    tmp_path: Path,
) -> None:
    factor = {"TIERLOG_OFFSETS_TOPIC_REPLICATION_FACTOR": "3"}
    with three_processes(tmp_path, TIERLOG_REPLICA_LAG_TIME_MAX_MS="2000", **factor) as brokers:
        ports = ",".join(f"127.0.0.1:{port}" for _, port in brokers)
        admin = AdminClient({"bootstrap.servers": ports})
        admin.create_topics([NewTopic("flights", PARTITIONS, 3)])["flights"].result(60)
        until(lambda: all(set(one.isr_nodes) == ALL for one in shown(brokers[0][1])), patience_s=60)
        assert all(set(one.replica_nodes) == ALL for one in shown(brokers[0][1]))
        produce(ports, range(30))

        killed = shown(brokers[0][1])[0].leader_id
        brokers[killed][0].kill()
        (first, port), (second, other) = [one for n, one in enumerate(brokers) if n != killed]

        def is_led_by_the_others() -> bool:
            return all(
                one.leader_id in ALL - {killed}
                and set(one.isr_nodes) == ALL - {killed}
                and one.offline_replicas == [killed]
                for one in shown(port)
            )

        until(is_led_by_the_others, patience_s=60)
        produce(ports, range(30, 60))
        with Client(server=first.url) as client:
            (one, *_) = client.describe_topic("flights").partitions
            assert (set(one.replicas), set(one.in_sync_replicas)) == (ALL, ALL - {killed})
            assert client.describe_cluster().under_replicated_partitions >= PARTITIONS
        with KafkaCaller(other) as caller:
            names = [DescribeTopicPartitionsRequest.TopicRequest("flights")]

            def is_told_by_the_other() -> bool:
                (topic,) = caller.ask(DescribeTopicPartitionsRequest(topics=names), 0).topics
                return all(set(one.isr_nodes) == ALL - {killed} for one in topic.partitions)

            until(is_told_by_the_other, patience_s=60)

        second.kill()
        alone = {int(first.root.name)}
        until(lambda: {one.leader_id for one in shown(port)} == alone, patience_s=60)
        until(lambda: produce_once(port, 0) == Code.NOT_ENOUGH_REPLICAS, patience_s=60)
        second.start()
        accepted = (Code.NONE, Code.NOT_LEADER_OR_FOLLOWER)
        until(lambda: produce_once(port, 0) in accepted, patience_s=60)
        found = read_all(ports, 60)
        for number in range(PARTITIONS):
            mine = [one for one in found if one % PARTITIONS == number]
            assert mine == list(range(number, 60, PARTITIONS))
