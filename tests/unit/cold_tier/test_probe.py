import threading
import time

import pytest

from cold_tier.folder import FolderStore
from cold_tier.memory import MemoryStore
from cold_tier.object_store import ObjectStat
from cold_tier.probe import StoreTraits, probe, still_has_traits
from record_format.errors import (
    ConfigurationError,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)
from tests.fakes.faulty_object_store import FailsBefore


class IgnoresTheCondition(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        return super().put(key, body, crc32c=crc32c)


class ChecksAndThenActs(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        if if_absent and self.head(key) is not None:
            raise ObjectExists(key)
        time.sleep(0.002)
        return super().put(key, body, crc32c=crc32c)


class ShowsOldBytes(MemoryStore):
    def get(self, key, *, max_bytes):
        return b"first"


class ListsLate(MemoryStore):
    def list(self, prefix, *, start_after="", limit):
        return []


class ChecksNothing(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        return super().put(key, body, if_absent=if_absent)


class SaysNoChecksum(MemoryStore):
    def head(self, key) -> ObjectStat | None:
        stat = super().head(key)
        return stat and stat._replace(checksum=None)


class LosesAnswers(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        if if_absent:
            raise OutcomeUnknownError(key)
        return super().put(key, body)


class BreaksDownInARace(MemoryStore):
    """As moto does with large bodies: the winner's answer is a 500."""

    def put(self, key, body, *, if_absent=False, crc32c=None):
        stat = super().put(key, body, if_absent=if_absent, crc32c=crc32c)
        if "large" in key:
            raise OutcomeUnknownError(key)
        return stat


@pytest.mark.parametrize("make", [MemoryStore, lambda: None])
def test_a_good_store_passes_and_is_left_clean(make, tmp_path):
    store = make() or FolderStore(tmp_path)
    probe(store, race_s=0.2)
    assert store.list("", limit=10) == []


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (IgnoresTheCondition, "ignores the condition"),
        (ChecksAndThenActs, "writers create the same key.*--allow-single-writer-store"),
        (BreaksDownInARace, "loses responses"),
        (ShowsOldBytes, "returns stale bytes"),
        (ListsLate, "does not list"),
    ],
)
def test_a_store_that_breaks_a_promise_is_refused_by_name(broken, words):
    with pytest.raises(ConfigurationError, match=words):
        probe(broken("bad"), race_s=0.2)


def test_a_single_writer_is_allowed_a_store_that_races():
    probe(ChecksAndThenActs(), allow_single_writer=True)


def test_a_single_writer_is_not_allowed_a_store_that_ignores_the_condition():
    with pytest.raises(ConfigurationError, match="ignores the condition"):
        probe(IgnoresTheCondition(), allow_single_writer=True)


@pytest.mark.parametrize(
    ("made", "read_back"),
    [(MemoryStore, False), (ChecksNothing, True), (SaysNoChecksum, True)],
)
def test_a_store_whose_checksums_say_nothing_is_to_be_read_back(made, read_back):
    assert probe(made(), race_s=0.1).read_back_whole is read_back


def test_a_store_that_is_down_is_unavailable_and_not_refused(store):
    store.fail("put", FailsBefore(), times=100)
    with pytest.raises(StoreUnavailable):
        probe(store)
    with pytest.raises(StoreUnavailable):
        probe(LosesAnswers())


def test_the_race_ends_in_time_on_a_slow_store():
    class Slow(MemoryStore):
        def put(self, key, body, **options):
            threading.Event().wait(0.01)
            return super().put(key, body, **options)

    ticks = iter(range(10_000))
    store = Slow()
    probe(store, race_s=3, monotonic=lambda: float(next(ticks)))
    largest = store.ledger.usage()["probe", "put"].sent_bytes
    assert largest < 20 * 1024 * 1024


@pytest.mark.parametrize(
    ("kind", "checks_checksums", "holds"),
    [
        (MemoryStore, True, True),
        (MemoryStore, False, True),
        (IgnoresTheCondition, True, False),
        (ChecksNothing, True, False),
        (ChecksNothing, False, True),
    ],
)
def test_two_requests_tell_a_store_that_is_another_behind_the_same_url(
    kind, checks_checksums, holds
):
    store = kind("again")
    store.put("there", b"bytes")
    traits = StoreTraits(checks_checksums=checks_checksums)
    assert still_has_traits(store, traits, existing=("there", b"bytes")) == holds
    assert store.get("there", max_bytes=100) == b"bytes"
    assert [stat.key for stat in store.list("", limit=9)] == ["there"]
