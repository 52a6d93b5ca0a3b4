"""Real consumers in groups, as they are."""

import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

import httpx2
import pytest
from confluent_kafka import Consumer
from kafka import KafkaAdminClient, KafkaConsumer, TopicPartition
from kafka.structs import OffsetAndMetadata

from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tests.integration.kafka_listener.test_connection import frame, received
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.client.client import Client
from tierlog.client.group_calls import OffsetCommit
from tierlog.record_format.kafka_messages import codec
from tierlog.record_format.kafka_messages.messages import (
    JoinGroupRequest,
    OffsetCommitRequest,
    OffsetCommitResponse,
)

POLL_MS = 1000  # kafka-python loses an assignment that comes after its poll has returned
SETTINGS = {"group_min_session_timeout_ms": 100}


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with served_broker(tmp_path / "data", kafka=KafkaSettings(), **SETTINGS) as served:
        served.broker.create_topic("flights", partitions=4)
        yield served


@contextmanager
def member(served: Served, group: str = "g", **settings: object) -> Iterator[KafkaConsumer]:
    """A consumer that a thread polls, for its heartbeats and rebalances; `seen` has its records."""
    consumer = KafkaConsumer(
        "flights",
        bootstrap_servers=f"127.0.0.1:{served.kafka_port}",
        group_id=group,
        **{
            "auto_offset_reset": "earliest",
            "enable_auto_commit": False,
            "session_timeout_ms": 6000,
            "heartbeat_interval_ms": 100,
            "metadata_max_age_ms": 1000,
            **settings,
        },
    )
    consumer.seen, stop = [], threading.Event()

    def poll() -> None:
        while not stop.is_set():
            for place, records in consumer.poll(POLL_MS).items():
                consumer.seen += [(place.partition, one.offset, one.value) for one in records]

    thread = threading.Thread(target=poll)
    thread.start()
    try:
        yield consumer
    finally:
        stop.set()
        thread.join()
        consumer.close()


def parts(consumer: KafkaConsumer) -> set[int]:
    return {place.partition for place in consumer.assignment()}


def is_shared(*consumers: KafkaConsumer) -> bool:
    """Whether each partition has one reader, and each consumer a partition."""
    mine = [parts(one) for one in consumers]
    return all(mine) and sorted(number for some in mine for number in some) == [0, 1, 2, 3]


def state(served: Served, group: str = "g") -> str | None:
    found = served.broker.groups.coordinator.describe(group)
    return None if found is None else str(found.state)


def test_consumers_share_the_partitions_and_take_over_from_who_leaves(served: Served) -> None:
    with member(served) as first:
        until(lambda: parts(first) == {0, 1, 2, 3})
        with member(served) as second:
            until(lambda: is_shared(first, second))
            with member(served) as third:
                until(lambda: is_shared(first, second, third))
            until(lambda: is_shared(first, second))
        until(lambda: parts(first) == {0, 1, 2, 3})
    until(lambda: state(served) == "Empty")


READS_FOR_EVER = """
import sys
from kafka import KafkaConsumer
consumer = KafkaConsumer(
    "flights", bootstrap_servers=sys.argv[1], group_id="g", session_timeout_ms=1000,
    heartbeat_interval_ms=300, metadata_max_age_ms=1000,
)
while True:
    consumer.poll(1000)
"""


def test_a_consumer_that_dies_is_replaced_after_its_session(served: Served) -> None:
    address = f"127.0.0.1:{served.kafka_port}"
    with member(served) as living:
        until(lambda: parts(living) == {0, 1, 2, 3})
        other = subprocess.Popen([sys.executable, "-c", READS_FOR_EVER, address])
        try:
            until(lambda: len(parts(living)) == 2)
        finally:
            other.kill()
            other.wait()
        until(lambda: parts(living) == {0, 1, 2, 3})


def test_a_static_member_that_is_restarted_keeps_its_partitions(served: Served) -> None:
    with member(served) as other:
        with member(served, group_instance_id="i") as first:
            until(lambda: is_shared(first, other))
            mine = parts(first)
        generation = served.broker.groups.coordinator.describe("g").generation
        with member(served, group_instance_id="i") as second:
            until(lambda: parts(second) == mine)
            assert served.broker.groups.coordinator.describe("g").generation == generation


def test_commits_come_back_with_their_metadata_and_epoch(served: Served) -> None:
    place = TopicPartition("flights", 1)
    consumer = KafkaConsumer(bootstrap_servers=f"127.0.0.1:{served.kafka_port}", group_id="g")
    consumer.assign([place])
    assert consumer.committed(place) is None
    consumer.commit({place: OffsetAndMetadata(7, "so far", 0)})
    assert consumer.committed(place, metadata=True) == OffsetAndMetadata(7, "so far", 0)
    consumer.close()
    with Client(served.server.url) as client:
        assert client.group("g").offsets[0].offset == 7
        client.commit_offsets("g", [OffsetCommit("flights", 1, 9)])
    consumer = KafkaConsumer(bootstrap_servers=f"127.0.0.1:{served.kafka_port}", group_id="g")
    assert consumer.committed(place) == 9
    consumer.close()


def test_a_group_goes_on_after_a_restart_of_the_broker(tmp_path: Path) -> None:
    with served_broker(tmp_path / "data", kafka=KafkaSettings(), **SETTINGS) as served:
        served.broker.create_topic("flights", partitions=4)
        with member(served, group_instance_id="i") as first:
            until(lambda: parts(first) == {0, 1, 2, 3})
            before = served.broker.groups.coordinator.describe("g")
    with served_broker(tmp_path / "data", kafka=KafkaSettings(), **SETTINGS) as served:
        served.broker.groups.log.load()
        assert served.broker.groups.coordinator.describe("g") == before
        with member(served, group_instance_id="i") as second:
            until(lambda: parts(second) == {0, 1, 2, 3})
            after = served.broker.groups.coordinator.describe("g")
            assert after.generation == before.generation
            assert after.members[0].member_id != before.members[0].member_id


def test_confluents_consumers_share_too(served: Served) -> None:
    """librdkafka: range, then one by one (cooperative)."""
    for strategy in ("range", "cooperative-sticky"):
        consumers = [
            Consumer(
                {
                    "bootstrap.servers": f"127.0.0.1:{served.kafka_port}",
                    "group.id": strategy,
                    "partition.assignment.strategy": strategy,
                    "session.timeout.ms": 6000,
                    "heartbeat.interval.ms": 100,
                }
            )
            for _ in range(2)
        ]

        def shared(members: list[Consumer] = consumers) -> bool:
            for one in members:
                one.poll(0.05)
            mine = [{place.partition for place in one.assignment()} for one in members]
            return sorted(map(len, mine)) == [2, 2] and set.union(*mine) == {0, 1, 2, 3}

        for one in consumers:
            one.subscribe(["flights"])
        until(shared)
        for one in consumers:
            one.close()


def test_an_admin_sees_and_deletes_groups(served: Served) -> None:
    admin = KafkaAdminClient(bootstrap_servers=f"127.0.0.1:{served.kafka_port}")
    place = TopicPartition("flights", 0)
    with member(served) as one:
        until(lambda: parts(one) == {0, 1, 2, 3})
        one.commit({place: OffsetAndMetadata(0, "", -1)})
        (listed,) = admin.list_groups()
        assert (listed["group_id"], listed["group_state"]) == ("g", "Stable")
        found = admin.describe_groups(["g"])["g"]
        assert (found["group_state"], found["protocol_data"], len(found["members"])) == (
            "Stable",
            "range",
            1,
        )
        assert admin.list_group_offsets("g")["g"][place].offset == 0
        assert "NonEmptyGroup" in str(admin.delete_groups(["g"]))
    until(lambda: state(served) == "Empty")
    admin.delete_groups(["g"])
    assert admin.list_groups() == []
    assert served.broker.groups.names() == []
    admin.close()


def test_a_topic_that_is_deleted_meanwhile_is_left_out_of_all_offsets(served: Served) -> None:
    place = TopicPartition("flights", 1)
    groups = served.broker.groups
    with member(served) as one:
        until(lambda: parts(one) == {0, 1, 2, 3})
        one.commit({place: OffsetAndMetadata(0, "", -1)})
    found = groups.committed("g")
    groups.committed = lambda _: {**found, ("deleted", 0): found["flights", 1]}
    admin = KafkaAdminClient(bootstrap_servers=f"127.0.0.1:{served.kafka_port}")
    assert list(admin.list_group_offsets("g")["g"]) == [place]
    admin.close()


def test_a_session_is_as_long_as_the_coordinator_allows(served: Served) -> None:
    for timeout_ms in (99, 1_800_001):
        join = JoinGroupRequest(
            group_id="g",
            session_timeout_ms=timeout_ms,
            rebalance_timeout_ms=1000,
            protocol_type="consumer",
            protocols=[JoinGroupRequest.JoinGroupRequestProtocol(name="range")],
        )
        with KafkaCaller(served.kafka_port) as caller:
            answer = caller.ask(join, 5)
        assert Code(answer.error_code) is Code.INVALID_SESSION_TIMEOUT
        body = {"topics": ["flights"], "session_timeout_ms": timeout_ms}
        response = httpx2.post(f"{served.server.url}/v1/groups/g/members", json=body)
        assert response.status_code == 409
        assert response.json()["reason"] == "INVALID_SESSION_TIMEOUT"
    assert served.broker.groups.names() == []


def test_no_committed_offset_goes_back_by_kill_nine(tmp_path: Path) -> None:
    kafka = f"127.0.0.1:{free_port()}"
    broker = BrokerProcess(tmp_path, "--kafka-listen", kafka).start()
    acknowledged = 0
    try:
        with Client(broker.url) as client:
            client.create_topic("flights")
        for _ in range(3):
            acknowledged = commit_until_killed(broker, kafka, acknowledged)
            broker.start()
            with Client(broker.url) as client:
                (committed,) = client.group("g").offsets
                assert acknowledged <= committed.offset <= acknowledged + 1
    finally:
        broker.kill()
    assert acknowledged > 100


def commit_until_killed(broker: BrokerProcess, kafka: str, acknowledged: int) -> int:
    """One commit after another; the last that was acknowledged."""
    host, _, port = kafka.partition(":")
    topic = OffsetCommitRequest.OffsetCommitRequestTopic
    row = OffsetCommitRequest.OffsetCommitRequestPartition
    killer = threading.Timer(1.0, broker.kill)
    with socket.create_connection((host, int(port)), timeout=20) as sock:
        killer.start()
        with suppress(ConnectionError, AssertionError):  # `received` asserts that it is open
            for offset in count(acknowledged + 1):
                rows = [row(partition_index=0, committed_offset=offset)]
                topics = [topic(name="flights", partitions=rows)]
                sock.sendall(frame(8, 8, OffsetCommitRequest(group_id="g", topics=topics)))
                answer = codec.decode(OffsetCommitResponse, 8, received(sock), position=5)
                if code := answer.topics[0].partitions[0].error_code:
                    pytest.fail(f"refused: {code}")
                acknowledged = offset
    killer.join()
    return acknowledged
