"""Three brokers as processes, a topic on all of them, and people who use it while it is broken.

* Every value is one number, appended once: a producer that gets no answer takes the next number,
  so that whatever is read twice, or at two offsets, was doubled by the brokers.
* A reader asks any broker, from offset 0 on, and keeps what it read by offset. A deposed leader may
  say that the log does not reach so far.
* Each broker has a line to each other, and its own way to the bucket: each of them can be cut.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2

from tests.fakes.broker_links import BrokerLinks, broker_links
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.waiting import until

FLAGS = ("--join", "--heartbeat-interval-ms", "200", "--session-timeout-ms", "1000")
TOPIC = "flights"
ANSWER_S = 10.0
LOGGED = 30


class Producer(threading.Thread):
    """`acked`: offsets by value. `longest_pause_s`: between two that are acknowledged; a test may
    set it. `first`: its values begin there.
    """

    def __init__(
        self, brokers: Sequence[BrokerProcess], *, first: int = 0, answer_s: float = ANSWER_S
    ) -> None:
        super().__init__(daemon=True)
        self._brokers, self._stopping = brokers, threading.Event()
        self._answer_s, self._acked_s = answer_s, time.monotonic()
        self.acked: dict[int, int] = {}
        self.sent, self.refusal, self.longest_pause_s = first, "", 0.0

    def run(self) -> None:
        with httpx2.Client(timeout=self._answer_s) as api:
            while not self._stopping.wait(0.01):  # the brokers have more to do than to append
                self._produce(api)

    def _produce(self, api: httpx2.Client) -> None:
        value, self.sent = self.sent, self.sent + 1
        broker = self._brokers[value % len(self._brokers)]
        path = f"{broker.url}/v1/topics/{TOPIC}/partitions/0/records"
        try:
            answer = api.post(path, json={"records": [{"value": str(value)}]})
        except httpx2.TransportError:
            return
        if answer.status_code != 200:
            self.refusal = answer.text
            return
        self.acked[value] = answer.json()["results"][0]["base_offset"]
        before_s, self._acked_s = self._acked_s, time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, self._acked_s - before_s)

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
        elif answer.status_code < 500 and answer.json()["code"] != "offset-past-end":
            self.problems.append(f"at {self._offset}: {answer.text}")

    def _note(self, offset: int, value: int) -> None:
        if self.read.setdefault(offset, value) != value:
            self.problems.append(f"offset {offset} was {self.read[offset]}, then {value}")

    def stop(self) -> None:
        self._stopping.set()
        if self.ident is not None:
            self.join(30)


class ReplicatedRun:
    def __init__(
        self, brokers: list[BrokerProcess], links: BrokerLinks, *, answer_s: float
    ) -> None:
        self.brokers, self.links, self._answer_s = brokers, links, answer_s
        self.producer, self.reader = Producer(brokers, answer_s=answer_s), Reader(self)
        self._others: list[Producer] = []

    def produce_at(self, broker: BrokerProcess) -> Producer:
        """Another producer, of this broker alone; `check` knows of it."""
        first = 10**9 * (1 + len(self._others))
        other = Producer([broker], first=first, answer_s=self._answer_s)
        self._others.append(other)
        other.start()
        return other

    def cut_bucket(self, *brokers: BrokerProcess) -> None:
        """For these; it is as a disk that is not mounted."""
        for broker in brokers:
            (broker.root / "bucket").unlink()

    def mend(self) -> None:
        self.links.mend()
        for broker in self.brokers:
            mend_bucket(broker)

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
            leader = now.get("leader") if now else None
            found[:] = [self.brokers[leader["node_id"]]] if leader else []
            return bool(found)

        until(is_known, patience_s=30)
        return found[0]

    def epoch(self) -> int:
        now = self.partition()
        assert now is not None
        return int(now["leader_epoch"])

    def wait_for_another_leader(self, old: BrokerProcess, *, epoch: int) -> float:
        """How many seconds it took."""
        began_s = time.monotonic()

        def is_there() -> bool:
            now = self.partition(unless=old)
            leader = now.get("leader") if now else None
            is_another = leader and self.brokers[leader["node_id"]] is not old
            return bool(now and is_another and now["leader_epoch"] > epoch)

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
        acked = dict[int, int]()
        for producer in (self.producer, *self._others):
            acked |= producer.acked.copy()
        last = max(acked.values())
        until(lambda: max(self.reader.read.copy(), default=-1) >= last, patience_s=60)
        read = self.reader.read.copy()
        assert not self.reader.problems, self.reader.problems[:5]
        values = list(read.values())
        assert len(set(values)) == len(values), "a value is there twice"
        lost = {value: offset for value, offset in acked.items() if read.get(offset) != value}
        assert not lost, f"{len(lost)} of {len(acked)} are lost: {lost}"[:500]

    def describe(self) -> str:
        """For who reads of a failure: the links that are cut, and what each broker logged last, but
        for the calls that failed.
        """
        lines = [f"cut: {', '.join(f'{a} to {b}' for a, b in self.links.cut_ones())}"]
        for broker, link in zip(self.brokers, self.links.urls, strict=True):
            file = broker.root / "broker.log"
            logged = file.read_text().splitlines() if file.exists() else []
            own = [line for line in logged if '"request failed"' not in line]
            state = "runs" if broker.process is not None else "does not run"
            where = f"{broker.root.name}, {broker.url}, to others {link}"
            lines += [f"{where}, {state}:", *own[-LOGGED:]]
        return "\n".join(lines)

    def stop(self) -> None:
        for one in (self.producer, self.reader, *self._others):
            one.stop()


def mend_bucket(broker: BrokerProcess) -> None:
    link = broker.root / "bucket"
    if not link.is_symlink():
        link.symlink_to(broker.root.parent / "bucket")


@contextmanager
def replicated_run(
    root: Path,
    *flags: str,
    answer_s: float = ANSWER_S,
    each: Sequence[Sequence[str]] = ((), (), ()),
) -> Iterator[ReplicatedRun]:
    """All run, each has a replica in sync, and the producer and the reader are at work. `each`: a
    broker's own flags.
    """
    (root / "bucket").mkdir()
    brokers = []
    for node_id, name in enumerate("abc"):
        (root / name).mkdir()
        given = (*FLAGS, "--node-id", str(node_id), *flags, *each[node_id])
        brokers.append(BrokerProcess(root / name, *given))
        mend_bucket(brokers[-1])
    with broker_links(brokers) as links:
        for broker, url in zip(brokers, links.urls, strict=True):
            broker.flags = (*broker.flags, "--advertised-url", url)
        run = ReplicatedRun(brokers, links, answer_s=answer_s)
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
        except Exception as error:
            error.add_note(run.describe())
            raise
        finally:
            run.stop()
            for broker in brokers:
                broker.kill()
