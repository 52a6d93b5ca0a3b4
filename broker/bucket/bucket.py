"""The bucket as the broker sees it: topic objects, and a cold log for each partition.

* Nothing is written below the prefix before it is verified to be this cluster's (`store_status`).
* `topics.json` is ahead of the bucket; `publish_topics` catches up, topic by topic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Container, Sequence
from contextlib import suppress
from functools import partial
from typing import Final

import structlog

from tierlog.broker.bucket.cold_log import ColdLog
from tierlog.broker.bucket.cold_reads import ColdReads, InForce
from tierlog.broker.bucket.ownership import Silence
from tierlog.broker.bucket.store_status import StoreStatus
from tierlog.broker.bucket.topic_deletion import OwnedPartition, TopicDeletion
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.data_folder.topic_registry import TopicRecord, TopicRegistry
from tierlog.broker.settings import BrokerSettings
from tierlog.cold_tier.chunk_cache import ChunkCache
from tierlog.cold_tier.cold_reader import ColdLimits, ColdReader
from tierlog.cold_tier.segment_uploader import (
    SegmentUploader,
    UploadCheckpoints,
    UploadLimits,
    UploadThrottle,
)
from tierlog.host.clock import boottime_ms
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest import transitions
from tierlog.manifest.codec import PageCache
from tierlog.manifest.keys import PartitionKeys, topic_folder
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_names import TopicNames
from tierlog.manifest.topic_objects import TopicObjects
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import FencedError, StoreUnavailable, TierlogError

log = structlog.get_logger(__name__)

MARKED_TOGETHER: Final = 100  # published topics, in one write of `topics.json`


class _Superseded(Exception):
    """A newer version of the topic's name is in the bucket."""


class Bucket:
    """Created by `Bucket.open`. Thread-safe."""

    def __init__(
        self,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        boot_clock: Callable[[], int] = boottime_ms,
        pause: Callable[[float], None] = time.sleep,
    ) -> None:
        self.store = store
        self._folder, self._settings, self._clock = folder, settings, clock
        self._topics = TopicObjects(store)
        self._pages = PageCache()
        self._options = StoreOptions(clock=clock, boot_clock=boot_clock, pause=pause)
        self.silence = Silence(check_ms=settings.fence_check_ms, boot_clock=boot_clock)
        assert settings.cache_bytes is not None, "settings are resolved"
        self.cache = ChunkCache(folder.cache, limit_bytes=settings.cache_bytes)
        cold = ColdLimits(
            requests_max=settings.cold_requests_max, memory_max_bytes=settings.cold_memory_max
        )
        self.reader = ColdReader(store, self.cache, limits=cold)
        self._uploads = UploadCheckpoints(
            folder.uploads, max_age_ms=settings.gc_grace_ms // 2, clock=clock
        )
        self._throttle = UploadThrottle(settings.offload_bandwidth or None)
        self.store_status = StoreStatus(folder, store, settings, clock=clock)
        self._uploader = SegmentUploader(
            store,
            limits=UploadLimits(
                part_bytes=settings.offload_part_bytes, chunk_bytes=settings.cache_chunk_bytes
            ),
            reads_back=self.store_status.reads_back,
            pace=self._throttle,
            checkpoints=self._uploads,
        )
        self._foreign_topics: set[str] = set()  # ids of topics that another folder owns
        self._seen_published: dict[str, int] = {}  # versions by topic id, of a cluster
        self.names = TopicNames(store) if settings.cluster_join else None
        self._publishing = threading.Lock()  # held while a live topic's object is written

    @classmethod
    def open(
        cls,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
        boot_clock: Callable[[], int] = boottime_ms,
    ) -> Bucket:
        """Verify the store, for `store.start.timeout.ms` at most. It may be unreachable.

        Raises ConfigurationError for a store that fails the probe and for another cluster's prefix.
        """
        bucket = cls(folder, store, settings, clock=clock, boot_clock=boot_clock)
        try:
            bucket.store_status.verify_at_start(timeout_s=settings.store_start_timeout_ms / 1000)
        except BaseException:
            bucket.close()
            raise
        return bucket

    # --- partitions -------------------------------------------------------------------------------

    def find_cold_log(self, record: TopicRecord, partition: int) -> ColdLog | None:
        """None if nothing of the partition was, or will be, written to the bucket."""
        manifests = self._manifests(record, partition)
        bucket_state = self._bucket_state_of(manifests.keys)
        config = LogConfig.parse(record.config)
        if not config.remote_storage_enable and not bucket_state.was_ever_used:
            return None
        return ColdLog(
            manifests,
            self.reader,
            self._uploader,
            bucket_state=bucket_state,
            store_status=self.store_status,
            silence=self.silence,
            clock=self._clock,
            filters_keys=config.key_filter,
        )

    def load_cold_reads(
        self, record: TopicRecord, partition: int, *, at_least: int = 0
    ) -> ColdReads | None:
        """The reads of a partition that another broker leads, by the manifest in force; None if it
        has none. `at_least`: a version that was in force. Raises StoreUnavailable,
        CorruptDataError.
        """
        self.store_status.require_store()
        manifests = self._manifests(record, partition)
        manifest = manifests.load_manifest(at_least=at_least)
        if manifest is None:
            return None
        return ColdReads(
            manifests,
            self.reader,
            bucket_state=InForce(manifest),
            store_status=self.store_status,
        )

    def assign(
        self,
        record: TopicRecord,
        partition: int,
        folder_id: str,
        *,
        may_take_from: Callable[[str], bool],
    ) -> bool:
        """Assign to that folder a partition of a cluster that has no manifest, or that is assigned
        to another that did not claim it; whether it was. Raises StoreUnavailable,
        OutcomeUnknownError.
        """
        manifests = self._manifests(record, partition)
        manifest = manifests.load_manifest()
        if manifest is None:
            return manifests.assign_new(folder_id, by=self._folder.owner)
        if not manifest.assigned_to or not may_take_from(manifest.assigned_to):
            return False
        with suppress(FencedError):  # it claimed the partition just now
            manifests.commit_manifest(manifest, lambda now: transitions.assign(now, folder_id))
            return True
        return False

    def folders_of(self, record: TopicRecord, partition: int) -> set[str]:
        """The data folders that the partition is of, or is assigned to. Raises StoreUnavailable."""
        manifest = self._manifests(record, partition).load_manifest()
        return set() if manifest is None else {manifest.owner, manifest.assigned_to or ""}

    def _manifests(self, record: TopicRecord, partition: int) -> ManifestStore:
        keys = PartitionKeys(record.name, record.topic_id, partition)
        return ManifestStore(self.store, keys, self._options, cache=self._pages)

    def _bucket_state_of(self, keys: PartitionKeys) -> BucketState:
        return BucketState(self._folder.path, keys, write=self._folder.write)

    # --- topics -----------------------------------------------------------------------------------

    def publish_topics(
        self, registry: TopicRegistry, *, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        """Write the topic objects that the bucket lacks. A topic that fails does not delay the
        others: the first error is raised at the end. Raises StoreUnavailable at once.

        `meanwhile` is called often, because a change of a large topic takes minutes: its partitions
        are checked one by one.
        """
        self.store_status.require_store()
        dirty = [one.topic_id for one in registry.live() if one.dirty]
        due = [topic_id for topic_id in dirty if topic_id not in self._foreign_topics]
        failures: list[TierlogError] = []
        for start in range(0, len(due), MARKED_TOGETHER):
            ids = due[start : start + MARKED_TOGETHER]
            failures += self._publish_and_mark(ids, registry, meanwhile)
        if failures:
            raise failures[0]

    def find_unpublished(self, registry: TopicRegistry, led: Container[str]) -> None:
        """Have `publish_topics` write the topic objects that a broker of the cluster was to write
        and died before. `led`: ids of topics. Looks once at each version of a topic. Raises
        StoreUnavailable, CorruptDataError.
        """
        before, self._seen_published = self._seen_published, {}
        for record in registry.live():
            topic_id, version = record.topic_id, record.version
            if record.dirty or topic_id not in led:
                continue
            if before.get(topic_id) != version:
                there = self._topics.load_topic(record.name, topic_id)
                if there is None or not record.is_state_of(there):
                    registry.mark_unpublished(topic_id)
            self._seen_published[topic_id] = version

    def _publish_and_mark(
        self, topic_ids: Sequence[str], registry: TopicRegistry, meanwhile: Callable[[], None]
    ) -> list[TierlogError]:
        published: list[TopicRecord] = []
        failures: list[TierlogError] = []
        try:
            for topic_id in topic_ids:
                try:
                    published += self._publish_if_due(topic_id, registry, meanwhile)
                except StoreUnavailable:
                    raise
                except TierlogError as error:
                    failures.append(error)
        finally:
            registry.mark_published(published)
        return failures

    def _publish_if_due(
        self, topic_id: str, registry: TopicRegistry, meanwhile: Callable[[], None]
    ) -> list[TopicRecord]:
        """Publish the topic as it is now, unless it was deleted or published meanwhile, or another
        folder owns it now. What was published: one record, or none.
        """
        with self._publishing:
            record = registry.unpublished(topic_id)
            if record is None:
                return []
            try:
                self._publish(record, meanwhile)
            except _Superseded:
                return [record]
            except FencedError as error:
                self._foreign_topics.add(topic_id)  # until a take-over: it needs a restart
                log.error("topic not published to the bucket", topic=record.name, reason=str(error))
                return []
            return [record]

    def delete_topic(self, record: TopicRecord, *, is_gone: Callable[[str], bool]) -> None:
        """Delete all of the topic's objects. May be repeated. `is_gone`: whether no living broker
        of the cluster has a data folder, whose partitions are then anybody's to delete.

        Raises FencedError if another folder owns a partition now: the remaining objects stay.
        """
        with self._publishing:
            pass  # any write of this topic's object has finished, and no other begins
        if self.store.list(topic_folder(record.name, record.topic_id), limit=1):
            partitions = self._owned_partitions(record)
            if record.version:  # of a cluster: the others delete theirs
                own = [one.to_delete(is_gone) for one in partitions]
                partitions = [one for one in own if one is not None]
            deletion = TopicDeletion(self.store, self._topics, partitions)
            deletion.run(record.as_object())
        for partition in range(record.partitions):
            self.forget_partition(record, partition)

    def forget_partition(self, record: TopicRecord, partition: int) -> None:
        """Remove what the data folder recorded of it."""
        keys = PartitionKeys(record.name, record.topic_id, partition)
        self._bucket_state_of(keys).forget()
        self._uploads.delete_checkpoint(keys.segments)

    def _publish(self, record: TopicRecord, meanwhile: Callable[[], None]) -> None:
        check = partial(self._check_not_foreign, record, meanwhile)
        if self.names is not None:
            check = partial(self._check_newest, self.names, record)
        self._topics.write_topic(record.as_object(), check=check)

    def _check_newest(self, names: TopicNames, record: TopicRecord) -> None:
        """In a cluster whoever changed a topic last writes its object."""
        named = names.find_name(record.name)
        if named is None or named.version != record.version:
            raise _Superseded

    def _check_not_foreign(self, record: TopicRecord, meanwhile: Callable[[], None]) -> None:
        """A topic object has no owner of its own: the owners of its partitions may change it."""
        for partition in self._owned_partitions(record):
            partition.check()
            meanwhile()

    def _owned_partitions(self, record: TopicRecord) -> list[OwnedPartition]:
        return [self._owned_partition(record, number) for number in range(record.partitions)]

    def _owned_partition(self, record: TopicRecord, number: int) -> OwnedPartition:
        manifests = self._manifests(record, number)
        return OwnedPartition(
            manifests,
            claimant=self._folder.owner,
            recorded=lambda: self._bucket_state_of(manifests.keys).recorded,
            seen=self._bucket_state_of(manifests.keys).version,
            clock=self._clock,
        )

    def stop_uploads(self) -> None:
        """Stop uploads after the part in progress; no new one begins."""
        self._throttle.stop()

    def close(self) -> None:
        self.store.close()  # first: ongoing work ends with its current request
        self.reader.close()
