"""Writers race for one partition on a store that loses responses: seeded, interleaved at each call.

Invariants: what a commit returned stays until a trim removes it, no version is overwritten, the end
never goes back, and an owner that was replaced commits nothing any more.
"""

from __future__ import annotations

import random

import pytest

from tests.fakes.clock import Clock
from tests.fakes.manifests import entry, manifest_store
from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.invariants import InvalidTransition
from tierlog.manifest.state import EpochStart, Manifest, iter_entries
from tierlog.manifest.store import DAY_MS, ManifestStore
from tierlog.manifest.transitions import Claim, add_segments, trim
from tierlog.object_store.store import ObjectStat
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    FencedError,
    ManifestConflict,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)
from tierlog.record_format.segment_entry import SegmentEntry

RETRIABLE = (OutcomeUnknownError, StoreUnavailable, ManifestConflict)


class Violation(AssertionError):
    pass


class Writer:
    """A broker that owns the partition: claims, adds, trims; claims again when it is fenced."""

    def __init__(self, world: World, name: str) -> None:
        self.world, self.name = world, name
        self.manifests: ManifestStore = manifest_store(world.store, clock=world.clock, writer=name)
        self.state: Manifest | None = None
        self.pending: SegmentEntry | None = None
        self.uploads = 0
        self.busy = False

    def step(self) -> None:
        if self.busy:
            return
        self.busy = True
        try:
            self._step()
        except RETRIABLE:
            pass
        except FencedError:
            self.state = self.pending = None
        finally:
            self.busy = False

    def _step(self) -> None:
        rng = self.world.rng
        if self.state is None:
            if self.world.yields and rng.random() < 0.7:
                return
            self._take_over()
        elif rng.random() < 0.15:
            before = rng.randint(self.state.log_start_offset, self.state.end_offset)
            self._commit(lambda s: trim(s, before, pages=self.manifests, now_ms=0))
        elif rng.random() < 0.1:
            self.manifests.confirm(self.state)
        else:
            self._add()

    def _take_over(self) -> None:
        seen = self.manifests.load_manifest()
        epoch = seen.leader_epoch + 1 if seen else 0
        start = EpochStart(epoch, seen.end_offset if seen else 0, self.name)
        claim = Claim(self.name, (start,), frozenset(), take_over=True)
        self.state = self.manifests.claim_manifest(claim, log_start_offset=0)
        self.world.note_owner(self.state)

    def _add(self) -> None:
        assert self.state is not None
        if self.pending is None:
            self.uploads += 1
            unique = f"{self.name}{self.uploads}"
            self.pending = entry(
                self.state.end_offset,
                unique=unique,
                leader_epoch=self.state.leader_epoch,
                log_crc32c=self.world.rng.getrandbits(32),
            )
        segment = self.pending
        after = self._commit(lambda s: add_segments(s, [segment]))
        self.pending = None
        if segment.last_offset >= after.log_start_offset:
            self.world.acknowledged.append(segment)

    def _commit(self, transition) -> Manifest:
        assert self.state is not None
        epoch_before, base = self.world.newest_epoch, self.state
        self.state = self.manifests.commit_manifest(self.state, transition)
        if self.state.version != base.version and self.state.leader_epoch < epoch_before:
            raise Violation(f"{self.name} committed under {self.state.leader_epoch}")
        self.world.note_ends(self.state)
        return self.state


class World:
    def __init__(self, seed: int, *, store: PlainStore | None = None, writers: int = 2) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.store = store or PlainStore()
        self.store.faults = self._faults
        self.newest_epoch = -1
        self.end_offset = self.log_start_offset = 0
        self.acknowledged: list[SegmentEntry] = []
        self.yields = True
        self.quiet = False
        self.writers = [Writer(self, chr(97 + i)) for i in range(writers)]

    def _faults(self, call: str, key: str) -> Fault | None:
        if self.quiet:
            return None
        if self.rng.random() < 0.1:
            self.rng.choice(self.writers).step()  # others make progress during this call
        if self.rng.random() < 0.05:
            self.store.deliver_delayed()
        if self.rng.random() > 0.2:
            return None
        if call != "put":
            return Fault.UNAVAILABLE if self.rng.random() < 0.3 else None
        return self.rng.choice(
            [Fault.UNAVAILABLE, Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.DELAYED]
        )

    def note_owner(self, state: Manifest) -> None:
        self.newest_epoch = max(self.newest_epoch, state.leader_epoch)
        self.note_ends(state)

    def note_ends(self, state: Manifest) -> None:
        self.end_offset = max(self.end_offset, state.end_offset)
        self.log_start_offset = max(self.log_start_offset, state.log_start_offset)

    def run(self, steps: int) -> Manifest:
        for _ in range(steps):
            self.rng.choice(self.writers).step()
            if self.rng.random() < 0.01:
                self.clock.now_ms += DAY_MS
        return self.check()

    def check(self) -> Manifest:
        self.quiet = True
        manifests = manifest_store(self.store)
        state = manifests.load_manifest()
        assert state is not None
        if self.store.overwritten:
            raise Violation(f"{self.store.overwritten[0]} was overwritten")
        if state.end_offset < self.end_offset or state.log_start_offset < self.log_start_offset:
            raise Violation("the end or the log start went back")
        entries = set(iter_entries(state, pages=manifests))
        for segment in self.acknowledged:
            if segment.last_offset >= state.log_start_offset and segment not in entries:
                raise Violation(f"segment {segment.log_key} was acknowledged and is lost")
        return state


def run_seeds(seeds: range, store: type[PlainStore]) -> None:
    for seed in seeds:
        World(seed, store=store()).run(300)


@pytest.mark.parametrize("seed", range(60))
def test_racing_writers_lose_nothing_and_overwrite_nothing(seed: int) -> None:
    state = World(seed).run(300)
    assert state.version > 20, f"seed {seed} did too little"


@pytest.mark.parametrize("seed", range(10))
def test_three_racing_writers_lose_nothing(seed: int) -> None:
    World(seed, writers=3).run(300)


class SloppyStore(PlainStore):
    """Planted: it ignores If-None-Match."""

    def _store(self, key: str, body: bytes, *, if_absent: bool) -> ObjectStat:
        return super()._store(key, body, if_absent=False)


class RacyStore(PlainStore):
    """Planted: two concurrent writers both win, and the later one's bytes stay."""

    def _store(self, key: str, body: bytes, *, if_absent: bool) -> ObjectStat:
        if key in self.objects and if_absent and crc32c_of(body) % 2:
            raise ObjectExists(key)
        return super()._store(key, body, if_absent=False)


@pytest.mark.parametrize("store", [SloppyStore, RacyStore])
def test_the_simulation_catches_a_store_without_atomic_creates(store: type[PlainStore]) -> None:
    with pytest.raises(Violation):
        run_seeds(range(20), store)


def test_the_simulation_catches_a_writer_that_never_checks_the_owner(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unchecked(self: ManifestStore, base: Manifest) -> Manifest:
        current = self.load_manifest()
        assert current is not None
        return current

    monkeypatch.setattr(ManifestStore, "_reload", unchecked)
    with pytest.raises((Violation, InvalidTransition)):
        run_seeds(range(20), PlainStore)
