"""Kafka's own command lines, as they are, against our listener; all in one JVM."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from kafka import KafkaProducer

from tests.fakes import real_kafka
from tests.fakes.served_broker import served_broker
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.broker.broker import Broker

pytestmark = pytest.mark.kafka


class Tool(NamedTuple):
    """A call: `says` are patterns that its output has."""

    name: str
    arguments: str
    says: tuple[str, ...] = ()


TOPICS, CONFIGS = "org.apache.kafka.tools.TopicCommand", "kafka.admin.ConfigCommand"
FLIGHTS = "--entity-type topics --entity-name flights"
CALLS = (
    Tool(
        TOPICS,
        "--create --topic flights --partitions 3 --replication-factor 1 --config flush.ms=9",
        (r"Created topic flights\.",),
    ),
    Tool(TOPICS, "--create --topic flights --if-not-exists"),
    Tool(TOPICS, "--alter --topic flights --partitions 4"),
    Tool(TOPICS, "--list", (r"^flights$",)),
    Tool(
        TOPICS,
        "--describe --topic flights",
        (
            r"PartitionCount: 4\s+ReplicationFactor: 1\s+Configs: flush.ms=9",
            r"Partition: 3\s+Leader: 0\s+Replicas: 0\s+Isr: 0",
        ),
    ),
    Tool(TOPICS, "--describe --unavailable-partitions"),
    Tool(CONFIGS, f"--alter {FLIGHTS} --add-config flush.ms=7,retention.ms=-1", ("Completed",)),
    Tool(
        CONFIGS,
        f"--describe {FLIGHTS}",
        (r"flush\.ms=7 sensitive=false synonyms=\{DYNAMIC_TOPIC_CONFIG:flush\.ms=7",),
    ),
    Tool(CONFIGS, f"--alter {FLIGHTS} --delete-config flush.ms", ("Completed",)),
    Tool(CONFIGS, f"--describe --all {FLIGHTS}", (r"flush\.ms=100 ",)),
    Tool(
        CONFIGS,
        "--describe --all --entity-type brokers --entity-name 0",
        (
            r"auto\.create\.topics\.enable=true .*\{DEFAULT_CONFIG:",
            r"STATIC_BROKER_CONFIG:data\.dir=/",
        ),
    ),
    Tool(CONFIGS, "--describe --entity-type users"),
    Tool(CONFIGS, "--describe --entity-type clients"),
    Tool("org.apache.kafka.tools.GetOffsetShell", "--topic records", (r"^records:0:10$",)),
    Tool("org.apache.kafka.tools.GetOffsetShell", "--topic records --time -2", ("records:0:0",)),
    Tool(
        "org.apache.kafka.tools.DeleteRecordsCommand",
        "--offset-json-file {folder}/delete.json",
        (r"partition: records-0\s+low_watermark: 4",),
    ),
    Tool("org.apache.kafka.tools.LogDirsCommand", "--describe", (r'"partition":"flights-3"',)),
    Tool("org.apache.kafka.tools.ClusterTool", "cluster-id", (r"Cluster ID: \S{22}",)),
    Tool("org.apache.kafka.tools.ClusterTool", "list-endpoints", (r"0\s+127\.0\.0\.1",)),
    Tool("org.apache.kafka.tools.BrokerApiVersionsCommand", "", (r"Produce\(0\): 0 to 13",)),
    Tool(
        "org.apache.kafka.tools.LeaderElectionCommand",
        "--election-type preferred --topic flights --partition 0",
        ("Valid replica already elected",),
    ),
    Tool(
        "org.apache.kafka.tools.LeaderElectionCommand",
        "--election-type preferred --all-topic-partitions",
    ),
    Tool("org.apache.kafka.tools.MetadataQuorumCommand", "describe --status", (r"LeaderId:\s+0",)),
    Tool("org.apache.kafka.tools.MetadataQuorumCommand", "describe --replication", ("Leader",)),
    Tool("org.apache.kafka.tools.TransactionsCommand", "list", ("TransactionalId",)),
    Tool(
        "org.apache.kafka.tools.TransactionsCommand",
        "describe-producers --topic flights --partition 0",
        (r"ProducerId\s+ProducerEpoch",),
    ),
    Tool("org.apache.kafka.tools.TransactionsCommand", "find-hanging --broker-id 0"),
    Tool(
        "org.apache.kafka.tools.reassign.ReassignPartitionsCommand",
        "--list",
        ("No partition reassignments found",),
    ),
    Tool("org.apache.kafka.tools.GroupsCommand", "--list"),
    Tool("org.apache.kafka.tools.FeatureCommand", "describe"),
    Tool(TOPICS, "--delete --topic flights"),
    Tool(TOPICS, "--describe --topic flights --if-exists"),
)


def commands(address: str, folder: Path) -> Iterator[str]:
    for one in CALLS:
        words = one.arguments.format(folder=folder).split()
        server = ["--bootstrap-server", address]
        is_last = one.name.endswith("ClusterTool")  # only there it is the subcommand's
        yield "\t".join((one.name, *(words + server if is_last else server + words)))


def test_every_administrative_command_of_kafka_works(tmp_path: Path) -> None:
    if not real_kafka.is_available():
        pytest.skip("no Kafka: it needs Maven and a JDK")
    delete = {"partitions": [{"topic": "records", "partition": 0, "offset": 4}], "version": 1}
    (tmp_path / "delete.json").write_text(json.dumps(delete))
    with served_broker(tmp_path / "data", kafka=KafkaSettings()) as served:
        address = f"127.0.0.1:{served.kafka_port}"
        fill(served.broker, address)
        given = "\n".join(commands(address, tmp_path))
        done = real_kafka.RealKafka().run(str(real_kafka.HERE / "KafkaTools.java"), given=given)
    assert done.returncode == 0, done.stderr
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(CALLS)
    for call, answer in zip(CALLS, answers, strict=True):
        text = answer["text"]
        assert answer["code"] == 0, (call, text)
        assert "Exception" not in text, (call, text)
        for pattern in call.says:
            assert re.search(pattern, text, re.MULTILINE), (call, text)


def fill(broker: Broker, address: str) -> None:
    """Ten records in `records`."""
    broker.create_topic("records")
    producer = KafkaProducer(bootstrap_servers=address)
    for _ in range(10):
        producer.send("records", b"x")
    producer.close()
