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
GROUPS = "org.apache.kafka.tools.consumer.group.ConsumerGroupCommand"
SHARES = "org.apache.kafka.tools.consumer.group.ShareGroupCommand"
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
    Tool(
        CONFIGS,
        "--alter --entity-type groups --entity-name queue"
        " --add-config share.delivery.count.limit=3",
        ("Completed",),
    ),
    Tool(
        CONFIGS,
        "--describe --entity-type groups --entity-name queue",
        (r"share\.delivery\.count\.limit=3 .*\{DYNAMIC_GROUP_CONFIG:",),
    ),
    Tool(
        SHARES,
        "--reset-offsets --group queue --topic records --to-earliest --execute",
        (r"^queue\s+records\s+0\s+0",),
    ),
    Tool(SHARES, "--list", (r"^queue",)),
    Tool(SHARES, "--describe --group queue", (r"^queue\s+records\s+0\s+0\s+10",)),
    Tool(SHARES, "--describe --group queue --state", (r"^queue\s+.*Empty\s+0",)),
    Tool(SHARES, "--delete-offsets --group queue --topic records", ("Successful",)),
    Tool(SHARES, "--delete --group queue", ("was successful",)),
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
    # It returns before the last are sent: that all were is for its consumer to see.
    Tool(
        "org.apache.kafka.tools.VerifiableProducer",
        "--topic verified --max-messages 500 --acks -1",
        ("startup_complete",),
    ),
    Tool(
        "org.apache.kafka.tools.VerifiableConsumer",
        "--topic verified --group-id verifiers --max-messages 500 --reset-policy earliest",
        (r'"count":500', r'"success":true', "shutdown_complete"),
    ),
    Tool(
        "org.apache.kafka.tools.TransactionalMessageCopier",
        "--input-topic verified --input-partition 0 --output-topic copied --max-messages 500"
        " --transaction-size 100 --transactional-id copier --consumer-group copiers",
        (r'"consumed":400,"remaining":100',),
    ),
    Tool(
        "org.apache.kafka.tools.ProducerPerformance",
        "--topic fast --num-records 5000 --record-size 100 --throughput -1",
        ("5000 records sent",),
    ),
    Tool(
        "org.apache.kafka.tools.ConsumerPerformance",
        "--topic fast --num-records 5000 --group fast",
        (r", 0\.4768, .*, 5000, ",),
    ),
    Tool(
        "org.apache.kafka.tools.EndToEndLatency",
        "--topic late --num-records 20 --producer-acks all --record-size 100",
        ("Percentiles: 50th",),
    ),
    Tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--topic verified --from-beginning --max-messages 3 --timeout-ms 20000",
        (r"^0\n1\n2\nProcessed a total of 3 messages",),
    ),
    Tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--topic copied --from-beginning --max-messages 500 --timeout-ms 20000"
        " --isolation-level read_committed",
        ("Processed a total of 500 messages",),
    ),
    Tool(
        "org.apache.kafka.tools.consumer.ConsoleConsumer",
        "--topic verified --from-beginning --max-messages 3 --timeout-ms 20000 --group new"
        " --consumer-property group.protocol=consumer",
        (r"^0\n1\n2\nProcessed a total of 3 messages",),
    ),
    Tool(GROUPS, "--list", ("^fast$", "^verifiers$", "^new$")),
    Tool(GROUPS, "--list --type consumer --state empty", (r"^new\s+Consumer\s+Empty",)),
    Tool(GROUPS, "--describe --group new --state", (r"^new .*\(0\)\s+uniform\s+Empty\s+0",)),
    Tool(GROUPS, "--describe --group new", (r"^new\s+verified\s+0\s+3 ",)),
    Tool(GROUPS, "--describe --group fast", (r"fast\s+fast\s+0\s+5000\s+5000\s+0 ",)),
    Tool(GROUPS, "--describe --group fast --members --verbose"),
    Tool(GROUPS, "--describe --group fast --state", (r"fast .*\(0\).*Empty\s+0",)),
    Tool(
        GROUPS,
        "--reset-offsets --group fast --topic fast --to-offset 7 --execute",
        (r"fast\s+fast\s+0\s+7",),
    ),
    Tool(GROUPS, "--delete-offsets --group fast --topic fast", (r"fast\s+0\s+Successful",)),
    Tool(GROUPS, "--delete --group fast", ("was successful",)),
    Tool(TOPICS, "--delete --topic flights"),
    Tool(TOPICS, "--describe --topic flights --if-exists"),
)


def commands(address: str, folder: Path) -> Iterator[str]:
    for one in CALLS:
        words = one.arguments.format(folder=folder).split()
        server = ["--broker-list" if one.name.endswith("Copier") else "--bootstrap-server", address]
        is_last = one.name.endswith("ClusterTool")  # only there it is the subcommand's
        yield "\t".join((one.name, *(words + server if is_last else server + words)))


def test_every_command_line_of_kafka_works(tmp_path: Path) -> None:
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
