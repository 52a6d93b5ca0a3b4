"""The broker: a data folder, a bucket, and the topics in them. The front doors in `api` call it.

* Calls take and return batches, slices and offsets, nothing of HTTP. All are thread-safe.
* A topic exists once `topics.json` lists it, durably; it is published to the bucket in the
  background.
* A store that is down stops offload and cold reads, nothing else: `open` waits for it for at most
  `store.start.timeout.ms`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal

import structlog

from tierlog.broker import reports
from tierlog.broker.background.background_tasks import BackgroundTasks
from tierlog.broker.background.copier import Offloaded
from tierlog.broker.background.merger import Merged
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.bucket.store_status import check_has_no_bucket
from tierlog.broker.data_folder.data_folder import DataFolder, unusable
from tierlog.broker.data_folder.disk_reserve import DiskReserve, raising_disk_full
from tierlog.broker.data_folder.topic_registry import TopicRecord
from tierlog.broker.group_coordinator.group_configs import GroupConfigs
from tierlog.broker.group_coordinator.groups import Groups
from tierlog.broker.membership.node import check_has_not_joined
from tierlog.broker.membership.peers import Peers
from tierlog.broker.opening.log_opener import LogOpener
from tierlog.broker.partition.checkpoints import Truncations
from tierlog.broker.partition.damaged_partition import DamagedPartition, adding_remedies
from tierlog.broker.partition.partition import Partition
from tierlog.broker.schema_registry.registry import SchemaRegistry
from tierlog.broker.schema_registry.validation import SchemaValidation
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.share_coordinator.share_groups import ShareGroups
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topic_replicas import ANYWHERE, Chosen, NewTopic
from tierlog.broker.topics.topics import Topic, TopicState, TopicSummary
from tierlog.broker.transaction_coordinator.transactions import Transactions
from tierlog.host.clock import boottime_ms, monotonic_ms, wall_clock_ms
from tierlog.host.disk import Disk, is_disk_full
from tierlog.host.durable_file import REAL_DISK
from tierlog.host.threads import Threads
from tierlog.hot_tier.group_commit import CommitTimes
from tierlog.manifest.garbage import GarbagePlan
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import parse_topic_id
from tierlog.record_format.errors import ConfigurationError, Throttled, TierlogError
from tierlog.record_format.format_level import newest_level
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry
from tierlog.record_format.topic_rules import ConfigValue

if TYPE_CHECKING:
    from tierlog.broker.cluster.cluster import Cluster
    from tierlog.broker.membership.members import Members

log = structlog.get_logger(__name__)

TRIM_S: Final = 30.0  # for the replicas in sync to record it: Kafka's request.timeout.ms
LEAVE_S: Final = 1.0  # at least, for the clean stop to be registered


class Broker:
    """Created by `Broker.open`; serves until `close`."""

    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        *,
        bucket: Bucket | None,
        members: Members | None = None,
        peers: Peers | None = None,
        clock: Callable[[], int],
        disk: Disk = REAL_DISK,
    ) -> None:
        self.folder, self.settings, self.bucket, self.clock = folder, settings, bucket, clock
        self._diverged_folders: list[Path] = []
        self.reserve = DiskReserve(folder.path, reserve_bytes=settings.disk_reserve_bytes or 0)
        with ExitStack() as on_failure:  # a file of the folder may be corrupt
            self._appenders = Threads(settings.append_threads, name="append")
            on_failure.callback(self._appenders.shutdown)
            self._opener = LogOpener(
                folder,
                settings,
                bucket,
                self._appenders.start,
                clock=clock,
                check_room=self.reserve.check_not_breached,
                disk=disk,
            )
            on_failure.callback(self._opener.close_timer)
            self._topics = LiveTopics(folder, self._opener, clock=clock)
            self.registry, self.checkpoints = self._topics.registry, self._topics.checkpoints
            self.group_configs = GroupConfigs(self._topics, settings, clock=clock, peers=peers)
            self.schema_registry = SchemaRegistry(self._topics, clock=clock, peers=peers)
            self.schema_validation = SchemaValidation(
                self.schema_registry.find, now_ms=monotonic_ms
            )
            self.groups = Groups(
                self._topics,
                Truncations(folder),
                self.group_configs,
                settings,
                clock=clock,
                call_after=self._opener.call_after,
            )
            self.group_configs.on_changed = self.groups.coordinator.follow_config
            self.transactions = Transactions(
                self._topics,
                self.groups,
                settings,
                clock=clock,
                call_after=self._opener.call_after,
                peers=peers,
            )
            on_failure.callback(self.transactions.close)
            self.share_groups = ShareGroups(
                self._topics,
                self.groups,
                self.group_configs,
                settings,
                trim=lambda partition, offset: self.trim(partition.topic, partition.number, offset),
                clock=clock,
                call_after=self._opener.call_after,
                peers=peers,
            )
            on_failure.callback(self.share_groups.close)
            self.cluster: Cluster | None = None
            if bucket is not None and members is not None and peers is not None:
                from tierlog.broker.cluster.cluster import Cluster

                disk_wait_s = self.commit_times.disk_wait_s
                members.watch_for_hangs("the disk has not answered", disk_wait_s)
                self.cluster = Cluster(
                    members,
                    self._topics,
                    bucket,
                    peers,
                    offload=self._offload,
                    on_moved=self._coordinate_again,
                    on_followed=self._topic_changed,
                    settings=settings,
                    folder=folder,
                    opener=self._opener,
                    clock=clock,
                )
            self.background = BackgroundTasks(
                folder,
                settings,
                bucket,
                topics=self._topics,
                groups=self.groups,
                group_configs=self.group_configs,
                transactions=self.transactions,
                share_groups=self.share_groups,
                cluster=self.cluster,
                reserve=self.reserve,
                clock=clock,
            )
            on_failure.pop_all()
        self._at_once = {what: threading.Lock() for what in ("verification", "repair")}

    @classmethod
    def open(
        cls,
        settings: BrokerSettings,
        *,
        store: ObjectStore | None,
        peers: Peers | None = None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> Broker:
        """Lock the folder, verify the store, recover every log, start the background work.

        Raises ConfigurationError if the folder is in use, if it has a bucket and no store is
        given, or if the store's prefix belongs to another cluster; CorruptDataError if a file of
        the folder cannot be trusted.
        """
        if not settings.cluster_join:
            check_has_not_joined(settings.data_dir)
        broker = cls.open_idle(settings, store=store, peers=peers, clock=clock)
        try:
            broker.start()
        except BaseException:
            broker.close()
            raise
        if broker.folder.level < newest_level():
            log.info(
                "the formats of an older version are written until `tierlog storage finalize`",
                format_level=broker.folder.level,
                newest=newest_level(),
            )
        return broker

    @classmethod
    @adding_remedies()
    def open_idle(
        cls,
        settings: BrokerSettings,
        *,
        store: ObjectStore | None,
        peers: Peers | None = None,
        clock: Callable[[], int] = wall_clock_ms,
        boot_clock: Callable[[], int] = boottime_ms,
        disk: Disk = REAL_DISK,
    ) -> Broker:
        """As `open`, without background work: segments are rolled, uploaded, deleted or collected
        only on request.
        """
        if store is None:
            check_has_no_bucket(settings.data_dir)
            if settings.cluster_join:
                raise ConfigurationError("--join needs --store, where the brokers meet")
        assert peers is not None or not settings.cluster_join, "brokers of a cluster speak"
        folder = DataFolder(settings.data_dir)
        settings = settings.resolve()
        bucket = members = broker = None
        try:
            if store is not None:
                bucket = Bucket.open(folder, store, settings, clock=clock, boot_clock=boot_clock)
            if bucket is not None and settings.cluster_join:
                members = _join(folder, bucket, settings, clock)
            broker = cls(
                folder,
                settings,
                bucket=bucket,
                members=members,
                peers=peers if members is not None else None,
                clock=clock,
                disk=disk,
            )
            broker._open_topics()
        except BaseException as error:
            if broker is not None:
                broker._abandon()
            elif bucket is not None:
                bucket.close()
            if broker is None or not broker._opener.has_opened_logs:
                folder.put_back_clean_marker()
            if isinstance(error, Exception):  # otherwise threads may still be opening logs
                folder.close()
            if isinstance(error, OSError):
                raise unusable(folder.path, error) from error
            raise
        return broker

    def start(self) -> None:
        """Start the background work of a broker that was opened idle. If the store responds, it is
        known when this returns whether another folder has taken a partition over.
        """
        if self.cluster is not None:
            self.cluster.begin()
        self.background.start()

    # --- topics -----------------------------------------------------------------------------------

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = 1,
        config: Mapping[str, ConfigValue] | None = None,
        replication_factor: int | None = None,
        replicas: Chosen = ANYWHERE,
    ) -> TopicState:
        """`replication_factor`: by default that of `replicas`, or `default.replication.factor`.

        Raises InvalidTopicName, InvalidConfig, InvalidPartitionCount, InvalidReplicationFactor,
        InvalidReplicaAssignment, TopicExists.
        """
        create = self._topics.create if self.cluster is None else self.cluster.topics.create
        topic = create(NewTopic(name, partitions, config or {}, replication_factor, replicas))
        if self.cluster is None:
            self._topic_changed(topic.record, False)
        return topic.describe()

    def check_new_topic(self, wanted: NewTopic) -> int:
        """Raise what `create_topic` would; the replication factor that the topic would have.
        Changes nothing.
        """
        return self._topics.check_new(wanted)[1]

    def list_topics(self, *, prefix: str = "", internal: bool = False) -> list[TopicSummary]:
        """Sorted by name. `internal` includes internal topics (`__…`)."""
        return self._topics.summaries(prefix=prefix, internal=internal)

    def gathering_appends(
        self, call_soon: Callable[[Callable[[], None]], object]
    ) -> AbstractContextManager[None]:
        """For an event loop, in its thread: the appends of one turn go to the disk's threads at its
        end, those of a partition as one write.
        """
        return self._appenders.gathering(call_soon)

    def topics(self) -> Iterator[Topic]:
        """A snapshot of all topics."""
        return iter(self._topics)

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic."""
        return self._topics.find(name)

    def topic_by_id(self, topic_id: str) -> Topic:
        """Raises UnknownTopic."""
        return self._topics.find_by_id(topic_id)

    def partition(self, topic: str, partition: int) -> Partition:
        return self.topic(topic).partition(partition)

    def partitions(self) -> Iterator[Partition]:
        """A snapshot of all open partitions."""
        return self._topics.partitions()

    def damaged_partitions(self) -> Iterator[DamagedPartition]:
        """Partitions whose logs could not be opened when the broker started."""
        return self._topics.damaged()

    def alter_topic(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None] | None = None,
        partitions: int | None = None,
        replicas: Chosen = ANYWHERE,
    ) -> TopicState:
        """None as a value restores the default. `replicas`: of new partitions. Raises
        InvalidConfig, InvalidPartitionCount, InvalidReplicaAssignment.
        """
        alter = self._topics.alter if self.cluster is None else self.cluster.topics.alter
        topic = alter(name, config=config or {}, partitions=partitions, replicas=replicas)
        if self.cluster is None and partitions is not None:
            self._topic_changed(topic.record, False)
        self.background.copying.wake()
        return topic.describe()

    def check_altered_topic(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None] | None = None,
        partitions: int | None = None,
        replicas: Chosen = ANYWHERE,
    ) -> None:
        """Raise what `alter_topic` would. Changes nothing."""
        self._topics.check_added_replicas(name, replicas)
        self._topics.check_altered(name, config=config or {}, partitions=partitions)

    def delete_topic(self, name: str) -> None:
        """The topic is gone when this returns; files and objects are deleted in the background."""
        if self.cluster is not None:
            self.cluster.topics.delete(name)
            return
        record = self.topic(name).record
        self._topics.delete(name)
        self._topic_changed(record, True)

    def _topic_changed(self, record: TopicRecord, is_deleted: bool) -> None:
        """It is new, has more partitions, or was deleted: here, or in the cluster."""
        if is_deleted:
            self.groups.forget_topic(record.name)
            self.share_groups.forget_topic(parse_topic_id(record.topic_id).bytes)
            self.background.deleting.wake()
        self.groups.coordinator.distribute_again(record.name)
        self.background.copying.wake()

    def _offload(self, partition: Partition, timeout_s: float) -> bool:
        return self.background.offload_partition(partition, timeout_s)

    def _coordinate_again(self, partition: Partition) -> None:
        """A partition came to this broker of the cluster, or left it."""
        self.transactions.note_moved((partition.topic, partition.number))
        self.share_groups.note_moved(parse_topic_id(partition.topic_id).bytes, partition.number)
        keepers = (self.groups, self.group_configs, self.transactions, self.share_groups)
        for kept in (one.log for one in keepers if one.log.name == partition.topic):
            try:
                kept.load()
            except (TierlogError, OSError) as error:
                log.warning("a coordinator is not loaded yet", error=str(error))
                # Once replicas have said how far it is committed; it may be known already.
                last = partition.log_end_offset - 1
                partition.wait_beyond(last, self.background.coordinate_again)

    # --- the log start ----------------------------------------------------------------------------

    def trim(self, topic: str, partition: int, before_offset: int) -> int:
        """Advance the log start (Kafka's DeleteRecords), durably, and return it. It never moves
        back.
        """
        target = self.partition(topic, partition)
        with target.lasting:  # the bucket follows later, but not after a hand-over
            target.check_leadership()
            now = target.offsets()
            if before_offset > now.high_watermark:
                raise now.past_end(
                    f"offset {before_offset} is above the high watermark {now.high_watermark}"
                )
            if before_offset <= now.log_start_offset:
                return now.log_start_offset
            with raising_disk_full(self.folder.path), target.reporting_defunct():
                start = self.background.janitor.trim_partition(target, before_offset)
        target.wait_for_trim(timeout_s=TRIM_S)
        return start

    # --- groups -----------------------------------------------------------------------------------

    def delete_group(self, name: str, *, check: Callable[[set[str]], None]) -> None:
        """As `Groups.delete`; also what a share group did."""
        self.groups.log.load_home(name)
        if self.groups.coordinator.describe_share(name) is not None:
            self.share_groups.prepare()
            self.share_groups.delete_states(name)
        self.groups.delete(name, check=check)

    def alter_group(self, name: str, config: Mapping[str, ConfigValue | None]) -> None:
        """None as a value restores the default. Durable when this returns. Raises InvalidConfig."""
        self.group_configs.alter(name, config)

    # --- the bucket -------------------------------------------------------------------------------

    def offload(self, topic: str, *, wait_ms: int | None = None) -> Offloaded:
        """Roll the active segments, upload all rolled segments, then apply retention."""
        return self.background.offload_topic(self.topic(topic), wait_ms=wait_ms)

    def merge_segments(self, topic: str, *, wait_ms: int) -> Merged:
        """Merge neighbouring small segments in the bucket; begins none after `wait_ms`."""
        return self.background.merge_topic(self.topic(topic), wait_ms=wait_ms)

    def plan_merges(self, topic: str, partition: int) -> MergePlan:
        """Merges of a partition, for whoever makes the merged segments elsewhere."""
        return self.background.plan_merges(self.partition(topic, partition))

    def commit_merged(self, topic: str, partition: int, merged: SegmentEntry) -> None:
        """Commit a segment that was made elsewhere, by a plan, in place of those it was made of."""
        self.background.commit_merged(self.partition(topic, partition), merged)

    def collect_garbage(self, topic: str, *, apply: bool = False) -> dict[int, GarbagePlan]:
        """By partition, the objects that no manifest version needs; `apply` deletes them."""
        return self.background.janitor.collect_topic(self.topic(topic), apply=apply)

    @contextmanager
    def one_at_a_time(self, what: Literal["verification", "repair"]) -> Iterator[None]:
        """For the room `repair`. A verification may read every byte of both tiers; repairs share a
        scratch folder, and would open a damaged log twice. Raises Throttled.
        """
        if not self._at_once[what].acquire(blocking=False):
            raise Throttled(f"a {what} is in progress; only one runs at a time")
        try:
            yield
        finally:
            self._at_once[what].release()

    def reopen_damaged(
        self, topic: Topic, damaged: DamagedPartition, *, end_offset: int, cuts: bool
    ) -> bool:
        """Serve a log that was repaired on disk, without a restart; False if it is still damaged.
        `end_offset`: where it may end; with `cuts`, what was above it is lost.
        """
        place = (topic.record.topic_id, damaged.number)
        if cuts:
            end = {(topic.record.name, damaged.number): end_offset}
            self._topics.compaction_offsets.truncate(end)
            self.groups.truncations.begin(place)
        opened = self._opener.reopen(topic.record, damaged, end_offset=end_offset, cuts=cuts)
        if isinstance(opened, DamagedPartition):
            topic.add_partitions({damaged.number: opened})
            return False
        end_offset = opened.log_end_offset  # before anything is appended
        topic.add_partitions({damaged.number: opened})
        if cuts:  # first: the next steps may fail
            self.groups.truncations.end(place, end_offset)
            self.groups.follow_truncations()
        # Otherwise the start after a crash finds the log below its old recovery point.
        self.checkpoints.save()
        self._opener.forget_take_overs()
        return True

    # --- reports ----------------------------------------------------------------------------------

    def readiness(self) -> reports.Readiness:
        return reports.readiness(
            self.partitions(),
            self.damaged_partitions(),
            self.bucket,
            self._diverged_folders,
            blocked=self.background.copier.blocked(),
            holes=self.background.holes.report(),
            disk_full_error=self.reserve.refusal,
            membership_lost=self.cluster.members.membership_lost if self.cluster else None,
        )

    def storage_report(self) -> reports.StorageReport:
        topics = sorted(self._topics, key=lambda topic: topic.record.name)
        return reports.storage_report(
            topics,
            self.bucket,
            now_ms=self.clock(),
            prices=self.settings.prices,
            diverged=self._diverged_folders,
        )

    @property
    def commit_times(self) -> CommitTimes:
        """The durations of writes and flushes, over all partitions."""
        return self._opener.commit_times

    # --- shutdown ---------------------------------------------------------------------------------

    def close(self) -> None:
        """Refuse new work, flush and close every log, and record the clean stop durably.

        Waits for work on the store for the fifth of `shutdown.timeout.ms` that the server leaves.
        Once the logs are closed, a store request in progress may take its time.
        """
        if not self._topics.close():
            return
        self.groups.coordinator.close()
        self.transactions.close()
        self.share_groups.close()
        deadline_s = time.monotonic() + self.settings.shutdown_timeout_ms / 5000
        self.background.stop(deadline_s)
        if self.cluster is not None:
            self.cluster.replicas.stop(timeout_s=max(LEAVE_S, deadline_s - time.monotonic()))
        self._opener.close_timer()
        for partition in self.partitions():  # first: accepted appends still need the executor
            partition.stop_appends(self.settings.shutdown_timeout_ms / 1000)
        self._close_logs()
        self._appenders.shutdown()
        if self.cluster is not None:
            self.cluster.close(timeout_s=max(LEAVE_S, deadline_s - time.monotonic()))
        self._close_bucket()
        self.folder.close()

    def _abandon(self) -> None:
        """Release what a failed start had opened. No clean stop is recorded: the next start checks
        everything.
        """
        self._topics.close()
        self.transactions.close()
        self.share_groups.close()
        self._opener.close_timer()
        self._appenders.shutdown()
        for partition in self.partitions():
            partition.upkeep.abandon_log()
        if self.cluster is not None:
            self.cluster.replicas.abandon()
        self._close_bucket()

    def _close_bucket(self) -> None:
        if self.bucket is not None:
            self.bucket.close()
        self.background.copier.close()
        self.background.janitor.close()
        if self.background.merger is not None:
            self.background.merger.close()

    def _close_logs(self) -> None:
        """Close all logs, and record whether the next start may skip its checks. The threads that
        append do it: there is nothing left to append, and no thread may be to be had.
        """
        closed = list(self._appenders.map(_close_log, self.partitions()))
        if self.cluster is not None:
            closed.append(self.cluster.replicas.close_logs())
        clean = all(closed) and not any(self.damaged_partitions())
        try:
            self.checkpoints.save()
            if clean:
                self.folder.mark_clean_shutdown()
        except OSError as error:  # the existing files stay valid; the next start checks more
            log.error("clean shutdown not recorded", error=str(error))

    def _open_topics(self) -> None:
        self._topics.open_all(take_over=self.settings.take_over, cluster=self.cluster)
        self._diverged_folders = self.folder.diverged()  # only a start creates them
        live_names = {record.name for record in self.registry.live()}
        self._topics.compaction_offsets.reconcile_at_start(self.partitions(), live_names)
        self.groups.truncations.reconcile_at_start(self.partitions(), self.registry.ids())
        try:
            self.checkpoints.save()
        except OSError as error:  # those of before stay true
            if self._opener.has_taken_over or not is_disk_full(error):
                raise
        self._opener.forget_take_overs()


def _join(
    folder: DataFolder, bucket: Bucket, settings: BrokerSettings, clock: Callable[[], int]
) -> Members:
    """Register in the cluster. A broker alone loads nothing of it."""
    from tierlog.broker.cluster.cluster_topics import bring_before_joining
    from tierlog.broker.membership.members import Members
    from tierlog.broker.membership.own_node import Timing

    members = Members(folder, bucket.store_status, settings, Timing(clock))
    members.join(before_first=partial(bring_before_joining, folder, bucket.store))
    return members


def _close_log(partition: Partition) -> bool:
    """Whether the log was closed cleanly; a failure is logged."""
    try:
        return partition.upkeep.close_log()
    except TierlogError as error:
        log.error("log not closed cleanly", partition=str(partition), error=str(error))
        return False
