"""Transactions over HTTP: what is committed is seen whole, and nothing else."""

from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import quote

import httpx2
import pytest

import tierlog
from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, NDJSON, Api, problem, records_path
from tierlog.record_format.encode import encode_batch


class Producer:
    """A transactional producer, by hand."""

    def __init__(self, api: Api, name: str, **more: object) -> None:
        self.api, self.name = api, name
        self.path = f"/v1/transactions/{quote(name, safe='')}"
        begun = api.post("/v1/transactions", json={"transactional_id": name, **more})
        assert begun.status_code == 201, begun.text
        assert begun.headers["location"] == self.path
        self.identity = self.checked(begun)
        self.sequences: dict[tuple[str, int], int] = {}

    def checked(self, response: httpx2.Response) -> dict[str, int]:
        document = response.json()
        assert document.pop("transactional_id") == self.name
        return document

    def headers(self, sequence: int) -> dict[str, str]:
        return {
            "transactional-id": quote(self.name, safe=""),
            "producer-id": str(self.identity["producer_id"]),
            "producer-epoch": str(self.identity["producer_epoch"]),
            "producer-sequence": str(sequence),
        }

    def send(self, topic: str, *values: str, partition: int = 0) -> httpx2.Response:
        sequence = self.sequences.get((topic, partition), 0)
        body = {"records": [{"value": value} for value in values]}
        sent = self.api.post(
            records_path(topic, partition), json=body, headers=self.headers(sequence)
        )
        if sent.status_code == 200:
            self.sequences[topic, partition] = sequence + len(values)
        return sent

    def offsets(self, group: str, *rows: dict[str, Any], **more: object) -> httpx2.Response:
        body = {**self.identity, "group": group, "offsets": list(rows), **more}
        return self.api.post(f"{self.path}/offsets", json=body)

    def end(self, verb: str) -> httpx2.Response:
        ended = self.api.post(f"{self.path}/{verb}", json=self.identity)
        if ended.status_code == 200:
            self.identity, self.sequences = self.checked(ended), {}
        return ended


def committed(api: Api, topic: str, partition: int = 0) -> list[str]:
    found = api.fetch(topic, partition, isolation="read_committed", max_records=1000)
    return [one["value"] for one in found.json()["records"]]


def test_what_is_committed_is_seen_at_once_and_what_is_aborted_is_not(api: Api) -> None:
    topic = api.topic(partitions=2)
    producer = Producer(api, "etl")
    for number in range(4):
        assert producer.send(topic, f"a{number}", f"b{number}").status_code == 200
        assert producer.send(topic, f"c{number}").status_code == 200
        assert producer.send(topic, f"d{number}", partition=1).status_code == 200
        assert producer.end("commit" if number % 2 else "abort").status_code == 200
        whole = [f"{letter}{n}" for n in range(1, number + 1, 2) for letter in "abc"]
        assert committed(api, topic) == whole
    assert committed(api, topic, 1) == ["d1", "d3"]


def test_an_answer_that_was_lost_is_asked_for_again(api: Api) -> None:
    topic = api.topic()
    producer = Producer(api, "again")
    first = producer.send(topic, "once").json()["results"][0]
    producer.sequences.clear()
    again = producer.send(topic, "once").json()["results"][0]
    assert again == {**first, "duplicate": True}
    before = producer.identity
    after = producer.checked(producer.end("commit"))
    assert after["producer_epoch"] == before["producer_epoch"] + 1
    producer.identity = before
    assert producer.checked(producer.end("commit")) == after
    assert producer.identity == after
    assert committed(api, topic) == ["once"]
    producer.identity = before
    refused = problem(producer.end("abort"), 409, "transaction-refused")
    assert refused["reason"] == "INVALID_TXN_STATE"


def test_nothing_can_be_committed_and_aborted(api: Api) -> None:
    producer = Producer(api, "empty")
    before = producer.identity
    assert producer.end("commit").status_code == 200
    assert producer.identity == before
    assert producer.end("abort").status_code == 200


def test_who_begins_anew_fences_the_producer_before_and_aborts_what_it_left(api: Api) -> None:
    topic = api.topic()
    zombie = Producer(api, "heirloom")
    zombie.send(topic, "of a zombie")
    heir = Producer(api, "heirloom")
    assert heir.send(topic, "of its heir").status_code == 200
    problem(zombie.send(topic, "late"), 409, "producer-fenced")
    problem(zombie.end("commit"), 409, "producer-fenced")
    row = {"topic": topic, "partition": 0, "offset": 1}
    problem(zombie.offsets("of-zombies", row), 409, "producer-fenced")
    assert heir.end("commit").status_code == 200
    assert committed(api, topic) == ["of its heir"]


def test_two_that_begin_at_the_same_time_wait_for_each_other(api: Api) -> None:
    topic = api.topic()
    Producer(api, "contended").send(topic, "left")
    with ThreadPoolExecutor(4) as pool:
        begun = list(pool.map(lambda _: Producer(api, "contended"), range(8)))
    last = max(begun, key=lambda one: one.identity["producer_epoch"])
    assert len({one.identity["producer_epoch"] for one in begun}) == 8
    for one in begun:
        if one is not last:
            problem(one.send(topic, "fenced"), 409, "producer-fenced")
    assert last.send(topic, "mine").status_code == 200
    assert last.end("commit").status_code == 200
    assert committed(api, topic) == ["mine"]


def test_a_transaction_that_takes_too_long_is_aborted(api: Api) -> None:
    topic = api.topic()
    producer = Producer(api, "slow", timeout_ms=300)
    producer.send(topic, "late")
    state = api.get(producer.path).json()
    assert state["state"] == "Ongoing"
    assert state["timeout_ms"] == 300
    assert state["partitions"] == [{"topic": topic, "partitions": [0]}]
    until(lambda: api.get(producer.path).json()["state"] == "CompleteAbort")
    problem(producer.end("commit"), 409, "producer-fenced")
    assert committed(api, topic) == []


def test_offsets_count_with_the_transaction_that_commits_them(api: Api) -> None:
    topic = api.topic()
    api.values(topic, *"abc")
    producer = Producer(api, "copier")
    row = {"topic": topic, "partition": 0, "offset": 2}
    assert producer.offsets("copied", row).status_code == 204
    problem(api.get("/v1/groups/copied"), 404, "unknown-group")
    stable = {"stable": 1}
    problem(api.get("/v1/groups/copied", params=stable), 503, "concurrent-transactions")
    assert producer.end("abort").status_code == 200
    problem(api.get("/v1/groups/copied", params=stable), 404, "unknown-group")
    problem(api.get("/v1/groups/copied"), 404, "unknown-group")
    assert producer.offsets("copied", row).status_code == 204
    assert producer.end("commit").status_code == 200
    assert api.get("/v1/groups/copied").json()["offsets"][0]["offset"] == 2
    lost = problem(
        producer.offsets("copied", row, member_id="gone", generation=1), 409, "group-refused"
    )
    assert lost["reason"]
    problem(producer.offsets("copied", {**row, "partition": 1}), 404, "unknown-partition")


def test_a_consumer_of_committed_records_waits_for_the_offsets_of_a_transaction(api: Api) -> None:
    """It takes over from one that copies: what that has read is in the transaction."""
    topic = api.topic()
    api.values(topic, *"abc")
    producer = Producer(api, "left")
    row = {"topic": topic, "partition": 0, "offset": 2}
    assert producer.offsets("taken over", row).status_code == 204
    limits = tierlog.Limits(isolation="read_committed")
    with ThreadPoolExecutor(1) as threads, tierlog.Client(str(api.base_url)) as client:
        reading = client.consume(topic, group="taken over", follow=True, limits=limits)
        first = threads.submit(next, reading)
        until(lambda: api.get("/v1/groups").json()["groups"][-1]["members"] == 1)
        assert producer.end("commit").status_code == 200
        assert first.result(30).value == b"c"
        reading.close()


@pytest.mark.parametrize("name", ["a/b", "%41", "..", "größe 日本 🚀", "?#&=+\n", "x" * 255])
def test_an_id_may_be_any_text(api: Api, name: str) -> None:
    topic = api.topic()
    producer = Producer(api, name)
    producer.path = producer.path.replace("/..", "/%2E%2E")
    assert producer.send(topic, "named").status_code == 200
    assert api.get(producer.path).json()["transactional_id"] == name
    assert producer.end("commit").status_code == 200
    assert committed(api, topic) == ["named"]
    everything = api.get("/v1/transactions").json()["transactions"]
    assert [one["state"] for one in everything if one["transactional_id"] == name] == [
        "CompleteCommit"
    ]


def test_records_of_each_form_and_raw_batches_take_part(api: Api) -> None:
    topic = api.topic()
    producer = Producer(api, "forms")
    lines = api.post(
        records_path(topic),
        content=b'"a"\n"b"\n',
        headers={**producer.headers(0), "content-type": NDJSON},
    )
    assert lines.status_code == 200, lines.text
    octets = {**producer.headers(2), "content-type": "application/octet-stream"}
    assert api.post(records_path(topic), content=b"c", headers=octets).status_code == 200
    raw = {"transactional-id": "forms", "content-type": BATCHES}
    batch = encode_batch(
        [b"d"], timestamps=[1], base_sequence=3, transactional=True, **producer.identity
    )
    sent = api.post(records_path(topic), content=bytes(batch), headers=raw)
    assert sent.status_code == 200, sent.text
    assert committed(api, topic) == []
    producer.end("commit")
    assert committed(api, topic) == list("abcd")


def test_what_is_not_of_a_transaction_is_refused_by_its_name(api: Api) -> None:
    topic = api.topic()
    producer = Producer(api, "strict")
    headers = producer.headers(0)
    body = {"records": [{"value": "x"}]}

    def refused(code: str = "invalid-request", path: str = records_path(topic), **rest: Any) -> str:
        answer = api.post(path, **rest)
        return problem(answer, 400, code)["errors"][0]["loc"]

    alone = {"transactional-id": "strict"}
    assert refused(json=body, headers=alone) == "Producer-Id"
    assert refused(json=body, headers={**headers, "transactional-id": ""}) == "Transactional-Id"
    assert refused(json=body, headers={**headers, "transactional-id": "%FF"}) == "Transactional-Id"
    whole = f"/v1/topics/{topic}/records"
    assert refused(path=whole, json=body, headers=alone) == "Transactional-Id"
    plain = {
        "content": bytes(encode_batch([b"d"], timestamps=[1])),
        "headers": {"content-type": BATCHES},
    }
    plain["headers"] |= alone
    assert refused("invalid-record", **plain) == "batches[0]"
    unknown = {**headers, "transactional-id": "nobody"}
    answer = api.post(records_path(topic), json=body, headers=unknown)
    assert problem(answer, 409, "transaction-refused")["reason"] == "INVALID_PRODUCER_ID_MAPPING"
    too_long = {"transactional_id": "strict", "timeout_ms": 2**31 - 1}
    answer = api.post("/v1/transactions", json=too_long)
    assert problem(answer, 400, "invalid-request")["errors"][0]["loc"] == "timeout_ms"
    problem(api.get("/v1/transactions/nobody"), 404, "unknown-transaction")


def test_ids_are_listed_in_pages_and_by_state(api: Api) -> None:
    for name in ("page-1", "page-2", "page-3"):
        Producer(api, name)
    Producer(api, "page-2").send(api.topic(), "open")
    found, after = [], "page"
    while after is not None:
        page = api.get("/v1/transactions", params={"after": after, "limit": 1}).json()
        found += page["transactions"]
        after = page["next_after"]
    named = {one["transactional_id"]: one for one in found}
    assert {"page-1", "page-2", "page-3"} <= named.keys()
    assert named["page-1"]["age_ms"] is None
    assert named["page-2"]["age_ms"] >= 0
    assert named["page-2"]["partitions"] == 1
    ongoing = api.get("/v1/transactions", params={"state": "Ongoing"}).json()["transactions"]
    assert "page-2" in [one["transactional_id"] for one in ongoing]
    assert "page-1" not in [one["transactional_id"] for one in ongoing]


def test_transactions_of_several_ids_are_committed_by_one_decision(api: Api) -> None:
    topic = api.topic()
    first, second, third = (Producer(api, f"part-{number}") for number in range(3))
    for one in (first, second, third):
        one.send(topic, one.name)
    parts = [{"transactional_id": one.name, **one.identity} for one in (second, third)]
    fenced = [{**parts[0]}, {**parts[1], "producer_epoch": 9}]
    path = f"{first.path}/commit"
    whole = {**first.identity, "together": parts}
    problem(api.post(path, json={**whole, "together": fenced}), 409, "producer-fenced")
    assert committed(api, topic) == []
    assert api.get(second.path).json()["state"] == "Ongoing"
    answer = api.post(path, json=whole)
    assert answer.json()["producer_epoch"] == first.identity["producer_epoch"] + 1
    assert sorted(committed(api, topic)) == ["part-0", "part-1", "part-2"]
    assert api.post(path, json=whole).json() == answer.json()
    first.identity = first.checked(answer)
    first.send(topic, "more")
    mixed = {**first.identity, "together": parts}
    assert problem(api.post(path, json=mixed), 409, "transaction-refused")["reason"]
    twice = {**first.identity, "together": [{"transactional_id": first.name, **first.identity}]}
    assert problem(api.post(path, json=twice), 400, "invalid-request")["errors"][0]["loc"] == (
        "together[0]"
    )


def test_an_end_that_cannot_be_carried_out_is_decided_and_the_next_waits(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The partition's log refuses its marker: readers wait, and so does who begins anew."""
    topic = api.topic()
    producer = Producer(api, "stuck")
    producer.send(topic, "kept")
    partition = api.broker.partition(topic, 0)
    monkeypatch.setattr("tierlog.api.http.groups.transactions.TURN_TIMEOUT_S", 0.2)
    with monkeypatch.context() as patch:
        patch.setattr(type(partition), "append_marker", _refuses)
        assert producer.end("commit").status_code == 200
        assert api.get(producer.path).json()["state"] == "PrepareCommit"
        again = api.post("/v1/transactions", json={"transactional_id": "stuck"})
        problem(again, 503, "concurrent-transactions")
        assert again.headers["retry-after"] == "1"
    until(lambda: committed(api, topic) == ["kept"])
    Producer(api, "stuck")


def _refuses(*_: object) -> None:
    raise OSError("no disk")
