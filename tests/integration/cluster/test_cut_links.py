"""What connects three brokers is cut, one way or both, and their way to the bucket: one cluster,
which is whole again after each test.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Literal

import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.replicated_run import ReplicatedRun, replicated_run
from tests.fakes.waiting import until

FLAGS = ("--session-timeout-ms", "1000", "--replica-lag-time-max-ms", "1500")


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ReplicatedRun]:
    with replicated_run(tmp_path_factory.mktemp("cluster"), *FLAGS, answer_s=2) as run:
        yield run


@pytest.fixture
def run(cluster: ReplicatedRun) -> Iterator[ReplicatedRun]:
    yield cluster
    cluster.mend()
    cluster.wait_for_all_in_sync()
    cluster.producer.wait_for_more()
    cluster.check()


def wait_s(seconds: float) -> None:
    began_s = time.monotonic()
    until(lambda: time.monotonic() - began_s > seconds, patience_s=seconds + 30)


def check_acknowledges_nothing(run: ReplicatedRun, old: BrokerProcess, *, epoch: int) -> None:
    """Once another leads."""
    stale = run.produce_at(old)
    run.wait_for_another_leader(old, epoch=epoch)
    acked, sent = len(stale.acked), stale.sent
    run.producer.wait_for_more()
    until(lambda: stale.sent > sent + 1)
    assert len(stale.acked) == acked


def test_a_leader_that_is_cut_off_is_replaced_and_acknowledges_nothing_afterwards(
    run: ReplicatedRun,
) -> None:
    old, epoch = run.leader(), run.epoch()
    run.cut_bucket(old)
    for line in run.links.of(old, calls=True, called=True):
        line.cut()
    check_acknowledges_nothing(run, old, epoch=epoch)


@pytest.mark.parametrize(
    "way",
    [
        "requests",
        pytest.param("answers", marks=pytest.mark.soak),
        pytest.param("both", marks=pytest.mark.soak),
    ],
)
def test_a_leader_whom_its_followers_do_not_reach_has_another_lead(
    run: ReplicatedRun, way: Literal["requests", "answers", "both"]
) -> None:
    old, epoch = run.leader(), run.epoch()
    for line in run.links.of(old, called=True):
        if way == "both":
            line.cut()
        else:
            line.hold(way)
    run.wait_for_another_leader(old, epoch=epoch)
    run.producer.wait_for_more()


def test_a_leader_that_does_not_reach_its_followers_leads_on(run: ReplicatedRun) -> None:
    leader, epoch = run.leader(), run.epoch()
    for line in run.links.of(leader, calls=True):
        line.cut()
    wait_s(3)
    run.produce_at(leader).wait_for_more()
    assert (run.leader(), run.epoch()) == (leader, epoch)


@pytest.mark.parametrize("seconds", [4, pytest.param(300, marks=pytest.mark.soak)])
def test_while_the_bucket_is_cut_off_produce_never_pauses(
    run: ReplicatedRun, seconds: float
) -> None:
    run.producer.refusal, run.producer.longest_pause_s = "", 0.0
    leader, epoch = run.leader(), run.epoch()
    run.cut_bucket(*run.brokers)
    wait_s(seconds)
    run.producer.wait_for_more()
    assert run.producer.refusal == ""
    assert run.producer.longest_pause_s < 2
    assert (run.leader(), run.epoch()) == (leader, epoch)


def test_nobody_leads_without_the_bucket_until_it_is_back(run: ReplicatedRun) -> None:
    old, epoch = run.leader(), run.epoch()
    run.cut_bucket(*run.brokers)
    old.kill()
    acked = len(run.producer.acked)
    wait_s(4)
    assert len(run.producer.acked) <= acked + 1, "one may have been on its way"
    now = run.partition()
    assert now is None or now["leader_epoch"] == epoch
    run.mend()
    run.wait_for_another_leader(old, epoch=epoch)
    run.producer.wait_for_more()
    old.start()
