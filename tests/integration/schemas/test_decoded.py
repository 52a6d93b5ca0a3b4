"""Records over HTTP as what they say, by the schemas whose ids they begin with."""

import base64
import itertools
import json
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.served_broker import Served, served_broker
from tierlog.api.http.header_values import BATCHES
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.broker.schema_registry.decoding import decode_to_json
from tierlog.broker.schema_registry.formats import parse_schema
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.schema_state import Source

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": "int"}],
}
NDJSON = "application/x-ndjson"
UA = {"carrier": "UA", "delay": 2}
UA_BYTES = b"\x04UA\x04"
_numbers = itertools.count()


def register(url: str, subject: str, schema: object, **headers: str) -> int:
    given = {"schema": json.dumps(schema)}
    answer = httpx2.post(f"{url}/subjects/{subject}/versions", json=given, headers=headers)
    assert answer.status_code == 200, answer.text
    return int(answer.json()["id"])


def head(schema_id: int) -> bytes:
    return b"\0" + schema_id.to_bytes(4)


def produce(url: str, topic: str, *records: dict[str, bytes | None], **headers: str) -> None:
    sent = [
        {f"{part}_base64": one if one is None else base64.b64encode(one).decode()}
        for record in records
        for part, one in record.items()
    ]
    answer = httpx2.post(
        f"{url}/v1/topics/{topic}/records", json={"records": sent}, headers=headers
    )
    assert answer.status_code == 200, answer.text


def decoded(url: str, topic: str, *, headers: dict[str, str] | None = None, **query: Any) -> Any:
    place = f"{url}/v1/topics/{topic}/partitions/0/records"
    return httpx2.get(place, params={"decode": "true", **query}, headers=headers or {})


def new_topic(served: Served) -> str:
    topic = f"decoded-{next(_numbers)}"
    served.broker.create_topic(topic)
    return topic


def test_a_value_is_what_it_says_and_its_schema_is_named(served: Served) -> None:
    url, topic = served.server.url, new_topic(served)
    schema_id = register(url, f"{topic}-value", FLIGHT)
    produce(url, topic, {"value": head(schema_id) + UA_BYTES}, {"value": None}, {"value": b"plain"})
    (first, second, third) = decoded(url, topic).json()["records"]
    assert first["value"] == UA
    assert first["value_schema"] == {"id": schema_id, "subject": f"{topic}-value", "version": 1}
    assert second["value"] is None
    assert third["value"] == "plain"
    assert not {"value_schema", "key_schema"} & (second.keys() | third.keys())
    lines = decoded(url, topic, headers={"accept": NDJSON}).text.splitlines()
    assert json.loads(lines[0])["value"] == UA
    plain = decoded(url, topic, decode="false", encoding="base64").json()["records"][0]
    assert base64.b64decode(plain["value_base64"]) == head(schema_id) + UA_BYTES


def test_a_key_has_the_schema_of_its_own_subject(served: Served) -> None:
    url, topic = served.server.url, new_topic(served)
    schema_id = register(url, "anybodys-key", "string")
    produce(url, topic, {"key": head(schema_id) + b"\x04UA"})
    (one,) = decoded(url, topic).json()["records"]
    assert (one["key"], one["key_schema"]["subject"]) == ("UA", "anybodys-key")
    register(url, f"{topic}-key", FLIGHT)
    register(url, f"{topic}-key-of-others", "string")
    other = new_topic(served)
    assert register(url, f"{other}-key", "string") == schema_id
    produce(url, other, {"key": head(schema_id) + b"\x04UA"})
    (one,) = decoded(url, other).json()["records"]
    assert one["key_schema"] == {"id": schema_id, "subject": f"{other}-key", "version": 1}


def test_one_that_does_not_decode_says_why_and_is_as_it_was_sent(served: Served) -> None:
    url, topic = served.server.url, new_topic(served)
    schema_id = register(url, f"{topic}-value", FLIGHT)
    bad = [head(schema_id) + UA_BYTES[:2], head(2**32 - 1) + b"x", head(0) + b"\0\0\x05"]
    produce(url, topic, *({"value": one} for one in bad), {"value": head(schema_id) + UA_BYTES})
    records = decoded(url, topic, encoding="base64").json()["records"]
    problems = [one["value_schema"].get("problem") for one in records]
    assert problems[0].startswith("it ends early")
    assert problems[1:] == ["there is no schema of this id"] * 2 + [None]
    assert records[0]["value_schema"]["subject"] == f"{topic}-value"
    assert [base64.b64decode(one["value_base64"]) for one in records[:3]] == bad
    assert (records[3]["value"], "value_base64" in records[3]) == (UA, False)


def test_only_records_of_a_key_are_decoded_too(served: Served) -> None:
    url, topic = served.server.url, new_topic(served)
    schema_id = register(url, f"{topic}-value", "string")
    place = f"{url}/v1/topics/{topic}/records"
    for key in ("a", "b"):
        value = base64.b64encode(head(schema_id) + b"\x02" + key.encode()).decode()
        httpx2.post(place, json={"records": [{"key": key, "value_base64": value}]})
    assert [one["value"] for one in decoded(url, topic, key="b").json()["records"]] == ["b"]


def test_record_batches_are_not_decoded(served: Served) -> None:
    topic = new_topic(served)
    refused = decoded(served.server.url, topic, headers={"accept": BATCHES})
    assert (refused.status_code, refused.json()["errors"][0]["loc"]) == (400, "decode")


def test_few_bytes_that_say_much_are_not_decoded() -> None:
    field = {"name": "n" * 10_000, "type": "int"}
    items = {"type": "record", "name": "r", "fields": [field]}
    schema = parse_schema(Source("AVRO", json.dumps({"type": "array", "items": items})))
    value = head(1) + b"\x80\x10" + b"\x00" * 1024 + b"\x00"
    with pytest.raises(Malformed, match="more than 1000000 bytes"):
        decode_to_json(schema, value, max_bytes=1_000_000)
    assert len(decode_to_json(schema, value)) > 1024 * 10_000


def test_a_token_for_some_topics_decodes_by_the_schemas_that_it_sees(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    every = create_token(tokens, "a", scopes=tuple(Scope), now_ms=1)
    some = create_token(tokens, "r", scopes=(Scope.READ,), topics="eu.", now_ms=1)
    all_of_it, reads = ({"authorization": f"Bearer {one}"} for one in (every, some))
    with served_broker(tmp_path / "data", http=HttpSettings(tokens_file=tokens)) as served:
        url = served.server.url
        httpx2.post(f"{url}/v1/topics", json={"name": "eu.a"}, headers=all_of_it)
        theirs = register(url, "us.secret", FLIGHT, **all_of_it)
        ours = register(url, "eu.other", "string", **all_of_it)
        values = (head(theirs) + UA_BYTES, head(ours) + b"\x02x")
        produce(url, "eu.a", *({"value": one} for one in values), **all_of_it)
        first, second = decoded(url, "eu.a", headers=reads).json()["records"]
        assert first["value_schema"] == {"id": theirs, "problem": "there is no schema of this id"}
        assert (second["value"], second["value_schema"]["subject"]) == ("x", "eu.other")
        first, _ = decoded(url, "eu.a", headers=all_of_it).json()["records"]
        assert first["value"] == UA
