"""Tests whether a store provides the guarantees that manifests rely on, before it is used.

* A store that ignores a conditional PUT, lets two writers win it, or serves stale reads or lists
  after a write is rejected, with an error that says what to do.
* Writers race for a few seconds, which catches a store that checks and then writes in most cases,
  not in all. `allow_single_writer` skips the race, for stores such as moto with one writer; even
  there the condition must hold for sequential writes.
* A store that accepts a body with a wrong checksum, or returns none, is not rejected: objects that
  are uploaded there are read back in full.
* The probe writes below `probe/<run>/` and deletes what it wrote. If its process dies, a later one
  does.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, NamedTuple

from tierlog.host.threads import Threads
from tierlog.object_store.ledger import PROBE_PREFIX
from tierlog.object_store.store import ChecksumRefused, ObjectStore
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
    TierlogError,
)

WRITERS: Final = 8
SMALL_ROUNDS: Final = 4
SMALL_BYTES: Final = 1024
LARGE_ROUNDS: Final = 12
LARGE_BYTES: Final = 5 * 1024 * 1024  # large enough to expose stores that check and then write
FIRST_LARGE_BYTES: Final = 128 * 1024
RACE_S: Final = 2.5
LOST_ROUNDS_MAX: Final = 3  # fewer may be due to the network
LEFTOVERS_MAX: Final = 1000
LEFTOVER_AFTER_MS: Final = 3_600_000  # another broker's probe takes seconds

USE_ANOTHER: Final = (
    "use a store with an atomic conditional PUT (AWS S3, MinIO, versitygw, Ceph, file:///folder)"
)


class StoreTraits(NamedTuple):
    checks_checksums: bool
    """It rejects a body with a wrong CRC-32C, and returns the CRC-32C of what it stored."""

    @property
    def read_back_whole(self) -> bool:
        return not self.checks_checksums


def probe(
    store: ObjectStore,
    *,
    allow_single_writer: bool = False,
    race_s: float = RACE_S,
    monotonic: Callable[[], float] = time.monotonic,
) -> StoreTraits:
    """Raises ConfigurationError for a store that fails the test, StoreUnavailable for one that
    does not respond.
    """
    run = _ProbeRun(store, secrets.token_hex(10))
    try:
        run.check_reads()
        run.check_condition()
        traits = StoreTraits(checks_checksums=run.checks_checksums())
        run.check_delete()
        run.delete_leftovers()
        if not allow_single_writer:
            run.check_race(monotonic, race_s=race_s)
        return traits
    except OutcomeUnknownError as error:
        raise StoreUnavailable(f"store {store.url}: a response was lost: {error}") from error
    finally:
        with suppress(TierlogError):
            store.delete(run.keys)


def still_has_traits(
    store: ObjectStore, traits: StoreTraits, *, existing: tuple[str, bytes]
) -> bool:
    """Check with two requests that an earlier probe's result still holds: the server behind a URL
    may have been replaced. `existing` is an object's key and bytes; a store that ignores the
    condition overwrites it with the same bytes.

    Raises StoreUnavailable, ConfigurationError.
    """
    run, (key, body) = _ProbeRun(store, secrets.token_hex(10)), existing
    try:
        store.put(key, body, if_absent=True)
    except ObjectExists:
        return not traits.checks_checksums or run.rejects_wrong_checksum()
    except OutcomeUnknownError as error:
        raise StoreUnavailable(f"store {store.url}: a response was lost: {error}") from error
    else:
        return False
    finally:
        with suppress(TierlogError):
            if run.keys:
                store.delete(run.keys)


class _ProbeRun:
    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run
        self.keys: list[str] = []
        self._lost_rounds = 0

    def check_reads(self) -> None:
        """An object must be readable and listed at once after it was written or overwritten."""
        key = self._key("read")
        for body in (b"first", b"second, and longer"):
            self._store.put(key, body)
            try:
                found = self._store.get(key, max_bytes=100)
            except (MissingObject, CorruptObject):
                found = b""
            if found != body:
                self._reject("returns stale bytes for an object that was just written")
            if [stat.key for stat in self._store.list(key, limit=2)] != [key]:
                self._reject("does not list an object that was just written")

    def check_condition(self) -> None:
        key = self._key("create")
        self._store.put(key, b"first", if_absent=True)
        try:
            self._store.put(key, b"second", if_absent=True)
        except ObjectExists:
            if self._store.get(key, max_bytes=100) == b"first":
                return
        self._reject("ignores the condition of a PUT (If-None-Match: *)")

    def checks_checksums(self) -> bool:
        if not self.rejects_wrong_checksum():
            return False
        body, key = b"checked", self.keys[-1]
        self._store.put(key, body)
        stat = self._store.head(key)
        return stat is not None and stat.crc32c is not None

    def rejects_wrong_checksum(self) -> bool:
        body, key = b"checked", self._key("checksum")
        with suppress(ChecksumRefused):
            self._store.put(key, body, crc32c=crc32c_of(body) ^ 1)
            return False
        return True

    def check_delete(self) -> None:
        """Retention, and the removal of what nothing names any more, need it."""
        self._store.delete([self.keys[-1]])

    def delete_leftovers(self) -> None:
        """Delete what probes left whose processes died meanwhile: up to 60 MB each. Ages are by the
        store's own clock.
        """
        found = self._store.list(PROBE_PREFIX, limit=LEFTOVERS_MAX)
        now_ms = max((stat.modified_ms for stat in found), default=0)
        left = [stat.key for stat in found if now_ms - stat.modified_ms > LEFTOVER_AFTER_MS]
        if left:
            self._store.delete(left)

    def check_race(self, monotonic: Callable[[], float], *, race_s: float) -> None:
        with Threads(WRITERS, name="store-probe", at_once=WRITERS) as pool:
            for number in range(SMALL_ROUNDS):
                self._race(pool, f"small-{number}", SMALL_BYTES)
            self._race_large(pool, monotonic, race_s=race_s)

    def _race_large(self, pool: Threads, monotonic: Callable[[], float], *, race_s: float) -> None:
        """Rounds with bodies that grow as long as the connection is fast enough."""
        deadline = monotonic() + race_s
        size_bytes = FIRST_LARGE_BYTES
        for number in range(LARGE_ROUNDS):
            began = monotonic()
            self._race(pool, f"large-{number}", size_bytes)
            if monotonic() > deadline:
                return
            if monotonic() - began < race_s / 8:
                size_bytes = min(LARGE_BYTES, size_bytes * 4)

    def _race(self, pool: Threads, name: str, size_bytes: int) -> None:
        key, gate = self._key(name), threading.Barrier(WRITERS)

        def create(writer: int) -> bool | None:
            body = bytes([writer]) * size_bytes
            crc = crc32c_of(body)
            gate.wait(30)
            try:
                self._store.put(key, body, if_absent=True, crc32c=crc)
            except ObjectExists:
                return False
            except OutcomeUnknownError:
                return None
            return True

        answers = list(pool.map(create, range(WRITERS)))
        winners = answers.count(True)
        self._lost_rounds += None in answers
        if self._lost_rounds == LOST_ROUNDS_MAX:
            self._reject(
                "loses responses whenever several writers create the same key at once",
                "; or, where this broker is the only writer, --allow-single-writer-store",
            )
        if winners > 1 or (winners == 0 and None not in answers):
            self._reject(
                f"let {winners} of {WRITERS} writers create the same key at once",
                "; or, where this broker is the only writer, --allow-single-writer-store",
            )

    def _key(self, name: str) -> str:
        key = f"{PROBE_PREFIX}{self._run}/{name}"
        self.keys.append(key)
        return key

    def _reject(self, problem: str, alternative: str = "") -> None:
        raise ConfigurationError(
            f"store {self._store.url} {problem}: manifests are not safe there; "
            f"{USE_ANOTHER}{alternative}"
        )
