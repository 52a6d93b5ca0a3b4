"""A produce that names a schema: values are JSON, and the broker encodes them."""

import itertools
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest
from confluent_kafka.schema_registry import SchemaRegistryClient
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.schema_registry.json_schema import JSONDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

from tests.fakes.command_line import Program
from tests.fakes.kafka_brokers import three_brokers
from tests.fakes.served_broker import Served
from tierlog.broker.topics.coordinator_log import stored_records
from tierlog.client.client import Client
from tierlog.client.records import NewRecord
from tierlog.record_format.errors import InvalidRequest
from tierlog.record_format.topic_rules import partition_for_key

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [
        {"name": "carrier", "type": "string"},
        {"name": "delay", "type": ["null", "int"], "default": None},
    ],
}
LATER = {
    **FLIGHT,
    "fields": [*FLIGHT["fields"], {"name": "origin", "type": "string", "default": "SFO"}],
}
JSON_FLIGHT = {"type": "object", "properties": {"delay": {"type": "integer"}}}
PROTO_FLIGHT = 'syntax = "proto3"; message Flight { string carrier = 1; int32 delay = 2; }'
ROWS = [{"carrier": "UA", "delay": 2}, {"carrier": "AA"}]
NDJSON = "application/x-ndjson"
_numbers = itertools.count()


def topic_with(served: Served, *schemas: Any, kind: str = "AVRO", level: str = "full") -> str:
    topic = f"encoded-{next(_numbers)}"
    served.broker.create_topic(topic, config={"schema.validation": level})
    for one in schemas:
        text = one if isinstance(one, str) else json.dumps(one)
        given = {"schema": text, "schemaType": kind}
        url = f"{served.server.url}/subjects/{topic}-value/versions"
        assert httpx2.post(url, json=given).status_code == 200
    return topic


def post(served: Served, topic: str, *values: Any, **parameters: Any) -> httpx2.Response:
    url = f"{served.server.url}/v1/topics/{topic}/records"
    return httpx2.post(url, json={"records": [{"value": one} for one in values]}, params=parameters)


def stored(served: Served, topic: str) -> list[bytes | None]:
    records = stored_records(served.broker.partition(topic, 0))
    return [None if one.value is None else bytes(one.value) for one in records]


def test_confluents_deserializer_reads_what_was_sent_as_json(
    served: Served, registry: SchemaRegistryClient
) -> None:
    topic = topic_with(served, FLIGHT)
    assert post(served, topic, *ROWS, None, value_schema_version="latest").status_code == 200
    decode = AvroDeserializer(registry)
    context = SerializationContext(topic, MessageField.VALUE)
    first, second, last = stored(served, topic)
    assert [decode(one, context) for one in (first, second)] == [
        ROWS[0],
        {"carrier": "AA", "delay": None},
    ]
    assert last is None


def test_json_is_kept_as_it_is_and_protobuf_is_the_first_message(
    served: Served, registry: SchemaRegistryClient
) -> None:
    topic = topic_with(served, JSON_FLIGHT, kind="JSON")
    assert post(served, topic, {"delay": 2}, value_schema_version="latest").status_code == 200
    (value,) = stored(served, topic)
    assert value is not None
    assert value[5:] == b'{"delay":2}'
    decode = JSONDeserializer(None, schema_registry_client=registry)
    assert decode(value, SerializationContext(topic, MessageField.VALUE)) == {"delay": 2}
    topic = topic_with(served, PROTO_FLIGHT, kind="PROTOBUF")
    assert post(served, topic, ROWS[0], value_schema_version="1").status_code == 200
    (value,) = stored(served, topic)
    assert value is not None
    assert value[5:] == b"\0\x0a\2UA\x10\2"


def test_a_version_or_an_id_says_which_schema_it_is(served: Served) -> None:
    topic = topic_with(served, FLIGHT, LATER)
    row = {"carrier": "UA"}
    versions = f"{served.server.url}/subjects/{topic}-value/versions"
    ids = [httpx2.get(f"{versions}/{one}").json()["id"] for one in (1, 2)]
    for parameters in (
        {"value_schema_version": "1"},
        {"value_schema_version": "latest"},
        {"value_schema_id": ids[0]},
    ):
        assert post(served, topic, row, **parameters).status_code == 200
    heads = [b"\0" + one.to_bytes(4) for one in ids]
    assert stored(served, topic) == [
        heads[0] + b"\4UA\0",
        heads[1] + b"\4UA\0\6SFO",
        heads[0] + b"\4UA\0",
    ]


@pytest.mark.parametrize("envelope", [False, True])
def test_lines_are_encoded_too_and_text_is_a_string(served: Served, envelope: bool) -> None:
    topic = topic_with(served, '"string"')
    lines = ['{"value": "5", "key": "k"}', '{"value": "x"}'] if envelope else ['"5"', '"x"']
    answer = httpx2.post(
        f"{served.server.url}/v1/topics/{topic}/records",
        content="\n".join(lines),
        headers={"content-type": NDJSON},
        params={"value_schema_version": "latest", "envelope": envelope},
    )
    assert answer.status_code == 200, answer.text
    assert [one[5:] for one in stored(served, topic) if one] == [b"\0025", b"\2x"]


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ({"carrier": 5}, "/carrier: a string is expected, not 5"),
        ({"delay": 2}, "/carrier: missing"),
        ({"carrier": "UA", "delay": "2"}, "/delay: a whole number of 32 bits is expected"),
        ({"carrier": "UA", "delay": 2**31}, "/delay: a whole number of 32 bits is expected"),
        ({"carrier": "UA", "late": 2}, "/late: Flight has no such field"),
        ("UA", "/: an object is expected"),
    ],
)
def test_a_value_that_does_not_fit_is_refused_by_record_path_and_schema(
    served: Served, value: Any, expected: str
) -> None:
    topic = topic_with(served, FLIGHT)
    answer = post(served, topic, ROWS[0], value, value_schema_version="latest")
    assert (answer.status_code, answer.json()["code"]) == (422, "schema-mismatch")
    (error,) = answer.json()["errors"]
    assert error["loc"] == "records[1].value"
    assert f"of the subject '{topic}-value': {expected}" in error["msg"]
    assert not stored(served, topic)


@pytest.mark.parametrize(
    ("parameters", "status", "loc"),
    [
        ({"value_schema_version": "9"}, 422, "value_schema_version"),
        ({"value_schema_id": 999_999}, 422, "value_schema_id"),
        ({"value_schema_version": "newest"}, 400, "value_schema_version"),
        ({"value_schema_id": 0}, 400, "value_schema_id"),
        ({"value_schema_id": 1, "value_schema_version": "1"}, 400, "value_schema_version"),
    ],
)
def test_a_schema_that_is_not_there_is_refused_by_its_parameter(
    served: Served, parameters: Any, status: int, loc: str
) -> None:
    topic = topic_with(served, FLIGHT)
    answer = post(served, topic, ROWS[0], **parameters)
    assert answer.status_code == status, answer.text
    assert answer.json()["errors"][0]["loc"] == loc


KEY = {"type": "record", "name": "Tail", "fields": [{"name": "number", "type": "string"}]}


def with_key(topic: str, served: Served, schema: Any = KEY) -> str:
    """A topic that has a schema of its keys, too."""
    url = f"{served.server.url}/subjects/{topic}-key/versions"
    assert httpx2.post(url, json={"schema": json.dumps(schema)}).status_code == 200
    return topic


def produced(served: Served, topic: str, *records: Any, **parameters: Any) -> httpx2.Response:
    url = f"{served.server.url}/v1/topics/{topic}/records"
    return httpx2.post(url, json={"records": records}, params=parameters)


def test_keys_are_encoded_by_a_schema_of_their_own(
    served: Served, registry: SchemaRegistryClient
) -> None:
    topic = with_key(topic_with(served, FLIGHT), served)
    record = {"key": {"number": "N14228"}, "value": ROWS[0]}
    both = {"key_schema_version": "latest", "value_schema_version": "latest"}
    assert produced(served, topic, record, {"value": ROWS[1]}, **both).status_code == 200
    first, second = stored_records(served.broker.partition(topic, 0))
    decode = AvroDeserializer(registry)
    context = SerializationContext(topic, MessageField.KEY)
    assert decode(bytes(first.key or b""), context) == record["key"]
    assert second.key is None
    answer = httpx2.get(
        f"{served.server.url}/v1/topics/{topic}/partitions/0/records", params={"decode": True}
    ).json()["records"]
    assert answer[0]["key"] == record["key"]
    assert answer[0]["key_schema"]["subject"] == f"{topic}-key"
    # Alone, values are stored as they are.
    topic = with_key(topic_with(served, level="none"), served, schema="string")
    record = {"key": "N1", "value": {"any": 1}}
    assert produced(served, topic, record, key_schema_version="1").status_code == 200
    (found,) = stored_records(served.broker.partition(topic, 0))
    assert bytes(found.key or b"")[5:] == b"\4N1"
    assert bytes(found.value or b"") == b'{"any":1}'


def test_a_key_goes_to_the_partition_that_its_bytes_say(served: Served) -> None:
    topic = f"encoded-{next(_numbers)}"
    served.broker.create_topic(topic, partitions=7)
    with_key(topic, served, schema="string")
    keys = [{"key": f"k{one}", "value": one} for one in range(20)]
    assert produced(served, topic, *keys, key_schema_version="latest").status_code == 200
    found = {
        bytes(one.key or b""): number
        for number in range(7)
        for one in stored_records(served.broker.partition(topic, number))
    }
    assert len(found) == 20
    assert found == {key: partition_for_key(key, 7) for key in found}


@pytest.mark.parametrize("envelope", [False, True])
def test_a_key_that_does_not_fit_is_refused_by_record_path_and_schema(
    served: Served, envelope: bool
) -> None:
    topic = with_key(topic_with(served, FLIGHT), served)
    records = [{"key": {"number": "N1"}, "value": 1}, {"key": {"number": 5}, "value": 1}]
    if envelope:
        answer = httpx2.post(
            f"{served.server.url}/v1/topics/{topic}/records",
            content="\n".join(map(json.dumps, records)),
            headers={"content-type": NDJSON},
            params={"key_schema_version": "latest", "envelope": True},
        )
    else:
        answer = produced(served, topic, *records, key_schema_version="latest")
    assert (answer.status_code, answer.json()["code"]) == (422, "schema-mismatch")
    (error,) = answer.json()["errors"]
    assert error["loc"] == ("line 2.key" if envelope else "records[1].key")
    assert "the key is not of schema" in error["msg"]
    assert f"of the subject '{topic}-key': /number: a string is expected, not 5" in error["msg"]
    assert not stored(served, topic)


@pytest.mark.parametrize(
    ("parameters", "status", "loc"),
    [
        ({"key_schema_version": "9"}, 422, "key_schema_version"),
        ({"key_schema_id": 999_999}, 422, "key_schema_id"),
        ({"key_schema_id": 1, "key_schema_version": "1"}, 400, "key_schema_version"),
    ],
)
def test_a_schema_of_keys_that_is_not_there_is_refused_by_its_parameter(
    served: Served, parameters: Any, status: int, loc: str
) -> None:
    topic = topic_with(served, FLIGHT)
    answer = post(served, topic, ROWS[0], **parameters)
    assert answer.status_code == status, answer.text
    assert answer.json()["errors"][0]["loc"] == loc


def test_keys_that_are_bytes_or_not_there_have_no_schema(served: Served) -> None:
    topic = with_key(topic_with(served, FLIGHT, level="none"), served)
    latest = {"key_schema_version": "latest"}
    answer = produced(served, topic, {"key_base64": "AAEC", "value": 1}, **latest)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == "records[0].key_base64"
    url = f"{served.server.url}/v1/topics/{topic}/records"
    for media_type in (NDJSON, "application/octet-stream"):
        headers = {"content-type": media_type}
        answer = httpx2.post(url, content=b"{}", headers=headers, params=latest)
        assert answer.status_code == 400
        assert answer.json()["errors"][0]["loc"] == "key_schema_version"


def test_bytes_are_not_encoded(served: Served) -> None:
    topic = topic_with(served, FLIGHT)
    url = f"{served.server.url}/v1/topics/{topic}/records"
    latest = {"value_schema_version": "latest"}
    answer = httpx2.post(url, json={"records": [{"value_base64": "AAEC"}]}, params=latest)
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["loc"] == "records[0].value_base64"
    headers = {"content-type": "application/octet-stream"}
    answer = httpx2.post(url, content=b"{}", headers=headers, params=latest)
    assert answer.json()["errors"][0]["loc"] == "value_schema_version"


def test_the_client_and_the_command_name_a_schema(served: Served, tmp_path: Path) -> None:
    topic = topic_with(served, FLIGHT, LATER)
    with Client(served.server.url) as client:
        client.produce(topic, [json.dumps(one) for one in ROWS], value_schema=1)
        client.produce(topic, [json.dumps(ROWS[1]), None], value_schema="latest")
        with pytest.raises(InvalidRequest, match="value: not JSON"):
            client.produce(topic, ["1}, {"], value_schema="latest")
    assert [None if one is None else one[5:] for one in stored(served, topic)] == [
        b"\4UA\2\4",
        b"\4AA\0",
        b"\4AA\0\6SFO",
        None,
    ]
    tierlog = Program(served.server.url)
    tierlog.ok("produce", topic, "--value-schema", "latest", stdin=b'{"carrier": "DL"}\n')
    (tmp_path / "rows.csv").write_text("carrier\nB6\n")
    tierlog.ok("produce", topic, str(tmp_path / "rows.csv"), "--value-schema", "1")
    assert [one[5:] for one in stored(served, topic)[4:] if one] == [b"\4DL\0\6SFO", b"\4B6\0"]
    refused = tierlog.run("produce", topic, "--value-schema", "1", stdin=b'{"carrier": 5}\n')
    assert refused.returncode
    assert b"/carrier: a string is expected, not 5" in refused.stderr


def test_the_client_and_the_command_name_a_schema_of_keys(served: Served, tmp_path: Path) -> None:
    topic = with_key(topic_with(served, FLIGHT), served, schema="string")
    both = {"key_schema": "latest", "value_schema": "latest"}
    with Client(served.server.url) as client:
        record = NewRecord(json.dumps(ROWS[0]), key='"N0"')
        client.produce(topic, [record], **both)
        with pytest.raises(InvalidRequest, match="key: not JSON"):
            client.produce(topic, [record._replace(key="N0")], **both)
    tierlog = Program(served.server.url)
    (tmp_path / "rows.csv").write_text("carrier\nB6\n")
    options = ("--value-schema", "latest", "--key-schema", "latest")
    rows = str(tmp_path / "rows.csv")
    tierlog.ok("produce", topic, rows, "--key-column", "carrier", *options)
    line = b'"N1"|{"carrier": "DL"}\n'
    tierlog.ok("produce", topic, "--key-separator", "|", *options, stdin=line)
    line = b'{"key": "N2", "value": {"carrier": "UA"}}\n'
    tierlog.ok("produce", topic, "--format", "envelope", *options, stdin=line)
    keys = [bytes(one.key or b"")[5:] for one in stored_records(served.broker.partition(topic, 0))]
    assert keys == [b"\4N0", b"\4B6", b"\4N1", b"\4N2"]
    shown = tierlog.ok("consume", topic, "--format", "json", "-n", "1")
    found = json.loads(shown)
    assert (found["key"], found["value"]) == ("N0", ROWS[0])
    assert {"key_schema_id", "value_schema_id"} <= found.keys()
    raw = tierlog.ok("consume", topic, "--raw", "--format", "json", "-n", "1")
    assert json.loads(raw)["key"] == "\0" + found["key_schema_id"].to_bytes(4).decode() + "\4N0"
    refused = tierlog.run("produce", topic, *options, stdin=b'{"carrier": "UA"}\n')
    assert refused.returncode
    assert b"--key-schema requires keys" in refused.stderr


def test_any_broker_of_a_cluster_encodes(tmp_path: Path) -> None:
    with three_brokers(tmp_path) as brokers:
        brokers[0].broker.create_topic("encoded", partitions=3)
        url = f"{brokers[0].server.url}/subjects/encoded-value/versions"
        assert httpx2.post(url, json={"schema": json.dumps(FLIGHT)}).status_code == 200
        for one in brokers:
            for number in range(3):
                url = f"{one.server.url}/v1/topics/encoded/partitions/{number}/records"
                params = {"value_schema_version": "latest"}
                body = {"records": [{"value": ROWS[0]}]}
                assert httpx2.post(url, json=body, params=params, timeout=30).status_code == 200
