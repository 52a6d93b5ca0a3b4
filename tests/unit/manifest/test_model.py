"""Seeded random transitions, committed and paged out, against a plain list of entries."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from tests.fakes.manifests import claim, entry, manifest_store, run_of
from tests.fakes.plain_store import PlainStore
from tierlog.manifest.codec import MAX_MANIFEST_BYTES, encode_manifest
from tierlog.manifest.transitions import (
    add_segments,
    drop_expired,
    merge_segments,
    record_gap,
    replace_segments,
    trim,
)
from tierlog.record_format.segment_entry import SegmentEntry


class Model:
    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.store = PlainStore()
        self.manifests = manifest_store(self.store)
        self.state = self.manifests.claim_manifest(claim(), log_start_offset=0)
        self.entries: list[SegmentEntry] = []
        self.end = self.start = 0
        self.dropped: set[str] = set()
        self.compactions = 0

    def add(self) -> None:
        count = self.rng.choice([1, 1, 1, 5, 100, 300, 2000])
        run = run_of(count, start=self.end)
        self.state = self.manifests.commit_manifest(self.state, lambda s: add_segments(s, run))
        self.entries += run
        self.end = run[-1].next_offset

    def advance(self) -> None:
        before = self.rng.randint(self.start, self.start + (self.end - self.start) // 3)
        transition = self.rng.choice([trim, drop_expired])
        self.state = self.manifests.commit_manifest(
            self.state, lambda s: transition(s, before, pages=self.manifests, now_ms=1)
        )
        self.start = max(self.start, before)
        self._drop([e for e in self.entries if e.last_offset < before])

    def compact(self) -> None:
        if not self.entries:
            return
        first = self.rng.randrange(len(self.entries))
        old = self.entries[first : first + self.rng.choice([1, 2, 10, 500, 5000])]
        self.compactions += 1
        unique = f"c{self.compactions}"
        new = [
            entry(
                e.base_offset,
                records=self.rng.randint(1, e.next_offset - e.base_offset),
                unique=unique,
            )
            for e in old[:: self.rng.choice([1, 2, 7])]
            if self.rng.random() < 0.9
        ]
        self.state = self.manifests.commit_manifest(
            self.state, lambda s: replace_segments(s, old, new, pages=self.manifests, now_ms=1)
        )
        self._drop(old)
        kept = [e for e in new if e.last_offset >= self.start]
        self.entries = sorted([*self.entries, *kept], key=lambda e: e.base_offset)

    def merge(self) -> None:
        first = self.rng.randrange(len(self.entries)) if self.entries else 0
        run = self.entries[first : first + self.rng.choice([2, 10, 500, 5000])]
        joined = all(a.next_offset == b.base_offset for a, b in pairwise(run))
        if not joined or not run:
            return
        self.compactions += 1
        merged = entry(
            run[0].base_offset,
            last_offset=run[-1].last_offset,
            size_bytes=sum(e.size_bytes for e in run),
            record_count=sum(e.record_count for e in run),
            unique=f"m{self.compactions}",
        )
        before = self.state.compacted_before
        self.state = self.manifests.commit_manifest(
            self.state, lambda s: merge_segments(s, run, merged, pages=self.manifests, now_ms=1)
        )
        assert self.state.compacted_before == before
        self._drop(run)
        self.entries = sorted([*self.entries, merged], key=lambda e: e.base_offset)

    def gap(self) -> None:
        up_to = self.end + self.rng.randint(1, 10_000)
        self.state = self.manifests.commit_manifest(
            self.state, lambda s: record_gap(s, end_offset=up_to)
        )
        self.end = up_to

    def _drop(self, entries: list[SegmentEntry]) -> None:
        gone = set(entries)
        self.entries = [e for e in self.entries if e not in gone]
        self.dropped.update(key for e in gone for key in e.keys)

    def check(self) -> None:
        assert (self.state.log_start_offset, self.state.end_offset) == (self.start, self.end)
        assert list(self.manifests.iter_entries(self.state)) == self.entries
        assert self.state.segment_count == len(self.entries)
        assert manifest_store(self.store).load_manifest() == self.state
        assert len(encode_manifest(self.state)) < MAX_MANIFEST_BYTES // 8
        offset = self.rng.randint(self.start, self.end)
        expected = next((e for e in self.entries if e.last_offset >= offset), None)
        assert self.manifests.find_segment(self.state, offset) == expected

    def listed_as_removed(self) -> set[str]:
        listed = {r.key for r in self.state.removed}
        for page in self.state.removed_pages:
            *inside, _own = self.manifests.objects_removed_with(page)
            listed.update(r.key for r in inside)
        return listed


@pytest.mark.parametrize("seed", range(15))
def test_a_manifest_behaves_like_a_list_of_entries(seed: int) -> None:
    model = Model(seed)
    steps = [model.add] * 6 + [model.advance] * 2 + [model.compact] * 2 + [model.merge] * 2
    steps.append(model.gap)
    for _ in range(30):
        model.rng.choice(steps)()
        model.check()
    missing = model.dropped - model.listed_as_removed()
    assert not missing, f"{len(missing)} dropped objects are not listed, {min(missing)} among them"
    live = {key for e in model.entries for key in e.keys}
    assert not live & model.listed_as_removed()
