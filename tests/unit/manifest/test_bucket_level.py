import threading

import pytest

from tests.fakes.plain_store import Fault, PlainStore
from tierlog.manifest.bucket_level import BucketLevel
from tierlog.record_format import format_level, sealed_json
from tierlog.record_format.errors import ConfigurationError, CorruptManifest, OutcomeUnknownError
from tierlog.record_format.format_level import encode_level

FIRST = "format/00000000000000000001.json"
SECOND = "format/00000000000000000002.json"


@pytest.fixture(autouse=True)
def _three_levels(monkeypatch):
    for level in (2, 3):
        monkeypatch.setitem(format_level.LEVELS, level, f"0.{level}.0")


def level_of(store):
    return BucketLevel(store, pause=lambda _: None)


def test_a_bucket_without_a_record_has_the_first_level():
    store = PlainStore()
    assert level_of(store).read_level() == 1
    level_of(store).raise_level(1)
    assert not store.objects


def test_a_level_only_rises_and_each_is_recorded_once():
    store = PlainStore()
    for wanted, expected in ((2, 2), (2, 2), (1, 2), (3, 3), (2, 3)):
        level_of(store).raise_level(wanted)
        assert level_of(store).read_level() == expected
    assert sorted(store.objects) == [FIRST, SECOND]


@pytest.mark.parametrize("fault", [Fault.LOST_AFTER, Fault.LOST_BEFORE])
def test_a_lost_response_leaves_the_old_level_or_the_new(fault):
    store, armed = PlainStore(), [fault] * 4
    store.faults = lambda call, key: armed.pop() if armed and call == "put" else None
    try:
        level_of(store).raise_level(2)
    except OutcomeUnknownError:
        assert level_of(store).read_level() == 1
        level_of(store).raise_level(2)
    assert level_of(store).read_level() == 2


def test_an_interrupted_upload_is_no_record_and_its_number_is_skipped():
    store = PlainStore()
    store.put(FIRST, encode_level(2)[:40])
    assert level_of(store).read_level() == 1
    level_of(store).raise_level(2)
    assert level_of(store).read_level() == 2
    assert sorted(store.objects) == [FIRST, SECOND]


def test_a_higher_level_is_refused_and_never_lowered():
    store = PlainStore()
    body = sealed_json.encode({"level": 9, "read_since": "9.0"}, kind="format")
    store.put(FIRST, body)
    for call in (level_of(store).read_level, lambda: level_of(store).raise_level(3)):
        with pytest.raises(ConfigurationError, match=rf"{FIRST}: format level 9, .*9\.0"):
            call()
    assert list(store.objects) == [FIRST]


def test_a_record_that_rotted_is_corrupt_and_not_the_first_level():
    store = PlainStore()
    store.put(FIRST, encode_level(2).replace(b'"level":2', b'"level":1'))
    with pytest.raises(CorruptManifest, match="checksum"):
        level_of(store).read_level()


def test_writers_that_raise_at_once_agree():
    store = PlainStore()
    writers = [threading.Thread(target=level_of(store).raise_level, args=[n]) for n in (2, 3, 2, 3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join()
    assert level_of(store).read_level() == 3
