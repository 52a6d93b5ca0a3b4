from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import pytest

from manifest.garbage import Collector, GarbagePlan, GarbagePolicy, _FailFastPages, expired_versions
from manifest.keys import version_key
from manifest.pins import Pins
from manifest.state import Manifest, PageRef
from manifest.store import DAY_MS, ManifestStore
from manifest.transitions import add_segments, drop_expired, trim
from manifest.versions import VersionStat
from record_format.errors import (
    CorruptDataError,
    FencedError,
    InvalidRequest,
    ManifestConflict,
    MissingObject,
    StoreUnavailable,
    UnknownManifestVersion,
)
from tests.fakes.manifests import KEYS, Clock, claim, entry, manifest_store, run_of
from tests.fakes.plain_store import Fault, PlainStore, PlainUpload


class Bench:
    """A partition with segment objects that really are in the bucket."""

    def __init__(self, count: int, *, grace_ms: int = DAY_MS) -> None:
        self.clock = Clock()
        self.store = PlainStore(clock=self.clock)
        self.manifests: ManifestStore = manifest_store(self.store, clock=self.clock)
        self.pins = Pins(self.manifests, clock=self.clock)
        policy = GarbagePolicy(grace_ms=grace_ms, keep_min=3)
        self.collector = Collector(self.manifests, self.pins, policy)
        self.state: Manifest = self.manifests.claim(claim(), log_start_offset=0)
        for one in run_of(count):
            for key in one.keys:
                self.store.put(key, b"x")
            self.commit(lambda s, one=one: add_segments(s, [one]))

    def restarted(self) -> Self:
        """Nothing is in memory."""
        self.manifests = manifest_store(self.store, clock=self.clock)
        self.pins = Pins(self.manifests, clock=self.clock)
        self.collector = Collector(self.manifests, self.pins, GarbagePolicy(keep_min=3))
        return self

    def commit(self, transition) -> Manifest:
        self.state = self.manifests.commit(self.state, transition)
        return self.state

    def expire(self, before_offset: int) -> None:
        now_ms = self.clock()
        self.commit(lambda s: drop_expired(s, before_offset, pages=self.manifests, now_ms=now_ms))

    def trim(self, before_offset: int) -> None:
        now_ms = self.clock()
        self.commit(lambda s: trim(s, before_offset, pages=self.manifests, now_ms=now_ms))

    def collect(self) -> None:
        plan = self.collector.plan(self.state, now_ms=self.clock())
        self.state = self.collector.apply(self.state, plan)

    def segments(self) -> list[int]:
        logs = [k for k in self.store.objects if k.startswith(KEYS.segments) and k.endswith(".log")]
        return sorted(int(key.rpartition("/")[2][:20]) for key in logs)


def test_a_dropped_object_goes_after_its_grace_and_not_before() -> None:
    bench = Bench(4)
    bench.expire(200)
    bench.clock.now_ms += DAY_MS - 1
    bench.collect()
    assert bench.segments() == [0, 100, 200, 300]
    bench.clock.now_ms += 1
    bench.collect()
    assert bench.segments() == [200, 300]
    assert bench.state.removed == ()


def test_a_pin_keeps_the_objects_and_the_version() -> None:
    bench = Bench(4)
    pinned = bench.state.version
    bench.pins.create("backfill", pinned, expires_ms=bench.clock() + 3 * DAY_MS)
    bench.expire(200)
    for _ in range(5):
        bench.commit(lambda s: add_segments(s, [entry(s.end_offset)]))
    bench.clock.now_ms += 2 * DAY_MS
    bench.collect()
    assert bench.segments() == [0, 100, 200, 300]
    assert list(bench.pins.missing_objects(pinned)) == []
    assert pinned in [stat.version for stat in bench.manifests.list_versions()]
    bench.clock.now_ms += 2 * DAY_MS
    bench.collect()
    assert bench.segments() == [200, 300]
    assert bench.pins.all() == []


def test_a_trim_overrides_pins() -> None:
    bench = Bench(4)
    bench.pins.create("backfill", bench.state.version)
    bench.trim(200)
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert bench.segments() == [200, 300]
    assert len(list(bench.pins.missing_objects(bench.pins.all()[0].version))) == 4


def test_orphans_go_by_age_and_named_objects_stay() -> None:
    bench = Bench(2)
    orphan = entry(200, unique="orphan").log_key
    bench.store.put(orphan, b"x")
    strangers = [f"{KEYS.segments}README", f"{KEYS.segments}kept/{200:020d}-0-a.indexes"]
    for stranger in strangers:
        bench.store.put(stranger, b"not ours")
    bench.collect()
    assert orphan in bench.store.objects
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert orphan not in bench.store.objects
    assert set(strangers) <= set(bench.store.objects)
    assert bench.segments() == [0, 100]


def test_an_upload_that_nobody_ended_is_aborted_after_its_grace() -> None:
    bench = Bench(1)
    left = PlainUpload(f"{KEYS.segments}left.log", bench.clock())
    elsewhere = PlainUpload("topics/other/left.log", bench.clock())
    bench.store.uploads = [left, elsewhere]
    bench.clock.now_ms += DAY_MS - 1
    bench.collect()
    assert bench.store.uploads == [left, elsewhere]
    bench.clock.now_ms += 1
    bench.collect()
    assert bench.store.uploads == [elsewhere]


def test_an_upload_that_goes_on_is_not_aborted_whatever_the_clock_says() -> None:
    bench = Bench(1)
    goes_on = PlainUpload(entry(100).log_key, bench.clock())
    left = PlainUpload(entry(200).log_key, bench.clock())
    bench.store.uploads = [goes_on, left]
    bench.clock.now_ms += DAY_MS
    bench.collector = Collector(bench.manifests, bench.pins, is_uploading={100}.__contains__)
    bench.collect()
    assert bench.store.uploads == [goes_on]


def test_a_dropped_object_is_no_orphan_before_its_grace() -> None:
    bench = Bench(3)
    bench.clock.now_ms += 5 * DAY_MS
    bench.expire(100)
    bench.collect()
    assert bench.segments() == [0, 100, 200]


def test_pages_of_dropped_segments_go_with_everything_in_them() -> None:
    bench = Bench(700)
    assert bench.state.pages
    bench.expire(60_050)
    assert bench.state.removed_pages
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert bench.segments() == list(range(60_000, 70_000, 100))
    assert bench.state.removed_pages == ()
    assert [k for k in bench.store.objects if k.startswith(KEYS.pages)] == [
        p.key for p in bench.state.pages
    ]


def test_only_the_owner_collects() -> None:
    bench = Bench(3)
    bench.expire(200)
    bench.clock.now_ms += DAY_MS
    plan = bench.collector.plan(bench.state, now_ms=bench.clock())
    assert plan.objects
    other = manifest_store(bench.store, clock=bench.clock, writer="y")
    other.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError):
        bench.collector.apply(bench.state, plan)
    assert bench.segments() == [0, 100, 200]


def test_a_void_version_above_the_one_in_force_does_not_stop_collection() -> None:
    bench = Bench(3)
    bench.expire(200)
    bench.clock.now_ms += DAY_MS
    whole = bench.store.objects[version_key(KEYS.versions, bench.state.version)][0]
    bench.store.put(version_key(KEYS.versions, bench.state.version + 1), whole[:-5])
    bench.collect()
    assert bench.segments() == [200]


def test_collection_that_died_before_it_could_forget_is_done_again() -> None:
    bench = Bench(3)
    bench.expire(200)
    bench.clock.now_ms += DAY_MS
    plan = bench.collector.plan(bench.state, now_ms=bench.clock())
    bench.store.delete(plan.objects)
    bench.collect()
    assert bench.state.removed == ()


def test_a_version_counts_its_age_from_its_successor() -> None:
    stats = [
        VersionStat(v, 10, modified_ms) for v, modified_ms in [(1, 0), (2, 10), (3, 20), (4, 30)]
    ]
    policy = GarbagePolicy(keep_ms=100, keep_min=1)
    assert list(expired_versions(stats, newest=4, now_ms=109, policy=policy)) == []
    assert list(expired_versions(stats, newest=4, now_ms=110, policy=policy)) == [1]
    assert list(expired_versions(stats, newest=4, now_ms=10**9, policy=policy)) == [1, 2, 3]
    keep_two = policy._replace(keep_min=2)
    assert list(expired_versions(stats, newest=4, now_ms=10**9, policy=keep_two)) == [1, 2]


def test_old_versions_go_and_the_newest_always_stays() -> None:
    bench = Bench(8)
    bench.clock.now_ms += 2 * DAY_MS
    bench.collect()
    versions = [stat.version for stat in bench.manifests.list_versions()]
    assert versions == [7, 8, 9]
    assert bench.manifests.load() == bench.state


def test_a_pin_of_a_version_that_is_no_longer_whole_is_withdrawn() -> None:
    bench = Bench(3)
    version = bench.state.version
    bench.expire(200)
    bench.store.delete(entry(0).keys)
    with pytest.raises(MissingObject):
        bench.pins.create("late", version)
    with pytest.raises(UnknownManifestVersion):
        bench.pins.create("never", 99)
    assert bench.pins.all() == []


def test_a_pin_of_a_version_that_is_gone_does_not_stop_collection() -> None:
    bench = Bench(4)
    bench.pins.create("dangling", 2)
    bench.manifests.versions.delete([2])
    bench.expire(200)
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert bench.segments() == [200, 300]


@pytest.mark.parametrize("name", ["", "a/b", "..ä", "x" * 129])
def test_a_bad_pin_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Bench(1).pins.create(name, 1)


def test_a_pin_is_created_once_also_after_a_lost_answer() -> None:
    bench = Bench(1)
    armed = [Fault.LOST_AFTER]
    bench.store.faults = lambda call, key: (
        armed.pop() if armed and "/pins/" in key and call == "put" else None
    )
    bench.pins.create("one", 1)
    with pytest.raises(InvalidRequest, match="exists"):
        bench.pins.create("one", 2)
    bench.pins.delete("one")
    bench.pins.delete("one")
    assert bench.pins.all() == []


def test_a_plan_made_by_an_older_version_deletes_nothing() -> None:
    bench = Bench(2)
    late = entry(200)
    for key in late.keys:
        bench.store.put(key, b"x")
    bench.clock.now_ms += DAY_MS
    planned_by = bench.state
    plan = bench.collector.plan(planned_by, now_ms=bench.clock())
    assert set(plan.orphans) == set(late.keys)
    bench.commit(lambda s: add_segments(s, [late]))
    with pytest.raises(ManifestConflict, match="in force, but the plan is based on"):
        bench.collector.apply(planned_by, plan)
    assert bench.segments() == [0, 100, 200]


def two_expired() -> tuple[Bench, int, GarbagePlan]:
    """The version that still named all four segments, and the plan that collects two."""
    bench = Bench(4, grace_ms=DAY_MS // 4)
    whole = bench.state.version
    bench.expire(200)
    bench.clock.now_ms += DAY_MS // 4
    plan = bench.collector.plan(bench.state, now_ms=bench.clock())
    return bench, whole, plan


def test_a_pin_that_came_after_the_plan_keeps_its_objects() -> None:
    bench, whole, plan = two_expired()
    bench.pins.create("backfill", whole)
    bench.state = bench.collector.apply(bench.state, plan)
    assert bench.segments() == [0, 100, 200, 300]
    bench.collect()
    assert bench.segments() == [0, 100, 200, 300]
    bench.pins.delete("backfill")
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert bench.segments() == [200, 300]


def test_a_version_that_was_pinned_since_the_plan_stays() -> None:
    """Who collects has a clock that is ahead of the store's."""
    bench = Bench(8)
    plan = bench.collector.plan(bench.state, now_ms=bench.clock() + DAY_MS)
    assert 2 in plan.versions
    bench.pins.create("backfill", 2)
    bench.state = bench.collector.apply(bench.state, plan)
    assert [stat.version for stat in bench.manifests.list_versions()] == [2, 7, 8, 9]


def test_who_pins_while_versions_are_going_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the version names is there, and the version too: but the collection looked for pins
    before this one came.
    """
    bench = Bench(8)
    bench.clock.now_ms += DAY_MS
    delete = bench.store.delete

    def pinned_first(keys: Sequence[str]) -> None:
        monkeypatch.undo()
        with pytest.raises(UnknownManifestVersion, match="about to be garbage-collected"):
            bench.pins.create("backfill", 2)
        delete(keys)

    monkeypatch.setattr(bench.store, "delete", pinned_first)
    bench.collect()
    assert [stat.version for stat in bench.manifests.list_versions()] == [7, 8, 9]
    assert bench.pins.all() == []


def test_who_pins_while_objects_are_going_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    bench, whole, plan = two_expired()
    delete = bench.store.delete

    def pinned_first(keys: Sequence[str]) -> None:
        monkeypatch.undo()
        with pytest.raises(MissingObject, match="is missing"):
            bench.pins.create("backfill", whole)
        delete(keys)

    monkeypatch.setattr(bench.store, "delete", pinned_first)
    bench.state = bench.collector.apply(bench.state, plan)
    assert bench.segments() == [200, 300]
    assert bench.pins.all() == []


def test_a_pin_that_comes_just_before_its_objects_are_forgotten_keeps_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bench, whole, plan = two_expired()
    put = bench.store.put

    def pinned_first(key: str, body: bytes, **options: bool) -> object:
        monkeypatch.undo()
        bench.pins.create("backfill", whole)
        return put(key, body, **options)

    monkeypatch.setattr(bench.store, "put", pinned_first)
    bench.state = bench.collector.apply(bench.state, plan)
    assert bench.segments() == [0, 100, 200, 300]


def test_all_that_a_lost_page_may_name_stays() -> None:
    bench = Bench(700)
    del bench.store.objects[bench.state.pages[0].key]
    bench = bench.restarted()
    bench.clock.now_ms += 5 * DAY_MS
    bench.collect()
    assert bench.segments() == list(range(0, 70_000, 100))


def test_what_a_crash_left_of_forgotten_objects_goes_by_age() -> None:
    bench = Bench(4)
    bench.expire(200)
    bench.clock.now_ms += DAY_MS
    bench.store.faults = lambda call, _: Fault.UNAVAILABLE if call == "delete" else None
    with pytest.raises(StoreUnavailable):
        bench.collect()
    bench.store.faults = lambda call, key: None
    assert bench.segments() == [0, 100, 200, 300]
    bench.state = bench.manifests.load() or bench.state
    assert bench.state.removed == ()
    bench.collect()
    assert bench.segments() == [200, 300]


def test_a_page_that_a_trim_took_from_a_pin_does_not_stop_collection() -> None:
    bench = Bench(700)
    bench.pins.create("backfill", bench.state.version)
    bench.expire(5_000)
    bench.trim(30_000)
    bench.clock.now_ms += DAY_MS
    bench.collect()
    bench = bench.restarted()
    bench.expire(60_000)
    bench.clock.now_ms += DAY_MS
    bench.store.calls.clear()
    bench.collect()
    assert bench.store.calls["get"] < 20  # a page that is gone is asked for once
    assert bench.segments() == list(range(30_000, 70_000, 100))
    bench.pins.delete("backfill")
    bench.collect()
    assert bench.segments() == list(range(60_000, 70_000, 100))


def test_a_page_of_dropped_segments_that_is_lost_does_not_stop_collection() -> None:
    bench = Bench(700)
    bench.clock.now_ms += 5 * DAY_MS
    bench.expire(60_050)
    assert len(bench.state.removed_pages) > 1
    del bench.store.objects[bench.state.removed_pages[0].key]
    bench = bench.restarted()
    bench.collect()
    assert bench.segments() == list(range(0, 70_000, 100))  # the lost page's have their grace too
    bench.clock.now_ms += DAY_MS
    bench.collect()
    assert bench.state.removed_pages == ()
    bench.collect()
    assert bench.segments() == list(range(60_000, 70_000, 100))


def test_a_pin_that_was_made_anew_since_the_plan_stays() -> None:
    bench = Bench(4)
    bench.pins.create("nightly", bench.state.version, expires_ms=bench.clock() + 1)
    bench.clock.now_ms += 1
    plan = bench.collector.plan(bench.state, now_ms=bench.clock())
    assert plan.pins == ("nightly",)
    bench.pins.delete("nightly")
    again = bench.pins.create("nightly", bench.state.version)
    bench.collector.apply(bench.state, plan)
    assert bench.pins.all() == [again]


def test_a_pin_that_could_not_be_checked_is_withdrawn() -> None:
    bench = Bench(2)
    bench.store.faults = lambda call, key: (
        Fault.UNAVAILABLE if call == "get" and key.startswith(KEYS.versions) else None
    )
    with pytest.raises(StoreUnavailable):
        bench.pins.create("backfill", bench.state.version)
    bench.store.faults = lambda call, key: None
    assert bench.pins.all() == []


def test_the_error_of_a_page_does_not_grow_with_each_name_that_may_be_in_it() -> None:
    bench = Bench(300)
    (page,) = bench.state.pages
    assert isinstance(page, PageRef)
    bench.store.delete([page.key])
    pages = _FailFastPages(bench.restarted().manifests)
    frames = []
    for _ in range(3):
        with pytest.raises(CorruptDataError) as failed:
            pages.entries(page)
        frames.append(len(failed.traceback))
    assert frames[2] <= frames[1] <= frames[0]
