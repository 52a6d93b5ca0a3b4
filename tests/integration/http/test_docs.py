"""`/docs`, which loads nothing from the network."""

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import urljoin

import jsonschema_rs
import pytest

from tests.integration.http.conftest import Api, problem
from tierlog.api.http.access.scopes import DOCS_NAMES
from tierlog.api.http.docs.examples import EXAMPLES


def test_the_page_loads_nothing_from_elsewhere(api: Api) -> None:
    page = api.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    policy = page.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "http" not in policy
    loaded = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert "docs/docs.js" in loaded
    for path in loaded:
        assert api.get(urljoin("/docs", path)).status_code == 200, path


@pytest.mark.parametrize("name", DOCS_NAMES)
def test_static_files_have_an_etag(api: Api, name: str) -> None:
    response = api.get(f"/docs/{name}")
    assert response.status_code == 200
    assert response.content
    again = api.get(f"/docs/{name}", headers={"if-none-match": response.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")


@pytest.mark.parametrize("name", ["docs.py", "..%2fapp.py", "%2e%2e%2fapp.py", "docs.css.map"])
def test_other_files_are_not_served(api: Api, name: str) -> None:
    problem(api.get(f"/docs/{name}"), 404, "not-found")


def test_the_page_shows_the_openapi_document(api: Api) -> None:
    assert 'fetch("openapi.json"' in api.get("/docs/docs.js").text
    document = api.get("/openapi.json")
    assert document.json()["openapi"].startswith("3.")
    tag = document.headers["etag"]
    assert api.get("/openapi.json", headers={"if-none-match": tag}).status_code == 304
    problem(api.get("/openapi.json?x=1"), 400, "invalid-request")
    problem(api.get("/openapi.json", headers={"accept": "text/html"}), 406, "not-acceptable")


def test_examples_match_their_schemas(api: Api) -> None:
    document = api.get("/openapi.json").json()
    checked = dict(enumerate(_examples(document)))
    schemas = {str(number): content["schema"] for number, content in checked.items()}
    validator = jsonschema_rs.validator_for(
        {"properties": schemas, "components": document["components"]}  # compiled once
    )
    for number, content in checked.items():
        for example in _values(content):
            validator.validate({str(number): example})
    assert len(checked) > 200


def test_every_json_body_has_an_example(api: Api) -> None:
    missing = [
        f"{method} {path} {status}"
        for path, methods in api.get("/openapi.json").json()["paths"].items()
        for method, call in methods.items()
        for status, described in {"body": call.get("requestBody", {}), **call["responses"]}.items()
        for media_type, content in described.get("content", {}).items()
        if media_type == "application/json" and "example" not in content
    ]
    assert missing == []


def test_every_body_may_be_compressed(api: Api) -> None:
    unsaid = [
        f"{method} {path}"
        for path, methods in api.get("/openapi.json").json()["paths"].items()
        for method, call in methods.items()
        if "requestBody" in call
        and "Content-Encoding" not in {parameter["name"] for parameter in call["parameters"]}
    ]
    assert unsaid == []


def test_every_example_can_be_sent(api: Api) -> None:
    document = api.get("/openapi.json").json()
    requests = sorted(_requests(document), key=_turn)
    for method, path, operation in requests:
        if (method, path) != ("post", "/v1/topics") and "schemas" not in operation["tags"]:
            _fill_flights(api)
        if "schemas" in operation["tags"]:
            given = {"schema": EXAMPLES["SchemaOfId"]["schema"]}
            assert api.post("/subjects/flights-value/versions", json=given).status_code == 200
        path = _of_a_member(api, path)
        for headers, body in _bodies(operation):
            if path.startswith("/v1/transactions"):
                body = _of_a_producer(api, body)
            with api.stream(
                method, path, params=_query(operation), headers=headers, content=body
            ) as response:
                allowed = {status for status in operation["responses"] if status < "300"}
                if "cluster" in operation["tags"]:  # this broker is alone
                    allowed = {"409"}
                if (method, path) == ("post", "/v1/topics/flights/partitions/0/merge"):
                    allowed = {"404"}  # nobody made that segment
                assert str(response.status_code) in allowed, (method, path, body, response.read())


def test_what_excludes_each_other_is_said_where_it_is_given(api: Api) -> None:
    for path, methods in api.get("/openapi.json").json()["paths"].items():
        given = {one["name"]: one for one in methods.get("get", {}).get("parameters", ())}
        if {"offset", "timestamp"} <= given.keys():
            assert "not both" in methods["get"]["description"], path
            assert "not together with timestamp" in given["offset"]["description"], path


def _of_a_member(api: Api, path: str) -> str:
    """A member's id is the broker's."""
    group, of_members, _ = path.partition("/members/")
    if not of_members:
        return path
    (member,) = api.get(group).json()["members"]
    return path.replace("http-1", member["member_id"])


def _of_a_producer(api: Api, body: bytes | None) -> bytes | None:
    """A producer's id and epoch are the broker's."""
    begun = api.post("/v1/transactions", json={"transactional_id": "etl"}).json()
    given = json.loads(body) if body else {}
    return json.dumps({name: begun.get(name, value) for name, value in given.items()}).encode()


def _turn(request: tuple[str, str, Any]) -> tuple[int, int, str]:
    """What the examples name has to exist first, and is deleted last, after what it holds."""
    method, path, _ = request
    turns = ["put", "get", "patch", "post", "delete"]
    turn = -1 if (method, path) == ("post", "/v1/topics") else turns.index(method)
    return turn, -path.count("/") if method == "delete" else 0, path


def _fill_flights(api: Api) -> None:
    """As many records as the examples count on."""
    end = api.get("/v1/topics/flights/partitions/0/offsets").json()["log_end_offset"]
    if end < 1000:
        api.values("flights", *range(1000))


def _requests(document: Any) -> Iterator[tuple[str, str, Any]]:
    """Each call, on the path of its parameters' examples."""
    for template, methods in document["paths"].items():
        for method, operation in methods.items():
            named = {
                one["name"]: one["example"]
                for one in operation.get("parameters", ())
                if one["in"] == "path"
            }
            yield method, template.format(**named), operation


def _query(operation: Any) -> dict[str, Any]:
    """What is sent where nothing is filled in."""
    given = [one for one in operation.get("parameters", ()) if one["in"] == "query"]
    return {one["name"]: one["schema"]["default"] for one in given if "default" in one["schema"]}


def _bodies(operation: Any) -> Iterator[tuple[dict[str, str], bytes | None]]:
    content = operation.get("requestBody", {}).get("content", {})
    if not content:
        yield {}, None
    for media_type, described in content.items():
        for example in _values(described) if "example" in described else ():
            text = example if isinstance(example, str) else json.dumps(example)
            yield {"content-type": media_type}, text.encode()


def _values(content: dict[str, Any]) -> list[object]:
    """The examples of a body: the one, or the named ones."""
    if "example" in content:
        return [content["example"]]
    return [example["value"] for example in content["examples"].values()]


def _examples(node: object) -> Iterator[dict[str, Any]]:
    if isinstance(node, dict):
        if "schema" in node and ("example" in node or "examples" in node):
            yield node
        for inner in node.values():
            yield from _examples(inner)
