from __future__ import annotations

from collections.abc import Sequence
from typing import Self

import pytest

from tests.fakes.clock import Clock
from tests.fakes.manifests import KEYS, claim, entry, manifest_store, run_of
from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.garbage import (
    Collector,
    GarbagePlan,
    GarbagePolicy,
    _FailFastPages,
    expired_versions,
)
from tierlog.manifest.keys import version_key
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest, PageRef
from tierlog.manifest.store import DAY_MS, ManifestStore
from tierlog.manifest.transitions import add_segments, drop_expired, trim
from tierlog.manifest.versions import VersionStat
from tierlog.object_store.store import IncompleteUpload
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    FencedError,
    InvalidRequest,
    ManifestConflict,
    MissingObject,
    StoreUnavailable,
    UnknownManifestVersion,
)


class Bucket:
    """A partition whose segment objects exist in the bucket."""

    def __init__(self, count: int, *, grace_ms: int = DAY_MS) -> None:
        self.clock = Clock()
        self.store = PlainStore(clock=self.clock)
        self.manifests: ManifestStore = manifest_store(self.store, clock=self.clock)
        self.pins = Pins(self.manifests, clock=self.clock)
        policy = GarbagePolicy(grace_ms=grace_ms, keep_min=3)
        self.collector = Collector(self.manifests, self.pins, policy)
        self.state: Manifest = self.manifests.claim_manifest(claim(), log_start_offset=0)
        for segment in run_of(count):
            for key in segment.keys:
                self.store.put(key, b"x")
            self.commit(lambda s, segment=segment: add_segments(s, [segment]))

    def restarted(self) -> Self:
        """Start over with empty caches."""
        self.manifests = manifest_store(self.store, clock=self.clock)
        self.pins = Pins(self.manifests, clock=self.clock)
        self.collector = Collector(self.manifests, self.pins, GarbagePolicy(keep_min=3))
        return self

    def commit(self, transition) -> Manifest:
        self.state = self.manifests.commit_manifest(self.state, transition)
        return self.state

    def expire(self, before_offset: int) -> None:
        now_ms = self.clock()
        self.commit(lambda s: drop_expired(s, before_offset, pages=self.manifests, now_ms=now_ms))

    def trim(self, before_offset: int) -> None:
        now_ms = self.clock()
        self.commit(lambda s: trim(s, before_offset, pages=self.manifests, now_ms=now_ms))

    def collect(self) -> None:
        plan = self.collector.plan_collection(self.state, now_ms=self.clock())
        self.state = self.collector.delete_garbage(self.state, plan)

    def segments(self) -> list[int]:
        logs = [k for k in self.store.objects if k.startswith(KEYS.segments) and k.endswith(".log")]
        return sorted(int(key.rpartition("/")[2][:20]) for key in logs)


def test_a_dropped_object_is_deleted_after_its_grace_period() -> None:
    bucket = Bucket(4)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS - 1
    bucket.collect()
    assert bucket.segments() == [0, 100, 200, 300]
    bucket.clock.now_ms += 1
    bucket.collect()
    assert bucket.segments() == [200, 300]
    assert bucket.state.removed == ()


def test_a_pin_keeps_the_objects_and_the_version() -> None:
    bucket = Bucket(4)
    pinned = bucket.state.version
    bucket.pins.create_pin("backfill", pinned, expires_ms=bucket.clock() + 3 * DAY_MS)
    bucket.expire(200)
    for _ in range(5):
        bucket.commit(lambda s: add_segments(s, [entry(s.end_offset)]))
    bucket.clock.now_ms += 2 * DAY_MS
    bucket.collect()
    assert bucket.segments() == [0, 100, 200, 300]
    assert list(bucket.pins.missing_objects(pinned)) == []
    assert pinned in [stat.version for stat in bucket.manifests.versions.stats()]
    bucket.clock.now_ms += 2 * DAY_MS
    bucket.collect()
    assert bucket.segments() == [200, 300]
    assert bucket.pins.all_pins() == []


def test_a_version_with_several_pins_is_loaded_once() -> None:
    bucket = Bucket(2)
    for name in "abc":
        bucket.pins.create_pin(name, bucket.state.version)
    before = bucket.store.calls["get"]
    bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock())
    assert bucket.store.calls["get"] - before == len("abc") + 1


def test_a_trim_overrides_pins() -> None:
    bucket = Bucket(4)
    bucket.pins.create_pin("backfill", bucket.state.version)
    bucket.trim(200)
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert bucket.segments() == [200, 300]
    assert len(list(bucket.pins.missing_objects(bucket.pins.all_pins()[0].version))) == 4


def test_orphans_are_deleted_by_age_and_referenced_objects_stay() -> None:
    bucket = Bucket(2)
    orphan = entry(200, unique="orphan").log_key
    bucket.store.put(orphan, b"x")
    foreign_keys = [f"{KEYS.segments}README", f"{KEYS.segments}kept/{200:020d}-0-a.indexes"]
    for foreign_key in foreign_keys:
        bucket.store.put(foreign_key, b"not ours")
    bucket.collect()
    assert orphan in bucket.store.objects
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert orphan not in bucket.store.objects
    assert set(foreign_keys) <= set(bucket.store.objects)
    assert bucket.segments() == [0, 100]


def test_an_abandoned_upload_is_aborted_after_its_grace_period() -> None:
    bucket = Bucket(1)
    abandoned = IncompleteUpload(f"{KEYS.segments}abandoned.log", "id", bucket.clock())
    elsewhere = IncompleteUpload("topics/other/abandoned.log", "id", bucket.clock())
    bucket.store.uploads = [abandoned, elsewhere]
    bucket.clock.now_ms += DAY_MS - 1
    bucket.collect()
    assert bucket.store.uploads == [abandoned, elsewhere]
    bucket.clock.now_ms += 1
    bucket.collect()
    assert bucket.store.uploads == [elsewhere]


def test_an_upload_in_progress_is_never_aborted() -> None:
    bucket = Bucket(1)
    in_progress = IncompleteUpload(entry(100).log_key, "id", bucket.clock())
    abandoned = IncompleteUpload(entry(200).log_key, "id", bucket.clock())
    bucket.store.uploads = [in_progress, abandoned]
    bucket.clock.now_ms += DAY_MS
    bucket.collector = Collector(
        bucket.manifests, bucket.pins, GarbagePolicy(), is_uploading={100}.__contains__
    )
    bucket.collect()
    assert bucket.store.uploads == [in_progress]


def test_a_dropped_object_is_not_treated_as_an_orphan() -> None:
    bucket = Bucket(3)
    bucket.clock.now_ms += 5 * DAY_MS
    bucket.expire(100)
    bucket.collect()
    assert bucket.segments() == [0, 100, 200]


def test_pages_of_dropped_segments_are_deleted_with_their_segments() -> None:
    bucket = Bucket(700)
    assert bucket.state.pages
    bucket.expire(60_050)
    assert bucket.state.removed_pages
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert bucket.segments() == list(range(60_000, 70_000, 100))
    assert bucket.state.removed_pages == ()
    assert [k for k in bucket.store.objects if k.startswith(KEYS.pages)] == [
        p.key for p in bucket.state.pages
    ]


def test_only_the_owner_collects() -> None:
    bucket = Bucket(3)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    plan = bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock())
    assert plan.objects
    other = manifest_store(bucket.store, clock=bucket.clock, writer="y")
    other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError):
        bucket.collector.delete_garbage(bucket.state, plan)
    assert bucket.segments() == [0, 100, 200]


def test_a_void_newer_version_does_not_block_collection() -> None:
    bucket = Bucket(3)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    whole = bucket.store.objects[version_key(KEYS.versions, bucket.state.version)][0]
    bucket.store.put(version_key(KEYS.versions, bucket.state.version + 1), whole[:-5])
    bucket.collect()
    assert bucket.segments() == [200]


def test_a_collection_that_died_before_its_commit_is_repeated() -> None:
    bucket = Bucket(3)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    plan = bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock())
    bucket.store.delete(plan.objects)
    bucket.collect()
    assert bucket.state.removed == ()


def test_the_age_of_a_version_starts_with_its_successor() -> None:
    stats = [
        VersionStat(v, 10, modified_ms) for v, modified_ms in [(1, 0), (2, 10), (3, 20), (4, 30)]
    ]
    policy = GarbagePolicy(keep_ms=100, keep_min=1)
    assert list(expired_versions(stats, newest=4, now_ms=109, policy=policy)) == []
    assert list(expired_versions(stats, newest=4, now_ms=110, policy=policy)) == [1]
    assert list(expired_versions(stats, newest=4, now_ms=10**9, policy=policy)) == [1, 2, 3]
    keep_two = policy._replace(keep_min=2)
    assert list(expired_versions(stats, newest=4, now_ms=10**9, policy=keep_two)) == [1, 2]


def test_old_versions_are_deleted_but_never_the_newest() -> None:
    bucket = Bucket(8)
    bucket.clock.now_ms += 2 * DAY_MS
    bucket.collect()
    versions = [stat.version for stat in bucket.manifests.versions.stats()]
    assert versions == [7, 8, 9]
    assert bucket.manifests.load_manifest() == bucket.state


def test_pinning_a_version_whose_objects_are_gone_fails() -> None:
    bucket = Bucket(3)
    version = bucket.state.version
    bucket.expire(200)
    bucket.store.delete(entry(0).keys)
    with pytest.raises(MissingObject):
        bucket.pins.create_pin("late", version)
    with pytest.raises(UnknownManifestVersion):
        bucket.pins.create_pin("never", 99)
    assert bucket.pins.all_pins() == []


def test_a_pin_of_a_missing_version_does_not_block_collection() -> None:
    bucket = Bucket(4)
    bucket.pins.create_pin("dangling", 2)
    bucket.manifests.versions.delete_versions([2])
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert bucket.segments() == [200, 300]


@pytest.mark.parametrize("name", ["", "a/b", "..ä", "x" * 129])
def test_an_invalid_pin_name_is_refused(name: str) -> None:
    with pytest.raises(InvalidRequest):
        Bucket(1).pins.create_pin(name, 1)


def test_a_pin_is_created_once_even_if_the_response_is_lost() -> None:
    bucket = Bucket(1)
    armed = [Fault.LOST_AFTER]
    bucket.store.faults = lambda call, key: (
        armed.pop() if armed and "/pins/" in key and call == "put" else None
    )
    bucket.pins.create_pin("one", 1)
    with pytest.raises(InvalidRequest, match="exists"):
        bucket.pins.create_pin("one", 2)
    bucket.pins.delete_pin("one")
    bucket.pins.delete_pin("one")
    assert bucket.pins.all_pins() == []


def test_a_plan_based_on_an_older_version_deletes_nothing() -> None:
    bucket = Bucket(2)
    late = entry(200)
    for key in late.keys:
        bucket.store.put(key, b"x")
    bucket.clock.now_ms += DAY_MS
    planned_by = bucket.state
    plan = bucket.collector.plan_collection(planned_by, now_ms=bucket.clock())
    assert set(plan.orphans) == set(late.keys)
    bucket.commit(lambda s: add_segments(s, [late]))
    with pytest.raises(ManifestConflict, match="in force, but the plan is based on"):
        bucket.collector.delete_garbage(planned_by, plan)
    assert bucket.segments() == [0, 100, 200]


def two_expired() -> tuple[Bucket, int, GarbagePlan]:
    """The version that still references all four segments, and the plan that collects two."""
    bucket = Bucket(4, grace_ms=DAY_MS // 4)
    whole = bucket.state.version
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS // 4
    plan = bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock())
    return bucket, whole, plan


def test_a_pin_created_after_the_plan_keeps_its_objects() -> None:
    bucket, whole, plan = two_expired()
    bucket.pins.create_pin("backfill", whole)
    bucket.state = bucket.collector.delete_garbage(bucket.state, plan)
    assert bucket.segments() == [0, 100, 200, 300]
    bucket.collect()
    assert bucket.segments() == [0, 100, 200, 300]
    bucket.pins.delete_pin("backfill")
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert bucket.segments() == [200, 300]


def test_a_version_pinned_after_the_plan_is_kept() -> None:
    """The collector's clock is ahead of the store's."""
    bucket = Bucket(8)
    plan = bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock() + DAY_MS)
    assert 2 in plan.versions
    bucket.pins.create_pin("backfill", 2)
    bucket.state = bucket.collector.delete_garbage(bucket.state, plan)
    assert [stat.version for stat in bucket.manifests.versions.stats()] == [2, 7, 8, 9]


def test_pinning_a_version_that_is_being_deleted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The version and all its objects still exist, but the collector has already read the pins."""
    bucket = Bucket(8)
    bucket.clock.now_ms += DAY_MS
    delete = bucket.store.delete

    def pin_then_delete(keys: Sequence[str]) -> None:
        monkeypatch.undo()
        with pytest.raises(UnknownManifestVersion, match="about to be garbage-collected"):
            bucket.pins.create_pin("backfill", 2)
        delete(keys)

    monkeypatch.setattr(bucket.store, "delete", pin_then_delete)
    bucket.collect()
    assert [stat.version for stat in bucket.manifests.versions.stats()] == [7, 8, 9]
    assert bucket.pins.all_pins() == []


def test_pinning_objects_that_are_being_deleted_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    bucket, whole, plan = two_expired()
    delete = bucket.store.delete

    def pin_then_delete(keys: Sequence[str]) -> None:
        monkeypatch.undo()
        with pytest.raises(MissingObject, match="is missing"):
            bucket.pins.create_pin("backfill", whole)
        delete(keys)

    monkeypatch.setattr(bucket.store, "delete", pin_then_delete)
    bucket.state = bucket.collector.delete_garbage(bucket.state, plan)
    assert bucket.segments() == [200, 300]
    assert bucket.pins.all_pins() == []


def test_a_pin_created_just_before_the_commit_keeps_its_objects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bucket, whole, plan = two_expired()
    put = bucket.store.put

    def pin_then_put(key: str, body: bytes, **options: bool) -> object:
        monkeypatch.undo()
        bucket.pins.create_pin("backfill", whole)
        return put(key, body, **options)

    monkeypatch.setattr(bucket.store, "put", pin_then_put)
    bucket.state = bucket.collector.delete_garbage(bucket.state, plan)
    assert bucket.segments() == [0, 100, 200, 300]


def test_all_objects_a_lost_page_may_reference_are_kept() -> None:
    bucket = Bucket(700)
    del bucket.store.objects[bucket.state.pages[0].key]
    bucket = bucket.restarted()
    bucket.clock.now_ms += 5 * DAY_MS
    bucket.collect()
    assert bucket.segments() == list(range(0, 70_000, 100))


def test_objects_left_by_a_failed_deletion_are_deleted_by_age() -> None:
    bucket = Bucket(4)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    bucket.store.faults = lambda call, _: Fault.UNAVAILABLE if call == "delete" else None
    with pytest.raises(StoreUnavailable):
        bucket.collect()
    bucket.store.faults = lambda call, key: None
    assert bucket.segments() == [0, 100, 200, 300]
    bucket.state = bucket.manifests.load_manifest() or bucket.state
    assert bucket.state.removed == ()
    bucket.collect()
    assert bucket.segments() == [200, 300]


def test_what_may_not_be_deleted_keeps_nothing_else() -> None:
    """By a policy, or an object lock: it is refused in each round."""
    bucket = Bucket(6)
    bucket.pins.create_pin("nightly", bucket.state.version, expires_ms=bucket.clock() + 1)
    bucket.store.uploads = [IncompleteUpload(f"{KEYS.segments}abandoned.log", "id", bucket.clock())]
    locked = {version_key(KEYS.versions, 1), entry(0).log_key}
    bucket.store.faults = lambda call, key: (
        Fault.REFUSED if call == "delete" and key in locked else None
    )
    bucket.expire(200)
    for _ in range(2):
        bucket.clock.now_ms += DAY_MS
        with pytest.raises(ConfigurationError, match=r"manifest/0*1\.json"):
            bucket.collect()
        bucket.state = bucket.manifests.load_manifest() or bucket.state
    assert bucket.segments() == [0, *range(200, 600, 100)]
    assert [bucket.manifests.versions.newest_version(), bucket.state.removed] == [
        bucket.state.version,
        (),
    ]
    assert [stat.version for stat in bucket.manifests.versions.stats()][:2] == [1, 7]
    assert (bucket.store.uploads, bucket.pins.all_pins()) == ([], [])


def test_a_pinned_page_deleted_by_a_trim_does_not_block_collection() -> None:
    bucket = Bucket(700)
    bucket.pins.create_pin("backfill", bucket.state.version)
    bucket.expire(5_000)
    bucket.trim(30_000)
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    bucket = bucket.restarted()
    bucket.expire(60_000)
    bucket.clock.now_ms += DAY_MS
    bucket.store.calls.clear()
    bucket.collect()
    assert bucket.store.calls["get"] < 20  # a missing page is requested once
    assert bucket.segments() == list(range(30_000, 70_000, 100))
    bucket.pins.delete_pin("backfill")
    bucket.collect()
    assert bucket.segments() == list(range(60_000, 70_000, 100))


def test_a_lost_page_of_dropped_segments_does_not_block_collection() -> None:
    bucket = Bucket(700)
    bucket.clock.now_ms += 5 * DAY_MS
    bucket.expire(60_050)
    assert len(bucket.state.removed_pages) > 1
    del bucket.store.objects[bucket.state.removed_pages[0].key]
    bucket = bucket.restarted()
    bucket.collect()
    assert bucket.segments() == list(
        range(0, 70_000, 100)
    )  # the lost page's objects get their grace period too
    bucket.clock.now_ms += DAY_MS
    bucket.collect()
    assert bucket.state.removed_pages == ()
    bucket.collect()
    assert bucket.segments() == list(range(60_000, 70_000, 100))


def test_a_pin_recreated_after_the_plan_is_kept() -> None:
    bucket = Bucket(4)
    bucket.pins.create_pin("nightly", bucket.state.version, expires_ms=bucket.clock() + 1)
    bucket.clock.now_ms += 1
    plan = bucket.collector.plan_collection(bucket.state, now_ms=bucket.clock())
    assert plan.pins == ("nightly",)
    bucket.pins.delete_pin("nightly")
    again = bucket.pins.create_pin("nightly", bucket.state.version)
    bucket.collector.delete_garbage(bucket.state, plan)
    assert bucket.pins.all_pins() == [again]


def test_a_pin_recreated_while_objects_are_deleted_is_kept() -> None:
    """That takes many requests, and the pin had expired."""
    bucket = Bucket(4)
    bucket.pins.create_pin("nightly", bucket.state.version, expires_ms=bucket.clock() + 1)
    bucket.expire(200)
    bucket.clock.now_ms += DAY_MS
    again = []

    def pin_again(call: str, key: str) -> None:
        if (call, key) == ("delete", entry(0).log_key):
            bucket.pins.delete_pin("nightly")
            again.append(bucket.pins.create_pin("nightly", bucket.state.version))

    bucket.store.faults = pin_again
    bucket.collect()
    assert len(again) == 1
    assert bucket.pins.all_pins() == again


def test_a_pin_that_cannot_be_verified_is_withdrawn() -> None:
    bucket = Bucket(2)
    bucket.store.faults = lambda call, key: (
        Fault.UNAVAILABLE if call == "get" and key.startswith(KEYS.versions) else None
    )
    with pytest.raises(StoreUnavailable):
        bucket.pins.create_pin("backfill", bucket.state.version)
    bucket.store.faults = lambda call, key: None
    assert bucket.pins.all_pins() == []


def test_the_cached_error_of_a_page_does_not_grow_when_raised_again() -> None:
    bucket = Bucket(300)
    (page,) = bucket.state.pages
    assert isinstance(page, PageRef)
    bucket.store.delete([page.key])
    pages = _FailFastPages(bucket.restarted().manifests)
    frames = []
    for _ in range(3):
        with pytest.raises(CorruptDataError) as failed:
            pages.page_entries(page)
        frames.append(len(failed.traceback))
    assert frames[2] <= frames[1] <= frames[0]
