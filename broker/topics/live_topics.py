"""The topics of a broker: create, alter, delete, and find by name.

* A topic exists once the registry lists it, durably, and is gone once it is listed as deleted.
  Files and objects follow in the background; what a crash interrupts is finished later.
* A topic that is being created is listed as deleted until it is complete, so that what an error (a
  full disk) or a crash leaves behind is removed as for any deleted topic.
* One lock guards changes to the set of topics and the removal of folders: nothing is created under
  a name whose old folder is being removed. Lookups take no lock.
* The broker notifies other components of changes (groups, the copier).
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple, Protocol

import msgspec
import structlog

from tierlog.broker.data_folder.data_folder import (
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
    TopicIdPartition,
    TopicPartition,
    new_id,
    topic_id_of,
    with_suffix,
)
from tierlog.broker.data_folder.disk_reserve import raising_disk_full
from tierlog.broker.data_folder.topic_registry import TopicRecord, TopicRegistry
from tierlog.broker.opening.adoption import adopt
from tierlog.broker.opening.log_opener import Assignment, LogOpener
from tierlog.broker.opening.opened_log import Wanted
from tierlog.broker.partition.checkpoints import Checkpoints, CompactionOffsets, NotOpen
from tierlog.broker.partition.damaged_partition import DamagedPartition
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.topic_replicas import (
    ALONE,
    ANYWHERE,
    Chosen,
    NewTopic,
    check_min_in_sync,
    choose_factor,
)
from tierlog.broker.topics.topics import (
    Elsewhere,
    Topic,
    TopicSummary,
    check_topic_name,
)
from tierlog.host.durable_file import REAL_DISK
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.errors import (
    CorruptDataError,
    FieldProblem,
    InvalidConfig,
    InvalidPartitionCount,
    InvalidRequest,
    ShuttingDown,
    TierlogError,
    TopicExists,
    UnknownTopic,
)
from tierlog.record_format.topic_rules import MAX_PARTITIONS, ConfigValue

log = structlog.get_logger(__name__)


class Unsettled(NamedTuple):
    """A partition whose hand-over a crash interrupted: only the bucket knows whose it is. As much
    of its checkpoints as `DamagedPartition` keeps.
    """

    topic: str
    number: int
    recovery_point: int | None
    log_start_offset: int | None


class HasReplicas(Protocol):
    """The replicas of partitions that have a set of them (`broker.replicas`)."""

    def open_all(
        self, points: Mapping[TopicPartition, int], starts: Mapping[TopicPartition, int]
    ) -> None: ...
    def not_led(self) -> Iterable[NotOpen]: ...
    def keeps(self, place: TopicIdPartition) -> bool: ...


class HasTopics(Protocol):
    """The topics of all brokers (`cluster.cluster_topics`)."""

    def ensure(self, wanted: NewTopic) -> object: ...
    def choose_factor(self, given: int | None, replicas: Chosen) -> int: ...


class InCluster(Elsewhere, Protocol):
    """The cluster that the broker is one of."""

    @property
    def topics(self) -> HasTopics: ...
    @property
    def replicas(self) -> HasReplicas: ...


class LiveTopics:
    """Thread-safe. Empty until `open_all`, and alone if that is given no cluster. `registry`,
    `checkpoints` and `compaction_offsets`: what the data folder's files say of the topics.
    """

    def __init__(self, folder: DataFolder, opener: LogOpener, *, clock: Callable[[], int]) -> None:
        self._folder, self._opener, self._clock = folder, opener, clock
        self.registry = TopicRegistry(folder.path, write=folder.write)
        self.checkpoints = Checkpoints(folder, self.partitions, self._not_open)
        self.compaction_offsets = CompactionOffsets(folder)
        self._cluster: InCluster | None = None
        self._unsettled: dict[TopicIdPartition, Unsettled] = {}
        self._topics: dict[str, Topic] = {}
        self._by_id: dict[str, Topic] = {}
        self._deleting: dict[str, Topic] = {}  # deleted by this process, by id
        self.version = 0  # rises when a topic is created, altered or deleted
        self._lock = threading.RLock()
        self._closed = False

    def open_all(self, *, take_over: bool, cluster: InCluster | None = None) -> None:
        """At the start: adopt Kafka's folders, set deleted topics aside, open the others."""
        self._cluster = cluster
        adopt(self._folder, self.registry, clock=self._clock)
        # Read afterwards: adoption may correct them.
        points, starts = (self._folder.read_checkpoint(it) for it in (RECOVERY_POINTS, LOG_STARTS))
        for record in self.registry.deleted():
            self._set_aside(record)
        if take_over:  # the new owner writes a version of each topic object (`topic_deletion`)
            self.registry.put_topics(
                *(msgspec.structs.replace(record, dirty=True) for record in self.registry.live())
            )
        live = self.registry.live()
        for record in live if cluster is not None else ():
            for number in record.absent:
                place = record.name, number
                is_replica = self._keeps(record.topic_id, number)
                if not is_replica and self._folder.partition_folder(*place).exists():
                    self._unsettled[record.topic_id, number] = Unsettled(
                        *place, points.get(place), starts.get(place)
                    )
        cleaned_before = self.compaction_offsets.cleaned_before
        wanted = [
            Wanted(
                record,
                number,
                recovery_point=points.get(place, cleaned_before(place)),
                log_start_offset=starts.get(place),
                at_start=True,
            )
            for record in live
            for number in record.partition_numbers()
            for place in [(record.name, number)]
        ]
        opened = iter(self._opener.open_partitions(wanted))
        for record in live:
            mine = {number: next(opened) for number in record.partition_numbers()}
            topic = Topic(record, mine, elsewhere=cluster)
            self._topics[record.name] = self._by_id[record.topic_id] = topic
        if cluster is not None:
            cluster.replicas.open_all(points, starts)

    def _keeps(self, topic_id: str, number: int) -> bool:
        return self._cluster is not None and self._cluster.replicas.keeps((topic_id, number))

    def allocate_waiting_epochs(self) -> None:
        """What a start on a full disk could not do. Raises OSError."""
        with self._lock:
            self._opener.allocate_waiting_epochs()

    def close(self) -> bool:
        """Refuse changes from now on. Returns whether this was the first call."""
        with self._lock:
            was_open, self._closed = not self._closed, True
            return was_open

    # --- finding ----------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Topic]:
        """A snapshot of all topics."""
        return iter(list(self._topics.values()))

    def find(self, name: str) -> Topic:
        found = self._topics.get(name)
        if found is None:
            raise UnknownTopic(name)
        return found

    def find_by_id(self, topic_id: str) -> Topic:
        found = self._by_id.get(topic_id)
        if found is None:
            raise UnknownTopic(topic_id)
        return found

    def ensure(self, wanted: NewTopic) -> Topic:
        """The internal topic, created if it does not exist."""
        if wanted.name not in self._topics:
            create = self.create if self._cluster is None else self._cluster.topics.ensure
            with suppress(TopicExists):  # another first call was faster
                create(wanted)
        return self.find(wanted.name)

    def partitions(self) -> Iterator[Partition]:
        for topic in self:
            yield from topic.partitions.values()

    def damaged(self) -> Iterator[DamagedPartition]:
        """Partitions whose logs could not be opened when the broker started."""
        for topic in self:
            yield from list(topic.damaged.values())

    def _not_open(self) -> Iterator[NotOpen]:
        """What has rows in the checkpoints, and is not among the partitions."""
        yield from self.damaged()
        yield from self._unsettled.copy().values()
        if self._cluster is not None:
            yield from self._cluster.replicas.not_led()

    def unsettled(self) -> list[TopicIdPartition]:
        """Partitions with files here of which only the bucket knows whose they are."""
        return list(self._unsettled)

    def note_replica(self, place: TopicIdPartition) -> None:
        """They are those of a replica, which is open now."""
        self._unsettled.pop(place, None)

    def summaries(self, *, prefix: str, internal: bool) -> list[TopicSummary]:
        return sorted(
            topic.summary()
            for topic in self
            if topic.record.name.startswith(prefix) and (internal or not topic.record.internal)
        )

    # --- changing ---------------------------------------------------------------------------------

    def create(self, wanted: NewTopic) -> Topic:
        name = wanted.name
        with self.changing():
            parsed, _ = self.check_new(wanted)
            older = [one for one in self.registry.deleted() if one.name == name]
            for deleted in older:
                self._set_aside(deleted)
            self.checkpoints.forget(name)  # after a crash the new topic must find no rows
            self.compaction_offsets.forget(name)
            record = TopicRecord(
                name=name,
                topic_id=new_id(),
                partitions=wanted.partitions,
                config=dict(parsed.overrides),
                # Above that of every older topic of the name, which the bucket may still list as
                # live: a restore takes the newest, and a clock may step back.
                created_ms=max([self._clock(), *(one.created_ms + 1 for one in older)]),
            )
            topic = self._create(record)
            self._topics[name] = self._by_id[record.topic_id] = topic
            self.version += 1
        return topic

    def check_new(self, wanted: NewTopic) -> tuple[LogConfig, int]:
        """Raise what `create` would. The topic's configuration, and its replication factor."""
        factor = self._choose_factor(wanted.replication_factor, wanted.replicas)
        check_topic_name(wanted.name)
        parsed = LogConfig.parse(wanted.config)
        check_min_in_sync(parsed, factor=factor, given=wanted.config)
        self._check_may_have_sets(parsed)
        check_partition_count(wanted.partitions)
        if wanted.name in self._topics:
            raise TopicExists(f"topic {wanted.name!r} already exists")
        self._check_letter_case(wanted.name)
        return parsed, factor

    def _choose_factor(self, given: int | None, replicas: Chosen) -> int:
        if self._cluster is not None:
            return self._cluster.topics.choose_factor(given, replicas)
        return choose_factor(given, replicas, default=1, living=(ALONE,))

    def _check_may_have_sets(self, config: LogConfig) -> None:
        """Raises InvalidConfig."""
        if config.replication_store != "none" and self._cluster is None:
            why = "the bucket is a replica in a cluster alone: start the broker with --join"
            raise InvalidConfig(
                f"replication.store: {why}",
                problems=(FieldProblem("config.replication.store", why),),
            )

    def _check_letter_case(self, name: str) -> None:
        """On a Mac's disk, names that differ in letter case alone would be one folder."""
        if not self._folder.ignores_letter_case:
            return
        for other in (*self.registry.live(), *self.registry.deleted()):
            if other.name != name and other.name.lower() == name.lower():
                state = "is being deleted" if other.deleted else "already exists"
                raise TopicExists(
                    f"topic {name!r}: topic {other.name!r} {state}, and the disk of the data "
                    "folder does not distinguish upper and lower case"
                )

    def _create(self, record: TopicRecord) -> Topic:
        self.registry.put_topics(msgspec.structs.replace(record, deleted=True))
        topic = Topic(record, {})
        try:
            topic.add_partitions(self._open_partitions(record, record.partition_numbers()))
            self.registry.put_topics(record)
        except (TierlogError, OSError):
            _abandon_logs(topic)
            with suppress(OSError):
                self._set_aside(record)
            raise
        return topic

    def alter(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None],
        partitions: int | None,
        replicas: Chosen = ANYWHERE,
    ) -> Topic:
        with self.changing():
            self.check_added_replicas(name, replicas)
            topic, before = self._find_owned(name)
            changed, record = _altered(topic, before, config=config, partitions=partitions)
            self._check_may_have_sets(changed)
            self.registry.put_topics(record)
            topic.add_partitions(self._added_partitions(topic, record, before=before))
            topic.record, topic.config = record, changed
            self.version += 1
            for partition in topic.partitions.values():
                partition.update_config(changed)
                if not partition.has_bucket:  # until remote storage is turned on
                    partition.use_bucket(self._opener.find_cold_log(record, partition.number))
        return topic

    def check_added_replicas(self, name: str, replicas: Chosen) -> None:
        """Of new partitions. Raises InvalidReplicaAssignment."""
        if replicas:
            self._choose_factor(self.find(name).record.replication_factor, replicas)

    def check_altered(
        self, name: str, *, config: Mapping[str, ConfigValue | None], partitions: int | None
    ) -> None:
        """Raise what `alter` would."""
        topic, before = self._find_owned(name)
        changed, _ = _altered(topic, before, config=config, partitions=partitions)
        self._check_may_have_sets(changed)

    def _added_partitions(
        self, topic: Topic, record: TopicRecord, *, before: TopicRecord
    ) -> dict[int, Partition | DamagedPartition]:
        """Open all new partitions, or none: folders that no record lists would be adopted."""
        new = [number for number in record.partition_numbers() if number not in topic.numbers]
        if not new:
            return {}
        folders = [self._folder.partition_folder(record.name, number) for number in new]
        made = [path for path in folders if not path.exists()]
        try:
            return self._open_partitions(record, new)
        except (TierlogError, OSError):
            with suppress(OSError):  # the next change or start opens them, as the registry says
                _remove_folders(path for path in made if path.exists())
                REAL_DISK.sync_folder(self._folder.path)
                # The new count may have been published to the bucket meanwhile.
                self.registry.put_topics(msgspec.structs.replace(before, dirty=True))
            raise

    def delete(self, name: str) -> None:
        with self.changing():
            self._delete(self._find_owned(name)[1])

    def _delete(self, record: TopicRecord) -> None:
        record = msgspec.structs.replace(record, deleted=True, dirty=True)
        self.registry.put_topics(record)
        self._by_id.pop(record.topic_id)
        topic = self._deleting[record.topic_id] = self._topics.pop(record.name)
        self.version += 1
        for partition in topic.partitions.values():
            partition.retire()
        _abandon_logs(topic)
        try:
            self._set_aside(record)
        except OSError as error:  # the topic is deleted anyway: `Deletions` tries again
            log.warning("deleted topic's files remain for now", topic=record.name, error=str(error))

    # --- in a cluster: `broker.cluster` decides ---------------------------------------------------

    def follow_topic(self, record: TopicRecord) -> Topic:
        """Know a topic as the cluster has it now. Of a new one no partition is here yet. Raises
        InvalidConfig if it cannot apply here.
        """
        with self.changing():
            known = self.registry.by_name(record.name)
            if known is not None and known.topic_id == record.topic_id:
                return self._follow_change(known, record)
            self._check_letter_case(record.name)
            for older in (one for one in self.registry.deleted() if one.name == record.name):
                self._set_aside(older)
            self.checkpoints.forget(record.name)
            self.compaction_offsets.forget(record.name)
            record = msgspec.structs.replace(record, absent=tuple(range(record.partitions)))
            self.registry.put_topics(record)
            topic = Topic(record, {}, elsewhere=self._cluster)
            self._topics[record.name] = self._by_id[record.topic_id] = topic
            self.version += 1
            return topic

    def _follow_change(self, known: TopicRecord, record: TopicRecord) -> Topic:
        topic = self._topics[record.name]
        if known.version >= record.version:
            return topic
        added = range(known.partitions, record.partitions)
        record = msgspec.structs.replace(
            record,
            absent=(*known.absent, *added),
            unclean=known.unclean,
            dirty=record.dirty or known.dirty,
        )
        config = LogConfig.parse(record.config)
        self.registry.put_topics(record)
        topic.record, topic.config = record, config
        self.version += 1
        for partition in topic.partitions.values():
            partition.update_config(config)
        return topic

    def forget_topic(self, topic_id: str) -> None:
        """The cluster deleted it: refuse every call from now on; `Deletions` removes the rest."""
        with self.changing():
            if (topic := self._by_id.get(topic_id)) is not None:
                self._delete(topic.record)

    def settle(self, topic_id: str, number: int) -> Partition | None:
        """Claim and serve a partition that is assigned to this folder, or still its own; remove
        what is left here of one that is not. None if it is another's, or a replica is or was here.
        Raises what opening and claiming do; it may be repeated, but only one call at a time for a
        partition.
        """
        topic = self.find_by_id(topic_id)
        if number in topic.partitions or number in topic.damaged:
            return topic.partitions.get(number)
        if self._keeps(topic_id, number):  # looked at second: it may have become one just now
            return None
        found = self._opener.find_assignment(topic.record, number)
        if found is Assignment.NONE:
            return None
        if found is not Assignment.STILL_HERE:
            self._remove_leftovers(topic.record, number)
        return self._settle_here(topic, number) if found.is_here else None

    def _remove_leftovers(self, record: TopicRecord, number: int) -> None:
        """Of a partition that was handed over: everything of it is in the bucket."""
        self._opener.remove_files(record, number)
        self._unsettled.pop((record.topic_id, number), None)
        self.compaction_offsets.truncate({(record.name, number): 0})
        self.checkpoints.save()

    def _settle_here(self, topic: Topic, number: int) -> Partition | None:
        rows = self._unsettled.get((topic.record.topic_id, number))
        wanted = Wanted(
            topic.record,
            number,
            recovery_point=rows.recovery_point if rows else None,
            log_start_offset=rows.log_start_offset if rows else None,
            at_start=rows is not None,
        )
        opened = self._opener.open_partitions([wanted])[0]
        if isinstance(opened, DamagedPartition):
            topic.add_partitions({number: opened})
            return None
        try:
            opened.claim()
            with self.changing():
                self._attach(topic, opened)
        except BaseException:
            opened.upkeep.abandon_log()
            raise
        return opened

    def _attach(self, topic: Topic, opened: Partition) -> None:
        topic = self.find_by_id(topic.record.topic_id)  # raises if it was deleted meanwhile
        opened.update_config(topic.config)
        self._list_as_here(topic, opened.number, here=True)
        topic.add_partitions({opened.number: opened})
        self._unsettled.pop((topic.record.topic_id, opened.number), None)
        self.checkpoints.save()
        self.version += 1

    def serve(self, partition: Partition) -> None:
        """A replica of this broker leads from now on. Raises UnknownTopic if it was deleted."""
        with self.changing():
            topic = self.find_by_id(partition.topic_id)
            partition.update_config(topic.config)
            topic.add_partitions({partition.number: partition})
            self.version += 1

    def leave(self, partition: Partition) -> None:
        """Record, durably, that the partition may be another's from now on: before it is assigned.
        A start then asks the bucket whose it is.
        """
        with self.changing():
            self._list_as_here(self.find_by_id(partition.topic_id), partition.number, here=False)

    def stay(self, partition: Partition) -> None:
        """It was not assigned to another after all."""
        with self.changing():
            self._list_as_here(self.find_by_id(partition.topic_id), partition.number, here=True)

    def _list_as_here(self, topic: Topic, number: int, *, here: bool) -> None:
        absent = {one for one in topic.record.absent if one != number}
        record = msgspec.structs.replace(
            topic.record, absent=tuple(sorted(absent if here else absent | {number}))
        )
        self.registry.put_topics(record)
        topic.record = record

    def retire_partition(self, partition: Partition, gone: Callable[[], TierlogError]) -> None:
        """It is another's: answer with `gone` from now on."""
        with self.changing():
            if (topic := self._by_id.get(partition.topic_id)) is not None:
                topic.remove_partition(partition.number)
            self.version += 1
            partition.retire(gone)

    def remove_leftovers(self, partition: Partition) -> None:
        """Of a partition that is another's. Raises OSError; a start does the rest."""
        record = self.find_by_id(partition.topic_id).record
        partition.upkeep.abandon_log()
        self._remove_leftovers(record, partition.number)
        self._opener.forget_recorded(record, partition.number)

    # --- what deleted topics leave: `background.deletions` ----------------------------------------

    @property
    def is_closed(self) -> bool:
        return self._closed

    def deleted(self) -> list[TopicRecord]:
        with self._lock:  # a deletion in progress first closes its logs
            return self.registry.deleted()

    def is_busy(self, record: TopicRecord) -> bool:
        """Whether work that began before the deletion is still writing to the bucket."""
        topic = self._deleting.get(record.topic_id)
        partitions = topic.partitions.values() if topic is not None else ()
        return any(one.is_busy for one in partitions)

    def remove_files(self, record: TopicRecord) -> None:
        """Raises OSError."""
        with self._lock:  # a new topic of the name may be half created
            aside = self._set_aside(record)
        _remove_folders(aside)

    def forget(self, record: TopicRecord) -> None:
        """Nothing of the topic is left."""
        self.registry.forget(record.topic_id)
        self._deleting.pop(record.topic_id, None)
        with self._lock:  # a new topic is in the registry before it is allocated an epoch
            self._opener.forget_topics_but(self.registry.ids())

    def _set_aside(self, record: TopicRecord) -> list[Path]:
        """Raises OSError."""
        is_name_free = self.registry.by_name(record.name) is None
        return set_folders_aside(self._folder, record, is_name_free=is_name_free)

    # --- details ----------------------------------------------------------------------------------

    def _find_owned(self, name: str) -> tuple[Topic, TopicRecord]:
        """The topic, and its state in the registry, which has more partitions than are served if
        they could be neither added nor removed. Raises FencedError if another folder now owns one
        of its partitions.
        """
        topic = self.find(name)
        for partition in topic.partitions.values():
            partition.check_leadership()
        record = self.registry.by_name(name)
        assert record is not None, "a live topic is listed"
        return topic, record

    def _open_partitions(
        self, record: TopicRecord, numbers: Iterable[int]
    ) -> dict[int, Partition | DamagedPartition]:
        wanted = list(numbers)
        opened = self._opener.open_partitions([Wanted(record, number) for number in wanted])
        return dict(zip(wanted, opened, strict=True))

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Serialise changes. Raises ShuttingDown, and DiskFull if nothing was changed."""
        with self._lock, raising_disk_full(self._folder.path):
            if self._closed:
                raise ShuttingDown("the broker is shutting down")
            yield


def _abandon_logs(topic: Topic) -> None:
    for partition in topic.partitions.values():
        partition.upkeep.abandon_log()


def _altered(
    topic: Topic,
    before: TopicRecord,
    *,
    config: Mapping[str, ConfigValue | None],
    partitions: int | None,
) -> tuple[LogConfig, TopicRecord]:
    """The changed configuration and record. Raises InvalidConfig, InvalidPartitionCount."""
    changed = topic.config.replace(config)
    check_min_in_sync(changed, factor=before.replication_factor, given=config)
    for partition in topic.partitions.values():
        partition.check_change(topic.config, changed)
    record = msgspec.structs.replace(before, config=dict(changed.overrides), dirty=True)
    return changed, record if partitions is None else with_partitions(record, partitions)


def check_partition_count(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        detail = f"partitions must be 1 to {MAX_PARTITIONS}, not {partitions}"
        raise InvalidRequest(detail, problems=(FieldProblem("partitions", detail),))


def with_partitions(record: TopicRecord, partitions: int) -> TopicRecord:
    check_partition_count(partitions)
    if partitions < record.partitions:
        raise InvalidPartitionCount(
            f"topic {record.name!r} has {record.partitions} partitions: the number cannot decrease"
        )
    if record.internal and partitions != record.partitions:
        raise InvalidPartitionCount(
            f"topic {record.name!r} has {record.partitions} partitions: the number cannot change, "
            "because it decides which partition holds a group"
        )
    return msgspec.structs.replace(record, partitions=partitions)


# --- a deleted topic's folders: renamed at once, removed later ----------------------------------


def set_folders_aside(folder: DataFolder, record: TopicRecord, *, is_name_free: bool) -> list[Path]:
    """Rename a deleted topic's folders, so that a new topic can use the name. Their new paths.

    The new name is Kafka's (`<topic>-<p>.<id>-delete`), which Kafka's brokers and ours ignore. Do
    not call it while a topic of that name is being created: a folder without topic id yet is taken
    for the deleted topic's, unless that was already renamed, because a crash may leave such a
    folder. So is one whose topic id is corrupt, if no live topic has the name.
    """
    aside = []
    for number in range(record.partitions):
        path = folder.partition_folder(record.name, number)
        gone = with_suffix(path, f".{record.topic_id}-delete")
        if path.exists() and _is_of(record, path, gone, is_name_free=is_name_free):
            if gone.exists():  # a start that missed the deletion re-created the folder
                shutil.rmtree(gone)
            path.rename(gone)
        if gone.exists():
            aside.append(gone)
    if aside:
        REAL_DISK.sync_folder(folder.path)
    return aside


def _is_of(record: TopicRecord, path: Path, gone: Path, *, is_name_free: bool) -> bool:
    try:
        topic_id = topic_id_of([path])
        return topic_id == record.topic_id or (topic_id is None and not gone.exists())
    except CorruptDataError:
        return is_name_free


def _remove_folders(aside: Iterable[Path]) -> None:
    """Delete folders that were set aside."""
    for path in aside:
        shutil.rmtree(path)
