"""Share groups (KIP-932): restarts and kills, both tiers, sessions, locks, and what is deleted."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

import tierlog
from tests.fakes import real_kafka
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.share_member import ShareMember, values
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.group_coordinator.group_configs import TOPIC as CONFIGS_TOPIC
from tierlog.broker.share_coordinator.share_groups import TOPIC
from tierlog.host.clock import wall_clock_ms
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.kafka_messages import messages as m
from tierlog.repair.restore import RestoreOptions, restore

EARLIEST = {"share.auto.offset.reset": "earliest"}
COUNT = 100


@contextmanager
def serving(folder: Path, **settings: Any) -> Iterator[Served]:
    given = {"kafka": KafkaSettings(), "group_share_assignment_interval_ms": 0, **settings}
    with served_broker(folder, **given) as served:
        yield served


def produce(port: int, count: int = COUNT, *, topic: str = "t", size: int = 1) -> None:
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{port}", "linger.ms": 0})
    for number in range(count):
        producer.produce(topic, f"{number}".encode().ljust(size), partition=0)
        if number % 10 == 9:
            producer.flush(20)
    assert producer.flush(20) == 0


@contextmanager
def filled(folder: Path, **settings: Any) -> Iterator[Served]:
    """With a topic that has records, and a group that reads it from its start."""
    with serving(folder, **settings) as served:
        served.broker.create_topic("t", partitions=1)
        served.broker.alter_group("g", EARLIEST)
        produce(served.kafka_port)
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with filled(tmp_path / "data") as served:
        yield served


def member(served: Served, name: str = "m") -> ShareMember:
    return ShareMember(served.kafka_port, name, "t")


def offsets_of(one: ShareMember) -> list[int]:
    return sorted(offset for given in one.acquired.values() for offset in given)


def test_members_share_a_partition_and_each_record_is_ones(served: Served) -> None:
    with member(served, "a").join() as a, member(served, "b").join() as b:
        a.fetch(max_records=30)
        b.fetch(max_records=500)
        assert offsets_of(a) == list(range(30))
        assert offsets_of(b) == list(range(30, COUNT))


def test_a_group_goes_on_after_a_restart_where_it_was(tmp_path: Path) -> None:
    with filled(tmp_path / "data") as served, member(served).join() as one:
        one.fetch(max_records=60)
        place = one.places[0]
        one.fetch({place: [(0, 9, 1), (20, 29, 1), (30, 39, 2)]}, max_records=0)
        one.fetch(max_records=10, share_acquire_mode=1)
        assert one.acquired == {place: dict.fromkeys(range(30, 40), 2)}
        one.fetch({place: [(30, 39, 2)]}, max_records=0)
        epoch = one.epoch
    with serving(tmp_path / "data") as served, member(served) as one:
        one.epoch = epoch  # the group, its members and its configuration are there
        assert served.broker.group_configs.overrides("g") == EARLIEST
        until(lambda: one.beat().error_code == 0)
        one.places = [place]
        given = {}
        while one.fetch(max_records=500) and one.acquired:
            given |= one.acquired[place]
        done = {*range(10), *range(20, 30)}
        assert given.keys() == set(range(COUNT)) - done
        assert {given[offset] for offset in range(30, 40)} == {3}


def test_nothing_is_lost_under_kill_nine(tmp_path: Path) -> None:
    """Each record is acknowledged by somebody, and by nobody else once that was answered."""
    seed = random.randrange(10**6)
    print("seed", seed)
    rng = random.Random(seed)
    port = free_port()
    settings = {
        "TIERLOG_GROUP_SHARE_RECORD_LOCK_DURATION_MS": "1000",
        "TIERLOG_GROUP_SHARE_DELIVERY_COUNT_LIMIT": "10",
    }
    broker = BrokerProcess(tmp_path, "--kafka-listen", f"127.0.0.1:{port}", **settings).start()
    try:
        produce(port, 3_000)
        with ShareMember(port, "configures", "t") as one:
            kind = m.IncrementalAlterConfigsRequest
            rows = [kind.AlterableConfig(name, 0, value) for name, value in EARLIEST.items()]
            one.ask(kind([kind.AlterConfigsResource(32, "g", rows)]))
        consumers = [_Consuming(port, f"m{number}", seed + number) for number in range(3)]
        for consumer in consumers:
            consumer.start()
        for wanted in (300, 1_000, 1_700):
            least = wanted + rng.randrange(400)
            until(lambda least=least: sum(map(_Consuming.count, consumers)) >= least, patience_s=60)
            broker.kill()
            broker.start()
        until(lambda: len(set().union(*map(_Consuming.said, consumers))) == 3_000, patience_s=60)
        for consumer in consumers:
            consumer.stop()
        with ShareMember(port, "looks") as one:
            kind = m.DescribeShareGroupOffsetsRequest
            request = kind([kind.DescribeShareGroupOffsetsRequestGroup("g", None)])
            assert one.ask(request).groups[0].topics[0].partitions[0].lag == 0
    finally:
        broker.kill()
    answered = [offset for one in consumers for offset in one.accepted]
    assert len(answered) == len(set(answered))


class _Consuming(threading.Thread):
    """`accepted`: offsets whose acknowledgement was answered; `unsure`: was not."""

    def __init__(self, port: int, name: str, seed: int) -> None:
        super().__init__(daemon=True)
        self._port, self._name, self._rng = port, name, random.Random(seed)
        self._ends = threading.Event()
        self.accepted: set[int] = set()
        self.unsure: set[int] = set()

    def count(self) -> int:
        return len(self.accepted)

    def said(self) -> set[int]:
        return self.accepted | self.unsure

    def run(self) -> None:
        while not self._ends.is_set():
            with suppress(OSError, AssertionError):
                self._consume()
            self._ends.wait(0.05)

    def _consume(self) -> None:
        with ShareMember(self._port, self._name, "t") as one:
            one.join()
            one.fetch(max_records=self._rng.randrange(1, 40))
            while not self._ends.is_set():
                given = set(offsets_of(one))
                self.unsure |= given
                answer = one.accept_all(max_records=self._rng.randrange(1, 40))
                rows = [row for topic in answer.responses for row in topic.partitions]
                if answer.error_code or any(row.acknowledge_error_code for row in rows):
                    return
                assert not given & self.accepted
                self.accepted |= given
                self.unsure -= given

    def stop(self) -> None:
        self._ends.set()
        self.join(20)


def test_a_lock_that_is_over_gives_records_to_another(tmp_path: Path) -> None:
    with (
        filled(tmp_path / "data", group_share_record_lock_duration_ms=500) as served,
        member(served, "a").join() as a,
        member(served, "b").join() as b,
    ):
        a.fetch()
        b.fetch(max_wait_ms=5_000)
        assert set(b.acquired[b.places[0]].values()) == {2}
        answer = a.fetch({a.places[0]: [(0, 9, 1)]}, max_wait_ms=0)
        assert answer.responses[0].partitions[0].acknowledge_error_code == Code.INVALID_RECORD_STATE


def test_what_a_member_is_given_again_is_not_what_it_acknowledges_with_the_same_call(
    tmp_path: Path,
) -> None:
    with filled(tmp_path / "data", group_share_record_lock_duration_ms=20) as served:
        partitions = served.broker.share_groups.partitions
        with member(served).join() as one:
            one.fetch(max_records=10)
            for _ in range(40):
                late = partitions.late_count
                until(lambda late=late: not one.acquired or partitions.late_count > late)
                given, answer = one.acquired, one.accept_all(max_records=10)
                for row in answer.responses[0].partitions if given else ():
                    again = set(*one.acquired.values()).intersection(*given.values())
                    assert not (row.acknowledge_error_code == 0 and again)


def test_who_goes_away_gives_up_what_it_has(served: Served) -> None:
    with member(served, "b").join() as b:
        with member(served, "a").join() as a:
            a.fetch()
        b.fetch(max_wait_ms=20_000)  # less than the lock's time
        assert len(offsets_of(b)) == COUNT


def test_a_waiting_member_is_given_what_comes(served: Served) -> None:
    with member(served, "a").join() as one:
        one.fetch()
        timer = threading.Timer(0.2, produce, (served.kafka_port, 10))
        timer.start()
        one.fetch(max_wait_ms=20_000, max_records=5)
        timer.join()
        assert offsets_of(one)[0] == COUNT


def test_there_are_no_more_sessions_than_the_limit(tmp_path: Path) -> None:
    kafka = KafkaSettings(share_sessions_max=1)
    with serving(tmp_path / "data", kafka=kafka) as served:
        served.broker.create_topic("t", partitions=1)
        with member(served, "b") as b:
            with member(served, "a").join() as a:
                assert a.fetch().error_code == 0
                b.places = a.places
                assert b.fetch().error_code == Code.SHARE_SESSION_LIMIT_REACHED
            until(lambda: b.fetch().error_code == 0)


def test_records_come_from_both_tiers(tmp_path: Path) -> None:
    config = {"segment.bytes": 20_000, "local.retention.bytes": 20_000}
    with serving(tmp_path / "data", store=MemoryStore()) as served:
        served.broker.create_topic("t", partitions=1, config=config)
        served.broker.alter_group("g", EARLIEST)
        produce(served.kafka_port, 200, size=1_000)
        served.broker.offload("t", wait_ms=20_000)
        partition = served.broker.partition("t", 0)
        until(lambda: partition.offsets().local_log_start_offset > 0)
        found: list[bytes] = []
        with member(served).join() as one:
            answer = one.fetch()
            while one.acquired:
                found += values(answer)
                answer = one.accept_all()
        assert [int(value) for value in found] == list(range(200))


def test_a_group_goes_on_after_a_restore_from_the_bucket(tmp_path: Path) -> None:
    store = MemoryStore()
    with serving(tmp_path / "lost", store=store) as served:
        served.broker.create_topic("t", partitions=1)
        served.broker.alter_group("g", EARLIEST)
        produce(served.kafka_port)
        with member(served).join() as one:
            one.fetch(max_records=30)
            place = one.places[0]
            one.fetch({place: [(5, 14, 1)]}, max_records=0)
        for topic in ("t", "__consumer_offsets", TOPIC, CONFIGS_TOPIC):
            served.broker.offload(topic, wait_ms=20_000)
    (tmp_path / "found").mkdir()
    options = RestoreOptions(tmp_path / "found", gap=1_000_000_000, clock=wall_clock_ms)
    restore(store, options)
    with serving(tmp_path / "found", store=store) as served:
        produce(served.kafka_port, 10)
        with member(served, "n").join() as one:
            given = set()
            while one.fetch() and one.acquired:
                given |= set(offsets_of(one))
        assert served.broker.group_configs.overrides("g") == EARLIEST
    kept = set(range(COUNT)) - set(range(5, 15))
    assert {offset for offset in given if offset < COUNT} == kept
    assert len([offset for offset in given if offset >= 1_000_000_000]) == 10


def test_a_log_start_that_moves_takes_the_group_along(served: Served) -> None:
    with member(served).join() as one:
        one.fetch(max_records=10)
        served.broker.trim("t", 0, 50)
        one.accept_all()
        assert offsets_of(one) == list(range(50, COUNT))


def test_a_deleted_topic_is_forgotten(served: Served) -> None:
    with member(served).join() as one:
        one.fetch()
        shares = served.broker.share_groups.coordinator
        assert len(shares.summaries("g")) == 1
        served.broker.delete_topic("t")
        assert not shares.summaries("g")
        answer = one.fetch(max_wait_ms=0)
        assert answer.responses[0].partitions[0].error_code == Code.UNKNOWN_TOPIC_ID


def test_a_deleted_group_leaves_no_state(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served:
        served.broker.create_topic("t", partitions=2)
        with member(served).join(2) as one:
            assert one.ask(m.DeleteGroupsRequest(["g"])).results[0].error_code
            one.ask(m.ShareGroupHeartbeatRequest("g", "m", -1))
            assert one.ask(m.DeleteGroupsRequest(["g"])).results[0].error_code == 0
    with serving(tmp_path / "data") as served:
        served.broker.share_groups.prepare()
        assert not served.broker.share_groups.coordinator.summaries()
        assert served.broker.groups.names() == []


def test_what_is_no_longer_needed_of_the_state_is_deleted(tmp_path: Path) -> None:
    with filled(tmp_path / "data") as served:
        with member(served).join() as one:
            one.fetch(max_records=10)
            for _ in range(3):
                one.accept_all()
        shares, partition = served.broker.share_groups, served.broker.partition(TOPIC, 0)

        def is_pruned() -> bool:
            shares.prune()
            return partition.log_start_offset == partition.log_end_offset - 1 > 1

        shares.coordinator.snapshot_older(than_ms=0)
        until(is_pruned)
        before = shares.coordinator.summaries()
        assert before[0].start_offset + before[0].complete_count > 0
    with serving(tmp_path / "data") as served:
        served.broker.share_groups.prepare()
        assert served.broker.share_groups.coordinator.summaries() == before


def test_the_command_line_shows_a_share_group_and_deletes_it(served: Served) -> None:
    with member(served).join() as one:
        one.fetch(max_records=10)
        one.accept_all(max_records=0)
        one.ask(m.ShareGroupHeartbeatRequest("g", "m", -1))
    with tierlog.Client(served.server.url) as client:
        (summary,) = client.groups()
        assert (summary.type, summary.state, summary.topics) == ("share", "Empty", ("t",))
        (row,) = client.group("g").offsets
        assert row.lag == summary.lag == COUNT - 10
        client.delete_group("g")
        assert client.groups() == ()


@pytest.mark.kafka
def test_kafkas_own_share_consumer_reads_on_where_another_ended(served: Served) -> None:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    served.broker.alter_group("java", EARLIEST)
    kafka, found = real_kafka.RealKafka(), []
    for count in (60, 40):
        done = kafka.run(
            "org.apache.kafka.tools.consumer.ConsoleShareConsumer",
            *("--bootstrap-server", f"127.0.0.1:{served.kafka_port}", "--topic", "t"),
            *("--group", "java", "--max-messages", f"{count}", "--timeout-ms", "60000"),
        )
        found += done.stdout.split()
    assert sorted(map(int, found)) == list(range(COUNT))


@pytest.mark.parametrize("name", ["retention.ms", "cleanup.policy"])
def test_the_states_topic_does_not_expire(served: Served, name: str) -> None:
    with member(served).join() as one:
        kind = m.IncrementalAlterConfigsRequest
        value = {"retention.ms": "1000", "cleanup.policy": "compact"}[name]
        resource = kind.AlterConfigsResource(2, TOPIC, [kind.AlterableConfig(name, 0, value)])
        assert one.ask(kind([resource])).responses[0].error_code
