"""Makes a data folder from the bucket alone: topics, configurations, partitions, producer state.

    <new>/meta.properties                the bucket's cluster id and a new directory id; written
                                         last: without it the folder is not a data folder
    <new>/tierlog/format.json            the format level, if the bucket's or the tail's is above 1
    <new>/tierlog/topics.json            the newest undeleted topic of each name
    <new>/tierlog/manifests/             the manifests in force
    <new>/tierlog/take-over.json         all partitions: the first start takes them over
    <new>/recovery-point-offset-checkpoint, log-start-offset-checkpoint, tierlog/compaction-reached
                                         with `--tail`: the old folder's rows for these logs
    <new>/tierlog/cuts.json              logs of which nothing is left: their offsets begin again,
                                         and groups are set back
    <new>/tierlog/restoring              exists until the restore is complete: no broker starts on
                                         the folder, and an interrupted restore may be repeated
    <new>/<topic>-<partition>/           with `--tail`: the old folder's records above the bucket's
                                         end

* Nothing is written to the bucket. The first start (`take_over`) commits the claim, under a higher
  epoch, and the gap that keeps offsets from being assigned twice. It reads the bucket again,
  because an old owner that is still running may have continued.
* Records below the bucket's end stay in the bucket and are read from there.
* A topic with an unreadable object is skipped entirely and reported; the others are restored. A
  substitute would be an older state of the topic, or an older topic.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import structlog

from tierlog.broker.bucket.cold_reads import producers_below, uses_bucket
from tierlog.broker.data_folder.bucket_state import BucketState
from tierlog.broker.data_folder.data_folder import (
    COMPACTION_REACHED,
    LOG_STARTS,
    RECOVERY_POINTS,
    RESTORING,
    TopicPartition,
    folder_lock,
    format_topic_id_partition,
    new_id,
    read_level,
    unusable,
    write_checkpoint,
    write_level,
)
from tierlog.broker.data_folder.topic_registry import TOPICS, TopicRecord, TopicRegistry
from tierlog.broker.opening.opened_log import EPOCHS
from tierlog.broker.opening.take_over import NO_MANIFEST, PendingTakeOver, write_take_overs
from tierlog.broker.partition.checkpoints import TRUNCATIONS
from tierlog.host.durable_file import REAL_DISK, write_durably
from tierlog.host.medium import make_folders
from tierlog.hot_tier.closed_log import with_swaps_finished
from tierlog.hot_tier.log_config import LogConfig
from tierlog.manifest.bucket_level import BucketLevel
from tierlog.manifest.keys import PartitionKeys, topic_versions
from tierlog.manifest.state import EpochStart, Manifest
from tierlog.manifest.store import ManifestStore, StoreOptions
from tierlog.manifest.topic_objects import (
    TOPIC_OBJECT_MISSING,
    TopicObject,
    TopicObjects,
    load_cluster,
    restorable,
)
from tierlog.object_store.store import ObjectStore
from tierlog.record_format import checkpoint_files
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.consumer_offsets import TOPIC as OFFSETS_TOPIC
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptDataError,
    CorruptManifest,
    InvalidConfig,
    MissingObject,
)
from tierlog.repair.restore_tail import OldFolder, Tail, TailTarget, take_tail

log = structlog.get_logger(__name__)

NOT_IN_THE_WAY = frozenset({"lost+found", ".lock", "tierlog"})
# Below `tierlog/`: left by a start that was refused because the bucket is another cluster's.
LEFT_BY_A_START = frozenset({"cache", "format.json", "manifests", "owner", "restoring.tmp"})


class RestoreOptions(NamedTuple):
    """`gap`: the offsets to skip at the end of each partition. `tail`: the old data folder."""

    data_dir: Path
    gap: int
    clock: Callable[[], int]
    tail: Path | None = None


class RestoredPartition(msgspec.Struct, frozen=True, kw_only=True):
    """`end_offset`: the bucket's end. `tail`: what was copied from the old folder, or why not."""

    topic: str
    partition: int
    log_start_offset: int
    end_offset: int
    segments: int
    tail: Tail | None

    @property
    def is_damaged(self) -> bool:
        return self.tail is not None and self.tail.damaged


class OtherTopic(msgspec.Struct, frozen=True, kw_only=True):
    """A topic in the bucket that was not restored: deleted, older than another of its name, or
    `unreadable`, which then is the reason.
    """

    name: str
    topic_id: str
    deleted: bool = False
    unreadable: str = ""


class RestoreReport(msgspec.Struct, frozen=True, kw_only=True):
    cluster_id: str
    partitions: list[RestoredPartition]
    others: list[OtherTopic]


def restore(store: ObjectStore, options: RestoreOptions) -> RestoreReport:
    """Fill a new data folder. Changes nothing in the bucket or in the old folder.

    Raises ConfigurationError (a folder is in use or not empty, the bucket has no cluster, or a
    format level that this version does not read), StoreUnavailable, CorruptDataError (a file of
    the old folder, outside of its logs).
    """
    cluster = load_cluster(store)
    if cluster is None:
        raise ConfigurationError(f"{store.url} holds no cluster: there is nothing to restore")
    try:
        levels = [BucketLevel(store).read_level()]
        if options.tail is not None:
            levels.append(read_level(options.tail))
        return _filled(store, options, cluster.cluster_id, level=max(levels))
    except OSError as error:
        raise unusable(options.data_dir, error) from error


def _filled(
    store: ObjectStore, options: RestoreOptions, cluster_id: str, *, level: int
) -> RestoreReport:
    _check_empty(options.data_dir)  # before a lock file is created in somebody else's folder
    with folder_lock(options.data_dir):
        _check_empty(options.data_dir)  # again: a broker may have used it until now
        unfinished = options.data_dir / RESTORING
        make_folders(unfinished.parent)
        write_durably(unfinished, b"")
        (options.data_dir / "meta.properties").unlink(missing_ok=True)
        _clear(options.data_dir)
        (unfinished.parent / "manifests").mkdir()
        write_level(options.data_dir, level)
        old = OldFolder(options.tail, cluster_id=cluster_id) if options.tail else None
        try:
            report = _Restore(store, options, old).run(cluster_id)
        finally:
            if old is not None:
                old.close()
        unfinished.unlink()
        REAL_DISK.sync_folder(unfinished.parent)
    return report


def _check_empty(data_dir: Path) -> None:
    make_folders(data_dir)
    found = {path.name for path in data_dir.iterdir()} - NOT_IN_THE_WAY
    ours = data_dir / "tierlog"
    begun = {path.name for path in ours.iterdir()} if ours.exists() else set()
    if found <= {"meta.properties"} and begun <= LEFT_BY_A_START:
        return
    if "meta.properties" in found:
        raise ConfigurationError(
            f"data folder {data_dir} is not empty, it belongs to a broker: serve it, or restore "
            "into a new folder"
        )
    if not (data_dir / RESTORING).exists():
        raise ConfigurationError(f"data folder {data_dir} is not empty: restore into a new folder")


def _clear(data_dir: Path) -> None:
    """Remove what an interrupted restore made, perhaps from other topics or another old folder."""
    for path in data_dir.iterdir():
        if path.is_dir() and path.name not in NOT_IN_THE_WAY:
            shutil.rmtree(path)
    shutil.rmtree(data_dir / "tierlog" / "manifests", ignore_errors=True)


_Loaded = tuple[ManifestStore, Manifest | None]


class _Restore:
    def __init__(self, store: ObjectStore, options: RestoreOptions, old: OldFolder | None) -> None:
        self._store, self._options, self._old = store, options, old
        self._data_dir = options.data_dir
        self._pending: dict[str, PendingTakeOver] = {}
        self._epochs: dict[str, tuple[EpochStart, ...]] = {}
        self._recovery_points: dict[TopicPartition, int] = {}
        self._log_starts: dict[TopicPartition, int] = {}
        self._cleaned_before: dict[TopicPartition, int] = {}
        self._truncations: dict[str, int | None] = {}
        self._unreadable: list[OtherTopic] = []
        self._nameless: list[OtherTopic] = []  # these do not prevent restoring others of the name
        self._deletions: list[TopicRecord] = []  # to be completed by the first start
        self._manifest_options = StoreOptions(clock=options.clock)

    def run(self, cluster_id: str) -> RestoreReport:
        chosen, others = restorable(self._topics())
        of_unreadable = {bad.name for bad in self._unreadable}  # which may be newer
        older = [topic for topic in chosen.values() if topic.name in of_unreadable]
        restored: list[TopicRecord] = []
        partitions: list[RestoredPartition] = []
        for topic in chosen.values():
            if topic.name in of_unreadable:
                continue
            try:
                record, of_topic = self._restored(topic)
                partitions += of_topic
                restored.append(record)
            except (CorruptManifest, MissingObject) as bad:
                self._skip(topic.name, topic.topic_id, bad)
        self._write_folder(cluster_id, [*restored, *self._deletions])
        left = [
            OtherTopic(name=one.name, topic_id=one.topic_id, deleted=one.deleted)
            for one in (*others, *older)
        ]
        return RestoreReport(
            cluster_id=cluster_id,
            partitions=partitions,
            others=[*left, *self._nameless, *self._unreadable],
        )

    def _topics(self) -> list[TopicObject]:
        """The topics in the bucket, and those that only the old folder has."""
        objects, found = TopicObjects(self._store), []
        unpublished = dict(self._old.unpublished) if self._old is not None else {}
        for name, topic_id in objects.scan():
            try:
                topic = objects.load_topic(name, topic_id)
                if self._take_deletion(topic_id) and topic is not None:
                    topic = msgspec.structs.replace(topic, deleted=True)
            except CorruptManifest as bad:
                self._skip(name, topic_id, bad)
                continue
            if topic is not None:
                found.append(topic)
                unpublished.pop(topic_id, None)
            elif topic_id not in unpublished and objects.is_lost(name, topic_id):
                self._nameless.append(
                    OtherTopic(name=name, topic_id=topic_id, unreadable=TOPIC_OBJECT_MISSING)
                )
        return found + [record.as_object() for record in unpublished.values()]

    def _take_deletion(self, topic_id: str) -> bool:
        """Whether the old folder deleted the topic; the new folder then completes the deletion."""
        record = self._old.deleted.get(topic_id) if self._old is not None else None
        if record is None:
            return False
        topic = record.as_object()
        loaded = self._loaded(topic, range(record.partitions))
        if not self._is_newest_of(topic, loaded):
            return False
        for manifests, manifest in loaded:
            if manifest is not None:
                BucketState(self._data_dir, manifests.keys).record_manifest(manifest)
        self._deletions.append(record)
        return True

    def _skip(self, name: str, topic_id: str, bad: CorruptDataError) -> None:
        log.error("topic not restored", topic=name, topic_id=topic_id, error=str(bad))
        self._unreadable.append(OtherTopic(name=name, topic_id=topic_id, unreadable=str(bad)))

    def _restored(self, topic: TopicObject) -> tuple[TopicRecord, list[RestoredPartition]]:
        """Restore all partitions; none if one cannot be read."""
        topic = self._with_unpublished_partitions(topic)
        loaded = self._loaded(topic, range(topic.partitions))
        unpublished = self._unpublished(topic, loaded)
        if unpublished is not None:
            loaded += self._loaded(unpublished, range(topic.partitions, unpublished.partitions))
            topic = unpublished
        for manifests, manifest in loaded:
            if manifest is None:
                manifests.check_never_existed()
        record = _record(topic, absent=self._absent(topic, loaded))
        numbers = record.partition_numbers()
        return record, [self._partition(topic, *loaded[number]) for number in numbers]

    def _with_unpublished_partitions(self, topic: TopicObject) -> TopicObject:
        """Uploads do not wait for the topic object that has their partition."""
        found = TopicObjects(self._store).with_all_partitions(topic)
        if found is not topic:
            log.warning(
                "the bucket has more partitions than its topic object says",
                topic=topic.name,
                topic_object=topic.partitions,
                partitions=found.partitions,
            )
        return found

    def _absent(self, topic: TopicObject, loaded: Sequence[_Loaded]) -> tuple[int, ...]:
        """Partitions of the groups' offsets that an adopted folder lacked. If they were created
        now, groups would move to them (`home_partition`), and a start would read older offsets of
        theirs after the newer ones.
        """
        if topic.name != OFFSETS_TOPIC:
            return ()
        without = [manifests.keys for manifests, manifest in loaded if manifest is None]
        if len(without) == len(loaded):
            return ()
        return tuple(
            keys.partition
            for keys in without
            if self._old is None or self._old.why_ignored(keys, None)
        )

    def _loaded(self, topic: TopicObject, numbers: range) -> list[_Loaded]:
        keys = [PartitionKeys(topic.name, topic.topic_id, number) for number in numbers]
        stores = [ManifestStore(self._store, one, self._manifest_options) for one in keys]
        return [(manifests, manifests.load_manifest()) for manifests in stores]

    def _unpublished(self, topic: TopicObject, loaded: Sequence[_Loaded]) -> TopicObject | None:
        """The old folder's newer state of the topic that was not published to the bucket."""
        record = self._old.unpublished.get(topic.topic_id) if self._old is not None else None
        return record.as_object() if record and self._is_newest_of(topic, loaded) else None

    def _is_newest_of(self, topic: TopicObject, loaded: Sequence[_Loaded]) -> bool:
        """Whether the old folder was the last to change the topic."""
        assert self._old is not None, "only an old folder has another state of the topic"
        is_newest = all(self._old.is_newest_of(*one) for one in loaded)
        if not is_newest:
            log.warning("old folder's state of the topic ignored: not the newest", topic=topic.name)
        return is_newest

    def _partition(
        self, topic: TopicObject, manifests: ManifestStore, manifest: Manifest | None
    ) -> RestoredPartition:
        number = manifests.keys.partition
        if manifest is not None:
            BucketState(self._data_dir, manifests.keys).record_manifest(manifest)
        tail = self._tail(topic, manifest, manifests)
        self._plan(topic, number, manifest, tail)
        log.info(
            "partition restored",
            partition=str(manifests.keys),
            end_offset=manifest.end_offset if manifest else 0,
            tail_end_offset=tail.end_offset if tail else None,
        )
        return RestoredPartition(
            topic=topic.name,
            partition=number,
            log_start_offset=manifest.log_start_offset if manifest else 0,
            end_offset=manifest.end_offset if manifest else 0,
            segments=manifest.segment_count if manifest else 0,
            tail=tail,
        )

    def _tail(
        self, topic: TopicObject, manifest: Manifest | None, manifests: ManifestStore
    ) -> Tail | None:
        if self._old is None:
            return None
        keys = manifests.keys
        if why := self._old.why_ignored(keys, manifest):
            return Tail(whole=False, detail=why)
        snapshot = producers_below(manifests, manifest, manifest.end_offset) if manifest else None
        target = TailTarget(
            folder=self._data_dir / str(keys),
            keys=keys,
            config=LogConfig.parse(topic.config),
            clock=self._options.clock,
        )
        with with_swaps_finished(self._old.partition_folder(keys)) as source:
            tail = take_tail(
                self._old, target, manifest, manifests, source=source, snapshot=snapshot
            )
        self._take_checkpoints(self._old, keys, tail)
        return tail

    def _take_checkpoints(self, old: OldFolder, keys: PartitionKeys, tail: Tail) -> None:
        """Copy the old folder's checkpoints, so that the first start neither truncates flushed
        records, nor brings back trimmed ones, nor takes what compaction removed for a loss.
        """
        place = (keys.topic, keys.partition)
        self._recovery_points[place] = max(tail.end_offset, old.reached(keys))
        if (log_start := old.log_start(keys)) is not None:
            self._log_starts[place] = log_start
        if trimmed_to := old.bucket_state(keys).trimmed_to:
            BucketState(self._data_dir, keys).record_trim(trimmed_to)
        if cleaned_before := old.cleaned_before(keys):
            self._cleaned_before[place] = cleaned_before
        name = format_topic_id_partition(keys.topic_id, keys.partition)
        if name in old.truncations:
            self._truncations[name] = old.truncations[name]

    def _plan(
        self, topic: TopicObject, number: int, manifest: Manifest | None, tail: Tail | None
    ) -> None:
        """Record what the first start is to do with the partition."""
        name = format_topic_id_partition(topic.topic_id, number)
        if not uses_bucket(LogConfig.parse(topic.config), manifest):
            # It has nothing in the bucket, and never will: there is no owner to fence, and no gap.
            if tail is None or not tail.end_offset:
                self._truncations[name] = None
            return
        whole = None
        if tail is not None and tail.epochs:
            self._epochs[name] = tail.epochs
        if tail is not None and tail.whole:
            whole = (manifest.owner, manifest.leader_epoch) if manifest else NO_MANIFEST
        self._pending[name] = PendingTakeOver(gap=self._options.gap, whole_tail_of=whole)

    def _write_folder(self, cluster_id: str, records: list[TopicRecord]) -> None:
        TOPICS.path(self._data_dir).unlink(missing_ok=True)
        TopicRegistry(self._data_dir).put_topics(*records)
        EPOCHS.write_document(self._data_dir, self._epochs)
        TRUNCATIONS.write_document(self._data_dir, self._truncations)
        write_checkpoint(self._data_dir / RECOVERY_POINTS, self._recovery_points)
        write_checkpoint(self._data_dir / LOG_STARTS, self._log_starts)
        write_checkpoint(self._data_dir / COMPACTION_REACHED, self._cleaned_before)
        write_take_overs(self._data_dir, self._pending)
        properties = {
            "version": "1",
            "cluster.id": cluster_id,
            "node.id": "1",
            "directory.id": new_id(),
        }
        write_durably(
            self._data_dir / "meta.properties", checkpoint_files.format_properties(properties)
        )


def _record(topic: TopicObject, *, absent: tuple[int, ...]) -> TopicRecord:
    """Dirty, because a take-over writes a version of the topic object (`topic_deletion`). Raises
    CorruptManifest if no broker of this version can open such a topic.
    """
    try:
        parse_topic_id(topic.topic_id)
        config = LogConfig.parse(topic.config).overrides
    except (ValueError, InvalidConfig) as bad:
        file = topic_versions(topic.name, topic.topic_id)
        raise CorruptManifest(str(bad), file=file) from bad
    return TopicRecord(
        name=topic.name,
        topic_id=topic.topic_id,
        partitions=topic.partitions,
        config=dict(config),
        created_ms=topic.created_ms,
        dirty=True,
        absent=absent,
    )
