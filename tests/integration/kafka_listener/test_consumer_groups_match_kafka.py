"""Consumer groups: a real Kafka and ours answer the same calls alike, one after the other.

What differs by nature is made equal first: topic ids, the texts of errors, ids that a broker gives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import real_kafka
from tests.fakes.kafka_caller import KafkaCaller, api_of_request
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.error_codes import Code
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.group_coordinator.consumer_protocol import encode_subscription
from tierlog.record_format.kafka_messages import messages as m

pytestmark = pytest.mark.kafka

NOT_YET = (Code.COORDINATOR_LOAD_IN_PROGRESS, Code.COORDINATOR_NOT_AVAILABLE, Code.NOT_COORDINATOR)
Beat = m.ConsumerGroupHeartbeatRequest


class Cluster:
    """One of the two. `said`: what answers gave that later calls say again."""

    def __init__(self, caller: KafkaCaller) -> None:
        self._caller = caller
        self.said: dict[str, Any] = {}
        topics = [
            m.CreateTopicsRequest.CreatableTopic(name, count, 1)
            for name, count in (("flights", 4), ("trains", 2))
        ]
        created = self.ask(m.CreateTopicsRequest(topics, 20_000))
        self.ids = {one.topic_id: one.name for one in created.topics}
        until(self._is_ready, patience_s=60)

    def _is_ready(self) -> bool:
        self.ask(m.FindCoordinatorRequest(key_type=0, coordinator_keys=["none"]))
        answer = self.ask(Beat("none", "m", 5))
        return Code(answer.error_code) not in NOT_YET

    def ask(self, request: Any, version: int | None = None) -> Any:
        newest = api_of_request(request).max_version
        return self._caller.ask(request, newest if version is None else version)

    def id_of(self, name: str) -> bytes:
        return next(one for one, known in self.ids.items() if known == name)

    def owned(self, name: str, *numbers: int) -> list[Any]:
        return [Beat.TopicPartitions(self.id_of(name), list(numbers))] if numbers else []

    def comparable(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return self.ids.get(value, value)
        if isinstance(value, list):
            shown = [self.comparable(one) for one in value]
            return shown if any(isinstance(one, str) for one in shown) else sorted(shown, key=repr)
        if isinstance(value, msgspec.Struct):
            is_join = isinstance(value, m.JoinGroupResponse)
            texts = ("error_message", "member_id") if is_join else ("error_message",)
            return {
                name: None if name in texts else self.comparable(getattr(value, name))
                for name in value.__struct_fields__
            }
        return value


def join(name: str, group: str = "g", **fields: Any) -> Beat:
    given = {"rebalance_timeout_ms": 60_000, "topic_partitions": [], **fields}
    if "subscribed_topic_regex" not in given:
        given.setdefault("subscribed_topic_names", ["flights"])
    return Beat(group, name, 0, **given)


def commit(group: str, member: str, epoch: int, number: int = 0) -> m.OffsetCommitRequest:
    row = m.OffsetCommitRequest.OffsetCommitRequestPartition(number, 3)
    topic = m.OffsetCommitRequest.OffsetCommitRequestTopic("flights", partitions=[row])
    return m.OffsetCommitRequest(group, epoch, member, topics=[topic])


def fetch(group: str, member: str | None, epoch: int) -> m.OffsetFetchRequest:
    kind = m.OffsetFetchRequest
    return kind(groups=[kind.OffsetFetchRequestGroup(group, member, epoch, topics=None)])


def classic_join(group: str, **fields: Any) -> m.JoinGroupRequest:
    protocol = m.JoinGroupRequest.JoinGroupRequestProtocol(
        "range", encode_subscription(["flights"])
    )
    given = {"member_id": "", "group_instance_id": None, **fields}
    return m.JoinGroupRequest(
        group_id=group,
        session_timeout_ms=30_000,
        rebalance_timeout_ms=30_000,
        protocol_type="consumer",
        protocols=[protocol],
        **given,
    )


def classic_sync(cluster: Cluster, group: str) -> m.SyncGroupRequest:
    joined = cluster.said["joined"]
    return m.SyncGroupRequest(
        group,
        joined.generation_id,
        joined.member_id,
        protocol_type="consumer",
        protocol_name="range",
    )


Step = Callable[[Cluster], Any]
# By what is asked: the call, and its version if not the newest.
STEPS: dict[str, tuple[Step, int | None]] = {
    "no group": (lambda _: Beat("g", "m1", 3), None),
    "no member id": (lambda _: join(""), None),
    "no group id": (lambda _: join("m1", ""), None),
    "no topics": (lambda _: join("m1", subscribed_topic_names=None), None),
    "no time-out": (lambda _: join("m1", rebalance_timeout_ms=-1), None),
    "joining with partitions": (lambda c: join("m1", topic_partitions=c.owned("flights", 0)), None),
    "an empty instance": (lambda _: join("m1", instance_id=""), None),
    "an empty rack": (lambda _: join("m1", rack_id=""), None),
    "leaving as static without an instance": (lambda _: Beat("g", "m1", -2), None),
    "a strange epoch": (lambda _: Beat("g", "m1", -3), None),
    "a strange assignor": (lambda _: join("m1", server_assignor="mine"), None),
    "no regular expression": (lambda _: join("m1", subscribed_topic_regex="("), None),
    "a first member": (lambda _: join("m1"), None),
    "at rest": (lambda _: Beat("g", "m1", 2), None),
    "a full heartbeat": (
        lambda c: Beat(
            "g",
            "m1",
            2,
            None,
            None,
            60_000,
            ["flights"],
            None,
            None,
            c.owned("flights", 0, 1, 2, 3),
        ),
        None,
    ),
    "joining again": (lambda _: join("m1"), None),
    "an epoch ahead": (lambda _: Beat("g", "m1", 9), None),
    "an epoch behind": (lambda _: Beat("g", "m1", 1), None),
    "a stranger": (lambda _: Beat("g", "m9", 2), None),
    "a second member": (lambda _: join("m2", instance_id="i2", rack_id="r"), None),
    "described while it reconciles": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), None),
    "told to give up": (lambda _: Beat("g", "m1", 2), None),
    "described while it gives up": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), 0),
    "gave up one": (
        lambda c: Beat("g", "m1", 2, topic_partitions=c.owned("flights", 0, 1, 2)),
        None,
    ),
    "gave up all": (lambda c: Beat("g", "m1", 2, topic_partitions=c.owned("flights", 0, 1)), None),
    "gets them": (lambda _: Beat("g", "m2", 3, instance_id="i2"), None),
    "a lost answer": (lambda c: Beat("g", "m1", 2, topic_partitions=c.owned("flights", 0)), None),
    "a commit": (lambda _: commit("g", "m1", 3), 9),
    "a commit of an earlier epoch": (lambda _: commit("g", "m1", 2), 9),
    "a commit of another's": (lambda _: commit("g", "m1", 2, 3), 9),
    "a commit ahead": (lambda _: commit("g", "m1", 4), 9),
    "a commit of a stranger": (lambda _: commit("g", "m9", 3), 9),
    "a commit of nobody": (lambda _: commit("g", "", -1), 9),
    "a commit in an old version": (lambda _: commit("g", "m1", 3), 8),
    "a commit to no group": (lambda _: commit("no", "m1", 3), 9),
    "a fetch": (lambda _: fetch("g", "m1", 3), 9),
    "a fetch of an earlier epoch": (lambda _: fetch("g", "m1", 2), 9),
    "a fetch of a stranger": (lambda _: fetch("g", "m9", 3), 9),
    "a fetch of nobody": (lambda _: fetch("g", None, -1), 9),
    "an instance that is taken": (lambda _: join("m3", instance_id="i2"), None),
    "another's instance": (lambda _: Beat("g", "m3", 3, instance_id="i2"), None),
    "a strange instance": (lambda _: Beat("g", "m3", 3, instance_id="i9"), None),
    "static leaves for a time": (lambda _: Beat("g", "m2", -2, instance_id="i2"), None),
    "described without it": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), None),
    "static comes back": (lambda _: join("m4", instance_id="i2"), None),
    "described with it": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), None),
    "other topics": (
        lambda c: Beat(
            "g",
            "m1",
            3,
            None,
            None,
            60_000,
            ["flights", "trains"],
            None,
            "range",
            c.owned("flights", 0, 1),
        ),
        None,
    ),
    "described with two topics": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), None),
    "listed": (lambda _: m.ListGroupsRequest(types_filter=["consumer"]), None),
    "listed by state": (lambda _: m.ListGroupsRequest(states_filter=["reconciling"]), None),
    "described as a classic group": (lambda _: m.DescribeGroupsRequest(["g"]), None),
    "described as a classic group before": (lambda _: m.DescribeGroupsRequest(["g"]), 5),
    "described, unknown": (lambda _: m.ConsumerGroupDescribeRequest(["nobody"]), None),
    "deleted with members": (lambda _: m.DeleteGroupsRequest(["g"]), None),
    "offsets deleted of a topic that is read": (
        lambda _: m.OffsetDeleteRequest(
            "g",
            [
                m.OffsetDeleteRequest.OffsetDeleteRequestTopic(
                    "flights", [m.OffsetDeleteRequest.OffsetDeleteRequestPartition(0)]
                )
            ],
        ),
        None,
    ),
    "a strange one leaves": (lambda _: Beat("g", "m9", -1), None),
    "leaves": (lambda _: Beat("g", "m1", -1), None),
    "static leaves": (lambda _: Beat("g", "m4", -1, instance_id="i2"), None),
    "described, empty": (lambda _: m.ConsumerGroupDescribeRequest(["g"]), None),
    "a commit to an empty group": (lambda _: commit("g", "", -1), 9),
    "comes again": (lambda _: join("m5"), None),
    "leaves again": (lambda _: Beat("g", "m5", -1), None),
    "deleted": (lambda _: m.DeleteGroupsRequest(["g"]), None),
    "comes as the first": (lambda _: join("m1"), None),
    # Migration
    "a classic member without an id": (lambda _: classic_join("g"), None),
    "a classic member": (
        lambda c: classic_join("g", member_id=c.said["required"].member_id),
        None,
    ),
    "it does not fit": (lambda _: m.HeartbeatRequest("g", 1, "m1"), None),
    "its partitions, none yet": (lambda c: classic_sync(c, "g"), None),
    "its heartbeat": (
        lambda c: m.HeartbeatRequest(
            "g", c.said["joined"].generation_id, c.said["joined"].member_id
        ),
        None,
    ),
}


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Cluster]]:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    folder: Path = tmp_path_factory.mktemp("groups")
    with ExitStack() as stack:
        address = stack.enter_context(real_kafka.RealKafka().broker(folder / "kafka", {}))
        ours = stack.enter_context(
            served_broker(
                folder / "ours", kafka=KafkaSettings(), group_consumer_assignment_interval_ms=0
            )
        )
        ports = (int(address.rpartition(":")[2]), ours.kafka_port)
        yield [Cluster(stack.enter_context(KafkaCaller(port))) for port in ports]


def test_every_step_is_answered_alike(clusters: list[Cluster]) -> None:
    different = {}
    for what, (step, version) in STEPS.items():
        answers = []
        for cluster in clusters:
            answer = cluster.ask(step(cluster), version)
            if what == "a classic member without an id":
                cluster.said["required"] = answer
            elif what == "a classic member":
                cluster.said["joined"] = answer
            answers.append(cluster.comparable(answer))
        if answers[1] != answers[0]:
            different[what] = answers
    assert not different, "\n".join(f"{what}\n  {a}\n  {b}" for what, (a, b) in different.items())


@pytest.mark.parametrize("version", [3, 4])
def test_the_feature_is_shown_alike(clusters: list[Cluster], version: int) -> None:
    shown = []
    for cluster in clusters:
        answer = cluster.ask(m.ApiVersionsRequest("test", "1"), version)
        features = (*answer.supported_features, *answer.finalized_features)
        shown.append([one for one in features if one.name == "group.version"])
    assert shown[1] == shown[0]
