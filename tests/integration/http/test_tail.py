import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.waiting import until, until_waiting
from tests.integration.http.conftest import Api, api_of, problem, records_path, take_over
from tierlog.api.http.context import Context
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.tiered_reads import Fetched


class Events:
    """The events of one stream, read as they arrive."""

    def __init__(self, response: httpx2.Response) -> None:
        self.headers = response.headers
        self._lines = response.iter_lines()

    def take(self, count: int) -> list[dict[str, str]]:
        found: list[dict[str, str]] = []
        event: dict[str, str] = {}
        while len(found) < count:
            line = next(self._lines)
            if not line and event:
                found.append(event)
                event = {}
            elif line and not line.startswith(":"):
                name, _, value = line.partition(": ")
                event[name] = value
        return found


@contextmanager
def tail(api: Api, path: str, **headers: str) -> Iterator[Events]:
    with api.stream(
        "GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()}
    ) as response:
        assert response.status_code == 200, response.read()
        yield Events(response)


def test_records_arrive_as_produced_and_last_event_id_resumes(api: Api) -> None:
    topic = api.topic()
    path = f"/v1/topics/{topic}/partitions/0/tail"
    api.values(topic, "before")
    with tail(api, path) as events:
        assert events.headers["content-type"].startswith("text/event-stream")
        assert events.headers["log-next-offset"] == events.headers["log-high-watermark"] == "1"
        assert (events.headers["log-start-offset"], events.headers["log-tier"]) == ("0", "hot")
        assert events.headers["log-up-to-date"] == "true"
        api.values(topic, "a", "b")
        first, second = events.take(2)
        assert (first["id"], second["id"]) == ("1", "2")
        assert json.loads(first["data"])["value"] == "a"
        assert json.loads(first["data"])["partition"] == 0
    with tail(api, path, last_event_id="1") as events:
        assert events.take(1)[0]["id"] == "2"
    with tail(api, path + "?offset=earliest") as events:
        assert [e["id"] for e in events.take(3)] == ["0", "1", "2"]
    with tail(api, records_path(topic) + "?offset=1", accept="text/event-stream") as events:
        assert [e["id"] for e in events.take(2)] == ["1", "2"]


def test_a_topics_tail_resumes_every_partition(api: Api) -> None:
    topic = api.topic(partitions=2)
    path = f"/v1/topics/{topic}/tail"
    for partition in (0, 1):
        api.values(topic, "a", "b", partition=partition)
    with tail(api, path + "?offset=earliest") as events:
        seen = events.take(3)
    with tail(api, path, last_event_id=seen[-1]["id"]) as events:
        rest = events.take(1)
    got = [(d["partition"], d["offset"]) for d in (json.loads(e["data"]) for e in seen + rest)]
    assert sorted(got) == [(0, 0), (0, 1), (1, 0), (1, 1)]
    for odd in ("0:1,0:1", "7:1", "0:1,,1:1", "0"):
        problem(api.get(path, headers={"last-event-id": odd}), 400, "invalid-request")


def test_a_partition_added_since_last_event_id_is_read_from_its_start(api: Api) -> None:
    topic = api.topic()
    path = f"/v1/topics/{topic}/tail"
    api.values(topic, "a")
    with tail(api, path + "?offset=earliest") as events:
        last = events.take(1)[0]["id"]
    assert api.patch(f"/v1/topics/{topic}", json={"partitions": 2}).status_code == 200
    api.values(topic, "b", partition=1)
    with tail(api, path, last_event_id=last) as events:
        assert json.loads(events.take(1)[0]["data"])["value"] == "b"


def test_a_topic_tail_includes_added_partitions(api: Api) -> None:
    topic = api.topic()
    with tail(api, f"/v1/topics/{topic}/tail") as events:
        api.values(topic, "a")
        assert events.take(1)[0]["id"] == "0:0"
        assert api.patch(f"/v1/topics/{topic}", json={"partitions": 2}).status_code == 200
        api.values(topic, "b", partition=1)
        (event,) = events.take(1)
        assert event["id"] == "0:0,1:0"
        assert json.loads(event["data"])["value"] == "b"


def test_a_topic_tail_reads_only_the_partitions_with_new_records(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = api.topic(partitions=3)
    reading, read_from = Context.read_batches, []

    async def recording(context: Context, partition: Partition, *args: Any) -> Fetched:
        read_from.append(partition.number)
        return await reading(context, partition, *args)

    monkeypatch.setattr(Context, "read_batches", recording)
    with tail(api, f"/v1/topics/{topic}/tail") as events:
        until(lambda: read_from == [0, 1, 2])
        for value in "abc":
            api.values(topic, value, partition=1)
            assert json.loads(events.take(1)[0]["data"])["value"] == value
    assert set(read_from[3:]) == {1}


def test_an_invalid_start_position_is_refused_before_the_stream(api: Api) -> None:
    topic = api.topic()
    api.values(topic, "a", "b", "c")
    api.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 2})
    path = f"/v1/topics/{topic}/partitions/0/tail"
    problem(api.get(path, headers={"last-event-id": "0"}), 410, "offset-trimmed")
    problem(api.get(path, params={"offset": "9"}), 416, "offset-past-end")
    problem(api.get(path, headers={"last-event-id": "x"}), 400, "invalid-request")


def test_the_tail_of_a_partition_that_lost_leadership_is_409(tmp_path: Path) -> None:
    with api_of(tmp_path) as api:
        topic = api.topic()
        api.values(topic, "a", "b", "c")
        take_over(api, topic, tmp_path)
        path = f"/v1/topics/{topic}/partitions/0/tail"
        problem(api.get(path), 409, "leadership-lost")
        # Not 416: the client read from the new owner, and this broker no longer knows the end.
        problem(api.get(path, headers={"last-event-id": "9"}), 409, "leadership-lost")
        problem(api.get(f"/v1/topics/{topic}/tail"), 409, "leadership-lost")


def test_disconnecting_ends_a_tail(api: Api) -> None:
    topic = api.topic()
    partition = api.broker.partition(topic, 0)
    with tail(api, f"/v1/topics/{topic}/partitions/0/tail"):
        until(lambda: bool(partition._waiters._waiting))
    until(lambda: not partition._waiters._waiting)


def test_concurrent_tails_get_every_record_in_order(api: Api) -> None:
    topic = api.topic()
    got: list[list[str]] = []

    def follow() -> None:
        with (
            httpx2.Client(base_url=api.base_url, timeout=20) as client,
            client.stream(
                "GET", f"/v1/topics/{topic}/partitions/0/tail?offset=earliest"
            ) as response,
        ):
            got.append([json.loads(e["data"])["value"] for e in Events(response).take(100)])

    readers = [threading.Thread(target=follow) for _ in range(5)]
    for reader in readers:
        reader.start()
    for start in range(0, 100, 10):
        api.values(topic, *[str(n) for n in range(start, start + 10)])
    for reader in readers:
        reader.join()
    assert got == [[str(n) for n in range(100)]] * 5


def test_deleting_a_topic_ends_its_tails_and_long_polls(api: Api) -> None:
    topic = api.topic(partitions=2)
    responses: list[httpx2.Response] = []

    def poll() -> None:
        responses.append(api.fetch(topic, wait_ms=30_000))

    with (
        tail(api, f"/v1/topics/{topic}/partitions/0/tail") as of_partition,
        tail(api, f"/v1/topics/{topic}/tail") as of_topic,
    ):
        thread = threading.Thread(target=poll)
        thread.start()
        until_waiting(lambda: api.get("/metrics").text, least=3)
        began = time.monotonic()
        assert api.delete(f"/v1/topics/{topic}").status_code == 204
        for events in (of_partition, of_topic):
            (event,) = events.take(1)
            assert event["event"] == "error"
            assert json.loads(event["data"])["code"] == "unknown-topic"
        thread.join()
        assert time.monotonic() - began < 10, "they waited for their timeout"
    problem(responses[0], 404, "unknown-topic")
