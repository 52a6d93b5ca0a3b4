"""Administrative calls: a real Kafka and ours answer alike, field by field.

What differs by nature is made equal first: node ids, addresses, topic ids, and the texts of errors.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fakes import real_kafka
from tests.fakes.kafka_caller import KafkaCaller, api_of_request
from tests.fakes.served_broker import served_broker
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.hot_tier.log_config import KEYS
from tierlog.record_format.kafka_messages import messages as m

pytestmark = pytest.mark.kafka

KAFKAS_NODE, OUR_NODE = 1, 0
TOPIC, BROKER = 2, 4
Answers = list[Any]


class Clusters:
    def __init__(self, kafka: KafkaCaller, ours: KafkaCaller) -> None:
        self._both = ((kafka, KAFKAS_NODE), (ours, OUR_NODE))

    def ask(self, request: Callable[[int], msgspec.Struct], version: int | None = None) -> Answers:
        """The answers, Kafka's first, as built-in types."""
        answers = []
        for caller, node in self._both:
            made = request(node)
            newest = api_of_request(made).max_version
            answer = caller.ask(made, newest if version is None else version)
            answers.append(comparable(msgspec.to_builtins(answer), node))
        return answers


IDS = ("leader_id", "controller_id", "broker_id", "node_id", "replica_id")
OF_ONE_ALONE = (
    *("error_message", "cluster_id", "host", "port", "leader_epoch"),
    *("high_watermark", "log_end_offset", "replica_directory_id"),  # of the quorum
)
TIMES = ("last_fetch_timestamp", "last_caught_up_timestamp")
ID_LISTS = ("replica_nodes", "isr_nodes", "offline_replicas")


def comparable(value: Any, node: int) -> Any:
    if isinstance(value, list):
        return [comparable(one, node) for one in value]
    if not isinstance(value, dict):
        return value
    return {name: _comparable(name, one, node) for name, one in value.items()}


def _comparable(name: str, value: Any, node: int) -> Any:
    if name == "topic_id":
        return value != msgspec.to_builtins(bytes(16))
    if name in IDS:
        return "node" if value in (node, 0) else value  # 0: also what nobody has set
    if name in ID_LISTS:
        return ["node" if one == node else one for one in value]
    if name == "replica_election_results":
        return sorted((comparable(one, node) for one in value), key=lambda one: one["topic"])
    if name in OF_ONE_ALONE:
        return None
    if name in TIMES:
        return value > 0
    return comparable(value, node)


@pytest.fixture(scope="module")
def clusters(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusters]:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    folder: Path = tmp_path_factory.mktemp("admin")
    with ExitStack() as stack:
        address = stack.enter_context(real_kafka.RealKafka().broker(folder / "kafka", {}))
        ours = stack.enter_context(served_broker(folder / "ours", kafka=KafkaSettings()))
        ports = (int(address.rpartition(":")[2]), ours.kafka_port)
        kafka, own = (stack.enter_context(KafkaCaller(port)) for port in ports)
        yield Clusters(kafka, own)


def creatable(name: str, **rest: Any) -> m.CreateTopicsRequest:
    given = {"num_partitions": -1, "replication_factor": -1, **rest}
    topic = m.CreateTopicsRequest.CreatableTopic(name=name, **given)
    return m.CreateTopicsRequest(topics=[topic], timeout_ms=20_000)


def assigned(*partitions: tuple[int, list[int]]) -> list[Any]:
    kind = m.CreateTopicsRequest.CreatableReplicaAssignment
    return [kind(number, replicas) for number, replicas in partitions]


def config(name: str, value: str | None) -> list[Any]:
    return [m.CreateTopicsRequest.CreatableTopicConfig(name, value)]


CREATIONS: dict[str, Callable[[int], m.CreateTopicsRequest]] = {
    "one": lambda _: creatable("created", num_partitions=2, replication_factor=1),
    "the same again": lambda _: creatable("created"),
    "by default": lambda _: creatable("by-default"),
    "by assignment": lambda node: creatable(
        "assigned", assignments=assigned((0, [node]), (1, [node]))
    ),
    "assigned to a stranger": lambda _: creatable("x", assignments=assigned((0, [77]))),
    "assigned twice": lambda node: creatable("x", assignments=assigned((0, [node, node]))),
    "assigned to nobody": lambda _: creatable("x", assignments=assigned((0, []))),
    "assigned with a hole": lambda node: creatable("x", assignments=assigned((1, [node]))),
    "assigned, and a count": lambda node: creatable(
        "x", num_partitions=1, assignments=assigned((0, [node]))
    ),
    "no partition": lambda _: creatable("x", num_partitions=0),
    "three replicas": lambda _: creatable("x", replication_factor=3),
    "no replica": lambda _: creatable("x", replication_factor=0),
    "a bad name": lambda _: creatable("a/b"),
    "two dots": lambda _: creatable(".."),
    "no name": lambda _: creatable(""),
    "an unknown key": lambda _: creatable("x", configs=config("nope", "1")),
    "a bad value": lambda _: creatable("x", configs=config("retention.ms", "soon")),
    "no value": lambda _: creatable("x", configs=config("retention.ms", None)),
    "twice in one request": lambda _: m.CreateTopicsRequest(
        topics=[*creatable("twice").topics, *creatable("twice").topics], timeout_ms=20_000
    ),
    "only to see": lambda _: m.CreateTopicsRequest(
        topics=creatable("seen", num_partitions=3).topics, timeout_ms=20_000, validate_only=True
    ),
}


@pytest.mark.parametrize("what", CREATIONS)
def test_topics_are_created_or_refused_alike(clusters: Clusters, what: str) -> None:
    kafka, ours = clusters.ask(CREATIONS[what])
    for topic in (*kafka["topics"], *ours["topics"]):
        assert (topic["error_code"] != 0) == (not topic.pop("configs"))
    assert ours == kafka


def growing(name: str, count: int, **rest: Any) -> m.CreatePartitionsRequest:
    kind = m.CreatePartitionsRequest.CreatePartitionsTopic
    given = {"assignments": None, **rest}
    return m.CreatePartitionsRequest(topics=[kind(name, count, **given)], timeout_ms=20_000)


def places(*replicas: list[int]) -> list[Any]:
    return [m.CreatePartitionsRequest.CreatePartitionsAssignment(one) for one in replicas]


def deleted(offset: int, name: str = "records", number: int = 0) -> m.DeleteRecordsRequest:
    one = m.DeleteRecordsRequest.DeleteRecordsPartition(number, offset)
    topic = m.DeleteRecordsRequest.DeleteRecordsTopic(name, [one])
    return m.DeleteRecordsRequest(topics=[topic], timeout_ms=20_000)


def elected(name: str, number: int) -> m.ElectLeadersRequest:
    place = m.ElectLeadersRequest.TopicPartitions(name, [number])
    return m.ElectLeadersRequest(election_type=0, topic_partitions=[place], timeout_ms=20_000)


def reassigned(name: str, replicas: list[int] | None, number: int = 0) -> Any:
    one = m.AlterPartitionReassignmentsRequest.ReassignablePartition(number, replicas)
    topic = m.AlterPartitionReassignmentsRequest.ReassignableTopic(name, [one])
    return m.AlterPartitionReassignmentsRequest(topics=[topic], timeout_ms=20_000)


def quorum(name: str, number: int) -> m.DescribeQuorumRequest:
    kind = m.DescribeQuorumRequest
    return kind(topics=[kind.TopicData(name, [kind.PartitionData(number)])])


def described(*names: str, **rest: Any) -> m.DescribeTopicPartitionsRequest:
    kind = m.DescribeTopicPartitionsRequest.TopicRequest
    return m.DescribeTopicPartitionsRequest(topics=[kind(name) for name in names], **rest)


def altered(
    name: str, *changes: tuple[str, int, str | None], kind: int = TOPIC, **rest: Any
) -> Any:
    request = m.IncrementalAlterConfigsRequest
    configs = [request.AlterableConfig(*change) for change in changes]
    return request(resources=[request.AlterConfigsResource(kind, name, configs)])


def replaced(name: str, **configs: str | None) -> m.AlterConfigsRequest:
    given = [
        m.AlterConfigsRequest.AlterableConfig(key.replace("_", "."), value)
        for key, value in configs.items()
    ]
    resource = m.AlterConfigsRequest.AlterConfigsResource(TOPIC, name, given)
    return m.AlterConfigsRequest(resources=[resource])


Cursor = m.DescribeTopicPartitionsRequest.Cursor
OTHERS: dict[str, Callable[[int], Any]] = {
    "grow": lambda _: growing("grown", 3),
    "grow to the same": lambda _: growing("grown", 3),
    "shrink": lambda _: growing("grown", 2),
    "grow a stranger": lambda _: growing("nowhere", 2),
    "grow, assigned": lambda node: growing("grown", 4, assignments=places([node])),
    "grow, assigned short": lambda node: growing("grown", 6, assignments=places([node])),
    "grow, assigned to a stranger": lambda _: growing("grown", 5, assignments=places([77])),
    "delete records past the end": lambda _: deleted(5),
    "delete records, all": lambda _: deleted(-1),
    "delete records, nonsense": lambda _: deleted(-2),
    "delete records of a stranger": lambda _: deleted(0, "nowhere"),
    "delete records of no partition": lambda _: deleted(0, number=9),
    "delete records, compacted": lambda _: deleted(-1, "compacted"),
    "elect": lambda _: elected("records", 0),
    "elect nowhere": lambda _: elected("nowhere", 0),
    "elect no partition": lambda _: elected("records", 9),
    "elect all": lambda _: m.ElectLeadersRequest(topic_partitions=None, timeout_ms=20_000),
    "reassign to itself": lambda node: reassigned("records", [node]),
    "reassign to a stranger": lambda _: reassigned("records", [77]),
    "reassign nowhere": lambda node: reassigned("nowhere", [node]),
    "cancel a reassignment": lambda _: reassigned("records", None),
    "list reassignments": lambda _: m.ListPartitionReassignmentsRequest(
        topics=None, timeout_ms=20_000
    ),
    "describe partitions": lambda _: described("records", "grown", "nowhere"),
    "describe a page": lambda _: described("grown", "records", response_partition_limit=2),
    "describe from a cursor": lambda _: described("grown", "records", cursor=Cursor("grown", 2)),
    "describe the cluster": lambda _: m.DescribeClusterRequest(),
    "describe the controllers": lambda _: m.DescribeClusterRequest(endpoint_type=2),
    "quotas": lambda _: m.DescribeClientQuotasRequest(),
    "transactions": lambda _: m.ListTransactionsRequest(state_filters=["Ongoing", "Odd"]),
    "the quorum": lambda _: quorum("__cluster_metadata", 0),
    "the quorum of a stranger": lambda _: quorum("records", 0),
    "the quorum of no partition": lambda _: quorum("__cluster_metadata", 1),
    "scram of all": lambda _: m.DescribeUserScramCredentialsRequest(users=None),
    "scram of some": lambda _: m.DescribeUserScramCredentialsRequest(
        users=[m.DescribeUserScramCredentialsRequest.UserName(name) for name in ("a", "b", "b")]
    ),
    "set": lambda _: altered("records", ("retention.ms", 0, "5000")),
    "set nonsense": lambda _: altered("records", ("retention.ms", 0, "soon")),
    "set an unknown key": lambda _: altered("records", ("nope", 0, "1")),
    "set null": lambda _: altered("records", ("retention.ms", 0, None)),
    "set twice": lambda _: altered("records", ("flush.ms", 0, "1"), ("flush.ms", 0, "2")),
    "append": lambda _: altered("records", ("cleanup.policy", 2, "compact")),
    "append to a number": lambda _: altered("records", ("flush.ms", 2, "1")),
    "subtract": lambda _: altered("records", ("cleanup.policy", 3, "compact")),
    "reset": lambda _: altered("records", ("retention.ms", 1, None)),
    "reset an unknown key": lambda _: altered("records", ("nope", 1, None)),
    "alter nowhere": lambda _: altered("nowhere", ("flush.ms", 0, "1")),
    "alter another broker": lambda _: altered("77", ("x", 0, "1"), kind=BROKER),
    "replace": lambda _: replaced("records", flush_ms="7"),
    "replace nowhere": lambda _: replaced("nowhere", flush_ms="7"),
    "delete": lambda _: m.DeleteTopicsRequest(
        topics=[m.DeleteTopicsRequest.DeleteTopicState(name="doomed")], timeout_ms=20_000
    ),
    "delete a stranger": lambda _: m.DeleteTopicsRequest(
        topics=[m.DeleteTopicsRequest.DeleteTopicState(name="nowhere")], timeout_ms=20_000
    ),
    "delete a strange id": lambda _: m.DeleteTopicsRequest(
        topics=[m.DeleteTopicsRequest.DeleteTopicState(name=None, topic_id=b"x" * 16)],
        timeout_ms=20_000,
    ),
    "metadata": lambda _: m.MetadataRequest(
        topics=[m.MetadataRequest.MetadataRequestTopic(name=name) for name in ("grown", "nowhere")],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    ),
    "metadata by a strange id": lambda _: m.MetadataRequest(
        topics=[m.MetadataRequest.MetadataRequestTopic(topic_id=b"x" * 16, name=None)],
        allow_auto_topic_creation=False,
    ),
}


@pytest.fixture(scope="module")
def filled(clusters: Clusters) -> Clusters:
    for name in ("grown", "records", "doomed", "compacted"):
        configs = config("cleanup.policy", "compact") if name == "compacted" else []
        for answer in clusters.ask(
            lambda _, n=name, c=configs: creatable(n, num_partitions=1, configs=c)
        ):
            assert answer["topics"][0]["error_code"] == 0
    return clusters


@pytest.mark.parametrize("what", OTHERS)
def test_other_calls_are_answered_alike(filled: Clusters, what: str) -> None:
    kafka, ours = filled.ask(OTHERS[what])
    assert ours == kafka


def test_settings_of_the_broker_have_kafkas_types(filled: Clusters) -> None:
    kind = m.DescribeConfigsRequest.DescribeConfigsResource
    answers = filled.ask(
        lambda node: m.DescribeConfigsRequest(resources=[kind(BROKER, str(node), None)])
    )
    kafka, ours = (
        {one["name"]: one["config_type"] for one in answer["results"][0]["configs"]}
        for answer in answers
    )
    shared = kafka.keys() & ours.keys()
    assert len(shared) > 20
    assert {name: ours[name] for name in shared} == {name: kafka[name] for name in shared}


def test_configurations_are_listed_alike(filled: Clusters) -> None:
    """Ours has keys that Kafka lacks, and it some of replicas; defaults differ where they say."""
    resource = m.DescribeConfigsRequest.DescribeConfigsResource(TOPIC, "compacted", None)
    kafka, ours = filled.ask(
        lambda _: m.DescribeConfigsRequest(resources=[resource], include_synonyms=True)
    )
    seen = []
    for answer in (kafka, ours):
        (result,) = answer["results"]
        assert result["error_code"] == 0
        seen.append({one["name"]: one for one in result["configs"]})
    both = seen[0].keys() & seen[1].keys()
    ours = {
        "offload.max.lag.ms",
        "cold.merge.min.bytes",
        "key.filter",
        "schema.validation",
        "iceberg.mode",
        "replication.store",
    }
    assert {key.name for key in KEYS} - both <= ours
    for name in both:
        for field in ("config_type", "config_source", "read_only", "is_sensitive"):
            if name != "max.message.bytes" and field == "config_source":
                continue  # Kafka's test broker sets some defaults itself
            assert (name, seen[1][name][field]) == (name, seen[0][name][field])
    assert seen[1]["cleanup.policy"]["value"] == "compact"
