import os
import threading
import time

import pytest

from tests.fakes.faulty_object_store import FailsBefore
from tierlog.object_store.folder import FolderStore
from tierlog.object_store.memory import MemoryStore
from tierlog.object_store.probe import StoreTraits, probe, still_has_traits
from tierlog.object_store.store import ObjectStat
from tierlog.record_format.errors import (
    ConfigurationError,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
)


class IgnoresIfAbsent(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        return super().put(key, body, crc32c=crc32c)


class CreatesNonatomically(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        if if_absent and self.head(key) is not None:
            raise ObjectExists(key)
        time.sleep(0.002)
        return super().put(key, body, crc32c=crc32c)


class ReturnsStaleBytes(MemoryStore):
    def get(self, key, *, max_bytes):
        return b"first"


class ListsNothing(MemoryStore):
    def list(self, prefix, *, start_after="", limit):
        return []


class IgnoresChecksums(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        return super().put(key, body, if_absent=if_absent)


class ReturnsNoChecksum(MemoryStore):
    def head(self, key) -> ObjectStat | None:
        stat = super().head(key)
        return stat and stat._replace(crc32c=None)


class LosesResponses(MemoryStore):
    def put(self, key, body, *, if_absent=False, crc32c=None):
        if if_absent:
            raise OutcomeUnknownError(key)
        return super().put(key, body)


class FailsTheWinner(MemoryStore):
    """As moto does with large bodies: the winner's response is a 500."""

    def put(self, key, body, *, if_absent=False, crc32c=None):
        stat = super().put(key, body, if_absent=if_absent, crc32c=crc32c)
        if "large" in key:
            raise OutcomeUnknownError(key)
        return stat


@pytest.mark.parametrize("make", [MemoryStore, lambda: None])
def test_a_sound_store_passes_and_is_left_empty(make, tmp_path):
    store = make() or FolderStore(tmp_path)
    probe(store, race_s=0.2)
    assert store.list("", limit=10) == []


def test_what_a_probe_left_that_died_is_deleted_by_a_later_one(tmp_path):
    store = FolderStore(tmp_path)
    for key in ("probe/died/large-1", "probe/running/large-1"):
        store.put(key, b"left")
    hours_ago = time.time() - 2 * 3600
    os.utime(tmp_path / "probe/died/large-1", (hours_ago, hours_ago))
    probe(store, race_s=0.1)
    assert [stat.key for stat in store.list("", limit=10)] == ["probe/running/large-1"]


@pytest.mark.parametrize(
    ("broken", "words"),
    [
        (IgnoresIfAbsent, "ignores the condition"),
        (CreatesNonatomically, "writers create the same key.*--allow-single-writer-store"),
        (FailsTheWinner, "loses responses"),
        (ReturnsStaleBytes, "returns stale bytes"),
        (ListsNothing, "does not list"),
    ],
)
def test_an_unsound_store_is_refused_with_the_reason(broken, words):
    with pytest.raises(ConfigurationError, match=words):
        probe(broken("bad"), race_s=0.2)


def test_a_single_writer_may_use_a_store_with_nonatomic_creates():
    probe(CreatesNonatomically(), allow_single_writer=True)


def test_a_single_writer_may_not_use_a_store_that_ignores_the_condition():
    with pytest.raises(ConfigurationError, match="ignores the condition"):
        probe(IgnoresIfAbsent(), allow_single_writer=True)


@pytest.mark.parametrize(
    ("made", "read_back"),
    [(MemoryStore, False), (IgnoresChecksums, True), (ReturnsNoChecksum, True)],
)
def test_a_store_without_reliable_checksums_is_read_back(made, read_back):
    assert probe(made(), race_s=0.1).read_back_whole is read_back


def test_a_store_that_is_down_is_unavailable_and_not_refused(store):
    store.fail("put", FailsBefore(), times=100)
    with pytest.raises(StoreUnavailable):
        probe(store)
    with pytest.raises(StoreUnavailable):
        probe(LosesResponses())


def test_the_race_on_a_slow_store_ends_at_its_deadline():
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
        (IgnoresIfAbsent, True, False),
        (IgnoresChecksums, True, False),
        (IgnoresChecksums, False, True),
    ],
)
def test_a_store_replaced_behind_its_url_is_noticed(kind, checks_checksums, holds):
    store = kind("again")
    store.put("existing", b"bytes")
    traits = StoreTraits(checks_checksums=checks_checksums)
    assert still_has_traits(store, traits, existing=("existing", b"bytes")) == holds
    assert store.get("existing", max_bytes=100) == b"bytes"
    assert [stat.key for stat in store.list("", limit=9)] == ["existing"]
