"""Three brokers as processes, a topic on all of them, and people who use it while it is broken.

* Every value is one number, appended once: a producer that gets no answer takes the next number,
  so that whatever is read twice, or at two offsets, was doubled by the brokers.
* A reader asks any broker, from offset 0 on, and keeps what it read by offset.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.fakes.broker_process import BrokerProcess
from tests.fakes.waiting import until

FLAGS = ("--join", "--heartbeat-interval-ms", "200", "--session-timeout-ms", "1000")
TOPIC = "flights"
ANSWER_S = 10.0


class Producer(threading.Thread):
    """`acked`: offsets by value."""

    def __init__(self, run: ReplicatedRun) -> None:
        super().__init__(daemon=True)
        self._run, self._stopping = run, threading.Event()
        self.acked: dict[int, int] = {}
        self.sent, self.refusal = 0, ""

    def run(self) -> None:
        with httpx2.Client(timeout=ANSWER_S) as api:
            while not self._stopping.is_set():
                self._produce(api)

    def _produce(self, api: httpx2.Client) -> None:
        value, self.sent = self.sent, self.sent + 1
        broker = self._run.brokers[value % len(self._run.brokers)]
        path = f"{broker.url}/v1/topics/{TOPIC}/partitions/0/records"
        try:
            answer = api.post(path, json={"records": [{"value": str(value)}]})
        except httpx2.TransportError:
            self._stopping.wait(0.01)
            return
        if answer.status_code == 200:
            self.acked[value] = answer.json()["results"][0]["base_offset"]
        else:
            self.refusal = answer.text

    def wait_for_more(self, *, patience_s: float = 30) -> None:
        """Until something is acknowledged that is sent from now on."""
        sent = self.sent
        try:
            until(lambda: max(self.acked, default=-1) > sent, patience_s=patience_s)
        except AssertionError as error:
            raise AssertionError(f"nothing is acknowledged: {self.refusal}") from error

    def stop(self) -> None:
        self._stopping.set()
        if self.ident is not None:
            self.join(30)


class Reader(threading.Thread):
    """`read`: values by offset. `problems`: an offset that has had two values."""

    def __init__(self, run: ReplicatedRun) -> None:
        super().__init__(daemon=True)
        self._run, self._stopping = run, threading.Event()
        self.read: dict[int, int] = {}
        self.problems: list[str] = []
        self._offset = self._turn = 0

    def run(self) -> None:
        with httpx2.Client(timeout=ANSWER_S) as api:
            while not self._stopping.is_set():
                self._fetch(api)

    def _fetch(self, api: httpx2.Client) -> None:
        self._turn += 1
        broker = self._run.brokers[self._turn % len(self._run.brokers)]
        path = f"{broker.url}/v1/topics/{TOPIC}/partitions/0/records"
        try:
            answer = api.get(path, params={"offset": self._offset, "wait_ms": 200})
        except httpx2.TransportError:
            self._stopping.wait(0.01)
            return
        if answer.status_code == 200:
            body = answer.json()
            for record in body["records"]:
                self._note(record["offset"], int(record["value"]))
            self._offset = body["next_offset"]
        elif answer.status_code < 500:
            self.problems.append(f"at {self._offset}: {answer.text}")

    def _note(self, offset: int, value: int) -> None:
        if self.read.setdefault(offset, value) != value:
            self.problems.append(f"offset {offset} was {self.read[offset]}, then {value}")

    def stop(self) -> None:
        self._stopping.set()
        if self.ident is not None:
            self.join(30)


class ReplicatedRun:
    def __init__(self, brokers: list[BrokerProcess]) -> None:
        self.brokers = brokers
        self.producer, self.reader = Producer(self), Reader(self)

    def partition(self, *, unless: BrokerProcess | None = None) -> dict[str, Any] | None:
        """What a broker that runs says of the partition; None while it does not know."""
        for broker in self.brokers:
            if broker is unless or broker.process is None:
                continue
            try:
                answer = httpx2.get(f"{broker.url}/v1/topics/{TOPIC}", timeout=ANSWER_S)
            except httpx2.TransportError:
                continue
            partitions = answer.json().get("partitions") if answer.status_code == 200 else None
            if partitions:
                return dict(partitions[0])
        return None

    def leader(self) -> BrokerProcess:
        found: list[BrokerProcess] = []

        def is_known() -> bool:
            now = self.partition()
            url = (now.get("leader") or {}).get("url") if now else None
            found[:] = [one for one in self.brokers if one.url == url]
            return bool(found)

        until(is_known, patience_s=30)
        return found[0]

    def wait_for_another_leader(self, old: BrokerProcess, *, epoch: int) -> float:
        """How many seconds it took."""
        began_s = time.monotonic()

        def is_there() -> bool:
            now = self.partition(unless=old)
            leader = now.get("leader") if now else None
            return bool(now and leader and leader["url"] != old.url and now["leader_epoch"] > epoch)

        until(is_there, patience_s=30)
        return time.monotonic() - began_s

    def wait_for_all_in_sync(self) -> None:
        count = len(self.brokers)
        until(
            lambda: len((self.partition() or {}).get("in_sync_replicas", ())) == count,
            patience_s=60,
        )

    def check(self) -> None:
        """Everything acknowledged is read once, where it was said to be."""
        self.producer.stop()
        last = max(self.producer.acked.values())
        until(lambda: max(self.reader.read, default=-1) >= last, patience_s=60)
        self.reader.stop()
        assert not self.reader.problems, self.reader.problems[:5]
        values = list(self.reader.read.values())
        assert len(set(values)) == len(values), "a value is there twice"
        lost = {
            value: offset
            for value, offset in self.producer.acked.items()
            if self.reader.read.get(offset) != value
        }
        assert not lost, f"{len(lost)} of {len(self.producer.acked)} are lost: {lost}"[:500]


@contextmanager
def replicated_run(root: Path, *flags: str, store: str | None = None) -> Iterator[ReplicatedRun]:
    """All run, each has a replica in sync, and the producer and the reader are at work."""
    brokers = []
    for node_id, name in enumerate("abc"):
        (root / name).mkdir()
        given = (*FLAGS, "--node-id", str(node_id), *flags)
        bucket = store or (root / "bucket").as_uri()
        brokers.append(BrokerProcess(root / name, *given, store=bucket))
    run = ReplicatedRun(brokers)
    try:
        for broker in brokers:
            broker.start()
        topic = {"name": TOPIC, "partitions": 1, "replication_factor": 3}

        def is_created() -> bool:
            made = httpx2.post(f"{brokers[0].url}/v1/topics", json=topic, timeout=ANSWER_S)
            return made.status_code in (201, 409)

        until(is_created, patience_s=30)
        run.wait_for_all_in_sync()
        run.producer.start()
        run.reader.start()
        run.producer.wait_for_more()
        yield run
    finally:
        run.producer.stop()
        run.reader.stop()
        for broker in brokers:
            broker.kill()
