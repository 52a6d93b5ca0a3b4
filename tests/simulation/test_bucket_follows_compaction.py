"""A compacted topic in two tiers, with store faults, overlapping rounds, and crashes.

After each commit the bucket must be a valid backup. So for each key: a value once in the bucket
stays until a newer one or a tombstone replaces it, and a deleted value does not come back.
The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

import shutil
from random import Random

import pytest

from tests.fakes.broker_harness import BrokerHarness
from tests.fakes.compacted_topics import COMPACT, cold_records, last_of, put
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.simulation.steps import run, seeds
from tierlog.broker.broker import Broker
from tierlog.broker.partition.compaction import PartitionCompaction
from tierlog.broker.settings import BrokerSettings
from tierlog.object_store.open import open_store
from tierlog.repair.verify import verify_topic

STEPS = 60
CONFIG = {**COMPACT, "segment.bytes": 1500, "min.cleanable.dirty.ratio": 0.0}


class Wrong(AssertionError):
    """The bucket contains what it must not."""


class World(BrokerHarness):
    """`latest`: the last value of each key. `tombstones`: their offsets, by key."""

    def __init__(self, seed, root, failing_disk):
        self.root, self.disk, self.folder = root, failing_disk, root / "data"
        self.random, self.now_ms = Random(seed), 10**12
        self.store = FaultyObjectStore(open_store(f"file://{root / 'bucket'}"))
        self.latest, self.tombstones, self.deleted, self.seen = {}, {}, {}, {}
        self.wrong = []
        self._open()
        self.broker.create_topic(
            "t", config={**CONFIG, "delete.retention.ms": self.random.choice([0, 5000])}
        )
        self._check_each_commit()

    def _open(self):
        settings = BrokerSettings(data_dir=self.folder, cache_bytes=1 << 20, disk_reserve_bytes=0)
        self.broker = Broker.open_idle(settings, store=self.store, clock=lambda: self.now_ms)

    @property
    def partition(self):
        return self.broker.partition("t", 0)

    def _check_each_commit(self):
        bucket_state = self.partition._cold.bucket_state
        publish = bucket_state.record_manifest

        def published(manifest):
            publish(manifest)
            with self.store.faultless():
                self._check_bucket(manifest.end_offset)

        bucket_state.record_manifest = published

    def _check_bucket(self, end_offset):
        shown = last_of(cold_records(self, "t")).items()
        alive = {key: offset for key, (offset, value) in shown if value is not None}
        for key, offset in self.seen.items():
            deleting = [at for at in self.tombstones.get(key, ()) if offset < at < end_offset]
            if key not in alive and not deleting:
                self.wrong.append(f"{key} of offset {offset} is lost below {end_offset}")
        for key, offset in alive.items():
            if offset < self.deleted.get(key, -1):
                self.wrong.append(f"{key} of offset {offset} came back")
        for key, offsets in self.tombstones.items():
            newest = max((at for at in offsets if at < end_offset), default=-1)
            if key not in alive:
                self.deleted[key] = max(newest, self.deleted.get(key, -1))
        self.seen = alive

    # --- steps ------------------------------------------------------------------------------------

    def write(self):
        pairs = []
        for _ in range(self.random.randrange(1, 4)):
            size = self.random.choice([10, 400])
            value = None if self.random.random() < 0.3 else self.random.randbytes(size)
            pairs.append((b"k%d" % self.random.randrange(6), value))
        first = put(self, "t", pairs).base_offset
        for offset, (key, value) in enumerate(pairs, first):
            self.latest[key] = value
            if value is None:
                self.tombstones.setdefault(key, []).append(offset)
        self.partition.upkeep.roll()

    def compact(self):
        self.broker.background.compactor._backoff.clear()
        self.broker.background.compactor.run_round()

    def follow(self):
        if self.random.random() < 0.4:
            fault = self.random.choice([FailsBefore, FailsAfter])()
            call = self.random.choice(["put", "put_file", "list", "get"])
            self.store.fail(call, fault, times=self.random.randrange(1, 3))
        self.copy()
        self.store.heal()

    def follow_while_compacting(self):
        original, calls_left = PartitionCompaction._follow, [self.random.randrange(3)]

        def follow_then_compact(*view, **seen):
            found = original(*view, **seen)
            calls_left[0] -= 1
            if calls_left[0] == 0:
                self.compact()
            return found

        PartitionCompaction._follow = follow_then_compact
        try:
            self.copy()
        finally:
            PartitionCompaction._follow = original

    def copy(self):
        self.broker.background.copier.reset_backoff([self.partition])
        self.broker.background.copier.run_round()
        assert self.broker.background.copier.wait_until_idle(timeout_s=30)

    def crash(self):
        if self.random.random() < 0.5:
            self.broker.checkpoints.save()
        died, broker = self.folder, self.broker
        self.folder = self.root / f"{died.name}+"
        self.disk.crash_broker(
            died, self.folder, self.random, power_fails=self.random.random() < 0.6
        )
        self.store.go_down()  # the dead process no longer reaches the bucket
        broker.close()
        self.store.heal()
        shutil.rmtree(died)
        self._open()
        self._check_each_commit()

    # --- after each step --------------------------------------------------------------------------

    def check(self):
        if self.wrong:
            raise Wrong(self.wrong)
        self.now_ms += self.random.choice([1, 1000, 10_000])

    def finish(self):
        for _ in range(4):
            self.copy()
        expected = {key: value for key, value in self.latest.items() if value is not None}
        for records in (self.records("t"), cold_records(self, "t")):
            found = {key: value for key, (_, value) in last_of(records).items()}
            assert {key: value for key, value in found.items() if value is not None} == expected
        assert verify_topic(self.broker, "t", deep=True).ok

    def close(self):
        self.broker.close()


WEIGHTS = {
    World.write: 45,
    World.compact: 20,
    World.follow: 12,
    World.follow_while_compacting: 13,
    World.crash: 10,
}


@pytest.mark.parametrize("seed", seeds(3))
def test_the_bucket_loses_no_key_and_no_deleted_key_comes_back(seed, tmp_path, failing_disk):
    run(World(seed, tmp_path, failing_disk), WEIGHTS, STEPS)


def test_the_simulation_catches_mirroring_before_newer_records_are_uploaded(
    tmp_path, failing_disk, monkeypatch
):
    monkeypatch.setattr(PartitionCompaction, "may_be_followed", True)
    with pytest.raises(Wrong, match="is lost"):
        run(World(0, tmp_path, failing_disk), WEIGHTS, STEPS)
