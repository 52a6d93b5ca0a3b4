"""What is in the bucket is read through any broker, whoever leads it, also while nobody does."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.compacted_topics import COMPACT, fill, last_of
from tests.fakes.records import iter_records
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tests.integration.http.test_transactions import Producer
from tierlog.api.http.header_values import BATCHES
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.cluster.cold_partitions import MANIFEST_MAX_AGE_S
from tierlog.client.client import Client
from tierlog.client.exchange import NO_RETRIES
from tierlog.record_format.errors import LeaderUnknown

SMALL: dict[str, object] = {
    "segment.bytes": 4096,
    "retention.ms": -1,
    "offload.max.lag.ms": 86_400_000,
}
LINES = 200
TOPIC_ID = "log-topic-id"


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedCluster]:
    with served_cluster(tmp_path_factory.mktemp("cluster")) as cluster:
        yield cluster


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=20) as client:
        yield client


def partition_url(served: Served | str, topic: str, number: int = 0) -> str:
    url = served if isinstance(served, str) else served.server.url
    return f"{url}/v1/topics/{topic}/partitions/{number}"


def produce(http: httpx2.Client, url: str, topic: str, *values: str, number: int = 0) -> None:
    body = {"records": [{"value": value, "timestamp": at} for at, value in enumerate(values)]}
    for start in range(0, len(values), 20):
        part = {"records": body["records"][start : start + 20]}
        made = http.post(partition_url(url, topic, number) + "/records", json=part)
        assert made.status_code == 200, made.text


def offload(http: httpx2.Client, url: str, topic: str) -> None:
    done = http.post(f"{url}/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
    assert done.status_code == 200, done.text


def sealed_topic(
    cluster: ServedCluster, http: httpx2.Client, name: str, **config: object
) -> ServedCluster:
    """A topic of which `LINES` records are in the bucket and ten are not."""
    cluster.create(name, partitions=1, **SMALL | config)
    url = cluster.leader(name).server.url
    produce(http, url, name, *(f"{n}" * 30 for n in range(LINES)))
    offload(http, url, name)
    produce(http, url, name, *(f"hot{n}" for n in range(10)))
    until(lambda: all(heard(one, name) == LINES for one in cluster.others(name)))
    return cluster


def heard(served: Served, topic: str) -> int:
    """Where the bucket ends, as this broker has heard."""
    topic_id = served.broker.topic(topic).record.topic_id
    leader = cluster_of(served.broker).find_leader(topic_id, 0)
    return leader.cold_end_offset if leader is not None else -1


def read_raw(http: httpx2.Client, url: str, *, to: int, **more: Any) -> tuple[bytes, list[Any]]:
    """All batches from the start to this offset, and the headers of the answers."""
    offset, data, headers = 0, b"", []
    while offset < to:
        params = {"offset": offset, "max_bytes": 5000, **more}
        answer = http.get(f"{url}/records", params=params, headers={"accept": BATCHES})
        assert answer.status_code == 200, answer.text
        data, offset = data + answer.content, int(answer.headers["log-next-offset"])
        headers.append(answer.headers)
    return data, headers


def test_every_sealed_byte_comes_from_the_broker_that_is_asked(
    cluster: ServedCluster, http: httpx2.Client
) -> None:
    sealed_topic(cluster, http, "sealed")
    leader = cluster.leader("sealed")
    expected, told = read_raw(http, partition_url(leader, "sealed"), to=LINES)
    assert {one["log-tier"] for one in told} == {"hot"}
    with Client(leader.server.url) as client:
        (led,) = [one for one in client.led_partitions().leaders if one[0] == told[0][TOPIC_ID]]
        assert led[1:] == (0, 1, LINES + 10, LINES)
    for served in cluster.others("sealed"):
        url = partition_url(served, "sealed")
        for headers in ({}, {"tierlog-route": "direct"}):
            first = http.get(f"{url}/records", params={"max_records": 3}, headers=headers)
            assert (first.status_code, first.json()["tier"]) == (200, "cold")
        wanted = [{"topic": "sealed", "partition": 0, "offset": at} for at in (7, LINES)]
        rows = http.post(
            f"{served.server.url}/v1/fetch",
            json={"partitions": wanted},
            headers={"tierlog-route": "direct"},
        ).json()["partitions"]
        assert (rows[0]["records"][0]["offset"], rows[0]["tier"]) == (7, "cold")
        assert (rows[0]["high_watermark"], rows[1]["error"]["code"]) == (LINES + 10, "not-leader")
        data, answers = read_raw(http, url, to=LINES)
        assert answers[-1]["log-next-offset"] == f"{LINES}"
        assert expected.startswith(data)  # what the leader has on its disk goes on
        for one in answers:
            assert one["log-tier"] == "cold"
            assert one["log-high-watermark"] == f"{LINES + 10}"
            assert (one["log-start-offset"], one["log-up-to-date"]) == ("0", "false")
            assert one["log-topic-id"] == told[0]["log-topic-id"]
            assert "log-leader" not in one
        whole, answers = read_raw(http, url, to=LINES + 10)
        assert whole[: len(data)] == data
        assert (answers[-1]["log-tier"], answers[-1]["log-up-to-date"]) == ("hot", "true")


def test_segments_and_times_are_the_leaders(cluster: ServedCluster, http: httpx2.Client) -> None:
    sealed_topic(cluster, http, "parts")
    leader = cluster.leader("parts")
    listed = http.get(partition_url(leader, "parts") + "/segments").json()["segments"]
    sealed = [one["base_offset"] for one in listed if one["tier"] == "both"]
    assert len(sealed) > 3
    for served in cluster.others("parts"):
        for base_offset in sealed:
            path = f"/segments/{base_offset}"
            theirs = http.get(partition_url(leader, "parts") + path)
            ours = http.get(partition_url(served, "parts") + path)
            assert ours.headers["log-tier"] == "cold"
            assert (ours.content, ours.headers["etag"]) == (theirs.content, theirs.headers["etag"])
        part = http.get(
            partition_url(served, "parts") + f"/segments/{sealed[1]}",
            headers={"range": "bytes=100-199"},
        )
        whole = http.get(partition_url(leader, "parts") + f"/segments/{sealed[1]}").content
        assert (part.status_code, part.content) == (206, whole[100:200])
        active = http.get(partition_url(served, "parts") + f"/segments/{LINES}")
        assert active.headers["log-tier"] == "hot"
        for at in ("7", "19", "99999"):
            for path in ("/offsets?", "/records?max_records=3&"):
                path += f"timestamp={at}"
                answers = [
                    http.get(partition_url(one, "parts") + path).json() for one in (leader, served)
                ]
                for one in answers:
                    one.pop("tier", None)
                assert answers[0] == answers[1]


def test_nothing_below_the_log_start_is_shown_once_a_trim_was_answered(
    cluster: ServedCluster, http: httpx2.Client
) -> None:
    sealed_topic(cluster, http, "trimmed")
    leader, (first, second) = cluster.leader("trimmed"), cluster.others("trimmed")
    url = partition_url(first, "trimmed")
    assert http.get(f"{url}/records", params={"offset": 0}).json()["tier"] == "cold"
    trimmed = http.post(partition_url(second, "trimmed") + "/trim", json={"before_offset": 123})
    assert trimmed.status_code == 200, trimmed.text
    gone = http.get(f"{url}/records", params={"offset": 122})
    same = http.get(partition_url(leader, "trimmed") + "/records", params={"offset": 122})
    assert (gone.status_code, gone.json()["code"]) == (410, "offset-trimmed")
    for name in ("log_start_offset", "high_watermark"):
        assert gone.json()[name] == same.json()[name]
    earliest = http.get(f"{url}/records", params={"offset": "earliest"}).json()
    assert (earliest["records"][0]["offset"], earliest["log_start_offset"]) == (123, 123)
    assert earliest["tier"] == "cold"
    assert http.get(f"{url}/segments/0").status_code == 404


def test_a_topic_of_the_same_name_is_another(cluster: ServedCluster, http: httpx2.Client) -> None:
    sealed_topic(cluster, http, "again")
    url = partition_url(cluster.others("again")[0], "again")
    before = http.get(f"{url}/records").headers["log-topic-id"]
    server = cluster.brokers[0].server.url
    assert http.delete(f"{server}/v1/topics/again").status_code == 204
    assert http.get(f"{url}/records").status_code == 404
    cluster.create("again", partitions=1, **SMALL)
    answer = http.get(f"{url}/records")
    assert (answer.json()["records"], answer.json()["high_watermark"]) == ([], 0)
    assert answer.headers["log-topic-id"] != before


def test_committed_records_are_read_up_to_the_first_open_transaction(
    cluster: ServedCluster, http: httpx2.Client
) -> None:
    cluster.create("paid", partitions=1, **SMALL)
    leader = cluster.leader("paid")
    with httpx2.Client(base_url=leader.server.url, timeout=20) as api:
        producers = [Producer(api, f"etl-{number}") for number in range(3)]  # type: ignore[arg-type]
        for number in range(20):
            for verb, producer in zip(("commit", "abort"), producers[:2], strict=True):
                assert producer.send("paid", f"{verb}{number}" * 20).status_code == 200
                assert producer.end(verb).status_code == 200
        assert producers[2].send("paid", "open").status_code == 200
        until_open = leader.broker.partition("paid", 0).offsets().last_stable_offset
        assert producers[0].send("paid", "after it").status_code == 200
        assert producers[0].end("commit").status_code == 200
        offload(http, leader.server.url, "paid")
        end = leader.broker.partition("paid", 0).high_watermark
        until(lambda: all(heard(one, "paid") == end for one in cluster.others("paid")))
        for served in cluster.others("paid"):  # who waits for more waits at the leader
            poll = {"offset": end - 1, "min_bytes": 10_000, "wait_ms": 50}
            polled = http.get(partition_url(served, "paid") + "/records", params=poll)
            assert (polled.status_code, polled.headers["log-tier"]) == (200, "hot")
            at_end = http.get(
                partition_url(served, "paid") + "/records", params={"offset": end - 1}
            )
            told = at_end.headers
            assert (told["log-tier"], told["log-up-to-date"]) == ("cold", "true")
        committed = {"isolation": "read_committed"}
        for served in cluster.brokers:
            values, offset, tiers = [], 0, set()
            while offset < until_open:
                params = {"offset": offset, "max_bytes": 2000, **committed}
                page = http.get(partition_url(served, "paid") + "/records", params=params).json()
                values += [one["value"] for one in page["records"]]
                offset, tiers = page["next_offset"], tiers | {page["tier"]}
            assert values == [f"commit{number}" * 20 for number in range(20)]
            assert tiers == {"hot" if served is leader else "cold"}
            rest = http.get(
                partition_url(served, "paid") + "/records", params={"offset": offset, **committed}
            )
            assert (rest.json()["records"], rest.json()["tier"]) == ([], "hot")
        assert producers[2].end("abort").status_code == 200
        for served in cluster.brokers:
            params = {"offset": until_open, **committed}
            page = http.get(partition_url(served, "paid") + "/records", params=params).json()
            assert [one["value"] for one in page["records"]] == ["after it"]


def test_compacted_records_are_those_of_the_leader_and_the_last_of_each_key_is_never_missing(
    cluster: ServedCluster, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = {"min.compaction.lag.ms": 86_400_000}  # the background's turn comes at any time
    cluster.create("latest", partitions=1, **SMALL | COMPACT | later)
    leader, other = cluster.leader("latest"), cluster.others("latest")[0]
    last = fill(leader, "latest", 400)
    offload(http, leader.server.url, "latest")
    until(lambda: heard(other, "latest") == 400)
    cold = cluster_of(other.broker).cold

    def read(served: Served) -> list[Any]:
        data, answers = read_raw(http, partition_url(served, "latest"), to=400)
        assert {one["log-tier"] for one in answers} == {"hot" if served is leader else "cold"}
        return list(iter_records(data))

    before = read(other)
    log = leader.broker.partition("latest", 0)._log
    size = log.size_bytes
    log.roll()
    leader.broker.alter_topic("latest", config={"min.compaction.lag.ms": 0})

    def is_compacted() -> bool:
        leader.broker.background.compactor.run_round()
        return log.size_bytes < size

    until(is_compacted)
    offload(http, leader.server.url, "latest")
    until(lambda: leader.broker.partition("latest", 0).is_mirrored)
    assert last_of(read(other)) == last_of(read(leader)) == last
    later_s = time.monotonic() + MANIFEST_MAX_AGE_S
    monkeypatch.setattr(cold, "_clock", lambda: later_s + 1)
    assert len(before) == 400
    assert read(other) == read(leader)


def test_a_tail_through_another_broker_asks_the_bucket_for_nothing(
    cluster: ServedCluster, http: httpx2.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    sealed_topic(cluster, http, "quiet")
    served = cluster.others("quiet")[0]
    bucket, loads = served.broker.bucket, list[int]()
    assert bucket is not None
    load = bucket.load_cold_reads

    def counted(record: Any, number: int, **more: Any) -> Any:
        loads.append(number)
        return load(record, number, **more)

    monkeypatch.setattr(bucket, "load_cold_reads", counted)
    url = partition_url(served, "quiet")
    for offset in (LINES, LINES + 5, LINES + 10, "latest", "earliest-local"):
        answer = http.get(f"{url}/records", params={"offset": offset, "wait_ms": 50})
        assert answer.status_code == 200, answer.text
    assert loads == []
    for offset in (0, 7, LINES - 1):
        assert http.get(f"{url}/records", params={"offset": offset}).json()["tier"] == "cold"
    assert loads == [0]


def test_where_the_bucket_is_down_the_leader_reads_what_it_has_on_disk(tmp_path: Path) -> None:
    with (
        served_cluster(tmp_path, brokers=2) as cluster,
        httpx2.Client(timeout=20) as http,
    ):
        sealed_topic(cluster, http, "cut")
        url = partition_url(cluster.others("cut")[0], "cut")
        first = http.get(f"{url}/records", params={"max_bytes": 1})
        assert first.json()["tier"] == "cold"
        (tmp_path / "bucket").rename(tmp_path / "away")
        try:
            answers = [http.get(f"{url}/records", params={"offset": n}) for n in (0, LINES - 1)]
        finally:
            (tmp_path / "away").rename(tmp_path / "bucket")
        assert [one.json()["tier"] for one in answers] == ["cold", "hot"]


# --- without a leader -----------------------------------------------------------------------------


def test_a_killed_leaders_history_is_read_through_the_others(
    tmp_path: Path, third: BrokerProcess
) -> None:
    http_settings = HttpSettings(leader_wait_ms=200)
    with (
        served_cluster(tmp_path, brokers=2, http=http_settings) as cluster,
        httpx2.Client(timeout=20) as http,
    ):
        third.start()
        members = [cluster_of(one.broker).members for one in cluster.brokers]
        until(lambda: all(len(one.members()) == 3 for one in members))
        first = cluster.brokers[0].server.url
        body = {"name": "t", "partitions": 6, "config": SMALL}
        assert http.post(f"{first}/v1/topics", json=body).status_code == 201
        led = http.get(f"{first}/v1/topics/t").json()["partitions"]
        number = next(one["partition"] for one in led if one["leader"]["url"] == third.url)
        produce(http, third.url, "t", *(f"{n}" * 30 for n in range(LINES)), number=number)
        offload(http, third.url, "t")
        produce(http, third.url, "t", "hot", number=number)
        expected = read_raw(http, partition_url(third.url, "t", number), to=LINES)[0]
        listed = http.get(partition_url(third.url, "t", number) + "/segments").json()["segments"]
        topic_id = cluster.brokers[0].broker.topic("t").record.topic_id
        until(
            lambda: all(
                (found := cluster_of(one.broker).find_leader(topic_id, number))
                and found.log_end_offset == LINES + 1
                for one in cluster.brokers
            )
        )
        third.kill()
        for is_noticed in (False, True):
            if is_noticed:
                until(lambda: all(sum(x.is_alive for x in one.members()) == 2 for one in members))
            for served in cluster.brokers:
                url = partition_url(served, "t", number)
                data, answers = read_raw(http, url, to=LINES)
                assert answers[-1]["log-next-offset"] == f"{LINES}"
                assert expected.startswith(data)
                for one in answers:
                    assert (one["log-leader"], one["log-up-to-date"]) == ("unknown", "false")
                    assert one["log-high-watermark"] == f"{LINES + 1}"
                beyond = http.get(f"{url}/records", params={"offset": LINES})
                assert (beyond.status_code, beyond.json()["code"]) in (
                    (503, "leader-unknown"),
                    (503, "broker-unavailable"),
                )
                at_seven = http.get(f"{url}/offsets", params={"timestamp": "7"}).json()
                assert at_seven == {"offset": 7, "timestamp": 7}
                for one, following in pairwise(listed):
                    if following["base_offset"] <= LINES:
                        sealed = http.get(f"{url}/segments/{one['base_offset']}")
                        assert len(sealed.content) == one["size_bytes"]
                wanted = [{"topic": "t", "partition": number, "offset": n} for n in (0, LINES)]
                rows = http.post(
                    f"{served.server.url}/v1/fetch", json={"partitions": wanted}
                ).json()["partitions"]
                assert (rows[0]["records"][0]["offset"], rows[0]["tier"]) == (0, "cold")
                assert rows[1]["error"]["status"] == 503
        servers = ",".join(one.server.url for one in cluster.brokers)
        with Client(servers, retries=NO_RETRIES) as client:
            records = client.consume("t", partitions=[number])
            assert [next(records).offset for _ in range(LINES)] == list(range(LINES))
            with pytest.raises(LeaderUnknown):  # it is not taken for the end
                next(records)
