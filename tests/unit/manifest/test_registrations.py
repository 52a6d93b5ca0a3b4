from __future__ import annotations

import pytest
from msgspec.structs import replace

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.registrations import (
    VERSIONS_KEPT,
    Alive,
    Registered,
    Registration,
    Registrations,
)
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptManifest, OutcomeUnknownError

FIRST = Registration(
    node_id=2,
    folder_id="f2",
    incarnation=1,
    url="http://127.0.0.1:8640",
    kafka="127.0.0.1:9092",
    zone="a",
    state="running",
    started_ms=5,
    version=1,
)
KEY = "cluster/brokers/2/registration/00000000000000000001.json"


def registrations(store: PlainStore) -> Registrations:
    return Registrations(store, pause=lambda s: None)


def seal(registration: Registration, kind: str = "registration") -> tuple[bytes, int]:
    return sealed_json.encode(registration, kind=kind), 0


def found(store: PlainStore, node_id: int = 2) -> Registration | None:
    registration = registrations(store).load_registration(node_id).registration
    return replace(registration, nonce="") if registration else None


def test_a_version_is_written_once_and_the_newest_counts() -> None:
    store = PlainStore()
    assert registrations(store).load_registration(2) == Registered(0, None)
    assert registrations(store).write_registration(FIRST)
    assert not registrations(store).write_registration(replace(FIRST, folder_id="other"))
    assert found(store) == FIRST
    draining = replace(FIRST, version=2, state="draining")
    assert registrations(store).write_registration(draining)
    assert (found(store), store.overwritten) == (draining, [])


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE])
def test_a_version_whose_response_was_lost_is_read_back(fault: Fault) -> None:
    store, armed = PlainStore(), [fault]
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    assert registrations(store).write_registration(FIRST)
    assert found(store) == FIRST


def test_without_any_response_the_outcome_is_unknown_and_it_may_come_late() -> None:
    store = PlainStore()
    store.faults = lambda call, key: Fault.DELAYED if call == "put" else None
    with pytest.raises(OutcomeUnknownError):
        registrations(store).write_registration(FIRST)
    store.faults = lambda call, key: None
    assert found(store) is None
    store.deliver_delayed()
    assert found(store) == FIRST


def test_a_version_that_was_cut_is_void_and_its_number_taken() -> None:
    store, armed = PlainStore(), [Fault.CUT]
    registrations(store).write_registration(FIRST)
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    assert not registrations(store).write_registration(replace(FIRST, version=2))
    newest = registrations(store).load_registration(2)
    assert (newest.taken, newest.registration.version if newest.registration else 0) == (2, 1)


def test_all_nodes_are_listed_at_once_and_only_what_is_new_is_read() -> None:
    store = PlainStore()
    ours = registrations(store)
    for node_id in (0, 2, 11):
        ours.write_registration(replace(FIRST, node_id=node_id))
        ours.write_beat(Alive(node_id=node_id, folder_id="f", incarnation=1, beat=1))
    assert set(ours.load_registrations()) == {0, 2, 11}
    ours.write_registration(replace(FIRST, node_id=11, version=2, state="stopped"))
    store.calls.clear()
    states = {n: one.registration.state for n, one in ours.load_registrations().items()}  # type: ignore[union-attr]
    assert states == {0: "running", 2: "running", 11: "stopped"}
    store.calls.clear()
    ours.load_registrations()
    assert store.calls == {"list": 1}


def test_names_that_no_broker_can_have_are_skipped() -> None:
    store = PlainStore()
    for node in ("01", "-1", "x", "4294967296", "2/more"):
        key = f"cluster/brokers/{node}/registration/00000000000000000001.json"
        store.objects[key] = seal(FIRST)
    store.objects["cluster/brokers/2/registration/1.json"] = (b"", 0)
    store.objects["cluster/brokers/note.txt"] = (b"", 0)
    assert registrations(store).load_registrations() == {}


@pytest.mark.parametrize(
    "bad",
    [
        seal(replace(FIRST, node_id=3)),
        seal(replace(FIRST, version=7)),
        seal(replace(FIRST, folder_id="../x")),
        seal(replace(FIRST, incarnation=0)),
        seal(replace(FIRST, url="javascript:alert(1)")),
        seal(replace(FIRST, state="asleep")),  # type: ignore[arg-type]
        seal(FIRST, kind="alive"),
        (b'{"node_id":2}', 0),
    ],
)
def test_what_no_broker_would_write_is_corrupt_and_hides_no_other(bad: tuple[bytes, int]) -> None:
    store = PlainStore()
    registrations(store).write_registration(replace(FIRST, node_id=1))
    store.objects[KEY] = bad
    with pytest.raises(CorruptManifest):
        registrations(store).load_registration(2)
    ours = registrations(store)
    there = ours.load_registrations()
    assert there[1].registration is not None
    assert there[2].registration is None
    assert KEY in there[2].problem
    store.calls.clear()
    assert ours.load_registrations() == there
    assert store.calls == {"list": 1}, "it is not read again and again"


def test_old_versions_are_deleted_and_the_newest_is_known_afterwards() -> None:
    store = PlainStore()
    for version in range(1, 31):
        registrations(store).write_registration(replace(FIRST, version=version))
    assert registrations(store).collect_versions(2) == 30
    assert len(store.objects) == VERSIONS_KEPT
    assert found(store) == replace(FIRST, version=30)
    assert registrations(store).collect_versions(3) == 0


def test_a_beat_is_overwritten_and_read_back() -> None:
    store = PlainStore()
    ours = registrations(store)
    assert ours.read_beat(2) is None
    for beat in (1, 2):
        ours.write_beat(Alive(node_id=2, folder_id="f2", incarnation=1, beat=beat))
    assert ours.read_beat(2) == Alive(node_id=2, folder_id="f2", incarnation=1, beat=2)
    store.objects["cluster/brokers/3/alive.json"] = store.objects["cluster/brokers/2/alive.json"]
    with pytest.raises(CorruptManifest, match="of node 2"):
        ours.read_beat(3)
