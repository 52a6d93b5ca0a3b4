"""Errors in produce requests are located by their path in the request."""

import json
import socket
import time
from typing import Any

import pytest

from tests.integration.http.conftest import NDJSON, Api, problem, records_path


def produce_lines(api: Api, path: str, body: bytes, **params: str) -> list[str]:
    response = api.post(path, content=body, params=params, headers={"content-type": NDJSON})
    return places(response.status_code, response.json())


def places(status: int, document: dict[str, list[dict[str, str]]]) -> list[str]:
    assert status == 400
    return [error["loc"] for error in document["errors"]]


def test_a_line_that_is_not_utf8_is_located(api: Api) -> None:
    path = records_path(api.topic())
    assert produce_lines(api, path, b"1\n\n\xff\n4") == ["line 3"]
    assert produce_lines(api, path, b'{}\n{"value":"\xff"}', envelope="1") == ["line 2"]


def test_a_parameter_that_is_not_utf8_is_shown(api: Api) -> None:
    octets = {"content-type": "application/octet-stream"}
    response = api.post(f"{records_path(api.topic())}?acks=1&key=a%ff", headers=octets)
    assert problem(response, 400, "invalid-request")["detail"].endswith(r"UTF-8: b'a\xff'")


def test_a_line_with_another_partition_than_the_paths_is_located(api: Api) -> None:
    path = records_path(api.topic())
    body = b'{}\n\n{"partition":3}'
    assert produce_lines(api, path, body, envelope="1") == ["line 3.partition"]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_timestamp_out_of_bounds_is_located_whatever_its_partition(
    api: Api, partitions: int
) -> None:
    topic = api.topic(partitions)
    far = int(time.time() * 1000) + 86_400_000
    records = [{"partition": n % partitions} for n in range(7)]
    records[4]["timestamp"] = far
    response = api.produce(topic, *records)
    assert places(response.status_code, response.json()) == ["records[4].timestamp"]
    body = b"\n\n".join(json.dumps(record).encode() for record in records)
    path = f"/v1/topics/{topic}/records"
    assert produce_lines(api, path, body, envelope="1") == ["line 9.timestamp"]


def test_a_record_without_a_required_key_is_located(api: Api) -> None:
    topic = api.topic(cleanup_policy="compact")
    response = api.produce(topic, {"key": "a"}, {"key": "b"}, {"value": "none"})
    assert places(response.status_code, response.json()) == ["records[2].key"]
    response = api.produce(topic, {"value": "none"})
    assert places(response.status_code, response.json()) == ["records[0].key"]
    assert produce_lines(api, records_path(topic), b"\n1") == ["line 2"]
    body = b'{"key":1}\n{"value":1}'
    assert produce_lines(api, records_path(topic), body, envelope="1") == ["line 2.key"]
    octets = {"content-type": "application/octet-stream"}
    response = api.post(records_path(topic), content=b"v", headers=octets)
    assert places(response.status_code, response.json()) == ["key"]


def test_an_invalid_value_in_a_map_is_located_by_its_key(api: Api) -> None:
    topic = api.topic()
    for value in ([1], {"a": 1}):
        config = {"retention.ms": 60_000, "segment.bytes": value}
        for response in (
            api.post("/v1/topics", json={"name": "new", "config": config}),
            api.patch(f"/v1/topics/{topic}", json={"config": config}),
        ):
            (error,) = problem(response, 400, "invalid-request")["errors"]
            assert error["loc"] == "config.segment.bytes"
    response = api.post("/v1/topics", json={"name": "new", "config": {"retention.ms": None}})
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error["loc"] == "config.retention.ms"


def test_more_configuration_keys_than_there_could_be_are_refused_without_a_look_at_each(
    api: Api,
) -> None:
    topic = api.topic()
    config = {f"retention.{number}": 1 for number in range(100)}
    response = api.patch(f"/v1/topics/{topic}", json={"config": config})
    assert len(problem(response, 400, "invalid-config")["errors"]) == 100
    config["retention.100"] = 1
    for response in (
        api.post("/v1/topics", json={"name": "new", "config": config}),
        api.patch(f"/v1/topics/{topic}", json={"config": config}),
    ):
        assert places(response.status_code, response.json()) == ["config"]


@pytest.mark.parametrize(
    ("config", "loc"),
    [
        (b'{"segment.bytes": 1, "retention.ms": 1e999}}', "config.retention.ms"),
        (b'{"retention.ms": 1e400}} x', "config[...]"),
        (b'{"retention.ms": [1]}', "config[...]"),
        (b'{"retention.ms": null}', "config[...]"),
        (b'{"a": ["\xff"]}}', "config.a"),
        (b'{"a": [1], "b": "\\ud800"}}', "config[...]"),
        (b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}}", "config[...]"),
    ],
)
def test_an_invalid_value_in_a_map_of_malformed_json_is_located_too(
    api: Api, config: bytes, loc: str
) -> None:
    content = b'{"name": "bad", "config": ' + config
    response = api.post("/v1/topics", content=content, headers={"content-type": "application/json"})
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error["loc"] == loc


@pytest.mark.parametrize("path", ["/v1/topics", "/v1/topics/{}/records"])
def test_a_missing_body_is_said_to_be_missing(api: Api, path: str) -> None:
    refused = api.post(path.format(api.topic()), headers={"content-type": "application/json"})
    assert "the body is empty" in problem(refused, 400, "invalid-request")["detail"]


@pytest.mark.parametrize(
    ("path", "body", "loc"),
    [
        ("/v1/topics", '{"name": "twice", "name": "other"}', "name"),
        (
            "/v1/topics",
            '{"name": "twice", "config": {"retention.ms": 60000, "retention.ms": -1}}',
            "config.retention.ms",
        ),
        (
            "/v1/fetch",
            '{"partitions": [{"topic": "a", "partition": 0}, '
            '{"topic": "a", "partition": 0, "partition": 1}]}',
            "partitions[1].partition",
        ),
    ],
)
def test_a_repeated_member_is_refused_with_its_path(
    api: Api, path: str, body: str, loc: str
) -> None:
    response = api.post(path, content=body, headers={"content-type": "application/json"})
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error == {"loc": loc, "msg": "given more than once"}
    problem(api.get("/v1/topics/twice"), 404, "unknown-topic")


@pytest.mark.parametrize("partition", [-1, 2**31])
def test_a_fetch_of_what_no_partition_can_be_is_refused(api: Api, partition: int) -> None:
    wanted = [{"topic": "none", "partition": 0}, {"topic": "none", "partition": partition}]
    response = api.post("/v1/fetch", json={"partitions": wanted})
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error["loc"] == "partitions[1].partition"


def test_a_request_without_a_host_is_refused(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\n\r\n")
        assert sock.recv(1 << 16).startswith(b"HTTP/1.1 400 ")
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        sock.sendall(b"GET /healthz HTTP/1.0\r\n\r\n")
        assert b" 200 " in sock.recv(1 << 16).splitlines()[0]


def test_a_request_with_two_hosts_is_refused(api: Api) -> None:
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        sock.sendall(b"GET /healthz HTTP/1.1\r\nHost: localhost\r\nHost: evil.example\r\n\r\n")
        response = sock.recv(1 << 16)
    assert response.startswith(b"HTTP/1.1 400 ")
    assert b'"loc":"Host"' in response


def test_a_head_beyond_the_limit_is_a_problem_with_431(api: Api) -> None:
    response = api.get("/healthz", headers={"x": "a" * 70_000})
    refused = problem(response, 431, "header-too-large")
    assert refused["limit_bytes"] == 65_536
    assert refused["size_bytes"] > 70_000


@pytest.mark.parametrize(
    ("method", "path", "body", "loc"),
    [
        ("POST", "/v1/topics", {}, "name"),
        ("POST", "/v1/topics/t/records", {}, "records"),
        (
            "POST",
            "/v1/topics/t/records",
            {"records": [{"headers": [{}]}]},
            "records[0].headers[0].name",
        ),
        ("POST", "/v1/topics/t/partitions/0/trim", {}, "before_offset"),
        ("POST", "/v1/fetch", {"partitions": [{"topic": "t"}]}, "partitions[0].partition"),
    ],
)
def test_a_missing_member_is_named(
    api: Api, method: str, path: str, body: dict[str, Any], loc: str
) -> None:
    topic = api.topic()
    response = api.request(method, path.replace("/t/", f"/{topic}/"), json=body)
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error == {"loc": loc, "msg": "missing"}


RECORDS = "/v1/topics/t/records"


@pytest.mark.parametrize(
    ("method", "path", "body", "error"),
    [
        ("GET", "/v1/topics/t/partitions/0/records?ofset=1", None, ("ofset", "offset")),
        ("GET", "/v1/topics?prefx=a", None, ("prefx", "prefix")),
        ("POST", "/v1/topics", {"name": "a", "partition": 3}, ("partition", "partitions")),
        ("POST", RECORDS, {"records": [{"vlaue": 1}]}, ("records[0].vlaue", "value")),
        (
            "POST",
            RECORDS,
            {"records": [{}, {"headers": [{"nam": "a"}]}]},
            ("records[1].headers[0].nam", "name"),
        ),
        (
            "POST",
            "/v1/fetch",
            {"partitions": [{"topic": "t", "partition": 0, "ofset": 1}]},
            ("partitions[0].ofset", "offset"),
        ),
    ],
)
def test_an_unknown_name_is_refused_with_the_nearest(
    api: Api, method: str, path: str, body: Any, error: tuple[str, str]
) -> None:
    response = api.request(method, path.replace("/t/", f"/{api.topic()}/"), json=body)
    (found,) = problem(response, 400, "invalid-request")["errors"]
    assert found["loc"] == error[0]
    assert f"; did you mean {error[1]!r}?" in found["msg"]


@pytest.mark.parametrize(
    ("path", "known"),
    [
        ("/v1/topics/t/records", "records"),
        ("/v1/topics", "name, partitions, config, replication_factor, replicas"),
    ],
)
def test_an_unknown_member_is_refused_with_the_known_ones(api: Api, path: str, known: str) -> None:
    response = api.request("POST", path.replace("/t/", f"/{api.topic()}/"), json={"value": "x"})
    (error,) = problem(response, 400, "invalid-request")["errors"]
    assert error == {"loc": "value", "msg": f"unknown member; known members: {known}"}
