"""kafka-python's admin client, call by call; and what a token may do."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from kafka import KafkaProducer, TopicPartition
from kafka.admin import AlterConfigOp, ConfigResource, ConfigResourceType, KafkaAdminClient
from kafka.errors import (
    ClusterAuthorizationFailedError,
    InvalidReplicationFactorError,
    TopicAlreadyExistsError,
    TopicAuthorizationFailedError,
)

from tests.fakes.served_broker import Served, served_broker
from tierlog.api.http.settings import HttpSettings
from tierlog.api.kafka.settings import KafkaSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.hot_tier.log_config import KEYS
from tierlog.setting_table import TABLE

PLACE = TopicPartition("flights", 0)


@contextmanager
def admin_of(served: Served, **settings: object) -> Iterator[KafkaAdminClient]:
    admin = KafkaAdminClient(bootstrap_servers=f"127.0.0.1:{served.kafka_port}", **settings)
    try:
        yield admin
    finally:
        admin.close()


@pytest.fixture
def admin(served: Served) -> Iterator[KafkaAdminClient]:
    with admin_of(served) as admin:
        yield admin


def test_topics_are_created_grown_and_deleted(served: Served, admin: KafkaAdminClient) -> None:
    wanted = {"flights": {"num_partitions": 2, "configs": {"retention.ms": "-1"}}}
    admin.create_topics(wanted, validate_only=True)
    assert admin.list_topics() == []
    admin.create_topics(wanted)
    with pytest.raises(TopicAlreadyExistsError):
        admin.create_topics(wanted)
    with pytest.raises(InvalidReplicationFactorError):
        admin.create_topics({"more": {"replication_factor": 3}})
    admin.create_partitions({"flights": 5})
    (described,) = admin.describe_topics(["flights"])
    assert len(described["partitions"]) == 5
    assert served.broker.topic("flights").config.retention_ms == -1
    (described,) = admin.describe_topic_partitions(["flights"], response_partition_limit=3)[
        "topics"
    ]
    assert len(described["partitions"]) == 3
    admin.delete_topics(["flights"])
    assert admin.list_topics() == []


def resource(configs: dict[str, Any] | None, name: str = "flights") -> ConfigResource:
    return ConfigResource(ConfigResourceType.TOPIC, name, configs)


def configs_of(admin: KafkaAdminClient, **rest: object) -> dict[str, dict[str, Any]]:
    found = admin.describe_configs([resource(None)], config_filter="all", **rest)
    return found["topic"]["flights"]


def test_what_is_listed_of_a_configuration_is_taken_back(
    served: Served, admin: KafkaAdminClient
) -> None:
    served.broker.create_topic("flights")
    listed = configs_of(admin, include_synonyms=True)
    assert set(listed) == {key.name for key in KEYS}
    back = {name: one["value"] for name, one in listed.items()}
    for incremental in True, False:
        admin.alter_configs([resource(back)], incremental=incremental)
        now = configs_of(admin)
        assert {name: one["value"] for name, one in now.items()} == back
    append = {"cleanup.policy": (AlterConfigOp.APPEND, "compact")}
    admin.alter_configs([resource(append)])
    assert configs_of(admin)["cleanup.policy"]["value"] == "delete,compact"
    reset = {"cleanup.policy": (AlterConfigOp.DELETE, None)}
    admin.alter_configs([resource(reset)], validate_only=True)
    assert configs_of(admin)["cleanup.policy"]["value"] == "delete,compact"
    admin.alter_configs([resource(reset)])
    assert configs_of(admin)["cleanup.policy"]["value"] == "delete"


def test_a_broker_lists_every_setting_and_changes_none(admin: KafkaAdminClient) -> None:
    broker = ConfigResource(ConfigResourceType.BROKER, "0", None)
    found = admin.describe_configs([broker], config_filter="all")["broker"]["0"]
    assert set(found) == {one.name for one in TABLE}
    assert found["num.partitions"]["value"] == "1"
    assert all(one["read_only"] for one in found.values())
    broker.configs = {"num.partitions": "2"}
    answer = admin.alter_configs([broker], raise_on_unknown=False)
    assert "InvalidRequestError" in answer["broker"]["0"]


def test_records_are_deleted(served: Served, admin: KafkaAdminClient) -> None:
    served.broker.create_topic("flights")
    producer = KafkaProducer(bootstrap_servers=f"127.0.0.1:{served.kafka_port}")
    for _ in range(10):
        producer.send("flights", b"x")
    producer.close()
    partition = served.broker.topic("flights").partition(0)
    for offset, start in (4, 4), (-1, 10):
        answer = admin.delete_records({PLACE: offset})
        assert answer[PLACE]["low_watermark"] == start == partition.offsets().log_start_offset


def test_a_cluster_of_one_describes_itself(served: Served, admin: KafkaAdminClient) -> None:
    served.broker.create_topic("flights")
    cluster = admin.describe_cluster()
    assert [one["port"] for one in cluster["brokers"]] == [served.kafka_port]
    assert cluster["controller_id"] == 0
    (node,) = admin.describe_log_dirs()
    (folder,) = node["log_dirs"]
    (topic,) = folder["topics"]
    assert (topic["name"], len(topic["partitions"])) == ("flights", 1)
    assert folder["log_dir"] == str(served.broker.settings.data_dir)
    (quorum,) = admin.describe_metadata_quorum()["topics"]
    assert quorum["partitions"][0]["leader_id"] == 0
    assert admin.elect_leaders(0, {"flights": [0]}), "a leader that is not needed is no error"
    assert admin.list_partition_reassignments() == {}
    assert admin.alter_partition_reassignments({PLACE: [0]}) == {PLACE: None}
    assert admin.list_config_resources() == {"topic": ["flights"], "broker": ["0"]}
    assert admin.list_transactions() == {0: []}
    assert admin.describe_user_scram_credentials() == {}


# --- what a token may do --------------------------------------------------------------------------

Tokens = dict[str, dict[str, object]]


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[Served, Tokens]]:
    """Tokens by their names: `reads`, `produces`, and `administers` topics that begin with f."""
    file, tokens = tmp_path / "tokens.json", {}
    for name, scope, topics in (
        ("reads", Scope.READ, ""),
        ("produces", Scope.PRODUCE, ""),
        ("administers", Scope.ADMIN, "f"),
    ):
        secret = create_token(file, name, scopes=(scope,), topics=topics, now_ms=1)
        tokens[name] = {
            "security_protocol": "SASL_PLAINTEXT",
            "sasl_mechanism": "PLAIN",
            "sasl_plain_username": name,
            "sasl_plain_password": secret,
        }
    http = HttpSettings(tokens_file=file)
    with served_broker(tmp_path / "data", http=http, kafka=KafkaSettings()) as served:
        served.broker.create_topic("flights")
        served.broker.create_topic("trains")
        yield served, tokens


@pytest.mark.parametrize("token", ["reads", "produces"])
def test_without_admin_a_topic_is_described_and_not_changed(
    guarded: tuple[Served, Tokens], token: str
) -> None:
    served, tokens = guarded
    with admin_of(served, **tokens[token]) as admin:
        assert configs_of(admin)["cleanup.policy"]["value"] == "delete"
        assert sorted(admin.list_topics()) == ["flights", "trains"]
        for change in (
            lambda: admin.create_topics(["more"]),
            lambda: admin.delete_topics(["flights"]),
            lambda: admin.create_partitions({"flights": 2}),
            lambda: admin.delete_records({PLACE: 0}),
        ):
            with pytest.raises(TopicAuthorizationFailedError):
                change()
        answer = admin.alter_configs([resource({"retention.ms": "1"})])
        assert "TopicAuthorizationFailedError" in answer["topic"]["flights"]
        with pytest.raises(ClusterAuthorizationFailedError):
            admin.elect_leaders(0, {"flights": [0]})


def test_a_prefix_limits_an_administrator(guarded: tuple[Served, Tokens]) -> None:
    served, tokens = guarded
    with admin_of(served, **tokens["administers"]) as admin:
        assert admin.list_topics() == ["flights"]
        admin.create_topics(["fares"])
        for change in admin.create_topics, admin.delete_topics:
            with pytest.raises(TopicAuthorizationFailedError):
                change(["trains"])
        users = admin.describe_user_scram_credentials()
        assert set(users) == set(tokens)
    assert served.broker.topic("trains")
