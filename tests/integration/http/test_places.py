"""An error in a produce request names the place in that request, whatever became of it since."""

import json
import time

import pytest

from tests.integration.http.conftest import NDJSON, Api, records_path


def produce_lines(api: Api, path: str, body: bytes, **params: str) -> list[str]:
    answer = api.post(path, content=body, params=params, headers={"content-type": NDJSON})
    return places(answer.status_code, answer.json())


def places(status: int, problem: dict[str, list[dict[str, str]]]) -> list[str]:
    assert status == 400
    return [error["loc"] for error in problem["errors"]]


def test_a_line_that_is_not_utf8_is_named(api: Api) -> None:
    path = records_path(api.topic())
    assert produce_lines(api, path, b"1\n\n\xff\n4") == ["line 3"]
    assert produce_lines(api, path, b'{}\n{"value":"\xff"}', envelope="1") == ["line 2"]


def test_a_line_with_another_partition_than_the_paths_is_named(api: Api) -> None:
    path = records_path(api.topic())
    body = b'{}\n\n{"partition":3}'
    assert produce_lines(api, path, body, envelope="1") == ["line 3.partition"]


@pytest.mark.parametrize("partitions", [1, 3])
def test_a_time_out_of_bounds_is_named_wherever_its_record_was_going(
    api: Api, partitions: int
) -> None:
    topic = api.topic(partitions)
    far = int(time.time() * 1000) + 86_400_000
    records = [{"partition": n % partitions} for n in range(7)]
    records[4]["timestamp"] = far
    answer = api.produce(topic, *records)
    assert places(answer.status_code, answer.json()) == ["records[4].timestamp"]
    body = b"\n\n".join(json.dumps(record).encode() for record in records)
    path = f"/v1/topics/{topic}/records"
    assert produce_lines(api, path, body, envelope="1") == ["line 9.timestamp"]


def test_a_record_without_a_key_is_named_where_keys_are_needed(api: Api) -> None:
    topic = api.topic(cleanup_policy="compact")
    answer = api.produce(topic, {"key": "a"}, {"key": "b"}, {"value": "none"})
    assert places(answer.status_code, answer.json()) == ["records[2].key"]
    answer = api.produce(topic, {"value": "none"})
    assert places(answer.status_code, answer.json()) == ["records[0].key"]
    assert produce_lines(api, records_path(topic), b"\n1") == ["line 2"]
    body = b'{"key":1}\n{"value":1}'
    assert produce_lines(api, records_path(topic), body, envelope="1") == ["line 2.key"]
    octets = {"content-type": "application/octet-stream"}
    answer = api.post(records_path(topic), content=b"v", headers=octets)
    assert places(answer.status_code, answer.json()) == ["key"]
