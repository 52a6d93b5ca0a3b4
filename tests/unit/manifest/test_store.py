from __future__ import annotations

import pytest
from msgspec.structs import replace

from cold_tier.memory import MemoryStore
from manifest.codec import encode_manifest
from manifest.garbage import Collector, GarbagePolicy
from manifest.keys import version_key
from manifest.pins import Pins
from manifest.store import DAY_MS, ManifestStore, StoreOptions
from manifest.transitions import add_segments, trim
from record_format.errors import (
    CorruptManifest,
    FencedError,
    MissingObject,
    OutcomeUnknownError,
    StoreUnavailable,
    UnknownFormatVersion,
    UnknownManifestVersion,
)
from tests.fakes.faulty_object_store import FailsAfter, FaultyObjectStore, WrongBytes
from tests.fakes.manifests import KEYS, Clock, NoPages, claim, entry, manifest_store, names
from tests.fakes.plain_store import Fault, PlainStore


def adding(base_offset: int, **other: object):
    return lambda state: add_segments(state, [entry(base_offset, **other)])


def once(fault: Fault, *, call: str = "put", key: str = "/manifest/"):
    """The first such call fails, the ones after it do well."""
    armed = [fault]

    def faults(name: str, where: str) -> Fault | None:
        return armed.pop() if armed and name == call and key in where else None

    return faults


@pytest.fixture
def store() -> PlainStore:
    return PlainStore()


def owned(store: PlainStore, **other: object) -> tuple[ManifestStore, object]:
    manifests = manifest_store(store, **other)
    return manifests, manifests.claim(claim(), log_start_offset=0)


def test_an_empty_bucket_has_no_manifest(store: PlainStore) -> None:
    assert manifest_store(store).load() is None


def test_the_first_claim_makes_version_one(store: PlainStore) -> None:
    _manifests, state = owned(store)
    assert (state.version, state.owner, state.end_offset) == (1, "owner-a", 0)
    assert manifest_store(store).load() == state


def test_a_first_claim_whose_answer_is_lost_and_whose_read_back_arrives_flipped_is_ours() -> None:
    store = FaultyObjectStore(MemoryStore())
    store.fail("put", FailsAfter())
    store.fail("get", WrongBytes(150))
    state = manifest_store(store).claim(claim(), log_start_offset=0)
    assert (state.version, state.owner) == (1, "owner-a")
    assert manifest_store(store).load() == state


def test_a_first_claim_that_is_lost_to_a_twin_of_the_same_name_is_none() -> None:
    """A copy of the whole disk takes the same numbers."""
    store = FaultyObjectStore(MemoryStore())

    def twin_first(_: object) -> None:
        if not store.list(KEYS.versions, limit=1):
            manifest_store(store, writer="twin").claim(claim(), log_start_offset=0)

    with pytest.raises(FencedError, match="never recorded it"):
        manifest_store(store).claim(claim(), log_start_offset=0, before_commit=twin_first)


def test_a_first_claim_over_segments_is_refused(store: PlainStore) -> None:
    for key in (f"{KEYS.segments}+foreign", entry(0).log_key):
        store.put(key, b"x")
    with pytest.raises(MissingObject, match="although there are segments"):
        manifest_store(store).claim(claim(), log_start_offset=0)


def test_a_commit_is_one_request(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.calls.clear()
    state = manifests.commit(state, adding(0))
    assert store.calls == {"put": 1}
    assert manifest_store(store).load() == state
    manifests.confirm(state)


def test_a_transition_with_nothing_to_do_commits_nothing(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit(state, adding(0))
    assert manifests.commit(state, adding(0)) is state


def test_a_version_that_is_not_as_it_was_committed_is_not_confirmed(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit(state, adding(0))
    other = encode_manifest(replace(state, nonce="another's"))
    store.objects[version_key(KEYS.versions, state.version)] = (other, 0)
    with pytest.raises(FencedError, match="is another writer's"):
        manifests.confirm(state)
    store.delete([version_key(KEYS.versions, state.version)])
    with pytest.raises(MissingObject, match="is missing"):
        manifests.confirm(state)


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_commit_survives_a_fault_of_its_put(store: PlainStore, fault: Fault) -> None:
    manifests, state = owned(store)
    store.faults = once(fault)
    state = manifests.commit(state, adding(0))
    state = manifests.commit(state, adding(100))
    assert manifest_store(store).load() == state
    assert [e.base_offset for e in state.segments] == [0, 100]
    assert store.overwritten == []


def test_a_lost_answer_that_is_ours_is_not_committed_twice(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.faults = once(Fault.LOST_AFTER)
    assert manifests.commit(state, adding(0)).version == 2
    assert len(manifests.list_versions()) == 2


def test_a_cut_version_is_stepped_over_by_readers_and_writers(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.faults = once(Fault.CUT)
    after = manifests.commit(state, adding(0))
    assert after.version == 3
    assert manifest_store(store).load() == after
    store.objects[version_key(KEYS.versions, 4)] = (encode_manifest(after)[:-1], 0)
    assert manifest_store(store).load() == after
    assert manifest_store(store).load(at_least=3) == after


def test_a_line_that_cuts_every_put_for_a_while_keeps_nobody_from_committing(
    store: PlainStore,
) -> None:
    manifests, state = owned(store)
    store.faults = lambda call, _: Fault.CUT if call == "put" else None
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="is truncated"):
            manifests.commit(state, adding(0))
    store.faults = lambda call, key: None
    after = manifests.commit(state, adding(0))
    assert after.version == state.version + 41
    assert manifest_store(store).load() == after
    store.calls.clear()
    assert manifests.commit(after, adding(100)).version == after.version + 1
    assert store.calls == {"put": 1}


def test_a_first_version_that_was_cut_is_no_manifest(store: PlainStore) -> None:
    store.faults = once(Fault.CUT)
    _, state = owned(store)
    assert state.version == 2
    del store.objects[version_key(KEYS.versions, 2)]
    assert manifest_store(store).load() is None


def test_a_version_that_was_in_force_is_never_taken_for_void(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit(state, adding(0))
    key = version_key(KEYS.versions, 2)
    whole = store.objects[key]
    store.objects[key] = (whole[0][:-5], 0)
    with pytest.raises(CorruptManifest):
        manifest_store(store).load(at_least=2)
    del store.objects[key]
    with pytest.raises(MissingObject):
        manifest_store(store).load(at_least=2)


def test_a_changed_byte_is_corruption_and_never_void(store: PlainStore) -> None:
    manifests, state = owned(store)
    manifests.commit(state, adding(0))
    key = version_key(KEYS.versions, 2)
    whole = store.objects[key][0]
    for position in range(len(whole)):
        body = bytearray(whole)
        body[position] ^= 0x01
        store.objects[key] = (bytes(body), 0)
        with pytest.raises((CorruptManifest, UnknownFormatVersion)):
            manifest_store(store).load()


def test_every_cut_of_a_version_is_void(store: PlainStore) -> None:
    _manifests, state = owned(store)
    body = encode_manifest(replace(state, version=2))
    for size in range(len(body)):
        store.objects[version_key(KEYS.versions, 2)] = (body[:size], 0)
        assert manifest_store(store).load() == state


def test_below_a_void_version_the_one_that_is_known_is_in_force(store: PlainStore) -> None:
    manifests, state = owned(store)
    whole = encode_manifest(replace(state, version=2))
    store.objects[version_key(KEYS.versions, 2)] = (whole[:-5], 0)
    assert manifests.check_fence(state) is state
    assert manifests.check_fence_by_list(state) is state


def test_a_lost_race_is_applied_again(store: PlainStore) -> None:
    one, base = owned(store, writer="x")
    two = manifest_store(store, writer="y")
    two.load()
    one.commit(base, adding(0))
    after = two.commit(base, lambda state: trim(state, 50, pages=NoPages(), now_ms=1))
    assert (after.version, after.log_start_offset, after.end_offset) == (3, 50, 100)


def test_a_commit_does_not_go_on_below_what_was_in_force(store: PlainStore) -> None:
    manifests, first = owned(store)
    state = manifests.commit(first, adding(0))
    store.delete([version_key(KEYS.versions, state.version)])
    with pytest.raises(MissingObject):
        manifest_store(store).commit(state, adding(10))


def test_a_commit_in_whose_place_another_lies_is_not_confirmed(store: PlainStore) -> None:
    manifests, first = owned(store)
    state = manifests.commit(first, adding(0))
    manifests.confirm(state)
    another = encode_manifest(replace(state, nonce="another"))
    store.put(version_key(KEYS.versions, state.version), another)
    with pytest.raises(FencedError):
        manifests.confirm(state)


def test_the_former_owner_is_fenced_at_its_next_commit(store: PlainStore) -> None:
    one, base = owned(store)
    two = manifest_store(store, writer="y")
    two.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError, match="owner-b"):
        one.commit(base, adding(0))
    with pytest.raises(FencedError):
        one.check_fence(base)
    with pytest.raises(FencedError):
        one.confirm(base)


def test_a_claim_survives_a_race_and_lost_answers(store: PlainStore) -> None:
    store.faults = once(Fault.LOST_AFTER)
    _, _state = owned(store)
    store.faults = once(Fault.LOST_AFTER)
    again = manifest_store(store, writer="y").claim(
        claim(epoch=1, recorded=[("owner-a", 0)]), log_start_offset=0
    )
    assert (again.version, again.leader_epoch) == (2, 1)


def test_a_store_that_never_answers_leaves_the_outcome_open(store: PlainStore) -> None:
    manifests, base = owned(store)
    store.faults = lambda call, key: Fault.DELAYED if call == "put" else None
    with pytest.raises(OutcomeUnknownError):
        manifests.commit(base, adding(0))
    store.faults = lambda call, key: None
    store.deliver_delayed()
    after = manifests.commit(base, lambda s: add_segments(s, [entry(0), entry(100)]))
    assert [e.base_offset for e in after.segments] == [0, 100]
    assert store.overwritten == []


def test_a_store_that_is_down_changes_nothing(store: PlainStore) -> None:
    manifests, base = owned(store)
    store.faults = lambda call, key: Fault.UNAVAILABLE
    with pytest.raises(StoreUnavailable):
        manifests.commit(base, adding(0))
    store.faults = lambda call, key: None
    assert manifests.commit(base, adding(0)).version == 2


def test_a_writer_that_stood_still_does_not_take_a_collected_version(store: PlainStore) -> None:
    """Planted: without the reload and the look afterwards the stalled writer takes version 2."""
    clock = Clock()
    one, base = owned(store, clock=clock)
    two = manifest_store(store, clock=clock, writer="y")
    state = two.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    for i in range(3):
        state = two.commit(state, adding(i * 100, leader_epoch=1))
    two.versions.delete([1, 2, 3])
    clock.now_ms += DAY_MS
    with pytest.raises(FencedError):
        one.commit(base, adding(0))
    assert manifest_store(store).load() == state


def test_a_writer_that_stood_still_in_mid_commit_looks_afterwards(store: PlainStore) -> None:
    clock = Clock()
    one, base = owned(store, clock=clock)
    two = manifest_store(store, clock=clock, writer="y")

    def stands_still(state):
        if clock.now_ms == before_ms:
            newer = two.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
            newer = two.commit(newer, adding(0, leader_epoch=1))
            two.versions.delete([1, 2])
            clock.now_ms += DAY_MS
        return adding(0)(state)

    before_ms = clock.now_ms
    with pytest.raises(FencedError):
        one.commit(base, stands_still)
    assert [stat.version for stat in two.list_versions()] == [3]


@pytest.mark.parametrize(
    "look",
    [
        lambda manifests, _: manifests.load(),
        lambda manifests, state: manifests.commit(state, adding(0)),
        lambda manifests, state: manifests.check_fence(state),
    ],
)
def test_who_waited_a_day_for_an_answer_looks_again(store: PlainStore, look) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)

    def slow(_call: str, _key: str) -> None:
        clock.now_ms += DAY_MS
        store.faults = lambda call, key: None

    store.faults = slow
    state = look(manifests, state)
    store.calls.clear()
    manifests.commit(state, adding(state.end_offset))
    assert store.calls["list"] > 0


def test_a_claim_that_stood_still_before_the_first_version_looks_afterwards(
    store: PlainStore,
) -> None:
    two = manifest_store(store, writer="y")

    def another_owns_it(call: str, key: str) -> Fault | None:
        if call == "put" and store.calls["put"] == 1:
            newer = two.claim(claim("owner-b", 1), log_start_offset=0)
            two.commit(newer, adding(0, leader_epoch=1))
            two.versions.delete([1])
        return None

    store.faults = another_owns_it
    with pytest.raises(FencedError):
        manifest_store(store).claim(claim(), log_start_offset=0)
    assert [stat.version for stat in two.list_versions()] == [2]


def test_a_fresh_writer_pays_nothing_for_that(store: PlainStore) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    clock.now_ms += DAY_MS // 2
    store.calls.clear()
    manifests.commit(state, adding(0))
    assert store.calls == {"put": 1}


def test_an_owner_looks_for_another_by_one_cheap_request(store: PlainStore) -> None:
    """A thousand HEADs cost a twelfth of a thousand LISTs, and each partition is asked of for
    ever.
    """
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    store.calls.clear()
    for _ in range(100):
        clock.now_ms += DAY_MS // 2
        assert manifests.check_fence(state) is state
    assert store.calls == {"head": 100}


def test_an_owner_that_stood_still_looks_for_all_that_is_newer(store: PlainStore) -> None:
    """Planted: the version that followed its own may be collected by then."""
    clock = Clock()
    one, base = owned(store, clock=clock)
    two = manifest_store(store, clock=clock, writer="y")
    state = two.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    two.commit(state, adding(0, leader_epoch=1))
    clock.now_ms += DAY_MS
    two.versions.delete([1, 2])
    with pytest.raises(FencedError, match="owner-b"):
        one.check_fence(base)


def stood_still_by_its_steady_clock(store: PlainStore, wall: Clock):
    """In a virtual machine that was paused. What followed its own version is collected by now."""
    one = ManifestStore(
        store, KEYS, StoreOptions(clock=wall, boot_clock=Clock(0), unique=names("x"))
    )
    base = one.claim(claim(), log_start_offset=0)
    two = manifest_store(store, writer="y")
    state = two.claim(claim("owner-b", 1, take_over=True), log_start_offset=0)
    state = two.commit(state, adding(0, leader_epoch=1))
    two.versions.delete([1, 2])
    return one, base, state


def test_an_owner_whose_steady_clock_stood_still_goes_by_the_wall_clock(store: PlainStore) -> None:
    wall = Clock()
    one, base, state = stood_still_by_its_steady_clock(store, wall)
    wall.now_ms += DAY_MS
    for call in (one.check_fence, lambda base: one.commit(base, adding(0))):
        with pytest.raises(FencedError, match="owner-b"):
            call(base)
    assert manifest_store(store).load() == state


def test_nothing_is_let_go_by_a_commit_that_no_clock_says_came_too_late(store: PlainStore) -> None:
    one, base, _ = stood_still_by_its_steady_clock(store, Clock())
    assert one.check_fence(base) is base
    late = one.commit(base, adding(0))
    with pytest.raises(FencedError, match="owner-b"):
        one.confirm(late)
    collector = Collector(one, Pins(one, clock=Clock()), GarbagePolicy())
    with pytest.raises(FencedError, match="owner-b"):
        collector.apply(late, collector.plan(late, now_ms=Clock()()))


def test_an_owner_that_stood_still_and_is_alone_asks_cheaply_again(store: PlainStore) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    clock.now_ms += DAY_MS
    store.calls.clear()
    assert manifests.check_fence(state) is state
    assert manifests.check_fence(state) is state
    assert store.calls == {"list": 1, "head": 1}


def test_versions_can_be_read_as_long_as_they_exist(store: PlainStore) -> None:
    manifests, base = owned(store)
    manifests.commit(base, adding(0))
    assert manifests.load_version(1) == base
    for absent in (0, 9, -1):
        with pytest.raises(UnknownManifestVersion):
            manifests.load_version(absent)


def test_a_manifest_of_another_partition_is_refused(store: PlainStore) -> None:
    manifests, base = owned(store)
    other = replace(base, partition=9, version=2)
    store.objects[version_key(KEYS.versions, 2)] = (
        encode_manifest(other),
        0,
    )
    with pytest.raises(CorruptManifest, match="/9/"):
        manifests.load()


@pytest.mark.parametrize(("commits", "older"), [(1, False), (2, False), (3, True), (5, True)])
def test_a_folder_that_lacks_more_commits_than_a_crash_explains_is_older(
    store: PlainStore, commits: int, older: bool
) -> None:
    manifests, noted = owned(store)
    state = noted
    for number in range(commits):
        state = manifests.commit(state, adding(100 * number))
    asked: list[str] = []
    store.faults = lambda call, _: asked.append(call)
    assert manifests.is_stale_copy(noted, state) is older
    assert bool(asked) is older, "the store is asked only where it can matter"
    assert not manifests.is_stale_copy(None, state)
    assert not manifests.is_stale_copy(replace(noted, leader_epoch=7), state)


@pytest.mark.parametrize(("commits", "older"), [(0, False), (1, False), (2, True), (4, True)])
def test_a_folder_that_never_noted_its_claim_is_older_where_more_followed(
    store: PlainStore, commits: int, older: bool
) -> None:
    """The claim is a commit too, and those under the epoch before do not count."""
    manifests, noted = owned(store)
    for number in range(2):
        manifests.commit(noted, adding(100 * number))
    state = manifests.claim(claim("owner-a", 1, recorded=[("owner-a", 0)]), log_start_offset=0)
    for number in range(commits):
        state = manifests.commit(state, adding(100 * (2 + number)))
    assert manifests.is_stale_copy(noted, state) is older


def test_versions_that_arrived_cut_make_no_folder_older(store: PlainStore) -> None:
    manifests, noted = owned(store)
    state = noted
    for number in range(2):
        left = [Fault.CUT] * 3
        store.faults = lambda call, _, left=left: left.pop() if call == "put" and left else None
        state = manifests.commit(state, adding(100 * number))
    assert state.version == noted.version + 8
    assert not manifests.is_stale_copy(noted, state)
    state = manifests.commit(state, adding(200))
    assert manifests.is_stale_copy(noted, state)
