"""A folder that our listener wrote, with groups and transactions, is opened by a real Kafka and
goes on there, and then here again.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from tests.fakes import real_kafka
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.group_coordinator.consumer_group import LEFT
from tierlog.record_format.kafka_messages.messages import ConsumerGroupDescribeRequest

pytestmark = pytest.mark.kafka

COMPACT = {"cleanup.policy": "compact"}
TOPICS = {"__consumer_offsets": COMPACT, "__transaction_state": COMPACT}
PARTITIONS = ["flights-0", "flights-1", "copies-0", *(f"{topic}-0" for topic in TOPICS)]
COUNT = 10  # records of a partition at a time
SESSION_MS = 300_000
CONSUMER_TYPE = 1  # of a member that speaks KIP-848


@pytest.fixture
def kafka() -> real_kafka.RealKafka:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    return real_kafka.RealKafka()


@contextmanager
def ours(data: Path) -> Iterator[str]:
    with served_broker(data, kafka=KafkaSettings()) as served:
        yield f"127.0.0.1:{served.kafka_port}"


@contextmanager
def theirs(kafka: real_kafka.RealKafka, data: Path) -> Iterator[str]:
    """Without `tierlog/`, which Kafka takes for a partition's folder."""
    aside = data.with_name("tierlog-aside")
    shutil.move(data / "tierlog", aside)
    with kafka.opened(data) as server:
        yield server
    shutil.move(aside, data / "tierlog")


def produce(server: str, text: str) -> None:
    producer = Producer({"bootstrap.servers": server, "enable.idempotence": True})
    for number in range(COUNT):
        for partition in range(2):
            producer.produce("flights", f"{text} {number}", partition=partition)
    assert producer.flush(60) == 0


def consume(
    server: str, count: int, *, group: str = "g", instance: str = "i", protocol: str = "classic"
) -> list[str]:
    """As a static member, which stays in the group; commits what it has read."""
    session = {"session.timeout.ms": SESSION_MS} if protocol == "classic" else {}
    consumer = Consumer(
        {
            "bootstrap.servers": server,
            "group.id": group,
            "group.instance.id": instance,
            "group.protocol": protocol,
            **session,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    found: list[str] = []
    with closing(consumer):
        consumer.subscribe(["flights"])

        def read() -> bool:
            message = consumer.poll(0.2)
            if message is not None and message.error() is None:
                found.append(message.value().decode())
            return len(found) >= count

        until(read, patience_s=90)
        consumer.commit(asynchronous=False)
    return sorted(found)


def consume_anew(server: str, count: int) -> list[str]:
    """In a group of KIP-848."""
    return consume(server, count, group="new", protocol="consumer")


def away(server: str) -> tuple[int, int, list[int]]:
    """Of that group: its epoch, and the epoch and partitions of the member that will be back."""
    request, found = ConsumerGroupDescribeRequest(["new"]), []
    with KafkaCaller(int(server.rpartition(":")[2])) as caller:

        def ask() -> bool:
            found[:] = caller.ask(request, 1).groups
            return found[0].error_code == 0

        until(ask, patience_s=90)
    (member,) = found[0].members
    assert (member.instance_id, member.member_type) == ("i", CONSUMER_TYPE)
    (places,) = member.assignment.topic_partitions
    return found[0].group_epoch, member.member_epoch, sorted(places.partitions)


def values(*texts: str) -> list[str]:
    return sorted(f"{text} {number}" for text in texts for number in range(COUNT) for _ in range(2))


def described(kafka: real_kafka.RealKafka, server: str, *options: str) -> str:
    tool = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
    done = kafka.run(tool, "--bootstrap-server", server, "--describe", "--group", "g", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def shown(kafka: real_kafka.RealKafka, server: str) -> dict[int, tuple[int, int]]:
    """Committed offset and log end by partition."""
    rows = re.findall(r"^g +flights +(\d) +(\d+) +(\d+)", described(kafka, server), re.MULTILINE)
    return {int(partition): (int(offset), int(end)) for partition, offset, end in rows}


def committed(server: str) -> list[int]:
    """Once Kafka, which has just started, has become the leader of the offsets."""
    found: list[int] = []

    def ask() -> list[int]:
        places = [TopicPartition("flights", number) for number in range(2)]
        with suppress(KafkaException):
            found.extend(one.offset for one in consumer.committed(places, 60))
        return found

    with closing(Consumer({"bootstrap.servers": server, "group.id": "g"})) as consumer:
        until(ask, patience_s=90)
    return found


def transactional(server: str, transactional_id: str) -> Producer:
    """It aborts what a producer with this id has left open."""
    producer = Producer({"bootstrap.servers": server, "transactional.id": transactional_id})
    producer.init_transactions(60)
    return producer


def copy(server: str, value: str) -> None:
    """Committed, behind a transaction that is aborted and one that is left open."""
    aborted = transactional(server, "aborted")
    aborted.begin_transaction()
    aborted.produce("copies", "aborted")
    aborted.flush(60)
    aborted.abort_transaction(60)
    left_open = transactional(server, "open")
    kept = transactional(server, "kept")
    for producer in left_open, kept:
        producer.begin_transaction()
        producer.produce("copies", value if producer is kept else "left open")
        producer.flush(60)
    kept.commit_transaction(60)


def copies(server: str) -> list[str]:
    consumer = Consumer(
        {
            "bootstrap.servers": server,
            "group.id": "none",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    consumer.assign([TopicPartition("copies", 0, 0)])
    found: list[str] = []
    with closing(consumer):
        while (message := consumer.poll(60)) is not None and message.error() is None:
            found.append(message.value().decode())
    return found


def test_groups_transactions_and_records_go_on_in_kafka_and_then_here_again(
    kafka: real_kafka.RealKafka, tmp_path: Path
) -> None:
    data = kafka.prepare(PARTITIONS, tmp_path / "data", topics=TOPICS)
    with ours(data) as server:
        produce(server, "ours")
        assert consume(server, 2 * COUNT) == values("ours")
        assert consume_anew(server, 2 * COUNT) == values("ours")
        left = away(server)
        assert left[1:] == (LEFT, [0, 1])
        produce(server, "unread")
        copy(server, "1, ours")
        assert copies(server) == []
    with theirs(kafka, data) as server:
        assert shown(kafka, server) == {0: (COUNT, 2 * COUNT), 1: (COUNT, 2 * COUNT)}
        assert re.search(r"^g +i-\S+ +i +", described(kafka, server, "--members"), re.MULTILINE)
        assert away(server) == left
        assert consume_anew(server, 2 * COUNT) == values("unread")
        left = away(server)
        assert consume(server, 2 * COUNT) == values("unread")
        produce(server, "theirs")
        assert copies(server) == []
        copy(server, "2, theirs")
        until(lambda: copies(server) == ["1, ours"])
    with ours(data) as server:
        assert committed(server) == [2 * COUNT] * 2
        assert away(server) == left
        assert consume_anew(server, 2 * COUNT) == values("theirs")
        left = away(server)
        assert consume(server, 2 * COUNT) == values("theirs")
        produce(server, "again")
        copy(server, "3, ours")
        until(lambda: copies(server) == ["1, ours", "2, theirs"])
    with theirs(kafka, data) as server:
        assert committed(server) == [3 * COUNT] * 2
        assert away(server) == left
        transactional(server, "open")
        until(lambda: copies(server) == ["1, ours", "2, theirs", "3, ours"])
        everything = values("ours", "unread", "theirs", "again")
        assert consume(server, 8 * COUNT, group="all") == everything
