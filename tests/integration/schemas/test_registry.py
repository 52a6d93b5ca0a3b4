"""The schema registry as Confluent's own clients see it."""

import asyncio
import base64
import itertools
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.schema_registry import (
    AsyncSchemaRegistryClient,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
)
from confluent_kafka.schema_registry.avro import (
    AsyncAvroDeserializer,
    AsyncAvroSerializer,
    AvroDeserializer,
    AvroSerializer,
)
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.schema_registry.json_schema import (
    AsyncJSONDeserializer,
    AsyncJSONSerializer,
    JSONDeserializer,
    JSONSerializer,
)
from confluent_kafka.schema_registry.protobuf import (
    AsyncProtobufDeserializer,
    AsyncProtobufSerializer,
    ProtobufDeserializer,
    ProtobufSerializer,
)
from confluent_kafka.serialization import MessageField, SerializationContext
from google.protobuf import (
    descriptor_pb2,
    descriptor_pool,
    json_format,
    message_factory,
    timestamp_pb2,
)

from tests.fakes.served_broker import Served
from tierlog.broker.schema_registry.registry import SchemaRegistry
from tierlog.broker.topics.coordinator_log import append_records, stored_records
from tierlog.record_format.proto_parser import parse_proto
from tierlog.record_format.schema_records import Schema as Kept
from tierlog.record_format.schema_records import SubjectVersion, schema_row

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": "int"}],
}
JSON_FLIGHT = {
    "type": "object",
    "title": "Flight",
    "additionalProperties": False,
    "properties": {"carrier": {"type": "string"}, "delay": {"type": "integer"}},
    "required": ["carrier"],
}
PROTO_FLIGHT = """
syntax = "proto3";
message Flight { string carrier = 1; int32 delay = 2; }
"""
PLACES = 'syntax = "proto3"; package io; message Place { string name = 1; }'
IMPORTING = """
syntax = "proto3";
package io;
import "places.proto";
import "google/protobuf/timestamp.proto";
message Flight {
  message Leg { Place to = 1; google.protobuf.Timestamp at = 2; }
  repeated Leg legs = 1;
}
"""
ROWS = [{"carrier": "UA", "delay": 2}, {"carrier": "AA", "delay": -3}]
_numbers = itertools.count()


@pytest.fixture
def subject() -> str:
    return f"topic-{next(_numbers)}-value"


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.server.url) as client:
        yield client


def avro(*fields: Any, name: str = "Flight", **more: Any) -> Schema:
    return Schema(json.dumps({"type": "record", "name": name, "fields": fields, **more}), "AVRO")


def text(field: str, **more: Any) -> Any:
    return {"name": field, "type": "string", **more}


def refused(call: Any) -> tuple[int, int]:
    with pytest.raises(SchemaRegistryError) as info:
        call()
    return info.value.http_status_code, info.value.error_code


def proto_message(text: str, name: str, **imports: str) -> Any:
    """A message's class, as protoc's generated code has it, in a pool of its own."""
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(timestamp_pb2.DESCRIPTOR.serialized_pb)
    for path, one in {**imports, "flights": text}.items():
        file = parse_proto(one)
        file.name = f"{path}.proto"
        pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName(name))


@pytest.mark.parametrize("kind", ["AVRO", "JSON", "PROTOBUF"])
def test_records_of_confluents_serializers_come_back(
    served: Served, registry: SchemaRegistryClient, subject: str, kind: str
) -> None:
    topic = subject.removesuffix("-value")
    served.broker.create_topic(topic)
    context = SerializationContext(topic, MessageField.VALUE)
    if kind == "AVRO":
        encode: Any = AvroSerializer(registry, json.dumps(FLIGHT))
        decode: Any = AvroDeserializer(registry)
    elif kind == "PROTOBUF":
        flight = proto_message(PROTO_FLIGHT, "Flight")
        to_bytes, from_bytes = (
            ProtobufSerializer(flight, registry),
            ProtobufDeserializer(flight, {}, registry),
        )
        encode = lambda row, context: to_bytes(flight(**row), context)  # noqa: E731
        decode = lambda value, context: json_format.MessageToDict(  # noqa: E731
            from_bytes(value, context)
        )
    else:
        encode = JSONSerializer(json.dumps(JSON_FLIGHT), registry)
        decode = JSONDeserializer(None, schema_registry_client=registry)
    registry.clear_caches()
    address = {"bootstrap.servers": f"127.0.0.1:{served.kafka_port}"}
    producer = Producer(address)
    for row in ROWS:
        producer.produce(topic, encode(row, context))
    assert producer.flush(30) == 0
    consumer = Consumer({**address, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    got = consumer.consume(len(ROWS), timeout=30)
    consumer.close()
    assert [decode(one.value(), context) for one in got] == ROWS
    found = registry.get_latest_version(subject)
    assert (found.version, found.schema.schema_type) == (1, kind)
    assert {one.value()[:5] for one in got} == {b"\0" + found.schema_id.to_bytes(4, "big")}


def test_protobuf_messages_that_import_others_come_back(
    registry: SchemaRegistryClient, subject: str
) -> None:
    nested = proto_message(IMPORTING, "io.Flight.Leg", places=PLACES)
    context = SerializationContext(subject.removesuffix("-value"), MessageField.VALUE)
    encode = ProtobufSerializer(nested, registry)
    decode = ProtobufDeserializer(nested, {}, registry)
    leg = nested()
    leg.to.name, leg.at.seconds = "SFO", 7
    encoded = encode(leg, context)
    assert decode(encoded, context) == leg
    assert encoded[5:8] == b"\4\0\0"  # the first's first message
    registry.clear_caches()
    found = registry.get_latest_version(subject)
    assert found.schema.references == [SchemaReference("places.proto", "places.proto", 1)]
    assert "  message Leg {\n    .io.Place to = 1;" in found.schema.schema_str
    # As text, it is the same schema.
    schema = Schema(IMPORTING, "PROTOBUF", found.schema.references)
    assert registry.register_schema(subject, schema) == found.schema_id
    serialized = registry.get_version(subject, 1, fmt="serialized").schema.schema_str
    file = descriptor_pb2.FileDescriptorProto.FromString(base64.b64decode(serialized))
    assert [one.name for one in file.message_type] == ["Flight"]
    wider = IMPORTING.replace("Place to", "string to")
    bad = Schema(wider, "PROTOBUF", found.schema.references)
    assert refused(lambda: registry.register_schema(subject, bad)) == (409, 40901)


@pytest.mark.parametrize("kind", ["AVRO", "JSON", "PROTOBUF"])
def test_the_asynchronous_client_and_its_serializers_work_as_well(
    served: Served, subject: str, kind: str
) -> None:
    flight = proto_message(PROTO_FLIGHT, "Flight")

    async def serializers(client: AsyncSchemaRegistryClient) -> tuple[Any, Any, Any]:
        """And what they are given."""
        if kind == "AVRO":
            encode: Any = await AsyncAvroSerializer(client, json.dumps(FLIGHT))
            return encode, await AsyncAvroDeserializer(client), ROWS[0]
        if kind == "PROTOBUF":
            encode = await AsyncProtobufSerializer(flight, client)
            return encode, await AsyncProtobufDeserializer(flight, {}, client), flight(**ROWS[0])
        encode = await AsyncJSONSerializer(json.dumps(JSON_FLIGHT), client)
        decode: Any = await AsyncJSONDeserializer(None, schema_registry_client=client)
        return encode, decode, ROWS[0]

    async def run() -> None:
        async with AsyncSchemaRegistryClient({"url": served.server.url}) as client:
            context = SerializationContext(subject.removesuffix("-value"), MessageField.VALUE)
            encode, decode, given = await serializers(client)
            encoded = await encode(given, context)
            assert await client.get_subjects(subject_prefix=subject) == [subject]
            await client.clear_caches()
            assert await decode(encoded, context) == given
            found = await client.get_latest_version(subject)
            assert found.schema.schema_type == kind
            assert encoded[:5] == b"\0" + found.schema_id.to_bytes(4, "big")

    asyncio.run(run())


def test_concurrent_registrations_give_one_id_and_one_version(
    http: httpx2.Client, subject: str
) -> None:
    document = {"schema": json.dumps({**FLIGHT, "name": "Concurrent"})}

    def register(_: int) -> Any:
        return http.post(f"/subjects/{subject}/versions", json=document).json()

    with ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(register, range(16)))
    assert len({one["id"] for one in answers}) == 1, answers
    assert http.get(f"/subjects/{subject}/versions").json() == [1]


def test_schemas_that_say_the_same_have_one_id(
    registry: SchemaRegistryClient, subject: str
) -> None:
    first = registry.register_schema(subject, avro(text("a"), name="Same", namespace="x"))
    for other in (
        Schema(json.dumps({"fields": [text("a")], "name": "x.Same", "type": "record"}, indent=2)),
        avro({"name": "a", "type": {"type": "string"}}, name="Same", namespace="x"),
    ):
        assert registry.register_schema(subject, other) == first
        assert registry.register_schema(f"{subject}-2", other) == first
    with_doc = avro(text("a"), name="Same", namespace="x", doc="another")
    assert registry.register_schema(subject, with_doc) != first
    assert registry.get_versions(subject) == [1, 2]
    places = registry.get_schema_versions(first)
    assert [(one.subject, one.version) for one in places] == [(subject, 1), (f"{subject}-2", 1)]


def test_the_level_decides_what_may_follow(registry: SchemaRegistryClient, subject: str) -> None:
    registry.register_schema(subject, avro(text("a")))
    wider = avro(text("a"), text("b"))
    assert refused(lambda: registry.register_schema(subject, wider)) == (409, 40901)
    assert not registry.test_compatibility(subject, wider)
    assert not registry.test_compatibility_all_versions(subject, wider)
    registry.set_compatibility(subject, "forward")
    assert registry.get_compatibility(subject) == "FORWARD"
    registry.register_schema(subject, wider)
    assert registry.get_versions(subject) == [1, 2]
    registry.delete_config(subject)
    assert refused(lambda: registry.get_config(subject)) == (404, 40408)


def test_a_refusal_names_what_is_incompatible(http: httpx2.Client, subject: str) -> None:
    path = f"/subjects/{subject}/versions"
    schema = avro(text("a")).schema_str
    assert http.post(path, json={"schema": schema}).status_code == 200
    wider = {"schema": avro(text("a"), text("b")).schema_str}
    problem = http.post(path, json=wider).json()
    assert problem["code"] == "incompatible-schema"
    assert "READER_FIELD_MISSING_DEFAULT_VALUE" in problem["message"]
    assert "'b'" in problem["message"]
    tested = http.post(f"/compatibility{path}/latest", json=wider, params={"verbose": True}).json()
    assert not tested["is_compatible"]
    assert any("oldSchemaVersion: 1" in one for one in tested["messages"])


def test_what_is_deleted_softly_keeps_its_id_and_for_good_loses_it(
    registry: SchemaRegistryClient, subject: str
) -> None:
    name = subject.replace("-", "_")
    first = registry.register_schema(subject, avro(text("a"), name=name))
    assert refused(lambda: registry.delete_subject(subject, permanent=True)) == (404, 40405)
    assert registry.delete_subject(subject) == [1]
    assert refused(lambda: registry.delete_subject(subject)) == (404, 40404)
    assert refused(lambda: registry.get_latest_version(subject)) == (404, 40401)
    assert subject not in registry.get_subjects()
    assert subject in registry.get_subjects(deleted=True)
    assert subject in registry.get_subjects(deleted_only=True)
    registry.clear_caches()
    assert registry.get_schema(first).schema_str
    assert registry.register_schema(subject, avro(text("a"), name=name)) == first
    assert registry.get_versions(subject) == [2]
    assert registry.delete_version(subject, 2) == 2
    assert refused(lambda: registry.delete_version(subject, 2)) == (404, 40406)
    assert registry.delete_subject(subject, permanent=True) == [1, 2]
    registry.clear_caches()
    assert refused(lambda: registry.get_schema(first)) == (404, 40403)
    assert registry.register_schema(subject, avro(text("a"), name=name)) > first


def test_a_schema_may_refer_to_others_which_then_cannot_be_deleted(
    registry: SchemaRegistryClient, subject: str
) -> None:
    registry.register_schema(f"{subject}-a", avro(text("a"), name="x.Inner"))
    inner = SchemaReference("x.Inner", f"{subject}-a", 1)
    outer = json.dumps(
        {"type": "record", "name": "Outer", "fields": [{"name": "i", "type": "x.Inner"}]}
    )
    schema_id = registry.register_schema(subject, Schema(outer, "AVRO", [inner]))
    assert registry.get_referenced_by(f"{subject}-a", 1) == [schema_id]
    assert registry.get_latest_version(subject).schema.references == [inner]
    assert refused(lambda: registry.delete_version(f"{subject}-a", 1)) == (422, 42206)
    assert refused(lambda: registry.delete_subject(f"{subject}-a")) == (422, 42206)
    gone = SchemaReference("x.Inner", f"{subject}-a", 9)
    bad = Schema(outer, "AVRO", [gone])
    assert refused(lambda: registry.register_schema(subject, bad)) == (422, 42201)
    registry.register_schema(f"{subject}-j", Schema('{"type": "string"}', "JSON"))
    referring = json.dumps({"type": "object", "properties": {"s": {"$ref": "text.json"}}})
    to_text = SchemaReference("text.json", f"{subject}-j", 1)
    registry.register_schema(f"{subject}-r", Schema(referring, "JSON", [to_text]))
    registry.delete_subject(subject)
    registry.delete_subject(f"{subject}-a")


@pytest.mark.parametrize(
    ("method", "path", "body", "expected"),
    [
        ("GET", "/schemas/ids/999999", None, (404, 40403)),
        ("GET", "/subjects/nobodys/versions", None, (404, 40401)),
        ("GET", "/subjects/nobodys/versions/1", None, (404, 40401)),
        ("GET", "/subjects/nobodys/versions/0", None, (422, 42202)),
        ("GET", "/subjects/nobodys/versions/first", None, (422, 42202)),
        ("POST", "/subjects/nobodys", {"schema": '"string"'}, (404, 40401)),
        ("POST", "/subjects/s/versions", {"schema": "{"}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": '{"type":"nope"}'}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": '["int","int"]'}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": "1e999"}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": "[" * 99_999}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": "a", "schemaType": "XML"}, (422, 42201)),
        ("POST", "/subjects/s/versions", {"schema": "{}", "schemaType": "PROTOBUF"}, (422, 42201)),
        (
            "POST",
            "/subjects/s/versions",
            {"schema": '{"$ref":"http://127.0.0.1:9/x"}', "schemaType": "JSON"},
            (422, 42201),
        ),
        ("POST", "/subjects/:.ctx:s/versions", {"schema": '"string"'}, (422, 42208)),
        ("POST", "/subjects/s/versions", {"schema": '"int"', "ruleSet": {}}, (400, 400)),
        ("GET", "/schemas/guids/0b1ac9b1-3bc2-6c3a-8e8b-6b2f1d0e3b6a", None, (404, 40403)),
        ("GET", "/subjects/nobodys/metadata?key=a&value=b", None, (404, 40401)),
        ("PUT", "/config", {"compatibility": "sideways"}, (422, 42203)),
        ("PUT", "/mode", {"mode": "FORWARD"}, (422, 42204)),
        ("GET", "/mode/nobodys", None, (404, 40409)),
        ("GET", "/config/nobodys", None, (404, 40408)),
        ("DELETE", "/mode/nobodys", None, (404, 40401)),
        ("DELETE", "/config/nobodys", None, (404, 40401)),
        ("DELETE", "/subjects/nobodys", None, (404, 40401)),
        ("POST", "/compatibility/subjects/nobodys/versions/1", {"schema": '"int"'}, (404, 40401)),
        ("POST", "/compatibility/subjects/nobodys/versions", {"schema": "{"}, (422, 42201)),
    ],
)
def test_refusals_have_confluents_codes(
    http: httpx2.Client, method: str, path: str, body: Any, expected: tuple[int, int]
) -> None:
    answer = http.request(method, path, json=body)
    document = answer.json()
    assert (answer.status_code, document["error_code"]) == expected, document
    assert document["message"] == document["detail"]


def test_answers_have_the_media_type_that_is_preferred(http: httpx2.Client) -> None:
    for accept, expected in {
        "*/*": "application/vnd.schemaregistry.v1+json",
        "application/json": "application/json",
        "application/vnd.schemaregistry.v1+json, application/json": "application/vnd.schema"
        "registry.v1+json",
    }.items():
        answer = http.get("/subjects", headers={"accept": accept})
        assert answer.headers["content-type"] == expected
    assert http.get("/subjects", headers={"accept": "text/html"}).status_code == 406


def test_the_records_are_those_of_confluents_registry(
    served: Served, http: httpx2.Client, subject: str
) -> None:
    given = {"schema": '{"type": "string"}', "schemaType": "JSON"}
    schema_id = http.post(f"/subjects/{subject}/versions", json=given).json()["id"]
    partition = served.broker.partition("_schemas", 0)
    record = list(stored_records(partition))[-1]
    assert bytes(record.key or b"") == (
        b'{"keytype":"SCHEMA","subject":"%b","version":1,"magic":1}' % subject.encode()
    )
    assert json.loads(bytes(record.value or b"")) == {
        "subject": subject,
        "version": 1,
        "id": schema_id,
        "schemaType": "JSON",
        "schema": '{"type":"string"}',
        "deleted": False,
    }
    assert served.broker.topic("_schemas").config.compacts


def test_clients_cannot_delete_or_trim_what_records_name_the_ids_of(
    served: Served, registry: SchemaRegistryClient, http: httpx2.Client, subject: str
) -> None:
    schema_id = registry.register_schema(subject, avro(text("a")))
    topic = "/v1/topics/_schemas"
    assert http.delete(topic).status_code == 403
    trim = {"before_offset": 1}
    assert http.post(f"{topic}/partitions/0/trim", json=trim).status_code == 403
    admin = AdminClient({"bootstrap.servers": f"127.0.0.1:{served.kafka_port}"})
    (refusal,) = [one.exception(30) for one in admin.delete_topics(["_schemas"]).values()]
    assert refusal.args[0].code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    (refusal,) = [
        one.exception(30)
        for one in admin.delete_records([TopicPartition("_schemas", 0, 1)]).values()
    ]
    assert refusal.args[0].code() == KafkaError.POLICY_VIOLATION
    assert http.get(f"/schemas/ids/{schema_id}").status_code == 200


def test_what_another_registry_writes_to_the_topic_counts(
    served: Served, http: httpx2.Client, subject: str
) -> None:
    """Karapace, on Kafka's wire; and what nobody can read costs nothing else."""
    highest = highest_id(http)
    key = {"subject": subject, "version": 1, "magic": 1, "keytype": "SCHEMA"}
    value = {
        "subject": subject,
        "version": 1,
        "id": highest + 10,
        "schema": '{"name":"Theirs","type":"record","fields":[]}',
        "deleted": False,
        "md5": "unknown here",
    }
    producer = Producer({"bootstrap.servers": f"127.0.0.1:{served.kafka_port}"})
    producer.produce("_schemas", b"\xff", key=b"not json")
    producer.produce("_schemas", b"{}", key=json.dumps({**key, "subject": ":.ctx:s"}))
    producer.produce("_schemas", json.dumps(value), key=json.dumps(key))
    assert producer.flush(30) == 0
    found = http.get(f"/subjects/{subject}/versions/latest").json()
    assert (found["id"], found["schema"]) == (highest + 10, value["schema"])
    same = {"schema": '{"type":"record","name":"Theirs","fields":[]}'}
    assert http.post(f"/subjects/{subject}/versions", json=same).json()["id"] == highest + 10
    new = {"schema": '{"type":"record","name":"Ours","fields":[]}'}
    path = f"/subjects/{subject}-2/versions"
    assert http.post(path, json=new).json()["id"] == highest + 11


def test_an_id_that_another_registry_gives_meanwhile_is_not_given_again(
    served: Served, http: httpx2.Client, subject: str
) -> None:
    theirs = itertools.chain([True], itertools.repeat(False))
    highest = highest_id(http)
    other = SubjectVersion(f"{subject}-2", 1, highest + 1, of_record("Theirs2"))

    def clock() -> int:  # between a decision and its append
        if next(theirs):
            partition = served.broker.partition("_schemas", 0)
            append_records(partition, [schema_row(other)], now_ms=1).result()
        return 1

    registry = SchemaRegistry(served.broker._topics, clock=clock)
    assert registry.register(subject, of_record("Ours2")).schema_id == highest + 2
    assert http.get(f"/subjects/{subject}-2/versions/1").json()["id"] == highest + 1


def highest_id(http: httpx2.Client) -> int:
    first = http.post("/subjects/first/versions", json={"schema": '"string"'}).json()["id"]
    answer = http.get(f"/schemas/ids/{first}", params={"fetchMaxId": True})
    highest: int = answer.json()["maxId"]
    return highest


def of_record(name: str) -> Kept:
    return Kept("AVRO", json.dumps({"type": "record", "name": name, "fields": []}))


def test_a_subject_that_nobody_has_takes_any_schema_and_a_bad_one_is_told(
    http: httpx2.Client, subject: str
) -> None:
    path = f"/compatibility/subjects/{subject}/versions"
    for at in (path, f"{path}/latest"):
        answer = http.post(at, json={"schema": '"string"'}, params={"verbose": True})
        assert answer.json() == {"is_compatible": True}
        answer = http.post(at, json={"schema": "{"}, params={"verbose": True})
        assert not answer.json()["is_compatible"]
        assert "Invalid schema" in answer.json()["messages"][0]


def test_lists_are_of_what_is_asked_for(http: httpx2.Client, subject: str) -> None:
    path = f"/subjects/{subject}/versions"
    for number in range(4):
        http.put(f"/config/{subject}", json={"compatibility": "NONE"})
        assert http.post(path, json=given_record(f"N{number}")).status_code == 200
    assert http.delete(f"{path}/latest").json() == 4
    assert http.delete(f"{path}/latest").json() == 3, "the latest that is left"

    def listed(at: str, **query: Any) -> Any:
        return http.get(at, params=query).json()

    assert listed(path) == [1, 2]
    assert listed(path, deleted=True) == [1, 2, 3, 4]
    assert listed(path, deletedOnly=True) == [3, 4]
    assert listed(path, deletedAsNegative=True) == [1, 2, -3, -4]
    assert listed(path, deleted=True, offset=1, limit=2) == [2, 3]
    assert listed("/subjects", subjectPrefix=f":*:{subject}") == [subject]
    assert listed("/subjects", subjectPrefix=f":.:{subject}", limit=0) == []
    latest = listed("/schemas", subjectPrefix=subject, latestOnly=True)
    assert [one["version"] for one in latest] == [2]
    assert listed("/contexts") == ["."]
    assert listed("/contexts", contextPrefix=".other") == []
    assert listed("/contexts", offset=1) == []


def given_record(name: str) -> dict[str, str]:
    return {"schema": of_record(name).text}
