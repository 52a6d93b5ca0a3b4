"""The manifest on each store, with the races that its guarantees depend on."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from tests.fakes.clock import Clock
from tests.fakes.manifests import KEYS, claim, entry, manifest_store, run_of
from tierlog.manifest.bucket_level import FORMAT_FOLDER, BucketLevel
from tierlog.manifest.codec import INLINE_MAX
from tierlog.manifest.garbage import Collector, GarbagePolicy
from tierlog.manifest.pins import Pins
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import (
    Cluster,
    TopicObject,
    TopicObjects,
    create_cluster,
    load_cluster,
)
from tierlog.manifest.transitions import add_segments, trim
from tierlog.record_format.errors import ConfigurationError, FencedError
from tierlog.record_format.format_level import LEVELS


@pytest.fixture
def atomic_creates(store_kind: str) -> None:
    if store_kind == "moto":
        pytest.skip("moto's conditional creates are not atomic")


def opened(store) -> ManifestStore:
    """A manifest store with random nonces, as in its own process."""
    return ManifestStore(store, KEYS, StoreOptions(clock=Clock()))


def test_a_committed_manifest_is_loaded_unchanged(store) -> None:
    manifests = opened(store)
    assert manifests.load_manifest() is None
    state = manifests.claim_manifest(claim(), log_start_offset=0)
    state = manifests.commit_manifest(state, lambda s: add_segments(s, run_of(INLINE_MAX + 5)))
    state = manifests.commit_manifest(state, lambda s: trim(s, 1_050, pages=manifests, now_ms=5))
    assert state.pages
    assert opened(store).load_manifest() == state
    manifests.confirm(state)
    assert [stat.version for stat in manifests.versions.stats()] == [1, 2, 3]
    found = opened(store).find_segment(state, 1_060)
    assert found is not None
    assert found.base_offset == 1_000


def test_the_newest_version_is_found_despite_deleted_ones(store) -> None:
    manifests = opened(store)
    state = manifests.claim_manifest(claim(), log_start_offset=0)
    for i in range(12):
        state = manifests.commit_manifest(state, lambda s, i=i: add_segments(s, [entry(i * 100)]))
    manifests.versions.delete_versions([2, 3, 4, 7])
    for at_least in (0, 1, 3, 12, 13):
        assert manifests.versions.newest_version(at_least=at_least) == 13
    assert [s.version for s in manifests.versions.stats(after=4, limit=3)] == [5, 6, 8]


@pytest.mark.usefixtures("atomic_creates")
def test_racing_writers_lose_no_transition(store) -> None:
    base = opened(store).claim_manifest(claim(), log_start_offset=0)
    barrier = threading.Barrier(4)

    def commit_five(_: int) -> None:
        manifests, state = opened(store), base
        barrier.wait(10)
        for _ in range(5):
            state = manifests.commit_manifest(
                state,
                lambda s: replace(
                    s, end_offset=s.end_offset + 1, compacted_before=s.compacted_before + 1
                ),
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(commit_five, range(4)))
    state = opened(store).load_manifest()
    assert state is not None
    assert (state.version, state.end_offset) == (21, 20)


@pytest.mark.usefixtures("atomic_creates")
def test_only_one_of_several_racing_claims_wins(store) -> None:
    barrier = threading.Barrier(6)

    def try_claim(number: int) -> str | None:
        barrier.wait(10)
        try:
            return (
                opened(store).claim_manifest(claim(f"owner-{number}", 0), log_start_offset=0).owner
            )
        except FencedError:
            return None

    with ThreadPoolExecutor(6) as pool:
        winners = [owner for owner in pool.map(try_claim, range(6)) if owner]
    state = opened(store).load_manifest()
    assert state is not None
    assert winners == [state.owner]


def test_a_former_owner_is_fenced(store) -> None:
    manifests = opened(store)
    base = manifests.claim_manifest(claim(), log_start_offset=0)
    opened(store).claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError):
        manifests.commit_manifest(base, lambda s: add_segments(s, [entry(0)]))


def test_topics_with_similar_names_are_all_found(store) -> None:
    wanted = {("a", "1"), ("a-b", "2"), ("a.b", "3"), ("a", "4"), ("A", "5"), ("_x", "6")}
    topics = TopicObjects(store)
    for name, topic_id in wanted:
        made = TopicObject(name=name, topic_id=topic_id, partitions=1, config={}, created_ms=1)
        topics.write_topic(made, check=lambda: None)
        for i in range(3):
            store.put(f"topics/{name}/{topic_id}/0/segments/{i:020d}-0-u.log", b"x")
    assert sorted(topics.scan()) == sorted(wanted)
    assert {topics.load_topic(*key).topic_id for key in wanted} == {key[1] for key in wanted}


def test_a_prefix_belongs_to_one_cluster(store) -> None:
    assert load_cluster(store) is None
    cluster = create_cluster(store, Cluster(cluster_id="c1", created_ms=1))
    assert create_cluster(store, cluster) == load_cluster(store) == cluster
    with pytest.raises(ConfigurationError):
        create_cluster(store, Cluster(cluster_id="c2", created_ms=1))


def test_a_format_level_rises_once_whoever_raises_it(store, monkeypatch) -> None:
    monkeypatch.setitem(LEVELS, 2, "0.2.0")
    with ThreadPoolExecutor(8) as writers:
        list(writers.map(lambda _: BucketLevel(store).raise_level(2), range(8)))
    assert BucketLevel(store).read_level() == 2
    assert [stat.key for stat in store.list(FORMAT_FOLDER, limit=9)] == [
        f"{FORMAT_FOLDER}00000000000000000001.json"
    ]


def test_collection_deletes_objects_and_keeps_pinned_versions(store) -> None:
    manifests = manifest_store(store)
    state = manifests.claim_manifest(claim(), log_start_offset=0)
    for segment in run_of(3):
        for key in segment.keys:
            store.put(key, b"x")
        state = manifests.commit_manifest(
            state, lambda s, segment=segment: add_segments(s, [segment])
        )
    clock = Clock()
    pins = Pins(manifests, clock=clock)
    pins.create_pin("all", state.version)
    assert [pin.name for pin in pins.all_pins()] == ["all"]
    state = manifests.commit_manifest(state, lambda s: trim(s, 100, pages=manifests, now_ms=0))
    # Objects have the store's own times, so that only a grace period of 0 can be tested here.
    collector = Collector(manifests, pins, GarbagePolicy(grace_ms=0, keep_ms=0, keep_min=2))
    now_ms = 4_000_000_000_000
    state = collector.delete_garbage(state, collector.plan_collection(state, now_ms=now_ms))
    left = [stat.key for stat in store.list(KEYS.segments, limit=10)]
    assert left == sorted(key for segment in run_of(3)[1:] for key in segment.keys)
    assert state.removed == ()
    assert 4 in [stat.version for stat in manifests.versions.stats()]
