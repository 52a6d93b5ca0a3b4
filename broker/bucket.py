"""The bucket as the broker sees it: which cluster it is of, its topics, its partitions' cold sides.

* Nothing is written below the prefix before it is known to be this cluster's. A store that was down
  at the start is asked again in the background. One that is refused then (another cluster's prefix,
  no access) is left alone, and `/readyz` says so, until a whole check, asked with back-off, passes.
* `topics.json` is ahead of the bucket; `settle` brings the bucket up to it, topic by topic.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Final

import structlog

from broker.bucket_notes import BucketNotes
from broker.cold_log import ColdLog
from broker.cold_reads import uses_bucket
from broker.data_folder import DataFolder, ProbeResult
from broker.own_partition import OwnPartition
from broker.pace import Pace
from broker.settings import BrokerSettings
from broker.topic_deletion import TopicDeletion
from broker.topic_registry import TopicRecord, TopicRegistry
from cold_tier.chunk_cache import ChunkCache
from cold_tier.cold_reader import ColdLimits, ColdReader
from cold_tier.object_store import ObjectStore
from cold_tier.probe import RACE_S, StoreTraits, probe, still_holds
from cold_tier.segment_uploader import SegmentUploader, UploadedSegment, UploadLimits
from cold_tier.upload_notes import UploadNotes
from hot_tier.log_config import LogConfig
from hot_tier.segment_views import SegmentFiles
from manifest.keys import CLUSTER_KEY, PartitionKeys, topic_folder
from manifest.paging import PageCache
from manifest.store import ManifestStore, StoreOptions
from manifest.topic_objects import (
    MAX_TOPIC_BYTES,
    Cluster,
    TopicObjects,
    create_cluster,
    load_cluster,
)
from record_format.errors import (
    ConfigurationError,
    CorruptManifest,
    FencedError,
    StoreUnavailable,
    TierlogError,
)

log = structlog.get_logger(__name__)

FOLDER_RACE_S: Final = 0.2
PROBE_KEPT_MS: Final = 7 * 86_400_000
LOOK_EVERY_S: Final = 15.0  # at a store that answered
LOOK_AGAIN_S: Final = 2.0  # at one that did not
REFUSED_MAX_S: Final = 60.0  # a check may race eight writers: a wrong store is asked less and less


class Bucket:
    """Made by `Bucket.open`. Thread-safe."""

    def __init__(
        self,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
    ) -> None:
        self.store = store
        self._folder, self._settings, self._clock = folder, settings, clock
        self._topics = TopicObjects(store)
        self._pages = PageCache()
        self._options = StoreOptions(clock=clock)
        self._checking = threading.Lock()
        assert settings.cache_bytes is not None, "settings are resolved"
        self.cache = ChunkCache(folder.cache, limit_bytes=settings.cache_bytes)
        cold = ColdLimits(
            requests_max=settings.cold_requests_max, memory_max_bytes=settings.cold_memory_max
        )
        self.reader = ColdReader(store, self.cache, limits=cold)
        self._uploads = UploadNotes(folder.uploads, kept_ms=settings.gc_grace_ms // 2, clock=clock)
        self._pace = Pace(settings.offload_bandwidth or None)
        self._uploader: SegmentUploader | None = None
        self.is_ours = False
        self.refusal: str | None = None
        self.unavailable: str | None = None
        self._of_others: set[str] = set()  # ids of topics
        self._looked_s = float("-inf")
        self._refusals = 0
        self._check_again_s = float("-inf")

    @classmethod
    def open(
        cls,
        folder: DataFolder,
        store: ObjectStore,
        settings: BrokerSettings,
        *,
        clock: Callable[[], int],
    ) -> Bucket:
        """Check the store, for `store.start.timeout.ms` at most; it may be down, but not wrong.

        Raises ConfigurationError for a store that cannot be trusted and for another cluster's
        prefix.
        """
        bucket = cls(folder, store, settings, clock=clock)
        try:
            _in_thread_of_its_own(bucket.check).result(settings.store_start_timeout_ms / 1000)
        except (StoreUnavailable, FutureTimeout) as error:
            bucket._note_unavailable(StoreUnavailable(str(error)))
        return bucket

    def check(self) -> None:
        """Whether the store keeps its promises and the prefix is ours; remembered once it is."""
        with self._checking:
            if self.is_ours:
                return
            found = self._cluster()
            if found is not None and found.cluster_id != self._folder.cluster_id:
                raise ConfigurationError(self._foreign(found))
            known = self._folder.read_probe()
            if found is None and known is not None and known.store[0] == self.store.url:
                raise StoreUnavailable(
                    f"{self.store.url} has no {CLUSTER_KEY}, though this data folder used it: is "
                    "it the right bucket, and is it mounted?"
                )
            traits = self._probe(known)
            if found is None:
                cluster = Cluster(cluster_id=self._folder.cluster_id, created_ms=self._clock())
                create_cluster(self.store, cluster)
            if known is None or known.traits is not traits:
                self._remember(
                    traits
                )  # last: from here on a store without the object is no new one
            limits = UploadLimits(
                part_bytes=self._settings.offload_part_bytes,
                chunk_bytes=self._settings.cache_chunk_bytes,
            )
            self._uploader = SegmentUploader(
                self.store,
                limits=limits,
                read_back_whole=traits.read_back_whole,
                pace=self._pace,
                notes=self._uploads,
            )
            self.is_ours, self.unavailable, self.refusal = True, None, None

    def _cluster(self) -> Cluster | None:
        try:
            return load_cluster(self.store)
        except CorruptManifest as error:
            raise ConfigurationError(
                f"store {self.store.url}: {error}; does another kind of server answer there?"
            ) from error

    def checked_store(self) -> ObjectStore:
        """The store, once it is known to be this cluster's. Raises StoreUnavailable,
        ConfigurationError.
        """
        if self.refusal is not None:
            raise ConfigurationError(self.refusal)
        self.check()
        return self.store

    def _probe(self, known: ProbeResult | None) -> StoreTraits:
        """The store's traits; asked anew when the store is another, the answer is a week old, or a
        short look finds that it holds no more.
        """
        single = self._settings.allow_single_writer_store
        if known is not None and self._is_of_this_store(known):
            there = (CLUSTER_KEY, self.store.get(CLUSTER_KEY, max_bytes=MAX_TOPIC_BYTES))
            if still_holds(self.store, known.traits, there=there):
                return known.traits
        # A folder's create is link(2), in our own code: a short race looks for an odd file system.
        race_s = FOLDER_RACE_S if self.store.url.startswith("file:") else RACE_S
        return probe(self.store, allow_single_writer=single, race_s=race_s)

    def _is_of_this_store(self, known: ProbeResult) -> bool:
        store = (self.store.url, self._settings.allow_single_writer_store)
        is_fresh = 0 <= self._clock() - known.probed_ms < PROBE_KEPT_MS
        return is_fresh and (known.store, known.place) == (store, self.store.place)

    def _remember(self, traits: StoreTraits) -> None:
        store = (self.store.url, self._settings.allow_single_writer_store)
        found = ProbeResult(
            store=store, place=self.store.place, traits=traits, probed_ms=self._clock()
        )
        self._folder.write_probe(found)

    def _upload(self, files: SegmentFiles, *, folder: str, leader_epoch: int) -> UploadedSegment:
        assert self._uploader is not None, "nothing is uploaded before the store was checked"
        return self._uploader.upload(files, folder=folder, leader_epoch=leader_epoch)

    def _foreign(self, found: Cluster) -> str:
        folder = f"data folder {self._folder.path}"
        whose = "is empty" if self._folder.is_new else f"to {self._folder.cluster_id}"
        return (
            f"{self.store.url} belongs to cluster {found.cluster_id}, and {folder} {whose}: "
            "to go on with the store's cluster, "
            f"tierlog storage restore --store {self.store.url} --data-dir NEW"
        )

    def _note_refusal(self, error: ConfigurationError) -> None:
        if self.refusal != str(error):
            log.error("store refused: nothing is offloaded", error=str(error))
        self.refusal = str(error)
        pause_s = min(REFUSED_MAX_S, LOOK_AGAIN_S * 2.0 ** min(self._refusals, 10))
        self._refusals += 1
        self._check_again_s = time.monotonic() + pause_s

    def _note_unavailable(self, error: TierlogError) -> None:
        if self.unavailable is None:
            log.warning("store unavailable", store=self.store.url, error=str(error))
        self.unavailable = str(error) or "the store does not answer"

    # --- partitions -------------------------------------------------------------------------------

    def cold_side(self, record: TopicRecord, partition: int) -> ColdLog | None:
        """None where the partition has no side there (`uses_bucket`)."""
        cold = self.cold_log(record, partition)
        return cold if uses_bucket(LogConfig.parse(record.config), cold.manifest) else None

    def cold_log(self, record: TopicRecord, partition: int) -> ColdLog:
        manifests = self._manifests(record, partition)
        return ColdLog(
            manifests,
            self.reader,
            self._upload,
            notes=self._notes_of(manifests.keys),
            full_key=self.store.full_key,
            clock=self._clock,
            on_unavailable=self._note_unavailable,
            is_ours=lambda: self.is_ours,
        )

    def _manifests(self, record: TopicRecord, partition: int) -> ManifestStore:
        keys = PartitionKeys(record.name, record.topic_id, partition)
        return ManifestStore(self.store, keys, self._options, cache=self._pages)

    def _notes_of(self, keys: PartitionKeys) -> BucketNotes:
        return BucketNotes(self._folder.path, keys, write=self._folder.write_note)

    # --- topics -----------------------------------------------------------------------------------

    def settle(self, registry: TopicRegistry) -> bool:
        """Tell the bucket what it lacks; whether it is ours to write to."""
        if self.refusal is not None and time.monotonic() < self._check_again_s:
            return False
        try:
            self.check()
        except ConfigurationError as error:
            self._note_refusal(error)
            return False
        except StoreUnavailable as error:
            self._note_unavailable(error)
            raise
        self._look()
        for record in registry.live():
            if record.dirty and record.topic_id not in self._of_others:
                self._publish_ours(record, registry)
        return True

    def _publish_ours(self, record: TopicRecord, registry: TopicRegistry) -> None:
        """Tell the bucket of the topic; one that another folder owns now is left as that has it.

        Where it is the topic that fails, and not the store, the others and all uploads go on.
        """
        try:
            self._publish(record)
        except FencedError as error:
            self._of_others.add(record.topic_id)  # until a take-over, which begins with a restart
            log.error("topic not told to the bucket", topic=record.name, reason=str(error))
        except StoreUnavailable:
            raise
        except TierlogError as error:  # it stays dirty: the next round tries again
            log.warning("topic not told to the bucket yet", topic=record.name, error=str(error))
        else:
            registry.settled(record)

    def _look(self) -> None:
        """Now and then, whether the store still answers: for what a broker says of itself."""
        pause_s = LOOK_EVERY_S if self.unavailable is None else LOOK_AGAIN_S
        if time.monotonic() - self._looked_s < pause_s:
            return
        try:
            if self.store.head(CLUSTER_KEY) is None:
                raise StoreUnavailable(f"{self.store.url} has no {CLUSTER_KEY} any more")
            self.unavailable = None
        except (StoreUnavailable, ConfigurationError) as error:
            self._note_unavailable(error)
        self._looked_s = time.monotonic()

    def delete_topic(self, record: TopicRecord) -> None:
        """Delete what the bucket has of the topic. May be done again.

        Raises FencedError where another folder owns a partition now: what is left then stays.
        """
        if self.store.list(topic_folder(record.name, record.topic_id), limit=1):
            deletion = TopicDeletion(self.store, self._topics, self._own_partitions(record))
            deletion.run(record.as_object())
        for partition in range(record.partitions):
            keys = PartitionKeys(record.name, record.topic_id, partition)
            self._notes_of(keys).forget()
            self._uploads.forget(keys.segments)

    def _publish(self, record: TopicRecord) -> None:
        self._topics.write(record.as_object(), check=lambda: self._check_not_foreign(record))

    def _check_not_foreign(self, record: TopicRecord) -> None:
        """A topic object has no owner: those of the topic's partitions decide who may change it."""
        for partition in self._own_partitions(record):
            partition.check()

    def _own_partitions(self, record: TopicRecord) -> list[OwnPartition]:
        return [self._own_partition(record, number) for number in range(record.partitions)]

    def _own_partition(self, record: TopicRecord, number: int) -> OwnPartition:
        manifests = self._manifests(record, number)
        notes = self._notes_of(manifests.keys)
        return OwnPartition(
            manifests, recorded=notes.recorded, seen=notes.version, clock=self._clock
        )

    def break_off_uploads(self) -> None:
        """With the part that is under way; none begins any more."""
        self._pace.stop()

    def close(self) -> None:
        self.reader.close()
        self.cache.close()
        self.store.close()


def _in_thread_of_its_own(call: Callable[[], None]) -> Future[None]:
    """One that no process waits for at its end: a store may take a minute to say nothing."""
    done: Future[None] = Future()

    def run() -> None:
        try:
            call()
            done.set_result(None)
        except BaseException as error:  # noqa: BLE001  raised where it is waited for
            done.set_exception(error)

    threading.Thread(target=run, name="store-check", daemon=True).start()
    return done
