"""Seeded steps on one partition's manifest: uploads, retention, trims, compaction, repairs, pins,
and collections, some of which fail halfway.

After each step the bucket has all objects referenced by the current manifest, and by pins except
what was trimmed. At the end, without pins and after every grace period, it has no other object.
The seed is in the test's name; `TIERLOG_SEED` runs only that one.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from random import Random
from typing import Final, NamedTuple

import pytest
from msgspec.structs import replace

from tests.fakes.clock import Clock
from tests.fakes.manifests import KEYS, SEGMENT_RECORDS, claim, entry, manifest_store
from tests.fakes.plain_store import Fault, PlainStore
from tests.simulation.steps import run, seeds
from tierlog.manifest.codec import mergeable_pages
from tierlog.manifest.garbage import Collector, GarbagePolicy
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest, PageRef
from tierlog.manifest.store import DAY_MS, ManifestStore
from tierlog.manifest.transitions import (
    add_segments,
    drop_expired,
    drop_lost_segment,
    merge_segments,
    replace_objects,
    replace_segments,
    replace_with_readable,
    trim,
)
from tierlog.record_format.errors import (
    MissingObject,
    OutcomeUnknownError,
    StoreUnavailable,
    UnknownManifestVersion,
)
from tierlog.record_format.segment_entry import SegmentEntry

STEPS: Final = 250
SMALL: Final = {
    "INLINE_MAX": 6,
    "SMALL_PAGE": 3,
    "PAGE_ENTRIES": 9,
    "RUN_MAX": 3,
    "REMOVED_MAX": 8,
    "REMOVED_KEPT": 3,
}


class Referenced(NamedTuple):
    """A referenced object, and the last offset in it."""

    key: str
    last_offset: int


class World:
    def __init__(self, seed: int) -> None:
        self.random, self.clock = Random(seed), Clock()
        self.store = PlainStore(clock=self.clock)
        self.names_used = 0
        self.pinned: dict[str, list[Referenced]] = {}
        self.trimmed_before = 0
        self.manifests: ManifestStore
        self.pins: Pins
        self.restart()
        self.state: Manifest = self.manifests.claim_manifest(claim(), log_start_offset=0)

    def restart(self) -> None:
        """Forget everything in memory."""
        self.manifests = manifest_store(self.store, clock=self.clock, writer=self.name())
        self.pins = Pins(self.manifests, clock=self.clock)

    def name(self) -> str:
        self.names_used += 1
        return f"x{self.names_used}"

    def upload(self, base_offset: int, *, records: int = SEGMENT_RECORDS) -> SegmentEntry:
        segment = entry(base_offset, records=records, unique=self.name())
        for key in segment.keys:
            self.store.put(key, b"x")
        return segment

    def entries(self) -> list[SegmentEntry]:
        return list(self.manifests.iter_entries(self.state))

    def commit(self, transition: Callable[[Manifest], Manifest]) -> None:
        self.state = self.manifests.commit_manifest(self.state, transition)

    # --- steps ------------------------------------------------------------------------------------

    def offload(self) -> None:
        added = self.upload(self.state.end_offset)
        self.commit(lambda state: add_segments(state, [added]))

    def leave_an_orphan(self) -> None:
        self.upload(self.random.randrange(0, self.state.end_offset + 1))

    def _front(self) -> int:
        entries = self.entries()
        return self.random.choice(entries[: len(entries) // 2 + 1]).next_offset if entries else 0

    def expire(self) -> None:
        before, now_ms, pages = self._front(), self.clock(), self.manifests
        self.commit(lambda state: drop_expired(state, before, pages=pages, now_ms=now_ms))

    def trim(self) -> None:
        before = max(0, self._front() - self.random.choice([0, SEGMENT_RECORDS // 2]))
        now_ms, pages = self.clock(), self.manifests
        self.trimmed_before = max(self.trimmed_before, before)
        self.commit(lambda state: trim(state, before, pages=pages, now_ms=now_ms))

    def compact(self) -> None:
        entries, now_ms, pages = self.entries(), self.clock(), self.manifests
        if entries:
            first = self.random.randrange(len(entries))
            old = entries[first : first + self.random.randint(1, 4)]
            records = old[-1].next_offset - old[0].base_offset
            new = self.upload(old[0].base_offset, records=records)
            self.commit(
                lambda state: replace_segments(state, old, [new], pages=pages, now_ms=now_ms)
            )

    def merge(self) -> None:
        entries, now_ms, pages = self.entries(), self.clock(), self.manifests
        first = self.random.randrange(len(entries)) if entries else 0
        run = entries[first : first + self.random.randint(2, 5)]
        if not run or any(a.next_offset != b.base_offset for a, b in pairwise(run)):
            return
        new = replace(
            self.upload(run[0].base_offset),
            last_offset=run[-1].last_offset,
            size_bytes=sum(one.size_bytes for one in run),
            record_count=sum(one.record_count for one in run),
        )
        self.commit(lambda state: merge_segments(state, run, new, pages=pages, now_ms=now_ms))

    def repair(self) -> None:
        entries, now_ms, pages = self.entries(), self.clock(), self.manifests
        if not entries:
            return
        old = self.random.choice(entries)
        if self.random.random() < 0.4:
            self.commit(lambda state: drop_lost_segment(state, old, pages=pages, now_ms=now_ms))
            return
        again = self.upload(old.base_offset)
        new = replace(old, log_key=again.log_key, indexes_key=again.indexes_key)
        change = replace_objects
        if self.random.random() < 0.3:
            new, change = replace(new, log_crc32c=1, record_count=0), replace_with_readable
        self.commit(lambda state: change(state, old, new, pages=pages, now_ms=now_ms))

    def merge_pages(self) -> None:
        if run := mergeable_pages(self.state):
            self.commit(self.manifests.write_merged_page(run))

    def pin(self) -> None:
        name, version = self.name(), max(1, self.state.version - self.random.choice([0, 0, 3, 9]))
        with suppress(MissingObject, UnknownManifestVersion):  # already collected
            self.pins.create_pin(name, version)
            manifest = self.manifests.load_version(version)
            self.pinned[name] = referenced_objects(self.manifests, manifest)

    def unpin(self) -> None:
        if self.pinned:
            name = self.random.choice(sorted(self.pinned))
            self.pins.delete_pin(name)
            del self.pinned[name]

    def wait(self) -> None:
        self.clock.now_ms += self.random.choice([1, DAY_MS // 3, DAY_MS, 2 * DAY_MS])

    def collect(self) -> None:
        collector = Collector(
            self.manifests, self.pins, GarbagePolicy(grace_ms=DAY_MS // 3, keep_min=3)
        )
        plan = collector.plan_collection(self.state, now_ms=self.clock())
        self.state = collector.delete_garbage(self.state, plan)

    def collect_and_fail(self) -> None:
        calls_left = self.random.randint(0, 12)

        def fail_after_some_calls(_call: str, _key: str) -> Fault | None:
            nonlocal calls_left
            calls_left -= 1
            return Fault.UNAVAILABLE if calls_left < 0 else None

        self.store.faults = fail_after_some_calls
        with suppress(StoreUnavailable, OutcomeUnknownError):
            self.collect()
        self.store.faults = lambda _call, _key: None
        self.state = self.manifests.load_manifest(at_least=self.state.version) or self.state

    # --- checks -----------------------------------------------------------------------------------

    def check(self) -> None:
        fresh = manifest_store(self.store, clock=self.clock)
        for item in referenced_objects(fresh, self.state):
            assert item.key in self.store.objects, "the current manifest references it"
        for name, pinned in self.pinned.items():
            for item in pinned:
                is_trimmed = item.last_offset < self.trimmed_before
                assert is_trimmed or item.key in self.store.objects, f"pin {name} references it"

    def finish(self) -> None:
        while self.pinned:
            self.unpin()
        for _ in range(3):
            self.clock.now_ms += 2 * DAY_MS
            self.collect()
        self.check()
        wanted = {item.key for item in referenced_objects(self.manifests, self.state)}
        wanted |= {removed.key for removed in self.state.removed}
        wanted |= {page.key for page in self.state.removed_pages}
        folders = (KEYS.segments, KEYS.pages)
        assert {key for key in self.store.objects if key.startswith(folders)} == wanted

    def close(self) -> None:
        pass


def referenced_objects(manifests: ManifestStore, manifest: Manifest) -> list[Referenced]:
    refs = (page for page in manifest.pages if isinstance(page, PageRef))
    pages = [Referenced(page.key, page.last_offset) for page in refs]
    entries = manifests.iter_entries(manifest)
    return pages + [
        Referenced(key, segment.last_offset) for segment in entries for key in segment.keys
    ]


WEIGHTS: Final = {
    World.offload: 30,
    World.leave_an_orphan: 3,
    World.expire: 6,
    World.trim: 2,
    World.compact: 6,
    World.repair: 5,
    World.merge: 6,
    World.merge_pages: 6,
    World.pin: 4,
    World.unpin: 3,
    World.wait: 8,
    World.collect: 8,
    World.collect_and_fail: 3,
    World.restart: 2,
}


@pytest.mark.parametrize("seed", seeds(6))
def test_collection_keeps_referenced_objects_and_deletes_all_others(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in SMALL.items():
        monkeypatch.setattr(f"tierlog.manifest.codec.{name}", value)
    run(World(seed), WEIGHTS, STEPS)
