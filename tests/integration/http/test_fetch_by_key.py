"""Records of one key, over HTTP and with the client: what is found, and what is read for it."""

from __future__ import annotations

import base64
import socket
from collections.abc import Iterator
from functools import partial
from threading import Thread
from typing import Any

import pytest

from tests.fakes.faulty_object_store import Slow
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, NDJSON, Api, api_of, problem, records_path
from tierlog.client.client import Client
from tierlog.client.wire import Limits

PER_SEGMENT = 60
SEGMENTS = 12
KEYS = 300


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    with api_of(tmp_path_factory.mktemp("keys"), chunk_bytes=2048) as client:
        yield client


def record(number: int) -> dict[str, Any]:
    """Each key has records in a part of the topic alone."""
    part = number // (PER_SEGMENT * SEGMENTS // 4)
    return {"key": f"{part}-{number % KEYS}", "value": f"{number:040}"}


@pytest.fixture(scope="module")
def topic(api: Api) -> str:
    """Of `SEGMENTS` cold segments and a tail on local disk."""
    name = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        assert api.produce(name, *map(record, range(start, start + 20))).status_code == 200
    api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    api.produce(name, {"key": "0-7", "value": "in the tail"}, {"value": "0-7"}, {"key": ""})
    return name


def offsets_of(key: str) -> list[int]:
    cold = [at for at in range(PER_SEGMENT * SEGMENTS) if record(at)["key"] == key]
    return cold + ([PER_SEGMENT * SEGMENTS] if key == "0-7" else [])


def find_all(api: Api, topic: str, **params: Any) -> list[int]:
    """The offsets of all pages."""
    found, offset = [], 0
    while True:
        page = api.fetch(topic, offset=offset, **params).json()
        found += [one["offset"] for one in page["records"]]
        assert page["next_offset"] > offset or page["next_offset"] == page["high_watermark"]
        offset = page["next_offset"]
        if offset == page["high_watermark"]:
            return found


@pytest.mark.parametrize("key", ["0-7", "2-61", "3-1", "no such key"])
@pytest.mark.parametrize("limits", [{}, {"max_records": 1}, {"max_bytes": 1}])
def test_exactly_the_records_of_the_key_are_found_in_both_tiers(
    api: Api, topic: str, key: str, limits: dict[str, int]
) -> None:
    assert find_all(api, topic, key=key, **limits) == offsets_of(key)
    encoded = base64.b64encode(key.encode()).decode()
    assert find_all(api, topic, key_base64=encoded, **limits) == offsets_of(key)


def test_an_empty_key_is_a_key_and_null_is_none(api: Api, topic: str) -> None:
    assert find_all(api, topic, key="") == [PER_SEGMENT * SEGMENTS + 2]


def test_ndjson_has_them_too(api: Api, topic: str) -> None:
    lines = api.fetch(topic, key="0-7", accept=NDJSON).text.splitlines()
    assert len(lines) == len(offsets_of("0-7"))


def test_chunks_that_lack_the_key_are_not_fetched(api: Api) -> None:
    name = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        api.produce(name, *map(record, range(start, start + 20)))
    api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    api.store.calls.clear()
    assert find_all(api, name, key="2-61") == offsets_of("2-61")
    gets = [key for call, key in api.store.calls if call == "get_range"]
    indexes = [key for key in gets if key.endswith(".indexes")]
    assert len(indexes) == len(set(indexes)) > SEGMENTS / 2  # one GET a segment
    assert 1 <= len(gets) - len(indexes) <= len(offsets_of("2-61")) + 1  # one may seem to have it


def test_a_search_that_nobody_waits_for_ends(api: Api) -> None:
    """What was loaded ahead comes; nothing more is asked for."""
    name = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        api.produce(name, *map(record, range(start, start + 20)))
    api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    slow = Slow()

    def asked() -> int:
        return len([key for call, key in api.store.calls if call == "get_range"])

    def is_over() -> bool:  # the one in progress is that for the metrics
        return "\ntierlog_http_requests_in_progress 1.0\n" in api.get("/metrics").text

    api.store.calls.clear()
    api.store.fail("get_range", slow, times=10**9)
    with socket.create_connection(("127.0.0.1", api.port)) as client:
        path = f"{records_path(name)}?offset=0&key=no"
        client.sendall(f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode())
        until(asked)
        assert not is_over()
    assert not any(is_over() for _ in range(3))  # by then the server knows that it has gone
    slow.gate.set()
    api.store.heal()
    until(is_over)
    assert asked() == 1
    assert find_all(api, name, key="no") == []
    assert asked() > SEGMENTS / 2


def test_a_trim_on_the_way_moves_the_search_on(api: Api) -> None:
    name = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        api.produce(name, *map(record, range(start, start + 20)))
    api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    before_call = api.store.before_call

    def trim(call: str, key: str) -> None:
        if call == "get_range" and key.endswith(".indexes"):
            api.store.before_call = before_call
            api.broker.trim(name, 0, 500)

    api.store.before_call = trim
    page = api.fetch(name, key="3-1").json()
    assert [one["offset"] for one in page["records"]] == [601]
    assert page["log_start_offset"] == 500
    problem(api.fetch(name, offset=0, key="3-1"), 410, "offset-trimmed")


def test_without_filters_the_same_is_found(api: Api) -> None:
    name = api.topic(segment_bytes=4096, local_retention_ms=0, retention_ms=-1, key_filter=False)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        api.produce(name, *map(record, range(start, start + 20)))
    api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    api.store.calls.clear()
    assert find_all(api, name, key="2-61") == offsets_of("2-61")
    logs = {key for call, key in api.store.calls if call == "get_range" and key.endswith(".log")}
    assert len(logs) == len({key.rpartition("/")[2] for key in logs}) > SEGMENTS / 2


def test_what_a_fetch_reads_is_limited_and_it_goes_on(
    api: Api, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tierlog.api.http.fetch.single._KEY_MAX_MS", 0)
    first = api.fetch(topic, key="3-1").json()
    assert first["records"] == []
    assert 0 < first["next_offset"] < first["high_watermark"]
    assert find_all(api, topic, key="3-1") == offsets_of("3-1")


def test_a_fetch_at_the_end_waits_for_the_key(api: Api) -> None:
    name = api.topic()
    api.produce(name, {"key": "other", "value": "1"})
    page = api.fetch(name, offset=0, key="wanted", wait_ms=50).json()
    assert (page["records"], page["next_offset"]) == ([], 1)
    api.produce(name, {"key": "wanted", "value": "2"})
    page = api.fetch(name, offset=1, key="wanted", wait_ms=10_000).json()
    assert [one["value"] for one in page["records"]] == ["2"]


def test_a_waiting_fetch_outlasts_records_of_other_keys(api: Api) -> None:
    name = api.topic(partitions=2)
    found: list[str | None] = []

    def follow() -> None:
        with Client(str(api.base_url)) as client:
            limits = Limits(key=b"wanted", isolation="read_committed")
            for record in client.consume(name, follow=True, limits=limits):
                found.append(record.value and record.value.decode())
                if record.value == b"last":
                    return

    def produce(number: int, **record: str) -> None:
        assert api.produce(name, {**record, "partition": number % 2}).status_code == 200

    follower = Thread(target=follow, daemon=True)
    follower.start()
    for number in range(20):
        produce(number, key="other", value=str(number))
        produce(number, value="wanted")
        if number % 5 == 0:
            produce(number, key="wanted", value=str(number))
            until(partial(found.__contains__, str(number)))
    produce(0, key="wanted", value="last")
    follower.join(30)
    assert found == ["0", "5", "10", "15", "last"]


def test_what_is_on_local_disk_is_read_there_and_within_the_limits(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Uploaded or not: local segments have no filters."""
    name = api.topic(segment_bytes=4096, retention_ms=-1)
    for start in range(0, PER_SEGMENT * SEGMENTS, 20):
        api.produce(name, *map(record, range(start, start + 20)))
    for _ in range(2):
        api.store.calls.clear()
        assert find_all(api, name, key="2-61") == offsets_of("2-61")
        assert not [key for call, key in api.store.calls if call == "get_range"]
        api.post(f"/v1/topics/{name}/offload", params={"wait_ms": 20_000})
    monkeypatch.setattr("tierlog.api.http.fetch.single._KEY_MAX_MS", 0)
    page = api.fetch(name, key="3-1", max_bytes=4096).json()
    assert page["records"] == []
    assert 0 < page["next_offset"] <= 2 * PER_SEGMENT
    assert find_all(api, name, key="3-1", max_bytes=4096) == offsets_of("3-1")


def test_a_tail_has_all_keys(api: Api, topic: str) -> None:
    events = api.fetch(topic, key="0-7", accept="text/event-stream")
    assert "key" in problem(events, 400, "invalid-request")["detail"]


def test_compressed_batches_and_transactions_are_looked_into(api: Api) -> None:
    name = api.topic(compression_type="zstd")
    api.produce(name, *({"key": f"k{number % 3}", "value": "v" * 50} for number in range(30)))
    assert find_all(api, name, key="k1", isolation="read_committed") == list(range(1, 30, 3))


def test_a_large_record_comes_alone(api: Api) -> None:
    name = api.topic(max_message_bytes=3 << 20)
    for key in ("large", "other"):
        assert api.produce(name, {"key": key, "value": "x" * (1 << 21)}).status_code == 200
    api.produce(name, {"key": "large", "value": "small"})
    assert find_all(api, name, key="large") == [0, 2]
    assert find_all(api, name, key="other") == [1]


def test_the_client_and_whole_batches(api: Api, topic: str) -> None:
    with Client(str(api.base_url)) as client:
        found = client.consume(topic, limits=Limits(key=b"0-7", max_bytes=2000))
        assert [one.offset for one in found] == offsets_of("0-7")
        page = client.fetch(topic, 0, offset=0, limits=Limits(key=b"0-7"))
        assert [one.key for one in page.records] == [b"0-7"] * len(page.records) != []
        assert not list(client.consume(topic, limits=Limits(key=b"no such key")))
    raw = api.fetch(topic, key="no such key", accept=BATCHES)
    assert raw.content == b""
    assert raw.headers["log-next-offset"] == raw.headers["log-high-watermark"]


def test_what_cannot_be_asked_is_refused(api: Api, topic: str) -> None:
    both = api.fetch(topic, key="a", key_base64="YQ==")
    assert "key_base64: give key or key_base64" in problem(both, 400, "invalid-request")["detail"]
    problem(api.fetch(topic, key_base64="*"), 400, "invalid-request")
    path = records_path(topic)
    assert api.get(path, params={"key": "a", "offset": 10**6}).status_code == 416
