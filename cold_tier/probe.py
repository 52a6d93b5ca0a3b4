"""Whether a store keeps the promises that manifests rely on; asked before anything is entrusted to
it.

* A store that ignores a condition, lets two writers win it, or shows old bytes or lists after a
  write is refused by name, with what to do.
* Racing writers are given a few seconds: a store that checks and then acts is caught most of the
  time, not always. `allow_single_writer` leaves the race out, for stores such as moto where one
  writer is promised; the condition must hold even there for writes one after another.
* A store that accepts a body with a wrong checksum, or returns no checksum, is not refused: what is
  uploaded there is read back whole.
* What the probe writes is below `probe/<run>/` and is deleted again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, NamedTuple

from crc32c import crc32c as crc32c_of

from cold_tier.object_keys import new_unique, probe_key
from cold_tier.object_store import ChecksumRefused, ObjectStore
from record_format.errors import (
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
LARGE_BYTES: Final = 5 * 1024 * 1024  # where stores that check and then act give themselves away
FIRST_LARGE_BYTES: Final = 128 * 1024
RACE_S: Final = 2.5
LOST_ROUNDS_MAX: Final = 3  # once may be the network

USE_ANOTHER: Final = (
    "use a store with an atomic conditional PUT (AWS S3, MinIO, versitygw, Ceph, file:///folder)"
)


class StoreTraits(NamedTuple):
    checks_checksums: bool
    """It refuses a body with a wrong CRC-32C, and says the right one of what it has."""

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
    """Raises ConfigurationError for a store that cannot be trusted, StoreUnavailable for one that
    does not answer.
    """
    run = _Run(store, new_unique())
    try:
        run.check_reads()
        run.check_condition()
        traits = StoreTraits(checks_checksums=run.checks_checksums())
        run.check_delete()
        if not allow_single_writer:
            run.check_race(monotonic, race_s=race_s)
        return traits
    except OutcomeUnknownError as error:
        raise StoreUnavailable(f"store {store.url}: an answer was lost: {error}") from error
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
    run, (key, body) = _Run(store, new_unique()), existing
    try:
        store.put(key, body, if_absent=True)
    except ObjectExists:
        return not traits.checks_checksums or run.refuses_wrong_checksum()
    except OutcomeUnknownError as error:
        raise StoreUnavailable(f"store {store.url}: an answer was lost: {error}") from error
    else:
        return False
    finally:
        with suppress(TierlogError):
            if run.keys:
                store.delete(run.keys)


class _Run:
    def __init__(self, store: ObjectStore, run: str) -> None:
        self._store, self._run = store, run
        self.keys: list[str] = []
        self._lost_rounds = 0

    def check_reads(self) -> None:
        """What was written is read back and listed at once, also after an overwrite."""
        key = self._key("read")
        for body in (b"first", b"second, and longer"):
            self._store.put(key, body)
            try:
                found = self._store.get(key, max_bytes=100)
            except (MissingObject, CorruptObject):
                found = b""
            if found != body:
                self._refuse("does not show an object as it was just written")
            if [stat.key for stat in self._store.list(key, limit=2)] != [key]:
                self._refuse("does not list an object that was just written")

    def check_condition(self) -> None:
        key = self._key("create")
        self._store.put(key, b"first", if_absent=True)
        try:
            self._store.put(key, b"second", if_absent=True)
        except ObjectExists:
            if self._store.get(key, max_bytes=100) == b"first":
                return
        self._refuse("ignores the condition of a PUT (If-None-Match: *)")

    def checks_checksums(self) -> bool:
        if not self.refuses_wrong_checksum():
            return False
        body, key = b"checked", self.keys[-1]
        self._store.put(key, body)
        stat = self._store.head(key)
        return stat is not None and stat.checksum is not None and stat.checksum[0] == "crc32c"

    def refuses_wrong_checksum(self) -> bool:
        body, key = b"checked", self._key("checksum")
        with suppress(ChecksumRefused):
            self._store.put(key, body, crc32c=crc32c_of(body) ^ 1)
            return False
        return True

    def check_delete(self) -> None:
        """Retention, and the removal of what nothing names any more, need it."""
        self._store.delete([self.keys[-1]])

    def check_race(self, monotonic: Callable[[], float], *, race_s: float) -> None:
        with ThreadPoolExecutor(WRITERS, thread_name_prefix="store-probe") as pool:
            for number in range(SMALL_ROUNDS):
                self._race(pool, f"small-{number}", SMALL_BYTES)
            self._race_large(pool, monotonic, race_s=race_s)

    def _race_large(
        self, pool: ThreadPoolExecutor, monotonic: Callable[[], float], *, race_s: float
    ) -> None:
        """Rounds with bodies that grow as long as the line carries them easily."""
        deadline = monotonic() + race_s
        size_bytes = FIRST_LARGE_BYTES
        for number in range(LARGE_ROUNDS):
            began = monotonic()
            self._race(pool, f"large-{number}", size_bytes)
            if monotonic() > deadline:
                return
            if monotonic() - began < race_s / 8:
                size_bytes = min(LARGE_BYTES, size_bytes * 4)

    def _race(self, pool: ThreadPoolExecutor, name: str, size_bytes: int) -> None:
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
            self._refuse(
                "loses answers whenever several writers create the same key at once",
                "; or, where this broker is the only writer, --allow-single-writer-store",
            )
        if winners > 1 or (winners == 0 and None not in answers):
            self._refuse(
                f"let {winners} of {WRITERS} writers create the same key at once",
                "; or, where this broker is the only writer, --allow-single-writer-store",
            )

    def _key(self, name: str) -> str:
        key = probe_key(self._run, name)
        self.keys.append(key)
        return key

    def _refuse(self, what: str, or_else: str = "") -> None:
        raise ConfigurationError(
            f"store {self._store.url}: {what}: manifests are not safe there; {USE_ANOTHER}{or_else}"
        )
