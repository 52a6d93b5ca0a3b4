"""Groups, share groups and transactions whose topics have three replicas, while the brokers that
coordinate them are killed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.kafka_brokers import PARTITIONS, three_processes
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.share_member import ShareMember
from tests.fakes.transactional_copier import TransactionalCopier
from tests.fakes.waiting import until
from tests.integration.kafka_listener.test_share_groups_over_brokers import (
    EARLIEST,
    consume_all,
    produce,
)
from tierlog.broker.share_coordinator.share_groups import TOPIC as SHARE_STATES
from tierlog.broker.transaction_coordinator.transactions import TOPIC as TRANSACTIONS
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS
from tierlog.record_format.kafka_messages import messages as m

ALL = {0, 1, 2}
ANSWER_S = 30
ENV = {
    "TIERLOG_DEFAULT_REPLICATION_FACTOR": "3",
    "TIERLOG_REPLICA_LAG_TIME_MAX_MS": "2000",
    "TIERLOG_OFFSETS_TOPIC_NUM_PARTITIONS": "1",
    "TIERLOG_SHARE_COORDINATOR_STATE_TOPIC_NUM_PARTITIONS": "1",
    "TIERLOG_GROUP_SHARE_MIN_RECORD_LOCK_DURATION_MS": "1000",
    "TIERLOG_GROUP_SHARE_RECORD_LOCK_DURATION_MS": "1000",
    "TIERLOG_GROUP_SHARE_DELIVERY_COUNT_LIMIT": "10",
    "TIERLOG_GROUP_SHARE_ASSIGNMENT_INTERVAL_MS": "0",
}


class Cluster:
    def __init__(self, brokers: list[tuple[BrokerProcess, int]]) -> None:
        self._brokers = brokers
        self.ports = [port for _, port in brokers]
        self.bootstrap = ",".join(f"127.0.0.1:{port}" for port in self.ports)
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        admin.create_topics([NewTopic("flights", PARTITIONS, 3)])["flights"].result(60)

    def partitions(self, topic: str) -> list[m.MetadataResponse.MetadataResponsePartition]:
        """What a broker that runs says of them."""
        port = next(port for broker, port in self._brokers if broker.process is not None)
        kind = m.MetadataRequest
        request = kind([kind.MetadataRequestTopic(name=topic)], allow_auto_topic_creation=False)
        with KafkaCaller(port) as caller:
            (found,) = caller.ask(request, 12).topics
        return found.partitions

    def leader(self, topic: str) -> int:
        """Of its first partition, once all replicas of it are in sync."""
        found: list[int] = []

        def is_in_sync() -> bool:
            found[:] = [
                one.leader_id for one in self.partitions(topic)[:1] if set(one.isr_nodes) == ALL
            ]
            return found != [] and found[0] >= 0

        until(is_in_sync, patience_s=90)
        return found[0]

    def kill_leader(self, topic: str) -> None:
        """It is back once another leads."""
        old = self.leader(topic)
        self._brokers[old][0].kill()
        until(lambda: self.partitions(topic)[0].leader_id in ALL - {old}, patience_s=60)
        self._brokers[old][0].start()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with three_processes(tmp_path, **ENV) as brokers:
        yield Cluster(brokers)


def committed(bootstrap: str, group: str) -> list[int]:
    places = [TopicPartition("flights", number) for number in range(PARTITIONS)]
    consumer = confluent_kafka.Consumer({"bootstrap.servers": bootstrap, "group.id": group})
    with closing(consumer):
        return [one.offset for one in consumer.committed(places, ANSWER_S)]


def test_no_committed_offset_goes_back_when_coordinators_are_killed(cluster: Cluster) -> None:
    consumer = confluent_kafka.Consumer(
        {"bootstrap.servers": cluster.bootstrap, "group.id": "g", "enable.auto.commit": False}
    )
    offset = 0
    with closing(consumer):
        for _ in range(2):
            for _ in range(5):
                offset += 1
                places = [TopicPartition("flights", n, offset) for n in range(PARTITIONS)]
                retried(lambda places=places: consumer.commit(offsets=places, asynchronous=False))
            cluster.kill_leader(OFFSETS)
            assert committed(cluster.bootstrap, "g") == [offset] * PARTITIONS


def retried(call: Callable[[], object]) -> None:
    """Until its coordinator, which has just been replaced, answers."""

    def is_answered() -> bool:
        try:
            call()
        except KafkaException as error:
            if not (error.args[0].retriable() or error.args[0].code() in MOVED):
                raise
            return False
        return True

    until(is_answered, patience_s=60)


MOVED = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError._WAIT_COORD,
)


def test_each_record_is_acknowledged_once_when_whoever_keeps_that_is_killed(
    cluster: Cluster,
) -> None:
    """The coordinator of the members, the keeper of the states, a leader of the records."""
    produce(cluster.bootstrap, 100)
    with ShareMember(cluster.ports[0], "configures") as one:
        kind = m.IncrementalAlterConfigsRequest
        rows = [kind.AlterableConfig(name, 0, value) for name, value in EARLIEST.items()]
        answer = one.ask(kind([kind.AlterConfigsResource(32, "g", rows)]))
        assert answer.responses[0].error_code == 0
    topics = (OFFSETS, SHARE_STATES, "flights")
    kills = [lambda topic=topic: cluster.kill_leader(topic) for topic in topics]
    consume_all(cluster.ports, kills, each=100)


# --- transactions ---------------------------------------------------------------------------------


def read_committed(bootstrap: str) -> list[list[int]]:
    """By partition."""
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "none",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
            "enable.partition.eof": True,
            "enable.auto.commit": False,
        }
    )
    found: list[list[int]] = [[] for _ in range(PARTITIONS)]
    ended = set[int]()
    consumer.assign([TopicPartition("flights", number, 0) for number in range(PARTITIONS)])

    def has_all() -> bool:
        message = consumer.poll(0.5)
        if message is None:
            return False
        if message.error() is None:
            found[message.partition()].append(int(message.value()))
        elif message.error().code() == KafkaError._PARTITION_EOF:
            ended.add(message.partition())
        return len(ended) == PARTITIONS

    with closing(consumer):
        until(has_all, patience_s=90)
    return found


def test_no_half_of_a_transaction_is_seen_when_coordinators_are_killed(cluster: Cluster) -> None:
    copier = TransactionalCopier(cluster.ports, "flights", PARTITIONS)
    copier.start()
    try:
        for topic in (TRANSACTIONS, OFFSETS, "flights"):
            copier.wait_for_more()
            cluster.kill_leader(topic)
        copier.wait_for_more()
    finally:
        copier.stop()
    done = copier.committed
    until(lambda: committed(cluster.bootstrap, "copier")[0] == done[-1] + 1)
    assert read_committed(cluster.bootstrap) == [done] * PARTITIONS
