"""Topics and the cluster in the bucket: how a restore finds them.

| object                                            | kind      | document                |
|---------------------------------------------------|-----------|-------------------------|
| `cluster.json`                                    | `cluster` | fields of `Cluster`     |
| `topics/<topic>/<topic id>/topic/<version>.json`  | `topic`   | fields of `TopicObject` |

* A topic object is versioned as manifests are: created by conditional PUT, never changed, read back
  after a lost answer. The newest version is the truth for a restore; for the owner, its data folder
  is, so it writes without reading. Whoever takes a topic over writes a version too.
* Deletion first commits a version with `deleted`; of all that the topic has, the versions are
  deleted last.
* Tokens and other secrets are never in the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from manifest.keys import CLUSTER_KEY, TOPICS, PartitionKeys, topic_versions
from manifest.store import random_name
from manifest.versions import CreateOutcome, ObjectStore, VersionChain, get_object
from record_format import sealed_json
from record_format.config_value import ConfigValue
from record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    ManifestConflict,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    UnknownTopic,
)
from record_format.sealed_json import is_truncated

KIND_CLUSTER = "cluster"
KIND_TOPIC = "topic"
MAX_TOPIC_BYTES = 1024 * 1024
COMMIT_ATTEMPTS = 16
TOPICS_MAX = 100_000
LOST = "its topic object is gone, which says how many partitions it has"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cluster_id: str
    created_ms: int


class TopicObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `config`: the overrides by Kafka's keys. `nonce` and `version` are stamped."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, ConfigValue]
    created_ms: int
    deleted: bool = False
    version: int = 0
    nonce: str = ""


def load_cluster(store: ObjectStore) -> Cluster | None:
    """None on a prefix that no cluster uses. Raises CorruptManifest, UnknownFormatVersion."""
    try:
        data = get_object(store, CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)
    except MissingObject:
        return None
    return sealed_json.decode(data, kind=KIND_CLUSTER, file=CLUSTER_KEY, document=Cluster)


def create_cluster(store: ObjectStore, cluster: Cluster) -> Cluster:
    """Mark the prefix as this cluster's; nothing happens if it already is.

    Raises ConfigurationError if the prefix is another cluster's, OutcomeUnknownError.
    """
    body = sealed_json.encode(cluster, kind=KIND_CLUSTER)
    try:
        store.put(CLUSTER_KEY, body, if_absent=True)
        return cluster
    except (ObjectExists, OutcomeUnknownError) as problem:
        there = load_cluster(store)
        if there is None:
            raise OutcomeUnknownError(f"{CLUSTER_KEY}: no answer, nothing there") from problem
        if there.cluster_id != cluster.cluster_id:
            raise ConfigurationError(
                f"this prefix of the store belongs to cluster {there.cluster_id}, "
                f"not to {cluster.cluster_id}"
            ) from problem
        return there


class TopicObjects:
    """The topic objects of a bucket."""

    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self._pause = store, pause

    def load(self, name: str, topic_id: str) -> TopicObject | None:
        """The newest version; None if there is none."""
        chain = self._chain(name, topic_id)
        version = chain.newest()
        while version > 0:
            data = chain.read(version)
            if data is not None and not is_truncated(data):
                return _topic(data, file=chain.key(version), name=name, topic_id=topic_id)
            version -= 1
        return None

    def find(self, name: str) -> TopicObject:
        """The newest undeleted topic of that name. Raises UnknownTopic, CorruptManifest."""
        loaded = {topic_id: self.load(name, topic_id) for topic_id in self.ids(name)}
        found = [topic for topic in loaded.values() if topic is not None]
        if chosen := restorable(found).topics.get(name):
            return chosen
        for topic_id, topic in loaded.items():
            if topic is None and self.is_lost(name, topic_id):
                raise CorruptManifest(LOST, file=topic_versions(name, topic_id))
        raise UnknownTopic(name)

    def is_lost(self, name: str, topic_id: str) -> bool:
        """Whether a topic of which `load` finds nothing has manifests. One that was deleted has
        none: its topic object goes last.
        """
        versions = PartitionKeys(name, topic_id, 0).versions
        return bool(self._store.list(versions, limit=1))

    def write(self, topic: TopicObject, *, check: Callable[[], None]) -> TopicObject:
        """Write `topic` as the version after the newest, whatever that one says and whether or not
        it can be read: for the owner, its data folder is the truth.

        `check` raises if the topic is another's; it is called after each look for the newest
        version, so that whoever claims the topic and then writes a version is seen, or has the last
        word. Raises ManifestConflict, OutcomeUnknownError; to be repeated after them.
        """
        chain = self._chain(topic.name, topic.topic_id)
        for _ in range(COMMIT_ATTEMPTS):
            newest = chain.newest()
            if newest > 0:  # of a topic that the bucket does not know nobody else can be the owner
                check()
            if (written := self._publish(chain, topic, newest + 1)) is not None:
                return written
        raise ManifestConflict(f"topic {topic.name}: {COMMIT_ATTEMPTS} conflicts in a row")

    def delete_versions(self, name: str, topic_id: str, *, check: Callable[[], None]) -> None:
        """The last step of a deletion: the topic leaves the bucket. `check` as in `write`."""
        chain = self._chain(name, topic_id)
        while stats := chain.stats():
            check()
            # Oldest first: until the last call `deleted` is what a restore finds.
            chain.delete([stat.version for stat in stats])

    def scan(self) -> Iterator[tuple[str, str]]:
        """(name, topic id) of everything under `topics/`, with about one LIST per name."""
        for name in self.names():
            for topic_id in self.ids(name):
                yield name, topic_id

    def names(self) -> list[str]:
        """Every name under `topics/`, also that of a topic of which only something is left."""
        return list(self._store.folders(TOPICS, limit=TOPICS_MAX))

    def ids(self, name: str) -> list[str]:
        """Every topic id that the name has, or had if something of it is left."""
        return list(self._store.folders(f"{TOPICS}{name}/", limit=TOPICS_MAX))

    def _publish(self, chain: VersionChain, topic: TopicObject, version: int) -> TopicObject | None:
        """None: another writer was first."""
        stamped = replace(topic, version=version, nonce=random_name())
        body = sealed_json.encode(stamped, kind=KIND_TOPIC)
        return stamped if chain.create(version, body) is CreateOutcome.OURS else None

    def _chain(self, name: str, topic_id: str) -> VersionChain:
        return VersionChain(
            self._store,
            topic_versions(name, topic_id),
            max_bytes=MAX_TOPIC_BYTES,
            pause=self._pause,
        )


class Restorable(NamedTuple):
    """What a restore takes, by name, and the topic objects that it only reports."""

    topics: dict[str, TopicObject]
    others: tuple[TopicObject, ...]


def restorable(found: Sequence[TopicObject]) -> Restorable:
    """The newest undeleted topic id of each name; everything else is reported."""
    chosen: dict[str, TopicObject] = {}
    for topic in sorted(found, key=lambda topic: (topic.created_ms, topic.topic_id)):
        if not topic.deleted:
            chosen[topic.name] = topic
    return Restorable(chosen, tuple(t for t in found if chosen.get(t.name) is not t))


def _topic(data: bytes, *, file: str, name: str, topic_id: str) -> TopicObject:
    topic = sealed_json.decode(data, kind=KIND_TOPIC, file=file, document=TopicObject)
    if (topic.name, topic.topic_id) != (name, topic_id):
        raise CorruptManifest(f"it is of topic {topic.name}, id {topic.topic_id}", file=file)
    if topic.partitions <= 0:
        raise CorruptManifest(f"a topic of {topic.partitions} partitions", file=file)
    return topic
