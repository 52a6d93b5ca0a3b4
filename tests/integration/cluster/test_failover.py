"""A leader is killed, paused, or loses its disk, while a producer and a consumer go on."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from tests.fakes.replicated_run import ReplicatedRun, replicated_run


def kill_leaders(run: ReplicatedRun, times: int, *, wipes: bool = False) -> None:
    for _ in range(times):
        run.wait_for_all_in_sync()
        old, epoch = run.leader(), run.epoch()
        old.kill()
        if wipes:
            shutil.rmtree(old.root / "data")
        took_s = run.wait_for_another_leader(old, epoch=epoch)
        print(f"another leader after {took_s:.1f} s")
        run.producer.wait_for_more()
        old.start()
    run.wait_for_all_in_sync()


def test_nothing_acknowledged_is_lost_when_leaders_are_killed(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        kill_leaders(run, 2)
        run.check()


def test_a_leader_that_loses_its_disk_is_another_replica_when_it_is_back(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        kill_leaders(run, 1, wipes=True)
        run.check()


def test_a_leader_that_was_paused_acknowledges_nothing_afterwards(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        old, epoch = run.leader(), run.epoch()
        assert old.process is not None
        os.kill(old.process.pid, signal.SIGSTOP)
        run.wait_for_another_leader(old, epoch=epoch)
        os.kill(old.process.pid, signal.SIGCONT)
        run.wait_for_all_in_sync()
        run.producer.wait_for_more()
        run.check()


def test_all_are_killed_at_once_and_nothing_acknowledged_is_lost(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        for broker in run.brokers:
            broker.kill()
        for broker in run.brokers:
            broker.start(until="/healthz")
        run.wait_for_all_in_sync()
        run.producer.wait_for_more()
        run.check()


@pytest.mark.soak
def test_fifty_leaders_are_killed(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        kill_leaders(run, 50)
        run.check()


@pytest.mark.soak
def test_all_are_killed_at_once_twenty_times(tmp_path: Path) -> None:
    with replicated_run(tmp_path) as run:
        for _ in range(20):
            run.wait_for_all_in_sync()
            run.producer.wait_for_more()
            for broker in run.brokers:
                broker.kill()
            for broker in run.brokers:
                broker.start(until="/healthz")
        run.wait_for_all_in_sync()
        run.producer.wait_for_more()
        run.check()
