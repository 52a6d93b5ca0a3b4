"""Share groups: a real Kafka and ours answer the same calls alike, one after the other.

What differs by nature is made equal first: topic ids, the texts of errors, leader epochs, and of
records everything but which batches they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
from confluent_kafka import Producer

from tests.fakes import real_kafka
from tests.fakes.kafka_caller import KafkaCaller, api_of_request
from tests.fakes.produce_requests import plain
from tests.fakes.served_broker import served_broker
from tests.fakes.waiting import until
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.kafka_messages import messages as m

pytestmark = pytest.mark.kafka

Beat = m.ShareGroupHeartbeatRequest
Fetch = m.ShareFetchRequest
Ack = m.ShareAcknowledgeRequest
GROUP, SET, DELETE = 32, 0, 1
RUNS = 3
TOPICS = (("flights", 1), ("trains", 3), ("txn", 1))
NOT_COMPARED = ("error_message", "acknowledge_error_message", "current_leader", "leader_epoch")


class Cluster:
    """One of the two."""

    def __init__(self, caller: KafkaCaller, port: int) -> None:
        self._caller, self._port = caller, port
        topics = [m.CreateTopicsRequest.CreatableTopic(name, n, 1) for name, n in TOPICS]
        created = self.ask(m.CreateTopicsRequest(topics, 20_000))
        self.ids = {one.topic_id: one.name for one in created.topics}
        self.produce("flights", *[5] * 8)
        self._produce_transactions()
        self._epoch = 0
        until(self._is_ready, patience_s=60)
        self.ask(Beat("warm", "w", -1))
        self.ask(m.DeleteGroupsRequest(["warm"]))

    def _is_ready(self) -> bool:
        """Whether a group can read: its topics exist, and are led."""
        self.ask(m.FindCoordinatorRequest(key_type=0, coordinator_keys=["warm"]))
        answer = self.ask(Beat("warm", "w", self._epoch, None, ["flights"]))
        self._epoch = answer.member_epoch
        if answer.error_code or not answer.assignment.topic_partitions:
            return False
        answer = self.ask(fetch(self, 0, group="warm", member="w"))
        self.ask(fetch(self, -1, group="warm", member="w"))
        return all(one.error_code == 0 for one in answer.responses[0].partitions)

    def ask(self, request: Any, version: int | None = None) -> Any:
        newest = api_of_request(request).max_version
        return self._caller.ask(request, newest if version is None else version)

    def produce(self, topic: str, *counts: int) -> None:
        """Batches of so many records."""
        for count in counts:
            part = m.ProduceRequest.PartitionProduceData(0, plain(count))
            data = m.ProduceRequest.TopicProduceData(topic, partition_data=[part])
            request = m.ProduceRequest(None, -1, 10_000, [data])

            def is_there(request: m.ProduceRequest = request) -> bool:
                answer = self.ask(request, 9).responses[0].partition_responses[0]
                return bool(answer.error_code == 0)

            until(is_there, patience_s=60)

    def _produce_transactions(self) -> None:
        """Records 0 to 2 of one that is committed, its marker, 4 to 6 of one that is not, ..."""
        server = f"127.0.0.1:{self._port}"
        producer = Producer({"bootstrap.servers": server, "transactional.id": "t"})
        producer.init_transactions(60)
        for is_committed in True, False, True:
            producer.begin_transaction()
            for number in range(3):
                producer.produce("txn", f"{number}")
            producer.flush()
            (producer.commit_transaction if is_committed else producer.abort_transaction)(60)

    def id_of(self, name: str) -> bytes:
        return next(one for one, known in self.ids.items() if known == name)

    def comparable(self, value: Any) -> Any:
        if isinstance(value, bytes):
            return self.ids.get(value, value)
        if isinstance(value, memoryview):
            return [(one.base_offset, one.last_offset) for one in iter_headers(value)]
        if isinstance(value, list):
            shown = [self.comparable(one) for one in value]
            return shown if any(isinstance(one, str) for one in shown) else sorted(shown, key=repr)
        if isinstance(value, msgspec.Struct):
            return {
                name: None if name in NOT_COMPARED else self.comparable(getattr(value, name))
                for name in value.__struct_fields__
            }
        return value


def join(member: str, *topics: str, group: str = "g") -> Beat:
    return Beat(group, member, 0, None, list(topics or ("flights",)))


def fetch(
    cluster: Cluster,
    epoch: int,
    *acks: tuple[int, int, Sequence[int]],
    member: str = "m1",
    group: str = "g",
    topic: str = "flights",
    **fields: Any,
) -> Fetch:
    given = {
        "max_wait_ms": 300,
        "min_bytes": 1,
        "max_bytes": 1 << 20,
        "max_records": 500,
        "batch_size": 500,
        **fields,
    }
    batches = [Fetch.AcknowledgementBatch(*one[:2], list(one[2])) for one in acks]
    part = Fetch.FetchPartition(0, acknowledgement_batches=batches)
    topics = [Fetch.FetchTopic(cluster.id_of(topic), [part])] if epoch == 0 or acks else []
    return Fetch(group, member, epoch, topics=topics, **given)


def acknowledge(
    cluster: Cluster,
    epoch: int,
    *acks: tuple[int, int, Sequence[int]],
    member: str = "m1",
    number: int = 0,
    **fields: Any,
) -> Ack:
    batches = [Ack.AcknowledgementBatch(*one[:2], list(one[2])) for one in acks]
    part = Ack.AcknowledgePartition(number, batches)
    topic = Ack.AcknowledgeTopic(cluster.id_of("flights"), [part])
    return Ack("g", member, epoch, topics=[topic], **fields)


def offsets(group: str = "g", **topics: list[int]) -> m.DescribeShareGroupOffsetsRequest:
    kind = m.DescribeShareGroupOffsetsRequest
    rows = [kind.DescribeShareGroupOffsetsRequestTopic(*one) for one in topics.items()]
    group_rows = [kind.DescribeShareGroupOffsetsRequestGroup(group, rows if topics else None)]
    return kind(group_rows)


def configured(group: str, operation: int = SET, **values: str | None) -> Any:
    kind = m.IncrementalAlterConfigsRequest
    rows = [
        kind.AlterableConfig(name.replace("_", "."), operation, value)
        for name, value in values.items()
    ]
    return kind([kind.AlterConfigsResource(GROUP, group, rows)])


def described(group: str, *names: str) -> m.DescribeConfigsRequest:
    kind = m.DescribeConfigsRequest
    return kind([kind.DescribeConfigsResource(GROUP, group, list(names))])


def altered(group: str, topic: str, number: int, start: int) -> m.AlterShareGroupOffsetsRequest:
    kind = m.AlterShareGroupOffsetsRequest
    part = kind.AlterShareGroupOffsetsRequestPartition(number, start)
    return kind(group, [kind.AlterShareGroupOffsetsRequestTopic(topic, [part])])


def deleted(group: str, *topics: str) -> m.DeleteShareGroupOffsetsRequest:
    kind = m.DeleteShareGroupOffsetsRequest
    return kind(group, [kind.DeleteShareGroupOffsetsRequestTopic(one) for one in topics])


Step = Callable[[Cluster], Any]
# By what is asked: the call, and its version if not the newest.
STEPS: dict[str, Step | tuple[Step, int]] = {
    # Configurations of groups
    "its configuration": lambda _: described(
        "g", "share.delivery.count.limit", "share.auto.offset.reset"
    ),
    "nobody's configuration": lambda _: described(""),
    "a strange key": lambda _: configured("g", no_such_key="1"),
    "a strange reset": lambda _: configured("g", share_auto_offset_reset="somewhere"),
    "too short a lock": lambda _: configured("g", share_record_lock_duration_ms="100"),
    "no number": lambda _: configured("g", share_delivery_count_limit="many"),
    "no value": lambda _: configured("g", share_delivery_count_limit=None),
    "a list's operation": lambda _: configured("g", 2, share_delivery_count_limit="3"),
    "nobody is configured": lambda _: configured("", share_delivery_count_limit="3"),
    "from the beginning": lambda _: configured("g", share_auto_offset_reset="earliest"),
    "by duration": lambda _: configured("d", share_auto_offset_reset="by_duration:P1DT1H"),
    "its configuration then": lambda _: described("g", "share.auto.offset.reset"),
    "a limit": lambda _: configured("g", share_delivery_count_limit="3"),
    "no limit": lambda _: configured("g", DELETE, share_delivery_count_limit=None),
    "its limit": lambda _: described("g", "share.delivery.count.limit"),
    # Members
    "no group": lambda _: Beat("g", "m1", 3),
    "no member id": lambda _: join(""),
    "a long member id": lambda _: join("m" * 37),
    "no group id": lambda _: join("m1", group=""),
    "no topics": lambda _: Beat("g", "m1", 0),
    "an empty rack": lambda _: Beat("g", "m1", 0, "", ["flights"]),
    "a strange epoch": lambda _: Beat("g", "m1", -2),
    "a first member": lambda _: join("m1"),
    "its partitions": lambda _: Beat("g", "m1", 1),
    "at rest": lambda _: Beat("g", "m1", 2),
    "its previous epoch": lambda _: Beat("g", "m1", 1),
    "an epoch ahead": lambda _: Beat("g", "m1", 9),
    "a stranger": lambda _: Beat("g", "m9", 2),
    "a second member": lambda _: join("m2"),
    "described": lambda _: m.ShareGroupDescribeRequest(["g"]),
    "described, unknown": lambda _: m.ShareGroupDescribeRequest(["nobody"]),
    "described as a consumer group": lambda _: m.ConsumerGroupDescribeRequest(["g"]),
    "described as a classic group": lambda _: m.DescribeGroupsRequest(["g"]),
    "listed": lambda _: m.ListGroupsRequest(types_filter=["share"]),
    "listed by state": lambda _: m.ListGroupsRequest(states_filter=["stable"]),
    "a consumer's heartbeat": lambda _: m.ConsumerGroupHeartbeatRequest(
        "g", "c", 0, None, None, 60_000, ["flights"], topic_partitions=[]
    ),
    "the first again": lambda _: Beat("g", "m1", 2),
    "offsets before a read": lambda _: offsets(flights=[0]),
    "all offsets before a read": lambda _: offsets(),
    # Records
    "no session": lambda c: fetch(c, 1),
    "no group to fetch for": lambda c: fetch(c, 0, group=None),
    "no member to fetch for": lambda c: fetch(c, 0, member=""),
    "a first fetch that acknowledges": lambda c: fetch(c, 0, (0, 1, [1])),
    "a first fetch": lambda c: fetch(c, 0, max_records=7),
    "offsets that it does not read": lambda _: offsets(trains=[0], no=[1]),
    "another epoch": lambda c: fetch(c, 5),
    "the rest, in parts": lambda c: fetch(c, 1, batch_size=10),
    "nothing is left": lambda c: fetch(c, 2),
    "two batches": lambda c: acknowledge(c, 3, (0, 4, [1]), (5, 9, [1])),
    "again": lambda c: acknowledge(c, 4, (0, 9, [1])),
    "each its own": lambda c: acknowledge(c, 5, (10, 14, [1, 2, 3, 0, 1])),
    "what is not there": lambda c: acknowledge(c, 6, (100, 110, [1])),
    "backwards": lambda c: acknowledge(c, 7, (19, 15, [1])),
    "overlapping": lambda c: acknowledge(c, 8, (15, 19, [1]), (17, 18, [1])),
    "no types": lambda c: acknowledge(c, 9, (15, 19, [])),
    "too many types": lambda c: acknowledge(c, 10, (15, 19, [1, 1])),
    "a strange type": lambda c: acknowledge(c, 11, (15, 19, [5])),
    "renewed unsaid": lambda c: acknowledge(c, 12, (15, 19, [4])),
    "renewed": lambda c: acknowledge(c, 13, (15, 19, [4]), is_renew_ack=True),
    "renewed before that": (lambda c: acknowledge(c, 14, (15, 19, [4])), 1),
    "what was released": lambda c: acknowledge(c, 15, (11, 11, [1])),
    "a strange partition": lambda c: acknowledge(c, 16, (0, 1, [1]), number=7),
    "nothing": lambda c: acknowledge(c, 17),
    "an acknowledgement that begins": lambda c: acknowledge(c, 0, (15, 19, [1])),
    "one of no session": lambda c: acknowledge(c, 1, (15, 19, [1]), member="m2"),
    "half of it": lambda c: acknowledge(c, 18, (15, 16, [1])),
    "offsets between": lambda _: offsets(),
    "renewed while it reads": lambda c: fetch(c, 19, (17, 19, [4]), is_renew_ack=True),
    "renewed by the rules": lambda c: fetch(
        c,
        19,
        (17, 19, [4]),
        is_renew_ack=True,
        max_bytes=0,
        min_bytes=0,
        max_records=0,
        max_wait_ms=0,
    ),
    "another member": lambda c: fetch(c, 0, member="m2"),
    "of the first": lambda c: fetch(c, 1, (20, 24, [1]), member="m2"),
    "its own": lambda c: fetch(c, 2, (11, 11, [2]), member="m2"),
    "strictly": lambda c: fetch(
        c, 20, (20, 29, [2]), max_records=3, share_acquire_mode=1, max_wait_ms=500
    ),
    "strictly more": lambda c: fetch(c, 21, max_records=4, share_acquire_mode=1),
    "offsets then": lambda _: offsets(flights=[0]),
    "the first leaves": lambda c: fetch(c, -1),
    "its session is over": lambda c: fetch(c, 22),
    "the other gets it": lambda c: fetch(c, 3, member="m2"),
    "it gives it back": lambda c: acknowledge(c, 4, (17, 39, [2]), member="m2"),
    "a third time": lambda c: fetch(c, 5, member="m2"),
    "a fourth": lambda c: fetch(c, 6, member="m2"),
    "a fifth": lambda c: fetch(c, 7, member="m2"),
    "a session without records": lambda c: fetch(c, 0, member="m3", topic="trains"),
    # Transactions
    "committed records alone": lambda _: configured(
        "t", share_isolation_level="read_committed", share_auto_offset_reset="earliest"
    ),
    "a reader of transactions": lambda _: join("x1", "txn", group="t"),
    "reading them": lambda c: fetch(c, 0, group="t", member="x1", topic="txn"),
    "acknowledging them": lambda c: fetch(
        c, 1, (0, 3, [1, 1, 1, 0]), group="t", member="x1", topic="txn"
    ),
    "the transactions' offsets": lambda _: offsets("t"),
    # Administration
    "deleted with members": lambda _: m.DeleteGroupsRequest(["g"]),
    "altered with members": lambda _: altered("g", "flights", 0, 3),
    "forgotten with members": lambda _: deleted("g", "flights"),
    "the second leaves": lambda _: Beat("g", "m2", -1),
    "the first one leaves": lambda _: Beat("g", "m1", -1),
    "a stranger leaves": lambda _: Beat("g", "m9", -1),
    "described, empty": lambda _: m.ShareGroupDescribeRequest(["g"]),
    "altered": lambda _: altered("g", "flights", 0, 3),
    "a strange partition is altered": lambda _: altered("g", "flights", 5, 3),
    "a strange topic is altered": lambda _: altered("g", "none", 0, 3),
    "offsets, altered": lambda _: offsets(),
    "a new group by its offsets": lambda _: altered("n", "flights", 0, 38),
    "that is listed": lambda _: m.ListGroupsRequest(types_filter=["share"]),
    "that is read": lambda _: join("y1", group="n"),
    "from there": lambda c: fetch(c, 0, group="n", member="y1"),
    "forgotten": lambda _: deleted("g", "flights", "trains", "none"),
    "forgotten again": lambda _: deleted("g", "flights"),
    "nobody's is forgotten": lambda _: deleted("nobody", "flights"),
    "offsets, forgotten": lambda _: offsets(),
    "deleted": lambda _: m.DeleteGroupsRequest(["g"]),
    "deleted again": lambda _: m.DeleteGroupsRequest(["g"]),
    "offsets of none": lambda _: offsets("nobody"),
}


@contextmanager
def new_clusters(folder: Path) -> Iterator[list[Cluster]]:
    """A real Kafka, and ours."""
    with ExitStack() as stack:
        address = stack.enter_context(real_kafka.RealKafka().broker(folder / "kafka", {}))
        ours = stack.enter_context(
            served_broker(
                folder / "ours", kafka=KafkaSettings(), group_share_assignment_interval_ms=0
            )
        )
        ports = (int(address.rpartition(":")[2]), ours.kafka_port)
        yield [Cluster(stack.enter_context(KafkaCaller(port)), port) for port in ports]


def differences(clusters: list[Cluster]) -> dict[str, list[Any]]:
    """By step: both answers, if they are not the same."""
    found = {}
    for what, given in STEPS.items():
        step, version = given if isinstance(given, tuple) else (given, None)
        answers = [one.comparable(one.ask(step(one), version)) for one in clusters]
        if answers[1] != answers[0]:
            found[what] = answers
    return found


def assert_shows_the_feature_alike(clusters: list[Cluster], version: int) -> None:
    shown = []
    for cluster in clusters:
        answer = cluster.ask(m.ApiVersionsRequest("test", "1"), version)
        features = (*answer.supported_features, *answer.finalized_features)
        shown.append([one for one in features if one.name == "share.version"])
    assert shown[1] == shown[0]


def test_every_step_is_answered_alike(tmp_path: Path) -> None:
    """Kafka does a part of it in threads of its own, between two calls or after the second: what
    is answered another way has to be so in each of `RUNS` new clusters.
    """
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    different: dict[str, list[Any]] = {}
    for run in range(RUNS):
        with new_clusters(tmp_path / str(run)) as clusters:
            for version in (3, 4):
                assert_shows_the_feature_alike(clusters, version)
            found = differences(clusters)
        different = {what: found[what] for what in found if run == 0 or what in different}
        if not different:
            return
    pytest.fail("\n".join(f"{what}\n  {a}\n  {b}" for what, (a, b) in different.items()))
