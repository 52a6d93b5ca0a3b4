"""The long run of topics that are made, deleted, and made again under the same name, while they are
written and read, followed, trimmed, offloaded, verified and altered, and while the broker is
killed, frozen and stopped and the store's line is cut.

What must hold, while it runs and in a folder restored out of the bucket at the end:

* what was acknowledged stands at its offset, but below the log start, or where compaction kept a
  later record of its key;
* what an idempotent producer sends is there once, in its order, however often it sends it;
* what a reader was shown never changes, and is of the topic that the answer names by its id; the
  bytes of a segment are those of its checksum;
* a group's offset is what it committed last on the topic that is there;
* no verification finds anything.

When all topics are deleted nothing of them is left in the bucket, and the broker holds no more
threads and descriptors than its pools and caches may. Its log tells of no fault but the store's.
"""

import json
import random
import re
import threading
import time
from base64 import b64decode
from contextlib import closing, suppress
from pathlib import Path

import httpx
import pytest
from crc32c import crc32c

import tierlog
from cold_tier.object_store import ObjectStore
from cold_tier.open import S3Options, open_store
from record_format.batch import iter_headers
from record_format.decode import Record, decode_batch
from record_format.errors import (
    InvalidConfig,
    OffsetPastEnd,
    OffsetTrimmed,
    OutcomeUnknownError,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
)
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cut_line import CutLine
from tests.fakes.soaking import MINUTES, client_of, restored, soaked, told_seed, trouble
from tests.fakes.waiting import until
from tierlog.client.answers import TopicDescription
from tierlog.client.calls import Limits, Sequenced

pytestmark = [pytest.mark.soak, pytest.mark.s3]

NAMES, PARTITIONS, KEYS = 4, 2, 30
CONFIGS = (
    {"retention.ms": -1, "local.retention.bytes": 1 << 15},
    {"retention.ms": -1, "local.retention.bytes": 0, "offload.max.lag.ms": 1500},
    {"retention.bytes": 1 << 19, "local.retention.bytes": 1 << 15},
    {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.1, "segment.ms": 1000},
)
CHANGES = (
    {"flush.ms": 5},
    {"segment.bytes": 1 << 12},
    {"retention.ms": 3000},
    {"retention.ms": -1},
    {"cleanup.policy": "compact"},
    {"cleanup.policy": "delete"},
    {"local.retention.bytes": 0},
    {"remote.storage.enable": False},
)
FLAGS = (
    *("--retention-check-interval", "0.5", "--log-cleaner-backoff-ms", "500"),
    *("--gc-grace-ms", "6000", "--recovery-checkpoint-ms", "500", "--cache-bytes", str(16 << 20)),
)
THREADS_MAX, DESCRIPTORS_MAX = 120, 400  # pools, and chunks and connections that are kept
GONE = (UnknownTopic, OffsetTrimmed, OffsetPastEnd, OutcomeUnknownError, httpx.TransportError)
OFFSETS = "__consumer_offsets"
OF_THE_STORE = frozenset(("store-unavailable", "starting", "shutting-down"))  # and of a stop


class Life:
    """One topic, from its creation to its deletion."""

    def __init__(self, made: TopicDescription) -> None:
        self.name, self.topic_id = made.name, made.topic_id
        self.compacts = "cleanup.policy" in made.config
        self.acknowledged: list[dict[int, bytes]] = [{} for _ in range(PARTITIONS)]
        self.shown: list[dict[int, bytes]] = [{} for _ in range(PARTITIONS)]
        self.keys: list[dict[int, bytes]] = [{} for _ in range(PARTITIONS)]

    def acknowledge(
        self, partition: int, base_offset: int, records: list[tierlog.NewRecord]
    ) -> None:
        for offset, record in enumerate(records, start=base_offset):
            value = self.acknowledged[partition].setdefault(offset, record.value)
            assert value is record.value, f"{self.name}-{partition}: {offset} was given twice"
            self.keys[partition][offset] = record.key

    def see(self, partition: int, offset: int, value: bytes) -> None:
        for known in (self.shown, self.acknowledged):
            before = known[partition].get(offset, value)
            where = f"{self.name}-{partition} ({self.topic_id}) @{offset}"
            assert before == value, f"{where}: {before[:40]!r} became {value[:40]!r}"
        self.shown[partition][offset] = value

    def see_all(self, partition: int, records: list[Record]) -> None:
        for record in records:
            self.see(partition, record.offset, record.value)

    def check(self, client: tierlog.Client) -> None:
        """What was acknowledged before this is there, while more is written."""
        for partition in range(PARTITIONS):
            wanted, read, newest = set(self.acknowledged[partition]), set(), {}
            counts: dict[bytes, int] = {}
            offset = start = client.offsets(self.name, partition).log_start_offset
            end = max(wanted, default=-1) + 1
            while offset < end:
                try:
                    fetched = client.fetch(self.name, partition, offset=offset)
                except OffsetTrimmed:
                    offset = start = client.offsets(self.name, partition).log_start_offset
                    counts.clear()
                    continue
                assert fetched.topic_id == self.topic_id
                assert fetched.next_offset > offset, f"{self.name}-{partition}: ends at {offset}"
                self.see_all(partition, fetched.records)
                for record in fetched.records:
                    read.add(record.offset)
                    newest[record.key] = record.offset
                    self.count(counts, record.value)
                offset = fetched.next_offset
                end = max(end, fetched.high_watermark if self.compacts else 0)
            start = max(start, client.offsets(self.name, partition).log_start_offset)
            keys, kept = self.keys[partition], self.compacts and newest
            lost = sorted(
                offset
                for offset in wanted - read
                if offset >= start and not (kept and newest.get(keys[offset], -1) > offset)
            )
            assert not lost, f"{self.name}-{partition} ({self.topic_id}): lost {lost[:9]}"

    def count(self, counts: dict[bytes, int], value: bytes) -> None:
        """Each idempotent producer's records, of the oldest that is left on: one by one."""
        if not value.startswith(b"once "):
            return
        _, producer, number, _ = value.split(b" ", 3)
        expected = counts.get(producer, int(number))
        in_order = int(number) >= expected if self.compacts else int(number) == expected
        assert in_order, f"{self.name} ({self.topic_id}): {value[:40]!r}, not {expected}"
        counts[producer] = int(number) + 1


class Name:
    """A name of topics, one after the other, and the threads that use it."""

    def __init__(self, storm: "Storm", number: int) -> None:
        self.storm, self.name, self.life = storm, f"topic-{number}", None
        self.lives: dict[str, Life] = {}
        self.group, self.committed = f"group-{number}", 0
        self.url = f"{storm.broker.url}/v1/topics/{self.name}"
        works = (
            *(self.live, self.write, self.write_once, self.follow, self.tail),
            *(self.look, self.commit, self.meddle),
        )
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
            life.acknowledge(partition, placed.base_offset, records)

    def write_once(self, client: tierlog.Client, dice: random.Random) -> None:
        """A few requests of one producer, each as often as it takes, and now and then once more."""
        life, partition, producer = self.life, dice.randrange(PARTITIONS), client.init_producer()
        sequence = 0
        while life is not None and self.life is life and sequence < 100:
            records = [
                tierlog.NewRecord(
                    b"once %d %d " % (producer.producer_id, number) + dice.randbytes(50),
                    key=b"key-%d" % dice.randrange(KEYS),
                )
                for number in range(sequence, sequence + dice.choice((1, 5, 20)))
            ]
            for _ in range(dice.choice((1, 1, 2))):
                placed = client.produce(
                    self.name,
                    records,
                    partition=partition,
                    sequenced=Sequenced(producer, sequence),
                ).results[0]
                if self.life is life:
                    life.acknowledge(partition, placed.base_offset, records)
            sequence += len(records)

    def follow(self, client: tierlog.Client, dice: random.Random) -> None:
        life, partition = self.life, dice.randrange(PARTITIONS)
        shown = life.shown[partition] if life is not None else {}
        offset = dice.choice((max(shown, default=-1) + 1, "earliest"))
        fetched = client.fetch(self.name, partition, offset=offset, limits=Limits(wait_ms=200))
        if (life := self.lives.get(fetched.topic_id)) is not None:
            life.see_all(partition, fetched.records)

    def tail(self, _: tierlog.Client, dice: random.Random) -> None:
        """Server-sent events, for a while, or until the topic goes."""
        partition, end = dice.randrange(PARTITIONS), time.monotonic() + dice.uniform(0.1, 5)
        asked = {"offset": dice.choice(("earliest", "latest")), "encoding": "base64"}
        path = f"{self.url}/partitions/{partition}/tail"
        with httpx.stream("GET", path, params=asked, timeout=20) as answer:
            if not is_answered(answer):
                return
            life, event = self.lives.get(answer.headers["log-topic-id"]), ""
            for line in answer.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                if line.startswith("data: "):
                    told = json.loads(line.removeprefix("data: "))
                    if event:
                        allowed = OF_THE_STORE | {"unknown-topic", "offset-trimmed"}
                        assert told["code"] in allowed, told
                    elif life is not None:
                        life.see(partition, told["offset"], b64decode(told["value_base64"]))
                if time.monotonic() > end:
                    return

    def look(self, client: tierlog.Client, dice: random.Random) -> None:
        """At a segment's bytes."""
        partition = dice.randrange(PARTITIONS)
        bases = [one.base_offset for one in client.segments(self.name, partition)]
        path = f"{self.url}/partitions/{partition}/segments/{dice.choice(bases or [0])}"
        answer = httpx.get(path, timeout=20)
        if not is_answered(answer):
            return
        data, etag = answer.content, answer.headers["etag"].strip('"')
        topic_id, size_or_base, crc_or_size = etag.rsplit("-", 2)
        if int(crc_or_size, 16) != len(data):  # else it is the active one
            assert (len(data), crc32c(data)) == (int(size_or_base, 16), int(crc_or_size, 16)), etag
        life = self.lives.get(topic_id)
        for header in iter_headers(data) if life is not None else ():
            life.see_all(partition, decode_batch(data, header))

    def commit(self, client: tierlog.Client, dice: random.Random) -> None:
        self.storm.over.wait(dice.random())
        life, self.committed = self.life, self.committed + 1
        wanted = tierlog.OffsetCommit(self.name, 0, self.committed)
        client.commit_offsets(self.group, [wanted])
        with suppress(UnknownGroup):
            found = [(one.partition, one.offset) for one in client.group(self.group).offsets]
            if life is not None and self.life is life:
                assert found == [(0, self.committed)], (life.topic_id, found, self.committed)
            return
        assert life is None or self.life is not life, f"{self.group} is lost ({life.topic_id})"

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
            self.alter(client, dice.choice(CHANGES))
        else:
            client.offset_for_timestamp(self.name, partition, int(time.time() * 1000) - 5000)

    def alter(self, client: tierlog.Client, change: dict[str, object]) -> None:
        if change.get("cleanup.policy") == "compact":
            for life in list(self.lives.values()):  # it may be any of them
                life.compacts = True
        with suppress(InvalidConfig):  # what is only in the bucket is not compacted
            client.alter_topic(self.name, config=change)


def is_answered(answer: httpx.Response) -> bool:
    """Else it was refused, as it may be."""
    if answer.status_code not in (200, 404, 410, 416):
        answer.read()
        assert answer.json()["code"] in OF_THE_STORE, answer.text
    return answer.status_code == 200


def unplanned(log: str) -> list[str]:
    """The lines of a broker's log that tell of a fault, but for the store's."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    errors = [one for one in lines if one["level"] in ("error", "critical")]
    return [str(one) for one in errors if one.get("code") not in OF_THE_STORE]


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
                    client.alter_topic(name.name, config={"remote.storage.enable": None})
                    assert client.offload(name.name, wait_ms=60_000).remaining_segments == 0
        registry = tmp_path / "data/tierlog/topics.json"
        until(lambda: not re.search(rb'"(deleted|dirty)":true', registry.read_bytes()))
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
            until(lambda: all(OFFSETS in one.key for one in store.list("topics/", limit=9)))
        process = Path(f"/proc/{broker.process.pid}")
        if process.exists():
            assert len(list((process / "task").iterdir())) < THREADS_MAX
            assert len(list((process / "fd").iterdir())) < DESCRIPTORS_MAX
        assert broker.stop() == 0
        logged = (tmp_path / "broker.log").read_text()
        assert "Traceback" not in logged
        assert not unplanned(logged)
