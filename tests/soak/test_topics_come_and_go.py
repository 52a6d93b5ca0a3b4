"""The long run of topics that are made, deleted, and made again under the same name, while they are
written and read, trimmed, offloaded, verified and altered, and while the broker is killed, frozen
and stopped and the store's line is cut.

What must hold, while it runs and in a folder restored out of the bucket at the end:

* what was acknowledged stands at its offset, but below the log start;
* what a reader was shown never changes, and is of the topic that the answer names by its id;
* no verification finds anything.

When all topics are deleted nothing of them is left in the bucket, and the broker holds no more
threads and descriptors than its pools and caches may. Its log has no traceback.
"""

import random
import threading
import time
from contextlib import closing, suppress
from pathlib import Path

import pytest

import tierlog
from cold_tier.object_store import ObjectStore
from cold_tier.open import S3Options, open_store
from record_format.decode import Record
from record_format.errors import (
    OffsetPastEnd,
    OffsetTrimmed,
    OutcomeUnknownError,
    TopicExists,
    UnknownTopic,
)
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cut_line import CutLine
from tests.fakes.soaking import MINUTES, client_of, restored, soaked, told_seed, trouble
from tests.fakes.waiting import until
from tierlog.client.answers import TopicDescription
from tierlog.client.calls import Limits

pytestmark = [pytest.mark.soak, pytest.mark.s3]

NAMES, PARTITIONS, KEYS = 4, 2, 30
CONFIGS = (
    {"retention.ms": -1, "local.retention.bytes": 1 << 15},
    {"retention.ms": -1, "local.retention.bytes": 0, "offload.max.lag.ms": 1500},
    {"retention.bytes": 1 << 19, "local.retention.bytes": 1 << 15},
    {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.1, "segment.ms": 1000},
)
FLAGS = (
    *("--retention-check-interval", "0.5", "--log-cleaner-backoff-ms", "500"),
    *("--gc-grace-ms", "6000", "--recovery-checkpoint-ms", "500", "--cache-bytes", str(16 << 20)),
)
THREADS_MAX, DESCRIPTORS_MAX = 120, 400  # pools, and chunks and connections that are kept
GONE = (UnknownTopic, OffsetTrimmed, OffsetPastEnd, OutcomeUnknownError)


class Life:
    """One topic, from its creation to its deletion."""

    def __init__(self, made: TopicDescription) -> None:
        self.name, self.topic_id, self.config = made.name, made.topic_id, made.config
        self.acknowledged: list[dict[int, bytes]] = [{} for _ in range(PARTITIONS)]
        self.shown: list[dict[int, bytes]] = [{} for _ in range(PARTITIONS)]

    def see(self, partition: int, records: list[Record]) -> None:
        for record in records:
            for known in (self.shown, self.acknowledged):
                value = known[partition].get(record.offset, record.value)
                where = f"{self.name}-{partition} ({self.topic_id}) @{record.offset}"
                assert value == record.value, (
                    f"{where}: {value[:40]!r} became {record.value[:40]!r}"
                )
            self.shown[partition][record.offset] = record.value

    def check(self, client: tierlog.Client) -> None:
        """What was acknowledged before this is there, while more is written."""
        for partition in range(PARTITIONS):
            wanted, read = set(self.acknowledged[partition]), set()
            offset = start = client.offsets(self.name, partition).log_start_offset
            while offset <= max(wanted, default=-1):
                try:
                    fetched = client.fetch(self.name, partition, offset=offset)
                except OffsetTrimmed:
                    offset = start = client.offsets(self.name, partition).log_start_offset
                    continue
                assert fetched.topic_id == self.topic_id
                assert fetched.next_offset > offset, f"{self.name}-{partition}: ends at {offset}"
                self.see(partition, fetched.records)
                read.update(record.offset for record in fetched.records)
                offset = fetched.next_offset
            start = max(start, client.offsets(self.name, partition).log_start_offset)
            lost = sorted(offset for offset in wanted - read if offset >= start)
            assert not lost or "cleanup.policy" in self.config, f"{self.name}: lost {lost[:9]}"


class Name:
    """A name of topics, one after the other, and the threads that use it."""

    def __init__(self, storm: "Storm", number: int) -> None:
        self.storm, self.name, self.life = storm, f"topic-{number}", None
        self.lives: dict[str, Life] = {}
        works = (self.live, self.write, self.follow, self.meddle)
        self.threads = [
            storm.thread(work, random.Random(f"{storm.seed}-{number}-{work.__name__}"))
            for work in works
        ]

    def live(self, client: tierlog.Client, dice: random.Random) -> None:
        config = {"segment.bytes": dice.choice((1 << 14, 1 << 17)), **dice.choice(CONFIGS)}
        try:
            made = client.create_topic(self.name, partitions=PARTITIONS, config=config)
        except (TopicExists, OutcomeUnknownError):  # nobody else makes it: an answer was lost
            made = client.describe_topic(self.name)
        self.life = self.lives[made.topic_id] = Life(made)
        self.storm.over.wait(dice.choice((0.1, 1, 4, 12)))
        if dice.random() < 0.5:
            self.life.check(client)
        if not self.storm.over.is_set():
            self.life = None
            client.delete_topic(self.name)

    def write(self, client: tierlog.Client, dice: random.Random) -> None:
        life, partition = self.life, dice.randrange(PARTITIONS)
        values = [dice.randbytes(dice.randrange(800)) for _ in range(dice.choice((1, 10, 50)))]
        keys = [b"key-%d" % dice.randrange(KEYS) for _ in values]
        records = [tierlog.NewRecord(v, key=k) for v, k in zip(values, keys, strict=True)]
        placed = client.produce(self.name, records, partition=partition).results[0]
        if life is not None and self.life is life:  # else it may be of the next
            for offset, value in enumerate(values, start=placed.base_offset):
                twin = life.acknowledged[partition].setdefault(offset, value)
                assert twin is value, f"{self.name}-{partition}: {offset} was given twice"

    def follow(self, client: tierlog.Client, dice: random.Random) -> None:
        life, partition = self.life, dice.randrange(PARTITIONS)
        shown = life.shown[partition] if life is not None else {}
        offset = dice.choice((max(shown, default=-1) + 1, "earliest"))
        fetched = client.fetch(self.name, partition, offset=offset, limits=Limits(wait_ms=200))
        if (life := self.lives.get(fetched.topic_id)) is not None:
            life.see(partition, fetched.records)

    def meddle(self, client: tierlog.Client, dice: random.Random) -> None:
        self.storm.over.wait(dice.random() / 2)
        partition, kind = dice.randrange(PARTITIONS), dice.randrange(5)
        if kind == 0:
            now = client.offsets(self.name, partition)
            to = dice.randint(now.log_start_offset, now.high_watermark)
            client.trim(self.name, partition, before_offset=to)
        elif kind == 1:
            client.offload(self.name, wait_ms=dice.choice((None, 2000)))
        elif kind == 2:
            report = client.verify(self.name, deep=dice.random() < 0.5)
            assert report["ok"], report
        elif kind == 3:
            client.alter_topic(self.name, config={"flush.ms": dice.choice((None, 5))})
        else:
            client.offset_for_timestamp(self.name, partition, int(time.time() * 1000) - 5000)


class Storm:
    def __init__(self, broker, seed: int) -> None:
        self.broker, self.seed = broker, seed
        self.over, self.failures = threading.Event(), []
        self.names = [Name(self, number) for number in range(NAMES)]

    def thread(self, work, dice: random.Random) -> threading.Thread:
        def run() -> None:
            try:
                with client_of(self.broker) as client:
                    while not self.over.is_set():
                        with suppress(*GONE):
                            work(client, dice)
            except BaseException as error:
                self.failures.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        return thread

    def finish(self) -> None:
        self.over.set()
        for name in self.names:
            for thread in name.threads:
                thread.join(180)
                assert not thread.is_alive(), f"{name.name}: a thread did not come to its end"
        assert not self.failures, self.failures

    def check(self, client: tierlog.Client) -> None:
        for name in self.names:
            if name.life is not None:
                name.life.check(client)
                assert client.verify(name.name, deep=True)["ok"]


def store_of(broker: BrokerProcess, line: CutLine) -> ObjectStore:
    options = S3Options(
        endpoint=line.url,
        region=broker.env["AWS_DEFAULT_REGION"],
        access_key_id=broker.env["AWS_ACCESS_KEY_ID"],
        secret_access_key=broker.env["AWS_SECRET_ACCESS_KEY"],
    )
    return open_store(broker.store, options)


def test_topics_come_and_go(tmp_path):
    seed = told_seed()
    dice = random.Random(seed)
    with soaked(tmp_path, *FLAGS) as (broker, line):
        storm = Storm(broker, seed)
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end and not storm.failures:
            time.sleep(dice.uniform(1, 10))
            done = trouble(broker, line, dice)
            lives = sum(len(name.lives) for name in storm.names)
            print(f"{end - time.monotonic():6.0f} s left: {done}; {lives} topics", flush=True)
        storm.finish()
        with client_of(broker) as client:
            storm.check(client)
            for name in storm.names:
                if name.life is not None:
                    assert client.offload(name.name, wait_ms=60_000).remaining_segments == 0
        until(lambda: b'"deleted":true' not in (tmp_path / "data/tierlog/topics.json").read_bytes())
        assert broker.stop() == 0
        with restored(broker) as second, client_of(second) as client:
            storm.check(client)
            assert second.stop() == 0
        broker.flags = ("--take-over", *broker.flags)  # the second has claimed them all
        broker.start()
        with client_of(broker) as client:
            for topic in client.list_topics():
                client.delete_topic(topic.name)
        with closing(store_of(broker, line)) as store:
            until(lambda: not store.list("topics/", limit=1))
        process = Path(f"/proc/{broker.process.pid}")
        if process.exists():
            assert len(list((process / "task").iterdir())) < THREADS_MAX
            assert len(list((process / "fd").iterdir())) < DESCRIPTORS_MAX
        assert broker.stop() == 0
        logged = (tmp_path / "broker.log").read_text()
        assert '"exception"' not in logged
        assert "Traceback" not in logged
