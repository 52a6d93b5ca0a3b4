"""Modes: who may register, and schemas that are imported with ids that another registry gave."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx2
import pytest

from tests.fakes.served_broker import Served
from tierlog.broker.topics.coordinator_log import append_records
from tierlog.record_format.schema_records import Schema, SubjectVersion, schema_row

NOT_PERMITTED = (422, 42205)
_ids = itertools.count(10_000, 100)


@pytest.fixture
def http(served: Served) -> Iterator[httpx2.Client]:
    with httpx2.Client(base_url=served.server.url) as client:
        yield client
        client.put("/mode", json={"mode": "READWRITE"}).raise_for_status()


@pytest.fixture
def first_id() -> int:
    """Of some that no other test gives."""
    return next(_ids)


@pytest.fixture
def subject(first_id: int) -> str:
    return f"imported-{first_id}"


def of_record(name: str, *fields: str) -> str:
    shown = [{"name": one, "type": "string"} for one in fields]
    return json.dumps({"type": "record", "name": name, "fields": shown}, separators=(",", ":"))


def post(http: httpx2.Client, subject: str, schema: str, **given: Any) -> Any:
    """The id, or the status and the code."""
    answer = http.post(f"/subjects/{subject}/versions", json={"schema": schema, **given})
    document = answer.json()
    return document.get("id") or (answer.status_code, document["error_code"])


def set_mode(http: httpx2.Client, mode: str, subject: str = "", **query: Any) -> Any:
    path = f"/mode/{subject}" if subject else "/mode"
    answer = http.put(path, json={"mode": mode}, params=query)
    document = answer.json()
    return document.get("mode") or (answer.status_code, document["error_code"])


def versions(http: httpx2.Client, subject: str) -> dict[int, int]:
    """Ids by version."""
    numbers = http.get(f"/subjects/{subject}/versions").json()
    return {one: http.get(f"/subjects/{subject}/versions/{one}").json()["id"] for one in numbers}


def test_a_subject_that_is_read_only_stays_as_it_is(http: httpx2.Client, subject: str) -> None:
    kept = post(http, subject, of_record("R", "a"))
    assert set_mode(http, "readonly", subject) == "READONLY"
    assert post(http, subject, of_record("R")) == NOT_PERMITTED
    assert post(http, subject, of_record("R", "a")) == kept, "it is there already"
    for method, path in (
        ("DELETE", f"/subjects/{subject}"),
        ("DELETE", f"/subjects/{subject}/versions/1"),
        ("PUT", f"/config/{subject}"),
    ):
        answer = http.request(method, path, json={"compatibility": "NONE"})
        assert (answer.status_code, answer.json()["error_code"]) == NOT_PERMITTED, path
    assert http.delete(f"/mode/{subject}").json() == {"mode": "READONLY"}
    assert http.get(f"/mode/{subject}").json()["error_code"] == 40409
    assert http.get(f"/mode/{subject}", params={"defaultToGlobal": True}).json() == {
        "mode": "READWRITE"
    }
    assert post(http, subject, of_record("R")) == kept + 1


def test_a_subjects_own_mode_counts_unless_that_of_all_overrides_it(
    http: httpx2.Client, subject: str
) -> None:
    assert set_mode(http, "READWRITE", subject) == "READWRITE"
    assert set_mode(http, "READONLY") == "READONLY"
    assert post(http, f"{subject}-2", of_record("R")) == NOT_PERMITTED
    assert isinstance(post(http, subject, of_record("R", subject.replace("-", "_"))), int)
    assert set_mode(http, "READONLY_OVERRIDE") == "READONLY_OVERRIDE"
    assert post(http, subject, of_record("R")) == NOT_PERMITTED
    assert http.delete("/mode").json() == {"mode": "READONLY_OVERRIDE"}
    assert http.get("/mode").json() == {"mode": "READWRITE"}


def test_an_import_keeps_ids_and_versions_and_compares_nothing(
    http: httpx2.Client, subject: str, first_id: int
) -> None:
    assert post(http, subject, of_record("A"), id=first_id, version=3) == NOT_PERMITTED
    assert set_mode(http, "IMPORT", subject) == "IMPORT"
    assert post(http, subject, of_record("A")) == NOT_PERMITTED, "no id is given"
    given = {3: (first_id + 7, of_record("A", "a")), 5: (first_id, of_record("B", "b"))}
    for number, (schema_id, schema) in given.items():
        assert post(http, subject, schema, id=schema_id, version=number) == schema_id
        assert post(http, subject, schema, id=schema_id, version=number) == schema_id, "again"
    assert versions(http, subject) == {3: first_id + 7, 5: first_id}
    assert http.get(f"/schemas/ids/{first_id}").json()["schema"] == given[5][1]
    # The next version, of a schema that is known already.
    assert post(http, subject, given[3][1], id=first_id + 7, version=6) == first_id + 7
    assert set_mode(http, "READWRITE", subject) == "READWRITE"
    assert post(http, subject, of_record("A", "a", "c"))[0] == 409
    assert post(http, f"{subject}-2", of_record("C", "c")) == first_id + 8, "above what was given"


def test_an_import_overwrites_no_id_and_no_version(
    http: httpx2.Client, subject: str, first_id: int
) -> None:
    set_mode(http, "IMPORT", subject)
    assert post(http, subject, of_record("A"), id=first_id, version=1) == first_id
    assert post(http, subject, of_record("B"), id=first_id, version=2) == NOT_PERMITTED
    assert post(http, subject, of_record("B"), id=first_id + 1, version=1) == NOT_PERMITTED
    assert versions(http, subject) == {1: first_id}
    http.delete(f"/subjects/{subject}").raise_for_status()
    assert http.get(f"/mode/{subject}").json() == {"mode": "IMPORT"}, "until it is gone for good"
    assert post(http, subject, of_record("B"), id=first_id + 1, version=1) == first_id + 1
    assert versions(http, subject) == {1: first_id + 1}
    assert http.get(f"/schemas/ids/{first_id}").status_code == 404


def test_import_is_refused_where_there_are_schemas_unless_it_is_forced(
    http: httpx2.Client, subject: str
) -> None:
    post(http, subject, of_record("A"))
    assert set_mode(http, "IMPORT", subject) == NOT_PERMITTED
    assert set_mode(http, "IMPORT") == NOT_PERMITTED
    assert http.get("/mode").json() == {"mode": "READWRITE"}
    assert set_mode(http, "IMPORT", subject, force=True) == "IMPORT"
    assert set_mode(http, "IMPORT", subject) == "IMPORT", "it is already"
    assert set_mode(http, "IMPORT", force=True) == "IMPORT"


def test_one_schema_may_have_several_ids_each_of_its_own_subject(
    served: Served, http: httpx2.Client, subject: str, first_id: int
) -> None:
    """As in a registry that tells schemas apart by how they are written."""
    schema = of_record("Twice", "a")
    spaced = schema.replace(",", ", ")
    set_mode(http, "IMPORT", subject)
    assert post(http, subject, schema, id=first_id, version=1) == first_id
    theirs = SubjectVersion(f"{subject}-2", 1, first_id + 1, Schema("AVRO", spaced))
    partition = served.broker.partition("_schemas", 0)
    append_records(partition, [schema_row(theirs)], now_ms=1).result()
    assert post(http, f"{subject}-2", schema) == first_id + 1
    assert versions(http, f"{subject}-2") == {1: first_id + 1}
    assert post(http, subject, schema) == first_id
    assert post(http, f"{subject}-3", schema) == first_id, "the lowest"
    # The id is another schema's now.
    set_mode(http, "READWRITE", f"{subject}-2")
    for permanent in (False, True):
        params = {"permanent": permanent}
        http.delete(f"/subjects/{subject}-2", params=params).raise_for_status()
    other = of_record("Other", "b")
    assert http.get(f"/mode/{subject}-2").json()["error_code"] == 40409
    set_mode(http, "IMPORT", f"{subject}-2")
    assert post(http, f"{subject}-2", other, id=first_id + 1, version=1) == first_id + 1
    assert post(http, f"{subject}-3", schema) == first_id
    set_mode(http, "READWRITE", f"{subject}-2")
    assert post(http, f"{subject}-2", schema)[0] == 409, "it is another schema"
    assert post(http, f"{subject}-2", other) == first_id + 1


def test_a_version_that_is_given_without_an_id_has_to_be_the_next(
    http: httpx2.Client, subject: str
) -> None:
    first = post(http, subject, of_record("Numbered"), version=1)
    assert post(http, subject, of_record("Numbered"), version=1, id=-1) == first
    assert post(http, subject, of_record("Numbered"), version=-1) == first
    http.put(f"/config/{subject}", json={"compatibility": "NONE"})
    assert post(http, subject, of_record("Numbered", "a"), version=3) == (422, 42201)
    assert post(http, subject, of_record("Numbered", "a"), version=2) == first + 1
