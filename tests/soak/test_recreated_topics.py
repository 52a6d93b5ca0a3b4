"""Topics are created, deleted and created again with the same name, while they are written, read,
followed, trimmed, offloaded, verified and altered, the broker is killed, frozen and stopped, and
the connection to the store is cut.

Invariants, during the run and in a folder restored from the bucket at the end:

* an acknowledged record stays at its offset, unless it is below the log start or was replaced in
  compaction by a later record of its key;
* an idempotent producer's records exist once and in order, however often they are sent;
* records once read never change, and belong to the topic whose id the response has; the bytes of a
  segment match its checksum;
* a group's offset is the last that it committed on the existing topic;
* verification finds no problem.

Once all topics are deleted the bucket has none of their objects, and the broker has no more threads
and descriptors than its pools and caches allow. Its log has no errors but those of the store.
"""

import json
import random
import re
import threading
import time
from base64 import b64decode
from contextlib import closing, suppress
from pathlib import Path

import httpx2
import pytest

import tierlog
from tests.fakes.broker_process import BrokerProcess
from tests.fakes.cuttable_proxy import CuttableProxy
from tests.fakes.partition_life import PartitionLife, idempotent_value
from tests.fakes.soak import (
    MINUTES,
    cause_fault,
    client_of,
    restored_broker,
    soak_broker,
    soak_seed,
)
from tests.fakes.waiting import until
from tierlog.client.calls import Sequenced
from tierlog.client.responses import FetchedRecords, TopicDescription
from tierlog.client.wire import Limits
from tierlog.object_store.open import open_store
from tierlog.object_store.s3_connection import S3Options
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import iter_headers
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import decode_batch
from tierlog.record_format.errors import (
    InvalidConfig,
    OffsetPastEnd,
    OffsetTrimmed,
    OutcomeUnknownError,
    TopicExists,
    UnknownGroup,
    UnknownTopic,
)

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
    {},  # adds a partition
)
FLAGS = (
    *("--retention-check-interval", "0.5", "--log-cleaner-backoff-ms", "500"),
    *("--gc-grace-ms", "6000", "--recovery-checkpoint-ms", "500", "--cache-bytes", str(16 << 20)),
)
THREADS_MAX, DESCRIPTORS_MAX = 200, 400  # pools, cached chunks, kept connections
GONE = (UnknownTopic, OffsetTrimmed, OffsetPastEnd, OutcomeUnknownError, httpx2.TransportError)
OVERVIEW_PATHS = (
    *("/metrics", "/readyz", "/v1/storage", "/v1/topics", "/v1/topics/{}", "/v1/groups"),
    *("/console/overview", "/console/summary", "/console/topics", "/console/groups"),
    *("/console/store", "/console/topics/{}", "/console/topics/{}/partitions/{}/records"),
    *("/console/topics/{}/partitions/{}/segments", "/console/topics/{}/partitions/{}/manifest"),
    "/v1/topics/{}/partitions/{}/manifest",
)
OFFSETS = "__consumer_offsets"
STORE_ERRORS = frozenset(("store-unavailable", "starting", "shutting-down"))  # and of a shutdown


class Life:
    """One topic, from its creation to its deletion."""

    def __init__(self, topic: TopicDescription) -> None:
        self.name, self.topic_id = topic.name, topic.topic_id
        compacts = "cleanup.policy" in topic.config
        self.partitions = [
            PartitionLife(f"{topic.name}-{number} ({topic.topic_id})", compacts=compacts)
            for number in range(PARTITIONS)
        ]

    def may_compact(self) -> None:
        for partition in self.partitions:
            partition.compacts = True

    def check(self, client: tierlog.Client) -> None:
        for number, partition in enumerate(self.partitions):

            def log_start(number: int = number) -> int:
                return client.offsets(self.name, number).log_start_offset

            def read(offset: int, number: int = number) -> FetchedRecords:
                fetched = client.fetch(self.name, number, offset=offset)
                assert fetched.topic_id == self.topic_id
                return fetched

            partition.check(log_start, read)


class Name:
    """A topic name, the topics that have it one after another, and the threads that use it."""

    def __init__(self, workload: "Workload", number: int) -> None:
        self.workload, self.name = workload, f"topic-{number}"
        self.life: Life | None = None
        self.compactions = 0  # alterations to compaction; odd during one
        self.lives: dict[str, Life] = {}
        self.group, self.committed = f"group-{number}", 0
        self.url = f"{workload.broker.url}/v1/topics/{self.name}"
        loops = (
            *(self.live, self.write, self.write_once, self.follow, self.tail),
            *(self.read_segment, self.read_overviews, self.commit, self.administrate),
        )
        self.threads = [
            workload.thread(work, random.Random(f"{workload.seed}-{number}-{work.__name__}"))
            for work in loops
        ]

    def live(self, client: tierlog.Client, dice: random.Random) -> None:
        config = {"segment.bytes": dice.choice((1 << 14, 1 << 17)), **dice.choice(CONFIGS)}
        compactions = self.compactions
        try:
            made = client.create_topic(self.name, partitions=PARTITIONS, config=config)
        except (TopicExists, OutcomeUnknownError):  # nobody else creates it: a response was lost
            made = client.describe_topic(self.name)
        self.life = self.lives[made.topic_id] = Life(made)
        if compactions % 2 or compactions != self.compactions:
            self.life.may_compact()
        self.workload.over.wait(dice.choice((0.1, 1, 4, 12)))
        if dice.random() < 0.5:
            self.life.check(client)
        if not self.workload.over.is_set():
            self.life = None
            client.delete_topic(self.name)

    def write(self, client: tierlog.Client, dice: random.Random) -> None:
        life, partition = self.life, dice.randrange(PARTITIONS)
        values = [dice.randbytes(dice.randrange(800)) for _ in range(dice.choice((1, 10, 50)))]
        keys = [b"key-%d" % dice.randrange(KEYS) for _ in values]
        records = [tierlog.NewRecord(v, key=k) for v, k in zip(values, keys, strict=True)]
        placed = client.produce(self.name, records, partition=partition).results[0]
        if life is not None and self.life is life:  # otherwise it may belong to the next topic
            life.partitions[partition].acknowledge(placed.base_offset, records)

    def write_once(self, client: tierlog.Client, dice: random.Random) -> None:
        """Send requests of one idempotent producer, sometimes twice."""
        life, partition, producer = self.life, dice.randrange(PARTITIONS), client.init_producer()
        sequence = 0
        while life is not None and self.life is life and sequence < 100:
            records = [
                tierlog.NewRecord(
                    idempotent_value(producer.producer_id, number, dice.randbytes(50)),
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
                    life.partitions[partition].acknowledge(placed.base_offset, records)
            sequence += len(records)

    def follow(self, client: tierlog.Client, dice: random.Random) -> None:
        life, partition = self.life, dice.randrange(PARTITIONS)
        shown = life.partitions[partition].seen if life is not None else {}
        offset = dice.choice((max(shown, default=-1) + 1, "earliest"))
        fetched = client.fetch(self.name, partition, offset=offset, limits=Limits(wait_ms=200))
        if (life := self.lives.get(fetched.topic_id)) is not None:
            life.partitions[partition].see_all(fetched.records)

    def tail(self, _: tierlog.Client, dice: random.Random) -> None:
        """Read server-sent events for a while, or until the topic is deleted."""
        partition, end = dice.randrange(PARTITIONS), time.monotonic() + dice.uniform(0.1, 5)
        params = {"offset": dice.choice(("earliest", "latest")), "encoding": "base64"}
        path = f"{self.url}/partitions/{partition}/tail"
        with httpx2.stream("GET", path, params=params, timeout=20) as response:
            if not succeeded(response):
                return
            life, event = self.lives.get(response.headers["log-topic-id"]), ""
            for line in response.iter_lines():
                if line.startswith("event: "):
                    event = line.removeprefix("event: ")
                if line.startswith("data: "):
                    data = json.loads(line.removeprefix("data: "))
                    if event:
                        allowed = STORE_ERRORS | {"unknown-topic", "offset-trimmed"}
                        assert data["code"] in allowed, data
                    elif life is not None:
                        value = b64decode(data["value_base64"])
                        life.partitions[partition].see(data["offset"], value)
                if time.monotonic() > end:
                    return

    def read_segment(self, client: tierlog.Client, dice: random.Random) -> None:
        """Download a segment, and verify its checksum."""
        partition = dice.randrange(PARTITIONS)
        bases = [segment.base_offset for segment in client.segments(self.name, partition)]
        path = f"{self.url}/partitions/{partition}/segments/{dice.choice(bases or [0])}"
        response = httpx2.get(path, timeout=20)
        if not succeeded(response):
            return
        data, etag = response.content, response.headers["etag"].strip('"')
        topic_id, size_or_base, crc_or_size = etag.rsplit("-", 2)
        if int(crc_or_size, 16) != len(data):  # otherwise it is the active segment
            assert (len(data), crc32c_of(data)) == (int(size_or_base, 16), int(crc_or_size, 16)), (
                etag
            )
        life = self.lives.get(topic_id)
        for header in iter_headers(data) if life is not None else ():
            life.partitions[partition].see_all(decode_batch(data, header))

    def read_overviews(self, client: tierlog.Client, dice: random.Random) -> None:
        """Read pages about all topics, or about everything of one topic."""
        self.workload.over.wait(dice.random())
        if dice.random() < 0.3:
            wanted = [
                {"topic": f"topic-{number}", "partition": partition, "offset": "latest"}
                for number in range(NAMES)
                for partition in range(PARTITIONS)
            ]
            body = {"partitions": wanted, "wait_ms": 500}
            response = httpx2.post(f"{self.workload.broker.url}/v1/fetch", json=body, timeout=20)
            found = response.json()["partitions"] if succeeded(response) else []
            refusals = {each["error"]["code"] for each in found if "error" in each}
            assert refusals <= STORE_ERRORS | {"unknown-topic", "offset-trimmed"}, refusals
            return
        path = dice.choice(OVERVIEW_PATHS).format(self.name, dice.randrange(PARTITIONS))
        response = httpx2.get(f"{self.workload.broker.url}{path}", timeout=20)
        assert response.status_code in (200, 404, 503), response.text

    def commit(self, client: tierlog.Client, dice: random.Random) -> None:
        self.workload.over.wait(dice.random())
        life, self.committed = self.life, self.committed + 1
        wanted = tierlog.OffsetCommit(self.name, 0, self.committed)
        client.commit_offsets(self.group, [wanted])
        with suppress(UnknownGroup):
            found = [(row.partition, row.offset) for row in client.group(self.group).offsets]
            if life is not None and self.life is life:
                assert found == [(0, self.committed)], (life.topic_id, found, self.committed)
            return
        assert life is None or self.life is not life, f"{self.group} is lost ({life.topic_id})"

    def administrate(self, client: tierlog.Client, dice: random.Random) -> None:
        self.workload.over.wait(dice.random() / 2)
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
        compacts = change.get("cleanup.policy") == "compact"
        self.compactions += compacts
        for life in list(self.lives.values()) if compacts else ():  # it may be any of them
            life.may_compact()
        try:
            client.alter_topic(self.name, config=change or None, partitions=None if change else 3)
        except InvalidConfig:
            pass  # records only in the bucket are not compacted
        finally:
            self.compactions += compacts


def succeeded(response: httpx2.Response) -> bool:
    """False if it was refused with an allowed error."""
    if response.status_code not in (200, 404, 410, 416):
        response.read()
        assert response.json()["code"] in STORE_ERRORS, response.text
    return response.status_code == 200


def unexpected_errors(log: str) -> list[str]:
    """The errors in a broker's log other than the store's."""
    lines = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    errors = [line for line in lines if line["level"] in ("error", "critical")]
    return [str(line) for line in errors if line.get("code") not in STORE_ERRORS]


class Workload:
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
                assert not thread.is_alive(), f"{name.name}: a thread did not end"
        assert not self.failures, self.failures

    def check(self, client: tierlog.Client) -> None:
        for name in self.names:
            if name.life is not None:
                name.life.check(client)
                assert client.verify(name.name, deep=True)["ok"]


def store_of(broker: BrokerProcess, proxy: CuttableProxy) -> ObjectStore:
    options = S3Options(
        endpoint=proxy.url,
        region=broker.env["AWS_DEFAULT_REGION"],
        access_key_id=broker.env["AWS_ACCESS_KEY_ID"],
        secret_access_key=broker.env["AWS_SECRET_ACCESS_KEY"],
    )
    return open_store(broker.store, options)


def test_topics_recreated_under_faults_lose_no_record(tmp_path):
    seed = soak_seed()
    dice = random.Random(seed)
    with soak_broker(tmp_path, *FLAGS) as (broker, proxy):
        workload = Workload(broker, seed)
        end = time.monotonic() + MINUTES * 60
        while time.monotonic() < end and not workload.failures:
            time.sleep(dice.uniform(1, 10))
            done = cause_fault(broker, proxy, dice)
            lives = sum(len(name.lives) for name in workload.names)
            print(f"{end - time.monotonic():6.0f} s left: {done}; {lives} topics", flush=True)
        workload.finish()
        with client_of(broker) as client:
            workload.check(client)
            for name in workload.names:
                if name.life is not None:
                    client.alter_topic(name.name, config={"remote.storage.enable": None})
                    assert client.offload(name.name, wait_ms=60_000).remaining_segments == 0
        registry = tmp_path / "data/tierlog/topics.json"
        until(
            lambda: not re.search(rb'"(deleted|dirty)":true', registry.read_bytes()),
            patience_s=240,  # on a busy machine a topic takes a second or more, and there are many
        )
        assert broker.stop() == 0
        with restored_broker(broker) as second, client_of(second) as client:
            workload.check(client)
            assert second.stop() == 0
        broker.flags = ("--take-over", *broker.flags)  # the second has claimed the partitions
        broker.start()
        with client_of(broker) as client:
            for topic in client.list_topics():
                client.delete_topic(topic.name)
        with closing(store_of(broker, proxy)) as store:
            until(lambda: all(OFFSETS in found.key for found in store.list("topics/", limit=9)))
        process = Path(f"/proc/{broker.process.pid}")
        if process.exists():
            assert len(list((process / "task").iterdir())) < THREADS_MAX
            assert len(list((process / "fd").iterdir())) < DESCRIPTORS_MAX
        assert broker.stop() == 0
        logged = (tmp_path / "broker.log").read_text()
        assert "Traceback" not in logged
        assert not unexpected_errors(logged)
