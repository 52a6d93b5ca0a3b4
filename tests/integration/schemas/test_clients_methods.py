"""Each method of Confluent's Python client against a broker, synchronous and asynchronous."""

import asyncio
import contextlib
import inspect
import itertools
import json
from typing import Any, Final

import pytest
from confluent_kafka.schema_registry import (
    AsyncSchemaRegistryClient,
    Metadata,
    MetadataProperties,
    Schema,
    SchemaReference,
    SchemaRegistryClient,
    ServerConfig,
    dual_schema_id_deserializer,
    header_schema_id_serializer,
)
from confluent_kafka.schema_registry.avro import AvroDeserializer, AvroSerializer
from confluent_kafka.schema_registry.error import SchemaRegistryError
from confluent_kafka.serialization import MessageField, SerializationContext

from tests.fakes.served_broker import Served

_NOT_THERE: Final = (404, 404)
_numbers = itertools.count()


def of_record(*fields: str, name: str = "R", **properties: str) -> Schema:
    shown = [{"name": one, "type": "int", "default": 0} for one in fields]
    text = json.dumps({"type": "record", "name": name, "fields": shown}, separators=(",", ":"))
    metadata = Metadata(None, MetadataProperties(properties), None) if properties else None
    return Schema(text, "AVRO", metadata=metadata)


class Calls:
    """Calls methods by their names, and keeps which were called."""

    def __init__(self, client: Any) -> None:
        self._client = client
        # They ask for nothing.
        self.names = {"aclose", "close", "config", "new_client", "clear_latest_caches"}

    async def __call__(self, name: str, *args: Any, **options: Any) -> Any:
        self.names.add(name)
        found = getattr(self._client, name)(*args, **options)
        return await found if inspect.isawaitable(found) else found

    async def refused(self, name: str, *args: Any) -> tuple[int, int]:
        with pytest.raises(SchemaRegistryError) as info:
            await self(name, *args)
        return info.value.http_status_code, info.value.error_code


async def ask_everything(call: Calls, subject: str) -> None:
    await ask_about_schemas(call, subject)
    await ask_about_levels_and_modes(call, subject)
    await delete_them(call, subject)
    # Topics are associated with subjects by their names alone.
    assert await call.refused("get_associations_by_resource_name", "flights", "-") == _NOT_THERE
    request = type("Request", (), {"to_dict": lambda _: {}})()
    assert await call.refused("create_association", request) == _NOT_THERE
    assert await call.refused("delete_associations", "flights") == _NOT_THERE


async def ask_about_schemas(call: Calls, subject: str) -> None:
    name = subject.replace("-", "_")
    owned, wider = of_record("a", name=name, owner="ops"), of_record("a", "b", name=name)
    first = await call("register_schema_full_response", subject, owned)
    assert (first.version, bool(first.guid)) == (1, True)
    second = await call("register_schema", subject, wider)
    third = await call("register_schema", subject, of_record("a", "b", name=name, owner="dev"))
    assert second < third
    await call("clear_caches")
    assert (await call("lookup_schema", subject, owned)).version == 1
    found = await call("get_schema", first.schema_id, subject, reference_format="qualified")
    assert (found.schema_str, found.metadata.properties.properties) == (
        owned.schema_str,
        {"owner": "ops"},
    )
    assert (await call("get_schema_by_guid", first.guid)).schema_str == owned.schema_str
    assert await call("get_schema_types") == ["JSON", "PROTOBUF", "AVRO"]
    assert await call("get_subjects_by_schema_id", first.schema_id) == [subject]
    places = await call("get_schema_versions", first.schema_id)
    assert [(one.subject, one.version) for one in places] == [(subject, 1)]
    assert subject in await call("get_subjects")
    assert await call("get_subjects", subject, offset=1, limit=5) == []
    assert await call("get_versions", subject, offset=1) == [2, 3]
    assert (await call("get_latest_version", subject)).schema_id == third
    assert (await call("get_version", subject, 2)).schema_id == second
    wanted = {"owner": "ops"}
    assert (await call("get_latest_with_metadata", subject, wanted)).version == 2, "it is inherited"
    assert (await call("get_latest_with_metadata", subject, {"owner": "dev"})).version == 3
    none = await call.refused("get_latest_with_metadata", subject, {**wanted, "stage": "x"})
    assert none == (404, 40403)
    referring = Schema(f'["{name}"]', "AVRO", [SchemaReference(name, subject, 3)])
    referrer = await call("register_schema", f"{subject}-2", referring)
    assert await call("get_referenced_by", subject, 3) == [referrer]
    await call("delete_subject", f"{subject}-2")


async def ask_about_levels_and_modes(call: Calls, subject: str) -> None:
    name = subject.replace("-", "_")
    narrower = Schema(json.dumps({"type": "record", "name": name, "fields": []}), "AVRO")
    required = {"name": "c", "type": "int"}
    wider = Schema(json.dumps({"type": "record", "name": name, "fields": [required]}), "AVRO")
    assert await call("test_compatibility", subject, narrower)
    assert not await call("test_compatibility", subject, wider, verbose=True)
    assert not await call("test_compatibility_all_versions", subject, wider)
    assert await call("set_compatibility", subject, "FORWARD") == {"compatibility": "FORWARD"}
    assert await call("test_compatibility_all_versions", subject, wider, normalize=True)
    assert await call("get_compatibility", subject) == "FORWARD"
    assert (await call("get_config", subject)).compatibility_level == "FORWARD"
    assert (await call("delete_config", subject)).compatibility_level == "FORWARD"
    config = ServerConfig.from_dict({"compatibility": "FULL"})
    assert await call("set_config", subject, config) == {"compatibility": "FULL"}
    assert await call("update_mode", subject, "READONLY") == "READONLY"
    assert await call("get_mode", subject) == "READONLY"
    assert await call("delete_mode", subject) == "READONLY"
    assert await call("update_global_mode", "READWRITE", force=True) == "READWRITE"
    assert await call("get_global_mode") == "READWRITE"
    assert await call("get_contexts") == ["."]


async def delete_them(call: Calls, subject: str) -> None:
    assert await call("delete_version", subject, 3) == 3
    assert await call("get_versions", subject, deleted_only=True) == [3]
    assert await call("delete_subject", f"{subject}-2", permanent=True) == [1]
    assert await call("delete_version", subject, 3, permanent=True) == 3
    assert await call("delete_subject", subject) == [1, 2]
    assert await call("get_subjects", deleted_only=True, subject_prefix=subject) == [subject]
    assert await call("delete_subject", subject, permanent=True) == [1, 2]
    assert await call.refused("get_config", subject) == (404, 40408)


@pytest.mark.parametrize("kind", [SchemaRegistryClient, AsyncSchemaRegistryClient])
def test_each_method_is_answered_or_refused_in_words(served: Served, kind: Any) -> None:
    async def run() -> None:
        async with contextlib.AsyncExitStack() as stack:
            client = kind({"url": served.server.url})
            if kind is SchemaRegistryClient:
                stack.enter_context(client)
            else:
                await stack.enter_async_context(client)
            call = Calls(client)
            await ask_everything(call, f"methods-{next(_numbers)}-value")
        methods = inspect.getmembers(kind, inspect.isfunction)
        assert {name for name, _ in methods if not name.startswith("_")} <= call.names

    asyncio.run(run())


def test_a_serializer_puts_a_guid_into_a_header(registry: SchemaRegistryClient) -> None:
    topic = f"methods-{next(_numbers)}"
    row = {"a": 1, "b": 2**31 - 1}  # of more than the five bytes that there always were
    schema = of_record(*row).schema_str
    context = SerializationContext(topic, MessageField.VALUE, {})
    encode = AvroSerializer(
        registry, schema, conf={"schema.id.serializer": header_schema_id_serializer}
    )
    encoded = encode(row, context)
    assert encoded == b"\2\xfe\xff\xff\xff\x0f", "no id is before it"
    registry.clear_caches()
    decode = AvroDeserializer(
        registry, conf={"schema.id.deserializer": dual_schema_id_deserializer}
    )
    assert context.headers
    context = SerializationContext(topic, MessageField.VALUE, list(dict(context.headers).items()))
    assert decode(encoded, context) == row


def test_a_serializer_takes_the_latest_schema_with_some_metadata(
    registry: SchemaRegistryClient,
) -> None:
    topic = f"methods-{next(_numbers)}"
    registry.set_compatibility(f"{topic}-value", "NONE")
    schemas = [of_record(field, major=number) for field, number in (("a", "1"), ("b", "2"))]
    ids = [registry.register_schema(f"{topic}-value", one) for one in schemas]
    conf = {"auto.register.schemas": False, "use.latest.with.metadata": {"major": "1"}}
    encode = AvroSerializer(registry, None, conf=conf)
    encoded = encode({"a": 5}, SerializationContext(topic, MessageField.VALUE))
    assert encoded == b"\0" + ids[0].to_bytes(4, "big") + b"\n"
