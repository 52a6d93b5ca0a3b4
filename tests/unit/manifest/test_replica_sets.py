"""The chain that says who leads a partition."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fakes.faulty_object_store import FailsAfter, FaultyObjectStore
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.replica_sets import VERSIONS_KEPT, ReplicaSet, ReplicaSets
from tierlog.manifest.versions import CreateOutcome
from tierlog.object_store.open import open_store
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptManifest, OutcomeUnknownError

KEYS = PartitionKeys("flights", "AAAAAAAAAAAAAAAAAAAAAA", 3)


def one(version: int = 1, **changes: object) -> ReplicaSet:
    given: dict[str, object] = {
        "topic_id": KEYS.topic_id,
        "partition": 3,
        "version": version,
        "leader_epoch": version,
        "leader": "a.0",
        "replicas": (1, 0, 2),
        "in_sync": ("a.0", "b.0"),
        "nonce": "n",
        **changes,
    }
    return ReplicaSet(**given)  # type: ignore[arg-type]


@pytest.fixture
def store(tmp_path: Path) -> FaultyObjectStore:
    return FaultyObjectStore(open_store(tmp_path.as_uri()))


@pytest.fixture
def sets(store: FaultyObjectStore) -> ReplicaSets:
    return ReplicaSets(store, KEYS, pause=lambda _: None)


def test_of_two_changes_one_comes_to_be(sets: ReplicaSets) -> None:
    assert sets.load_newest() == (0, None)
    assert sets.create_version(one(nonce="mine")) is CreateOutcome.OURS
    assert sets.create_version(one(nonce="yours")) is CreateOutcome.LOST
    assert sets.create_version(one(nonce="mine")) is CreateOutcome.OURS  # the answer was lost
    assert sets.load_newest() == (1, one(nonce="mine"))


def test_a_change_without_an_answer_is_repeated_until_it_is_known(
    store: FaultyObjectStore, sets: ReplicaSets
) -> None:
    store.fail("put", FailsAfter(OutcomeUnknownError), times=10)
    assert sets.create_version(one()) is CreateOutcome.OURS  # it is read back


def test_a_version_that_is_deleted_while_it_is_read_does_not_bring_an_older_one_back(
    store: FaultyObjectStore, sets: ReplicaSets
) -> None:
    for version in (1, 2):
        sets.create_version(one(version))

    read = KEYS.replica_sets + f"{2:020d}.json"

    def meanwhile(call: str, key: str) -> None:
        if (call, key) == ("get", read):
            store.before_call = lambda call, key: None
            sets.create_version(one(3))
            store.delete([read])  # version 1 would be next

    store.before_call = meanwhile
    assert sets.load_newest() == (3, one(3))


def test_older_versions_are_deleted_and_a_number_that_was_is_not_the_newest(
    sets: ReplicaSets,
) -> None:
    for version in range(1, 10):
        sets.create_version(one(version))
        assert sets.is_newest(version)
    assert sets.load_newest().taken == 9
    late = one(9 - VERSIONS_KEPT, nonce="of a process that slept")
    assert sets.create_version(late) is CreateOutcome.OURS
    assert not sets.is_newest(late.version)
    assert sets.load_newest() == (9, one(9))


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"replicas": ()}, "no replicas"),
        ({"replicas": (1, 1)}, "replicas: "),
        ({"target": (-1,)}, "target: "),
        ({"original": (1, 1)}, "original: "),
        ({"in_sync": ()}, "in sync are"),
        ({"in_sync": ("a.0", "a.0")}, "in sync are"),
        ({"leader": "c.0"}, "leader c.0 is not in sync"),
        ({"leader_epoch": -1}, "leader epoch -1"),
        ({"partition": 4}, "is version 1 of"),
        ({"version": 2}, "is version 2 of"),
    ],
)
def test_a_set_that_no_broker_would_write_is_refused(
    store: FaultyObjectStore, sets: ReplicaSets, changes: dict[str, object], why: str
) -> None:
    body = sealed_json.encode(one(**changes), kind="replica-set")
    store.put(f"{KEYS.replica_sets}{1:020d}.json", body)
    with pytest.raises(CorruptManifest, match=why):
        sets.load_newest()
