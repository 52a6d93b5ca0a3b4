"""Share groups over three brokers: who is in a group, which records are with whom, and what became
of them may be three brokers' to know; each of them may move, or die.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from tests.fakes.broker_cluster import node_id_of
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.kafka_brokers import (
    PARTITIONS,
    Brokers,
    addresses,
    leader_of,
    leads,
    move,
    three_brokers,
)
from tests.fakes.share_member import Place, ShareMember
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.broker.group_coordinator.group_configs import TOPIC as CONFIGS_TOPIC
from tierlog.broker.share_coordinator.share_groups import TOPIC
from tierlog.broker.topics.coordinator_log import home_number
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import TOPIC as CONSUMER_OFFSETS
from tierlog.record_format.kafka_messages import messages as m
from tierlog.record_format.share_state import ShareKey

EARLIEST = {"share.auto.offset.reset": "earliest"}
EACH = 50  # records in each partition
BROKEN = (OSError, AssertionError)  # a connection that ended, an answer that is an error


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with three_brokers(tmp_path) as brokers:
        brokers[0].broker.alter_group("g", EARLIEST)
        produce(addresses(brokers[:1]))
        yield brokers


def produce(bootstrap: str, each: int = EACH) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 0})
    for number in range(each):
        for partition in range(PARTITIONS):
            producer.produce("flights", b"%d" % number, partition=partition)
        if number % 10 == 9:
            producer.flush(20)
    assert producer.flush(20) == 0


class Member:
    """A member of `g`, as a share consumer is one: it beats at the group's coordinator, and has a
    session with each leader of its partitions. One that fails is begun anew, the others go on.
    `accepted`: what an answer confirmed, by partition; `unsure`: what one may have.
    """

    def __init__(self, ports: list[int], name: str) -> None:
        self._ports, self._name = ports, name
        self._beats: ShareMember | None = None
        self._reads: dict[int, ShareMember] = {}
        self.places: list[Place] = []
        self.accepted: dict[Place, set[int]] = {}
        self.twice: set[int] = set()
        self.unsure: set[tuple[Place, int]] = set()

    def close(self) -> None:
        for port in list(self._reads):
            self._end(port)
        self._end_beats()

    def _end(self, port: int) -> None:
        self._reads.pop(port).caller.close()

    def _end_beats(self) -> None:
        if self._beats is not None:
            self._beats.caller.close()
        self._beats = None

    def _any(self) -> ShareMember:
        for port in self._ports:
            with suppress(OSError):
                return ShareMember(port, self._name, "flights")
        raise OSError("no broker answers")

    def beat(self) -> bool:
        try:
            if self._beats is None:
                with self._any() as one:
                    asked = m.FindCoordinatorRequest(key_type=0, coordinator_keys=["g"])
                    (found,) = one.ask(asked).coordinators
                if found.error_code:
                    return False
                self._beats = ShareMember(found.port, self._name, "flights")
            if self._beats.beat().error_code == 0:
                self.places = self._beats.places
                return True
        except BROKEN:
            pass
        self._end_beats()
        return False

    def poll(self, max_records: int = 30) -> bool:
        """Accept what the last poll gave, and take more. Whether all leaders answered."""
        try:
            leaders = self._leaders()
        except BROKEN:
            return False
        for port in self._reads.keys() - leaders.keys():
            self._end(port)
        answered = [self._poll(port, places, max_records) for port, places in leaders.items()]
        return all(answered)

    def _poll(self, port: int, places: list[Place], max_records: int) -> bool:
        if port in self._reads and sorted(self._reads[port].places) != sorted(places):
            self._end(port)
        try:
            if port not in self._reads:
                self._reads[port] = ShareMember(port, self._name)
                self._reads[port].places = places
            self._accept(self._reads[port], max_records)
        except BROKEN:
            if port in self._reads:
                self._end(port)
            return False
        return True

    def _accept(self, one: ShareMember, max_records: int) -> None:
        given = one.acquired
        self.unsure |= {(place, offset) for place in given for offset in given[place]}
        answer = one.accept_all(max_records=max_records, max_wait_ms=100)
        assert answer.error_code == 0, answer.error_message
        rows = {
            (t.topic_id, row.partition_index): row for t in answer.responses for row in t.partitions
        }
        for place, offsets in given.items():
            if rows[place].acknowledge_error_code == 0:
                done = self.accepted.setdefault(place, set())
                self.twice |= done.intersection(offsets)
                done.update(offsets)
                self.unsure -= {(place, offset) for offset in offsets}

    def _leaders(self) -> dict[int, list[Place]]:
        found: dict[int, list[Place]] = {}
        with self._any() as one:
            answer = one.ask(
                m.MetadataRequest(topics=[m.MetadataRequest.MetadataRequestTopic(name="flights")])
            )
        ports = {node.node_id: node.port for node in answer.brokers}
        for topic in answer.topics:
            for part in topic.partitions:
                place = (topic.topic_id, part.partition_index)
                if part.error_code == 0 and place in self.places:
                    found.setdefault(ports[part.leader_id], []).append(place)
        return found


class Consuming(threading.Thread):
    """A member that goes on until `stop`, whatever fails meanwhile."""

    def __init__(self, ports: list[int], name: str, seed: int) -> None:
        super().__init__(daemon=True)
        self.member = Member(ports, name)
        self._rng, self._ends = random.Random(seed), threading.Event()

    def run(self) -> None:
        while not self._ends.is_set():
            is_beaten = self.member.beat()
            if not (self.member.poll(self._rng.randrange(1, 40)) and is_beaten):
                self._ends.wait(0.1)
        self.member.close()

    def accepted(self) -> list[tuple[Place, int]]:
        return [
            (place, one)
            for place, many in self.member.accepted.copy().items()
            for one in many.copy()
        ]

    def stop(self) -> None:
        self._ends.set()
        self.join(30)


def consume_all(
    ports: list[int], meanwhile: list[Callable[[], object]], *, each: int = EACH, seed: int = 1
) -> None:
    """Two members take all there is; when a part of it is done, the next of `meanwhile` is."""
    consumers = [Consuming(ports, f"m{number}", seed + number) for number in range(2)]
    for one in consumers:
        one.start()

    def accepted() -> list[tuple[Place, int]]:
        return [it for one in consumers for it in one.accepted()]

    def known() -> set[tuple[Place, int]]:
        return {*accepted(), *(it for one in consumers for it in one.member.unsure.copy())}

    total = each * PARTITIONS
    try:
        for number, step in enumerate(meanwhile):
            least = total * (number + 1) // (len(meanwhile) + 2)
            until(lambda least=least: len(accepted()) >= least, patience_s=60)
            step()
        until(lambda: len(known()) == total, patience_s=60)
    except AssertionError:
        raise AssertionError(f"{total - len(known())} are missing") from None
    finally:
        for one in consumers:
            one.stop()
    done = accepted()
    assert len(done) == len(set(done)), "acknowledged by two"
    assert not any(one.member.twice for one in consumers)
    assert len(known()) == total


def state_homes(brokers: Brokers) -> set[int]:
    topic = brokers[0].broker.topic("flights")
    topic_id = parse_topic_id(topic.record.topic_id).bytes
    states = brokers[0].broker.topic(TOPIC)
    return {home_number(ShareKey("g", topic_id, n).home, states) for n in range(PARTITIONS)}


def test_members_take_records_from_every_broker(brokers: Brokers) -> None:
    ports = [one.kafka_port for one in brokers]
    with ExitStack() as stack:
        members = [Member(ports, name) for name in "ab"]
        for one in members:
            stack.callback(one.close)
        until(lambda: all(one.beat() for one in members) and all(one.places for one in members))
        done: dict[Place, set[int]] = {}

        def taken() -> int:
            for one in members:
                one.beat()
                one.poll(20)
            return sum(len(offsets) for one in members for offsets in one.accepted.values())

        until(lambda: taken() == EACH * PARTITIONS, patience_s=60)
        for one in members:
            for place, offsets in one.accepted.items():
                assert not done.setdefault(place, set()) & offsets
                done[place] |= offsets
        assert {place[1]: len(found) for place, found in done.items()} == dict.fromkeys(
            range(PARTITIONS), EACH
        )
    assert len(state_homes(brokers)) > 1
    coordinator = leader_of(
        brokers, CONSUMER_OFFSETS, home_number("g", brokers[0].broker.topic(CONSUMER_OFFSETS))
    )
    shown, failures = coordinator.broker.share_groups.offsets("g")
    assert not failures
    assert [(one.partition, one.lag) for one in shown] == [(n, 0) for n in range(PARTITIONS)]


def test_a_group_goes_on_whatever_moves(brokers: Brokers) -> None:
    """The coordinator of its members, the keeper of its states, the leaders of its records."""
    ports = [one.kafka_port for one in brokers]
    home = home_number("g", brokers[0].broker.groups.log.ensure_topic())

    def move_states() -> None:
        for number in state_homes(brokers):
            move(brokers, TOPIC, number)

    consume_all(
        ports,
        [
            lambda: move(brokers, CONSUMER_OFFSETS, home),
            move_states,
            lambda: [move(brokers, "flights", number) for number in range(PARTITIONS)],
        ],
    )


def test_a_member_is_told_who_leads_instead(brokers: Brokers) -> None:
    old = leader_of(brokers, "flights", 0)
    place = (parse_topic_id(old.broker.topic("flights").record.topic_id).bytes, 0)
    with ExitStack() as stack:
        member = Member([old.kafka_port], "a")
        stack.callback(member.close)
        until(lambda: member.beat() and place in member.places)
        one = stack.enter_context(ShareMember(old.kafka_port, "a"))
        one.places = [place]
        one.fetch(max_wait_ms=20_000)
        taken = one.acquired[place]
        new = move(brokers, "flights", 0)
        epoch = new.broker.partition("flights", 0).offsets().leader_epoch
        elsewhere = (node_id_of(new.broker), epoch)
        fetched = one.fetch({place: [(min(taken), max(taken), 1)]}, max_wait_ms=20_000)
        kind = m.ShareAcknowledgeRequest
        acks = [kind.AcknowledgementBatch(min(taken), max(taken), [1])]
        topics = [kind.AcknowledgeTopic(place[0], [kind.AcknowledgePartition(0, acks)])]
        acked = one.ask(kind("g", "a", one.session_epoch, topics=topics))
    (row,) = fetched.responses[0].partitions
    assert row.acknowledge_error_code == Code.NOT_LEADER_OR_FOLLOWER
    for answer in fetched, acked:
        (row,) = answer.responses[0].partitions
        assert row.error_code == Code.NOT_LEADER_OR_FOLLOWER
        assert (row.current_leader.leader_id, row.current_leader.leader_epoch) == elsewhere
        (node,) = answer.node_endpoints
        assert (node.node_id, node.host, node.port) == (elsewhere[0], "127.0.0.1", new.kafka_port)


def test_a_groups_configuration_is_known_to_every_broker(brokers: Brokers) -> None:
    leader = leader_of(brokers, CONFIGS_TOPIC, 0)
    other = brokers[(brokers.index(leader) + 1) % 3]
    until(lambda: leads(brokers, leader, CONFIGS_TOPIC) == [0])
    other.broker.alter_group("jobs", {"share.delivery.count.limit": 7})
    for one in brokers:
        limits = one.broker.group_configs.share_limits
        until(lambda limits=limits: limits("jobs").count_limit == 7)
    new = move(brokers, CONFIGS_TOPIC, 0)
    new.broker.alter_group("jobs", {"share.delivery.count.limit": None})
    for one in brokers:
        configs = one.broker.group_configs
        until(lambda configs=configs: configs.overrides("jobs") == {})
        assert configs.overrides("g") == EARLIEST


def test_what_a_group_did_is_shown_altered_and_deleted_through_its_coordinator(
    brokers: Brokers,
) -> None:
    home = home_number("g", brokers[0].broker.groups.log.ensure_topic())
    coordinator = leader_of(brokers, CONSUMER_OFFSETS, home)
    other = brokers[(brokers.index(coordinator) + 1) % 3]
    alter = m.AlterShareGroupOffsetsRequest
    rows = [alter.AlterShareGroupOffsetsRequestPartition(n, 10 + n) for n in range(PARTITIONS)]
    topics = [alter.AlterShareGroupOffsetsRequestTopic("flights", rows)]
    kind = m.DescribeShareGroupOffsetsRequest
    describe = kind([kind.DescribeShareGroupOffsetsRequestGroup("g", None)])
    with ShareMember(other.kafka_port, "looks") as one:
        assert one.ask(alter("g", topics)).error_code == Code.NOT_COORDINATOR
        assert one.ask(describe).groups[0].error_code == Code.NOT_COORDINATOR
    with ShareMember(coordinator.kafka_port, "looks") as one:
        assert one.ask(alter("g", topics)).error_code == 0
        (shown,) = one.ask(describe).groups[0].topics
        assert [(it.partition_index, it.start_offset) for it in shown.partitions] == [
            (n, 10 + n) for n in range(PARTITIONS)
        ]
        assert one.ask(m.DeleteGroupsRequest(["g"])).results[0].error_code == 0
        assert one.ask(describe).groups[0].topics == []
    assert not any(it.broker.share_groups.coordinator.summaries() for it in brokers)


# --- one of them is killed ------------------------------------------------------------------------


def test_each_record_is_acknowledged_once_though_brokers_are_killed(tmp_path: Path) -> None:
    seed = random.randrange(10**6)
    print("seed", seed)
    ports = [free_port() for _ in range(3)]
    processes = []
    for number, port in enumerate(ports):
        root = tmp_path / str(number)
        root.mkdir()
        flags = ("--join", "--node-id", str(number), "--kafka-listen", f"127.0.0.1:{port}")
        env = {
            "TIERLOG_HEARTBEAT_INTERVAL_MS": "200",
            "TIERLOG_SESSION_TIMEOUT_MS": "3000",
            "TIERLOG_OFFSETS_TOPIC_NUM_PARTITIONS": "3",
            "TIERLOG_SHARE_COORDINATOR_STATE_TOPIC_NUM_PARTITIONS": "3",
            "TIERLOG_GROUP_SHARE_RECORD_LOCK_DURATION_MS": "1000",
            "TIERLOG_GROUP_SHARE_DELIVERY_COUNT_LIMIT": "10",
        }
        store = f"file://{tmp_path}/bucket"
        processes.append(BrokerProcess(root, *flags, store=store, **env).start())
    try:
        bootstrap = f"127.0.0.1:{ports[0]}"
        admin = AdminClient({"bootstrap.servers": bootstrap})
        until(lambda: len(admin.list_topics(timeout=20).brokers) == 3)
        admin.create_topics([NewTopic("flights", PARTITIONS, 1)])["flights"].result(20)
        produce(bootstrap, 100)
        with ShareMember(ports[0], "configures") as one:
            kind = m.IncrementalAlterConfigsRequest
            rows = [kind.AlterableConfig(name, 0, value) for name, value in EARLIEST.items()]
            answer = one.ask(kind([kind.AlterConfigsResource(32, "g", rows)]))
            assert answer.responses[0].error_code == 0

        def kill(number: int) -> None:
            processes[number].kill()
            processes[number].start()

        order = random.Random(seed).sample(range(3), 3)
        consume_all(ports, [lambda n=number: kill(n) for number in order], each=100, seed=seed)
    finally:
        for process in processes:
            process.kill()
