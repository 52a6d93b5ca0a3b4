"""Versioned objects in a bucket: `<folder>/<20-digit version>.json`, each created once.

* A version is created by a conditional PUT. Its body contains its writer's nonce, so a writer that
  got no response reads the object back, and equal bytes mean that its PUT succeeded. A retry sends
  the same bytes, never others.
* The newest version is found by a few bounded LISTs, regardless of how many versions there are and
  which were deleted: LIST with `start_after` tells whether any version is above n.
* Some stores keep the part of a PUT that arrived before the connection broke. Such a truncated
  version is void, since its writer got no response: readers fall back to the version before it, and
  writers skip its number.
* This file knows that a version is sealed JSON, but not its content. It is thread-safe; concurrent
  writers are serialized by the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum, auto
from typing import NamedTuple, TypeVar

from tierlog.host.retry import backoff_s
from tierlog.manifest.keys import version_key, version_of
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    CorruptObject,
    ManifestConflict,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    RetriableError,
)
from tierlog.record_format.sealed_json import is_truncated

T = TypeVar("T")
LIST_LIMIT = 1000
PUT_ATTEMPTS = 4
FIRST_PAUSE_S, MAX_PAUSE_S = 0.05, 0.4


class CreateOutcome(Enum):
    """The outcome of creating a version."""

    OURS = auto()  # the object is in place
    LOST = auto()  # another writer's version is there
    TRUNCATED = auto()  # this PUT was interrupted, and left a void version
    VOID = auto()  # a void version was already there


class VersionStat(NamedTuple):
    version: int
    size_bytes: int
    modified_ms: int


class Newest(NamedTuple):
    """The newest version of a chain; all zero and empty if there is none. `taken`: the highest
    number in use, above `version` if the versions after that are void.
    """

    taken: int
    version: int = 0
    data: bytes = b""


class VersionChain:
    """The versions of one object, such as a partition's manifest."""

    def __init__(
        self,
        store: ObjectStore,
        folder: str,
        *,
        max_bytes: int,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        assert folder.endswith("/")
        self.folder = folder
        self._store = store
        self._max_bytes = max_bytes
        self._pause = pause

    def key(self, version: int) -> str:
        return version_key(self.folder, version)

    def stats(self, *, after: int = 0, limit: int = LIST_LIMIT) -> list[VersionStat]:
        """Versions above `after`, oldest first, at most `limit`; other names are ignored."""
        return self._listed(after, limit)[0]

    def _listed(self, after: int, limit: int) -> tuple[list[VersionStat], bool]:
        """The versions of one LIST, and whether there may be more."""
        listed = self._store.list(self.folder, start_after=self.key(after), limit=limit)
        numbered = ((version_of(self.folder, stat.key), stat) for stat in listed)
        stats = [
            VersionStat(version, stat.size_bytes, stat.modified_ms)
            for version, stat in numbered
            if version is not None
        ]
        return stats, len(listed) == limit

    def newest_version(self, *, at_least: int = 0) -> int:
        """The number of the newest version, or `at_least` if none is above it; 0 if there is none.

        One LIST if fewer than LIST_LIMIT keys are above `at_least`; otherwise an exponential search
        followed by a binary search.
        """
        low, high, step = at_least, None, LIST_LIMIT
        after = low
        while True:
            above, may_go_on = self._listed(after, LIST_LIMIT)
            if above:
                low = max(low, above[-1].version)
                if not may_go_on:
                    return low
            elif after <= low:
                return low
            else:
                high = after
            if high is None:
                after, step = low + step, step * 2
            else:
                after = low if high - low <= LIST_LIMIT else (low + high) // 2

    def read_newest(self) -> Newest:
        """The newest version that is whole. A number that was listed and is gone means that there
        are newer ones, and that what is below it is out of date.
        """
        taken = self.newest_version()
        while True:
            newest = self.read_newest_below(taken + 1)
            if newest.version == taken or self._is_void(newest):
                return newest
            taken, before = self.newest_version(at_least=taken), taken
            if taken == before:  # deleted by hand
                return newest

    def _is_void(self, newest: Newest) -> bool:
        """Whether all above the version is there, and void."""
        above = range(newest.version + 1, newest.taken + 1)
        return all(self.read_version(number) is not None for number in above)

    def read_newest_below(self, number: int) -> Newest:
        """As `read_newest`, if `number` is the first that is free."""
        for version, data in self.whole_below(number):
            return Newest(number - 1, version, data)
        return Newest(number - 1)

    def read_version(self, version: int) -> bytes | None:
        """The bytes of a version; None if it does not exist. Raises CorruptManifest."""
        try:
            return get_object(self._store, self.key(version), max_bytes=self._max_bytes)
        except MissingObject:
            return None

    def whole_below(self, version: int, *, lowest: int = 1) -> Iterator[tuple[int, bytes]]:
        """The versions in [lowest, version) that exist and are not void, newest first; each is read
        when it is requested.
        """
        for number in range(version - 1, lowest - 1, -1):
            data = self.read_version(number)
            if data is not None and not is_truncated(data):
                yield number, data

    def append_version(
        self, make: Callable[[int], T], encode: Callable[[T], bytes], *, attempts: int
    ) -> T:
        """Create the next version: what `make` makes for the first free number, anew after each
        race that is lost. Raises what `make` does, ManifestConflict, OutcomeUnknownError,
        StoreUnavailable.
        """
        for _ in range(attempts):
            version = self.newest_version() + 1
            made = make(version)
            if self.create_version(version, encode(made)) is CreateOutcome.OURS:
                return made
        raise ManifestConflict(f"{self.folder}: {attempts} conflicts in a row")

    def create_version(self, version: int, body: bytes) -> CreateOutcome:
        """Create the version unless it exists. Raises StoreUnavailable if it was not created and
        cannot appear any more; OutcomeUnknownError.

        After OutcomeUnknownError the object may exist, or appear later: the next writer then loses
        the race for this number, and reloads.
        """
        outcome = self._try_create(version, body)
        for attempt in range(1, PUT_ATTEMPTS):
            if outcome is not None:
                return outcome
            self._pause(backoff_s(attempt, first_s=FIRST_PAUSE_S, max_s=MAX_PAUSE_S))
            with outcome_unknown(self.key(version)):  # whatever becomes of the next attempt
                outcome = self._try_create(version, body)
        if outcome is None:
            text = f"{self.key(version)}: no response to {PUT_ATTEMPTS} attempts"
            raise OutcomeUnknownError(text)
        return outcome

    def _try_create(self, version: int, body: bytes) -> CreateOutcome | None:
        """One attempt; None if there was no response and the object is not there (yet)."""
        lost = False
        try:
            self._store.put(self.key(version), body, if_absent=True)
        except ObjectExists:
            lost = True
        except OutcomeUnknownError:
            pass
        else:
            return CreateOutcome.OURS
        with outcome_unknown(self.key(version)):
            there = self.read_version(version)
        if there is None:
            return CreateOutcome.LOST if lost else None
        if there == body:
            return CreateOutcome.OURS
        if not is_truncated(there):
            return CreateOutcome.LOST
        return CreateOutcome.VOID if lost else CreateOutcome.TRUNCATED

    def delete_versions(self, versions: Sequence[int]) -> None:
        if versions:
            self._store.delete([self.key(version) for version in versions])


@contextmanager
def outcome_unknown(what: str) -> Iterator[None]:
    """After a PUT that may have landed, or may land later: what fails now does not decide it.
    Raises OutcomeUnknownError in its place.
    """
    try:
        yield
    except (RetriableError, ConfigurationError) as error:
        raise OutcomeUnknownError(f"{what}: {error}") from error


def iter_keys(store: ObjectStore, prefix: str) -> Iterator[str]:
    """All keys that begin with `prefix`, in order, by one LIST for each thousand."""
    after = ""
    while True:
        listed = store.list(prefix, start_after=after, limit=LIST_LIMIT)
        yield from (stat.key for stat in listed)
        if len(listed) < LIST_LIMIT:
            return
        after = listed[-1].key


def get_object(store: ObjectStore, key: str, *, max_bytes: int) -> bytes:
    """Get an object of this package. Raises MissingObject.

    Raises CorruptManifest if the store itself detects a wrong checksum; not every store does.
    """
    try:
        return store.get(key, max_bytes=max_bytes)
    except CorruptObject as bad:
        raise CorruptManifest(bad.detail, file=bad.file) from bad
