"""Kafka's clients, as they are, against three brokers: they find who leads and who coordinates, and
follow what is handed over.
"""

from __future__ import annotations

import json
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import confluent_kafka
import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kafka import KafkaConsumer, KafkaProducer, TopicPartition

from tests.fakes import real_kafka
from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.kafka_brokers import (
    PARTITIONS,
    Brokers,
    addresses,
    leader_of,
    leads,
    move,
    three_brokers,
    three_processes,
)
from tests.fakes.kafka_caller import KafkaCaller
from tests.fakes.served_broker import Served
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.broker.data_folder.data_folder import new_id
from tierlog.broker.topics.coordinator_log import home_number
from tierlog.client.client import Client
from tierlog.manifest.topic_names import TopicName
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.kafka_messages.messages import (
    AlterPartitionReassignmentsRequest,
    CreatePartitionsRequest,
    CreateTopicsRequest,
    ElectLeadersRequest,
    FetchRequest,
    FindCoordinatorRequest,
    FindCoordinatorResponse,
    MetadataRequest,
    MetadataResponse,
    ProduceRequest,
)


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with three_brokers(tmp_path) as brokers:
        yield brokers


def produce(served: Brokers, count: int, *, topic: str = "flights") -> None:
    producer = KafkaProducer(bootstrap_servers=addresses(served[:1]), acks="all")
    sent = [producer.send(topic, b"%d" % n, partition=n % PARTITIONS) for n in range(count)]
    for one in sent:
        one.get(20)
    producer.close()


def consume(served: Brokers, count: int, *, bootstrap: int = 1) -> list[bytes]:
    consumer = KafkaConsumer(
        bootstrap_servers=addresses(served[bootstrap : bootstrap + 1]),
        consumer_timeout_ms=20_000,
        auto_offset_reset="earliest",
    )
    consumer.assign([TopicPartition("flights", n) for n in range(PARTITIONS)])
    found = [record.value for _, record in zip(range(count), consumer, strict=False)]
    consumer.close()
    return found


def test_every_broker_names_all_brokers_and_the_same_leaders(brokers: Brokers) -> None:
    answers = []
    for one in brokers:
        with KafkaCaller(one.kafka_port) as caller:
            answers.append(caller.ask(MetadataRequest(topics=None), 12))
    ids = [node_id_of(one.broker) for one in brokers]
    for answer in answers:
        assert [(it.node_id, it.port) for it in answer.brokers] == [
            (node_id, one.kafka_port) for node_id, one in zip(ids, brokers, strict=True)
        ]
        assert answer.controller_id == min(ids)
    for one in answers[0].topics[0].partitions:
        assert one.replica_nodes == one.isr_nodes == [one.leader_id]
    assert len({str(answer.topics) for answer in answers}) == 1


@pytest.mark.parametrize("api", ["Produce", "Fetch"])
def test_a_call_on_a_partition_elsewhere_names_its_leader(brokers: Brokers, api: str) -> None:
    leader = leader_of(brokers, "flights", 0)
    other = brokers[(brokers.index(leader) + 1) % 3]
    topic = leader.broker.topic("flights")
    with KafkaCaller(other.kafka_port) as caller:
        if api == "Produce":
            request = ProduceRequest(
                acks=-1,
                timeout_ms=1000,
                topic_data=[
                    ProduceRequest.TopicProduceData(
                        name="flights",
                        partition_data=[ProduceRequest.PartitionProduceData(0, b"")],
                    )
                ],
            )
            answer = caller.ask(request, 11)
            found = answer.responses[0].partition_responses[0]
        else:
            asked = FetchRequest.FetchPartition(partition=0, partition_max_bytes=1 << 20)
            request = FetchRequest(
                max_wait_ms=0,
                topics=[FetchRequest.FetchTopic(topic="flights", partitions=[asked])],
            )
            answer = caller.ask(request, 12)
            found = answer.responses[0].partitions[0]
    assert found.error_code == Code.NOT_LEADER_OR_FOLLOWER
    assert found.current_leader.leader_id == node_id_of(leader.broker)
    assert found.current_leader.leader_epoch == topic.partition(0).offsets().leader_epoch
    if api == "Produce":
        assert [(one.node_id, one.port) for one in answer.node_endpoints] == [
            (node_id_of(leader.broker), leader.kafka_port)
        ]


def test_clients_produce_and_consume_through_any_broker(brokers: Brokers) -> None:
    produce(brokers, 60)
    for bootstrap in range(3):
        found = consume(brokers, 60, bootstrap=bootstrap)
        assert sorted(map(int, found)) == list(range(60))


def test_an_idempotent_producer_and_a_consumer_follow_every_hand_over(brokers: Brokers) -> None:
    """Nothing is lost, doubled or out of order."""
    stop, sent, failed = threading.Event(), Counter[int](), list[object]()

    def delivered(error: object, message: confluent_kafka.Message) -> None:
        if error is not None:
            failed.append(error)
        else:
            sent[message.partition()] += 1

    def run() -> None:
        producer = confluent_kafka.Producer(
            {
                "bootstrap.servers": addresses(brokers[:1]),
                "enable.idempotence": True,
                "linger.ms": 2,
                "topic.metadata.refresh.interval.ms": 1000,
            }
        )
        count = 0
        while not stop.is_set():
            for number in range(PARTITIONS):
                producer.produce("flights", b"%d" % count, partition=number, on_delivery=delivered)
            count += 1
            producer.poll(0.001)
        producer.flush(30)

    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": addresses(brokers[1:2]),
            "group.id": "readers",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition("flights", n, 0) for n in range(PARTITIONS)])
    read: dict[int, list[int]] = {number: [] for number in range(PARTITIONS)}

    def take() -> bool:
        for message in consumer.consume(500, 0.1):
            assert message.error() is None, message.error()
            read[message.partition()].append(int(message.value()))
        return True

    producing = threading.Thread(target=run)
    producing.start()
    try:
        until(lambda: take() and all(read.values()))
        for number in range(PARTITIONS):
            move(brokers, "flights", number)
            before = len(read[number])
            until(lambda n=number, was=before: take() and len(read[n]) > was)
    finally:
        stop.set()
        producing.join(60)
    assert not failed
    until(lambda: take() and all(len(read[n]) == sent[n] for n in read))
    for values in read.values():
        assert values == list(range(len(values)))
    consumer.close()


def test_a_group_goes_on_after_its_coordinator_has_moved(brokers: Brokers) -> None:
    """Its members stay, and so do its offsets."""
    produce(brokers, 60)
    settings = {
        "bootstrap.servers": addresses(brokers[:1]),
        "group.id": "readers",
        "auto.offset.reset": "earliest",
        "enable.auto.commit": False,
        "session.timeout.ms": 10_000,
    }
    consumer = confluent_kafka.Consumer(settings)
    revoked = list[object]()
    consumer.subscribe(["flights"], on_revoke=lambda *_: revoked.append(1))
    read = list[int]()

    def take(count: int) -> None:
        def took() -> bool:
            for message in consumer.consume(10, 0.1):
                assert message.error() is None, message.error()
                read.append(int(message.value()))
            return len(read) >= count

        until(took)

    take(60)
    consumer.commit(asynchronous=False)
    home = home_number("readers", brokers[0].broker.topic(CONSUMER_OFFSETS))
    old = leader_of(brokers, CONSUMER_OFFSETS, home)
    check_coordinates(brokers[0], old)
    new = move(brokers, CONSUMER_OFFSETS, home)
    produce(brokers, 60)
    take(120)
    consumer.commit(asynchronous=False)
    assert Counter(read) == Counter([*range(60), *range(60)])
    assert not revoked
    committed = new.broker.groups.committed("readers")
    assert {place[1]: one.offset for place, one in committed.items()} == dict.fromkeys(range(6), 20)
    check_coordinates(old, new)
    consumer.close()


def check_coordinates(asked: Served, coordinator: Served) -> None:
    """Of `readers`; a broker that does not know it now says that it may be asked again."""
    with KafkaCaller(asked.kafka_port) as caller:

        def answer() -> FindCoordinatorResponse:
            return caller.ask(FindCoordinatorRequest(key="readers", key_type=0), 3)

        until(lambda: answer().error_code != Code.COORDINATOR_NOT_AVAILABLE)
        assert answer().node_id == node_id_of(coordinator.broker)


def test_topics_are_created_through_any_broker(brokers: Brokers) -> None:
    for number, one in enumerate(brokers):
        admin = AdminClient({"bootstrap.servers": addresses([one])})
        admin.create_topics([NewTopic(f"t-{number}", 3, 1)])[f"t-{number}"].result(20)
        assert set(admin.list_topics(timeout=20).brokers) == {0, 1, 2}


# --- Kafka's own command lines --------------------------------------------------------------------

_TOOLS = "org.apache.kafka.tools."
_REASSIGN = f"{_TOOLS}reassign.ReassignPartitionsCommand"


def run_tools(address: str, *calls: tuple[str, str]) -> list[str]:
    """What each prints; the arguments follow the address."""
    lines = [
        "\t".join((name, option, address, *arguments.split()))
        for name, arguments in calls
        for option in ["--broker-list" if name.endswith("Copier") else "--bootstrap-server"]
    ]
    tools = str(real_kafka.HERE / "KafkaTools.java")
    done = real_kafka.RealKafka().run(tools, given="\n".join(lines))
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    for call, answer in zip(calls, answers, strict=True):
        assert answer["code"] == 0, (call, answer["text"])
        assert "Exception" not in answer["text"], (call, answer["text"])
    return [answer["text"] for answer in answers]


@pytest.mark.kafka
def test_kafkas_command_lines_see_and_move_partitions(brokers: Brokers, tmp_path: Path) -> None:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    ids = [node_id_of(one.broker) for one in brokers]
    old = leader_of(brokers, "flights", 0)
    new = brokers[(brokers.index(old) + 1) % 3]
    target = node_id_of(new.broker)
    plan = {"topic": "flights", "partition": 0, "replicas": [target]}
    file = tmp_path / "plan.json"
    file.write_text(json.dumps({"version": 1, "partitions": [plan]}))
    chosen = ":".join(map(str, ids))
    describe = f"{_TOOLS}TopicCommand", "--describe --topic flights"
    text = run_tools(
        addresses(brokers[:1]),
        (f"{_TOOLS}TopicCommand", f"--create --topic here --replica-assignment {chosen[0]}"),
        describe,
        (_REASSIGN, f"--execute --reassignment-json-file {file}"),
        (
            f"{_TOOLS}LeaderElectionCommand",
            "--election-type preferred --topic flights --partition 1",
        ),
        (f"{_TOOLS}LogDirsCommand", f"--describe --broker-list {','.join(map(str, ids))}"),
        (
            f"{_TOOLS}VerifiableProducer",
            "--topic verified --max-messages 300 --acks -1",
        ),
        (
            f"{_TOOLS}TransactionalMessageCopier",
            "--input-topic verified --input-partition 0 --output-topic flights --max-messages 300"
            " --transaction-size 50 --transactional-id copier --consumer-group copiers",
        ),
    )
    assert {f"Leader: {one}" for one in ids} == set(re.findall(r"Leader: \d", text[1]))
    assert "Successfully started partition reassignment for flights-0" in text[2]
    assert "Valid replica already elected" in text[3]
    for one in ids:
        assert f'"broker":{one}' in text[4]
    assert '"consumed":250,"remaining":50' in text[6]
    until(lambda: leads(brokers, brokers[0], "here") == [0] and 0 in leads(brokers, new))
    here = f"{_TOOLS}TopicCommand", "--describe --topic here"
    verified, shown, created = run_tools(
        addresses(brokers[:1]),
        (_REASSIGN, f"--verify --reassignment-json-file {file}"),
        describe,
        here,
    )
    assert re.search(rf"Leader: {ids[0]}\s+Replicas: {ids[0]}\s+Isr: {ids[0]}", created)
    assert "Reassignment of partition flights-0 is completed" in verified
    assert re.search(rf"Partition: 0\s+Leader: {target}\s+Replicas: {target}", shown)


@pytest.mark.kafka
@pytest.mark.soak  # a dozen JVMs
def test_kafkas_reassignment_tool_gives_replicas_to_other_brokers_and_cancels(
    tmp_path: Path,
) -> None:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")

    def plan(name: str, replicas: list[int]) -> str:
        document = {"topic": "spread", "partition": 0, "replicas": replicas}
        (tmp_path / name).write_text(json.dumps({"version": 1, "partitions": [document]}))
        return f"--reassignment-json-file {tmp_path / name}"

    moved, grown = plan("moved", [2, 0]), plan("grown", [1, 2, 0])
    # One that hangs is not taken for dead meanwhile.
    with three_processes(tmp_path, TIERLOG_SESSION_TIMEOUT_MS="120000") as brokers:
        (first, port), (hangs, _), _ = brokers
        address = f"127.0.0.1:{port}"
        with Client(first.url) as client:
            client.create_topic("spread", replicas=[[0, 1]])
            (text,) = run_tools(address, (_REASSIGN, f"--execute {moved}"))
            assert "Successfully started partition reassignment for spread-0" in text
            until(lambda: not client.list_reassignments().reassignments, patience_s=60)
            (verified,) = run_tools(address, (_REASSIGN, f"--verify {moved}"))
            assert "Reassignment of partition spread-0 is completed" in verified
            assert hangs.process is not None
            hangs.process.send_signal(signal.SIGSTOP)  # what it is to copy waits for it
            try:
                _, listed, shown, cancelled = run_tools(
                    address,
                    (_REASSIGN, f"--execute {grown}"),
                    (_REASSIGN, "--list"),
                    (f"{_TOOLS}TopicCommand", "--describe --topic spread"),
                    (_REASSIGN, f"--cancel {grown} --preserve-throttles"),
                )
            finally:
                hangs.process.send_signal(signal.SIGCONT)
            assert "spread-0: replicas: 1,2,0. adding: 1." in listed
            assert re.search(r"Replicas: 1,2,0.*Adding Replicas: 1\s+Removing Replicas:", shown)
            assert "Successfully cancelled partition reassignment for: spread-0" in cancelled
            until(lambda: not client.list_reassignments().reassignments, patience_s=60)
            (one,) = client.describe_topic("spread").partitions
            assert (one.replicas, one.in_sync_replicas) == ((2, 0), (0, 2))


@pytest.mark.parametrize("wanted", [[0, 7], [1, 1], []])
def test_replicas_on_brokers_that_are_not_there_or_named_twice_are_refused(
    brokers: Brokers, wanted: list[int]
) -> None:
    brokers[0].broker.create_topic("spread", replicas={0: [0, 1]})
    new = CreateTopicsRequest.CreatableReplicaAssignment(0, wanted)
    more = CreatePartitionsRequest.CreatePartitionsAssignment(wanted)
    again = AlterPartitionReassignmentsRequest.ReassignablePartition(0, wanted)
    with KafkaCaller(brokers[1].kafka_port) as caller:
        topic = CreateTopicsRequest.CreatableTopic("new", -1, -1, [new], [])
        created = caller.ask(CreateTopicsRequest(topics=[topic], timeout_ms=9_000), 7)
        grown = CreatePartitionsRequest.CreatePartitionsTopic("spread", 2, [more])
        added = caller.ask(CreatePartitionsRequest(topics=[grown], timeout_ms=9_000), 3)
        moved = AlterPartitionReassignmentsRequest.ReassignableTopic("spread", [again])
        ordered = caller.ask(AlterPartitionReassignmentsRequest(topics=[moved]), 0)
    found = [created.topics[0], added.results[0], ordered.responses[0].partitions[0]]
    assert [one.error_code for one in found] == [Code.INVALID_REPLICA_ASSIGNMENT] * 3
    assert {"new"}.isdisjoint(one.name for one in brokers[0].broker.list_topics())


def test_no_election_is_unclean(brokers: Brokers) -> None:
    """Of a partition that is led none is needed; of one that nobody leads it is refused."""
    brokers[0].broker.create_topic("spread", replicas={0: [1, 2]})
    until(lambda: any(leads(brokers, one, "spread") for one in brokers))
    topics, names = cluster_of(brokers[0].broker).topics, count()

    def answer(name: str) -> tuple[int, str]:
        places = [ElectLeadersRequest.TopicPartitions(name, [0])]
        request = ElectLeadersRequest(election_type=1, topic_partitions=places, timeout_ms=9_000)
        with KafkaCaller(brokers[0].kafka_port) as caller:
            (topic,) = caller.ask(request, 2).replica_election_results
        (one,) = topic.partition_result
        return one.error_code, one.error_message or ""

    def is_refused_without_a_leader() -> bool:
        name = f"without-sets-{next(names)}"  # its creator died, until another broker sees it
        named = TopicName(
            topic=name,
            topic_id=new_id(),
            partitions=1,
            config={},
            created_ms=1,
            replication_factor=2,
        )
        topics.follow(topics.names.change_name(name, lambda _: named))
        code, text = answer(name)
        return code == Code.POLICY_VIOLATION and "not in sync" in text

    assert answer("spread")[0] == Code.ELECTION_NOT_NEEDED
    until(is_refused_without_a_leader)


# --- one of them is killed ------------------------------------------------------------------------


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[list[tuple[BrokerProcess, int]]]:
    """And `flights`."""
    with three_processes(tmp_path, TIERLOG_TRANSACTION_STATE_LOG_NUM_PARTITIONS="3") as made:
        admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{made[0][1]}"})
        admin.create_topics([NewTopic("flights", PARTITIONS, 1)])["flights"].result(20)
        yield made


def test_partitions_of_a_killed_broker_have_no_leader_and_its_transactions_end_once_it_is_back(
    processes: list[tuple[BrokerProcess, int]],
) -> None:
    ports = ",".join(f"127.0.0.1:{port}" for _, port in processes)
    producer = confluent_kafka.Producer(
        {"bootstrap.servers": ports, "transactional.id": "copy", "log_level": 0}
    )
    producer.init_transactions(30)
    producer.begin_transaction()
    for number in range(PARTITIONS):
        producer.produce("flights", b"%d" % number, partition=number)
    assert producer.flush(30) == 0
    with KafkaCaller(processes[0][1]) as caller:
        found = caller.ask(FindCoordinatorRequest(key="copy", key_type=1), 3)
    killed = next(number for number in range(3) if number != found.node_id)
    process, _ = processes[killed]
    with KafkaCaller(processes[found.node_id][1]) as caller:

        def shown() -> list[MetadataResponse.MetadataResponsePartition]:
            answer = caller.ask(MetadataRequest(topics=None), 12)
            (topic,) = [one for one in answer.topics if one.name == "flights"]
            return topic.partitions

        def offline() -> list[int]:
            return [one.partition_index for one in shown() if is_offline(one)]

        def is_offline(one: MetadataResponse.MetadataResponsePartition) -> bool:
            where = (one.error_code, one.leader_id, one.replica_nodes, one.offline_replicas)
            return where == (Code.LEADER_NOT_AVAILABLE, -1, [killed], [killed])

        until(lambda: {one.leader_id for one in shown()} == {0, 1, 2})
        led = [one.partition_index for one in shown() if one.leader_id == killed]
        process.kill()
        producer.commit_transaction(30)
        until(lambda: offline() == led)
        elected = caller.ask(ElectLeadersRequest(topic_partitions=None, timeout_ms=1000), 2)
        assert {
            (one.partition_id, one.error_code)
            for topic in elected.replica_election_results
            for one in topic.partition_result
            if topic.topic == "flights"
        } == {(number, Code.PREFERRED_LEADER_NOT_AVAILABLE) for number in led}
    process.start()
    consumer = KafkaConsumer(
        bootstrap_servers=ports.split(","),
        isolation_level="read_committed",
        consumer_timeout_ms=60_000,
        auto_offset_reset="earliest",
    )
    consumer.assign([TopicPartition("flights", n) for n in range(PARTITIONS)])
    read = {record.partition for _, record in zip(range(PARTITIONS), consumer, strict=False)}
    consumer.close()
    assert read == set(range(PARTITIONS))


def test_a_fetch_that_waits_is_told_that_its_partition_has_moved(brokers: Brokers) -> None:
    """In its session too: it is named until the client forgets it."""
    old = leader_of(brokers, "flights", 0)
    mine = [
        number for number in range(PARTITIONS) if number in old.broker.topic("flights").partitions
    ]
    partitions = [
        FetchRequest.FetchPartition(partition=number, partition_max_bytes=1 << 20)
        for number in mine
    ]

    def request(session_id: int, epoch: int, **more: object) -> FetchRequest:
        return FetchRequest(
            max_wait_ms=60_000, min_bytes=1, session_id=session_id, session_epoch=epoch, **more
        )

    with KafkaCaller(old.kafka_port) as caller:
        topics = [FetchRequest.FetchTopic(topic="flights", partitions=partitions)]
        first = request(0, 0, topics=topics)
        first.max_wait_ms = 0
        session_id = caller.ask(first, 12).session_id
        waiting = request(session_id, 1)
        caller.send(waiting, 12)
        until(lambda: old.app.context.waiting.count > 0)
        new = move(brokers, "flights", 0)
        for answer in (caller.answer(waiting, 12), caller.ask(request(session_id, 2), 12)):
            ((told,),) = [topic.partitions for topic in answer.responses]
            assert (told.partition_index, told.error_code) == (0, Code.NOT_LEADER_OR_FOLLOWER)
        assert told.current_leader.leader_id == node_id_of(new.broker)
        forgotten = [FetchRequest.ForgottenTopic(topic="flights", partitions=[0])]
        last = request(session_id, 3, forgotten_topics_data=forgotten)
        last.max_wait_ms = 0
        assert caller.ask(last, 12).responses == []


def test_a_partition_with_replicas_is_led_by_the_preferred_one_once_that_is_asked_for(
    brokers: Brokers,
) -> None:
    ids = [node_id_of(one.broker) for one in brokers]
    brokers[0].broker.create_topic("spread", replicas={0: ids})
    until(lambda: any(leads(brokers, one, "spread") for one in brokers))
    sets = cluster_of(brokers[0].broker).sets
    topic_id = brokers[0].broker.topic("spread").record.topic_id
    until(lambda: sorted(sets.shown(topic_id, 0).in_sync) == ids)
    if leads(brokers, brokers[0], "spread"):  # on a busy machine another may have been faster
        moved = node_id_of(move(brokers, "spread", 0).broker)
        until(lambda: sets.shown(topic_id, 0).leader == moved)
    until(lambda: sorted(sets.shown(topic_id, 0).in_sync) == ids)
    request = ElectLeadersRequest(topic_partitions=None, timeout_ms=20_000)
    with KafkaCaller(brokers[0].kafka_port) as caller:
        found = caller.ask(request, 2).replica_election_results
    (one,) = [it for topic in found if topic.topic == "spread" for it in topic.partition_result]
    assert (one.partition_id, one.error_code) == (0, Code.NONE)
    until(lambda: leads(brokers, brokers[0], "spread") == [0])
