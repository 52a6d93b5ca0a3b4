"""Replicas that move between brokers, as processes, under a producer with acks=all and a consumer
that follows: with `tierlog cluster reassign` and `drain`, and over a leader that is killed.
"""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cluster_processes import ClusterOfProcesses, Load, cluster_of_processes
from tests.fakes.command_line import Program
from tests.fakes.waiting import until

TOPIC = "moved"


@pytest.fixture
def cluster(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[ClusterOfProcesses]:
    """The parameter: the replicas of each partition."""
    with cluster_of_processes(tmp_path, "folder") as cluster:
        document = {
            "name": TOPIC,
            "partitions": 3,
            "replicas": getattr(request, "param", [[0, 1, 2], [1, 2, 0], [2, 0, 1]]),
            "config": {"local.retention.ms": -2, "segment.bytes": 1 << 20},
        }
        cluster.call(cluster.brokers[0], "POST", "/v1/topics", json=document)
        until(lambda: all(-1 not in cluster.leaders(TOPIC, one) for one in cluster.brokers))
        yield cluster


def partitions_of(cluster: ClusterOfProcesses) -> list[dict[str, Any]]:
    for broker in cluster.brokers:
        if broker.process is not None:
            return cluster.call(broker, "GET", f"/v1/topics/{TOPIC}")["partitions"]
    raise AssertionError("a broker runs")


def is_settled(cluster: ClusterOfProcesses, wanted: list[list[int]]) -> bool:
    found = [(one["replicas"], one["in_sync_replicas"]) for one in partitions_of(cluster)]
    return found == [(one, sorted(one)) for one in wanted]


def written(broker: BrokerProcess, number: int) -> dict[str, bytes]:
    folder = broker.root / "data" / f"{TOPIC}-{number}"
    found = {path.name: path.read_bytes().rstrip(b"\0") for path in sorted(folder.glob("*.log"))}
    return {name: data for name, data in found.items() if data}


def check_files(cluster: ClusterOfProcesses, wanted: list[list[int]]) -> None:
    """At rest: the same bytes in each replica from where it begins, and none anywhere else."""
    for number, replicas in enumerate(wanted):
        files = [written(cluster.brokers[one], number) for one in replicas]
        for name in set.intersection(*map(set, files)):
            assert len({one[name] for one in files}) == 1, name
        assert len({max(one) for one in files}) == 1, "they end in the same segment"
        for broker in cluster.brokers:
            gone = broker.root / "data" / f"{TOPIC}-{number}"
            assert gone.exists() is (cluster.brokers.index(broker) in replicas)


def test_replicas_move_and_a_broker_is_drained_under_a_load(cluster: ClusterOfProcesses) -> None:
    program = Program(cluster.servers)
    with Load(cluster, TOPIC, partitions=3) as load:
        cluster.add()
        for number, to in enumerate(("3,1", "1,2,3,0", "2,3,1")):
            program.ok("cluster", "reassign", f"{TOPIC}:{number}", "--to", to)
            load.wait_for_more()
        wanted = [[3, 1], [1, 2, 3, 0], [2, 3, 1]]
        until(lambda: is_settled(cluster, wanted), patience_s=60)
        assert "no reassignment" in program.fails(
            1, "cluster", "reassign", f"{TOPIC}:0", "--cancel"
        )
        program.ok("cluster", "reassign", f"{TOPIC}:1", "--to", "1,2,3")
        assert json.loads(program.ok("cluster", "drain", "1")) == {"drained": 1}
        wanted = [[3, 0], [0, 2, 3], [2, 3, 0]]
        until(lambda: is_settled(cluster, wanted) or show(cluster), patience_s=60)
        drained = cluster.brokers[1].root / "data"
        until(lambda: not list(drained.glob("*-*[0-9]")), patience_s=60)
        load.wait_for_more()
        assert "runs" in program.fails(1, "cluster", "remove", "1", "--yes")
    check_files(cluster, wanted)
    cluster.verify(TOPIC)
    assert cluster.brokers[1].stop() == 0
    servers = ",".join(one.url for one in cluster.brokers if one.process is not None)
    program = Program(servers)
    until(lambda: program.run("cluster", "remove", "1", "--yes").returncode == 0, patience_s=60)


def show(cluster: ClusterOfProcesses) -> bool:
    print(*((one["replicas"], one["in_sync_replicas"]) for one in partitions_of(cluster)))
    return False


@contextmanager
def paused_newcomer(cluster: ClusterOfProcesses) -> Iterator[None]:
    """Another broker: what it is to have is ordered now, and waits for it."""
    new = cluster.add()
    assert new.process is not None
    new.process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        new.process.send_signal(signal.SIGCONT)


@pytest.mark.soak
def test_over_a_leader_that_is_killed_it_goes_on_and_one_that_is_cancelled_ends(
    cluster: ClusterOfProcesses,
) -> None:
    with Load(cluster, TOPIC, partitions=3) as load:
        with paused_newcomer(cluster):
            for number, replicas in enumerate(([3, 1, 2], [1, 2, 3])):
                path = f"/v1/topics/{TOPIC}/partitions/{number}/replicas"
                cluster.call(cluster.brokers[1], "POST", path, json={"replicas": replicas})
            ongoing = cluster.call(cluster.brokers[1], "GET", "/v1/cluster/reassignments")
            assert [one["adding"] for one in ongoing["reassignments"]] == [[3], [3]]
            cluster.call(cluster.brokers[2], "DELETE", f"/v1/topics/{TOPIC}/partitions/1/replicas")
            killed = cluster.brokers[cluster.leaders(TOPIC, cluster.brokers[2])[0]]
            killed.kill()
            load.wait_for_more()
        killed.start()
        wanted = [[3, 1, 2], [1, 2, 0], [2, 0, 1]]
        until(lambda: is_settled(cluster, wanted) or show(cluster), patience_s=60)
        load.wait_for_more()
    check_files(cluster, wanted)
    cluster.verify(TOPIC)


def reassign(cluster: ClusterOfProcesses, wanted: list[list[int]]) -> None:
    """Ask a broker that runs, for all partitions."""
    program = Program(",".join(one.url for one in cluster.brokers if one.process is not None))
    for number, replicas in enumerate(wanted):
        to = ",".join(map(str, replicas))
        program.ok("cluster", "reassign", f"{TOPIC}:{number}", "--to", to)


@pytest.mark.parametrize("cluster", [[[0], [1], [2]]], indirect=True)
def test_the_only_replicas_get_others_a_leader_is_killed_and_one_of_each_is_left(
    cluster: ClusterOfProcesses,
) -> None:
    with Load(cluster, TOPIC, partitions=3) as load:
        wanted = [[0, 1, 2], [1, 2, 0], [2, 0, 1]]
        reassign(cluster, wanted)
        load.wait_for_more()
        until(lambda: is_settled(cluster, wanted) or show(cluster), patience_s=60)
        load.wait_for_more()
        cluster.brokers[1].kill()
        load.wait_for_more()
        cluster.brokers[1].start()
        until(lambda: is_settled(cluster, wanted) or show(cluster), patience_s=60)
        kept = [[2], [1], [0]]  # also who does not lead, and who was killed
        reassign(cluster, kept)
        until(lambda: is_settled(cluster, kept) or show(cluster), patience_s=60)
        load.wait_for_more()
        cluster.brokers[0].kill()
        cluster.brokers[0].start()
        load.wait_for_more()
    check_files(cluster, kept)
    cluster.verify(TOPIC)


@pytest.mark.soak
@pytest.mark.parametrize("cluster", [[[0], [1], [2]]], indirect=True)
def test_the_only_replica_is_the_only_one_again_if_that_is_cancelled_half_way(
    cluster: ClusterOfProcesses,
) -> None:
    with Load(cluster, TOPIC, partitions=3) as load:
        with paused_newcomer(cluster):
            path = f"/v1/topics/{TOPIC}/partitions/0/replicas"
            cluster.call(cluster.brokers[1], "POST", path, json={"replicas": [0, 3]})
            load.wait_for_more()
            assert partitions_of(cluster)[0]["in_sync_replicas"] == [0]
            cluster.call(cluster.brokers[2], "DELETE", path)
            until(lambda: is_settled(cluster, [[0], [1], [2]]) or show(cluster), patience_s=60)
            load.wait_for_more()
        load.wait_for_more()
    check_files(cluster, [[0], [1], [2]])
    cluster.verify(TOPIC)
