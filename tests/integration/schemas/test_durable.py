"""What was registered outlives a kill, a lost disk, and its broker; ids are given by one leader."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.kafka_brokers import Brokers, leader_of, move, three_brokers
from tests.fakes.served_broker import Served, served_broker
from tests.fakes.soak import restored_broker
from tests.fakes.waiting import until
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=30) as client:
        yield client


def record(name: str) -> dict[str, str]:
    return {"schema": f'{{"type":"record","name":"{name}","fields":[]}}'}


def register(http: httpx2.Client, url: str, name: str, subject: str = "") -> Any:
    answer = http.post(f"{url}/subjects/{subject or name}/versions", json=record(name))
    assert answer.status_code == 200, answer.text
    return answer.json()["id"]


def test_ids_outlive_a_kill_and_a_lost_disk(tmp_path: Path, http: httpx2.Client) -> None:
    broker = BrokerProcess(tmp_path).start()
    try:
        ids = {name: register(http, broker.url, name) for name in "ABC"}
        http.put(f"{broker.url}/config/A", json={"compatibility": "FULL"})
        http.delete(f"{broker.url}/subjects/C")
        http.delete(f"{broker.url}/subjects/C", params={"permanent": True})
        broker.kill()
        broker.start()
        again = {name: register(http, broker.url, name) for name in "AB"}
        assert again == {name: ids[name] for name in "AB"}
        assert http.get(f"{broker.url}/config/A").json() == {"compatibilityLevel": "FULL"}
        assert http.get(f"{broker.url}/schemas/ids/{ids['C']}").status_code == 404
        assert register(http, broker.url, "D") == max(ids.values()) + 1, "no id is given twice"
        offload = f"{broker.url}/v1/topics/_schemas/offload"
        until(lambda: http.post(offload).json()["remaining_segments"] == 0)
    finally:
        broker.kill()
    with restored_broker(broker) as other:
        assert {name: register(http, other.url, name) for name in "AB"} == again
        assert register(http, other.url, "E") == max(ids.values()) + 2


@pytest.fixture
def brokers(tmp_path: Path) -> Iterator[Brokers]:
    with three_brokers(tmp_path) as brokers:
        yield brokers


def test_every_broker_answers_and_one_gives_ids(brokers: Brokers, http: httpx2.Client) -> None:
    urls = [one.server.url for one in brokers]
    register(http, urls[0], "First")
    numbers = itertools.count()

    def register_somewhere(name: str) -> Any:
        return register(http, urls[next(numbers) % len(urls)], name)

    wanted = [f"S{number}" for number in range(6)] * 3
    with ThreadPoolExecutor(6) as threads:
        ids = list(threads.map(register_somewhere, wanted))
    found = dict(zip(wanted, ids, strict=True))
    assert sorted(set(ids)) == list(range(2, 8))
    assert [found[name] for name in wanted] == ids, "one id a schema"
    moved = move(brokers, "_schemas", 0)
    until(lambda: leader_of(brokers, "_schemas", 0) is moved)
    for url in urls:
        for name, schema_id in found.items():
            answer = http.get(f"{url}/schemas/ids/{schema_id}/versions")
            assert answer.json() == [{"subject": name, "version": 1}]
        assert register(http, url, "S1") == found["S1"]
    assert register(http, urls[0], "Last") == 8


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Served]:
    settings = HttpSettings(tokens_file=tmp_path / "tokens.json")
    with served_broker(tmp_path / "data", http=settings) as served:
        yield served


def test_tokens_and_their_topics_apply_to_subjects(
    secured: Served, http: httpx2.Client, tmp_path: Path
) -> None:
    def ask(token: str, method: str, path: str, **rest: Any) -> tuple[int, Any]:
        headers = {"authorization": f"Bearer {token}"} if token else {}
        answer = http.request(method, secured.server.url + path, headers=headers, **rest)
        document = answer.json()
        if isinstance(document, dict):  # what is registered also has its GUID
            document = document.get("error_code" if answer.is_error else "id", document)
        return answer.status_code, document

    def token(name: str, *scopes: Scope, topics: str = "") -> str:
        return create_token(tmp_path / "tokens.json", name, scopes=scopes, topics=topics, now_ms=1)

    admin, reads = token("admin", Scope.ADMIN), token("reads", Scope.READ)
    eu = token("eu", Scope.PRODUCE, topics="eu.")
    us = token("us", Scope.PRODUCE, Scope.READ, topics="us.")
    schema = {"json": record("Flight")}
    assert ask("", "GET", "/subjects") == (401, 401)
    assert ask(reads, "POST", "/subjects/eu.a-value/versions", **schema) == (403, 403)
    assert ask(us, "POST", "/subjects/eu.a-value/versions", **schema) == (403, 403)
    assert ask(eu, "POST", "/subjects/eu.a-value/versions", **schema) == (200, 1)
    assert ask(us, "GET", "/schemas/ids/1") == (404, 40403)
    assert ask(us, "GET", "/subjects") == (200, [])
    assert ask(us, "GET", "/schemas") == (200, [])
    assert ask(eu, "GET", "/subjects") == (200, ["eu.a-value"])
    assert ask(reads, "GET", "/schemas/ids/1/subjects") == (200, ["eu.a-value"])
    assert ask(us, "POST", "/subjects/us.b-value/versions", **schema) == (200, 1)
    assert ask(us, "GET", "/schemas/ids/1/subjects") == (200, ["us.b-value"])
    referring = {
        "schema": '["Flight"]',
        "references": [{"name": "Flight", "subject": "eu.a-value", "version": 1}],
    }
    assert ask(us, "POST", "/subjects/us.c/versions", json=referring) == (403, 403)
    level = {"json": {"compatibility": "NONE"}}
    assert ask(eu, "PUT", "/config/eu.a-value", **level) == (403, 403)
    assert ask(admin, "PUT", "/config/eu.a-value", **level)[0] == 200
    limited = token("limited", Scope.ADMIN, topics="eu.")
    assert ask(limited, "PUT", "/config", **level) == (403, 403)
    assert ask(eu, "DELETE", "/subjects/eu.a-value") == (403, 403)
    assert ask(limited, "DELETE", "/subjects/eu.a-value") == (200, [1])
