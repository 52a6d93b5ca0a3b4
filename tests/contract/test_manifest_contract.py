"""The manifest over every store: the races that its promises rest on, with real requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from msgspec.structs import replace

from manifest.garbage import Collector, GarbagePolicy
from manifest.paging import INLINE_MAX
from manifest.pins import Pins
from manifest.store import ManifestStore, StoreOptions
from manifest.topic_objects import Cluster, TopicObject, TopicObjects, create_cluster, load_cluster
from manifest.transitions import add_segments, trim
from record_format.errors import ConfigurationError, FencedError
from tests.fakes.manifests import KEYS, Clock, claim, entry, manifest_store, run_of


@pytest.fixture(autouse=True)
def atomic(store_kind: str, request: pytest.FixtureRequest) -> None:
    if store_kind == "moto" and "race" in request.node.name:
        pytest.skip("moto promises nothing to writers at the same time")


def opened(store) -> ManifestStore:
    """A store with random names, as a process of its own would have."""
    return ManifestStore(store, KEYS, StoreOptions(clock=Clock()))


def test_a_manifest_comes_back_as_it_was_committed(store) -> None:
    manifests = opened(store)
    assert manifests.load() is None
    state = manifests.claim(claim(), log_start_offset=0)
    state = manifests.commit(state, lambda s: add_segments(s, run_of(INLINE_MAX + 5)))
    state = manifests.commit(state, lambda s: trim(s, 1_050, pages=manifests, now_ms=5))
    assert state.pages
    assert opened(store).load() == state
    manifests.confirm(state)
    assert [stat.version for stat in manifests.list_versions()] == [1, 2, 3]
    found = opened(store).find(state, 1_060)
    assert found is not None
    assert found.base_offset == 1_000


def test_the_newest_version_is_found_with_and_without_a_start(store) -> None:
    manifests = opened(store)
    state = manifests.claim(claim(), log_start_offset=0)
    for i in range(12):
        state = manifests.commit(state, lambda s, i=i: add_segments(s, [entry(i * 100)]))
    manifests.versions.delete([2, 3, 4, 7])
    for at_least in (0, 1, 3, 12, 13):
        assert manifests.versions.newest(at_least=at_least) == 13
    assert [s.version for s in manifests.versions.stats(after=4, limit=3)] == [5, 6, 8]


def test_writers_that_race_lose_no_transition(store) -> None:
    base = opened(store).claim(claim(), log_start_offset=0)
    together = threading.Barrier(4)

    def trims(number: int) -> None:
        manifests, state = opened(store), base
        together.wait(10)
        for step in range(5):
            state = manifests.commit(
                state,
                lambda s, end=(number + 4 * step + 1) * 10: replace(
                    s, end_offset=s.end_offset + 1, compacted_before=s.compacted_before + 1
                ),
            )

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(trims, range(4)))
    state = opened(store).load()
    assert state is not None
    assert (state.version, state.end_offset) == (21, 20)


def test_of_claims_that_race_one_wins_each_epoch(store) -> None:
    together = threading.Barrier(6)

    def claims(number: int) -> str | None:
        together.wait(10)
        try:
            return opened(store).claim(claim(f"owner-{number}", 0), log_start_offset=0).owner
        except FencedError:
            return None

    with ThreadPoolExecutor(6) as pool:
        winners = [owner for owner in pool.map(claims, range(6)) if owner]
    state = opened(store).load()
    assert state is not None
    assert winners == [state.owner]


def test_a_former_owner_is_fenced(store) -> None:
    one = opened(store)
    base = one.claim(claim(), log_start_offset=0)
    opened(store).claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError):
        one.commit(base, lambda s: add_segments(s, [entry(0)]))


def test_topics_are_found_whatever_their_names(store) -> None:
    wanted = {("a", "1"), ("a-b", "2"), ("a.b", "3"), ("a", "4"), ("A", "5"), ("_x", "6")}
    topics = TopicObjects(store)
    for name, topic_id in wanted:
        made = TopicObject(name=name, topic_id=topic_id, partitions=1, config={}, created_ms=1)
        topics.write(made, check=lambda: None)
        for i in range(3):
            store.put(f"topics/{name}/{topic_id}/0/segments/{i:020d}-0-u.log", b"x")
    assert sorted(topics.scan()) == sorted(wanted)
    assert {topics.load(*key).topic_id for key in wanted} == {key[1] for key in wanted}


def test_a_prefix_belongs_to_one_cluster(store) -> None:
    assert load_cluster(store) is None
    cluster = create_cluster(store, Cluster(cluster_id="c1", created_ms=1))
    assert create_cluster(store, cluster) == load_cluster(store) == cluster
    with pytest.raises(ConfigurationError):
        create_cluster(store, Cluster(cluster_id="c2", created_ms=1))


def test_garbage_goes_and_pins_stay(store) -> None:
    manifests = manifest_store(store)
    state = manifests.claim(claim(), log_start_offset=0)
    for one in run_of(3):
        for key in one.keys:
            store.put(key, b"x")
        state = manifests.commit(state, lambda s, one=one: add_segments(s, [one]))
    clock = Clock()
    pins = Pins(manifests, clock=clock)
    pins.create("all", state.version)
    assert [pin.name for pin in pins.all()] == ["all"]
    state = manifests.commit(state, lambda s: trim(s, 100, pages=manifests, now_ms=0))
    # The store's own clock stamps objects: a grace of no time at all is what can be tested here.
    collector = Collector(manifests, pins, GarbagePolicy(grace_ms=0, keep_ms=0, keep_min=2))
    now_ms = 4_000_000_000_000
    state = collector.apply(state, collector.plan(state, now_ms=now_ms))
    left = [stat.key for stat in store.list(KEYS.segments, limit=10)]
    assert left == sorted(key for one in run_of(3)[1:] for key in one.keys)
    assert state.removed == ()
    assert 4 in [stat.version for stat in manifests.list_versions()]
