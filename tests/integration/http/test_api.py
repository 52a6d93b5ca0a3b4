import gzip
import re
import socket
import threading
from typing import Any

import httpx2
import pytest

from tests.integration.http.conftest import Api, problem
from tierlog.api.http import strict_json
from tierlog.api.http.access.scopes import OPEN_PATHS
from tierlog.api.http.calls import Call
from tierlog.api.http.routes import CALLS


def test_topics_are_created_listed_altered_and_deleted(api: Api) -> None:
    made = api.post(
        "/v1/topics", json={"name": "life", "partitions": 2, "config": {"retention.ms": "60000"}}
    )
    assert made.status_code == 201
    assert made.headers["location"] == "/v1/topics/life"
    shown = api.get("/v1/topics/life")
    assert shown.json() == made.json()
    assert shown.json()["config"] == {"retention.ms": 60000}
    assert shown.json()["effective_config"]["segment.bytes"] == 1 << 30
    assert len(shown.json()["partitions"]) == 2
    problem(api.post("/v1/topics", json={"name": "life"}), 409, "topic-exists")
    listed = api.get("/v1/topics", params={"prefix": "li"}).json()["topics"]
    assert [(t["name"], t["partitions"]) for t in listed] == [("life", 2)]
    changed = api.patch("/v1/topics/life", json={"config": {"retention.ms": None}, "partitions": 3})
    assert changed.json()["config"] == {}
    assert len(changed.json()["partitions"]) == 3
    problem(api.patch("/v1/topics/life", json={"partitions": 1}), 409, "invalid-partition-count")
    problem(api.patch("/v1/topics/life", json={}), 400, "invalid-request")
    assert api.delete("/v1/topics/life").status_code == 204
    problem(api.get("/v1/topics/life"), 404, "unknown-topic")
    problem(api.delete("/v1/topics/life"), 404, "unknown-topic")


@pytest.mark.parametrize(
    ("body", "code", "loc"),
    [
        ({}, "invalid-request", None),
        ({"name": "a b"}, "invalid-topic-name", "name"),
        ({"name": ".."}, "invalid-topic-name", "name"),
        ({"name": "x" * 250}, "invalid-topic-name", "name"),
        ({"name": "ok", "partitions": 0}, "invalid-request", "partitions"),
        ({"name": "ok", "partitions": "1"}, "invalid-request", "partitions"),
        ({"name": "ok", "config": {"retention.days": 1}}, "invalid-config", None),
        ({"name": "ok", "config": {"segment.bytes": 1}}, "invalid-config", None),
        ({"name": "ok", "replicas": 1}, "invalid-request", "replicas"),
        ({"name": "ok", "replicas": [[0]], "partitions": 2}, "invalid-request", "replicas"),
        ({"name": "ok", "replicas": [[0, 0]]}, "invalid-replica-assignment", "replicas"),
        ({"name": "ok", "replicas": [[]]}, "invalid-replica-assignment", "replicas"),
        ({"name": "ok", "replicas": [[1]]}, "invalid-replica-assignment", "replicas"),
        ({"name": "ok", "replication_factor": 0}, "invalid-replication-factor", None),
        ({"name": "ok", "replication_factor": 3}, "invalid-replication-factor", None),
        (
            {"name": "ok", "config": {"min.insync.replicas": 2}},
            "invalid-config",
            "config.min.insync.replicas",
        ),
    ],
)
def test_an_invalid_topic_is_refused_with_the_member(
    api: Api, body: dict[str, object], code: str, loc: str | None
) -> None:
    refused = problem(api.post("/v1/topics", json=body), 400, code)
    if loc is not None:
        assert refused["errors"][0]["loc"] == loc
    problem(api.get("/v1/topics/ok"), 404, "unknown-topic")


@pytest.mark.parametrize("name", ["__mine", "__consumer_offsets"])
def test_clients_cannot_create_internal_topics(api: Api, name: str) -> None:
    wanted = {"name": name, "config": {"cleanup.policy": "delete"}}
    problem(api.post("/v1/topics", json=wanted), 403, "forbidden")
    problem(api.get(f"/v1/topics/{name}"), 404, "unknown-topic")


@pytest.mark.parametrize("path", ["/v1/producers", "/v1/topics/{}/offload", "/v1/topics/{}/verify"])
def test_a_call_without_a_body_accepts_only_an_empty_object(api: Api, path: str) -> None:
    path = path.format(api.topic())
    for body in (b"", b" ", b"{}"):
        assert api.post(path, content=body).status_code == 200
    refused = problem(api.post(path, json={"wait_ms": 5}), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == "wait_ms"
    text = {"content-type": "text/plain"}
    problem(api.post(path, content=b"{}", headers=text), 415, "unsupported-media-type")
    packed = {"content-encoding": "gzip"}
    assert api.post(path, content=gzip.compress(b"{}"), headers=packed).status_code == 200


def test_whole_numbers_may_have_leading_zeros_and_others_are_refused(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a", "b")
    segments = f"/v1/topics/{topic}/partitions/000/segments"
    assert api.get(f"{segments}/{0:020}?").status_code == 200
    assert api.get(segments, params={"limit": "01", "from_offset": f"{0:020}"}).status_code == 200
    fetched = api.fetch(topic, offset=f"{1:020}", max_bytes="0001", max_records="01")
    assert fetched.json()["next_offset"] == 2
    for params, said in (
        ({"max_records": ""}, "expected a whole number, not ''"),
        ({"max_records": "٣"}, "expected a whole number, not '٣'"),
        ({"max_bytes": "9" * 101}, "expected a whole number"),
        ({"encoding": "hex"}, "expected one of utf8, json, base64, not 'hex'"),
    ):
        refused = problem(api.fetch(topic, **params), 400, "invalid-request")
        assert said in refused["detail"]
    refused = problem(api.get("/v1/topics?internal=2"), 400, "invalid-request")
    assert refused["detail"] == "internal: expected true or false, not '2'"
    problem(api.get(f"{segments}/{'9' * 20}"), 400, "invalid-request")


def test_names_in_a_request_are_not_shortened_in_details(api: Api) -> None:
    path = "/v1/topics/a/partitions//records"
    assert problem(api.get(path), 404, "not-found")["detail"].startswith(f"{path} is not a path")
    group = api.get("/v1/groups/%2Fhome%2Fa%2Fb%2Fc")
    assert "'/home/a/b/c'" in problem(group, 404, "unknown-group")["detail"]


def test_unknown_paths_and_methods_are_problems(api: Api) -> None:
    for path in (
        "/v1",
        "/v1/topics/",
        "/nope",
        "/v1/topics/a/partitions",
        "/v1/nope",
        "/v1/topics/a%2Fpartitions/0",
        "/v1%2Ftopics",
        "/v1/topics/a/partitions/0%2Frecords",
        "/v1/topics%0A",
        "/healthz%0A",
    ):
        for method in ("GET", "POST", "DELETE"):
            detail = problem(api.request(method, path), 404, "not-found")["detail"]
            assert detail.startswith(f"{path} is not a path"), "as it was sent"
    for path, name in (("/v1/topics/%FF", "topic"), ("/v1/groups/a%C3%28", "group")):
        (error,) = problem(api.get(path), 400, "invalid-request")["errors"]
        assert error["loc"] == name
    refused = api.put("/v1/topics")
    problem(refused, 405, "method-not-allowed")
    assert refused.headers["allow"] == "GET, HEAD, POST"
    refused = api.post("/healthz")
    problem(refused, 405, "method-not-allowed")
    assert refused.headers["allow"] == "GET, HEAD"


def test_segments_smaller_than_a_batch_may_be_are_explained_where_they_are_set(api: Api) -> None:
    def warned(answer: httpx2.Response) -> Any:
        assert answer.is_success, answer.text
        return answer.json().get("warning_details", {}).get("segment-smaller-than-batch")

    small = {"segment.bytes": 65536}
    created = api.post("/v1/topics", json={"name": "small", "config": small})
    assert "segment.bytes (64 KiB) is less than max.message.bytes" in warned(created)
    assert "warnings" not in api.get("/v1/topics/small").json()
    path = "/v1/topics/small"
    assert warned(api.patch(path, json={"config": {"retention.ms": 1000}})) is None
    assert warned(api.patch(path, json={"config": {"max.message.bytes": 65536}})) is None
    assert warned(api.patch(path, json={"config": {"max.message.bytes": None}}))
    api.delete(path)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: f"{call.method} {call.path}")
def test_every_call_refuses_unknown_parameters_and_unacceptable_types(api: Api, call: Call) -> None:
    api.post("/v1/topics", json={"name": "door"})
    names = dict.fromkeys(("group", "pin", "member", "transactional_id", "subject", "guid"), "x")
    numbers = dict.fromkeys(("partition", "base_offset", "node", "schema_id"), 0)
    path = call.path.format(topic="door", version=1, **numbers, **names)
    refused = problem(api.request(call.method, f"{path}?x=1"), 400, "invalid-request")
    (error,) = refused["errors"]
    assert error["loc"] == "x"
    assert error["msg"].startswith("unknown parameter")
    response = api.request(call.method, path, headers={"accept": "image/png"})
    if call.path in OPEN_PATHS:
        assert response.status_code == 200
    elif call.response:
        problem(response, 406, "not-acceptable")


def test_health_metrics_and_storage_respond(api: Api) -> None:
    assert api.get("/healthz").json() == {"status": "alive"}
    assert api.get("/readyz").json()["ready"] is True
    text = api.get("/metrics")
    assert text.headers["content-type"].startswith("text/plain")
    assert "tierlog_http_requests_total" in text.text
    assert set(api.get("/v1/storage").json()) >= {"hot_bytes", "cold_bytes", "topics", "cache"}


@pytest.mark.parametrize("path", ["/v1/topics", "/console/topics"])
def test_topics_are_listed_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """With thousands of them it takes tens of milliseconds."""
    listing, threads = api.broker.list_topics, []

    def recording(**kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return listing(**kwargs)

    monkeypatch.setattr(api.broker, "list_topics", recording)
    assert api.get(path).status_code == 200
    assert len(threads) == 1
    assert "http-server" not in threads


def test_readyz_is_200_while_the_store_is_down(api: Api, store_down: None) -> None:
    assert api.get("/readyz").status_code == 200


def test_each_response_has_a_request_id(api: Api) -> None:
    for path in ("/healthz", "/nope", "/docs", "/openapi.json", "/v1/topics/nope"):
        first, second = api.get(path), api.get(path)
        assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert (
        api.get("/healthz", headers={"x-request-id": "mine-1"}).headers["x-request-id"] == "mine-1"
    )
    assert (
        api.get("/healthz", headers={"x-request-id": "no spaces"}).headers["x-request-id"]
        != "no spaces"
    )


@pytest.mark.parametrize(
    "name",
    [
        "evil.example",
        "127.0.0.1.evil.example",
        "localhost.evil.example",
        "10.0.0.1",
        "",
        "[::2]",
        "[::1].evil.example",
        "[::1]evil.example:80",
        "[::1",
        "::1]",
        "evil.example@localhost",
        "localhost/evil.example",
    ],
)
def test_other_host_names_are_forbidden(api: Api, name: str) -> None:
    problem(api.get("/v1/topics", headers={"host": name}), 403, "forbidden")
    problem(api.get("/v1/topics", headers={"origin": f"http://{name}"}), 403, "forbidden")


@pytest.mark.parametrize(
    "name", ["localhost:80", "127.0.0.1", "127.1.2.3:99", "[::1]:8640", "LOCALHOST"]
)
def test_loopback_host_names_are_accepted(api: Api, name: str) -> None:
    assert (
        api.get("/v1/topics", headers={"host": name, "origin": f"http://{name}"}).status_code == 200
    )


@pytest.mark.parametrize(
    ("target", "host", "status"),
    [
        ("http://localhost:1/v1/topics?prefix=none", "evil.example", 200),
        ("HTTP://LOCALHOST/healthz", "localhost", 200),
        ("http://localhost", "localhost", 200),
        ("http://localhost?x=1", "localhost", 400),  # the console takes no parameter
        ("http://evil.example/v1/topics", "localhost", 403),
        ("http://evil.example", "localhost", 403),
        ("http://localhost@evil.example/v1/topics", "localhost", 400),
        ("http://localhost/v1/topics#x", "localhost", 400),
        ("http:///v1/topics", "localhost", 400),
        ("ftp://localhost/v1/topics", "localhost", 400),
        ("//evil.example/v1/topics", "localhost", 404),
        ("*", "localhost", 404),
    ],
)
def test_an_absolute_form_target_names_the_host(
    api: Api, target: str, host: str, status: int
) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        head = f"GET {target} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n"
        sock.sendall(head.encode())
        response = sock.makefile("rb").read()
    assert response.split(b" ", 2)[1] == b"%d" % status, response
    assert b"NoneType" not in response


def test_malformed_http_gets_a_problem(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port), timeout=30) as sock:
        sock.sendall(b"\x16\x03\x01 hello\r\n\r\n")
        response = sock.recv(10_000)
    assert response.startswith(b"HTTP/1.1 400")
    assert b'"code":"invalid-request"' in response


def test_the_document_describes_every_call(api: Api) -> None:
    document = api.get("/openapi.json").json()
    fetch = document["paths"]["/v1/topics/{topic}/partitions/{partition}/records"]["get"]
    assert {"offset", "timestamp", "max_bytes"} <= {p["name"] for p in fetch["parameters"]}
    assert "application/x-ndjson" in fetch["responses"]["200"]["content"]
    assert (
        "offset-trimmed"
        in fetch["responses"]["410"]["content"]["application/problem+json"]["examples"]
    )
    text = api.get("/openapi.json").text
    for reference in set(_references(document)):
        name = reference.rsplit("/", 1)[1]
        assert name in document["components"]["schemas"], (name, text[:100])


def test_the_document_lists_no_response_that_never_occurs(api: Api) -> None:
    paths = api.get("/openapi.json").json()["paths"]
    for path in ("/healthz", "/readyz"):
        assert paths[path]["get"]["security"] == []
        assert not {"401", "406", "429"} & set(paths[path]["get"]["responses"])
        assert api.get(path, headers={"accept": "image/png"}).status_code == 200
    for path, method in (("/v1/topics/{topic}", "delete"), ("/v1/groups/{group}/offsets", "put")):
        assert "406" not in paths[path][method]["responses"]
    assert api.delete(f"/v1/topics/{api.topic()}", headers={"accept": "a/b"}).status_code == 204


def _references(node: object) -> list[str]:
    if isinstance(node, dict):
        own = [node["$ref"]] if isinstance(node.get("$ref"), str) else []
        return own + [ref for value in node.values() for ref in _references(value)]
    if isinstance(node, list):
        return [ref for value in node for ref in _references(value)]
    return []


def test_every_documented_content_encoding_is_accepted_and_no_other(api: Api) -> None:
    fetch = api.get("/openapi.json").json()["paths"]["/v1/fetch"]["post"]
    (header,) = [one for one in fetch["parameters"] if one["name"] == "Content-Encoding"]
    accepted = {
        name
        for name in ("gzip", "zstd", "x-gzip", "identity", "", ",", "br", "deflate", "lz4", "\xa0")
        if api.post(
            "/v1/fetch", content=b"", headers={"content-encoding": name.encode("latin-1")}
        ).status_code
        != 415
    }
    named, empty = header["schema"]["anyOf"]
    assert {one for one in accepted if not re.fullmatch(empty["pattern"], one)} == {*named["enum"]}
    assert {"", ","} <= accepted


def test_one_connection_serves_many_requests(api: Api) -> None:
    connections = set()
    with httpx2.Client(base_url=api.base_url, limits=httpx2.Limits(max_connections=1)) as client:
        for path, status in [("/healthz", 200), ("/v1/topics/none", 404)] * 20:
            response = client.get(path)
            assert response.status_code == status
            connections.add(response.extensions["network_stream"].get_extra_info("client_addr"))
    assert len(connections) == 1


def test_a_large_control_body_is_decoded_beside_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode, threads = strict_json.decode_control, []

    def noting(body: bytes, kind: type[Any]) -> Any:
        threads.append(threading.current_thread().name.split("_")[0])
        return decode(body, kind)

    monkeypatch.setattr(strict_json, "decode_control", noting)
    for space in (b"", b" " * 100_000):
        body = b'{"partitions": [{"topic": "none", "partition": 0}]' + space + b"}"
        response = api.post("/v1/fetch", content=body, headers={"content-type": "application/json"})
        assert response.status_code == 200, response.text
    assert threads == ["http-server", "api-parse"]
