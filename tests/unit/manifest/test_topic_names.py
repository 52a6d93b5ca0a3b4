from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from msgspec.structs import replace

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.topic_names import TopicName, TopicNames
from tierlog.object_store.open import open_store
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptManifest, OutcomeUnknownError, TopicExists

NEXT = {1: "00000000000000000001", 2: "00000000000000000002"}


class Names(TopicNames):
    """As a broker changes them."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store, pause=lambda s: None)

    def take(self, name: str, topic_id: str) -> TopicName:
        def taken(before: TopicName | None) -> TopicName:
            if before is not None and before.topic_id is not None:
                raise TopicExists(name)
            return TopicName(topic=name, topic_id=topic_id, partitions=1)

        return self.change_name(name, taken)

    def alter(self, name: str, key: str) -> TopicName:
        def altered(before: TopicName | None) -> TopicName:
            assert before is not None
            return replace(before, config={**before.config, key: 1})

        return self.change_name(name, altered)

    def release(self, name: str) -> TopicName:
        return self.change_name(name, lambda _: TopicName(topic=name, topic_id=None))

    def id_of(self, name: str) -> str | None:
        found = self.find_name(name)
        return None if found is None else found.topic_id

    def ids(self) -> dict[str, str | None]:
        return {one.topic: one.topic_id for one in self.list_names()}


def test_a_name_has_one_id_until_it_is_released() -> None:
    store = PlainStore()
    Names(store).take("flights", "a")
    with pytest.raises(TopicExists, match="flights"):
        Names(store).take("flights", "b")
    assert len(store.objects) == 1, "a refused change writes nothing"
    Names(store).release("flights")
    assert Names(store).id_of("flights") is None
    Names(store).take("flights", "b")
    assert (Names(store).ids(), store.overwritten) == ({"flights": "b"}, [])


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE, Fault.CUT, Fault.CONFLICT])
def test_a_name_is_changed_once_despite_a_failed_put(fault: Fault) -> None:
    store, armed = PlainStore(), [fault]
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    Names(store).take("flights", "a")
    assert Names(store).id_of("flights") == "a"
    armed.append(fault)
    Names(store).release("flights")
    assert (Names(store).id_of("flights"), store.overwritten) == (None, [])


def test_a_request_that_arrives_late_does_not_take_the_name_from_another() -> None:
    store = PlainStore()
    store.faults = lambda call, key: Fault.DELAYED if call == "put" else None
    with pytest.raises(OutcomeUnknownError):
        Names(store).take("flights", "late")
    store.faults = lambda call, key: None
    Names(store).take("flights", "a")
    store.deliver_delayed()
    assert Names(store).id_of("flights") == "a"
    with pytest.raises(TopicExists):
        Names(store).take("flights", "late")


@contextmanager
def folder_stores(folder: Path) -> Iterator[list[ObjectStore]]:
    stores = [open_store(folder.as_uri()) for _ in range(3)]
    yield stores
    for store in stores:
        store.close()


@contextmanager
def one_dict(_folder: Path) -> Iterator[list[ObjectStore]]:
    yield [PlainStore()] * 3


@pytest.mark.parametrize("stores_of", [folder_stores, one_dict])
def test_of_fifty_that_take_a_name_at_the_same_time_one_gets_it(
    tmp_path: Path, stores_of: Callable[..., Iterator[list[ObjectStore]]]
) -> None:
    with stores_of(tmp_path) as stores, ThreadPoolExecutor(50) as pool:  # type: ignore[attr-defined]
        for name in ("one", "two"):
            together = threading.Barrier(50)

            def take(number: int, name: str = name, together: threading.Barrier = together) -> int:
                together.wait()
                with suppress(TopicExists):
                    Names(stores[number % 3]).take(name, f"id-{number}")
                    return number
                return -1

            winners = [number for number in pool.map(take, range(50)) if number >= 0]
            assert [Names(store).id_of(name) for store in stores] == [f"id-{winners[0]}"] * 3
            assert len(winners) == 1


@pytest.mark.parametrize("stores_of", [folder_stores, one_dict])
def test_of_changes_at_the_same_time_none_is_lost(
    tmp_path: Path, stores_of: Callable[..., Iterator[list[ObjectStore]]]
) -> None:
    with stores_of(tmp_path) as stores, ThreadPoolExecutor(12) as pool:  # type: ignore[attr-defined]
        Names(stores[0]).take("flights", "a")
        list(pool.map(lambda n: Names(stores[n % 3]).alter("flights", f"key-{n}"), range(12)))
        found = Names(stores[0]).find_name("flights")
        assert found is not None
        assert (set(found.config), found.version) == ({f"key-{n}" for n in range(12)}, 13)


def test_names_are_listed_by_one_request_while_nothing_changes() -> None:
    store = PlainStore()
    ours = Names(store)
    for number in range(700):
        ours.take(f"t{number}", f"id-{number}")
    for number in range(0, 700, 2):
        ours.release(f"t{number}")
    expected = {f"t{number}": f"id-{number}" if number % 2 else None for number in range(700)}
    assert ours.ids() == expected
    ours.take("t0", "new")
    ours.take("t-0", "newer")  # sorts before `t/`, and between no two versions of `t`
    store.calls.clear()
    assert ours.ids() == {**expected, "t0": "new", "t-0": "newer"}
    assert (store.calls["get"], store.calls["put"]) == (2, 0)
    store.calls.clear()
    ours.list_names()
    assert store.calls == {"list": 2}, "1,052 versions"


def test_a_void_version_does_not_hide_the_one_before() -> None:
    store = PlainStore()
    ours = Names(store)
    ours.take("flights", "a")
    first, second = (f"cluster/topic-names/flights/{NEXT[n]}.json" for n in (1, 2))
    store.objects[second] = (store.objects[first][0][:60], 0)
    assert ours.ids() == {"flights": "a"}
    store.calls.clear()
    assert (ours.ids(), store.calls) == ({"flights": "a"}, {"list": 1})
    assert ours.release("flights").version == 3
    assert ours.ids() == {"flights": None}


def test_names_that_no_topic_can_have_are_skipped() -> None:
    store = PlainStore()
    for name in ("a b", "x" * 250, "flights/more", ".."):
        store.objects[f"cluster/topic-names/{name}/{NEXT[1]}.json"] = (b"{}", 0)
    store.objects["cluster/topic-names/note.txt"] = (b"", 0)
    store.objects["cluster/topic-names/flights/1.json"] = (b"", 0)
    assert Names(store).list_names() == []


def test_what_no_broker_would_write_is_corrupt_and_makes_no_topic_seem_deleted() -> None:
    store = PlainStore()
    Names(store).take("flights", "a")
    Names(store).take("users", "b")
    key = f"cluster/topic-names/users/{NEXT[2]}.json"
    for bad in (
        TopicName(topic="flights", topic_id=None, version=2),
        TopicName(topic="users", topic_id=None, version=3),
        TopicName(topic="users", topic_id="../../x", partitions=1, version=2),
        TopicName(topic="users", topic_id="c", partitions=0, version=2),
    ):
        store.objects[key] = (sealed_json.encode(bad, kind="topic-name"), 0)
        with pytest.raises(CorruptManifest, match="users"):
            Names(store).list_names()


def test_a_replication_factor_is_written_unless_it_is_one() -> None:
    store = PlainStore()
    Names(store).take("flights", "a")
    Names(store).change_name("flights", lambda one: replace(one, replication_factor=3))
    first, second = (
        b"replication_factor" in store.objects[key][0] for key in sorted(store.objects)
    )
    assert (first, second) == (False, True)
    found = Names(store).find_name("flights")
    assert found is not None
    assert found.replication_factor == 3
