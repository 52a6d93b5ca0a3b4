"""What people do with a cluster while its leaders are killed, and what has to hold afterwards:
idempotent producers of ours and of Kafka's, a group's offsets, and conditional appends.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from math import inf
from pathlib import Path
from typing import Any, NamedTuple

import httpx2
from confluent_kafka import Producer as KafkaProducer

from tests.fakes.append_history import Appender, Row
from tests.fakes.broker_process import free_port
from tests.fakes.replicated_run import TOPIC, ReplicatedRun, replicated_run
from tierlog.client.client import Client
from tierlog.client.exchange import UNLIMITED_ATTEMPTS, RetryPolicy

OURS, KAFKAS, LEDGER, GROUP = "by-ours", "by-kafkas", "ledger", "readers"
APPENDERS = 3
PATIENT = RetryPolicy(attempts=UNLIMITED_ATTEMPTS, max_pause_s=0.5, deadline_s=inf)


class History(NamedTuple):
    """Of the conditional appends. `log`: what was read at the end, by offset."""

    rows: list[Row]
    log: list[str]


class Load(threading.Thread):
    """Calls `turn` with 0, 1, 2, … until it is stopped. `failure`: what ended it before."""

    def __init__(self, turn: Callable[[int], object]) -> None:
        super().__init__(daemon=True)
        self._turn, self._stopping = turn, threading.Event()
        self.done = 0
        self.failure: Exception | None = None
        self.start()

    def run(self) -> None:
        try:
            for number in count():
                self._turn(number)
                self.done = number + 1
                if self._stopping.wait(0.01):
                    return
        except Exception as error:
            self.failure = error

    def stop(self) -> int:
        """How many turns there were. Raises the failure."""
        self._stopping.set()
        self.join(120)
        assert not self.is_alive(), "it hangs"
        if self.failure is not None:
            raise self.failure
        return self.done


class Loads(NamedTuple):
    """`flush` has the idempotent producers send what they buffer."""

    run: ReplicatedRun
    client: Client
    by_name: dict[str, Load]
    appenders: list[Appender]
    flush: Callable[[], None]


class GroupOffsets:
    """One client commits rising offsets; another reads them, through any broker. A commit that is
    not acknowledged may take effect at any time after, also behind later ones.
    """

    def __init__(self, run: ReplicatedRun, http: httpx2.Client) -> None:
        self._urls = [one.url for one in run.brokers]
        self._committed, self._doubtful = 0, set[int]()
        self._path, self._http = f"/v1/groups/{GROUP}", http

    def commit(self, number: int) -> None:
        document = {"offsets": [{"topic": TOPIC, "partition": 0, "offset": number}]}
        path = f"{self._urls[number % 3]}{self._path}/offsets"
        self._doubtful.add(number)
        if (answer := self._ask("PUT", path, json=document)) is None:
            return
        assert answer.status_code in (204, 503), answer.text
        if answer.status_code == 204:
            self._committed = number
            self._doubtful.discard(number)

    def read(self, number: int) -> None:
        before = self._committed
        answer = self._ask("GET", f"{self._urls[number % 3]}{self._path}")
        if before and answer is not None and answer.status_code != 503:
            assert answer.status_code == 200, answer.text
            (found,) = answer.json()["offsets"]
            is_late = found["offset"] in self._doubtful
            assert found["offset"] >= before or is_late, f"{found} after {before} was committed"

    def _ask(self, method: str, url: str, **given: Any) -> httpx2.Response | None:
        try:
            return self._http.request(method, url, **given)
        except httpx2.TransportError:
            return None


def kill_leaders(run: ReplicatedRun, times: int) -> None:
    for _ in range(times):
        run.wait_for_all_in_sync()
        old, epoch = run.leader(), run.epoch()
        old.kill()
        run.wait_for_another_leader(old, epoch=epoch)
        run.producer.wait_for_more()
        old.start()
    run.wait_for_all_in_sync()


def kill_leaders_under_all_loads(root: Path, times: int) -> History:
    """Checks all but whether the history of the appends is linearizable."""
    with all_loads(root) as loads:
        kill_leaders(loads.run, times)
        turns = {name: load.stop() for name, load in loads.by_name.items()}
        for appender in loads.appenders:
            appender.stop()
        loads.flush()
        loads.run.check()
        assert min(turns.values()) > times, turns
        for topic in (OURS, KAFKAS):
            sent = [str(value) for value in range(turns[topic])]
            assert values_of(loads.client, topic) == sent, topic
        rows = [row for one in loads.appenders for row in one.rows]
        return History(rows, values_of(loads.client, LEDGER))


def values_of(client: Client, topic: str) -> list[str]:
    """Of the partition, from its first offset to its end: no offset is left out."""
    records = list(client.consume(topic, follow=False))
    assert [one.offset for one in records] == list(range(len(records)))
    return [one.value.decode() for one in records]


@contextmanager
def all_loads(root: Path) -> Iterator[Loads]:
    flags = ("--default-replication-factor", "3", "--offsets-topic-num-partitions", "1")
    kafka = [f"127.0.0.1:{free_port()}" for _ in "abc"]
    each = [("--kafka-listen", one) for one in kafka]
    with ExitStack() as stack:
        run = stack.enter_context(replicated_run(root, *flags, answer_s=2, each=each))
        servers = ",".join(one.url for one in run.brokers)
        client = stack.enter_context(Client(servers, retries=PATIENT))
        for topic in (OURS, KAFKAS, LEDGER):
            client.create_topic(topic, partitions=1)
        ours = client.producer()
        kafkas = KafkaProducer(
            {
                "bootstrap.servers": ",".join(kafka),
                "enable.idempotence": True,
                "message.timeout.ms": 300_000,
            }
        )
        offsets = GroupOffsets(run, stack.enter_context(httpx2.Client(timeout=2)))
        turns: dict[str, Callable[[int], object]] = {
            OURS: lambda number: ours.send(OURS, b"%d" % number, partition=0),
            KAFKAS: lambda number: kafkas.produce(KAFKAS, b"%d" % number, partition=0),
            "commits": offsets.commit,
            "reads": offsets.read,
        }
        appenders = [Appender(one, run.brokers, LEDGER, answer_s=2) for one in range(APPENDERS)]
        by_name = {name: Load(turn) for name, turn in turns.items()}
        for one in appenders:
            one.start()

        def flush() -> None:
            ours.close()
            assert kafkas.flush(120) == 0

        yield Loads(run, client, by_name, appenders, flush)
