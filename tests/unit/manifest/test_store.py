from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.fakes.clock import Clock
from tests.fakes.faulty_object_store import FailsAfter, FaultyObjectStore, WrongBytes
from tests.fakes.manifests import KEYS, NoPages, claim, entry, manifest_store, names
from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.codec import encode_manifest
from tierlog.manifest.garbage import Collector, GarbagePolicy
from tierlog.manifest.keys import version_key
from tierlog.manifest.pins import Pins
from tierlog.manifest.store import DAY_MS, ManifestStore, StoreOptions
from tierlog.manifest.transitions import add_segments, trim
from tierlog.object_store.memory import MemoryStore
from tierlog.record_format.errors import (
    CorruptManifest,
    FencedError,
    MissingObject,
    OutcomeUnknownError,
    StoreUnavailable,
    UnknownFormatVersion,
    UnknownManifestVersion,
)


def adding(base_offset: int, **other: object):
    return lambda state: add_segments(state, [entry(base_offset, **other)])


def once(fault: Fault, *, call: str = "put", key: str = "/manifest/"):
    """Only the first such call fails."""
    armed = [fault]

    def faults(name: str, where: str) -> Fault | None:
        return armed.pop() if armed and name == call and key in where else None

    return faults


@pytest.fixture
def store() -> PlainStore:
    return PlainStore()


def owned(store: PlainStore, **other: object) -> tuple[ManifestStore, object]:
    manifests = manifest_store(store, **other)
    return manifests, manifests.claim_manifest(claim(), log_start_offset=0)


def test_an_empty_bucket_has_no_manifest(store: PlainStore) -> None:
    assert manifest_store(store).load_manifest() is None


def test_the_first_claim_makes_version_one(store: PlainStore) -> None:
    _manifests, state = owned(store)
    assert (state.version, state.owner, state.end_offset) == (1, "owner-a", 0)
    assert manifest_store(store).load_manifest() == state


def test_a_first_claim_survives_a_lost_response_and_a_corrupted_read_back() -> None:
    store = FaultyObjectStore(MemoryStore())
    store.fail("put", FailsAfter())
    store.fail("get", WrongBytes(150))
    state = manifest_store(store).claim_manifest(claim(), log_start_offset=0)
    assert (state.version, state.owner) == (1, "owner-a")
    assert manifest_store(store).load_manifest() == state


def test_a_first_claim_lost_to_a_copy_with_the_same_owner_id_is_fenced() -> None:
    """A copy of the whole disk claims the same owner id and epoch."""
    store = FaultyObjectStore(MemoryStore())

    def copy_claims_first(_: object) -> None:
        if not store.list(KEYS.versions, limit=1):
            manifest_store(store, writer="twin").claim_manifest(claim(), log_start_offset=0)

    with pytest.raises(FencedError, match="never recorded it"):
        manifest_store(store).claim_manifest(
            claim(), log_start_offset=0, before_commit=copy_claims_first
        )


def test_a_first_claim_with_existing_segments_is_refused(store: PlainStore) -> None:
    for key in (f"{KEYS.segments}+foreign", entry(0).log_key):
        store.put(key, b"x")
    with pytest.raises(MissingObject, match="although there are segments"):
        manifest_store(store).claim_manifest(claim(), log_start_offset=0)


def test_a_commit_is_one_request(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.calls.clear()
    state = manifests.commit_manifest(state, adding(0))
    assert store.calls == {"put": 1}
    assert manifest_store(store).load_manifest() == state
    manifests.confirm(state)


def test_a_transition_with_nothing_to_do_commits_nothing(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit_manifest(state, adding(0))
    assert manifests.commit_manifest(state, adding(0)) is state


def test_confirm_refuses_a_replaced_or_missing_version(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit_manifest(state, adding(0))
    other = encode_manifest(replace(state, nonce="another's"))
    store.objects[version_key(KEYS.versions, state.version)] = (other, 0)
    with pytest.raises(FencedError, match="is another writer's"):
        manifests.confirm(state)
    store.delete([version_key(KEYS.versions, state.version)])
    with pytest.raises(MissingObject, match="is missing"):
        manifests.confirm(state)


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_commit_survives_a_failed_put(store: PlainStore, fault: Fault) -> None:
    manifests, state = owned(store)
    store.faults = once(fault)
    state = manifests.commit_manifest(state, adding(0))
    state = manifests.commit_manifest(state, adding(100))
    assert manifest_store(store).load_manifest() == state
    assert [e.base_offset for e in state.segments] == [0, 100]
    assert store.overwritten == []


def test_a_commit_whose_response_is_lost_is_not_repeated(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.faults = once(Fault.LOST_AFTER)
    assert manifests.commit_manifest(state, adding(0)).version == 2
    assert len(manifests.versions.stats()) == 2


def test_readers_and_writers_skip_a_truncated_version(store: PlainStore) -> None:
    manifests, state = owned(store)
    store.faults = once(Fault.CUT)
    after = manifests.commit_manifest(state, adding(0))
    assert after.version == 3
    assert manifest_store(store).load_manifest() == after
    store.objects[version_key(KEYS.versions, 4)] = (encode_manifest(after)[:-1], 0)
    assert manifest_store(store).load_manifest() == after
    assert manifest_store(store).load_manifest(at_least=3) == after


def test_commits_succeed_after_a_series_of_truncated_versions(
    store: PlainStore,
) -> None:
    manifests, state = owned(store)
    store.faults = lambda call, _: Fault.CUT if call == "put" else None
    for _ in range(10):
        with pytest.raises(StoreUnavailable, match="is truncated"):
            manifests.commit_manifest(state, adding(0))
    store.faults = lambda call, key: None
    after = manifests.commit_manifest(state, adding(0))
    assert after.version == state.version + 41
    assert manifest_store(store).load_manifest() == after
    store.calls.clear()
    assert manifests.commit_manifest(after, adding(100)).version == after.version + 1
    assert store.calls == {"put": 1}


def test_a_truncated_first_version_is_no_manifest(store: PlainStore) -> None:
    store.faults = once(Fault.CUT)
    _, state = owned(store)
    assert state.version == 2
    del store.objects[version_key(KEYS.versions, 2)]
    assert manifest_store(store).load_manifest() is None


def test_a_version_once_in_force_is_never_treated_as_void(store: PlainStore) -> None:
    manifests, state = owned(store)
    state = manifests.commit_manifest(state, adding(0))
    key = version_key(KEYS.versions, 2)
    whole = store.objects[key]
    store.objects[key] = (whole[0][:-5], 0)
    with pytest.raises(CorruptManifest):
        manifest_store(store).load_manifest(at_least=2)
    del store.objects[key]
    with pytest.raises(MissingObject):
        manifest_store(store).load_manifest(at_least=2)


def test_a_flipped_byte_is_corruption_and_never_void(store: PlainStore) -> None:
    manifests, state = owned(store)
    manifests.commit_manifest(state, adding(0))
    key = version_key(KEYS.versions, 2)
    whole = store.objects[key][0]
    for position in range(len(whole)):
        body = bytearray(whole)
        body[position] ^= 0x01
        store.objects[key] = (bytes(body), 0)
        with pytest.raises((CorruptManifest, UnknownFormatVersion)):
            manifest_store(store).load_manifest()


def test_a_version_truncated_anywhere_is_void(store: PlainStore) -> None:
    _manifests, state = owned(store)
    body = encode_manifest(replace(state, version=2))
    for size in range(len(body)):
        store.objects[version_key(KEYS.versions, 2)] = (body[:size], 0)
        assert manifest_store(store).load_manifest() == state


def test_a_void_version_does_not_fence_the_one_below_it(store: PlainStore) -> None:
    manifests, state = owned(store)
    whole = encode_manifest(replace(state, version=2))
    store.objects[version_key(KEYS.versions, 2)] = (whole[:-5], 0)
    assert manifests.check_fence(state) is state
    assert manifests.check_fence_by_list(state) is state


def test_a_transition_that_lost_a_race_is_reapplied(store: PlainStore) -> None:
    owner, base = owned(store, writer="x")
    other = manifest_store(store, writer="y")
    other.load_manifest()
    owner.commit_manifest(base, adding(0))
    after = other.commit_manifest(base, lambda state: trim(state, 50, pages=NoPages(), now_ms=1))
    assert (after.version, after.log_start_offset, after.end_offset) == (3, 50, 100)


def test_a_commit_on_a_missing_version_is_refused(store: PlainStore) -> None:
    manifests, first = owned(store)
    state = manifests.commit_manifest(first, adding(0))
    store.delete([version_key(KEYS.versions, state.version)])
    with pytest.raises(MissingObject):
        manifest_store(store).commit_manifest(state, adding(10))


def test_the_former_owner_is_fenced_at_its_next_commit(store: PlainStore) -> None:
    owner, base = owned(store)
    other = manifest_store(store, writer="y")
    other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    with pytest.raises(FencedError, match="owner-b"):
        owner.commit_manifest(base, adding(0))
    with pytest.raises(FencedError):
        owner.check_fence(base)
    with pytest.raises(FencedError):
        owner.confirm(base)


def test_claims_survive_lost_responses(store: PlainStore) -> None:
    store.faults = once(Fault.LOST_AFTER)
    _, _state = owned(store)
    store.faults = once(Fault.LOST_AFTER)
    again = manifest_store(store, writer="y").claim_manifest(
        claim(epoch=1, recorded=[("owner-a", 0)]), log_start_offset=0
    )
    assert (again.version, again.leader_epoch) == (2, 1)


def test_a_store_that_never_responds_leaves_the_outcome_unknown(store: PlainStore) -> None:
    manifests, base = owned(store)
    store.faults = lambda call, key: Fault.DELAYED if call == "put" else None
    with pytest.raises(OutcomeUnknownError):
        manifests.commit_manifest(base, adding(0))
    store.faults = lambda call, key: None
    store.deliver_delayed()
    after = manifests.commit_manifest(base, lambda s: add_segments(s, [entry(0), entry(100)]))
    assert [e.base_offset for e in after.segments] == [0, 100]
    assert store.overwritten == []


def test_a_store_that_is_down_changes_nothing(store: PlainStore) -> None:
    manifests, base = owned(store)
    store.faults = lambda call, key: Fault.UNAVAILABLE
    with pytest.raises(StoreUnavailable):
        manifests.commit_manifest(base, adding(0))
    store.faults = lambda call, key: None
    assert manifests.commit_manifest(base, adding(0)).version == 2


def test_a_paused_writer_does_not_reuse_a_collected_version(store: PlainStore) -> None:
    """Without the reload and the check afterwards the paused writer would take version 2."""
    clock = Clock()
    owner, base = owned(store, clock=clock)
    other = manifest_store(store, clock=clock, writer="y")
    state = other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    for i in range(3):
        state = other.commit_manifest(state, adding(i * 100, leader_epoch=1))
    other.versions.delete_versions([1, 2, 3])
    clock.now_ms += DAY_MS
    with pytest.raises(FencedError):
        owner.commit_manifest(base, adding(0))
    assert manifest_store(store).load_manifest() == state


def test_a_writer_paused_during_a_commit_checks_for_a_new_owner(store: PlainStore) -> None:
    clock = Clock()
    owner, base = owned(store, clock=clock)
    other = manifest_store(store, clock=clock, writer="y")

    def pause_in_transition(state):
        if clock.now_ms == before_ms:
            newer = other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
            newer = other.commit_manifest(newer, adding(0, leader_epoch=1))
            other.versions.delete_versions([1, 2])
            clock.now_ms += DAY_MS
        return adding(0)(state)

    before_ms = clock.now_ms
    with pytest.raises(FencedError):
        owner.commit_manifest(base, pause_in_transition)
    assert [stat.version for stat in other.versions.stats()] == [3]


@pytest.mark.parametrize(
    "call",
    [
        lambda manifests, _: manifests.load_manifest(),
        lambda manifests, state: manifests.commit_manifest(state, adding(0)),
        lambda manifests, state: manifests.check_fence(state),
    ],
)
def test_a_writer_that_waited_a_day_for_a_response_checks_again(store: PlainStore, call) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)

    def slow(_call: str, _key: str) -> None:
        clock.now_ms += DAY_MS
        store.faults = lambda call, key: None

    store.faults = slow
    state = call(manifests, state)
    store.calls.clear()
    manifests.commit_manifest(state, adding(state.end_offset))
    assert store.calls["list"] > 0


def test_a_first_claim_that_paused_checks_for_another_owner(
    store: PlainStore,
) -> None:
    other = manifest_store(store, writer="y")

    def another_claims_first(call: str, key: str) -> Fault | None:
        if call == "put" and store.calls["put"] == 1:
            newer = other.claim_manifest(claim("owner-b", 1), log_start_offset=0)
            other.commit_manifest(newer, adding(0, leader_epoch=1))
            other.versions.delete_versions([1])
        return None

    store.faults = another_claims_first
    with pytest.raises(FencedError):
        manifest_store(store).claim_manifest(claim(), log_start_offset=0)
    assert [stat.version for stat in other.versions.stats()] == [2]


def test_a_writer_that_never_paused_makes_no_extra_request(store: PlainStore) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    clock.now_ms += DAY_MS // 2
    store.calls.clear()
    manifests.commit_manifest(state, adding(0))
    assert store.calls == {"put": 1}


def test_a_fence_check_is_one_cheap_request(store: PlainStore) -> None:
    """It is repeated for each partition forever, and a HEAD costs a twelfth of a LIST."""
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    store.calls.clear()
    for _ in range(100):
        clock.now_ms += DAY_MS // 2
        assert manifests.check_fence(state) is state
    assert store.calls == {"head": 100}


def test_the_fence_check_after_a_pause_lists_all_newer_versions(store: PlainStore) -> None:
    """The version after its own may have been collected by then."""
    clock = Clock()
    owner, base = owned(store, clock=clock)
    other = manifest_store(store, clock=clock, writer="y")
    state = other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    other.commit_manifest(state, adding(0, leader_epoch=1))
    clock.now_ms += DAY_MS
    other.versions.delete_versions([1, 2])
    with pytest.raises(FencedError, match="owner-b"):
        owner.check_fence(base)


def paused_virtual_machine(store: PlainStore, wall: Clock):
    """Its steady clock stood still; the version after its own has been collected."""
    owner = ManifestStore(
        store, KEYS, StoreOptions(clock=wall, boot_clock=Clock(0), unique=names("x"))
    )
    base = owner.claim_manifest(claim(), log_start_offset=0)
    other = manifest_store(store, writer="y")
    state = other.claim_manifest(claim("owner-b", 1, take_over=True), log_start_offset=0)
    state = other.commit_manifest(state, adding(0, leader_epoch=1))
    other.versions.delete_versions([1, 2])
    return owner, base, state


def test_a_pause_of_the_steady_clock_is_noticed_by_the_wall_clock(store: PlainStore) -> None:
    wall = Clock()
    owner, base, state = paused_virtual_machine(store, wall)
    wall.now_ms += DAY_MS
    for call in (owner.check_fence, lambda base: owner.commit_manifest(base, adding(0))):
        with pytest.raises(FencedError, match="owner-b"):
            call(base)
    assert manifest_store(store).load_manifest() == state


def test_a_stale_commit_that_no_clock_reveals_deletes_nothing(store: PlainStore) -> None:
    owner, base, _ = paused_virtual_machine(store, Clock())
    assert owner.check_fence(base) is base
    late = owner.commit_manifest(base, adding(0))
    with pytest.raises(FencedError, match="owner-b"):
        owner.confirm(late)
    collector = Collector(owner, Pins(owner, clock=Clock()), GarbagePolicy())
    with pytest.raises(FencedError, match="owner-b"):
        collector.delete_garbage(late, collector.plan_collection(late, now_ms=Clock()()))


def test_an_owner_that_paused_returns_to_cheap_fence_checks(store: PlainStore) -> None:
    clock = Clock()
    manifests, state = owned(store, clock=clock)
    clock.now_ms += DAY_MS
    store.calls.clear()
    assert manifests.check_fence(state) is state
    assert manifests.check_fence(state) is state
    assert store.calls == {"list": 1, "head": 1}


def test_old_versions_can_be_loaded_while_they_exist(store: PlainStore) -> None:
    manifests, base = owned(store)
    manifests.commit_manifest(base, adding(0))
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
        manifests.load_manifest()


@pytest.mark.parametrize(("commits", "stale"), [(1, False), (2, False), (3, True), (5, True)])
def test_a_folder_missing_more_commits_than_a_crash_can_lose_is_stale(
    store: PlainStore, commits: int, stale: bool
) -> None:
    manifests, noted = owned(store)
    state = noted
    for number in range(commits):
        state = manifests.commit_manifest(state, adding(100 * number))
    calls: list[str] = []
    store.faults = lambda call, _: calls.append(call)
    assert manifests.is_stale_copy(noted, state) is stale
    assert bool(calls) is stale, "the store is asked only if it can matter"
    assert not manifests.is_stale_copy(None, state)
    assert not manifests.is_stale_copy(replace(noted, leader_epoch=7), state)


@pytest.mark.parametrize(("commits", "stale"), [(0, False), (1, False), (2, True), (4, True)])
def test_a_folder_that_missed_a_claim_and_more_commits_is_stale(
    store: PlainStore, commits: int, stale: bool
) -> None:
    """The claim is a commit too; commits of the epoch before do not count."""
    manifests, noted = owned(store)
    for number in range(2):
        manifests.commit_manifest(noted, adding(100 * number))
    state = manifests.claim_manifest(
        claim("owner-a", 1, recorded=[("owner-a", 0)]), log_start_offset=0
    )
    for number in range(commits):
        state = manifests.commit_manifest(state, adding(100 * (2 + number)))
    assert manifests.is_stale_copy(noted, state) is stale


def test_truncated_versions_do_not_make_a_folder_stale(store: PlainStore) -> None:
    manifests, noted = owned(store)
    state = noted
    for number in range(2):
        left = [Fault.CUT] * 3
        store.faults = lambda call, _, left=left: left.pop() if call == "put" and left else None
        state = manifests.commit_manifest(state, adding(100 * number))
    assert state.version == noted.version + 8
    assert not manifests.is_stale_copy(noted, state)
    state = manifests.commit_manifest(state, adding(200))
    assert manifests.is_stale_copy(noted, state)
