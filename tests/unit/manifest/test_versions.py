from __future__ import annotations

import random

import pytest

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.versions import LIST_LIMIT, CreateOutcome, VersionChain
from tierlog.record_format.errors import OutcomeUnknownError
from tierlog.record_format.sealed_json import is_truncated, seal


def chain_of(versions: list[int]) -> tuple[PlainStore, VersionChain]:
    store = PlainStore()
    chain = VersionChain(store, "f/", max_bytes=1000, pause=lambda s: None)
    for version in versions:
        store.objects[chain.key(version)] = (b"{}", 0)
    return store, chain


@pytest.mark.parametrize("count", [0, 1, 2, 999, 1000, 1001, 2500, 9_999])
def test_the_newest_version_is_found_among_any_number(count: int) -> None:
    store, chain = chain_of(list(range(1, count + 1)))
    assert chain.newest_version() == count
    assert store.calls["list"] <= 12


def test_the_newest_of_many_versions_with_holes_takes_few_lists() -> None:
    rng = random.Random(5)
    versions = sorted({1, 7, *rng.sample(range(1, 900_000), 3000), *range(880_000, 900_001)})
    store, chain = chain_of(versions)
    assert chain.newest_version() == 900_000
    assert store.calls["list"] <= 40


def test_from_a_known_version_the_newest_takes_one_list() -> None:
    store, chain = chain_of(list(range(5_000, 9_000)))
    assert chain.newest_version(at_least=8_990) == 8_999
    assert store.calls["list"] == 1


def test_a_known_version_is_the_newest_if_none_is_above_it() -> None:
    _, chain = chain_of([1, 2, 3])
    assert chain.newest_version(at_least=3) == 3


def test_foreign_names_in_the_folder_are_ignored() -> None:
    store, chain = chain_of([1])
    store.objects["f/notes.txt"] = (b"", 0)
    store.objects["f/00000000000000000009.json.bak"] = (b"", 0)
    assert chain.newest_version() == 1


def test_a_foreign_name_does_not_hide_newer_versions() -> None:
    store, chain = chain_of(list(range(1, 2 * LIST_LIMIT)))
    store.objects["f/00000000000000000005.json.bak"] = (b"", 0)
    assert chain.newest_version() == 2 * LIST_LIMIT - 1


def test_an_object_in_a_subfolder_is_no_version() -> None:
    store, chain = chain_of([1, 2])
    store.objects["f/kept/00000000000000000001.json"] = (b"", 0)
    assert chain.newest_version() == 2
    assert [stat.version for stat in chain.stats()] == [1, 2]


def test_a_full_list_page_of_foreign_names_does_not_loop_forever() -> None:
    store, chain = chain_of([3])
    for i in range(LIST_LIMIT + 5):
        store.objects[f"f/zz{i}"] = (b"", 0)
    assert chain.newest_version() == 3


def test_create_tells_our_version_from_another_writers() -> None:
    _, chain = chain_of([])
    assert chain.create_version(1, b'{"n":1}') is CreateOutcome.OURS
    assert chain.create_version(1, b'{"n":1}') is CreateOutcome.OURS, (
        "the same bytes carry the same nonce"
    )
    assert chain.create_version(1, b'{"n":2}') is CreateOutcome.LOST


def test_a_truncated_object_in_the_place_is_reported_as_void() -> None:
    store, chain = chain_of([])
    store.objects[chain.key(1)] = (b'{"format_version":1,"ki', 0)
    assert chain.create_version(1, b'{"n":1}') is CreateOutcome.VOID


def test_create_attempts_are_limited() -> None:
    store, chain = chain_of([])
    store.faults = lambda call, key: Fault.LOST_BEFORE if call == "put" else None
    with pytest.raises(OutcomeUnknownError):
        chain.create_version(1, b"{}")
    assert store.calls["put"] == 4


def test_a_truncated_object_is_told_from_a_changed_one() -> None:
    whole = seal('{"a":[-1,{"b":"c\\n"}],"ü":"€"}'.encode(), kind="manifest")
    assert not is_truncated(whole)
    assert all(is_truncated(whole[:size]) for size in range(len(whole)))
    for position in range(len(whole)):
        changed = bytearray(whole)
        changed[position] ^= 0x02
        assert not is_truncated(bytes(changed)), bytes(changed)
    assert not is_truncated(b"garbage")
