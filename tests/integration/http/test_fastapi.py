"""Calls that carry no records, through FastAPI's own test client: no socket, no server of ours."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fastapi.routing import APIRoute
from fastapi.testclient import TestClient

from tierlog.api.app import create_app
from tierlog.api.http.dispatch import TierlogApp
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.broker import Broker
from tierlog.broker.settings import BrokerSettings


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TierlogApp]:
    data_dir: Path = tmp_path_factory.mktemp("broker") / "data"
    broker = Broker.open(BrokerSettings(data_dir=data_dir, disk_reserve_bytes=0), store=None)
    yield create_app(broker, HttpSettings(check_host=False))
    broker.close()


@pytest.fixture(scope="module")
def client(app: TierlogApp) -> Iterator[TestClient]:
    with TestClient(app) as client:
        assert client.post("/v1/topics", json={"name": "t"}).status_code == 201
        yield client


def test_every_call_without_records_is_a_route_of_fastapi(app: TierlogApp) -> None:
    served = {route.path for route in app.routes if isinstance(route, APIRoute)}
    passing_by = {path for path in app.openapi()["paths"] if path not in served}
    ends = ("/records", "/tail", "/fetch", "/segments/{base_offset}")
    assert all(path.endswith(ends) for path in passing_by)
    assert {"/docs", "/docs/{file}", "/openapi.json", "/console/static/{file}"} <= served
    assert not {"/docs", "/docs/{file}", "/openapi.json"} & app.openapi()["paths"].keys()
    assert len(served) > 10


CONSTANT = ["/docs", "/docs/docs.js", "/openapi.json", "/console/static/console.css"]


@pytest.mark.parametrize("path", CONSTANT)
def test_what_is_constant_is_a_route_with_the_contract_kept(client: TestClient, path: str) -> None:
    response = client.post(path)
    assert response.status_code == 405
    assert response.headers["allow"] == "GET, HEAD"
    assert client.get(f"{path}?x=1").status_code == 400
    got = client.get(path)
    assert got.headers["cache-control"] == "no-cache"
    if "etag" in got.headers:
        again = client.get(path, headers={"if-none-match": got.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")
        assert again.headers["etag"] == got.headers["etag"]


@pytest.mark.parametrize(
    "path", ["/v1/topics/t", "/healthz", "/v1/storage", "/v1/groups", *CONSTANT]
)
def test_a_head_is_the_head_of_the_get(client: TestClient, path: str) -> None:
    got, head = client.get(path), client.head(path)
    assert got.status_code == head.status_code == 200
    assert head.content == b""
    assert head.headers["content-type"] == got.headers["content-type"]
    assert head.headers["content-length"] == got.headers["content-length"]
    assert got.headers["x-request-id"]


def test_a_method_too_many_is_told_which_there_are(client: TestClient) -> None:
    response = client.put("/v1/topics/t")
    assert response.status_code == 405
    assert response.headers["allow"] == "DELETE, GET, HEAD, PATCH"


@pytest.mark.parametrize("name", ["a/b", "%41", "a%2Fb", "ünï", "a b"])
def test_a_name_in_a_path_is_decoded_once(client: TestClient, name: str) -> None:
    sent = "".join(f"%{byte:02X}" for byte in name.encode())
    commit = {"offsets": [{"topic": "t", "partition": 0, "offset": 0}]}
    assert client.put(f"/v1/groups/{sent}/offsets", json=commit).status_code == 204
    assert client.get(f"/v1/groups/{sent}").json()["group"] == name
    assert name in [one["group"] for one in client.get("/v1/groups").json()["groups"]]
    assert client.delete(f"/v1/groups/{sent}").status_code == 204


@pytest.mark.parametrize(
    ("method", "path", "body", "loc"),
    [
        ("GET", "/v1/topics?prefx=a", None, "prefx"),
        ("GET", "/v1/topics?internal=maybe", None, "internal"),
        ("POST", "/v1/topics", {"name": "x", "partition": 1}, "partition"),
        ("POST", "/v1/topics", {"name": 7}, "name"),
        ("PATCH", "/v1/topics/t", {"config": {"retention.ms": []}}, "config.retention.ms"),
        ("POST", "/v1/topics/t/offload?wait_ms=-1", None, "wait_ms"),
        ("GET", "/v1/topics/t/partitions/0/segments?limit=0", None, "limit"),
        ("GET", "/v1/topics/t/partitions/one/offsets", None, "partition"),
        ("PUT", "/v1/groups/g/offsets", {"offsets": []}, "offsets"),
    ],
)
def test_a_refusal_is_a_problem_that_says_where(
    client: TestClient, method: str, path: str, body: object, loc: str
) -> None:
    response = client.request(method, path, json=body)
    assert response.status_code == 400, response.text
    assert response.headers["content-type"] == "application/problem+json"
    assert [one["loc"] for one in response.json()["errors"]] == [loc]


def test_a_defect_shows_nothing_but_the_request_id(
    app: TierlogApp, client: TestClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.context.broker, "storage_report", lambda: {}["secret"])
    response = client.get("/v1/storage")
    assert (response.status_code, response.json()["code"]) == (500, "internal")
    assert response.json()["request_id"] == response.headers["x-request-id"]
    assert "secret" not in response.text
