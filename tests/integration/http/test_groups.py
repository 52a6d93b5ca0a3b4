from concurrent.futures import ThreadPoolExecutor
from urllib.parse import quote

import httpx2
import pytest

from tests.fakes.waiting import until
from tests.integration.http.conftest import BATCHES, Api, problem, records_path


def path(group: str) -> str:
    return f"/v1/groups/{quote(group, safe='')}"


def commit(api: Api, group: str, *rows: dict[str, object]):
    return api.put(path(group) + "/offsets", json={"offsets": list(rows)})


def row(topic: str, partition: int = 0, offset: int = 0, **more: object) -> dict[str, object]:
    return {"topic": topic, "partition": partition, "offset": offset, **more}


def test_offsets_are_committed_listed_with_lag_and_deleted(api: Api) -> None:
    topic = api.topic(partitions=2)
    api.values(topic, *"abcde")
    done = commit(api, "shown", row(topic, 0, 2), row(topic, 1, 0, metadata="mine"))
    assert done.status_code == 204
    assert done.content == b""
    assert api.get(path("shown")).json() == {
        "group": "shown",
        "offsets": [
            {
                "topic": topic,
                "partition": 0,
                "offset": 2,
                "log_end_offset": 5,
                "lag": 3,
                "metadata": "",
            },
            {
                "topic": topic,
                "partition": 1,
                "offset": 0,
                "log_end_offset": 0,
                "lag": 0,
                "metadata": "mine",
            },
        ],
        "state": "Empty",
        "generation": 0,
        "protocol_type": "",
        "members": [],
        "type": "classic",
    }
    summary = {"topics": [topic], "partitions": 2, "lag": 3, "state": "Empty", "members": 0}
    summary["type"] = "classic"
    assert {"group": "shown", **summary} in api.get("/v1/groups").json()["groups"]
    assert api.delete(path("shown")).status_code == 204
    problem(api.get(path("shown")), 404, "unknown-group")
    problem(api.delete(path("shown")), 404, "unknown-group")


@pytest.mark.parametrize(
    "group", ["a/b", "..", "größe 日本 🚀", "100%", "?#&=+", "\n\0", "x" * 255, "🚀" * 255]
)
def test_a_group_may_have_any_name(api: Api, group: str) -> None:
    topic = api.topic()
    encoded = path(group).replace(".", "%2E")
    body = {"offsets": [row(topic, 0, 7)]}
    assert api.put(encoded + "/offsets", json=body).status_code == 204
    assert api.get(encoded).json()["group"] == group
    assert group in [one["group"] for one in api.get("/v1/groups").json()["groups"]]
    assert api.delete(encoded).status_code == 204


@pytest.mark.parametrize("encoded", ["x" * 256, "%FF", "%C3%28"])
def test_a_group_name_too_long_or_not_utf8_is_refused(api: Api, encoded: str) -> None:
    topic = api.topic()
    response = api.put(f"/v1/groups/{encoded}/offsets", json={"offsets": [row(topic)]})
    assert problem(response, 400, "invalid-request")["errors"][0]["loc"] == "group"


def test_an_unknown_topic_or_partition_is_404_and_nothing_is_committed(api: Api) -> None:
    topic = api.topic()
    problem(commit(api, "none", row(topic), row("nowhere")), 404, "unknown-topic")
    problem(commit(api, "none", row(topic), row(topic, 1)), 404, "unknown-partition")
    problem(api.get(path("none")), 404, "unknown-group")


@pytest.mark.parametrize(
    ("body", "loc"),
    [
        ({}, "offsets"),
        ({"offsets": []}, "offsets"),
        ({"offsets": [{"topic": "t", "partition": 0}]}, "offsets[0].offset"),
        ({"offsets": [row("t", 0, -1)]}, "offsets[0].offset"),
        ({"offsets": [row("t", -1, 0)]}, "offsets[0].partition"),
        ({"offsets": [row("t", 0, 0, metadata=5)]}, "offsets[0].metadata"),
        ({"offsets": [row("t", 0, 0, epoch=5)]}, "offsets[0].epoch"),
        ({"offsets": [row("t")], "mode": 1}, "mode"),
        ({"offsets": [row("t"), row("t")]}, "offsets[1]"),
        ({"offsets": [row("t", 0, 0, metadata="x" * 4097)]}, "offsets[0].metadata"),
    ],
)
def test_an_invalid_commit_is_refused_with_the_member(api: Api, body: object, loc: str) -> None:
    response = api.put(path("bad") + "/offsets", json=body)
    assert problem(response, 400, "invalid-request")["errors"][0]["loc"] == loc


def test_deleting_a_topic_deletes_its_committed_offsets(api: Api) -> None:
    topic, other = api.topic(), api.topic()
    commit(api, "two", row(topic), row(other, 0, 3))
    assert api.delete(f"/v1/topics/{topic}").status_code == 204
    assert [one["topic"] for one in api.get(path("two")).json()["offsets"]] == [other]


def test_the_internal_topic_is_hidden_and_refuses_produces(api: Api) -> None:
    commit(api, "g", row(api.topic()))
    names = [one["name"] for one in api.get("/v1/topics").json()["topics"]]
    assert "__consumer_offsets" not in names
    shown = api.get("/v1/topics", params={"internal": 1}).json()["topics"]
    assert "__consumer_offsets" in [one["name"] for one in shown]
    for path_ in ("/v1/topics/__consumer_offsets/records", records_path("__consumer_offsets")):
        problem(api.post(path_, json={"records": [{"value": "x"}]}), 403, "forbidden")
    raw = {"content-type": BATCHES}
    response = api.post(records_path("__consumer_offsets"), content=b"", headers=raw)
    problem(response, 403, "forbidden")


@pytest.mark.parametrize("path_", ["/v1/topics/__none/records", records_path("__none")])
def test_an_internal_topic_refuses_produces_before_it_exists(api: Api, path_: str) -> None:
    problem(api.post(path_, json={"records": [{"value": "x"}]}), 403, "forbidden")


def test_the_internal_topic_cannot_be_deleted(api: Api) -> None:
    topic = api.topic()
    api.put(
        "/v1/groups/kept/offsets", json={"offsets": [{"topic": topic, "partition": 0, "offset": 0}]}
    )
    problem(api.delete("/v1/topics/__consumer_offsets"), 403, "forbidden")
    assert api.get("/v1/groups/kept").status_code == 200


def test_the_internal_topic_cannot_be_trimmed_repartitioned_or_expired(api: Api) -> None:
    commit(api, "kept", row(api.topic()))
    path_ = "/v1/topics/__consumer_offsets"
    trim = api.post(f"{path_}/partitions/0/trim", json={"before_offset": 1})
    problem(trim, 403, "forbidden")
    problem(api.patch(path_, json={"partitions": 5}), 403, "forbidden")
    for expiring in (
        {"cleanup.policy": "delete"},
        {"cleanup.policy": "compact,delete"},
        {"cleanup.policy": None},
        {"retention.ms": 1000},  # of a topic adopted from Kafka
        {"retention.ms": None},
    ):
        problem(api.patch(path_, json={"config": expiring}), 403, "forbidden")
    assert api.patch(path_, json={"config": {"retention.ms": -1}}).status_code == 200
    assert api.patch(path_, json={"config": {"segment.bytes": 1 << 20}}).status_code == 200


def test_offsets_are_committed_while_the_store_is_down(api: Api, store_down: None) -> None:
    topic = api.topic()
    assert commit(api, "down", row(topic, 0, 1)).status_code == 204
    assert api.get(path("down")).json()["offsets"][0]["offset"] == 1


# --- members --------------------------------------------------------------------------------------


def join(api: Api, group: str, topic: str, **fields: object):
    return api.post(path(group) + "/members", json={"topics": [topic], **fields})


def beat(api: Api, group: str, member: dict[str, object]):
    url = f"{path(group)}/members/{member['member_id']}/heartbeat"
    return api.post(url, json={"generation": member["generation"]})


def partitions(member: dict[str, object]) -> list[int]:
    return [number for row in member["assignment"] for number in row["partitions"]]


def test_members_share_the_partitions_of_a_topic(api: Api) -> None:
    topic = api.topic(partitions=3)
    first = join(api, "shared", topic, client_id="one").json()
    assert (first["generation"], partitions(first)) == (1, [0, 1, 2])
    assert beat(api, "shared", first).status_code == 204
    with ThreadPoolExecutor(1) as threads:
        waiting = threads.submit(join, api, "shared", topic)
        until(lambda: beat(api, "shared", first).status_code == 409)
        refused = problem(beat(api, "shared", first), 409, "group-refused")
        assert refused["reason"] == "REBALANCE_IN_PROGRESS"
        first = join(api, "shared", topic, member_id=first["member_id"]).json()
        second = waiting.result().json()
    assert first["generation"] == second["generation"] == 2
    assert sorted(partitions(first) + partitions(second)) == [0, 1, 2]
    assert min(len(partitions(first)), len(partitions(second))) == 1
    shown = api.get(path("shared")).json()
    assert (shown["state"], shown["generation"], len(shown["members"])) == ("Stable", 2, 2)
    assert {one["member_id"]: one["assignment"] for one in shown["members"]} == {
        one["member_id"]: one["assignment"] for one in (first, second)
    }
    assert "one" in {one["client_id"] for one in shown["members"]}
    gone = api.delete(f"{path('shared')}/members/{second['member_id']}")
    assert gone.status_code == 204
    problem(beat(api, "shared", second), 409, "group-refused")


def test_while_a_group_has_members_they_alone_commit_and_it_is_not_deleted(api: Api) -> None:
    topic = api.topic()
    member = join(api, "busy", topic).json()
    refused = problem(commit(api, "busy", row(topic, 0, 1)), 409, "group-refused")
    assert refused["reason"] == "UNKNOWN_MEMBER_ID"
    body = {"offsets": [row(topic, 0, 1)], "member_id": member["member_id"]}
    old = api.put(path("busy") + "/offsets", json={**body, "generation": 0})
    assert problem(old, 409, "group-refused")["reason"] == "ILLEGAL_GENERATION"
    done = api.put(path("busy") + "/offsets", json={**body, "generation": 1})
    assert done.status_code == 204
    refused = problem(api.delete(path("busy")), 409, "group-refused")
    assert refused["reason"] == "NON_EMPTY_GROUP"
    api.delete(f"{path('busy')}/members/{member['member_id']}")
    assert commit(api, "busy", row(topic, 0, 2)).status_code == 204
    assert api.delete(path("busy")).status_code == 204


def test_a_client_that_goes_away_while_it_joins_has_left(api: Api) -> None:
    topic = api.topic()
    first = join(api, "short", topic).json()
    with pytest.raises(httpx2.TimeoutException):
        api.post(path("short") + "/members", json={"topics": [topic]}, timeout=0.5)
    until(lambda: len(api.get(path("short")).json()["members"]) == 1)
    again = join(api, "short", topic, member_id=first["member_id"]).json()
    assert partitions(again) == [0]
