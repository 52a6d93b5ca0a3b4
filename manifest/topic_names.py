"""The topics of a cluster by name: `cluster/topic-names/<topic>/<version>.json`, kind `topic-name`.

* In a cluster a topic is what the newest version of its name says: its id, its partitions, its
  configuration. It is the truth for all brokers; the topic objects, by which a restore finds
  topics, follow it.
* Versioned like a topic object (`versions`): the newest whole version counts. None is ever deleted,
  because a writer that slept would find its number free.
* Every change is made of the newest version. Whoever loses the race makes its change again, of the
  winner's: so of many creations of a name one succeeds, and no alteration is lost.
* The bucket is not trusted: a name that no topic can have is skipped. A document that no broker of
  ours would write is corrupt, and raises rather than lets its topic seem deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from tierlog.manifest.keys import TOPIC_NAMES, topic_name_of, topic_name_versions
from tierlog.manifest.store import random_name
from tierlog.manifest.topic_objects import is_topic_id
from tierlog.manifest.versions import Newest, VersionChain, iter_keys
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import CorruptManifest
from tierlog.record_format.topic_rules import MAX_PARTITIONS, ConfigValue, name_problem

KIND_TOPIC_NAME: Final = "topic-name"
MAX_NAME_BYTES: Final = 1024 * 1024
ATTEMPTS: Final = 64  # each race that is lost is another broker's success


class TopicName(
    msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True
):
    """One version. `topic_id`: null once the topic was deleted. `created_ms` is above that of every
    older topic of the name, since a restore takes the newest. A commit sets `version` and `nonce`.
    """

    topic: str
    topic_id: str | None
    partitions: int = 0
    config: Mapping[str, ConfigValue] = msgspec.field(default_factory=dict)
    created_ms: int = 0
    replication_factor: int = 1
    version: int = 0
    nonce: str = ""


class _Read(NamedTuple):
    """`taken`: the highest version number in use."""

    taken: int
    named: TopicName | None


class TopicNames:
    """Thread-safe."""

    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self._pause = store, pause
        self._known: dict[str, _Read] = {}

    def find_name(self, topic: str) -> TopicName | None:
        """The newest version; None if the name was never used. Raises CorruptManifest,
        StoreUnavailable.
        """
        return self._read(topic).named

    def change_name(self, topic: str, change: Callable[[TopicName | None], TopicName]) -> TopicName:
        """Write the next version: what `change` makes of the newest one, or raises.

        Raises CorruptManifest, ManifestConflict, StoreUnavailable; OutcomeUnknownError: the change
        may have been made, or be made later.
        """
        chain = self._chain(topic)

        def changed(version: int) -> TopicName:
            named = _parsed(topic, chain, chain.read_newest_below(version))
            return replace(change(named), version=version, nonce=random_name())

        return chain.append_version(changed, _sealed, attempts=ATTEMPTS)

    def list_names(self) -> list[TopicName]:
        """The newest version of every name, also of free ones: one LIST for each thousand versions,
        and the reading of the names that changed since the last call.

        Raises CorruptManifest, StoreUnavailable.
        """
        known, found = self._known, dict[str, _Read]()
        for topic, taken in self._newest_listed().items():
            there = known.get(topic)
            found[topic] = self._read(topic) if there is None or there.taken != taken else there
        self._known = found
        return [one.named for one in found.values() if one.named is not None]

    def _newest_listed(self) -> dict[str, int]:
        newest: dict[str, int] = {}
        for key in iter_keys(self._store, TOPIC_NAMES):
            found = topic_name_of(key)
            if found is not None and not name_problem(found[0]):
                newest[found[0]] = found[1]  # keys of one name come in order
        return newest

    def _read(self, topic: str) -> _Read:
        chain = self._chain(topic)
        newest = chain.read_newest()
        return _Read(newest.taken, _parsed(topic, chain, newest))

    def _chain(self, topic: str) -> VersionChain:
        assert not name_problem(topic)
        return VersionChain(
            self._store, topic_name_versions(topic), max_bytes=MAX_NAME_BYTES, pause=self._pause
        )


def _sealed(named: TopicName) -> bytes:
    return sealed_json.encode(named, kind=KIND_TOPIC_NAME)


def _parsed(topic: str, chain: VersionChain, newest: Newest) -> TopicName | None:
    if newest.version == 0:
        return None
    file = chain.key(newest.version)
    named = sealed_json.decode(newest.data, kind=KIND_TOPIC_NAME, file=file, document=TopicName)
    if (named.topic, named.version) != (topic, newest.version):
        raise CorruptManifest(f"is version {named.version} of {named.topic}", file=file)
    if named.topic_id is not None:
        _check_topic(named, file=file)
    return named


def _check_topic(named: TopicName, *, file: str) -> None:
    if not is_topic_id(named.topic_id or ""):
        raise CorruptManifest(f"topic id is {named.topic_id!r}", file=file)
    if not 1 <= named.partitions <= MAX_PARTITIONS:
        raise CorruptManifest(f"partition count is {named.partitions}", file=file)
