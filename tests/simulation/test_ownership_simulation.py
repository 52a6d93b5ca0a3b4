"""Seeded steps on one partition whose data folder changes: it crashes, is copied, is lost and
restored from the bucket, and the previous broker may live on as a zombie on the same bucket, even
in the middle of an operation there, before any call.
The store fails calls and loses answers; trims, retention and collections continue meanwhile.

After each step:

* no offset was ever acknowledged with two different values, by any owner;
* the owner serves each acknowledged record that it must have, with its value. After a restore
  without the old folder, or a take-over with an older copy, it must have what the bucket had;
  otherwise everything. No log start passes a record that no trim passed.

At the end `verify --deep` finds nothing either.

Not seen: an older copy after which the original committed at most twice (decision 0173); each
copy here is started after more. For what a power cut takes from a disk see `test_log_simulation`.
The seed is in the test's name; `TIERLOG_SEED` runs that one.
"""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest

from broker.background.janitor import removable_end
from broker.broker import Broker
from broker.mending.restore import RestoreOptions, restore
from broker.ownership import take_over
from broker.settings import BrokerSettings
from cold_tier.open import open_store
from hot_tier.append import Acks
from manifest.garbage import GarbagePolicy
from record_format.errors import FencedError, StoreUnavailable, TierlogError
from tests.fakes.faulty_object_store import FailsAfter, FailsBefore, FaultyObjectStore
from tests.fakes.house import House, copy_now, tidy
from tests.simulation.steps import run, seeds

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


class Owner(House):
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
        self.broker = Broker.open_idle(settings, store=self.store)
        self.broker.chores.fences.look()

    @property
    def partition(self):
        return self.broker.partition("t", 0)

    def copy(self) -> None:
        copy_now(self.broker)

    def roll_and_copy(self) -> None:
        with suppress(FencedError):
            self.partition.log.roll()
        self.copy()

    def held(self) -> dict[int, bytes | None]:
        """What it serves, by offset. Planned faults do not hit this."""
        with self.store.faultless():
            start = self.partition.offsets().log_start_offset
            return {record.offset: record.value for record in self.records("t", offset=start)}

    def die(self) -> None:
        """Nothing reaches the bucket any more. A folder copied before this is that of a crash."""
        if self.alive:
            self.set_down(True)
            self.broker.close()
            self.alive = False


class World:
    """`acknowledged`: by offset, also by owners outside the present line. `owed`: the offsets that
    the present owner must have.
    """

    def __init__(self, seed: int, root: Path) -> None:
        self.random, self.root, self.folders = Random(seed), root, 0
        self.bucket = f"file://{root / 'bucket'}"
        self.acknowledged: dict[int, bytes] = {}
        self.owed: set[int] = set()
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
            self.owed.update(self._append(self.owner))

    def _append(self, owner: Owner) -> range:
        """The offsets that are owed: none of what was not waited for."""
        acks = self.random.choice((Acks.ALL, Acks.ALL, Acks.LEADER))
        values = [
            b"%d " % (self.written + n) + b"x" * self.random.randint(20, 200)
            for n in range(self.random.randint(1, 4))
        ]
        self.written += len(values)
        base_offset = owner.produce("t", values, acks=acks).base_offset
        for offset, value in enumerate(values, base_offset):
            if self.acknowledged.setdefault(offset, value) != value:
                raise Wrong(f"offset {offset} is given twice")
        return range(base_offset, base_offset + len(values) * (acks is Acks.ALL))

    def roll_and_copy(self) -> None:
        self.owner.roll_and_copy()

    def copy(self) -> None:
        self.owner.copy()

    def retain(self) -> None:
        tidy(self.owner.broker)

    def let_go(self) -> None:
        """Delete from the local disk everything that the bucket has."""
        partition = self.owner.partition
        partition.log.delete_local(removable_end(partition))
        partition.log.reap(at_once=True)

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
            self.owner.partition.cold.collect(policy)

    def fail(self) -> None:
        """Fail some of the calls to come, the next one or a later one."""
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

    def restart(self) -> None:
        self.owner.broker.close()
        self.owner = Owner(self.owner.folder, self.bucket)

    def crash(self) -> None:
        copied = self._copy_of_folder()
        self.owner.die()
        self.owner = Owner(copied, self.bucket)

    def keep_a_copy(self) -> None:
        self.copies = [*self.copies[-1:], self._copy_of_folder()]

    def take_over_with_a_copy(self) -> None:
        if not self.copies:
            return
        self.heal()
        self._commit_enough()
        in_bucket = self._in_bucket()
        self.produce()
        self._leave(as_zombie=self.random.choice((True, False)))
        copied = self.copies.pop(self.random.randrange(len(self.copies)))
        if self.random.random() < 0.5:
            self._is_fenced(Owner(copied, self.bucket)).die()
        self.owner = Owner(copied, self.bucket, take_over=True)
        self._begin_line(in_bucket)

    def _commit_enough(self) -> None:
        """So that an older copy is recognised: see "Not seen". Some pass the copy's end."""
        self.owner.copy()  # no trim is committed before the claim
        cold, by_trims = self.owner.partition.cold, self.random.choice((True, False))
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
        self._leave(as_zombie=self.random.choice((True, False)))
        folder = self._restored(tail=None)
        if self.zombie is not None and self.random.random() < 0.5:
            self.act_as_zombie()
        self.owner = Owner(folder, self.bucket)
        self._begin_line(in_bucket)

    def restore_with_the_old_folder(self) -> None:
        tail = self._copy_of_folder()
        self.owner.die()
        self.owner = Owner(self._restored(tail=tail), self.bucket)

    def _restored(self, *, tail: Path | None) -> Path:
        options = RestoreOptions(data_dir=self._new_folder(), gap=GAP, clock=lambda: 0, tail=tail)
        (one,) = restore(open_store(self.bucket), options).partitions
        assert tail is None or (one.tail is not None and one.tail.whole), one
        return options.data_dir

    def _in_bucket(self) -> set[int]:
        manifest = self.owner.partition.cold.manifest
        return {offset for offset in self.owed if offset < manifest.end_offset}

    def _leave(self, *, as_zombie: bool) -> None:
        if as_zombie:
            if self.zombie is not None:
                self.zombie.die()
            self.zombie = self.owner
        else:
            self.owner.die()

    def _begin_line(self, in_bucket: set[int]) -> None:
        """Whatever else the owner begins with, it must keep too."""
        self.owed = in_bucket | (self.owner.held().keys() & self.acknowledged.keys())

    def act_as_zombie(self) -> None:
        """It continues until it asks the bucket: what it acknowledges is only on its own disk."""
        if self.zombie is None:
            return
        with suppress(FencedError):
            self._append(self.zombie)
        if self.random.random() < 0.5:
            self.zombie.roll_and_copy()

    def restart_zombie(self) -> None:
        if self.zombie is not None:
            self.zombie.broker.close()
            self.zombie = self._is_fenced(Owner(self.zombie.folder, self.bucket))

    def stop_in_a_call(self) -> None:
        """The process is stopped before a call to the store, and continues once another folder has
        taken over.
        """
        stopped, passed = self.owner, iter(range(self.random.randint(0, 6)))

        def others_are_faster(_key: str) -> bool:
            if self.owner is stopped and next(passed, None) is None:
                self._taken_over_meanwhile()
            return False

        self.heal()
        stopped.partition.log.roll()
        for call in ("put", "put_file", "get", "head", "list", "delete"):
            stopped.store.fail(call, FailsBefore(), when=others_are_faster)
        for act in self.random.sample((World.copy, World.retain, World.trim, World.collect), 2):
            if self.owner is stopped:
                act(self)
        stopped.store.heal()
        if self.owner is not stopped:
            if self.zombie is not None:
                self.zombie.die()
            self.zombie = stopped

    def _taken_over_meanwhile(self) -> None:
        in_bucket = self._in_bucket()
        self.owner = Owner(self._restored(tail=None), self.bucket)
        self._begin_line(in_bucket)
        self.produce()
        self.owner.roll_and_copy()

    def _is_fenced(self, started: Owner) -> Owner:
        started.copy()
        assert started.partition.leadership_lost is not None
        return started

    # --- after each step --------------------------------------------------------------------------

    def check(self) -> None:
        assert self.owner.partition.leadership_lost is None
        held = self.owner.held()
        self.owed = {offset for offset in self.owed if offset >= self.trimmed_before}
        if lost := sorted(self.owed - held.keys()):
            raise Wrong(f"{len(lost)} records from {lost[0]} to {lost[-1]} are lost")
        for offset in held.keys() & self.acknowledged.keys():
            if held[offset] != self.acknowledged[offset]:
                raise Wrong(f"offset {offset} has another value")

    def finish(self) -> None:
        self.heal()
        for _ in range(2):
            self.owner.copy()
        self.check()
        report = self.owner.broker.verify("t", deep=True)
        assert report.ok, report.problems

    def close(self) -> None:
        for one in (self.owner, self.zombie):
            if one is not None:
                one.die()


WEIGHTS = {
    World.produce: 8,
    World.roll_and_copy: 5,
    World.copy: 3,
    World.retain: 2,
    World.let_go: 2,
    World.trim: 1,
    World.collect: 2,
    World.fail: 4,
    World.heal: 3,
    World.restart: 2,
    World.crash: 2,
    World.keep_a_copy: 2,
    World.take_over_with_a_copy: 1,
    World.restore: 1,
    World.restore_with_the_old_folder: 1,
    World.act_as_zombie: 3,
    World.restart_zombie: 1,
    World.stop_in_a_call: 2,
}


@pytest.mark.parametrize("seed", seeds(8))
def test_no_offset_is_given_twice_and_nothing_acknowledged_is_lost(seed, tmp_path):
    run(World(seed, tmp_path), WEIGHTS, STEPS)


def test_planted_an_owner_that_leaves_no_gap(tmp_path, monkeypatch):
    plan = take_over.plan_parting
    monkeypatch.setattr(take_over, "plan_parting", lambda *facts, gap: plan(*facts, gap=0))
    with pytest.raises(Wrong, match="given twice"):
        run(World(0, tmp_path), WEIGHTS, STEPS)
