"""Races between the threads of one broker, without HTTP: the interpreter is set to switch threads a
million times a second.

Topics of a few names are created, deleted and created again while they are written, read, searched,
trimmed, offloaded, altered and verified, and groups commit offsets; the broker is closed and opened
again meanwhile; the store fails calls and loses responses. `PartitionLife` has the invariants; and
nothing is logged as an error, and only refusals are raised.
"""

import random
import sys
import threading
import time
from contextlib import closing, contextmanager, suppress
from typing import NamedTuple

import pytest
from structlog.testing import capture_logs

from tests.fakes.at_once import at_once
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore, ShortRead
from tests.fakes.partition_life import PartitionLife, idempotent_value
from tests.fakes.records import iter_records
from tests.fakes.soak import MINUTES, soak_seed
from tierlog.broker.broker import Broker
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.partition.partition import Partition
from tierlog.broker.partition.segment_listing import iter_segments, open_segment, slices_of
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.object_store.open import open_store
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import Record
from tierlog.record_format.encode import encode_batch
from tierlog.record_format.errors import (
    InvalidConfig,
    LogOfflineError,
    ManifestConflict,
    OffsetOutOfRange,
    OutcomeUnknownError,
    ShuttingDown,
    StoreUnavailable,
    Throttled,
    TopicExists,
    UnknownGroup,
    UnknownSegment,
    UnknownTopic,
)
from tierlog.record_format.produced import ProduceLimits, check_produced
from tierlog.repair.verify import verify_topic

pytestmark = pytest.mark.soak

NAMES, KEYS = 3, 20
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.01, "segment.ms": 100}
CONFIGS = (
    {"retention.ms": -1, "local.retention.bytes": 2048},
    {"retention.ms": -1, "local.retention.bytes": 0, "offload.max.lag.ms": 300},
    {"retention.bytes": 40_000, "local.retention.bytes": 4096},
    {"retention.bytes": 10_000, "remote.storage.enable": False},
    COMPACTED,
    {**COMPACTED, "remote.storage.enable": False},
)
CHANGES = (
    {"segment.bytes": 1024},
    {"segment.bytes": 4096},
    {"retention.ms": 500},
    {"retention.ms": -1},
    COMPACTED,
    {"cleanup.policy": "delete"},
    {"local.retention.bytes": 0},
    {"remote.storage.enable": False},
    {"remote.storage.enable": True},
)
FAULTS = (
    *[("put", FailsBefore()), ("put", FailsAfter()), ("put_file", FailsAfter(StoreUnavailable))],
    *[(call, FailsBefore()) for call in ("put_file", "get", "list", "head", "delete")],
    ("get_range", ShortRead(10)),
)
REFUSALS = (
    *(UnknownTopic, UnknownSegment, OffsetOutOfRange, TopicExists, InvalidConfig, Throttled),
    *(StoreUnavailable, OutcomeUnknownError, ManifestConflict, ShuttingDown),
)


class Sent(NamedTuple):
    key: bytes
    value: bytes


class Page(NamedTuple):
    records: list[Record]
    next_offset: int
    high_watermark: int


def read(partition: Partition, offset: int, *, max_bytes: int = 8192) -> Page:
    fetched = at_once(partition.read, offset, max_bytes=max_bytes)
    if fetched is None:
        fetched = partition.read(offset, max_bytes=max_bytes)
    with closing(fetched):
        data = b"".join(piece.read() for piece in fetched.slices)
    records = list(iter_records(data, from_offset=offset))
    return Page(records, fetched.next_offset, fetched.high_watermark)


def append(partition: Partition, sent: list[Sent], acks: Acks, **producer: int) -> int:
    """Append; return the base offset."""
    now_ms = int(time.time() * 1000)
    batch = encode_batch(
        [record.value for record in sent],
        keys=[record.key for record in sent],
        timestamps=[now_ms] * len(sent),
        **producer,
    )
    limits = ProduceLimits(max_message_bytes=1 << 20, now_ms=now_ms)
    produced = check_produced(bytearray(batch), limits)
    return partition.append(produced, acks=acks).result(60).base_offset


class Workload:
    """`lives`: by topic id. `closing`: the broker is being closed, under load unless `paused`."""

    def __init__(self, root, seed: int) -> None:
        self.root, self.seed = root, seed
        self.over, self.failures = threading.Event(), []
        self.lives: dict[str, PartitionLife] = {}
        self.turn, self.working, self.paused = threading.Condition(), 0, False
        self.closing = False
        self.open()
        loops = (
            *(self.live, self.write, self.write_once, self.follow, self.read_segment),
            *(self.commit, self.administrate),
        )
        self.threads = [
            threading.Thread(target=self.run_loop, args=(work, number), daemon=True)
            for work in loops
            for number in range(NAMES)
        ]
        for thread in self.threads:
            thread.start()

    def open(self) -> None:
        self.store = FaultyObjectStore(open_store(f"file://{self.root / 'bucket'}"))
        settings = BrokerSettings(
            data_dir=self.root / "data",
            cache_bytes=8 << 20,
            disk_reserve_bytes=0,
            retention_check_interval_ms=50,
            log_cleaner_backoff_ms=50,
            recovery_checkpoint_ms=50,
            gc_grace_ms=2000,
        )
        self.broker = Broker.open(settings, store=self.store)
        assert not list(self.broker.damaged_partitions())

    def close(self, *, under_load: bool) -> None:
        """`under_load`: while the threads keep working."""
        with self.turn:
            self.paused = not under_load
        self.closing = True
        self.broker.close()
        with self.turn:
            self.paused = True
            assert self.turn.wait_for(lambda: not self.working, 60), "a thread does not pause"
        self.closing = False

    def run_loop(self, work, number: int) -> None:
        dice = random.Random(f"{self.seed}-{number}-{work.__name__}")
        while not self.over.is_set():
            with self.one_turn(), suppress(*REFUSALS):
                try:
                    work(number, dice)
                except LogOfflineError:
                    if not self.closing:  # its log was closed
                        raise

    @contextmanager
    def one_turn(self):
        with self.turn:
            self.turn.wait_for(lambda: not self.paused)
            self.working += 1
        try:
            yield
        except BaseException as failure:
            self.failures.append(failure)
            self.over.set()
        finally:
            with self.turn:
                self.working -= 1
                self.turn.notify_all()

    def partition(self, number: int) -> Partition:
        return self.broker.partition(f"t{number}", 0)

    def life_of(self, partition: Partition) -> PartitionLife:
        """Creates it for a topic that `live` has not recorded yet."""
        name = f"{partition} ({partition.topic_id})"
        compacts = partition.config.compacts
        life = PartitionLife(name, compacts=compacts)
        return self.lives.setdefault(partition.topic_id, life)

    # --- what the threads do ----------------------------------------------------------------------

    def live(self, number: int, dice: random.Random) -> None:
        sizes = {"segment.bytes": dice.choice((1024, 4096)), "file.delete.delay.ms": 0}
        with suppress(TopicExists):
            self.broker.create_topic(f"t{number}", config={**sizes, **dice.choice(CONFIGS)})
        self.over.wait(dice.choice((0.02, 0.1, 0.5, 2)))
        if dice.random() < 0.6:
            self.check(number)
        if dice.random() < 0.8 and not self.over.is_set():
            self.broker.delete_topic(f"t{number}")

    def check(self, number: int) -> None:
        partition = self.partition(number)
        self.life_of(partition).check(
            lambda: partition.offsets().log_start_offset, lambda offset: read(partition, offset)
        )

    def write(self, number: int, dice: random.Random) -> None:
        partition = self.partition(number)
        sent = [
            Sent(b"key-%d" % dice.randrange(KEYS), dice.randbytes(dice.randrange(8, 200)))
            for _ in range(dice.choice((1, 3, 10)))
        ]
        base_offset = self.append(partition, sent, Acks.ALL)
        self.life_of(partition).acknowledge(base_offset, sent)

    def write_once(self, number: int, dice: random.Random) -> None:
        partition, producer_id = self.partition(number), dice.randrange(2**33, 2**50)
        for sequence in range(10):
            sent = [
                Sent(
                    b"key-%d" % dice.randrange(KEYS),
                    idempotent_value(producer_id, sequence, b"x" * 20),
                )
            ]
            offsets = {
                self.append(
                    partition,
                    sent,
                    dice.choice((Acks.ALL, Acks.LEADER)),
                    producer_id=producer_id,
                    producer_epoch=0,
                    base_sequence=sequence,
                )
                for _ in range(dice.choice((1, 2, 3)))
            }
            assert len(offsets) == 1, (producer_id, sequence, offsets)

    def append(self, partition: Partition, *what: object, **producer: int) -> int:
        try:
            return append(partition, *what, **producer)
        except LogOfflineError:
            partition.check_leadership()  # its topic was deleted meanwhile
            raise

    def follow(self, number: int, dice: random.Random) -> None:
        partition, life = self.partition(number), self.life_of(self.partition(number))
        now, news = partition.offsets(), max(life.seen, default=-1) + 1
        offset = dice.choice((news, now.log_start_offset, now.local_log_start_offset))
        life.see_all(read(partition, offset, max_bytes=dice.choice((1, 4096, 1 << 16))).records)

    def read_segment(self, number: int, dice: random.Random) -> None:
        partition = self.partition(number)
        partition.offset_for_timestamp(int(time.time() * 1000) - dice.randrange(3000))
        bases = [segment.base_offset for segment in iter_segments(partition)] or [0]
        base_offset = dice.choice(bases)
        found = at_once(open_segment, partition, base_offset) or open_segment(
            partition, base_offset
        )
        data = b""
        with closing(found):
            for piece in slices_of(partition, found, start=0, end=found.size_bytes):
                with closing(piece):
                    data += piece.read()
        assert len(data) == found.size_bytes
        if found.etag is not None:
            assert found.etag.endswith(f'-{crc32c_of(data):08x}"')
        self.life_of(partition).see_all(iter_records(data))

    def commit(self, number: int, dice: random.Random) -> None:
        self.over.wait(dice.random() / 10)
        partition, groups, group = self.partition(number), self.broker.groups, f"g{number}"
        wanted = [(f"t{number}", 0, dice.randrange(1000))]
        groups.commit_offsets(group, [NewOffset(*commit) for commit in wanted])
        with suppress(UnknownGroup):
            found = [(row.topic, row.partition, row.offset) for row in groups.group(group)]
            if found != wanted:  # UnknownTopic while it is being deleted
                assert self.partition(number) is not partition, (str(partition), found, wanted)
            return
        assert partition.is_gone, f"{partition}: the offset of {group} is lost"

    def administrate(self, number: int, dice: random.Random) -> None:
        name, broker, kind = f"t{number}", self.broker, dice.randrange(7)
        self.over.wait(dice.random() / 50)
        if kind == 0:
            now = self.partition(number).offsets()
            to = dice.randint(now.log_start_offset, max(now.high_watermark, now.log_start_offset))
            broker.trim(name, 0, to)
        elif kind == 1:
            broker.offload(name, wait_ms=dice.choice((None, 200)))
        elif kind == 2:
            report = verify_topic(broker, name, deep=dice.random() < 0.5)
            assert report.ok, report
        elif kind == 3:
            self.alter(number, dice.choice(CHANGES))
        elif kind == 4:
            broker.storage_report()
            broker.readiness()
        elif kind == 5:
            broker.collect_garbage(name, apply=dice.random() < 0.5)
        else:
            broker.background.janitor.relieve_disk(1000)

    def alter(self, number: int, change: dict[str, object]) -> None:
        for life in list(self.lives.values()) if change is COMPACTED else ():
            life.compacts = True
        self.broker.alter_topic(f"t{number}", config=change)
        if change is COMPACTED:  # a topic not recorded yet
            self.life_of(self.partition(number)).compacts = True


def fail_store_and_close(workload: Workload, dice: random.Random) -> None:
    for _ in range(dice.randrange(10)):
        workload.over.wait(dice.uniform(0.02, 0.5))
        workload.store.fail(*dice.choice(FAULTS), times=dice.choice((1, 1, 3)))
    workload.close(under_load=dice.random() < 0.7)


@pytest.fixture
def frequent_thread_switches():
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval_s)


def test_a_broker_keeps_its_invariants_under_concurrent_calls(tmp_path, frequent_thread_switches):
    seed = soak_seed()
    dice, end = random.Random(seed), time.monotonic() + MINUTES * 60
    with capture_logs() as lines:
        workload = Workload(tmp_path, seed)
        while time.monotonic() < end and not workload.failures:
            fail_store_and_close(workload, dice)
            workload.open()
            assert workload.broker.folder.was_clean, "after a stop"
            with workload.turn:
                workload.paused = False
                workload.turn.notify_all()
        workload.over.set()
        for thread in workload.threads:
            thread.join(60)
            assert not thread.is_alive()
        assert not workload.failures, workload.failures
        workload.store.heal()
        for topic in workload.broker.list_topics():
            workload.check(int(topic.name[1:]))
            assert verify_topic(workload.broker, topic.name, deep=True).ok
        workload.broker.close()
    errors = [line for line in lines if line["log_level"] in ("error", "critical")]
    assert not errors, errors
    failures = [line for line in lines if line["event"] == "compaction failed, will retry"]
    assert not failures, failures  # compaction does not depend on the store
    print(f"{len(workload.lives)} topics")
