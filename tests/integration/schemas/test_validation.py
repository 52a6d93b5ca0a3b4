"""`schema.validation`: what producers send is checked against the schemas of the topic."""

import base64
import itertools
import json
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import httpx2
import pytest
from confluent_kafka import Producer
from kafka import KafkaProducer
from kafka.errors import InvalidRecordError

from tests.fakes.kafka_brokers import leads, three_brokers
from tests.fakes.served_broker import Served

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": "int"}],
}
JSON_FLIGHT = {
    "type": "object",
    "properties": {"delay": {"type": "integer", "minimum": 0}},
    "required": ["delay"],
}
_numbers = itertools.count()


def avro(row: Any, schema_id: int) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, FLIGHT, row)
    return b"\0" + schema_id.to_bytes(4) + stream.getvalue()


def register(served: Served, topic: str, document: Any, kind: str = "AVRO") -> int:
    text = document if kind == "PROTOBUF" else json.dumps(document)
    given = {"schema": text, "schemaType": kind}
    url = f"{served.server.url}/subjects/{topic}-value/versions"
    answer = httpx2.post(url, json=given)
    assert answer.status_code == 200, answer.text
    schema_id: int = answer.json()["id"]
    return schema_id


def topic_of(served: Served, level: str) -> str:
    topic = f"checked-{level}-{next(_numbers)}"
    served.broker.create_topic(topic, config={"schema.validation": level})
    return topic


def post(served: Served, topic: str, *values: bytes | None) -> httpx2.Response:
    coded = [None if one is None else base64.b64encode(one).decode() for one in values]
    url = f"{served.server.url}/v1/topics/{topic}/records"
    return httpx2.post(url, json={"records": [{"value_base64": one} for one in coded]})


GOOD = {"carrier": "UA", "delay": 2}


@pytest.mark.parametrize("codec", ["none", "lz4"])
@pytest.mark.parametrize("level", ["id", "full"])
def test_a_produce_over_kafkas_wire_is_refused_record_by_record(
    served: Served, level: str, codec: str
) -> None:
    topic = topic_of(served, level)
    schema_id = register(served, topic, FLIGHT)
    address = f"127.0.0.1:{served.kafka_port}"
    settings = {"bootstrap.servers": address, "compression.type": codec, "linger.ms": 200}
    delivered: list[Any] = []
    producer = Producer({**settings, "retries": 0})

    def send(*values: bytes | None) -> list[Any]:
        delivered.clear()
        for value in values:
            producer.produce(
                topic, value, key=b"k", on_delivery=lambda error, _: delivered.append(error)
            )
        assert producer.flush(30) == 0
        return [None if error is None else error.name() for error in delivered]

    assert send(avro(GOOD, schema_id), None, avro(GOOD, schema_id)) == [None] * 3
    end = served.broker.partition(topic, 0).log_end_offset
    refused = send(avro(GOOD, schema_id), b"plain", avro(GOOD, schema_id))
    assert "INVALID_RECORD" in refused, refused
    assert "INVALID_RECORD" in send(avro(GOOD, schema_id + 1000))
    damaged = send(avro(GOOD, schema_id)[:-2])
    assert damaged == ([None] if level == "id" else ["INVALID_RECORD"])
    assert served.broker.partition(topic, 0).log_end_offset == end + (level == "id")


def test_the_wire_names_the_records_by_their_batch_indexes(served: Served) -> None:
    topic = topic_of(served, "id")
    schema_id = register(served, topic, FLIGHT)
    producer = KafkaProducer(
        bootstrap_servers=f"127.0.0.1:{served.kafka_port}", linger_ms=500, retries=0
    )
    try:
        values = [avro(GOOD, schema_id), b"plain", avro(GOOD, schema_id)]
        sent = [producer.send(topic, value, partition=0) for value in values]
        producer.flush()
        with pytest.raises(InvalidRecordError) as info:
            sent[1].get(timeout=30)
        assert "record 1: the value does not begin with the id of a schema" in str(info.value)
    finally:
        producer.close()


@pytest.mark.parametrize(
    ("level", "value", "expected"),
    [
        ("id", b"plain", "does not begin with the id of a schema"),
        ("id", b"", "does not begin with the id of a schema"),
        ("id", b"\0\0\0\0", "does not begin with the id of a schema"),
        ("id", b"\0\0\1\0\0", "id 65536 is no schema of the subject"),
        ("full", b"ID", "it ends early"),
        ("full", b"ID\4UA\4x", "1 bytes follow its end"),
        ("full", b"ID\4\xff\xff\4", "codec can't decode"),
    ],
)
def test_a_produce_over_http_is_refused_by_its_path(
    served: Served, level: str, value: bytes, expected: str
) -> None:
    topic = topic_of(served, level)
    head = b"\0" + register(served, topic, FLIGHT).to_bytes(4)
    good = head + b"\4UA\4"
    assert post(served, topic, good, None, good).status_code == 200
    answer = post(served, topic, good, value.replace(b"ID", head))
    assert (answer.status_code, answer.json()["code"]) == (422, "schema-mismatch")
    (error,) = answer.json()["errors"]
    assert error["loc"] == "records[1].value"
    assert expected in error["msg"]
    assert served.broker.partition(topic, 0).log_end_offset == 3


def test_json_values_are_validated_and_the_path_within_them_is_named(served: Served) -> None:
    topic = topic_of(served, "full")
    head = b"\0" + register(served, topic, JSON_FLIGHT, "JSON").to_bytes(4)
    assert post(served, topic, head + b'{"delay": 2}').status_code == 200
    answer = post(served, topic, head + b'{"delay": -1}')
    assert answer.status_code == 422
    assert "/delay: -1 is less than the minimum of 0" in answer.json()["detail"]
    assert "not JSON" in post(served, topic, head + b"{").json()["detail"]


def test_protobuf_values_are_decoded_as_the_message_that_they_name(served: Served) -> None:
    topic = topic_of(served, "full")
    text = 'syntax = "proto3"; message A { string a = 1; } message B { int32 b = 1; }'
    head = b"\0" + register(served, topic, text, "PROTOBUF").to_bytes(4)
    assert post(served, topic, head + b"\0\x0a\1a", head + b"\2\2\x08\2").status_code == 200
    for value, expected in ((b"\0\x0a\2a", "it is no A"), (b"\2\4", "index [2]")):
        answer = post(served, topic, head + b"\0", head + value)
        assert (answer.status_code, answer.json()["code"]) == (422, "schema-mismatch")
        (error,) = answer.json()["errors"]
        assert error["loc"] == "records[1].value"
        assert expected in error["msg"]


@pytest.mark.parametrize("level", ["id", "full"])
def test_a_batch_may_have_values_of_several_schemas(served: Served, level: str) -> None:
    topic = topic_of(served, level)
    wider = {**FLIGHT, "fields": [*FLIGHT["fields"][:1]]}
    ids = [register(served, topic, one) for one in (FLIGHT, wider)]
    values = [avro(GOOD, ids[0]), None, b"\0" + ids[1].to_bytes(4) + b"\4UA"]
    wrong = b"\0" + (ids[1] + 1000).to_bytes(4) + b"\4UA"
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{served.kafka_port}", "linger.ms": 200})
    errors: list[Any] = []
    for batch in (values, [None], [*values, wrong]):
        for value in batch:
            producer.produce(topic, value, on_delivery=lambda error, _: errors.append(error))
        assert producer.flush(30) == 0
        assert post(served, topic, *batch).status_code == (422 if wrong in batch else 200)
    assert errors[:4] == [None] * 4
    assert all(errors[4:]), errors


def test_an_id_of_another_subject_is_refused_until_it_is_registered_here(served: Served) -> None:
    topic, other = topic_of(served, "id"), topic_of(served, "id")
    schema_id = register(served, other, FLIGHT)
    assert post(served, other, avro(GOOD, schema_id)).status_code == 200
    assert post(served, topic, avro(GOOD, schema_id)).status_code == 422
    assert register(served, topic, FLIGHT) == schema_id
    assert post(served, topic, avro(GOOD, schema_id)).status_code == 200


def test_a_value_of_few_bytes_that_would_take_all_memory_or_stack_is_not_decoded(
    served: Served,
) -> None:
    nothing = {"type": "record", "name": "Nothing", "fields": []}
    following = [{"name": "next", "type": ["null", "List"]}]
    for schema, hostile, problem in (
        (
            {"type": "array", "items": nothing},
            b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f",
            "/: more than 100000 values that take no bytes",
        ),
        (
            {"type": "record", "name": "List", "fields": following},
            b"\2" * 200_000,
            "/next/next/next/next/next/…: nested more than 200 levels deep",
        ),
    ):
        topic = topic_of(served, "full")
        head = b"\0" + register(served, topic, schema).to_bytes(4)
        answer = post(served, topic, head + hostile)
        assert (answer.status_code, answer.json()["code"]) == (422, "schema-mismatch")
        assert problem in answer.json()["detail"]


def test_every_leader_of_a_cluster_knows_the_ids(tmp_path: Path) -> None:
    with three_brokers(tmp_path) as brokers:
        config = {"schema.validation": "id"}
        brokers[0].broker.create_topic("checked", partitions=3, config=config)
        schema_id = register(brokers[0], "checked", FLIGHT)
        record = {"value_base64": base64.b64encode(avro(GOOD, schema_id)).decode()}
        plain = {"value": "plain"}
        with httpx2.Client(timeout=30) as http:
            for one in brokers:
                for number in range(3):
                    url = f"{one.server.url}/v1/topics/checked/partitions/{number}/records"
                    assert http.post(url, json={"records": [record]}).status_code == 200
                    assert http.post(url, json={"records": [plain]}).status_code == 422
        assert len([one for one in brokers if leads(brokers, one, "checked")]) == 3
