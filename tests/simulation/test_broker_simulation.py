"""Seeded steps on a whole broker: topics of every policy, created, altered, trimmed, deleted and
created again with the same names; groups; transactions of a log written by Kafka; small segments
of the bucket that are merged; a clock that is set back.

At any call that changes the disk, the process dies, the power fails, or the disk is full or fails.
The store fails calls, loses responses, and returns wrong bytes. Files of which there is another
copy are damaged. The folder is restored from the bucket, with or without the old one's tail.

After each step every topic agrees with its `TopicModel`, and groups have their committed offsets.
At the end `verify --deep` finds no problem, and neither does a restore from the bucket alone.
The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

import errno
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random

import pytest
from msgspec.structs import replace

from tests.fakes.broker_harness import run_copier, run_janitor
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import (
    FailsAfter,
    FailsBefore,
    FaultyObjectStore,
    ShortRead,
    SilentShortRead,
    WrongBytes,
    WrongRange,
)
from tests.simulation.failing_disk import ALLOCATING, CALLS, SYNCS, Crash, FailingDisk
from tests.simulation.kafka_log import encoded, write_kafka_log
from tests.simulation.steps import run, seeds
from tests.simulation.topic_model import Line, TopicModel, Wrong, read
from tierlog.broker.background import janitor, merger
from tierlog.broker.background.merger import Merged
from tierlog.broker.broker import Broker
from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.bucket.cold_reads import ColdReads, uses_bucket
from tierlog.broker.group_coordinator.groups import NewOffset
from tierlog.broker.settings import BrokerSettings
from tierlog.cold_tier import merged_segment
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest import transitions
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import (
    CorruptDataError,
    DiskFull,
    InvalidConfig,
    MissingObject,
    OutcomeUnknownError,
    StoreUnavailable,
    TierlogError,
    UnknownGroup,
)
from tierlog.record_format.produced import ProduceLimits, check_produced
from tierlog.repair.repair import repair_topic
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

STEPS = 60
GAP = 10_000
NAMES = ("a", "b", "kafkas")
GROUPS = ("g", "h")
NEVER_MS = 86_400_000
SMALL = {
    "segment.bytes": 1024,
    "file.delete.delay.ms": 0,
    "offload.max.lag.ms": -1,
    "flush.ms": NEVER_MS,
}
COMPACTED = {**SMALL, "cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.0}
MERGED = {
    **SMALL,
    "segment.bytes": 16384,
    "retention.ms": -1,
    "local.retention.ms": 0,
    "cold.merge.min.bytes": 8192,
}
CONFIGS = [
    MERGED,
    {**MERGED, "retention.bytes": 40_000},
    {**SMALL, "retention.ms": -1, "local.retention.bytes": 2048},
    {**SMALL, "retention.ms": 60_000, "local.retention.ms": 5000},
    {**SMALL, "retention.bytes": 6000, "index.interval.bytes": 0},
    {**SMALL, "remote.storage.enable": False, "retention.ms": 60_000},
    {**COMPACTED, "delete.retention.ms": 0},
    {**COMPACTED, "delete.retention.ms": 5000, "min.compaction.lag.ms": 1000},
    {**COMPACTED, "delete.retention.ms": 0, "remote.storage.enable": False},
    {**COMPACTED, "cleanup.policy": "compact,delete", "retention.ms": 60_000},
]
ALTERATIONS = [
    {"segment.bytes": 1024},
    {"segment.bytes": 4096},
    {"segment.index.bytes": 48},
    {"compression.type": "lz4"},
    {"local.retention.bytes": 1024},
    {"local.retention.bytes": None, "local.retention.ms": None},
    {"retention.ms": 30_000},
    {"retention.ms": -1, "retention.bytes": -1},
    {"remote.storage.enable": False},
    {"remote.storage.enable": True},
    {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": 0.0},
    {"cleanup.policy": "delete"},
    {"cleanup.policy": "compact,delete", "min.cleanable.dirty.ratio": 0.0},
]
STORE_FAULTS = [
    *[("put", FailsBefore()), ("put", FailsAfter())] * 2,
    ("put_file", FailsAfter(StoreUnavailable)),
    ("put_file", ShortRead(100)),
    ("put_file", WrongBytes(40)),
    ("get_range", ShortRead(10)),
    ("get_range", SilentShortRead(10)),
    ("get_range", WrongRange()),
    ("get_range", WrongBytes()),
    *[(call, FailsBefore()) for call in ("put_file", "get", "get_range", "list", "head", "delete")],
]


@dataclass
class Producer:
    """`last`: its last acknowledged request. `is_unsure`: the next one got no response."""

    producer_id: int
    sequence: int = 0
    last: tuple[bytearray, int] | None = None
    is_unsure: bool = False


@dataclass
class Known:
    """What is known about a live topic, and its producers."""

    topic_id: str
    model: TopicModel
    producers: list[Producer] = field(default_factory=list)


class World:
    """`topics`: by name. `unsure`: names of topics that an interrupted step may have created,
    altered or deleted. `committed`: by group and topic, the offsets it may have.
    """

    before_store_call = staticmethod(lambda call, key: None)
    plan_store_faults = staticmethod(lambda store: None)

    def __init__(self, seed: int, root, disk: FailingDisk) -> None:
        self.random, self.root, self.disk = Random(seed), root, disk
        self.now_ms, self.lives, self.sent, self.producers = 10**12, 0, 0, 0
        self.topics: dict[str, Known] = {}
        self.unsure: dict[str, list[LogConfig]] = {}
        self.committed: dict[tuple[str, str], set[int | None]] = {}
        self.folder = self._new_folder()
        self.bucket = f"file://{root / 'bucket'}"
        model = write_kafka_log(self.folder / "kafkas-0", self.new_lines, self.random, self.now_ms)
        self.open()
        self._add_known("kafkas", model)
        self.broker.alter_topic("kafkas", config={"flush.ms": NEVER_MS})
        config, log = self.broker.topic("kafkas").config, self.broker.partition("kafkas", 0)._log
        model.configured(config, end_offset=log.log_end_offset)
        self.create()

    def _new_folder(self):
        self.lives += 1
        return self.root / f"data-{self.lives}"

    def open(self, *, store=None, folder=None) -> Broker:
        store = FaultyObjectStore(open_store(store or self.bucket))
        if folder is None:
            store.before_call = self.before_store_call
            self.plan_store_faults(store)
        settings = BrokerSettings(
            data_dir=folder or self.folder,
            cache_bytes=16 << 20,
            cache_chunk_bytes=1024,
            disk_reserve_bytes=0,
            restore_offset_gap=GAP,
            log_cleaner_dedupe_buffer_bytes=1 << 20,
            offload_concurrency=1,  # so that a seed is reproducible
            append_threads=1,
        )
        broker = Broker.open_idle(settings, store=store, clock=lambda: self.now_ms)
        if folder is None:
            self.store, self.broker = store, broker
        return broker

    # --- topics -----------------------------------------------------------------------------------

    def new_lines(self, count: int) -> tuple[list[int], list[Line]]:
        random = self.random
        numbers = list(range(self.sent, self.sent + count))
        self.sent += count
        return numbers, [
            Line(
                b"k%d" % random.randrange(8),
                None if random.random() < 0.2 else random.randbytes(random.choice((10, 10, 200))),
                self.now_ms - random.randrange(500),
            )
            for _ in numbers
        ]

    def _add_known(self, name: str, model: TopicModel | None = None) -> None:
        topic = self.broker.topic(name)
        model = model or TopicModel(topic.config)
        self.topics[name] = Known(topic.record.topic_id, model)

    def _forget(self, name: str) -> None:
        del self.topics[name]
        self.committed = {key: may for key, may in self.committed.items() if key[1] != name}

    def _pick_topic(self):
        """The name of an existing topic, and its partition."""
        if not self.topics:
            self.create()
        name = self.random.choice(sorted(self.topics))
        return name, self.topics[name], self.broker.partition(name, 0)

    def create(self) -> None:
        name = self.random.choice(NAMES)
        if name in self.topics:
            return
        config = self.random.choice(CONFIGS)
        self.unsure[name] = []
        self.broker.create_topic(name, config=config)
        del self.unsure[name]
        self._add_known(name)

    def delete(self) -> None:
        name, _, _ = self._pick_topic()
        self.unsure[name] = []
        self.broker.delete_topic(name)
        del self.unsure[name]
        self._forget(name)

    def alter(self) -> None:
        name, known, partition = self._pick_topic()
        change = self.random.choice(ALTERATIONS)
        with suppress(InvalidConfig):
            before = self.broker.topic(name).config
            self.unsure[name] = [before.replace(change)]
            self.broker.alter_topic(name, config=change)
            known.model.configured(
                self.broker.topic(name).config, end_offset=partition.log_end_offset
            )
        self.unsure.pop(name, None)

    # --- records ----------------------------------------------------------------------------------

    def produce(self) -> None:
        _, known, partition = self._pick_topic()
        for _ in range(self.random.randint(1, 6)):
            self._append(known, partition)

    def _append(self, known: Known, partition) -> None:
        numbers, lines = self.new_lines(self.random.randint(1, 4))
        model, fields, producer = known.model, {}, None
        if self.random.random() < 0.7:
            producer = self._producer(known)
            producer.is_unsure = True
            fields = {"producer_id": producer.producer_id, "producer_epoch": 0}
            fields["base_sequence"] = producer.sequence
        batch = encoded(numbers, lines, codec=self.random.choice((0, 0, 3)), **fields)
        model.sent.update(zip(numbers, lines, strict=True))
        again = bytearray(batch)
        try:
            result = self._send(partition, batch)
        except DiskFull:
            model.gone.update(numbers)
            if producer:
                producer.is_unsure = False
            raise
        for offset, number in enumerate(numbers, result.base_offset):
            model.acknowledge(number, offset)
        if producer:
            producer.is_unsure, producer.last = False, (again, result.base_offset)
            producer.sequence += len(numbers)

    def produce_without_waiting(self) -> None:
        """With acks=1: a crash may lose the records."""
        _, known, partition = self._pick_topic()
        for _ in range(self.random.randint(1, 6)):
            numbers, lines = self.new_lines(self.random.randint(1, 4))
            known.model.sent.update(zip(numbers, lines, strict=True))
            try:
                self._send(partition, encoded(numbers, lines), acks=Acks.LEADER)
            except DiskFull:
                known.model.gone.update(numbers)
                raise

    def _producer(self, known: Known) -> Producer:
        sure = [producer for producer in known.producers if not producer.is_unsure]
        if len(sure) < 3:
            self.producers += 1
            known.producers.append(Producer(self.producers + 100))
            return known.producers[-1]
        return self.random.choice(sure)

    def _send(self, partition, batch, *, acks=Acks.ALL):
        produced = check_produced(
            batch, ProduceLimits(max_message_bytes=1 << 20, now_ms=self.now_ms)
        )
        return partition.append(produced, acks=acks).result(10)

    def repeat(self) -> None:
        _, known, partition = self._pick_topic()
        for producer in known.producers:
            if producer.last is not None and not producer.is_unsure:
                batch, offset = producer.last
                found = self._send(partition, bytearray(batch))
                if (found.duplicate, found.base_offset) != (True, offset):
                    raise Wrong(f"the repeat of {offset} is at {found.base_offset}")

    def trim(self) -> None:
        name, known, partition = self._pick_topic()
        now = partition.offsets()
        offset = self.random.randint(now.log_start_offset, now.high_watermark)
        known.model.trimmed_before = max(known.model.trimmed_before, offset)
        with suppress(StoreUnavailable):
            self.broker.trim(name, 0, offset)

    def commit_offset(self) -> None:
        name, _, partition = self._pick_topic()
        offset = self.random.randint(0, partition.offsets().high_watermark)
        key = self.random.choice(GROUPS), name
        self.committed.setdefault(key, {None}).add(offset)
        self.broker.groups.commit_offsets(key[0], [NewOffset(name, 0, offset)])
        self.committed[key] = {offset}

    # --- background work --------------------------------------------------------------------------

    def roll_and_copy(self) -> None:
        self._pick_topic()[2].upkeep.roll()
        self.copy()

    def copy(self) -> None:
        run_copier(self.broker)

    def merge(self) -> None:
        name, _, partition = self._pick_topic()
        if partition.config.compacts:
            return
        with suppress(StoreUnavailable, OutcomeUnknownError, CorruptDataError):
            partition.claim()
            self._merge(name, partition)

    def _merge(self, name: str, partition) -> Merged:
        """No epoch begins elsewhere."""
        before = partition.epochs()
        try:
            return self.broker.merge_segments(name, wait_ms=60_000)
        finally:
            if partition.epochs() != before:
                raise Wrong(f"epochs began at {before}, and after a merge at {partition.epochs()}")

    def merge_in_the_background(self) -> None:
        self.broker.background.merger.run_round()

    def compact(self) -> None:
        self.broker.background.compactor._backoff.clear()
        self.broker.background.compactor.run_round()

    def run_janitor(self) -> None:
        run_janitor(self.broker)

    def relieve_disk(self) -> None:
        self.broker.background.janitor.relieve_disk(self.random.choice((1, 1 << 20)))

    def delete_local(self) -> None:
        _, _, partition = self._pick_topic()
        if not partition.config.compacts:
            partition.upkeep.delete_local(janitor.removable_end(partition))
            partition.upkeep.reap(at_once=True)

    def save(self) -> None:
        self.broker.checkpoints.save()

    def collect(self) -> None:
        partition = self._pick_topic()[2]
        policy = GarbagePolicy(grace_ms=0, keep_ms=0, keep_min=self.random.choice((1, 3, 100)))
        if partition.has_bucket:
            with suppress(TierlogError):
                partition.upkeep.collect_garbage(policy)

    def run_groups_round(self) -> None:
        with suppress(TierlogError):
            self.broker.groups.run_round()

    def wait(self) -> None:
        self.now_ms += self.random.choice((10, 1000, 10_000, 70_000, -30_000))

    def verify(self) -> None:
        for name in self.topics:
            with self.store.faultless():
                report = verify_topic(self.broker, name, deep=True)
            if not report.ok:
                raise Wrong(report.problems)

    # --- faults -----------------------------------------------------------------------------------

    def fail_store(self) -> None:
        for call, fault in self.random.choices(STORE_FAULTS, k=2):
            passed = iter(range(self.random.randint(0, 4)))
            self.store.fail(
                call,
                fault,
                times=self.random.choice((1, 1, 2, 6)),
                when=lambda key, passed=passed: next(passed, None) is None,
            )

    def heal_store(self) -> None:
        self.store.heal()

    def full_disk(self) -> None:
        full = OSError(errno.ENOSPC, "No space left")
        self._change_on_failing_disk(
            full, of=ALLOCATING, times=self.random.choice((1, 3, 1 << 30)), after=30
        )
        offline = [one for one in self.broker.partitions() if one.is_offline]
        if any(not one.config.compacts for one in offline):
            raise Wrong("a full disk took a log offline")
        if offline:  # in the middle of a swap
            self._restart_after_crash(power_fails=False)
        else:
            self._settle_topics()

    def bad_disk(self) -> None:
        bad = OSError(errno.EIO, "I/O error")
        calls = self.random.choice((SYNCS, ("sync_bytes",), ("write_at",), ("rename",), CALLS))
        self._change_on_failing_disk(
            bad, of=calls, times=self.random.choice((1, 1, 1 << 30)), after=20
        )
        self._restart_after_crash(power_fails=False)

    def _change_on_failing_disk(
        self, error: OSError, *, of: tuple[str, ...], times: int, after: int
    ) -> None:
        self.disk.plan(error, of=of, after=self.random.randint(0, after), times=times)
        for step in self.random.choices(CHANGES, k=4):
            print("  ", step.__name__)
            with suppress(TierlogError, OSError):
                step(self)
        self.disk.heal()

    def crash(self) -> None:
        self._restart_after_crash(power_fails=self.random.random() < 0.6)

    def crash_within(self) -> None:
        self._plan_a_crash(after=60)
        with suppress(Crash):
            for step in self.random.choices(CHANGES, k=4):
                print("  ", step.__name__)
                step(self)
        assert self.broker.background.copier.wait_until_idle(timeout_s=30)
        self._restart_after_crash(power_fails=self.random.random() < 0.6)

    def _plan_a_crash(self, *, after: int) -> None:
        self.disk.plan(Crash(), of=CALLS, after=self.random.randint(0, after), times=1 << 30)

    def crash_while_starting(self) -> None:
        self._lose_process(power_fails=self.random.random() < 0.6)
        self._plan_a_crash(after=40)
        try:
            self.open()
        except Crash:
            died = self.folder
            self.folder = self._new_folder()
            self.disk.crash_broker(
                died, self.folder, self.random, power_fails=self.random.random() < 0.6
            )
        else:
            self._lose_process(power_fails=False)
        self.disk.heal()
        self.open()
        self._settle()

    def restart(self) -> None:
        self.broker.close()
        self.open()
        self._settle()

    def _restart_after_crash(self, *, power_fails: bool) -> None:
        self._lose_process(power_fails=power_fails)
        self.open()
        self._settle()

    def _lose_process(self, *, power_fails: bool) -> None:
        """Leave the folder as after a crash of the process, or of the machine."""
        died, broker = self.folder, self.broker
        self.folder = self._new_folder()
        self.disk.crash_broker(died, self.folder, self.random, power_fails=power_fails)
        self._discard(broker)

    def _discard(self, broker: Broker) -> None:
        """Close it without effects on the bucket or the disk."""
        broker.bucket.store.go_down()
        self.disk.heal()
        with suppress(TierlogError, OSError):
            broker.close()

    def _settle(self) -> None:
        """After a start, learn what survived."""
        self._settle_topics()
        for known in self.topics.values():
            known.producers = [p for p in known.producers if not p.is_unsure]
        self.check()
        for known in self.topics.values():
            known.model.settle()

    def _settle_topics(self) -> None:
        """Find out the outcome of interrupted steps."""
        live = {topic.name: topic.topic_id for topic in self.broker.list_topics()}
        for name, configs in list(self.unsure.items()):
            known = self.topics.get(name)
            if known is not None and live.get(name) == known.topic_id:
                config = self.broker.topic(name).config
                end = self.broker.partition(name, 0).log_end_offset
                if config != known.model.config and config not in configs:
                    raise Wrong(f"{name} has a configuration that was never set: {config}")
                known.model.configured(config, end_offset=end)
            elif name in live:
                if known is not None:
                    raise Wrong(f"{name} is another topic")
                self._add_known(name)
            elif known is not None:
                self._forget(name)
        self.unsure.clear()
        if live.keys() != self.topics.keys():
            raise Wrong(f"topics are {sorted(live)}, and should be {sorted(self.topics)}")

    # --- the bucket alone, and damaged files ------------------------------------------------------

    def restore_with_old_tail(self) -> None:
        self._restore(tail=True)
        self._settle()

    def restore(self) -> None:
        """Lose everything that is not in the bucket; groups may have any earlier offset."""
        self._bring_up_to_date()
        ends = self._bucket_ends()
        self.committed.clear()
        local_only = [name for name, end in ends.items() if end is None]
        for name in self.topics.keys() - set(local_only):
            self.topics[name].model.begin_history(ends[name])
            self.topics[name].producers.clear()
        self._restore(tail=False)
        for name in local_only:  # the topic exists, and is empty
            self._add_known(name)
        self._settle()

    def _bring_up_to_date(self) -> None:
        self.store.heal()
        self.copy()
        self.run_janitor()  # the log start may not be in the bucket yet

    def _bucket_ends(self) -> dict[str, int | None]:
        found = {}
        for name in self.topics:
            partition = self.broker.partition(name, 0)
            manifest = partition.manifest if partition._cold else None
            in_use = manifest is not None and uses_bucket(partition.config, manifest)
            found[name] = manifest.end_offset if in_use else None
        return found

    def _restore(self, *, tail: bool) -> None:
        power_fails = tail and self.random.random() < 0.5
        self._lose_process(power_fails=power_fails)
        old, self.folder = self.folder, self._new_folder()
        options = RestoreOptions(
            data_dir=self.folder, gap=GAP, clock=lambda: self.now_ms, tail=old if tail else None
        )
        report = restore(open_store(self.bucket), options)
        for restored in report.partitions:
            tail = restored.tail
            is_known = restored.topic in self.topics  # else its creation failed halfway
            is_truncated = power_fails and not tail.damaged  # only unflushed records are lost
            assert tail is None or tail.whole or is_truncated or not is_known, restored
        self.open()

    def compare_with_a_restored_bucket(self) -> None:
        """A folder restored from a copy of it has everything below the ends of the manifests."""
        self._bring_up_to_date()
        ends = self._bucket_ends()
        shown = {
            name: read(self.broker.partition(name, 0), end, self.random)
            for name, end in ends.items()
            if end is not None
        }
        copied = self.root / f"bucket-{self._new_folder().name}"
        shutil.copytree(self.root / "bucket", copied)
        options = RestoreOptions(data_dir=self._new_folder(), gap=GAP, clock=lambda: self.now_ms)
        restore(open_store(f"file://{copied}"), options)
        other = self.open(store=f"file://{copied}", folder=options.data_dir)
        try:
            for name, before in shown.items():
                self._compare(name, before, other.partition(name, 0), ends[name])
        finally:
            other.close()
            shutil.rmtree(copied)

    def _compare(self, name, before, partition, end: int) -> None:
        if not self.broker.partition(name, 0).is_mirrored:
            return
        found = read(partition, partition.offsets().high_watermark, self.random)
        wanted = [shown for shown in before if shown.offset < end]
        if found != wanted:
            missing = [shown.offset for shown in wanted if shown not in found]
            more = [shown.offset for shown in found if shown not in wanted]
            raise Wrong(f"the bucket of {name} (end {end}) lacks {missing}, and has {more}")

    def damage_a_file(self) -> None:
        """Damage a file that can be copied or rebuilt: exactly that is found, and repaired."""
        self._bring_up_to_date()
        name, _, partition = self._pick_topic()
        candidates = self._redundant_files(partition)
        if not candidates:
            return
        base_offset, path = self.random.choice(candidates)
        print("  ", path)
        self._damage(path)
        if self.random.random() < 0.5:
            report = verify_topic(self.broker, name, deep=True)
            found = {problem.base_offset for problem in report.problems}
            if found != {base_offset}:
                raise Wrong(f"{path} is damaged, and verify found {report.problems}")
        else:
            self._reopen()
        if self.random.random() < 0.5:
            self._plan_a_crash(after=40)
            with suppress(Crash):
                repair_topic(self.broker, name, apply=True, deep=True)
            self._lose_process(power_fails=self.random.random() < 0.6)
            self.open()
            repair_topic(self.broker, name, apply=True, deep=True)
            self._settle()
        else:
            repair_topic(self.broker, name, apply=True, deep=True)
        self.verify()

    def damage_a_derived_file(self) -> None:
        """Damage a file that can be rebuilt, while the broker is closed: it must have no effect."""
        self.broker.close()
        derived = [
            *(path for path in (self.folder / "tierlog" / "cache").rglob("*") if path.is_file()),
            *self.folder.glob("*-0/*index"),
            *self.folder.glob("*-0/*.snapshot"),
        ]
        derived = [
            path for path in sorted(derived) if path.stat().st_size and ".txn" not in path.name
        ]
        if derived:
            path = self.random.choice(derived)
            print("  ", path)
            self._damage(path)
        self.open()
        self._settle()

    def _damage(self, path: Path) -> None:
        position = self.random.randrange(path.stat().st_size)
        how = self.random.choice(("flip", "truncate", "unlink"))
        print("  ", how, position)
        if how == "flip":
            flip(path, position)
        elif how == "truncate":
            os.truncate(path, position)
        else:
            path.unlink()

    def _reopen(self) -> None:
        """Reopen without checks: a damaged log cannot be checked before its repair."""
        if self.random.random() < 0.5:
            self.broker.close()
        else:
            self._lose_process(power_fails=False)
        self.open()

    def _redundant_files(self, partition) -> list[tuple[int, Path]]:
        """(base offset of the segment, file) of files in either tier that have another copy."""
        if partition._cold is None or not partition.is_mirrored:
            return []
        found, entries = [], list(partition.cold_entries(partition.log_start_offset))
        local = {view.base_offset: view for view in partition.local_segments()}
        for entry in entries:
            found.append((entry.base_offset, self.root / "bucket" / entry.indexes_key))
            view = local.get(entry.base_offset)
            if view is not None and view.sealed and view.size_bytes == entry.size_bytes:
                found.append((entry.base_offset, self.root / "bucket" / entry.log_key))
                found.append((entry.base_offset, view.path))
        return found

    # --- after each step --------------------------------------------------------------------------

    def check(self) -> None:
        with self.store.faultless():
            for name, known in self.topics.items():
                known.model.check(self.broker.partition(name, 0), self.random, now_ms=self.now_ms)
            self._check_groups()

    def _check_groups(self) -> None:
        for (group, name), may_be in self.committed.items():
            try:
                rows = self.broker.groups.group(group)
            except UnknownGroup:
                rows = []
            found = next((row.offset for row in rows if row.topic == name), None)
            if found not in may_be:
                raise Wrong(f"{group} is at {found} of {name}, and should be at {may_be}")

    def finish(self) -> None:
        self.heal_store()
        for name in self.topics:
            self.broker.partition(name, 0).upkeep.roll()
        for _ in range(3):
            self.copy()
            self.compact()
        self.copy()
        self.merge_what_is_left()
        self.check()
        self.verify()
        self.compare_with_a_restored_bucket()

    def merge_what_is_left(self) -> None:
        """Without faults, to the end: nothing is then left to merge."""
        for name in self.topics:
            partition = self.broker.partition(name, 0)
            if partition.has_bucket and not partition.config.compacts:
                partition.upkeep.delete_local(janitor.removable_end(partition))
                self._merge(name, partition)
                again = self._merge(name, partition)
                if again.new_segments or again.remaining_segments:
                    raise Wrong(f"{name} is merged twice: {again}")

    def close(self) -> None:
        self._discard(self.broker)


CHANGES = (
    World.produce,
    World.produce,
    World.produce_without_waiting,
    World.repeat,
    World.trim,
    World.commit_offset,
    World.roll_and_copy,
    World.copy,
    World.compact,
    World.merge,
    World.merge_in_the_background,
    World.run_janitor,
    World.relieve_disk,
    World.save,
    World.collect,
    World.run_groups_round,
    World.create,
    World.delete,
    World.alter,
)
WEIGHTS = {
    **dict.fromkeys(CHANGES, 3),
    World.produce: 14,
    World.produce_without_waiting: 5,
    World.delete: 1,
    World.create: 4,
    World.delete_local: 2,
    World.wait: 4,
    World.verify: 2,
    World.fail_store: 3,
    World.heal_store: 3,
    World.full_disk: 3,
    World.bad_disk: 2,
    World.crash: 2,
    World.crash_within: 5,
    World.crash_while_starting: 2,
    World.restart: 2,
    World.restore_with_old_tail: 1,
    World.restore: 1,
    World.compare_with_a_restored_bucket: 1,
    World.damage_a_file: 3,
    World.damage_a_derived_file: 2,
}


@pytest.fixture(autouse=True)
def one_read_at_a_time(monkeypatch):
    """Of a merge, so that a seed is reproducible."""
    monkeypatch.setattr(merger, "READS", 1)


@pytest.mark.parametrize("seed", seeds(3))
def test_no_record_is_lost_and_reads_agree_with_the_model(seed, tmp_path, failing_disk):
    run(World(seed, tmp_path, failing_disk), WEIGHTS, STEPS)


def _run_from(seed, root, failing_disk) -> None:
    for number in range(seed, seed + 15):
        run(World(number, root / str(number), failing_disk), WEIGHTS, STEPS)


def test_the_simulation_catches_an_unsynced_producer_snapshot(tmp_path, failing_disk, monkeypatch):
    sync = REAL_DISK.sync_bytes

    def sync_all_but_snapshots(fd):
        if ".snapshot" not in str(Path(f"/proc/self/fd/{fd}").readlink()):
            sync(fd)

    monkeypatch.setattr(REAL_DISK, "sync_bytes", sync_all_but_snapshots)
    monkeypatch.setattr(ColdReads, "producers_before", lambda *_: None)  # would repair it
    with pytest.raises(Wrong, match=r"committed up to|the repeat of"):
        _run_from(8, tmp_path, failing_disk)


def test_the_simulation_catches_reads_that_ignore_aborted_transactions_in_the_bucket(
    tmp_path, failing_disk, monkeypatch
):
    monkeypatch.setattr(ColdReads, "aborted_transactions", lambda *_: [])
    with pytest.raises(Wrong, match="committed up to"):
        _run_from(0, tmp_path, failing_disk)


def test_the_simulation_catches_local_deletion_before_the_upload(
    tmp_path, failing_disk, monkeypatch
):
    monkeypatch.setattr(janitor, "removable_end", lambda partition: partition.high_watermark)
    with pytest.raises((Wrong, TierlogError)):
        _run_from(2, tmp_path, failing_disk)


def test_the_simulation_catches_a_merge_that_deletes_before_it_commits(
    tmp_path, failing_disk, monkeypatch
):
    def delete_and_fail(cold, run, files):
        cold._manifests.objects.delete([key for one in run for key in one.keys])
        raise StoreUnavailable("the upload that follows")

    monkeypatch.setattr(ColdLog, "replace_merged", delete_and_fail)
    with pytest.raises((Wrong, MissingObject)):
        _run_from(5, tmp_path, failing_disk)


def test_the_simulation_catches_a_merge_that_loses_aborted_transactions(
    tmp_path, failing_disk, monkeypatch
):
    def without_aborted(store, segment):
        return load_bundle(store, segment)._replace(txn_index=b"")

    monkeypatch.setattr(merged_segment, "load_bundle", without_aborted)
    with pytest.raises(Wrong, match="committed up to"):
        _run_from(2, tmp_path, failing_disk)


def test_the_simulation_catches_a_merge_that_forgets_epochs(tmp_path, failing_disk, monkeypatch):
    merge_segments = transitions.merge_segments

    def forget_epochs(manifest, *given, **named):
        after = merge_segments(manifest, *given, **named)
        return after if after is manifest else replace(after, epochs=after.epochs[-1:])

    monkeypatch.setattr(transitions, "merge_segments", forget_epochs)
    with pytest.raises(Wrong, match="epochs began at"):
        _run_from(3, tmp_path, failing_disk)
