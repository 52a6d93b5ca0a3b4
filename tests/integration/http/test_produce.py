import base64
import gzip
import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import pytest
import zstandard

from tests.integration.http.conftest import BATCHES, NDJSON, Api, problem, records_path
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.codecs import CODEC_IDS
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import DiskFull

NOW = int(time.time() * 1000)


def batch(*values: bytes, **more: Any) -> bytes:
    return bytes(encode_batch(list(values), timestamps=[NOW] * len(values), **more))


def post(api: Api, topic: str, content: bytes, media_type: str, **params: Any) -> httpx2.Response:
    headers = {"content-type": media_type, **params.pop("headers", {})}
    return api.post(records_path(topic), content=content, headers=headers, params=params)


def test_json_values_keep_their_source_text(api: Api) -> None:
    topic = api.topic()
    body = (
        b'{"records":[{"value":"a\\u00e9"},{"value":{"b":1.0,  "b":2}},{"value":null},{},'
        b'{"value":12e3}]}'
    )
    assert post(api, topic, body, "application/json").status_code == 200
    records = api.fetch(topic).json()["records"]
    assert [r["value"] for r in records] == ["aé", '{"b":1.0,  "b":2}', None, None, "12e3"]


def test_keys_headers_timestamps_and_bytes_round_trip(api: Api) -> None:
    topic = api.topic()
    record = {
        "key_base64": base64.b64encode(b"\xff\x00").decode(),
        "value_base64": "",
        "headers": [
            {"name": "h", "value": "x"},
            {"name": "h", "value_base64": "/w=="},
            {"name": "n"},
        ],
        "timestamp": "2026-01-02T03:04:05.678+01:00",
    }
    other = {"key": "k", "value": "v", "headers": {"a": "b"}, "timestamp": 1_767_000_000_000}
    assert api.produce(topic, record, other).status_code == 200
    first, second = api.fetch(topic).json()["records"]
    assert first["key_base64"] == "/wA="
    assert "key" not in first
    assert first["value"] == ""
    assert first["timestamp"] == 1_767_319_445_678
    assert first["headers"] == [
        {"name": "h", "value": "x"},
        {"name": "h", "value_base64": "/w=="},
        {"name": "n", "value": None},
    ]
    assert second["headers"] == [{"name": "a", "value": "b"}]
    assert second["timestamp"] == 1_767_000_000_000


def test_ndjson_lines_are_values_or_with_envelope_records(api: Api) -> None:
    topic = api.topic()
    assert post(api, topic, b'"a"\n\n {"b": 1} \r\nnull\n', NDJSON).status_code == 200
    assert post(api, topic, b'{"key":"k","value":7}\n', NDJSON, envelope=1).status_code == 200
    records = api.fetch(topic).json()["records"]
    assert [(r["key"], r["value"]) for r in records] == [
        (None, "a"),
        (None, '{"b": 1}'),
        (None, None),
        ("k", "7"),
    ]


def test_null_in_one_form_leaves_the_other(api: Api) -> None:
    """What a serialiser that writes every member sends."""
    topic = api.topic()
    record = {
        "key": "k",
        "key_base64": None,
        "value": None,
        "value_base64": "/w==",
        "headers": [
            {"name": "text", "value": "t", "value_base64": None},
            {"name": "bytes", "value": None, "value_base64": "/w=="},
            {"name": "null", "value": None, "value_base64": None},
        ],
    }
    empty = {"key": None, "key_base64": None, "value": None, "value_base64": None}
    assert api.produce(topic, record, empty).status_code == 200
    first, second = api.fetch(topic).json()["records"]
    assert (first["key"], first["value_base64"]) == ("k", "/w==")
    assert first["headers"] == [
        {"name": "text", "value": "t"},
        {"name": "bytes", "value_base64": "/w=="},
        {"name": "null", "value": None},
    ]
    assert (second["key"], second["value"]) == (None, None)


@pytest.mark.parametrize(
    ("body", "envelope", "loc"),
    [
        (b'"a"\n"b\n', 0, "line 2"),
        (b"1\n[1,\n2]", 0, "line 2"),
        (b"1\n2\x0b\n", 0, "line 2"),
        (b"1 2", 0, "line 1"),
        (b'{"value":1}\n\n{"valu":1}', 1, "line 3.valu"),
        (b'{"timestamp":"yesterday"}', 1, "line 1.timestamp"),
    ],
)
def test_an_invalid_ndjson_line_is_located(api: Api, body: bytes, envelope: int, loc: str) -> None:
    topic = api.topic()
    refused = problem(post(api, topic, body, NDJSON, envelope=envelope), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == loc
    assert api.fetch(topic).json()["high_watermark"] == 0


@pytest.mark.parametrize(
    ("record", "loc"),
    [
        ({"key": "a", "key_base64": "YQ=="}, "records[1].key_base64"),
        ({"value_base64": "not base64"}, "records[1].value_base64"),
        ({"vlaue": 1}, "records[1].vlaue"),
        ({"partition": "0"}, "records[1].partition"),
        ({"partition": -1}, "records[1].partition"),
        ({"timestamp": 1.5}, "records[1].timestamp"),
        ({"timestamp": "2026-01-01T00:00:00"}, "records[1].timestamp"),
        ({"headers": [{"value": "a"}]}, "records[1].headers[0].name"),
        (
            {"headers": [{"name": "a", "value": "b", "value_base64": "YQ=="}]},
            "records[1].headers[0].value_base64",
        ),
        ({"headers": {"a": 1}}, "records[1].headers[...]"),
    ],
)
def test_an_invalid_record_is_located_and_nothing_is_appended(
    api: Api, record: Any, loc: str
) -> None:
    topic = api.topic()
    refused = problem(api.produce(topic, {"value": "good"}, record), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == loc
    assert api.fetch(topic).json()["high_watermark"] == 0


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b'{"records":{}}',
        b'{"records":[{"value":NaN}]}',
        b'{"records":[]} x',
        b'{"records":[{"value":"\xff"}]}',
        b'{"records":[{"value":' + b"[" * 200_000 + b"]" * 200_000 + b"}]}",
    ],
)
def test_malformed_json_is_an_invalid_request(api: Api, body: bytes) -> None:
    problem(post(api, api.topic(), body, "application/json"), 400, "invalid-request")


@pytest.mark.parametrize("media_type", ["application/json", NDJSON])
def test_an_error_response_to_a_huge_member_is_small(api: Api, media_type: str) -> None:
    record = b'{"%b":1}' % (b"long" * 1_000_000)
    body = record if media_type == NDJSON else b'{"records":[%b]}' % record
    response = post(api, api.topic(), body, media_type, envelope=1 if media_type == NDJSON else 0)
    refused = problem(response, 400, "invalid-request")
    assert refused["errors"][0]["loc"].startswith(("records[0].longlong", "line 1.longlong"))
    assert refused["errors"][0]["msg"].startswith("unknown member")
    assert len(response.content) < 5_000


def test_a_request_without_a_record_is_refused(api: Api) -> None:
    topic = api.topic()
    problem(api.produce(topic), 400, "invalid-record")
    problem(post(api, topic, b"\n \n", NDJSON), 400, "invalid-record")
    problem(post(api, topic, b"", BATCHES), 400, "invalid-record")


def test_an_octet_stream_is_one_record_keyed_by_the_query(api: Api) -> None:
    topic = api.topic()
    octets = "application/octet-stream"
    assert post(api, topic, b"\x00\xff", octets, key="k").status_code == 200
    assert post(api, topic, b"", octets, key_base64="/w==").status_code == 200
    records = api.fetch(topic, encoding="base64").json()["records"]
    assert [(r["key_base64"], r["value_base64"]) for r in records] == [
        ("aw==", "AP8="),
        ("/w==", ""),
    ]
    problem(post(api, topic, b"", octets, key="a", key_base64="YQ=="), 400, "invalid-request")
    problem(post(api, topic, b"{}", NDJSON, key="a"), 400, "invalid-request")


def test_record_batches_are_stored_as_sent(api: Api) -> None:
    topic = api.topic()
    sent = batch(b"a", b"b") + batch(b"c", codec=4)
    response = post(api, topic, sent, BATCHES)
    assert response.json()["results"][0]["records"] == 3
    got = api.fetch(topic, accept=BATCHES).content
    assert len(got) == len(sent)
    assert got[17:61] == sent[17:61]  # from the checksum on
    assert [r["value"] for r in api.fetch(topic).json()["records"]] == ["a", "b", "c"]


def test_an_invalid_batch_is_refused_with_its_position_and_nothing_is_appended(api: Api) -> None:
    topic = api.topic()
    good, bad = batch(b"a"), bytearray(batch(b"b"))
    bad[-2] ^= 1
    refused = problem(post(api, topic, good + bytes(bad), BATCHES), 400, "corrupt-batch")
    assert refused["position"] == len(good)
    problem(post(api, topic, good + b"xx", BATCHES), 400, "corrupt-batch")
    problem(
        post(
            api,
            topic,
            batch(b"a", transactional=True, producer_id=5, producer_epoch=0, base_sequence=0),
            BATCHES,
        ),
        400,
        "invalid-record",
    )
    assert api.fetch(topic).json()["high_watermark"] == 0
    response = api.post(
        f"/v1/topics/{topic}/records", content=good, headers={"content-type": BATCHES}
    )
    problem(response, 415, "unsupported-media-type")


@pytest.mark.parametrize("encode", [gzip.compress, zstandard.ZstdCompressor().compress])
def test_compressed_bodies_are_expanded_within_the_limit(api: Api, encode: Any) -> None:
    topic = api.topic()
    name = "gzip" if encode is gzip.compress else "zstd"
    headers = {"content-encoding": name}
    assert post(api, topic, encode(b'"a"\n'), NDJSON, headers=headers).status_code == 200
    problem(post(api, topic, b"no", NDJSON, headers=headers), 400, "invalid-request")
    bomb = encode(b" " * (9 << 20))
    for media_type, limit in ((NDJSON, 4 << 20), ("application/octet-stream", 8 << 20)):
        answer = post(api, topic, bomb, media_type, headers=headers)
        assert problem(answer, 413, "request-too-large")["limit_bytes"] == limit
    problem(
        post(api, topic, b"no", NDJSON, headers={"content-encoding": "br"}),
        415,
        "unsupported-media-type",
    )


def test_size_and_record_limits_refuse_the_request(api: Api) -> None:
    topic = api.topic(max_message_bytes=1000)
    refused = problem(api.produce(topic, {"value": "x" * 2000}), 413, "record-too-large")
    assert refused["limit_bytes"] == 1000
    assert refused["size_bytes"] > 2000
    assert api.produce(topic, *[{"value": "x" * 500}] * 5).status_code == 200  # cut into batches
    refused = problem(post(api, topic, b"x" * (5 << 20), NDJSON), 413, "request-too-large")
    assert refused["limit_bytes"] == 4 << 20
    refused = problem(post(api, topic, b"1\n" * 60_000, NDJSON), 413, "request-too-large")
    assert (refused["limit_records"], refused["records"]) == (50_000, 60_000)
    assert api.fetch(topic).json()["high_watermark"] == 5


def test_a_record_too_large_or_of_an_unknown_partition_is_located(api: Api) -> None:
    topic = api.topic(partitions=2, max_message_bytes=1000)
    for bad, status, code, member in (
        ({"value": "x" * 2000, "partition": 1}, 413, "record-too-large", ""),
        ({"partition": 7}, 404, "unknown-partition", ".partition:"),
    ):
        records = [{"partition": 0}, {"partition": 1}, bad]
        refused = problem(api.produce(topic, *records), status, code)
        assert refused["detail"].startswith(f"records[2]{member} "), refused
        lines = b"\n\n".join(json.dumps(record).encode() for record in records)
        response = api.post(
            f"/v1/topics/{topic}/records?envelope=1",
            content=lines,
            headers={"content-type": NDJSON},
        )
        refused = problem(response, status, code)
        assert refused["detail"].startswith(f"line 5{member} "), refused
    refused = problem(post(api, topic, b"1\n" + b"2" * 2000, NDJSON), 413, "record-too-large")
    assert refused["detail"].startswith("line 2 "), refused
    assert [api.fetch(topic, n).json()["high_watermark"] for n in (0, 1)] == [0, 0]


def test_acks_decide_the_response(api: Api) -> None:
    topic = api.topic()
    response = api.produce(topic, {"value": "a"}, {"value": "b"}, acks="0")
    assert response.status_code == 202
    assert response.json() == {"topic": topic, "accepted": 2}
    for acks in ("1", "all", "-1"):
        assert api.produce(topic, {"value": "c"}, acks=acks).status_code == 200
    problem(api.produce(topic, {"value": "c"}, acks="2"), 400, "invalid-request")
    assert len(api.fetch(topic).json()["records"]) == 5


def test_keys_are_partitioned_as_by_kafka_and_other_records_round_robin(api: Api) -> None:
    topic = api.topic(partitions=4)
    result = api.produce(topic, {"key": "21", "value": "a"}, {"partition": 3, "key": "21"}).json()
    assert {r["partition"]: r["records"] for r in result["results"]} == {0: 1, 3: 1}
    turns = [api.produce(topic, {"value": "x"}, {"value": "y"}).json()["results"] for _ in range(4)]
    assert sorted(results[0]["partition"] for results in turns) == [0, 1, 2, 3]
    problem(api.produce(topic, {"partition": 4}), 404, "unknown-partition")
    response = api.post(
        records_path(topic, 1), json={"records": [{"partition": 1}, {"partition": 2}]}
    )
    problem(response, 400, "invalid-request")


def test_if_offset_match_must_equal_the_log_end(api: Api) -> None:
    topic = api.topic()
    body = {"records": [{"value": "a"}]}
    assert (
        api.post(records_path(topic), json=body, headers={"If-Offset-Match": "0"}).status_code
        == 200
    )
    response = api.post(records_path(topic), json=body, headers={"If-Offset-Match": "0"})
    assert problem(response, 412, "offset-mismatch")["log_end_offset"] == 1
    for bad in ("-1", "x", "1,2"):
        problem(
            api.post(records_path(topic), json=body, headers={"If-Offset-Match": bad}),
            400,
            "invalid-request",
        )
    problem(
        api.post(f"/v1/topics/{topic}/records", json=body, headers={"If-Offset-Match": "1"}),
        400,
        "invalid-request",
    )


def test_retries_of_an_idempotent_producer_are_not_duplicated(api: Api) -> None:
    topic = api.topic()
    producer = api.post("/v1/producers").json()
    assert 2**32 <= producer["producer_id"] < 2**53

    def send(sequence: int, epoch: int = 0) -> httpx2.Response:
        headers = {
            "Producer-Id": str(producer["producer_id"]),
            "Producer-Epoch": str(epoch),
            "Producer-Sequence": str(sequence),
        }
        return api.post(
            records_path(topic), json={"records": [{"value": "a"}, {"value": "b"}]}, headers=headers
        )

    assert send(0).json()["results"][0]["duplicate"] is False
    again = send(0).json()["results"][0]
    assert (again["duplicate"], again["base_offset"], again["last_offset"]) == (True, 0, 1)
    problem(send(3), 409, "out-of-order-sequence")
    assert send(2).status_code == 200
    assert send(0, epoch=1).status_code == 200
    problem(send(4), 409, "producer-fenced")
    response = api.post(records_path(topic), json={"records": [{}]}, headers={"Producer-Id": "1"})
    problem(response, 400, "invalid-request")


def test_records_older_than_retention_get_a_warning(api: Api) -> None:
    topic = api.topic()
    response = api.produce(topic, {"value": "old", "timestamp": "2013-01-01T00:00:00Z"})
    assert response.status_code == 200
    assert response.json()["warnings"] == ["older-than-retention"]
    words = response.json()["warning_details"]["older-than-retention"]
    assert topic in words
    assert "(7 d)" in words
    for config in ({"retention_ms": -1}, {"cleanup_policy": "compact"}):
        response = api.produce(api.topic(**config), {"key": "k", "value": "old", "timestamp": 1})
        assert response.json()["warnings"] == [], config
        assert "warning_details" not in response.json()


def test_log_append_time_is_returned_and_stored(api: Api) -> None:
    topic = api.topic(message_timestamp_type="LogAppendTime", compression_type="zstd")
    result = api.produce(topic, {"value": "a", "timestamp": 5}).json()["results"][0]
    assert result["log_append_time"] >= NOW
    assert api.fetch(topic).json()["records"][0]["timestamp"] == result["log_append_time"]
    assert api.fetch(topic, accept=BATCHES).content[22] & 7 == 4


def test_timestamps_out_of_bounds_are_invalid_records(api: Api) -> None:
    topic = api.topic(message_timestamp_before_max_ms=1000)
    refused = problem(api.produce(topic, {}, {"timestamp": 5}), 400, "invalid-record")
    assert refused["errors"][0]["loc"] == "records[1].timestamp"
    topic = api.topic(message_timestamp_after_max_ms=1000)
    refused = problem(api.produce(topic, {"timestamp": NOW + 10**9}), 400, "invalid-record")
    assert "message.timestamp.after.max.ms is 1000" in refused["errors"][0]["msg"]
    body = bytes(encode_batch([b"x"], timestamps=[NOW + 10**9]))
    problem(post(api, topic, body, BATCHES), 400, "invalid-record")


@pytest.mark.parametrize("name", ["uncompressed", "gzip", "snappy", "lz4", "zstd"])
def test_records_are_stored_with_the_codec_of_the_topic(api: Api, name: str) -> None:
    topic, wanted = api.topic(compression_type=name), CODEC_IDS[name]
    api.values(topic, "json")
    for codec in range(5):
        assert post(api, topic, batch(b"sent", codec=codec), BATCHES).status_code == 200
    stored = list(iter_headers(api.fetch(topic, accept=BATCHES).content))
    assert [header.codec for header in stored] == [wanted] * 6
    values = [record["value"] for record in api.fetch(topic).json()["records"]]
    assert values == ["json", *["sent"] * 5]


def test_an_unknown_topic_partition_type_or_parameter_is_refused(api: Api) -> None:
    topic = api.topic()
    problem(api.produce("nope", {"value": 1}), 404, "unknown-topic")
    problem(api.post(records_path(topic, 7), json={"records": [{}]}), 404, "unknown-partition")
    problem(api.post(f"/v1/topics/{topic}/partitions/x/records"), 400, "invalid-request")
    refused = problem(post(api, topic, b"", "text/csv"), 415, "unsupported-media-type")
    of_records = ["application/json", NDJSON, "application/octet-stream"]
    assert refused["accepted"] == [*of_records, BATCHES]
    anywhere = api.post(f"/v1/topics/{topic}/records", headers={"content-type": "text/csv"})
    refused = problem(anywhere, 415, "unsupported-media-type")
    assert refused["accepted"] == of_records
    refused = problem(api.produce(topic, {}, ack="1"), 400, "invalid-request")
    assert refused["errors"][0]["loc"] == "ack"
    problem(
        post(api, topic, b"{}", "application/json; charset=utf-16"), 415, "unsupported-media-type"
    )


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_a_full_disk_is_reported_with_any_acks(
    api: Api, monkeypatch: pytest.MonkeyPatch, acks: str
) -> None:
    topic = api.topic()

    def refuse() -> None:
        raise DiskFull("the disk is full", retry_after_s=2)

    monkeypatch.setattr(api.broker.partition(topic, 0), "_check_room", refuse)
    problem(api.produce(topic, {"value": "a"}, acks=acks), 507, "disk-full")


def test_with_acks_0_a_partition_that_cannot_append_refuses_the_whole_request(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic(2)

    def refuse() -> None:
        raise DiskFull("the disk is full", retry_after_s=2)

    records = [{"value": "a", "partition": 0}, {"value": "b", "partition": 1}]
    with monkeypatch.context() as patched:
        patched.setattr(api.broker.partition(topic, 1), "_check_room", refuse)
        problem(api.produce(topic, *records, acks="0"), 507, "disk-full")
    accepted = api.produce(topic, *records)
    assert [result["base_offset"] for result in accepted.json()["results"]] == [0, 0]


def test_with_acks_0_a_request_is_not_refused_once_a_partition_has_appended(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients repeat a refused request: its records would be there twice."""
    topic = api.topic(2)
    first, append = api.broker.partition(topic, 0), api.broker.partition(topic, 0).append

    def append_and_wait(*args: Any, **kwargs: Any) -> Any:
        with ThreadPoolExecutor(1) as thread:  # what the loop itself appends begins later
            appending = thread.submit(append, *args, **kwargs).result(10)
        appending.result(10)
        return appending

    def refuse(*_: Any, **__: Any) -> Any:
        raise DiskFull("the disk became full", retry_after_s=2)

    monkeypatch.setattr(first, "append", append_and_wait)
    monkeypatch.setattr(api.broker.partition(topic, 1), "append", refuse)
    records = [{"value": "a", "partition": 0}, {"value": "b", "partition": 1}]
    assert api.produce(topic, *records, acks="0").status_code == 202
    assert first.log_end_offset == 1


def test_a_topic_deleted_during_a_produce_is_unknown_not_offline(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic()
    partition = api.broker.partition(topic, 0)
    # Deleted between the leadership check and the append.
    monkeypatch.setattr(partition, "_check_room", lambda: api.broker.delete_topic(topic))
    problem(api.produce(topic, {"value": "a"}), 404, "unknown-topic")


def test_a_failed_precondition_is_reported_with_acks_0(api: Api) -> None:
    topic = api.topic()
    body = {"records": [{"value": "a"}]}
    path = records_path(topic) + "?acks=0"
    accepted = api.post(path, json=body, headers={"If-Offset-Match": "0"})
    assert (accepted.status_code, accepted.json()) == (202, {"topic": topic, "accepted": 1})
    refused = api.post(path, json=body, headers={"If-Offset-Match": "0"})
    assert problem(refused, 412, "offset-mismatch")["log_end_offset"] == 1
    identity = api.post("/v1/producers").json()
    headers = {
        "Producer-Id": str(identity["producer_id"]),
        "Producer-Epoch": "0",
        "Producer-Sequence": "7",
    }
    assert api.post(path, json=body, headers=headers | {"Producer-Sequence": "6"}).is_success
    headers["Producer-Sequence"] = "9"
    problem(api.post(path, json=body, headers=headers), 409, "out-of-order-sequence")
