"""Consumer groups of KIP-848: librdkafka's consumers, calls by hand, migration, restarts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, TopicPartition

import tierlog
from tests.fakes.broker_process import BrokerProcess, free_port
from tests.fakes.kafka_caller import KafkaCaller, api_of_request
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.kafka_messages import messages as m

SETTINGS = {
    "group_consumer_heartbeat_interval_ms": 100,
    "group_consumer_assignment_interval_ms": 0,
    "group_min_session_timeout_ms": 100,
}
EVERY = {0, 1, 2, 3}


@contextmanager
def serving(folder: Path) -> Iterator[Served]:
    with served_broker(folder, kafka=KafkaSettings(), **SETTINGS) as served:
        yield served


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    with serving(tmp_path / "data") as served:
        served.broker.create_topic("flights", partitions=4)
        yield served


@contextmanager
def consumer(served: Served, *topics: str, **settings: object) -> Iterator[Consumer]:
    given = {
        "bootstrap.servers": f"127.0.0.1:{served.kafka_port}",
        "group.id": "g",
        "group.protocol": "consumer",
        "auto.offset.reset": "earliest",
        **{name.replace("_", "."): value for name, value in settings.items()},
    }
    made = Consumer(given)
    made.subscribe(list(topics or ("flights",)))
    try:
        yield made
    finally:
        made.close()


CLASSIC = {"group_protocol": "classic", "session_timeout_ms": 6000, "heartbeat_interval_ms": 100}


def have(*consumers: Consumer, counts: list[int]) -> Callable[[], bool]:
    """Whether they have so many partitions each, all together every one once."""

    def found() -> bool:
        for one in consumers:
            one.poll(0.02)
        mine = [{place.partition for place in one.assignment()} for one in consumers]
        return sorted(map(len, mine)) == counts and set().union(*mine) == EVERY

    return found


def group_of(served: Served, name: str = "g") -> Any:
    return served.broker.groups.coordinator.describe(name)


# --- librdkafka -----------------------------------------------------------------------------------


def test_consumers_share_the_partitions_and_take_over_from_who_leaves(served: Served) -> None:
    with consumer(served) as first:
        until(have(first, counts=[4]))
        with consumer(served, "^fli.*") as second:  # a pattern, which RE2 resolves
            until(have(first, second, counts=[2, 2]))
            assert (group_of(served).type, group_of(served).protocol) == ("consumer", "uniform")
            mine = [place.partition for place in first.assignment()]
            done = first.commit(
                offsets=[TopicPartition("flights", number, 0) for number in mine],
                asynchronous=False,
            )
            assert [place.error for place in done] == [None, None]
        until(have(first, counts=[4]))
    until(lambda: group_of(served).state == "Empty")


def test_a_static_member_that_is_restarted_keeps_its_partitions(served: Served) -> None:
    with consumer(served) as other:
        with consumer(served, group_instance_id="i") as first:
            until(have(first, other, counts=[2, 2]))
            mine = {place.partition for place in first.assignment()}
        epoch = group_of(served).generation
        with consumer(served, group_instance_id="i") as second:
            until(have(second, other, counts=[2, 2]))
            assert {place.partition for place in second.assignment()} == mine
            assert group_of(served).generation == epoch


def test_a_classic_group_goes_over_to_the_new_protocol_member_by_member_and_back(
    served: Served,
) -> None:
    with consumer(served, **CLASSIC) as old:
        until(have(old, counts=[4]))
        assert group_of(served).type == "classic"
        with consumer(served) as new:
            until(have(old, new, counts=[2, 2]))
            assert group_of(served).type == "consumer"
        until(have(old, counts=[4]))
        until(lambda: (group_of(served).type, group_of(served).state) == ("classic", "Stable"))
    with consumer(served) as new:  # nobody is in it
        until(have(new, counts=[4]))
        assert group_of(served).type == "consumer"
    until(lambda: group_of(served).state == "Empty")
    with consumer(served, **CLASSIC) as old:
        until(have(old, counts=[4]))
        assert group_of(served).type == "classic"


# --- calls by hand --------------------------------------------------------------------------------


class Member:
    """`answer` is the last; `fields` are said again in each heartbeat."""

    def __init__(self, caller: KafkaCaller, name: str, **fields: Any) -> None:
        self.caller, self.name, self.fields = caller, name, fields
        self.epoch = 0

    def beat(self, epoch: int | None = None, **fields: Any) -> Any:
        given = {"group_id": "g", "member_id": self.name, **self.fields, **fields}
        if (epoch or self.epoch) == 0:
            given = {"rebalance_timeout_ms": 60_000, "topic_partitions": [], **given}
            given.setdefault("subscribed_topic_names", ["flights"])
        request = m.ConsumerGroupHeartbeatRequest(
            member_epoch=self.epoch if epoch is None else epoch, **given
        )
        answer = self.caller.ask(request, 1)
        if answer.error_code == 0:
            self.epoch = answer.member_epoch
        return answer


def numbers(answer: Any) -> list[int]:
    return [number for one in answer.assignment.topic_partitions for number in one.partitions]


def ask(caller: KafkaCaller, request: Any, version: int | None = None) -> Any:
    newest = api_of_request(request).max_version
    return caller.ask(request, newest if version is None else version)


def test_members_and_their_epochs_are_there_after_a_restart(tmp_path: Path) -> None:
    with serving(tmp_path / "data") as served:
        served.broker.create_topic("flights", partitions=4)
        with KafkaCaller(served.kafka_port) as caller:
            first, second = Member(caller, "m1"), Member(caller, "m2", instance_id="i2")
            assert numbers(first.beat()) == [0, 1, 2, 3]
            second.beat()
            kept = numbers(first.beat())
            pattern = Member(caller, "m3", subscribed_topic_regex="[a-e].*")
            pattern.beat(subscribed_topic_names=None)
            before = ask(caller, m.ConsumerGroupDescribeRequest(["g"]))
    with serving(tmp_path / "data") as served, KafkaCaller(served.kafka_port) as caller:
        second.caller = first.caller = caller
        assert ask(caller, m.ConsumerGroupDescribeRequest(["g"])) == before
        topic_id = before.groups[0].members[0].assignment.topic_partitions[0].topic_id
        owned = [m.ConsumerGroupHeartbeatRequest.TopicPartitions(topic_id, kept)]
        answer = first.beat(topic_partitions=owned)
        assert (answer.error_code, answer.member_epoch > 2) == (0, True)
        until(lambda: (found := second.beat()).assignment and len(numbers(found)) == 2)


def test_what_a_member_was_told_is_there_after_kill_nine(tmp_path: Path) -> None:
    port = free_port()
    at_once = {"TIERLOG_GROUP_CONSUMER_ASSIGNMENT_INTERVAL_MS": "0"}
    broker = BrokerProcess(tmp_path, "--kafka-listen", f"127.0.0.1:{port}", **at_once).start()
    try:
        with tierlog.Client(broker.url) as client:
            client.create_topic("flights", partitions=4)
        with KafkaCaller(port) as caller:
            member = Member(caller, "m1", instance_id="i1")
            told = [member.beat().member_epoch]
            told += [
                member.beat(subscribed_topic_names=names, topic_partitions=[]).member_epoch
                for names in (["flights", "later"], ["flights"])
            ]
            broker.kill()
        broker.start()
        with KafkaCaller(port) as caller:
            request = m.ConsumerGroupDescribeRequest(["g"])
            until(lambda: ask(caller, request).groups[0].error_code == 0)
            (found,) = ask(caller, request).groups[0].members
    finally:
        broker.kill()
    assert told == sorted(set(told)), "each of them was new"
    assert (found.member_id, found.instance_id, found.member_epoch) == ("m1", "i1", told[-1])


def test_a_commit_says_the_epoch_and_a_stale_one_is_refused(served: Served) -> None:
    request = m.OffsetCommitRequest
    row = request.OffsetCommitRequestPartition(0, 7)
    topics = [request.OffsetCommitRequestTopic(name="flights", partitions=[row])]

    def commit(epoch: int, version: int = 9) -> Code:
        made = request("g", epoch, "m1", topics=topics)
        return Code(ask(caller, made, version).topics[0].partitions[0].error_code)

    def fetch(epoch: int) -> Code:
        group = m.OffsetFetchRequest.OffsetFetchRequestGroup("g", "m1", epoch, topics=None)
        return Code(ask(caller, m.OffsetFetchRequest(groups=[group]), 9).groups[0].error_code)

    with KafkaCaller(served.kafka_port) as caller:
        assert commit(1) is Code.GROUP_ID_NOT_FOUND
        member = Member(caller, "m1")
        member.beat()
        assert commit(member.epoch) is Code.NONE
        assert commit(member.epoch + 1) is Code.STALE_MEMBER_EPOCH
        assert commit(member.epoch, 8) is Code.UNSUPPORTED_VERSION
        assert fetch(member.epoch) is Code.NONE
        assert fetch(member.epoch - 1) is Code.STALE_MEMBER_EPOCH


def test_an_admin_sees_and_deletes_groups_of_both_types(served: Served) -> None:
    with KafkaCaller(served.kafka_port) as caller:
        member = Member(caller, "m1")
        member.beat()
        (listed,) = ask(caller, m.ListGroupsRequest()).groups
        assert (listed.group_type, listed.group_state) == ("consumer", "Stable")
        assert ask(caller, m.ListGroupsRequest(types_filter=["classic"])).groups == []
        assert ask(caller, m.ListGroupsRequest(types_filter=["Consumer"])).groups == [listed]
        (classic,) = ask(caller, m.DescribeGroupsRequest(["g"])).groups
        assert Code(classic.error_code) is Code.GROUP_ID_NOT_FOUND
        (found,) = ask(caller, m.ConsumerGroupDescribeRequest(["nobody"])).groups
        assert Code(found.error_code) is Code.GROUP_ID_NOT_FOUND
        (deleted,) = ask(caller, m.DeleteGroupsRequest(["g"])).results
        assert Code(deleted.error_code) is Code.NON_EMPTY_GROUP
        member.beat(-1)
        (deleted,) = ask(caller, m.DeleteGroupsRequest(["g"])).results
        assert Code(deleted.error_code) is Code.NONE
        assert ask(caller, m.ListGroupsRequest()).groups == []
    served.broker.groups.expire_offsets()


def test_a_hostile_pattern_costs_no_time(served: Served) -> None:
    for name in ("a" * 200, "a" * 200 + "b"):
        served.broker.create_topic(name)
    with KafkaCaller(served.kafka_port) as caller:
        slow = Member(caller, "m1", subscribed_topic_regex="(a*)*(a*)*(a*)*c")
        assert slow.beat(subscribed_topic_names=None).error_code == 0
        for pattern in ("(", "(?=a)", "a{1000}{1000}", "a" * 5_000, "\\1"):
            bad = Member(caller, "m2", subscribed_topic_regex=pattern)
            refused = bad.beat(subscribed_topic_names=None)
            assert Code(refused.error_code) is Code.INVALID_REGULAR_EXPRESSION
        group = served.broker.groups.coordinator
        until(lambda: group.subscribed_topics("g") == frozenset())
