"""Calls on a whole topic, and on all groups and transactions, through each broker of a cluster."""

from __future__ import annotations

import gzip
import json
import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx2

from tests.fakes.broker_cluster import node_id_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.partition.partition import Partition
from tierlog.record_format.errors import LogOfflineError
from tierlog.record_format.topic_rules import partition_for_key

PARTITIONS = 6


def values(cluster: ServedCluster, topic: str, number: int) -> list[str]:
    url = cluster.leader(topic, number).server.url
    read = httpx2.get(f"{url}/v1/topics/{topic}/partitions/{number}/records")
    return [one["value"] for one in read.json()["records"]]


def test_a_produce_to_a_topic_is_split_by_partition(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    keyed = [{"key": f"k{n}", "value": f"{n}"} for n in range(40)]
    chosen = [{"partition": n, "value": f"to-{n}"} for n in range(PARTITIONS)]
    path = f"/v1/topics/{topic}/records"
    made = api.post(path, json={"records": keyed + chosen})
    assert made.status_code == 200, made.text
    results = made.json()["results"]
    assert [one["partition"] for one in results] == list(range(PARTITIONS))
    for one in results:
        number = one["partition"]
        expected = [r["value"] for r in keyed if partition_for_key(r["key"].encode(), 6) == number]
        assert values(cluster, topic, number) == [*expected, f"to-{number}"]
        assert (one["base_offset"], one["last_offset"]) == (0, one["records"] - 1)
    turns = [
        api.post(path, json={"records": [{"value": "a"}, {"value": "b"}]}).json()["results"]
        for _ in range(PARTITIONS)
    ]
    assert sorted(one["partition"] for (one,) in turns) == list(range(PARTITIONS))
    assert all(one["records"] == 2 for (one,) in turns)
    accepted = api.post(path, json={"records": chosen}, params={"acks": "0"})
    assert (accepted.status_code, accepted.json()["accepted"]) == (202, PARTITIONS)
    for number in range(PARTITIONS):
        until(lambda number=number: values(cluster, topic, number)[-1] == f"to-{number}")


def test_a_refusal_of_one_partition_is_reported_with_what_the_others_appended(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    records = [{"partition": n, "value": "x"} for n in range(PARTITIONS)]
    mine = [one for one in cluster.brokers if one.server.url == str(api.base_url).rstrip("/")]
    number = next(n for n in range(PARTITIONS) if cluster.leader(topic, n) is not mine[0])
    with offline(cluster.partition(topic, number)):
        made = api.post(f"/v1/topics/{topic}/records", json={"records": records})
    assert (made.status_code, made.json()["code"]) == (503, "log-offline")
    assert made.json()["outcome"] == "unknown"
    assert [one["partition"] for one in made.json()["results"]] == [
        n for n in range(PARTITIONS) if n != number
    ]


@contextmanager
def offline(partition: Partition) -> Iterator[None]:
    """Appends are refused as if the disk had failed."""
    partition.refuse_appends(lambda: LogOfflineError("the local disk failed"), timeout_s=5)
    yield
    partition.accept_appends()


def test_a_fetch_of_many_partitions_asks_all_their_leaders_and_waits_for_the_first(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    records = [{"partition": n, "value": f"{n}"} for n in range(PARTITIONS)]
    api.post(f"/v1/topics/{topic}/records", json={"records": records})
    places = [{"topic": topic, "partition": n, "offset": 0} for n in reversed(range(PARTITIONS))]
    wanted = {"partitions": [*places, {"topic": topic, "partition": 99}]}
    rows = api.post("/v1/fetch", json=wanted).json()["partitions"]
    assert [one["partition"] for one in rows] == [*reversed(range(PARTITIONS)), 99]
    assert [one["records"][0]["value"] for one in rows[:-1]] == ["5", "4", "3", "2", "1", "0"]
    assert rows[-1]["error"]["code"] == "unknown-partition"
    at_end = [{**one, "offset": 1} for one in places]
    for number in range(PARTITIONS):  # led by each broker in turn
        with ThreadPoolExecutor(1) as pool:
            before = [waiting(one) for one in cluster.brokers]
            body = {"partitions": at_end, "wait_ms": 60_000}
            polled = pool.submit(api.post, "/v1/fetch", json=body, timeout=30)
            leader = cluster.leader(topic, number)
            at = cluster.brokers.index(leader)
            until(lambda leader=leader, at=at, before=before: waiting(leader) > before[at])
            append = {"records": [{"partition": number, "value": "new"}]}
            httpx2.post(f"{leader.server.url}/v1/topics/{topic}/records", json=append)
            rows = polled.result(30).json()["partitions"]
        assert [one["records"][0]["value"] for one in rows if one["records"]] == ["new"]
        at_end[PARTITIONS - 1 - number]["offset"] = 2
    until(lambda: not any(waiting(one) for one in cluster.brokers))
    assert all(one.app.context.inflight.held == 0 for one in cluster.brokers)


def waiting(served: Served) -> int:
    return served.app.context.waiting.count


def test_a_topic_is_described_with_all_partitions_and_their_leaders(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    rows = api.get(f"/v1/topics/{topic}").json()["partitions"]
    assert [one["partition"] for one in rows] == list(range(PARTITIONS))
    for one in rows:
        leader = cluster.leader(topic, one["partition"])
        assert one["leader"] == {"node_id": node_id_of(leader.broker), "url": leader.server.url}
    grown = api.patch(f"/v1/topics/{topic}", json={"partitions": PARTITIONS + 3}).json()
    assert len(grown["partitions"]) == PARTITIONS + 3


def test_a_topic_is_offloaded_verified_pinned_and_repaired_as_a_whole(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    records = [{"partition": n, "value": "x"} for n in range(PARTITIONS)]
    api.post(f"/v1/topics/{topic}/records", json={"records": records})
    path = f"/v1/topics/{topic}"
    offloaded = api.post(f"{path}/offload", params={"wait_ms": "20000"}).json()
    assert offloaded["remaining_segments"] == 0
    assert offloaded["uploaded_segments"] > 2  # of more than one broker
    verified = api.post(f"{path}/verify", params={"deep": "true"}).json()
    assert (verified["ok"], verified["checked"]["partitions"]) == (True, PARTITIONS)
    assert api.post(f"{path}/repair").json()["steps"] == []
    made = api.post(f"{path}/pins", json={"name": "june"})
    assert (made.status_code, len(made.json()["pins"])) == (201, PARTITIONS)
    assert [one["partition"] for one in api.get(f"{path}/pins").json()["pins"]] == list(range(6))
    assert api.delete(f"{path}/pins/june").status_code == 204
    (stored,) = [one for one in api.get("/v1/storage").json()["topics"] if one["topic"] == topic]
    assert (stored["partitions"], stored["cold_segments"]) == (PARTITIONS, PARTITIONS)


def test_groups_are_kept_by_their_coordinators_and_listed_by_every_broker(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    names = [f"{topic}-{n}" for n in range(8)]
    for name in names:
        offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": 0}]}
        put = api.put(f"/v1/groups/{name}/offsets", json=offsets)
        assert put.status_code == 204, put.text
        assert api.get(f"/v1/groups/{name}").json()["offsets"][0]["offset"] == 0
    listed = [one["group"] for one in api.get("/v1/groups").json()["groups"]]
    assert [one for one in listed if one in names] == names
    joined = api.post(f"/v1/groups/{names[0]}/members", json={"topics": [topic]})
    assert joined.status_code == 200, joined.text
    assert joined.json()["assignment"] == [{"topic": topic, "partitions": list(range(6))}]
    member = f"/v1/groups/{names[0]}/members/{joined.json()['member_id']}"
    beat = {"generation": joined.json()["generation"]}
    assert api.post(f"{member}/heartbeat", json=beat).status_code == 204
    assert api.delete(member).status_code == 204
    for name in names:
        assert api.delete(f"/v1/groups/{name}").status_code == 204


def test_a_transactional_id_has_one_coordinator_whichever_broker_is_asked(
    cluster: ServedCluster, topic: str, api: httpx2.Client
) -> None:
    names = [f"{topic}-{n}" for n in range(4)]
    for name in names:
        begun = api.post("/v1/transactions", json={"transactional_id": name})
        assert begun.status_code == 201, begun.text
        producer = {one: begun.json()[one] for one in ("producer_id", "producer_epoch")}
        assert api.get(f"/v1/transactions/{name}").json()["state"] == "Empty"
        assert api.post(f"/v1/transactions/{name}/commit", json=producer).status_code == 200
    listed = [
        one["transactional_id"]
        for one in api.get("/v1/transactions", params={"limit": "1000"}).json()["transactions"]
    ]
    assert [one for one in listed if one in names] == names


def expanding(size_mib: int, partition: int) -> bytes:
    """A body of some KiB that becomes so much."""
    record = {"partition": partition, "value": "x" * (1 << 16)}
    return gzip.compress(json.dumps({"records": [record] * (size_mib << 4)}).encode())


@contextmanager
def paused(broker: BrokerProcess) -> Iterator[None]:
    assert broker.process is not None
    os.kill(broker.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(broker.process.pid, signal.SIGCONT)


def test_what_waits_for_a_leader_that_hangs_is_within_the_memory_of_bodies(
    tmp_path: Path, third: BrokerProcess
) -> None:
    """However far the bodies expand, and however many clients send them."""
    third.start()
    limit = 24 << 20
    http = HttpSettings(inflight_max_bytes=limit)
    with served_cluster(tmp_path, brokers=1, http=http) as cluster, ThreadPoolExecutor(2) as pool:
        (served,) = cluster.brokers
        inflight = served.app.context.inflight
        cluster.create("t", partitions=2)
        described = httpx2.get(f"{served.server.url}/v1/topics/t").json()["partitions"]
        (number,) = [n for n in range(2) if described[n]["leader"]["url"] == third.url]

        def produce(size_mib: int) -> httpx2.Response:
            path, body = f"{served.server.url}/v1/topics/t/records", expanding(size_mib, number)
            headers = {"content-type": "application/json", "content-encoding": "gzip"}
            return httpx2.post(path, content=body, headers=headers, timeout=60)

        with paused(third):
            waiting = [pool.submit(produce, 10) for _ in range(2)]
            until(lambda: inflight.held >= 20 << 20)
            refused, too_large = produce(10), produce(30)
            assert inflight.held <= limit
        assert (refused.status_code, refused.json()["code"]) == (429, "throttled")
        assert (too_large.status_code, too_large.json()["limit_bytes"]) == (413, limit)
        assert [one.result().status_code for one in waiting] == [200, 200]
        until(lambda: inflight.held == 0)
