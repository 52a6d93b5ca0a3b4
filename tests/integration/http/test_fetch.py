import json
import socket
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx2
import pytest

import tierlog
from tests.fakes.faulty_object_store import FailsBefore
from tests.fakes.records import iter_records
from tests.fakes.waiting import until, until_waiting
from tests.integration.http.conftest import BATCHES, NDJSON, Api, problem, records_path
from tierlog.api.http.context import Context
from tierlog.api.http.fetch import many, record_pages
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.batch import iter_headers


def test_every_response_has_the_log_headers(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a", "b", "c")
    topic_id = api.get(f"/v1/topics/{topic}").json()["topic_id"]
    for accept in ("application/json", NDJSON, BATCHES):
        response = api.fetch(topic, accept=accept)
        assert response.headers["content-type"] == accept
        assert response.headers["log-start-offset"] == "0"
        assert response.headers["log-high-watermark"] == "3"
        assert response.headers["log-next-offset"] == "3"
        assert response.headers["log-up-to-date"] == "true"
        assert response.headers["log-tier"] == "hot"
        assert response.headers["log-topic-id"] == topic_id
        head = api.head(records_path(topic), headers={"accept": accept})
        assert head.status_code == 200
        assert head.content == b""
        assert head.headers["content-length"] == str(len(response.content))
        assert head.headers["log-next-offset"] == "3"


def test_a_fetch_starts_at_an_offset_keyword_or_timestamp(api: Api) -> None:
    topic = api.topic(retention_ms=-1)
    api.produce(topic, *[{"value": str(n), "timestamp": 1000 + 10 * n} for n in range(5)])

    def values(**params: str) -> list[str]:
        return [r["value"] for r in api.fetch(topic, **params).json()["records"]]

    assert values() == values(offset="earliest") == values(offset="earliest-local") == list("01234")
    assert values(offset="3") == ["3", "4"]
    assert values(offset="5") == values(offset="latest") == []
    assert values(timestamp="1011") == ["2", "3", "4"]
    assert values(timestamp="1970-01-01T00:00:01.04Z") == ["4"]
    response = api.fetch(topic, timestamp="9999")
    assert response.json()["records"] == []
    assert response.headers["log-next-offset"] == "5"


@pytest.mark.parametrize("offset", ["0", "1"])
def test_no_form_returns_a_record_before_it_is_flushed(api: Api, offset: str) -> None:
    topic = api.topic(flush_ms=86_400_000)
    api.values(topic, "flushed")
    not_flushed = api.produce(topic, {"value": "in the page cache"}, acks="1")
    assert not_flushed.json()["results"][0]["base_offset"] == 1
    for params in ({}, {"isolation": "read_committed"}, {"max_records": "5"}, {"wait_ms": "1"}):
        for accept in ("application/json", NDJSON, BATCHES):
            response = api.fetch(topic, accept=accept, offset=offset, **params)
            assert response.headers["log-high-watermark"] == "1"
            assert response.headers["log-next-offset"] == "1"
            assert b"page cache" not in response.content
            assert (b"flushed" in response.content) is (offset == "0")
    wanted = [{"topic": topic, "partition": 0, "offset": int(offset)}]
    assert "page cache" not in api.post("/v1/fetch", json={"partitions": wanted}).text
    api.values(topic, "flushes both")
    values = [one["value"] for one in api.fetch(topic).json()["records"]]
    assert values == ["flushed", "in the page cache", "flushes both"]


@pytest.mark.parametrize(
    ("offset", "max_bytes"),
    [
        ("0", "1"),
        ("2", "1048576"),
        ("007", "64"),
        ("1", "064"),
        ("1", "0"),
        ("1", str(64 << 20)),
        ("1", str((64 << 20) + 1)),
        ("9" * 18, "64"),
        ("9" * 19, "64"),
        ("1", "9" * 10),
        ("1%30", "64"),
        ("1", "64%0A"),
    ],
)
def test_parameter_order_does_not_matter(api: Api, offset: str, max_bytes: str) -> None:
    topic = api.topic()
    api.values(topic, *"abcdefghij")

    def fetch(query: str) -> tuple[int, object]:
        response = api.get(f"{records_path(topic)}?{query}", headers={"accept": BATCHES})
        if response.is_success:
            return response.status_code, (response.content, response.headers["log-next-offset"])
        return response.status_code, response.json()["detail"]

    expected = fetch(f"offset={offset}&max_bytes={max_bytes}")
    assert fetch(f"max_bytes={max_bytes}&offset={offset}") == expected


@pytest.mark.parametrize(
    "params",
    [
        {"offset": "-1"},
        {"offset": "first"},
        {"offset": "1.0"},
        {"offset": "1", "timestamp": "1"},
        {"timestamp": "x"},
        {"max_bytes": "0"},
        {"max_bytes": str((64 << 20) + 1)},
        {"max_bytes": "1e3"},
        {"max_records": "0"},
        {"min_bytes": "-1"},
        {"wait_ms": "60001"},
        {"wait_ms": ""},
        {"isolation": "none"},
        {"encoding": "hex"},
        {"ofset": "1"},
    ],
)
def test_an_invalid_parameter_is_refused_not_clamped(api: Api, params: dict[str, str]) -> None:
    topic = api.topic()
    refused = problem(api.fetch(topic, **params), 400, "invalid-request")
    (error,) = refused["errors"]
    assert error["loc"] in params
    if error["loc"] != "ofset" and len(params) == 1:
        assert repr(params[error["loc"]]) in error["msg"], "the value is quoted"


def test_a_parameter_given_twice_is_refused(api: Api) -> None:
    response = api.get(records_path(api.topic()) + "?offset=0&offset=1")
    problem(response, 400, "invalid-request")


def test_outside_the_log_is_410_below_and_416_above(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abcde")
    trimmed = api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 2})
    assert trimmed.json() == {"log_start_offset": 2}
    refused = problem(api.fetch(topic, offset="1"), 410, "offset-trimmed")
    assert (refused["log_start_offset"], refused["high_watermark"]) == (2, 5)
    refused = problem(api.fetch(topic, offset="6"), 416, "offset-past-end")
    assert (refused["log_start_offset"], refused["high_watermark"]) == (2, 5)
    for offset in (1, 6):
        headers = api.head(records_path(topic) + f"?offset={offset}").headers
        assert (headers["log-start-offset"], headers["log-high-watermark"]) == ("2", "5")
    assert [r["offset"] for r in api.fetch(topic).json()["records"]] == [2, 3, 4]
    assert api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 1}).json() == {
        "log_start_offset": 2
    }
    response = api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 9})
    problem(response, 416, "offset-past-end")


def test_limits_apply_to_records_in_json_and_to_batches_in_bytes(api: Api) -> None:
    topic = api.topic()
    for _ in range(3):
        api.values(topic, *["x" * 100] * 4)
    got = api.fetch(topic, max_records="5").json()
    assert (len(got["records"]), got["next_offset"]) == (5, 5)
    got = api.fetch(topic, max_bytes="1").json()
    assert (len(got["records"]), got["next_offset"]) == (1, 1)
    got = api.fetch(topic, max_bytes="250", offset="3", accept=NDJSON)
    assert got.headers["log-next-offset"] == "4"
    whole = api.fetch(topic, accept=BATCHES).content
    first = api.fetch(topic, accept=BATCHES, max_bytes="1", offset="5")
    assert [h.base_offset for h in iter_headers(first.content)] == [4]
    assert first.headers["log-next-offset"] == "8"
    assert first.headers["log-up-to-date"] == "false"
    few = api.fetch(topic, accept=BATCHES, max_records="7", offset="1")
    assert [h.base_offset for h in iter_headers(few.content)] == [0, 4]
    assert few.headers["log-next-offset"] == "8"
    assert few.content == whole[: len(few.content)]


def test_encoding_selects_text_base64_or_json(api: Api) -> None:
    topic = api.topic()
    api.produce(
        topic,
        {"value": {"a": [1, "x\ny"]}, "key": "k"},
        {"value": "plain"},
        {"value_base64": "/w==", "headers": [{"name": "h", "value_base64": "/w=="}]},
        {"value_base64": "ewoiYSI6DQogMQp9"},
    )
    by_json = api.fetch(topic, encoding="json").json()["records"]
    assert by_json[0]["value"] == {"a": [1, "x\ny"]}
    assert by_json[1]["value"] == "plain"
    assert by_json[2]["value_base64"] == "/w=="
    assert by_json[2]["headers"] == [{"name": "h", "value_base64": "/w=="}]
    assert by_json[3]["value"] == {"a": 1}
    lines = api.fetch(topic, encoding="json", accept=NDJSON).text.splitlines()
    assert [json.loads(line)["partition"] for line in lines] == [0] * 4
    assert '"value":{"a": 1}' in lines[3]
    base64 = api.fetch(topic, encoding="base64").json()["records"]
    assert base64[0]["key_base64"] == "aw=="
    assert base64[1]["key_base64"] is None
    assert "value" not in base64[0]


def during_long_poll(
    api: Api, poll: Callable[[], httpx2.Response], act: Callable[[], object]
) -> httpx2.Response:
    """The response to `poll`, which waits longer than its client; `act` is called meanwhile."""
    with ThreadPoolExecutor(1) as thread:
        polling = thread.submit(poll)
        until_waiting(lambda: api.get("/metrics").text)
        act()
        return polling.result()


def test_an_append_wakes_a_long_poll(api: Api) -> None:
    topic = api.topic()
    poll = partial(api.fetch, topic, wait_ms=60_000)
    got = during_long_poll(api, poll, lambda: api.values(topic, "a"))
    assert [r["value"] for r in got.json()["records"]] == ["a"]


def test_a_long_poll_returns_what_there_is_at_its_timeout(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a")
    began = time.monotonic()
    assert len(api.fetch(topic, wait_ms=200, min_bytes=100_000).json()["records"]) == 1
    assert time.monotonic() - began > 0.15, "the poll waited"


def test_trimming_the_offset_of_a_long_poll_ends_it_with_an_error(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a")
    poll = partial(api.fetch, topic, offset=0, wait_ms=60_000, min_bytes=100_000)
    trim = partial(api.post, f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 1})
    problem(during_long_poll(api, poll, trim), 410, "offset-trimmed")


@pytest.mark.parametrize(
    "place", [{"offset": "earliest"}, {"offset": "latest"}, {"timestamp": "0"}]
)
def test_a_long_poll_without_an_explicit_offset_continues_past_a_trim(
    api: Api, place: dict[str, Any]
) -> None:
    topic = api.topic()
    api.values(topic, "a")

    def trim_and_produce() -> None:
        api.values(topic, "b")
        api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 2})
        api.values(topic, "c" * 1000)

    poll = partial(api.fetch, topic, **place, wait_ms=60_000, min_bytes=1000)
    got = during_long_poll(api, poll, trim_and_produce)
    assert [record["offset"] for record in got.json()["records"]] == [2]


@pytest.mark.parametrize("accept", ["application/json", BATCHES])
def test_a_long_poll_by_timestamp_returns_no_earlier_record(api: Api, accept: str) -> None:
    topic = api.topic()
    now = time.time_ns() // 1_000_000

    def produce_two() -> None:
        for timestamp in (now, now + 5_000):
            api.produce(topic, {"timestamp": timestamp})

    poll = partial(api.fetch, topic, accept=accept, timestamp=now + 1_000, wait_ms=60_000)
    got = during_long_poll(api, poll, produce_two)
    assert got.headers["log-next-offset"] == "2"
    if accept == BATCHES:
        assert got.content[:8] == (1).to_bytes(8), "the base offset"
    else:
        assert [record["offset"] for record in got.json()["records"]] == [1]
    none = api.fetch(topic, accept=accept, timestamp=now + 9_000, wait_ms="1")
    assert none.headers["log-next-offset"] == "2"


@pytest.mark.parametrize("accept", ["application/json", BATCHES, NDJSON])
def test_a_record_appended_during_a_timestamp_lookup_is_not_skipped(
    api: Api, accept: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic()
    now = time.time_ns() // 1_000_000
    api.produce(topic, {"timestamp": now})
    partition = api.broker.partition(topic, 0)
    look_up, coming = partition.offset_for_timestamp, [now + 1, now + 5_000]

    def produce_after_lookup(timestamp: int) -> Any:
        found = look_up(timestamp)
        if coming:
            api.produce(topic, {"timestamp": coming.pop(0)})
        return found

    monkeypatch.setattr(partition, "offset_for_timestamp", produce_after_lookup)
    poll = partial(api.fetch, topic, accept=accept, timestamp=now + 1_000)
    response = poll()
    assert response.headers["log-next-offset"] == "1"
    assert response.headers["log-high-watermark"] == "1"
    response = poll(wait_ms=60_000)
    assert response.headers["log-next-offset"] == "3"
    assert response.headers["log-high-watermark"] == "3"
    if accept == BATCHES:
        assert response.content[:8] == (2).to_bytes(8), "the base offset"


def test_a_timestamp_is_looked_up_again_if_its_record_was_trimmed(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic()
    api.values(topic, *"abc")
    partition = api.broker.partition(topic, 0)
    look_up = partition.offset_for_timestamp

    def trim_after_lookup(timestamp: int) -> Any:
        found = look_up(timestamp)
        api.broker.trim(topic, 0, 2)
        return found

    monkeypatch.setattr(partition, "offset_for_timestamp", trim_after_lookup)
    assert [r["value"] for r in api.fetch(topic, timestamp="0").json()["records"]] == ["c"]


def test_disconnecting_ends_a_long_poll(api: Api) -> None:
    topic = api.topic()
    partition = api.broker.partition(topic, 0)
    with socket.create_connection(("127.0.0.1", api.port)) as sock:
        sock.sendall(
            f"GET {records_path(topic)}?wait_ms=60000 HTTP/1.1\r\nHost: localhost\r\n\r\n".encode()
        )
        until(lambda: bool(partition._waiters._waiting))
    until(lambda: not partition._waiters._waiting)


def test_a_multi_partition_fetch_reports_errors_per_partition(api: Api) -> None:
    topic = api.topic(partitions=2)
    api.values(topic, "a", partition=0)
    api.values(topic, "b", "c", partition=1)
    wanted = [
        {"topic": topic, "partition": 1, "offset": 1},
        {"topic": "nope", "partition": 0},
        {"topic": topic, "partition": 0, "offset": 9},
        {"topic": topic, "partition": 0, "offset": "earliest"},
    ]
    got = api.post("/v1/fetch", json={"partitions": wanted}).json()["partitions"]
    assert [r["value"] for r in got[0]["records"]] == ["c"]
    assert got[1]["error"]["code"] == "unknown-topic"
    assert got[2]["error"]["code"] == "offset-past-end"
    assert [r["value"] for r in got[3]["records"]] == ["a"]
    assert got[3]["high_watermark"] == 1


def test_max_bytes_of_a_multi_partition_fetch_is_a_total(api: Api) -> None:
    topic = api.topic(partitions=2)
    for partition in (0, 1):
        api.values(topic, *["x" * 100] * 10, partition=partition)
    wanted = [{"topic": topic, "partition": partition} for partition in (0, 1)]
    got = api.post("/v1/fetch", json={"partitions": wanted, "max_bytes": 1}).json()["partitions"]
    assert [len(one["records"]) for one in got] == [1, 0]
    assert [one["next_offset"] for one in got] == [1, 0]


def test_a_partition_for_which_no_bytes_are_left_is_not_read_from_the_store(api: Api) -> None:
    hot, cold = api.topic(), api.cold_topic()
    api.values(hot, "here")
    api.broker.bucket.cache.shrink(1 << 30)
    before = len(api.store.calls)
    wanted = [{"topic": topic, "partition": 0} for topic in (hot, cold)]
    wanted.append({"topic": hot, "partition": 0, "offset": 9})
    got = api.post("/v1/fetch", json={"partitions": wanted, "max_bytes": 1}).json()["partitions"]
    assert not [key for call, key in api.store.calls[before:] if call == "get_range"]
    assert (len(got[0]["records"]), got[1]["records"], got[1]["tier"]) == (1, [], "cold")
    assert (got[1]["next_offset"], got[1]["high_watermark"]) == (0, 200)
    assert got[2]["error"]["code"] == "offset-past-end"


def test_max_bytes_of_a_multi_partition_fetch_limits_decompressed_records(api: Api) -> None:
    topic = api.topic(partitions=4, compression_type="gzip")
    for partition in range(4):
        api.values(topic, *["x" * 1000] * 10, partition=partition)
    wanted = [{"topic": topic, "partition": partition} for partition in range(4)]
    got = api.post("/v1/fetch", json={"partitions": wanted, "max_bytes": 12_500}).json()
    assert [len(one["records"]) for one in got["partitions"]] == [10, 2, 1, 0]
    assert [one["next_offset"] for one in got["partitions"]] == [10, 2, 1, 0]


def test_a_multi_partition_long_poll_is_woken_by_any_partition(api: Api) -> None:
    topic = api.topic(partitions=2)
    wanted = [{"topic": topic, "partition": p, "offset": "latest"} for p in (0, 1)]
    poll = partial(api.post, "/v1/fetch", json={"partitions": wanted, "wait_ms": 60_000})
    got = during_long_poll(api, poll, lambda: api.values(topic, "a", partition=1))
    assert [len(one["records"]) for one in got.json()["partitions"]] == [0, 1]
    assert api.post("/v1/fetch", json={"partitions": wanted, "wait_ms": 100}).status_code == 200


def test_a_multi_partition_long_poll_reads_again_only_what_changed(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic(partitions=3)
    api.values(topic, "trimmed", partition=2)
    reading, read_from = many.read_again, []

    async def recording(context: Context, partition: Partition, *args: Any) -> Any:
        read_from.append(partition.number)
        return await reading(context, partition, *args)

    def trim_and_produce() -> None:
        api.post(f"/v1/topics/{topic}/partitions/2/trim", json={"before_offset": 1})
        api.values(topic, "a", partition=1)

    monkeypatch.setattr(many, "read_again", recording)
    wanted = [{"topic": topic, "partition": p, "offset": "latest"} for p in range(3)]
    poll = partial(api.post, "/v1/fetch", json={"partitions": wanted, "wait_ms": 60_000})
    got = during_long_poll(api, poll, trim_and_produce).json()["partitions"]
    assert [len(one["records"]) for one in got] == [0, 1, 0]
    assert [one["log_start_offset"] for one in got] == [0, 0, 1]
    assert read_from[:3] == [0, 1, 2]
    assert set(read_from[3:]) == {1, 2}


def test_a_multi_partition_long_poll_continues_past_a_trim_unless_the_offset_is_explicit(
    api: Api,
) -> None:
    topic, named = api.topic(partitions=3), api.topic()
    for partition in range(3):
        api.values(topic, "a", partition=partition)
    api.values(named, "a")

    def fetch_many(wanted: list[dict[str, Any]], act: Callable[[], object]) -> Any:
        body = {"partitions": wanted, "wait_ms": 60_000, "min_bytes": 3000}
        response = during_long_poll(api, partial(api.post, "/v1/fetch", json=body), act)
        return response.json()["partitions"]

    def trim_and_produce() -> None:
        for partition in range(3):
            api.values(topic, "b", partition=partition)
            path = f"/v1/topics/{topic}/partitions/{partition}/trim"
            assert api.post(path, json={"before_offset": 2}).json() == {"log_start_offset": 2}
            api.values(topic, "c" * 1000, partition=partition)

    places: list[dict[str, Any]] = [{}, {"offset": "latest"}, {"offset": "earliest-local"}]
    wanted = [{"topic": topic, "partition": p, **place} for p, place in enumerate(places)]
    results = fetch_many(wanted, trim_and_produce)
    assert [[record["offset"] for record in one["records"]] for one in results] == [[2]] * 3

    trim = partial(api.post, f"/v1/topics/{named}/partitions/0/trim", json={"before_offset": 1})
    (refused,) = fetch_many([{"topic": named, "partition": 0, "offset": 0}], trim)
    assert refused["error"]["code"] == "offset-trimmed", "a named offset is an error"


def test_both_tiers_are_read_as_one_log(api: Api) -> None:
    topic = api.cold_topic()
    expected = [f"{n:060}" for n in range(200)]
    got, offset, tiers = [], 0, set()
    while len(got) < 200:
        page = api.fetch(topic, offset=str(offset), max_bytes="3000").json()
        got += [r["value"] for r in page["records"]]
        offset = page["next_offset"]
        tiers.add(page["tier"])
    assert got == expected
    assert "cold" in tiers
    raw = b""
    offset = 0
    while offset < 200:
        response = api.fetch(topic, offset=str(offset), accept=BATCHES)
        raw += response.content
        offset = int(response.headers["log-next-offset"])
    assert [r.value.decode() for r in iter_records(raw) if r.value] == expected


@pytest.mark.parametrize("accept", ["application/json", NDJSON, BATCHES])
def test_log_tier_describes_the_returned_records(api: Api, accept: str) -> None:
    topic = api.cold_topic()
    local_start = api.get(f"/v1/topics/{topic}/partitions/0/offsets").json()[
        "local_log_start_offset"
    ]
    api.values(topic, "hot")
    start = local_start - 1
    for count in (1, 2):  # a broker that does not lead may end its answer where the bucket ends
        headers = api.fetch(topic, accept=accept, offset=start, max_records=count).headers
        sent = int(headers["log-next-offset"]) - start
        assert headers["log-tier"] == {1: "cold", 2: "mixed"}[sent]
        assert sent <= count
    assert api.fetch(topic, offset=local_start - 1, max_records=1).json()["tier"] == "cold"


def test_a_corrupt_batch_hides_no_other_records(api: Api) -> None:
    topic = api.topic()
    for value in "abcd":
        api.values(topic, value)
    partition = api.broker.partition(topic, 0)
    piece = partition.read(2, max_bytes=1).slices[0]
    with open(piece.file.path, "r+b") as log:
        log.seek(piece.position + piece.size_bytes - 2)
        log.write(b"X")
    for accept in ("application/json", NDJSON):
        first = api.fetch(topic, accept=accept)
        assert first.status_code == 200
        assert first.headers["log-next-offset"] == "2"
        assert first.headers["log-up-to-date"] == "false"
        assert first.text.count('"offset":') == 2
        refused = problem(api.fetch(topic, accept=accept, offset=2), 500, "corrupt-log")
        assert refused["position"] == piece.position
        assert api.fetch(topic, accept=accept, offset=3).text.count('"offset":') == 1
    wanted = {"partitions": [{"topic": topic, "partition": 0, "offset": 0}]}
    [result] = api.post("/v1/fetch", json=wanted).json()["partitions"]
    assert result["next_offset"] == 2
    message = f"^{topic}-0: offset 2: checksum .* `tierlog storage verify --deep` shows which tier"
    with tierlog.Client(str(api.base_url)) as client:
        page = client.fetch(topic, 0)
        assert [record.value for record in page.records] == [b"a", b"b"]
        assert (page.next_offset, page.up_to_date) == (2, False)
        with pytest.raises(tierlog.errors.CorruptBatch, match=message):
            client.fetch(topic, 0, offset=2)
        reading = client.consume(topic, group="g")
        assert [next(reading).value, next(reading).value] == [b"a", b"b"]
        with pytest.raises(tierlog.errors.CorruptBatch, match=message):
            next(reading)
        assert [commit.offset for commit in client.group("g").offsets] == [2]
        assert [record.value for record in client.consume(topic, offset=3)] == [b"d"]


def test_an_unavailable_store_fails_only_cold_reads(api: Api) -> None:
    topic = api.cold_topic()
    api.values(topic, "hot")
    api.store.go_down()
    try:
        refused = api.fetch(topic, offset="0")
        problem(refused, 503, "store-unavailable")
        assert int(refused.headers["retry-after"]) >= 1
        problem(api.get(f"/v1/topics/{topic}/partitions/0/segments/0"), 503, "store-unavailable")
        assert api.fetch(topic, offset="200").json()["records"][0]["value"] == "hot"
    finally:
        api.store.heal()
    assert api.fetch(topic, offset="0").status_code == 200


def test_a_multi_partition_fetch_waits_for_the_store_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierlog.api.http.fetch.many.STORE_WAIT_MAX_S", 0)
    down, cached, not_tried, hot = api.cold_topic(), api.cold_topic(), api.cold_topic(), api.topic()
    api.values(hot, "here")
    assert api.fetch(cached, offset="0").status_code == 200
    before = len(api.store.calls)
    for call in ("get", "get_range", "head", "list"):
        api.store.fail(call, FailsBefore(), times=10**9)
    topics = [down, cached, not_tried, hot]
    wanted = [{"topic": topic, "partition": 0, "offset": 0} for topic in topics]
    try:
        found = api.post("/v1/fetch", json={"partitions": wanted}).json()["partitions"]
    finally:
        api.store.heal()
    assert [one.get("error", {}).get("code") for one in found] == [
        "store-unavailable",
        None,
        "store-unavailable",
        None,
    ]
    fetched = {key.split("/")[1] for call, key in api.store.calls[before:] if call == "get_range"}
    assert fetched == {down}


def test_a_multi_partition_fetch_waits_for_cache_space_once(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It holds what it has read: two such fetches would wait for each other at each partition."""
    monkeypatch.setattr("tierlog.api.http.fetch.many.STORE_WAIT_MAX_S", 0)
    monkeypatch.setattr("tierlog.cold_tier.cold_reader.SPACE_WAIT_S", 0.01)
    wanted = [{"topic": api.cold_topic(), "partition": 0, "offset": 0} for _ in range(3)]
    assert api.broker.bucket is not None
    cache = api.broker.bucket.cache
    limit_bytes = cache.usage().limit_bytes
    cache.reserve(limit_bytes, wait_s=10)
    try:
        found = api.post("/v1/fetch", json={"partitions": wanted}).json()["partitions"]
    finally:
        cache.unreserve(limit_bytes)
    assert [one["error"]["code"] for one in found] == ["throttled"] * 3
    assert "not tried" in found[2]["error"]["detail"]


def test_max_records_applies_to_records_of_any_size(api: Api) -> None:
    topic = api.topic()
    for number in range(12):
        api.values(topic, str(number).ljust(5000))
    for limit in (1, 2, 4, 11, 12, 100):
        response = api.fetch(topic, max_records=limit).json()
        got = [int(record["value"]) for record in response["records"]]
        assert got == list(range(min(limit, 12)))
        assert response["next_offset"] == len(got)
    response = api.fetch(topic, max_records=11, max_bytes=12_000, accept=NDJSON)
    assert response.headers["log-next-offset"] == str(len(response.text.splitlines())) == "2"
    assert api.fetch(topic, max_records=1, max_bytes=1).json()["next_offset"] == 1


@pytest.mark.usefixtures("nowait_reads")
@pytest.mark.parametrize(("codec", "on_the_loop"), [("uncompressed", True), ("zstd", False)])
@pytest.mark.parametrize("path", ["records?offset=0", "records", "tail?offset=0"])
def test_compressed_records_are_decoded_off_the_event_loop(
    api: Api, monkeypatch: pytest.MonkeyPatch, codec: str, on_the_loop: bool, path: str
) -> None:
    topic = api.topic(compression_type=codec)
    api.values(topic, "0" * 100_000 if codec == "zstd" else "few")
    decode, threads = record_pages.decode_columns, []

    def recording(*args: Any, **kwargs: Any) -> Any:
        threads.append(threading.current_thread().name)
        return decode(*args, **kwargs)

    monkeypatch.setattr(record_pages, "decode_columns", recording)
    with api.stream("GET", f"/v1/topics/{topic}/partitions/0/{path}") as response:
        assert response.status_code == 200
        next(part for part in response.iter_bytes() if b"value" in part)  # a tail sends `:` before
    assert [name == "http-server" for name in threads] == [on_the_loop]
