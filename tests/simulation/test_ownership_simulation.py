"""Seeded steps on one partition whose owner changes: its process or machine crashes, its folder is
copied, or lost and restored from the bucket, and the previous broker may live on as a zombie on the
same bucket, even in the middle of an operation, before any call to the store.
The store fails calls and loses responses; trims, retention and collections continue meanwhile.

After each step:

* no offset was ever acknowledged with two different values, by any owner, unless the first was
  acknowledged before its flush, and the power failed;
* the owner serves each acknowledged record that it must have, with its value. After a restore
  without the old folder, or a take-over with an older copy or by a zombie, it must have what the
  bucket had; otherwise everything. The log start passes only trimmed records;
* records that a folder cannot serve after its take-over are set apart in it, and stay there.

A zombie that slept acknowledges nothing.

At the end `verify --deep` finds no problem.

Not covered: an older copy after which the original committed at most twice (decision 22; each
copy here is started after more), and a copy with records that a power failure took from the
original. The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from tests.fakes.broker_harness import BrokerHarness, run_copier, run_janitor
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.fakes.records import iter_records
from tests.simulation.failing_disk import CALLS, Crash, FailingDisk
from tests.simulation.steps import run, seeds
from tierlog.broker.background.janitor import removable_end
from tierlog.broker.broker import Broker
from tierlog.broker.opening import take_over
from tierlog.broker.settings import BrokerSettings
from tierlog.hot_tier.log_writer import Acks
from tierlog.manifest.garbage import GarbagePolicy
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import CorruptBatch, FencedError, StoreUnavailable, TierlogError
from tierlog.repair.restore import RestoreOptions, restore
from tierlog.repair.verify import verify_topic

STEPS = 50
GAP = 10_000
CONFIG = {
    "segment.bytes": 2048,
    "retention.ms": -1,
    "local.retention.bytes": 4096,
    "flush.ms": 86_400_000,
}
FAULTS = [
    *[("put", FailsBefore()), ("put", FailsAfter())] * 2,
    ("put_file", FailsBefore()),
    ("put_file", FailsAfter(StoreUnavailable)),
    *[(call, FailsBefore()) for call in ("get", "list", "head", "delete")],
]


class Wrong(AssertionError):
    """An offset was assigned twice, or a record is lost."""


class Owner(BrokerHarness):
    """A data folder, and its broker on the bucket that all owners share."""

    def __init__(self, folder: Path, bucket: str, *, take_over: bool = False) -> None:
        self.folder, self.alive = folder, True
        self.store = FaultyObjectStore(open_store(bucket))
        settings = BrokerSettings(
            data_dir=folder,
            cache_bytes=16 << 20,
            disk_reserve_bytes=0,
            restore_offset_gap=GAP,
            take_over=take_over,
        )
        self.boot_ms = 0
        self.broker = Broker.open_idle(settings, store=self.store, boot_clock=lambda: self.boot_ms)
        self.broker.background.fence_checker.run_round()

    @property
    def partition(self):
        return self.broker.partition("t", 0)

    def copy(self) -> None:
        run_copier(self.broker)

    def roll_and_copy(self) -> None:
        with suppress(FencedError):
            self.partition.upkeep.roll()
        self.copy()

    def served(self) -> dict[int, bytes | None]:
        """The values it serves, by offset, read without the planned faults."""
        with self.store.faultless():
            start = self.partition.offsets().log_start_offset
            return {record.offset: record.value for record in self.records("t", offset=start)}

    def flushed(self) -> dict[int, bytes | None]:
        """The flushed values on its own disk, served or not, by offset."""
        end = self.partition.high_watermark
        found = in_files(self.folder / "t-0")
        return {offset: value for offset, value in found.items() if offset < end}

    def set_apart(self) -> set[tuple[int, bytes | None]]:
        found: set[tuple[int, bytes | None]] = set()
        return found.union(
            *(in_files(path).items() for path in self.folder.glob("tierlog/diverged/t-0-*"))
        )

    def die(self) -> None:
        """End without reaching the bucket; a folder copied before is as after a crash."""
        if self.alive:
            self.set_down(True)
            with suppress(TierlogError):  # a crashed call leaves its log offline
                self.broker.close()
            self.alive = False


def in_files(folder: Path) -> dict[int, bytes | None]:
    found: dict[int, bytes | None] = {}
    for path in sorted(folder.glob("*.log")):
        with suppress(CorruptBatch):  # at the end of its records
            for record in iter_records(path.read_bytes()):
                found[record.offset] = record.value
    return found


class World:
    """`acknowledged`: values by offset, of all owners. `required`: the offsets that the current
    owner must have. `unflushed`: those that a power failure may lose. `apart`: the offsets and
    values that its folder must have set apart.
    """

    def __init__(self, seed: int, root: Path, failing_disk: FailingDisk) -> None:
        self.random, self.root, self.folders = Random(seed), root, 0
        self.disk = failing_disk
        self.bucket = f"file://{root / 'bucket'}"
        self.acknowledged: dict[int, bytes] = {}
        self.required: set[int] = set()
        self.unflushed: set[int] = set()
        self.power_failed = False
        self.apart: set[tuple[int, bytes | None]] = set()
        self.trimmed_before = self.written = 0
        self.zombie: Owner | None = None
        self.copies: list[Path] = []
        self.owner = Owner(self._new_folder(), self.bucket)
        self.owner.broker.create_topic("t", config=CONFIG)
        self.produce()
        self.owner.roll_and_copy()

    def _new_folder(self) -> Path:
        self.folders += 1
        return self.root / f"data-{self.folders}"

    def _copy_of_folder(self) -> Path:
        copied = shutil.copytree(self.owner.folder, self._new_folder())
        (copied / ".lock").unlink()
        return copied

    # --- steps of the owner -----------------------------------------------------------------------

    def produce(self) -> None:
        for _ in range(self.random.randint(1, 12)):
            acks = self.random.choice((Acks.ALL, Acks.ALL, Acks.LEADER))
            offsets = self._append(self.owner, acks)
            (self.required if acks is Acks.ALL else self.unflushed).update(offsets)

    def _append(self, owner: Owner, acks: Acks = Acks.ALL) -> range:
        values = [
            b"%d " % (self.written + n) + b"x" * self.random.randint(20, 200)
            for n in range(self.random.randint(1, 4))
        ]
        self.written += len(values)
        base_offset = owner.produce("t", values, acks=acks).base_offset
        for offset, value in enumerate(values, base_offset):
            if self.acknowledged.setdefault(offset, value) != value:
                raise Wrong(f"offset {offset} is assigned twice")
        return range(base_offset, base_offset + len(values))

    def roll_and_copy(self) -> None:
        self.owner.roll_and_copy()

    def copy(self) -> None:
        self.owner.copy()

    def run_janitor(self) -> None:
        run_janitor(self.owner.broker)

    def delete_local(self) -> None:
        """Delete everything from the local disk that is in the bucket."""
        partition = self.owner.partition
        partition.upkeep.delete_local(removable_end(partition))
        partition.upkeep.reap(at_once=True)

    def trim(self) -> None:
        offsets = self.owner.partition.offsets()
        self._trim_before(self.random.randint(offsets.log_start_offset, offsets.high_watermark))

    def _trim_before(self, offset: int) -> None:
        self.trimmed_before = max(self.trimmed_before, offset)
        with suppress(TierlogError):
            self.owner.broker.trim("t", 0, offset)

    def collect(self) -> None:
        policy = GarbagePolicy(grace_ms=0, keep_min=self.random.choice((1, 3, 100)))
        with suppress(TierlogError):
            self.owner.partition.upkeep.collect_garbage(policy)

    def fail(self) -> None:
        """Plan faults for some of the next calls."""
        for call, fault in self.random.choices(FAULTS, k=2):
            passed = iter(range(self.random.randint(0, 4)))
            self.owner.store.fail(
                call,
                fault,
                times=self.random.choice((1, 1, 2, 6)),
                when=lambda key, passed=passed: next(passed, None) is None,
            )

    def heal(self) -> None:
        self.owner.store.heal()

    # --- steps from one owner to the next ---------------------------------------------------------

    def _start_owner(self, folder: Path, *, take_over: bool = False) -> Owner:
        """Start an owner on `folder`; the start may crash, and is repeated on what is left."""
        while self.random.random() < 0.4:
            self._plan_a_crash()
            try:
                return Owner(folder, self.bucket, take_over=take_over)
            except Crash:
                folder = self._after_crash(folder)
            finally:
                self.disk.heal()
        return Owner(folder, self.bucket, take_over=take_over)

    def _plan_a_crash(self) -> None:
        self.disk.plan(Crash(), of=CALLS, after=self.random.randint(0, 60), times=1 << 30)

    def _after_crash(self, died: Path, *, power_fails: bool | None = None) -> Path:
        """The folder that the next start finds."""
        if power_fails is None:
            power_fails = self.random.random() < 0.6
        folder = self._new_folder()
        self.disk.crash_broker(died, folder, self.random, power_fails=power_fails)
        if power_fails:
            self.copies = []
            self.power_failed = True
        return folder

    def restart(self) -> None:
        self.owner.broker.close()
        self._start_next(self.owner.folder)

    def crash(self) -> None:
        copied = self._copy_of_folder()
        self.owner.die()
        self._start_next(copied)

    def _start_next(self, folder: Path) -> None:
        self.owner = self._start_owner(folder)
        if self.power_failed:
            self.power_failed = False
            for offset in self.unflushed - self.owner.served().keys():
                self.acknowledged.pop(offset, None)

    def lose_power(self) -> None:
        self._restart_after_crash(power_fails=True)

    def crash_within(self) -> None:
        """The process, or the machine, dies before a call that changes the disk."""
        self._plan_a_crash()
        with suppress(Crash):
            for step in self.random.choices(CHANGES, k=4):
                print("  ", step.__name__)
                step(self)
        self._restart_after_crash()

    def _restart_after_crash(self, *, power_fails: bool | None = None) -> None:
        folder = self._after_crash(self.owner.folder, power_fails=power_fails)
        self.disk.heal()
        self.owner.die()
        self._start_next(folder)

    def keep_a_copy(self) -> None:
        self.copies = [*self.copies[-1:], self._copy_of_folder()]

    def take_over_with_a_copy(self) -> None:
        if not self.copies:
            return
        self.heal()
        self._commit_enough()
        in_bucket = self._in_bucket()
        self.produce()
        self._replace_owner(as_zombie=self.random.choice((True, False)))
        copied = self.copies.pop(self.random.randrange(len(self.copies)))
        if self.random.random() < 0.5:
            refused = self._assert_fenced(self._start_owner(copied))
            refused.die()
            copied = refused.folder
        self.owner = self._start_owner(copied, take_over=True)
        self._begin_history(in_bucket)

    def _commit_enough(self) -> None:
        """So that an older copy is recognised (see "Not covered"); some pass the copy's end."""
        self.owner.copy()  # no trim is committed before the claim
        cold, by_trims = self.owner.partition._cold, self.random.choice((True, False))
        enough = cold.manifest.version + 4
        while cold.manifest.version < enough:
            self.produce()
            start = self.owner.partition.offsets().log_start_offset
            if by_trims and start < cold.manifest.end_offset:
                self._trim_before(start + 1)
            else:
                self.owner.roll_and_copy()

    def restore(self) -> None:
        self.heal()
        self.owner.copy()
        in_bucket = self._in_bucket()
        self._replace_owner(as_zombie=self.random.choice((True, False)))
        folder = self._restore(tail=None)
        if self.zombie is not None and self.random.random() < 0.5:
            self.act_as_zombie()
        self.owner = self._start_owner(folder)
        self._begin_history(in_bucket)

    def zombie_takes_over(self) -> None:
        if self.zombie is None:
            return
        self.heal()
        in_bucket = self._in_bucket()
        loser, self.zombie = self.zombie, None
        had, folder = loser.flushed(), loser.folder
        if self.random.random() < 0.5:
            folder = self._after_crash(folder)
        else:
            loser.broker.close()
        loser.die()
        self._replace_owner(as_zombie=self.random.choice((True, False)))
        self.owner = self._start_owner(folder, take_over=True)
        self._begin_history(in_bucket)
        start, served = self.owner.partition.offsets().log_start_offset, self.owner.served()
        self.apart |= {item for item in had.items() - served.items() if item[0] >= start}

    def restore_with_old_tail(self) -> None:
        power_fails = self.random.random() < 0.5
        tail = self._after_crash(self.owner.folder, power_fails=power_fails)
        self.owner.die()
        self._start_next(self._restore(tail=tail, is_truncated=power_fails))
        self.apart = set()  # those stay in the old folder

    def _restore(self, *, tail: Path | None, is_truncated: bool = False) -> Path:
        """Restore into a new folder; it may crash, and is repeated on what is left."""
        folder = self._new_folder()
        while self.random.random() < 0.4:
            self._plan_a_crash()
            with suppress(Crash):
                self._restore_into(folder, tail=tail, is_truncated=is_truncated)
                return folder
            self.disk.heal()
            died, folder = folder, self._new_folder()
            leave = self.random.choice((self.disk.keep_into, self._crash_into))
            leave(folder, of=died)
            if (folder / "meta.properties").exists():
                return folder
        self._restore_into(folder, tail=tail, is_truncated=is_truncated)
        return folder

    def _restore_into(self, folder: Path, *, tail: Path | None, is_truncated: bool = False) -> None:
        """`is_truncated`: the power failed on the old folder."""
        options = RestoreOptions(data_dir=folder, gap=GAP, clock=lambda: 0, tail=tail)
        (found,) = restore(open_store(self.bucket), options).partitions
        assert tail is None or (found.tail and (found.tail.whole or is_truncated)), found
        self.disk.heal()

    def _crash_into(self, folder: Path, *, of: Path) -> None:
        self.disk.crash_into(folder, self.random, of=of)

    def _in_bucket(self) -> set[int]:
        manifest = self.owner.partition.manifest
        return {offset for offset in self.required if offset < manifest.end_offset}

    def _replace_owner(self, *, as_zombie: bool) -> None:
        if as_zombie:
            if self.zombie is not None:
                self.zombie.die()
            self.zombie = self.owner
        else:
            self.owner.die()

    def _begin_history(self, in_bucket: set[int]) -> None:
        """The new owner must keep everything that it starts with."""
        self.required = in_bucket | (self.owner.served().keys() & self.acknowledged.keys())
        self.unflushed = set()
        self.power_failed = False
        self.apart = self.owner.set_apart()

    def act_as_zombie(self) -> None:
        """Until its next call to the bucket its appends succeed, but only on its own disk."""
        if self.zombie is None:
            return
        with suppress(FencedError):
            self._append(self.zombie)
        if self.random.random() < 0.5:
            self.zombie.roll_and_copy()

    def wake_zombie(self) -> None:
        """It slept longer than its last look at the bucket counts."""
        if self.zombie is None:
            return
        self.zombie.store.heal()
        self.zombie.boot_ms += self.zombie.broker.settings.fence_check_ms + 1
        with suppress(FencedError):
            self._append(self.zombie)
            raise Wrong("a zombie that slept acknowledged a record")

    def restart_zombie(self) -> None:
        if self.zombie is not None:
            self.zombie.broker.close()
            self.zombie = self._assert_fenced(Owner(self.zombie.folder, self.bucket))

    def pause_in_a_call(self) -> None:
        """Pause the process before a call to the store, until another folder has taken over."""
        paused, passed = self.owner, iter(range(self.random.randint(0, 6)))

        def take_over_first(_key: str) -> bool:
            if self.owner is paused and next(passed, None) is None:
                self._take_over_with_a_restore()
            return False

        self.heal()
        paused.partition.upkeep.roll()
        for call in ("put", "put_file", "get", "head", "list", "delete"):
            paused.store.fail(call, FailsBefore(), when=take_over_first)
        for act in self.random.sample(
            (World.copy, World.run_janitor, World.trim, World.collect), 2
        ):
            if self.owner is paused:
                act(self)
        paused.store.heal()
        if self.owner is not paused:
            if self.zombie is not None:
                self.zombie.die()
            self.zombie = paused

    def _take_over_with_a_restore(self) -> None:
        in_bucket = self._in_bucket()
        folder = self._new_folder()
        self._restore_into(folder, tail=None)
        self.owner = Owner(folder, self.bucket)
        self._begin_history(in_bucket)
        self.produce()
        self.owner.roll_and_copy()

    def _assert_fenced(self, started: Owner) -> Owner:
        started.copy()
        assert started.partition.leadership_lost is not None
        return started

    # --- after each step --------------------------------------------------------------------------

    def check(self) -> None:
        assert self.owner.partition.leadership_lost is None
        served = self.owner.served()
        self.required = {offset for offset in self.required if offset >= self.trimmed_before}
        if lost := sorted(self.required - served.keys()):
            raise Wrong(f"{len(lost)} records from {lost[0]} to {lost[-1]} are lost")
        for offset in served.keys() & self.acknowledged.keys():
            if served[offset] != self.acknowledged[offset]:
                raise Wrong(f"offset {offset} has another value")
        if missing := self.apart - self.owner.set_apart():
            raise Wrong(f"{len(missing)} records are not set apart, from {min(missing)} on")

    def finish(self) -> None:
        self.heal()
        for _ in range(2):
            self.owner.copy()
        self.check()
        report = verify_topic(self.owner.broker, "t", deep=True)
        assert report.ok, report.problems

    def close(self) -> None:
        self.disk.heal()
        for owner in (self.owner, self.zombie):
            if owner is not None:
                owner.die()


CHANGES = (
    *[World.produce, World.roll_and_copy] * 2,
    *(World.copy, World.run_janitor, World.delete_local, World.trim, World.collect),
)
WEIGHTS = {
    World.produce: 8,
    World.roll_and_copy: 5,
    World.copy: 3,
    World.run_janitor: 2,
    World.delete_local: 2,
    World.trim: 1,
    World.collect: 2,
    World.fail: 4,
    World.heal: 3,
    World.restart: 2,
    World.crash: 2,
    World.lose_power: 1,
    World.crash_within: 2,
    World.keep_a_copy: 2,
    World.take_over_with_a_copy: 1,
    World.restore: 1,
    World.restore_with_old_tail: 1,
    World.act_as_zombie: 3,
    World.restart_zombie: 1,
    World.wake_zombie: 1,
    World.zombie_takes_over: 1,
    World.pause_in_a_call: 2,
}


@pytest.mark.parametrize("seed", seeds(4))
def test_no_offset_is_assigned_twice_and_no_acknowledged_record_is_lost(
    seed, tmp_path, failing_disk
):
    run(World(seed, tmp_path, failing_disk), WEIGHTS, STEPS)


def test_the_simulation_catches_a_take_over_without_a_gap(tmp_path, monkeypatch, failing_disk):
    plan = take_over.plan_take_over
    monkeypatch.setattr(take_over, "plan_take_over", lambda *facts, gap: plan(*facts, gap=0))
    with pytest.raises(Wrong, match="assigned twice"):
        run(World(0, tmp_path, failing_disk), WEIGHTS, STEPS)
