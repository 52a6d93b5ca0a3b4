"""What a leader says of its log's end and of committed offsets, whether it still leads or not (H8).

In one process a dead broker is one that nobody reaches, and that reaches nobody.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx2
import pytest

from tests.fakes.broker_cluster import BrokerCluster, node_id_of
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.replicated_run import TOPIC, replicated_run
from tests.fakes.waiting import until
from tests.integration.cluster.test_moving import append, produced
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.partition.partition import Partition
from tierlog.broker.replication import term
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS
from tierlog.record_format.errors import LeaderUnknown, OffsetMismatch, OffsetPastEnd, Starting

NAMES = ("a", "b", "c")


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BrokerCluster]:
    monkeypatch.setattr(term, "CONFIRM_MAX_MS", 500)
    cluster = BrokerCluster(tmp_path)
    cluster.start_all(
        NAMES,
        session_timeout_ms=1_000,
        replica_lag_time_max_ms=1_500,
        offsets_topic_replication_factor=3,
    )
    cluster.running[0].create_topic(
        "flights", partitions=1, replication_factor=3, config={"flush.ms": 3_600_000}
    )
    until(lambda: is_led(cluster, "flights"))
    yield cluster
    cluster.close()


def is_led(cluster: BrokerCluster, topic: str) -> bool:
    return sum(0 in one.topic(topic).partitions for one in cluster.running) == 1


def append_at(partition: Partition, expected_offset: int, *, acks: Acks = Acks.ALL) -> int:
    appended = partition.append(produced(b"x"), acks=acks, expected_offset=expected_offset)
    return appended.result(20).base_offset


def test_a_mismatch_is_told_once_what_is_there_is_committed(cluster: BrokerCluster) -> None:
    partition = cluster.partition("flights", 0)
    partition.append(produced(b"0"), acks=Acks.LEADER).result(20)
    with pytest.raises(OffsetMismatch, match="log end offset is 1, expected 0"):
        append_at(partition, 0)
    assert partition.high_watermark == 1
    assert append_at(partition, 1) == 1


def test_a_deposed_leader_tells_no_end_of_its_log(cluster: BrokerCluster) -> None:
    before = cluster.partition("flights", 0)
    assert append_at(before, 0) == 0
    cluster.lose(cluster.leader("flights", 0))
    with pytest.raises(LeaderUnknown, match="still leads"):
        append_at(before, 0)
    until(lambda: is_led(cluster, "flights"), patience_s=30)
    assert append_at(cluster.partition("flights", 0), 1) == 1
    with pytest.raises(LeaderUnknown):
        append_at(before, 0, acks=Acks.LEADER)


def test_a_deposed_leader_does_not_say_that_an_offset_is_above_the_log(
    cluster: BrokerCluster,
) -> None:
    before = cluster.partition("flights", 0)
    assert append_at(before, 0) == 0
    with pytest.raises(OffsetPastEnd, match="offset 5"):
        before.read(5, max_bytes=1)
    with pytest.raises(WouldBlock):
        before.read(5, max_bytes=1, wait=Wait.NEVER)
    cluster.lose(cluster.leader("flights", 0))
    before.read(1, max_bytes=1).close()
    with pytest.raises(LeaderUnknown, match="still leads"):
        before.read(2, max_bytes=1)
    until(lambda: is_led(cluster, "flights"), patience_s=30)
    assert append_at(cluster.partition("flights", 0), 1) == 1
    assert cluster.partition("flights", 0).read(2, max_bytes=1).at_end
    with pytest.raises(LeaderUnknown):
        before.read(2, max_bytes=1)


def test_what_was_committed_is_known_to_the_next_coordinator_and_to_it_alone(
    cluster: BrokerCluster,
) -> None:
    append(cluster.partition("flights", 0), b"0")
    place = ("flights", 0)

    def commit(offset: int) -> None:
        cluster.leader(OFFSETS, 0).groups.commit_offsets("g", [NewOffset("flights", 0, offset)])

    def committed() -> int:
        found: list[int] = []

        def is_known() -> bool:
            try:
                groups = cluster.leader(OFFSETS, 0).groups
                groups.confirm("g").result(20)
                found[:] = [groups.committed("g")[place].offset]
            except (Starting, LeaderUnknown):
                return False
            return True

        until(is_known, patience_s=30)
        return found[0]

    cluster.running[0].groups.log.ensure_topic()
    until(lambda: is_led(cluster, OFFSETS))
    for offset in range(3):
        commit(offset)
    old = cluster.leader(OFFSETS, 0)
    cluster.lose(old)
    until(lambda: is_led(cluster, OFFSETS), patience_s=30)
    assert node_id_of(cluster.leader(OFFSETS, 0)) != node_id_of(old)
    assert committed() == 2
    commit(3)
    with pytest.raises(LeaderUnknown):
        old.groups.confirm("g").result(20)
    assert committed() == 3


def test_a_leader_that_was_paused_takes_nothing_from_before_for_true(tmp_path: Path) -> None:
    """Neither a conditional append nor a group's offsets, whether the calls came while it slept or
    once it is awake.
    """
    flags = ("--offsets-topic-replication-factor", "3")
    with replicated_run(tmp_path, *flags) as run, httpx2.Client(timeout=60) as http:
        run.producer.stop()
        old, now = run.leader(), run.partition()
        assert now is not None
        assert old.process is not None
        other = next(one for one in run.brokers if one is not old)
        group = commit_to_group_of(http, old, offset=1)
        records = f"/v1/topics/{TOPIC}/partitions/0/records"
        direct = {"tierlog-route": "direct"}

        def append_at_0(headers: dict[str, str]) -> httpx2.Response:
            sent = {**headers, "if-offset-match": "0"}
            body = {"records": [{"value": "-1"}]}
            return http.post(f"{old.url}{records}?acks=1", json=body, headers=sent)

        def read_group(headers: dict[str, str]) -> httpx2.Response:
            return http.get(f"{old.url}/v1/groups/{group}", headers=headers)

        os.kill(old.process.pid, signal.SIGSTOP)
        with ThreadPoolExecutor(8) as pool:
            appends = [pool.submit(append_at_0, one) for one in (direct, {}) * 2]
            reads = [pool.submit(read_group, one) for one in (direct, {}) * 2]
            run.wait_for_another_leader(old, epoch=now["leader_epoch"])
            made = http.post(f"{other.url}{records}", json={"records": [{"value": "-2"}]})
            assert made.status_code == 200, made.text
            end = made.json()["results"][0]["base_offset"] + 1
            until(lambda: is_committed(http, other, group, offset=2), patience_s=30)
            os.kill(old.process.pid, signal.SIGCONT)
            appends += [pool.submit(append_at_0, one) for one in (direct, {}) * 8]
            reads += [pool.submit(read_group, one) for one in (direct, {}) * 8]
            answers = [one.result() for one in appends]
            seen = [one.result() for one in reads]
        assert {one.status_code for one in answers} <= {412, 421, 503}
        assert all(one.json()["log_end_offset"] == end for one in answers if one.status_code == 412)
        assert {one.status_code for one in seen} <= {200, 421, 503}
        offsets = [one.json()["offsets"][0]["offset"] for one in seen if one.status_code == 200]
        assert set(offsets) <= {2}
        print([one.status_code for one in (*answers, *seen)])


def commit_to_group_of(http: httpx2.Client, broker: BrokerProcess, *, offset: int) -> str:
    """The name of a group that this broker coordinates."""
    found: list[str] = []

    def is_there() -> bool:
        found.append(f"g{len(found)}")
        return is_committed(http, broker, found[-1], offset=offset, route="direct")

    until(is_there, patience_s=30)
    return found[-1]


def is_committed(
    http: httpx2.Client, broker: BrokerProcess, group: str, *, offset: int, route: str = ""
) -> bool:
    body = {"offsets": [{"topic": TOPIC, "partition": 0, "offset": offset}]}
    path, headers = f"/v1/groups/{group}/offsets", {"tierlog-route": route}
    return http.put(f"{broker.url}{path}", json=body, headers=headers).status_code == 204
