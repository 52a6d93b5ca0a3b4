"""The broker: a data folder, a bucket, and the topics in them. What front doors call.

* Calls take and give batches, slices and offsets, never HTTP things. All are thread-safe.
* A topic exists once `topics.json` says so, durably; the bucket is told in the background.
* The store being down stops offload and cold reads, nothing else: `open` waits for it at most
  `store.start.timeout.ms`.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import structlog

from broker import reports
from broker.background import BackgroundTask
from broker.bring_back import BringBack
from broker.bucket import Bucket
from broker.checkpoints import Checkpoints
from broker.compactor import Compactor
from broker.copier import Copier, OffloadProgress
from broker.cuts import Cuts
from broker.damaged import Damaged
from broker.data_folder import DataFolder, new_id, refused
from broker.disk_reserve import CHECK_S, DiskReserve, told_when_full
from broker.fences import Fences
from broker.groups import Groups
from broker.holes import Holes
from broker.janitor import Janitor
from broker.live_topics import LiveTopics
from broker.log_opener import LogOpener
from broker.partition import Partition
from broker.remedies import telling_what_helps
from broker.repair_step import RepairStep
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRecord, TopicRegistry
from broker.topics import Topic, TopicDescription, TopicSummary
from broker.upkeep import Upkeep
from cold_tier.object_store import ObjectStore
from hot_tier.commit_times import CommitTimes
from hot_tier.disk import Disk
from hot_tier.durable_file import REAL_DISK
from hot_tier.log_config import ConfigValue
from manifest.garbage import GarbagePlan
from record_format.errors import (
    FencedError,
    OffsetPastEnd,
    TierlogError,
    TopicExists,
    UnknownTopic,
)
from record_format.findings import VerifyReport

log = structlog.get_logger(__name__)

COPY_INTERVAL_S = 1.0
GROUPS_INTERVAL_S = 10.0


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


class Broker:
    """Opened by `Broker.open`; serves until `close`."""

    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        *,
        bucket: Bucket | None,
        clock: Callable[[], int],
        disk: Disk = REAL_DISK,
    ) -> None:
        self.folder, self.settings, self.bucket, self.clock = folder, settings, bucket, clock
        self.registry = TopicRegistry(folder.path / "tierlog" / "topics.json")
        self._set_apart: list[Path] = []
        self._appenders = ThreadPoolExecutor(settings.append_threads, thread_name_prefix="append")
        self._checkpoints = Checkpoints(folder, self.partitions, self.damaged_partitions)
        holes = self.holes = Holes(self._cleaned_before)
        self.copier = Copier(self.partitions, concurrency=settings.offload_concurrency, holes=holes)
        self.fences = Fences(self.partitions)
        self.janitor = Janitor(
            self.partitions,
            settings,
            clock=clock,
            holes=holes,
            save_log_starts=self._checkpoints.save_log_starts,
        )
        self._cuts = Cuts(folder)
        self.groups = Groups(
            find_topic=self.topic,
            make_topic=self._topic_of_ours,
            clock=clock,
            commits_max=settings.group_commits_max,
            cuts=self._cuts,
        )
        self.reserve = DiskReserve(
            folder.path,
            reserve_bytes=settings.disk_reserve_bytes or 0,
            reliefs=(self._shrink_cache, self.janitor.relieve_disk),
        )
        self.compactor = Compactor(
            self.partitions,
            folder,
            settings,
            clock=clock,
            save_recovery_points=self.save_checkpoints,
            bring_back=self._bringing_back(bucket) if bucket else None,
        )
        self._opener = LogOpener(
            folder,
            settings,
            bucket,
            self._appenders,
            clock=clock,
            check_room=self.reserve.refuse_when_breached,
            disk=disk,
        )
        self._topics = LiveTopics(
            folder,
            self.registry,
            self._opener,
            new_id=new_id,
            clock=clock,
            forget=self._forget_rows,
        )
        self._upkeep = Upkeep(
            folder,
            self.registry,
            bucket,
            opener=self._opener,
            copier=self.copier,
            holes=holes,
            policy=self.janitor.policy,
            clock=clock,
            before_cut=self._note_cut,
            on_cut=self._follow_cut,
        )
        self._copying = BackgroundTask("copier", self._copy_round, interval_s=COPY_INTERVAL_S)
        self._group_keeping = BackgroundTask(
            "groups", self.groups.run_round, interval_s=GROUPS_INTERVAL_S
        )
        self._tasks = self._background_tasks()

    def _bringing_back(self, bucket: Bucket) -> BringBack:
        return BringBack(
            bucket,
            scratch=self.folder.scratch("bring-back"),
            clock=self.clock,
            check_room=self.reserve.refuse_without_room,
        )

    def _background_tasks(self) -> list[BackgroundTask]:
        """In the order they start; they stop in the reverse."""
        settings = self.settings
        timed = (
            ("janitor", self.janitor.run_round, settings.retention_check_interval_ms),
            ("compactor", self.compactor.run_round, settings.log_cleaner_backoff_ms),
            ("fences", self.fences.look, settings.fence_check_ms),
            ("checkpoints", self.save_checkpoints, settings.recovery_checkpoint_ms),
        )
        return [
            BackgroundTask("disk-reserve", self.reserve.check, interval_s=CHECK_S),
            self._copying,
            self._group_keeping,
            *(BackgroundTask(name, run, interval_s=ms / 1000) for name, run, ms in timed),
        ]

    @classmethod
    def open(
        cls,
        settings: BrokerSettings,
        *,
        store: ObjectStore | None,
        clock: Callable[[], int] = wall_clock_ms,
    ) -> Broker:
        """Lock the folder, check the store, recover every log, start the background work.

        Raises ConfigurationError where the folder is in use, or where the store's prefix belongs to
        another cluster; CorruptDataError where a file of the folder cannot be trusted.
        """
        broker = cls.open_idle(settings, store=store, clock=clock)
        broker.start()
        return broker

    @classmethod
    @telling_what_helps()
    def open_idle(
        cls,
        settings: BrokerSettings,
        *,
        store: ObjectStore | None,
        clock: Callable[[], int] = wall_clock_ms,
        disk: Disk = REAL_DISK,
    ) -> Broker:
        """As `open`, without background work: nothing is rolled, uploaded, let go or collected but
        what is asked for.
        """
        folder = DataFolder(settings.data_dir)
        settings = settings.resolve()
        try:
            bucket = Bucket.open(folder, store, settings, clock=clock) if store else None
            broker = cls(folder, settings, bucket=bucket, clock=clock, disk=disk)
            broker._open_topics()
        except BaseException as error:
            folder.close()
            if isinstance(error, OSError):
                raise refused(folder.path, error) from error
            raise
        return broker

    def start(self) -> None:
        """The background work of a broker that was opened idle. Who lost a partition to another
        folder knows it when this returns, where the store answers.
        """
        if self.bucket is not None and self.bucket.unavailable is None:
            self.fences.look_first(timeout_s=self.settings.store_start_timeout_ms / 1000)
        for task in self._tasks:
            task.start()
        self._group_keeping.wake()

    # --- topics -----------------------------------------------------------------------------------

    def create_topic(
        self, name: str, *, partitions: int = 1, config: Mapping[str, ConfigValue] | None = None
    ) -> TopicDescription:
        """Raises InvalidTopicName, InvalidConfig, InvalidPartitionCount, TopicExists."""
        topic = self._topics.create(name, partitions=partitions, config=config or {})
        self._copying.wake()
        return topic

    def list_topics(self, *, prefix: str = "", internal: bool = False) -> list[TopicSummary]:
        """By name. Internal topics (`__…`) only where they are asked for."""
        return self._topics.summaries(prefix=prefix, internal=internal)

    def topic(self, name: str) -> Topic:
        """Raises UnknownTopic."""
        return self._topics.find(name)

    def partition(self, topic: str, partition: int) -> Partition:
        return self.topic(topic).partition(partition)

    def partitions(self) -> Iterator[Partition]:
        """All of them, as they are now."""
        for topic in self._topics:
            yield from topic.partitions.values()

    def damaged_partitions(self) -> Iterator[Damaged]:
        """Those whose logs could not be opened when the broker started."""
        for topic in self._topics:
            yield from list(topic.damaged.values())

    def alter_topic(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None] | None = None,
        partitions: int | None = None,
    ) -> TopicDescription:
        """None as a value puts the default back. Raises InvalidConfig, InvalidPartitionCount."""
        topic = self._topics.alter(name, config=config or {}, partitions=partitions)
        self._copying.wake()
        return topic

    def delete_topic(self, name: str) -> None:
        """The topic is gone when this returns; its files and objects go in the background."""
        self._topics.delete(name)
        self.groups.forget_topic(name)
        self._copying.wake()

    # --- the log start ----------------------------------------------------------------------------

    def trim(self, topic: str, partition: int, before_offset: int) -> int:
        """Move the log start (Kafka's DeleteRecords), durably; the new one. It never moves back."""
        target = self.partition(topic, partition)
        target.check_leadership()
        now = target.offsets()
        if before_offset > now.high_watermark:
            raise OffsetPastEnd(
                f"offset {before_offset} is above the high watermark {now.high_watermark}",
                log_start_offset=now.log_start_offset,
                high_watermark=now.high_watermark,
            )
        with told_when_full(self.folder.path):
            if before_offset > now.log_start_offset:
                return self.janitor.trim(target, before_offset)
            self._checkpoints.save_log_starts()  # who moved it may have found no room for that
            return now.log_start_offset

    # --- the bucket -------------------------------------------------------------------------------

    def offload(self, topic: str, *, wait_ms: int | None = None) -> OffloadProgress:
        """Roll the active segments and upload all that is rolled; then retention has its turn."""
        partitions = list(self.topic(topic).partitions.values())
        before = self.copier.progress(partitions)
        for partition in partitions:
            partition.check_leadership()
            partition.log.roll(reason="offload")
        self.copier.hurry(partitions)
        self._copying.wake()
        if wait_ms is not None and self.copier.wait_until_done(
            partitions, timeout_s=wait_ms / 1000
        ):
            for partition in partitions:
                self.janitor.look_after(partition)
        after = self.copier.progress(partitions)
        return OffloadProgress(
            after.uploaded_segments - before.uploaded_segments,
            after.uploaded_bytes - before.uploaded_bytes,
            after.remaining_segments,
        )

    def verify(self, topic: str, *, deep: bool = False) -> VerifyReport:
        """Check both tiers of a topic against the manifest; what is wrong is in the answer.

        Raises UnknownTopic, StoreUnavailable, Throttled (another verification is under way).
        """
        return self._upkeep.verify(self.topic(topic), deep=deep)

    def repair(
        self, topic: str, *, apply: bool = False, deep: bool = False, accept_loss: bool = False
    ) -> list[RepairStep]:
        """What would mend the topic's logs and bucket; with `apply` it is done, step by step.

        `accept_loss`: also what gives up records that are nowhere else. Raises UnknownTopic,
        FencedError, StoreUnavailable, CorruptDataError.
        """
        found = self.topic(topic)
        return self._upkeep.repair(found, apply=apply, deep=deep, accept_loss=accept_loss)

    def collect_garbage(self, topic: str, *, apply: bool = False) -> dict[int, GarbagePlan]:
        """By partition, what no manifest version needs any more; with `apply` it is deleted."""
        return self._upkeep.collect_garbage(self.topic(topic), apply=apply)

    # --- what it says of itself -------------------------------------------------------------------

    def readiness(self) -> reports.Readiness:
        return reports.readiness(
            self.partitions(),
            self.damaged_partitions(),
            self.bucket,
            self._diverged(),
            held_up=self.copier.held_up(),
            holes=self.holes.told(),
            disk_refusal=self.reserve.refusal,
        )

    def storage_report(self) -> reports.StorageReport:
        topics = sorted(self._topics, key=lambda topic: topic.record.name)
        return reports.storage_report(
            topics,
            self.bucket,
            now_ms=self.clock(),
            prices=self.settings.prices,
            diverged=self._diverged(),
        )

    @property
    def commit_times(self) -> CommitTimes:
        """How long writes and flushes take, of all partitions together."""
        return self._opener.commit_times

    # --- running it -------------------------------------------------------------------------------

    def save_checkpoints(self) -> None:
        """Recovery points and high watermarks: what a crash need not check again."""
        self._checkpoints.save()

    def close(self) -> None:
        """Refuse new work, flush and close every log, and say so durably for the next start.

        All in `shutdown.timeout.ms`, but for the disk; then the store may take its time.
        """
        if not self._topics.close():
            return
        self._stop_background_work(time.monotonic() + self.settings.shutdown_timeout_ms / 1000)
        for partition in self.partitions():  # first: what was taken still hands work over
            partition.stop_appends(self.settings.shutdown_timeout_ms / 1000)
        self._appenders.shutdown(wait=True)
        if self._close_logs():
            self.folder.note_clean_stop()
        self.copier.close()
        if self.bucket is not None:
            self.bucket.close()
        self.registry.close()
        self.folder.close()

    def _stop_background_work(self, deadline_s: float) -> None:
        """One that waits for the store is left behind: a closed log, registry or folder is changed
        by nobody.
        """
        self.copier.stop()
        self.janitor.stop()
        if self.bucket is not None:
            self.bucket.break_off_uploads()
        self.compactor.stop()
        for task in self._tasks:
            task.stop(0)
        for task in reversed(self._tasks):
            task.stop(max(0.0, deadline_s - time.monotonic()))
        self._opener.close_timer()

    def _close_logs(self) -> bool:
        """Whether the next start may trust what it finds."""
        clean = not any(self.damaged_partitions())
        for partition in self.partitions():
            try:
                clean = partition.log.close() and clean
            except TierlogError as error:
                clean = False
                log.error("log not closed cleanly", partition=str(partition), error=str(error))
        try:
            self.save_checkpoints()
        except OSError as error:  # those that are there hold, and cost a longer check
            clean = False
            log.error("checkpoints not saved", error=str(error))
        return clean

    def _forget_rows(self, name: str) -> None:
        """Before a topic is made: that it finds none of an older one of its name after a crash."""
        self._checkpoints.forget(name)
        self.compactor.forget_topic(name)

    def _note_cut(self, topic: TopicRecord, partition: int, end_offset: int) -> None:
        self.compactor.follow_cut(topic.name, partition, end_offset)
        self._cuts.begin((topic.topic_id, partition))

    def _follow_cut(self, topic: TopicRecord, partition: int, end_offset: int) -> None:
        self._cuts.end((topic.topic_id, partition), end_offset)
        self.groups.follow_cuts()

    def _cleaned_before(self, partition: Partition) -> int:
        return self.compactor.cleaned_before(partition)

    def _diverged(self) -> list[reports.DivergedLog]:
        return reports.diverged_logs(self._set_apart)

    def _shrink_cache(self, missing_bytes: int) -> bool:
        return self.bucket is not None and self.bucket.cache.shrink(missing_bytes) > 0

    def _copy_round(self) -> None:
        with contextlib.suppress(OSError):  # what fails is told by who tries again, below
            self._topics.remove_files()  # first: what asks the store may wait, or fail
        if self.bucket is not None and self.bucket.settle(self.registry):
            self.copier.run_round()
        self._topics.finish_deletions(
            is_busy=self.copier.is_busy, delete_objects=self._delete_objects
        )

    def _delete_objects(self, record: TopicRecord) -> None:
        if self.bucket is None:
            return
        try:
            self.bucket.delete_topic(record)
        except FencedError as error:
            log.error("objects stay: not ours to delete", topic=record.name, reason=str(error))

    def _open_topics(self) -> None:
        self._topics.open_all(take_over=self.settings.take_over)
        self._set_apart = self.folder.diverged()  # only a start sets records apart
        self.compactor.follow_cuts()
        self._cuts.look(self.partitions(), self.registry.ids())
        self.save_checkpoints()
        self._opener.forget_take_overs()

    def _topic_of_ours(self, name: str, config: Mapping[str, ConfigValue]) -> Topic:
        """An internal topic, made where there is none yet."""
        try:
            return self.topic(name)
        except UnknownTopic:
            with contextlib.suppress(TopicExists):  # two first calls at a time
                self.create_topic(name, config=config)
        return self.topic(name)
