"""Producers, readers and a compacted topic on a real S3 server, while the broker is killed, frozen
and stopped and the connection to the store is cut, for TIERLOG_SOAK_MINUTES.

Invariants, checked during the run and at the end, from the broker and then from a folder restored
from the bucket alone:

* an acknowledged record stays at its acknowledged offset;
* each producer's records are in its partition in order, each once;
* records once read never change, and offsets have no gaps;
* the last value of each key in the compacted topic is the last acknowledged one.
"""

import math
import random
import threading
import time
from collections import defaultdict

import httpx2
import pytest

import tierlog
from tests.fakes.soak import (
    MINUTES,
    PATIENT,
    cause_fault,
    restored_broker,
    soak_broker,
    soak_seed,
)
from tierlog.client.wire import Limits

pytestmark = [pytest.mark.soak, pytest.mark.s3]

PARTITIONS, PRODUCERS, KEYS = 3, 4, 300
BURST = 200  # records that a producer sends before it waits for all of them
BATCHING = tierlog.Batching(delivery_timeout_s=math.inf)
WAITING = Limits(wait_ms=500)
STREAM = {"segment.bytes": 1 << 20, "local.retention.bytes": 2 << 20, "retention.ms": -1}
TABLE = {
    "cleanup.policy": "compact",
    "segment.bytes": 1 << 18,
    "min.cleanable.dirty.ratio": 0.1,
    "segment.ms": 2000,
}
FLAGS = ("--retention-check-interval", "0.5", "--log-cleaner-backoff-ms", "500")
RESTORED_KILLS = 8


class World:
    """Threads that write and read, and what they know about the log."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.acknowledged: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.seen: dict[int, list[bytes]] = {p: [] for p in range(PARTITIONS)}
        self.last_values: dict[bytes, bytes] = {}
        self.failures: list[BaseException] = []
        self.writing, self.reading = threading.Event(), threading.Event()
        self.writing.set()
        self.reading.set()
        self.writers = [self._thread(self.produce, number) for number in range(PRODUCERS)]
        self.writers.append(self._thread(self.put_keys))
        self.readers = [self._thread(self.follow, partition) for partition in range(PARTITIONS)]
        self.readers.append(self._thread(self.read_back))

    def _thread(self, work, *arguments) -> threading.Thread:
        def run() -> None:
            try:
                work(*arguments)
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def client(self) -> tierlog.Client:
        return tierlog.Client(self.url, retries=PATIENT, timeout_s=20)

    def produce(self, number: int) -> None:
        """Send numbered records in bursts: `number`-`count` with random padding."""
        dice, count, sent = random.Random(f"{self.seed}-{number}"), 0, []
        partition = number % PARTITIONS
        with self.client() as client, client.producer(BATCHING) as producer:
            while self.writing.is_set():
                for _ in range(BURST):
                    padding = dice.randbytes(dice.randrange(10, 400))
                    value = b"%d-%d-" % (number, count) + padding
                    sent.append((producer.send("stream", value, partition=partition), value))
                    count += 1
                for delivery, value in sent:
                    placed = delivery.result()
                    known = self.acknowledged[partition].setdefault(placed.offset, value)
                    assert known is value, f"offset {placed.offset} was assigned twice"
                sent.clear()

    def put_keys(self) -> None:
        dice, count = random.Random(f"{self.seed}-keys"), 0
        with self.client() as client, client.producer(BATCHING) as producer:
            while self.writing.is_set():
                for _ in range(BURST):
                    key, value = b"key-%d" % dice.randrange(KEYS), b"%d" % count
                    self.last_values[key] = value
                    delivery = producer.send("table", value, key=key, partition=0)
                    count += 1
                delivery.result()

    def follow(self, partition: int) -> None:
        """Follow the tail without a gap over all restarts of the broker."""
        seen = self.seen[partition]
        with self.client() as client:
            while self.reading.is_set():
                fetched = client.fetch("stream", partition, offset=len(seen), limits=WAITING)
                for record in fetched.records:
                    assert record.offset == len(seen), f"{partition}: a gap at {len(seen)}"
                    seen.append(record.value)

    def read_back(self) -> None:
        """Read again at random offsets, mostly from the bucket."""
        dice = random.Random(f"{self.seed}-back")
        # A cold read fails with 503 while the store is unavailable; the client retries.
        with self.client() as client:
            while self.reading.is_set():
                partition = dice.randrange(PARTITIONS)
                seen = self.seen[partition]
                if not seen:
                    continue
                fetched = client.fetch("stream", partition, offset=dice.randrange(len(seen)))
                for record in fetched.records:
                    if record.offset < len(seen):
                        assert record.value == seen[record.offset], f"{partition}@{record.offset}"

    def finish(self) -> None:
        """Let the writers end, and the readers reach the end of the log."""
        self.writing.clear()
        for thread in self.writers:
            thread.join(180)
            assert not thread.is_alive(), "a producer did not end"
        with self.client() as client:
            ends = [client.offsets("stream", p).log_end_offset for p in range(PARTITIONS)]
        deadline = time.monotonic() + 120
        while any(len(self.seen[p]) < ends[p] for p in range(PARTITIONS)):
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, "readers did not reach the end of the log"
        self.reading.clear()
        for thread in self.readers:
            thread.join(60)
            assert not thread.is_alive(), "a reader did not end"

    def check(self, url: str) -> None:
        """Compare everything known about the log with a full read from the broker at `url`."""
        assert not self.failures, self.failures
        with tierlog.Client(url, timeout_s=60) as client:
            for partition in range(PARTITIONS):
                read = client.consume("stream", partitions=[partition])
                for offset, record in enumerate(read):
                    assert record.offset == offset
                    assert record.value == self.seen[partition][offset], f"{partition}@{offset}"
                assert offset + 1 == len(self.seen[partition])
            table = {record.key: record.value for record in client.consume("table")}
        assert table == self.last_values
        for partition, by_offset in self.acknowledged.items():
            seen = self.seen[partition]
            lost = [offset for offset, value in by_offset.items() if seen[offset] != value]
            assert not lost, (
                f"{partition}: {len(lost)} acknowledged records are not at their offset"
            )
            assert_in_order(seen)


def assert_in_order(values: list[bytes]) -> None:
    """Each producer's records are in order from 0 on, each once."""
    expected: dict[bytes, int] = defaultdict(int)
    for value in values:
        number, count, _ = value.split(b"-", 2)
        assert int(count) == expected[number], f"producer {number}: {count} is out of order"
        expected[number] += 1


def test_no_acknowledged_record_is_lost_under_faults(tmp_path):
    seed = soak_seed()
    dice = random.Random(seed)
    with soak_broker(tmp_path, *FLAGS) as (broker, proxy):
        for body in (
            {"name": "stream", "partitions": PARTITIONS, "config": STREAM},
            {"name": "table", "config": TABLE},
        ):
            assert httpx2.post(f"{broker.url}/v1/topics", json=body).status_code == 201
        world = World(broker.url, seed)
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end and not world.failures:
            time.sleep(dice.uniform(1, 15))
            done = cause_fault(broker, proxy, dice)
            seen = sum(map(len, world.seen.values()))
            print(f"{end - time.monotonic():6.0f} s left: {done}; {seen} records", flush=True)
        world.finish()
        world.check(broker.url)
        with tierlog.Client(broker.url, timeout_s=120) as client:
            for topic in ("stream", "table"):
                assert client.offload(topic, wait_ms=60_000).remaining_segments == 0
                assert client.verify(topic, deep=True)["ok"]
        assert broker.stop() == 0
        with restored_broker(broker) as second:
            world.check(second.url)
            for _ in range(RESTORED_KILLS):  # while the compacted topic is brought back to disk
                time.sleep(dice.uniform(0, 1.5))
                second.kill()
                second.start()
            world.check(second.url)
