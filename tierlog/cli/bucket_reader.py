"""Reads topics, manifests and segments from the bucket alone, for commands with `--store URL`.

It writes nothing but pins, and may run beside the broker that owns the bucket. Results have the
same types as the client's, with every segment cold.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

from tierlog.broker.data_folder.topic_registry import INTERNAL_PREFIX
from tierlog.broker.replication.write_ahead_chain import Remaining, chains_of, remaining
from tierlog.client.responses import Segment, Topic
from tierlog.cold_tier.write_ahead_object import StoredPart
from tierlog.host.clock import wall_clock_ms
from tierlog.manifest.garbage import Collector, GarbagePlan, GarbagePolicy
from tierlog.manifest.keys import PartitionKeys
from tierlog.manifest.pins import Pins
from tierlog.manifest.state import Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import TopicObject, TopicObjects, load_cluster
from tierlog.manifest.versions import VersionStat
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    UnknownManifestVersion,
    UnknownPartition,
    UnknownTopic,
)
from tierlog.record_format.segment_entry import SegmentEntry

MAX_CONCURRENT_LOOKUPS: Final = 16


class BucketReader:
    """Raises StoreUnavailable, ConfigurationError, CorruptManifest."""

    def __init__(self, store: ObjectStore) -> None:
        self.store = store
        self._topics = TopicObjects(store)

    def names(self, prefix: str = "", *, internal: bool = True) -> list[str]:
        """The names of all topics, including those that are deleted or partly written. Raises
        ConfigurationError if the store holds no cluster.
        """
        names = self._topics.names()
        if not names and load_cluster(self.store) is None:
            raise ConfigurationError(f"{self.store.url} holds no cluster")
        matching = (name for name in names if name.startswith(prefix))
        return [name for name in matching if internal or not name.startswith(INTERNAL_PREFIX)]

    def topics(self, names: Iterable[str]) -> Iterator[Topic | CorruptDataError]:
        """The topics of these names; deleted ones are skipped, unreadable ones are errors."""
        with ThreadPoolExecutor(MAX_CONCURRENT_LOOKUPS) as pool:  # four requests each
            yield from filter(None, pool.map(self._find_undeleted, names))

    def _find_undeleted(self, name: str) -> Topic | CorruptDataError | None:
        try:
            topic = self.topic(name)
        except UnknownTopic:
            return None
        except CorruptDataError as error:
            return error
        return Topic(
            name=name,
            topic_id=topic.topic_id,
            partitions=topic.partitions,
            config=dict(topic.config),
        )

    def topic(self, name: str) -> TopicObject:
        """Raises UnknownTopic."""
        try:
            return self._topics.find_topic(name)
        except UnknownTopic:
            raise UnknownTopic(name, place=self.store.url) from None

    def manifest(
        self, topic: TopicObject, partition: int, *, version: int | None = None
    ) -> Manifest:
        """The current manifest, or a version. Raises UnknownManifestVersion if there is none."""
        manifests = self._manifests(topic, partition)
        if version is not None:
            return manifests.load_version(version)
        found = manifests.load_manifest()
        if found is None:
            raise UnknownManifestVersion(
                f"{topic.name}-{partition} has no manifest in the bucket: nothing was offloaded yet"
            )
        return found

    def history(self, topic: TopicObject, partition: int) -> list[VersionStat]:
        return self._manifests(topic, partition).versions.stats()

    def segment_entries(self, topic: TopicObject, manifest: Manifest) -> Iterator[SegmentEntry]:
        """All segment entries, including those in pages, oldest first."""
        manifests = self._manifests(topic, manifest.partition)
        return manifests.iter_entries(manifest, from_offset=manifest.log_start_offset)

    def segments(self, topic: TopicObject, partition: int) -> list[Segment]:
        """The segments of a partition; empty if nothing was offloaded yet."""
        manifests = self._manifests(topic, partition)
        manifest = manifests.load_manifest()
        if manifest is None:
            return []
        return [self.segment(entry) for entry in self.segment_entries(topic, manifest)]

    def garbage(self, name: str, policy: GarbagePolicy) -> dict[int, GarbagePlan]:
        """What the owner would collect now with this policy, by partition. Raises UnknownTopic."""
        plans: dict[int, GarbagePlan] = {}
        for partition, manifests, pins in self.pins(name):
            if (manifest := manifests.load_manifest()) is not None:
                collector = Collector(manifests, pins, policy)
                plans[partition] = collector.plan_collection(manifest, now_ms=wall_clock_ms())
        return plans

    def write_ahead(self, name: str) -> Iterator[tuple[int, str, str]]:
        """(partition, key, why it is there) of each write-ahead object that has records of the
        topic. Raises UnknownTopic.
        """
        topic = self.topic(name)
        topic_id, ends = parse_topic_id(topic.topic_id).bytes, dict[int, int]()
        for chain in chains_of(self.store):
            for one in remaining(self.store, chain):
                key = self.store.full_key(one.key)
                for part in one.parts:
                    if part.place.topic_id != topic_id:
                        continue
                    number = part.place.partition
                    if number not in ends:
                        manifest = self._manifests(topic, number).load_manifest()
                        ends[number] = 0 if manifest is None else manifest.end_offset
                    yield number, key, _why_kept(one, part, ends[number])

    def pins(self, name: str) -> Iterator[tuple[int, ManifestStore, Pins]]:
        """The manifests and pins of each partition. Raises UnknownTopic."""
        topic = self.topic(name)
        for partition in range(topic.partitions):
            manifests = self._manifests(topic, partition)
            yield partition, manifests, Pins(manifests, clock=wall_clock_ms)

    def segment(self, entry: SegmentEntry) -> Segment:
        return Segment(
            base_offset=entry.base_offset,
            last_offset=entry.last_offset,
            size_bytes=entry.size_bytes,
            records=entry.record_count,
            min_timestamp=entry.min_timestamp,
            max_timestamp=entry.max_timestamp_or_none,
            tier="cold",
            object_key=self.store.full_key(entry.log_key),
            crc32c=f"{entry.log_crc32c:08x}",
        )

    def _manifests(self, topic: TopicObject, partition: int) -> ManifestStore:
        if not 0 <= partition < topic.partitions:
            raise UnknownPartition(topic.name, partition)
        keys = PartitionKeys(topic.name, topic.topic_id, partition)
        return ManifestStore(self.store, keys, StoreOptions(clock=wall_clock_ms))


def _why_kept(one: Remaining, part: StoredPart, uploaded_end: int) -> str:
    if part.end_offset > uploaded_end:
        return f"has records up to {part.end_offset}, and segments are offloaded to {uploaded_end}"
    if one.is_newest:
        return "the newest of its chain, which shows where that ends"
    return "waits for other partitions, or for the next round of its broker"
