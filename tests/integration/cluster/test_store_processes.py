"""The bucket as a replica in sync, with brokers as processes: disks are lost, and writers paused,
while a producer and a reader go on.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.replicated_run import ANSWER_S, FLAGS, TOPIC, Producer, Reader
from tests.fakes.waiting import until

FLUSH_MS = 50
LATE = 10**9  # values from here on are not the producer's


class StoredRun:
    """Brokers in folders of one bucket; `producer` and `reader` ask those that are in `brokers`."""

    def __init__(self, root: Path) -> None:
        self.root, self.brokers = root, list[BrokerProcess]()
        self.producer = Producer(self.brokers, answer_s=2)
        self.reader = Reader(self)  # type: ignore[arg-type]
        self._acked_late, self._sent_late = dict[int, int](), 0

    def start(self, name: str) -> BrokerProcess:
        (self.root / name).mkdir()
        store = (self.root / "bucket").as_uri()
        broker = BrokerProcess(
            self.root / name, *FLAGS, "--store-flush-ms", str(FLUSH_MS), store=store
        )
        self.brokers.append(broker.start(until="/healthz"))
        return broker

    def create(self, *, factor: int, role: str) -> None:
        topic = {
            "name": TOPIC,
            "replication_factor": factor,
            "config": {"replication.store": role, "retention.ms": -1},
        }

        def is_created() -> bool:
            made = httpx2.post(f"{self.brokers[0].url}/v1/topics", json=topic, timeout=ANSWER_S)
            return made.status_code in (201, 409)

        until(is_created, patience_s=30)

    def partition(self, broker: BrokerProcess) -> dict[str, Any]:
        answer = httpx2.get(f"{broker.url}/v1/topics/{TOPIC}", timeout=ANSWER_S)
        partitions = answer.json().get("partitions") if answer.status_code == 200 else None
        return dict(partitions[0]) if partitions else {}

    def leader(self, *, seen_by: BrokerProcess | None = None) -> int:
        """Its node id, which is its place in `brokers`; -1 if there is none."""
        leader = self.partition(seen_by or self.brokers[0]).get("leader")
        return int(leader["node_id"]) if leader else -1

    def produce_late(self, broker: BrokerProcess) -> None:
        """One more record, which may be answered late."""
        value, self._sent_late = LATE + self._sent_late, self._sent_late + 1
        path = f"{broker.url}/v1/topics/{TOPIC}/partitions/0/records"
        made = httpx2.post(path, json={"records": [{"value": str(value)}]}, timeout=60)
        if made.status_code == 200:
            self._acked_late[value] = made.json()["results"][0]["base_offset"]

    def check(self) -> None:
        """Everything acknowledged is read once, where it was said to be."""
        acked = self.producer.acked | self._acked_late
        until(
            lambda: max(self.reader.read.copy(), default=-1) >= max(acked.values()), patience_s=60
        )
        read = self.reader.read.copy()
        assert not self.reader.problems, self.reader.problems[:5]
        assert len(set(read.values())) == len(read), "a value is there twice"
        lost = {value: offset for value, offset in acked.items() if read.get(offset) != value}
        assert not lost, f"{len(lost)} of {len(acked)} are lost: {lost}"[:500]


@contextmanager
def stored_run(
    root: Path, names: Sequence[str], *, role: str, factor: int = 0
) -> Iterator[StoredRun]:
    """`factor` is that of all brokers, unless it is given."""
    run = StoredRun(root)
    try:
        for name in names:
            run.start(name)
        run.create(factor=factor or len(names), role=role)
        run.producer.start()
        run.reader.start()
        run.producer.wait_for_more()
        yield run
    finally:
        run.producer.stop()
        run.reader.stop()
        for broker in run.brokers:
            broker.kill()


def lose_disks(run: StoredRun, times: int) -> None:
    broker = run.brokers[0]
    for _ in range(times):
        run.producer.wait_for_more(patience_s=60)
        broker.kill()
        shutil.rmtree(broker.root / "data")
        broker.start(until="/healthz")
    run.producer.wait_for_more(patience_s=60)
    run.check()


def test_an_empty_folder_goes_on_with_all_that_was_acknowledged(tmp_path: Path) -> None:
    with stored_run(tmp_path, "a", role="always") as run:
        lose_disks(run, 2)


@pytest.mark.soak
def test_fifty_disks_are_lost(tmp_path: Path) -> None:
    with stored_run(tmp_path, "a", role="always") as run:
        lose_disks(run, 50)


def pause_writer(run: StoredRun, moment_s: float) -> None:
    """At a moment of its flushes, until the other one leads. What it was asked meanwhile it answers
    afterwards.
    """
    run.producer.wait_for_more(patience_s=60)
    led = run.leader()
    old, other = run.brokers[led], run.brokers[1 - led]
    assert old.process is not None
    time.sleep(moment_s)
    os.kill(old.process.pid, signal.SIGSTOP)
    try:
        run.brokers[led] = other
        with ThreadPoolExecutor(1) as pool:
            late = pool.submit(run.produce_late, old)
            run.producer.wait_for_more(patience_s=60)
            os.kill(old.process.pid, signal.SIGCONT)
            late.result(60)
    finally:
        os.kill(old.process.pid, signal.SIGCONT)
        run.brokers[led] = old
    until(lambda: run.leader(seen_by=old) == 1 - led, patience_s=30)


@pytest.mark.parametrize("pauses", [2, pytest.param(200, marks=pytest.mark.soak)])
def test_a_writer_that_was_paused_acknowledges_nothing_once_another_claimed(
    tmp_path: Path, pauses: int
) -> None:
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    with stored_run(tmp_path, "ab", role="always", factor=1) as run:
        for _ in range(pauses):
            pause_writer(run, moments.uniform(0, 2 * FLUSH_MS / 1000))
        run.producer.wait_for_more(patience_s=60)
        run.check()


@pytest.mark.soak
def test_the_bucket_stands_in_for_a_broker_that_is_destroyed(tmp_path: Path) -> None:
    with stored_run(tmp_path, "ab", role="stand-in") as run:
        lost = run.brokers.pop(0)
        lost.kill()
        shutil.rmtree(lost.root / "data")
        run.producer.longest_pause_s = 0.0
        run.producer.wait_for_more(patience_s=60)
        print(f"writes paused for {run.producer.longest_pause_s:.1f} s")
        run.start("c")
        run.check()
