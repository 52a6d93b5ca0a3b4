"""A call on a partition that another broker leads, through each broker of a cluster."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import httpx2
import pytest

from tests.fakes.broker_cluster import cluster_of, node_id_of
from tests.fakes.served_broker import Served
from tests.fakes.served_cluster import ServedCluster, served_cluster
from tests.fakes.waiting import until
from tierlog.api.http.bodies import KEPT_MAX_BYTES
from tierlog.api.http.cluster.peers import HttpPeers
from tierlog.api.http.header_values import BATCHES
from tierlog.api.http.settings import HttpSettings
from tierlog.broker.background import background_tasks
from tierlog.broker.cluster.cluster import ASK_AGAIN_S
from tierlog.broker.membership.peers import LeaderReport
from tierlog.broker.replicas.replica import Replica

PARTITIONS = 1


@pytest.fixture
def http() -> Iterator[httpx2.Client]:
    with httpx2.Client(timeout=20) as client:
        yield client


def records_url(served: Served, topic: str) -> str:
    return f"{served.server.url}/v1/topics/{topic}/partitions/0/records"


def test_a_partition_is_written_and_read_through_every_broker(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    for number, served in enumerate(cluster.brokers):
        made = http.post(records_url(served, topic), json={"records": [{"value": str(number)}]})
        assert made.status_code == 200, made.text
        assert made.json()["results"][0]["base_offset"] == number
        assert "server-timing" in made.headers
    answers = [http.get(records_url(served, topic)) for served in cluster.brokers]
    assert [one["value"] for one in answers[0].json()["records"]] == ["0", "1", "2"]
    for answer in answers:
        assert answer.json() == answers[0].json()
        assert answer.headers["log-next-offset"] == "3"
        assert answer.headers["content-length"] == answers[0].headers["content-length"]
    raw = [
        http.get(records_url(served, topic), headers={"accept": BATCHES})
        for served in cluster.brokers
    ]
    assert len({one.content for one in raw}) == 1


def test_a_head_a_refusal_and_a_request_id_come_back_as_from_the_leader(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    other = cluster.others(topic)[0]
    headers = {"x-request-id": "mine-1"}
    head = http.head(records_url(other, topic), headers=headers)
    assert (head.status_code, head.headers["x-request-id"]) == (200, "mine-1")
    assert head.headers["log-high-watermark"] == "0"
    past = http.get(records_url(other, topic), params={"offset": "7"})
    assert (past.status_code, past.json()["code"]) == (416, "offset-past-end")
    large = http.post(
        records_url(other, topic),
        content=b"x" * (2 << 20),
        headers={"content-type": "application/octet-stream"},
    )
    assert (large.status_code, large.json()["code"]) == (413, "record-too-large")


def test_a_direct_client_is_told_the_leader(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    for how in ({"tierlog-route": "direct"}, {"tierlog-forwarded": "9"}):
        for answer in (
            http.get(records_url(other, topic), headers=how),
            http.post(records_url(other, topic), json={"records": [{}]}, headers=how),
            http.get(f"{other.server.url}/v1/topics/{topic}/partitions/0/offsets", headers=how),
        ):
            assert (answer.status_code, answer.json()["code"]) == (421, "not-leader")
            assert answer.json()["leader"]["url"] == leader.server.url


def test_a_long_poll_waits_at_the_leader_and_ends_with_its_client(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    waiting = leader.app.context.waiting
    before = waiting.count
    with ThreadPoolExecutor(1) as pool:
        params = {"offset": "0", "wait_ms": "60000"}
        polled = pool.submit(http.get, records_url(other, topic), params=params, timeout=30)
        until(lambda: waiting.count > before)
        http.post(records_url(leader, topic), json={"records": [{"value": "now"}]})
        assert [one["value"] for one in polled.result(20).json()["records"]] == ["now"]
    with httpx2.Client() as leaves:
        poll = {"offset": "1", "wait_ms": "60000"}
        with pytest.raises(httpx2.ReadTimeout):
            leaves.get(records_url(other, topic), params=poll, timeout=0.5)
    until(lambda: waiting.count == before)
    until(lambda: other.app.context.inflight.held == 0)


def test_a_body_of_64_mib_is_passed_on_within_the_memory_of_bodies(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    other = cluster.others(topic)[0]
    value = "x" * 65_000
    lines = f'"{value}"\n'.encode() * 1000
    made = http.post(
        records_url(other, topic),
        content=lines,
        headers={"content-type": "application/x-ndjson"},
        timeout=60,
    )
    assert made.status_code == 200, made.text
    assert made.json()["results"][0]["records"] == 1000
    read = http.get(
        records_url(other, topic),
        params={"max_bytes": str(64 << 20)},
        headers={"accept": BATCHES},
        timeout=60,
    )
    assert len(read.content) > 64_000_000
    until(lambda: all(one.app.context.inflight.held == 0 for one in cluster.brokers))


def lines(count: int) -> bytes:
    """A body of as many records of a KiB."""
    return b"".join(b'"%07d%s"\n' % (number, b"x" * 1014) for number in range(count))


@contextmanager
def half_sent(
    served: Served, topic: str, body: bytes, *, is_announced: bool = True
) -> Iterator[socket.socket]:
    """A connection on which a produce of this body has been sent but for its second half. `body` is
    in chunks unless its length `is_announced`.
    """
    parts = urlsplit(records_url(served, topic))
    length = f"Content-Length: {len(body)}" if is_announced else "Transfer-Encoding: chunked"
    head = (
        f"POST {parts.path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\n"
        f"Connection: close\r\n{length}\r\n\r\n"
    )
    with socket.create_connection((parts.hostname, parts.port), timeout=30) as sock:
        sock.sendall(head.encode() + body[: len(body) // 2])
        yield sock


def in_chunks(body: bytes) -> bytes:
    size = 1 << 20
    pieces = [body[at : at + size] for at in range(0, len(body), size)]
    return b"".join(b"%x\r\n%b\r\n" % (len(one), one) for one in (*pieces, b""))


def answer_to(sock: socket.socket, rest: bytes) -> bytes:
    sock.sendall(rest)
    return sock.makefile("rb").read()


def held(served: Served) -> int:
    return served.app.context.inflight.held


@pytest.mark.parametrize("size_mib", [4, 20])
def test_a_large_body_is_passed_on_as_it_arrives_within_a_bound(
    cluster: ServedCluster, http: httpx2.Client, topic: str, size_mib: int
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    body = lines(size_mib << 10)
    with half_sent(other, topic, body) as sock:
        until(lambda: held(leader) >= len(body))
        assert held(other) == min(len(body), KEPT_MAX_BYTES)
        answer = answer_to(sock, body[len(body) // 2 :])
    assert b" 200 " in answer.splitlines()[0], answer[:500]
    assert cluster.partition(topic).log_end_offset == size_mib << 10
    until(lambda: held(leader) == held(other) == 0)


def test_a_write_whose_client_leaves_is_not_sent_again(
    cluster: ServedCluster, http: httpx2.Client, topic: str
) -> None:
    made = {"name": f"{topic}-2", "partitions": 1, "replication_factor": 3}
    assert http.post(f"{cluster.brokers[0].server.url}/v1/topics", json=made).status_code == 201
    topic = made["name"]
    until(lambda: all(cluster.knows(one, topic) for one in cluster.brokers))
    (other, behind), partition = cluster.others(topic), cluster.partition(topic)
    (replica,) = [
        one
        for one in cluster_of(behind.broker).replicas.not_led()
        if isinstance(one, Replica) and one.place == (partition.topic_id, 0)
    ]
    record = {"records": [{"value": "once"}]}
    with replica.lock:  # acks=all waits for it
        with pytest.raises(httpx2.ReadTimeout):
            http.post(records_url(other, topic), json=record, timeout=0.5)
        until(lambda: other.app.context.inflight.held == 0)
        assert partition.log_end_offset == 1


@pytest.mark.parametrize("size_mib", [4, 20])
def test_a_body_of_unknown_length_is_passed_on_as_it_arrives_within_a_bound(
    cluster: ServedCluster, topic: str, size_mib: int
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    body = in_chunks(lines(size_mib << 10))
    with half_sent(other, topic, body, is_announced=False) as sock:
        until(lambda: held(leader) > len(body) // 2 - (2 << 20))
        assert 0 < held(other) <= min(len(body), KEPT_MAX_BYTES)
        answer = answer_to(sock, body[len(body) // 2 :])
    assert b" 200 " in answer.splitlines()[0], answer[:500]
    assert cluster.partition(topic).log_end_offset == size_mib << 10
    until(lambda: held(leader) == held(other) == 0)


def test_a_body_of_unknown_length_that_is_too_large_is_refused_and_nothing_is_appended(
    cluster: ServedCluster, topic: str
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    limit = other.app.context.settings.body_max_bytes
    body = in_chunks(lines((limit >> 10) + (2 << 10)))
    with half_sent(other, topic, body, is_announced=False) as sock:
        answer = answer_to(sock, body[len(body) // 2 :])
    assert b" 413 " in answer.splitlines()[0], answer[:500]
    assert b'"code":"request-too-large"' in answer
    assert b'"limit_bytes":%d' % limit in answer
    assert cluster.partition(topic).log_end_offset == 0
    until(lambda: held(leader) == held(other) == 0)


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
def test_a_client_that_leaves_in_the_middle_of_a_large_body_leaves_nothing(
    cluster: ServedCluster, topic: str, is_announced: bool
) -> None:
    leader, other = cluster.leader(topic), cluster.others(topic)[0]
    body = lines(4 << 10) if is_announced else in_chunks(lines(4 << 10))
    with half_sent(other, topic, body, is_announced=is_announced):
        until(lambda: held(leader) > 0)
    until(lambda: held(leader) == held(other) == 0)
    assert cluster.partition(topic).log_end_offset == 0


@pytest.mark.parametrize("is_announced", [True, False], ids=["announced", "chunked"])
@pytest.mark.parametrize(
    ("size_mib", "status"), [(4, b" 200 "), (20, b" 503 ")], ids=["kept", "spent"]
)
def test_a_body_that_is_kept_is_sent_again_when_its_partition_moves(
    cluster: ServedCluster, topic: str, size_mib: int, status: bytes, is_announced: bool
) -> None:
    leader = cluster.leader(topic)
    other, new = cluster.others(topic)
    body = lines(size_mib << 10) if is_announced else in_chunks(lines(size_mib << 10))
    with half_sent(other, topic, body, is_announced=is_announced) as sock:
        until(lambda: held(leader) > 0)
        cluster.move(topic, 0, new)
        answer = answer_to(sock, body[len(body) // 2 :])
    assert status in answer.splitlines()[0], answer[:500]
    assert b'"outcome"' not in answer, "it was not carried out"
    ends = cluster.partition(topic).log_end_offset
    assert ends == (size_mib << 10 if size_mib == 4 else 0)
    until(lambda: all(held(one) == 0 for one in cluster.brokers))


@pytest.mark.parametrize("hand_overs", [6, pytest.param(100, marks=pytest.mark.soak)])
def test_hand_overs_cost_a_producer_a_pause_and_no_error(
    cluster: ServedCluster, topic: str, hand_overs: int
) -> None:
    """Nothing is lost, doubled or reordered, whichever broker the producer speaks with. Prints the
    longest that a produce took.
    """
    stop, sent, took_s = threading.Event(), 0, list[float]()

    def produce() -> int:
        count = 0
        with httpx2.Client(timeout=20) as http:
            while not stop.is_set():
                served = cluster.brokers[count % 3]
                record = {"records": [{"value": str(count)}]}
                began_s = time.monotonic()
                made = http.post(records_url(served, topic), json=record)
                took_s.append(time.monotonic() - began_s)
                assert made.status_code == 200, made.text
                assert made.json()["results"][0]["base_offset"] == count
                count += 1
        return count

    with ThreadPoolExecutor(1) as pool:
        produced = pool.submit(produce)
        for _ in range(hand_overs):
            end = cluster.partition(topic).log_end_offset
            until(lambda end=end: produced.done() or cluster.partition(topic).log_end_offset > end)
            cluster.move(topic, 0, cluster.others(topic)[0])
        stop.set()
        sent = produced.result(20)
    pauses_ms = [round(1000 * one) for one in sorted(took_s)[-hand_overs:]]
    print(f"{hand_overs} hand-overs: longest produce {pauses_ms[-1]} ms, of {pauses_ms}")
    read: list[str] = []
    while len(read) < sent:  # a read from the bucket ends after a few segments
        params = {"offset": str(len(read)), "max_bytes": str(8 << 20)}
        answer = httpx2.get(records_url(cluster.brokers[0], topic), params=params)
        read += [one["value"] for one in answer.json()["records"]]
    assert read == [str(n) for n in range(sent)]


# --- while nobody is known to lead ----------------------------------------------------------------


class Asked:
    """How often brokers are asked what they lead; while `is_led` is false they lead nothing."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.is_led = 0, True
        read = HttpPeers.read_leaders

        def counted(peers: HttpPeers, url: str) -> LeaderReport:
            self.count += 1
            report = read(peers, url)
            return report if self.is_led else LeaderReport(node_id=report.node_id, leaders=[])

        monkeypatch.setattr(HttpPeers, "read_leaders", counted)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """Brokers look by themselves when they start, and then no more."""
    monkeypatch.setattr(background_tasks, "REPORT_INTERVAL_S", 3600.0)
    return Asked(monkeypatch)


def test_a_call_that_waits_finds_out_who_leads_before_the_brokers_next_look(
    tmp_path: Path, http: httpx2.Client, asked: Asked
) -> None:
    with third_broker(tmp_path, HttpSettings()) as (leader, other):
        began = asked.count
        made = http.post(records_url(other, "t"), json={"records": [{"value": "x"}]})
        assert made.status_code == 200, made.text
        assert asked.count > began
        assert leader.broker.partition("t", 0).log_end_offset == 1


def test_many_calls_that_wait_have_the_others_asked_as_often_as_one(
    tmp_path: Path, http: httpx2.Client, asked: Asked
) -> None:
    settings = HttpSettings(leader_wait_ms=1_000)
    with third_broker(tmp_path, settings) as (_, other), ThreadPoolExecutor(20) as pool:
        asked.is_led = False
        began, began_s = asked.count, time.monotonic()
        urls = [records_url(other, "t")] * 20
        made = list(pool.map(lambda url: http.post(url, json={"records": [{}]}), urls))
        took_s = time.monotonic() - began_s
        assert {one.json()["code"] for one in made} == {"leader-unknown"}
        others = 2
        assert others <= asked.count - began <= others * (took_s / ASK_AGAIN_S + 1)


@contextmanager
def third_broker(root: Path, settings: HttpSettings) -> Iterator[tuple[Served, Served]]:
    """The leader of a topic's partition, and a broker that has not heard of any."""
    with served_cluster(root, http=settings) as cluster:
        body = {"name": "t", "partitions": 1}
        made = httpx2.post(f"{cluster.brokers[0].server.url}/v1/topics", json=body, timeout=20)
        assert made.status_code == 201, made.text
        leader, other = cluster.leader("t"), cluster.others("t")[0]
        cluster_of(other.broker).leaders.put_report(node_id_of(leader.broker), {})
        yield leader, other
