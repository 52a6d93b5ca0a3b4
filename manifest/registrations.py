"""The brokers of a cluster, below `cluster/brokers/<node id>/`.

| object                        | kind           | document                 |
|-------------------------------|----------------|--------------------------|
| `registration/<version>.json` | `registration` | fields of `Registration` |
| `alive.json`                  | `alive`        | fields of `Alive`        |

* A registration is versioned like a topic object (`versions`): the newest whole version counts, and
  the next one is created by whoever saw it. `alive.json` is overwritten.
* Who registers has recorded the version before it is sent. So a folder that records less than the
  bucket has is an older copy.
* The bucket is not trusted: names that no broker can have are skipped, and a document that no
  broker of ours would write is corrupt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec.structs import replace

from tierlog.manifest.keys import (
    BROKERS,
    NODE_ID_MAX,
    alive_key,
    registration_of,
    registration_versions,
)
from tierlog.manifest.store import random_name
from tierlog.manifest.versions import CreateOutcome, VersionChain, get_object, iter_keys
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptDataError, CorruptManifest, MissingObject

KIND_REGISTRATION: Final = "registration"
KIND_ALIVE: Final = "alive"
MAX_REGISTRATION_BYTES: Final = 64 * 1024
VERSIONS_KEPT: Final = 8  # of one broker; a new one is written every hour
_FOLDER_ID: Final = re.compile(r"[A-Za-z0-9_-]{1,64}")

State = Literal["running", "draining", "stopped", "removed"]


class Registration(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `incarnation` rises with every start. `url`: where the others send calls;
    `kafka`: HOST:PORT that Kafka clients are given, or empty.
    """

    node_id: int
    folder_id: str
    incarnation: int
    url: str
    kafka: str = ""
    zone: str = ""
    state: State
    started_ms: int
    version: int
    nonce: str = ""


class Alive(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`beat` changes as long as the broker lives; it says nothing about time."""

    node_id: int
    folder_id: str
    incarnation: int
    beat: int


class Registered(NamedTuple):
    """`taken`: the highest version number in use; above the registration's if later versions are
    void. `problem`: why a registration cannot be read.
    """

    taken: int
    registration: Registration | None
    problem: str = ""


class Registrations:
    """Thread-safe."""

    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self._pause = store, pause
        self._known: dict[int, Registered] = {}

    def load_registration(self, node_id: int) -> Registered:
        """The newest version. Raises CorruptManifest, StoreUnavailable."""
        chain = self._chain(node_id)
        newest = chain.read_newest()
        if newest.version == 0:
            return Registered(newest.taken, None)
        file = chain.key(newest.version)
        registration = sealed_json.decode(
            newest.data, kind=KIND_REGISTRATION, file=file, document=Registration
        )
        if (registration.node_id, registration.version) != (node_id, newest.version):
            raise CorruptManifest(
                f"is version {registration.version} of node {registration.node_id}", file=file
            )
        if problem := _problem(registration):
            raise CorruptManifest(problem, file=file)
        return Registered(newest.taken, registration)

    def load_registrations(self) -> dict[int, Registered]:
        """The newest version of every node, by node id: one LIST, and the reading of what changed
        since the last call. One that is corrupt has a `problem`, and hides no other.

        Raises StoreUnavailable.
        """
        known, found = self._known, dict[int, Registered]()
        for node_id, taken in self._newest_listed().items():
            there = known.get(node_id)
            if there is None or there.taken != taken:
                there = self._load_or_explain(node_id, taken)
            found[node_id] = there
        self._known = found
        return found

    def _load_or_explain(self, node_id: int, taken: int) -> Registered:
        try:
            return self.load_registration(node_id)
        except CorruptDataError as error:
            return Registered(taken, None, str(error))

    def _newest_listed(self) -> dict[int, int]:
        newest: dict[int, int] = {}
        for key in iter_keys(self._store, BROKERS):
            if (found := registration_of(key)) is not None:
                newest[found[0]] = found[1]  # keys of one node come in order
        return newest

    def write_registration(self, registration: Registration) -> bool:
        """Create this version; False if the number is taken, or its upload was cut.

        Raises OutcomeUnknownError, StoreUnavailable: the version may exist, or appear later.
        """
        assert not _problem(registration)
        body = sealed_json.encode(
            replace(registration, nonce=random_name()), kind=KIND_REGISTRATION
        )
        chain = self._chain(registration.node_id)
        return chain.create_version(registration.version, body) is CreateOutcome.OURS

    def collect_versions(self, node_id: int) -> int:
        """Delete all but the newest versions; return the number of the newest."""
        chain = self._chain(node_id)
        versions = [stat.version for stat in chain.stats()]
        chain.delete_versions(versions[:-VERSIONS_KEPT])
        return versions[-1] if versions else 0

    def read_beat(self, node_id: int) -> Alive | None:
        """None if there is none. Raises CorruptManifest, StoreUnavailable."""
        file = alive_key(node_id)
        try:
            data = get_object(self._store, file, max_bytes=MAX_REGISTRATION_BYTES)
        except MissingObject:
            return None
        alive = sealed_json.decode(data, kind=KIND_ALIVE, file=file, document=Alive)
        if alive.node_id != node_id:
            raise CorruptManifest(f"is of node {alive.node_id}", file=file)
        return alive

    def find_beat(self, broker: Registration) -> Alive | None:
        """None also if the beat is another folder's, or cannot be read: that does not change
        either. Raises StoreUnavailable.
        """
        with suppress(CorruptDataError):
            alive = self.read_beat(broker.node_id)
            if alive is not None and alive.folder_id == broker.folder_id:
                return alive
        return None

    def write_beat(self, alive: Alive) -> None:
        """Raises StoreUnavailable."""
        self._store.put(alive_key(alive.node_id), sealed_json.encode(alive, kind=KIND_ALIVE))

    def _chain(self, node_id: int) -> VersionChain:
        return VersionChain(
            self._store,
            registration_versions(node_id),
            max_bytes=MAX_REGISTRATION_BYTES,
            pause=self._pause,
        )


def _problem(registration: Registration) -> str:
    """Why no broker of ours would write it; empty if one would."""
    if not 0 <= registration.node_id <= NODE_ID_MAX:
        return f"node id is {registration.node_id}"
    if not _FOLDER_ID.fullmatch(registration.folder_id):
        return f"folder id is {registration.folder_id!r}"
    if registration.incarnation < 1 or registration.version < 1:
        return f"incarnation {registration.incarnation}, version {registration.version}"
    if not registration.url.startswith(("http://", "https://")):
        return f"url is {registration.url!r}"
    return ""
