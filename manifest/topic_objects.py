"""Topic and cluster objects, by which a restore finds the topics in a bucket.

| object                                            | kind      | document                |
|---------------------------------------------------|-----------|-------------------------|
| `cluster.json`                                    | `cluster` | fields of `Cluster`     |
| `topics/<topic>/<topic id>/topic/<version>.json`  | `topic`   | fields of `TopicObject` |

* A topic object is versioned like a manifest (`versions`). The newest version is authoritative for
  a restore. For the owner its data folder is authoritative, so it writes without reading. Taking a
  topic over also writes a version.
* Deletion first commits a version with `deleted` set. The versions are the last of the topic's
  objects to be deleted.
* Tokens and other secrets are never stored in the bucket.
* The bucket is not trusted: a name that no topic can have is skipped, and a document that no broker
  of ours would write is corrupt.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import msgspec
from msgspec.structs import replace

from tierlog.manifest.keys import CLUSTER_KEY, TOPICS, PartitionKeys, topic_folder, topic_versions
from tierlog.manifest.store import random_name
from tierlog.manifest.versions import VersionChain, get_object
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import sealed_json
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    UnknownTopic,
)
from tierlog.record_format.topic_rules import MAX_PARTITIONS, ConfigValue, name_problem

KIND_CLUSTER = "cluster"
KIND_TOPIC = "topic"
MAX_TOPIC_BYTES = 1024 * 1024
COMMIT_ATTEMPTS = 16
TOPICS_MAX = 100_000
_TOPIC_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PARTITION = re.compile(r"[0-9]{1,9}")
TOPIC_OBJECT_MISSING = "the topic object, which has the number of partitions, is missing"


class Cluster(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    cluster_id: str
    created_ms: int


class TopicObject(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One version. `config` has overrides by Kafka's keys. A commit sets `version` and `nonce`."""

    name: str
    topic_id: str
    partitions: int
    config: Mapping[str, ConfigValue]
    created_ms: int
    deleted: bool = False
    version: int = 0
    nonce: str = ""


def load_cluster(store: ObjectStore) -> Cluster | None:
    """None if no cluster uses the prefix. Raises CorruptManifest, UnknownFormatVersion."""
    found = load_sealed_cluster(store)
    return found[0] if found is not None else None


def load_sealed_cluster(store: ObjectStore) -> tuple[Cluster, bytes] | None:
    """As `load_cluster`, with the object's bytes."""
    try:
        data = get_object(store, CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES)
    except MissingObject:
        return None
    return sealed_json.decode(data, kind=KIND_CLUSTER, file=CLUSTER_KEY, document=Cluster), data


def create_cluster(store: ObjectStore, cluster: Cluster, *, joins: bool = False) -> Cluster:
    """Mark the prefix as this cluster's. Idempotent. With `joins`, it may be another's, whose
    object is then returned.

    Raises ConfigurationError if it is another cluster's, OutcomeUnknownError.
    """
    body = sealed_json.encode(cluster, kind=KIND_CLUSTER)
    try:
        store.put(CLUSTER_KEY, body, if_absent=True)
        return cluster
    except (ObjectExists, OutcomeUnknownError) as problem:
        there = load_cluster(store)
        if there is None:
            raise OutcomeUnknownError(
                f"{CLUSTER_KEY}: no response, and the object is not there"
            ) from problem
        if there.cluster_id != cluster.cluster_id and not joins:
            raise ConfigurationError(
                f"this prefix of the store belongs to cluster {there.cluster_id}, "
                f"not to {cluster.cluster_id}"
            ) from problem
        return there


class TopicObjects:
    """The topic objects of a bucket."""

    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._store, self._pause = store, pause

    def load_topic(self, name: str, topic_id: str) -> TopicObject | None:
        """The newest version; None if there is none."""
        chain = self._chain(name, topic_id)
        for version, data in chain.whole_below(chain.newest_version() + 1):
            return _topic(data, file=chain.key(version), name=name, topic_id=topic_id)
        return None

    def find_topic(self, name: str) -> TopicObject:
        """The newest undeleted topic of that name, `with_all_partitions`. Raises UnknownTopic,
        CorruptManifest.
        """
        loaded = {topic_id: self.load_topic(name, topic_id) for topic_id in self.ids(name)}
        found = [topic for topic in loaded.values() if topic is not None]
        if chosen := restorable(found).topics.get(name):
            return self.with_all_partitions(chosen)
        for topic_id, topic in loaded.items():
            if topic is None and self.is_lost(name, topic_id):
                raise CorruptManifest(TOPIC_OBJECT_MISSING, file=topic_versions(name, topic_id))
        raise UnknownTopic(name)

    def is_lost(self, name: str, topic_id: str) -> bool:
        """Whether a topic for which `load` finds nothing still has manifests.

        A deleted topic has none, because its topic object is deleted last.
        """
        versions = PartitionKeys(name, topic_id, 0).versions
        return bool(self._store.list(versions, limit=1))

    def with_all_partitions(self, topic: TopicObject) -> TopicObject:
        """`topic`, with more partitions if there are manifests of more: some were added, and the
        version that says so is not written yet, or was lost.
        """
        found = self._store.folders(topic_folder(topic.name, topic.topic_id), limit=TOPICS_MAX)
        numbers = [int(name) for name in found if _PARTITION.fullmatch(name)]
        for number in sorted((one for one in numbers if one < MAX_PARTITIONS), reverse=True):
            if number < topic.partitions:
                break
            # Some stores also list folders whose objects were deleted.
            versions = PartitionKeys(topic.name, topic.topic_id, number).versions
            if self._store.list(versions, limit=1):
                return replace(topic, partitions=number + 1)
        return topic

    def write_topic(self, topic: TopicObject, *, check: Callable[[], None]) -> TopicObject:
        """Write `topic` as the next version, without reading the newest one: for the owner, its
        data folder is authoritative.

        `check` raises if the topic is another owner's. It is called after each look-up of the
        newest version, so that an owner that claims the topic and then writes a version is either
        seen, or writes last. Raises ManifestConflict, OutcomeUnknownError: retry.
        """

        def stamped(version: int) -> TopicObject:
            if version > 1:  # a topic without versions has no other owner
                check()
            return replace(topic, version=version, nonce=random_name())

        chain = self._chain(topic.name, topic.topic_id)
        return chain.append_version(stamped, _sealed, attempts=COMMIT_ATTEMPTS)

    def delete_versions(self, name: str, topic_id: str, *, check: Callable[[], None]) -> None:
        """The last step of deleting a topic. `check` as in `write`."""
        chain = self._chain(name, topic_id)
        while stats := chain.stats():
            check()
            # The newest last, also if one may not be deleted: a restore then finds the `deleted`
            # version.
            *older, newest = (stat.version for stat in stats)
            chain.delete_versions(older)
            chain.delete_versions([newest])

    def scan(self) -> Iterator[tuple[str, str]]:
        """(name, topic id) of all topics under `topics/`, with about one LIST per name."""
        for name in self.names():
            for topic_id in self.ids(name):
                yield name, topic_id

    def names(self) -> list[str]:
        """All topic names under `topics/`, including those of partly deleted topics."""
        found = self._store.folders(TOPICS, limit=TOPICS_MAX)
        return [name for name in found if not name_problem(name)]

    def ids(self, name: str) -> list[str]:
        """All topic ids of the name, including those of partly deleted topics."""
        found = self._store.folders(f"{TOPICS}{name}/", limit=TOPICS_MAX)
        return [topic_id for topic_id in found if is_topic_id(topic_id)]

    def _chain(self, name: str, topic_id: str) -> VersionChain:
        return VersionChain(
            self._store,
            topic_versions(name, topic_id),
            max_bytes=MAX_TOPIC_BYTES,
            pause=self._pause,
        )


class Restorable(NamedTuple):
    """The topics that a restore restores, by name, and those that it only reports."""

    topics: dict[str, TopicObject]
    others: tuple[TopicObject, ...]


def restorable(found: Sequence[TopicObject]) -> Restorable:
    """The newest undeleted topic id of each name; everything else is reported."""
    chosen: dict[str, TopicObject] = {}
    for topic in sorted(found, key=lambda topic: (topic.created_ms, topic.topic_id)):
        if not topic.deleted:
            chosen[topic.name] = topic
    return Restorable(chosen, tuple(t for t in found if chosen.get(t.name) is not t))


def is_topic_id(text: str) -> bool:
    return _TOPIC_ID.fullmatch(text) is not None


def _sealed(topic: TopicObject) -> bytes:
    return sealed_json.encode(topic, kind=KIND_TOPIC)


def _topic(data: bytes, *, file: str, name: str, topic_id: str) -> TopicObject:
    topic = sealed_json.decode(data, kind=KIND_TOPIC, file=file, document=TopicObject)
    if (topic.name, topic.topic_id) != (name, topic_id):
        raise CorruptManifest(
            f"the content is of topic {topic.name}, id {topic.topic_id}", file=file
        )
    if not 1 <= topic.partitions <= MAX_PARTITIONS:
        raise CorruptManifest(f"partition count is {topic.partitions}", file=file)
    return topic
