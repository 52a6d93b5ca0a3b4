"""The long run: producers, readers and a compacted topic on a real S3 server, while the broker is
killed, frozen and stopped and the store's line is cut, for as long as TIERLOG_SOAK_MINUTES says.

What must hold, checked while it runs and once more at the end, from the broker and then from a
folder restored out of the bucket alone:

* an acknowledged record stays at the offset that its acknowledgement named;
* each producer's records stand in its partition in its order, each once;
* what a reader was shown never changes, and offsets have no holes;
* the compacted topic's last value of each key is the last that was acknowledged.
"""

import math
import random
import threading
import time
from collections import defaultdict

import httpx
import pytest

import tierlog
from tests.fakes.soaking import MINUTES, PATIENT, restored, soaked, told_seed, trouble
from tierlog.client.calls import Limits

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
    """What is known of the log, and the threads that find it out."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.acknowledged: dict[int, dict[int, bytes]] = defaultdict(dict)
        self.shown: dict[int, list[bytes]] = {p: [] for p in range(PARTITIONS)}
        self.last_of_key: dict[bytes, bytes] = {}
        self.failures: list[BaseException] = []
        self.writing, self.reading = threading.Event(), threading.Event()
        self.writing.set()
        self.reading.set()
        self.writers = [self._thread(self.produce, number) for number in range(PRODUCERS)]
        self.writers.append(self._thread(self.put_keys))
        self.readers = [self._thread(self.follow, partition) for partition in range(PARTITIONS)]
        self.readers.append(self._thread(self.look_back))

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
        """Numbered records, a burst at a time: `number`-`count` with a filling of its own."""
        dice, count, sent = random.Random(f"{self.seed}-{number}"), 0, []
        partition = number % PARTITIONS
        with self.client() as client, client.producer(BATCHING) as producer:
            while self.writing.is_set():
                for _ in range(BURST):
                    filling = dice.randbytes(dice.randrange(10, 400))
                    value = b"%d-%d-" % (number, count) + filling
                    sent.append((producer.send("stream", value, partition=partition), value))
                    count += 1
                for delivery, value in sent:
                    placed = delivery.result()
                    twin = self.acknowledged[partition].setdefault(placed.offset, value)
                    assert twin is value, f"offset {placed.offset} was given twice"
                sent.clear()

    def put_keys(self) -> None:
        dice, count = random.Random(f"{self.seed}-keys"), 0
        with self.client() as client, client.producer(BATCHING) as producer:
            while self.writing.is_set():
                for _ in range(BURST):
                    key, value = b"key-%d" % dice.randrange(KEYS), b"%d" % count
                    self.last_of_key[key] = value
                    delivery = producer.send("table", value, key=key, partition=0)
                    count += 1
                delivery.result()

    def follow(self, partition: int) -> None:
        """The tail, without a hole, over every life of the broker."""
        shown = self.shown[partition]
        with self.client() as client:
            while self.reading.is_set():
                fetched = client.fetch("stream", partition, offset=len(shown), limits=WAITING)
                for record in fetched.records:
                    assert record.offset == len(shown), f"{partition}: a hole at {len(shown)}"
                    shown.append(record.value)

    def look_back(self) -> None:
        """Anywhere in what was shown, which by now is mostly in the bucket."""
        dice = random.Random(f"{self.seed}-back")
        # A cold read answers 503 while the store is away; that is waited out like all else.
        with self.client() as client:
            while self.reading.is_set():
                partition = dice.randrange(PARTITIONS)
                shown = self.shown[partition]
                if not shown:
                    continue
                fetched = client.fetch("stream", partition, offset=dice.randrange(len(shown)))
                for record in fetched.records:
                    if record.offset < len(shown):
                        assert record.value == shown[record.offset], f"{partition}@{record.offset}"

    def finish(self) -> None:
        """Let the writers end, and the readers come to the end of the log."""
        self.writing.clear()
        for thread in self.writers:
            thread.join(180)
            assert not thread.is_alive(), "a producer did not come to its end"
        with self.client() as client:
            ends = [client.offsets("stream", p).log_end_offset for p in range(PARTITIONS)]
        deadline = time.monotonic() + 120
        while any(len(self.shown[p]) < ends[p] for p in range(PARTITIONS)):
            assert not self.failures, self.failures
            assert time.monotonic() < deadline, "readers did not come to the log's end"
        self.reading.clear()
        for thread in self.readers:
            thread.join(60)

    def check(self, url: str) -> None:
        """All that is known of the log against what the broker at `url` reads from its start."""
        assert not self.failures, self.failures
        with tierlog.Client(url, timeout_s=60) as client:
            for partition in range(PARTITIONS):
                read = client.consume("stream", partitions=[partition])
                for offset, record in enumerate(read):
                    assert record.offset == offset
                    assert record.value == self.shown[partition][offset], f"{partition}@{offset}"
                assert offset + 1 == len(self.shown[partition])
            table = {record.key: record.value for record in client.consume("table")}
        assert table == self.last_of_key
        for partition, places in self.acknowledged.items():
            shown = self.shown[partition]
            lost = [offset for offset, value in places.items() if shown[offset] != value]
            assert not lost, (
                f"{partition}: {len(lost)} acknowledged records are not at their offset"
            )
            assert_in_order(shown)


def assert_in_order(values: list[bytes]) -> None:
    """Each producer's records, counted from 0: in order, each once."""
    expected: dict[bytes, int] = defaultdict(int)
    for value in values:
        number, count, _ = value.split(b"-", 2)
        assert int(count) == expected[number], f"producer {number}: {count} came out of order"
        expected[number] += 1


def test_nothing_is_lost_whatever_happens(tmp_path):
    seed = told_seed()
    dice = random.Random(seed)
    with soaked(tmp_path, *FLAGS) as (broker, line):
        for body in (
            {"name": "stream", "partitions": PARTITIONS, "config": STREAM},
            {"name": "table", "config": TABLE},
        ):
            assert httpx.post(f"{broker.url}/v1/topics", json=body).status_code == 201
        world = World(broker.url, seed)
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end and not world.failures:
            time.sleep(dice.uniform(1, 15))
            done = trouble(broker, line, dice)
            shown = sum(map(len, world.shown.values()))
            print(f"{end - time.monotonic():6.0f} s left: {done}; {shown} records", flush=True)
        world.finish()
        world.check(broker.url)
        with tierlog.Client(broker.url, timeout_s=120) as client:
            for topic in ("stream", "table"):
                assert client.offload(topic, wait_ms=60_000).remaining_segments == 0
                assert client.verify(topic, deep=True)["ok"]
        assert broker.stop() == 0
        with restored(broker) as second:
            world.check(second.url)
            for _ in range(RESTORED_KILLS):  # the compacted topic is on its way back to disk
                time.sleep(dice.uniform(0, 1.5))
                second.kill()
                second.start()
            world.check(second.url)
