"""The broker: a data folder, a bucket, and the topics in them. What front doors call.

* Calls take and give batches, slices and offsets, never HTTP things. All are thread-safe.
* A topic exists once `topics.json` says so, durably; the bucket is told in the background.
* The store being down stops offload and cold reads, nothing else: `open` waits for it at most
  `store.start.timeout.ms`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import structlog

from broker import reports
from broker.background import BackgroundTask
from broker.bucket import Bucket
from broker.compactor import Compactor
from broker.copier import Copier, OffloadProgress
from broker.damaged import Damaged, with_log_starts, with_recovery_points
from broker.data_folder import (
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
    new_id,
    refused,
)
from broker.disk_reserve import CHECK_S, DiskReserve
from broker.groups import Groups
from broker.janitor import Janitor
from broker.local_repair import LocalRepair
from broker.log_opener import LogOpener
from broker.partition import Partition
from broker.repair import Repair, RepairStep
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRecord, TopicRegistry
from broker.topics import Topic, TopicDescription, TopicSummary, check_topic_name
from broker.verify import verify_topic
from cold_tier.object_store import ObjectStore
from hot_tier.commit_times import CommitTimes
from hot_tier.log_config import ConfigValue, LogConfig
from manifest.garbage import GarbagePlan
from record_format.errors import (
    ConfigurationError,
    FieldProblem,
    InvalidPartitionCount,
    InvalidRequest,
    OffsetPastEnd,
    ShuttingDown,
    Throttled,
    TierlogError,
    TopicExists,
    UnknownTopic,
)
from record_format.findings import VerifyReport

log = structlog.get_logger(__name__)

COPY_INTERVAL_S = 1.0
GROUPS_INTERVAL_S = 10.0
MAX_PARTITIONS = 10_000  # of one topic; each is a folder and open files


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
    ) -> None:
        self.folder, self.settings, self.bucket, self.clock = folder, settings, bucket, clock
        self.registry = TopicRegistry(folder.path / "tierlog" / "topics.json")
        self._topics: dict[str, Topic] = {}
        self._topics_lock = threading.RLock()
        self._closing = False
        self._verifying = threading.Lock()
        self._set_apart: list[Path] = []
        self._appenders = ThreadPoolExecutor(settings.append_threads, thread_name_prefix="append")
        self.copier = Copier(self.partitions, concurrency=settings.offload_concurrency)
        self.janitor = Janitor(
            self.partitions, settings, clock=clock, save_log_starts=self._save_log_starts
        )
        self.compactor = Compactor(
            self.partitions,
            folder,
            settings,
            clock=clock,
            save_recovery_points=self.save_checkpoints,
        )
        self.groups = Groups(
            find_topic=self.topic,
            make_topic=self._topic_of_ours,
            clock=clock,
            commits_max=settings.group_commits_max,
        )
        self._group_keeping = BackgroundTask(
            "groups", self.groups.run_round, interval_s=GROUPS_INTERVAL_S
        )
        self._copying = BackgroundTask("copier", self._copy_round, interval_s=COPY_INTERVAL_S)
        self._reserve = DiskReserve(
            folder.path,
            reserve_bytes=settings.disk_reserve_bytes or 0,
            reliefs=(self._shrink_cache, self.janitor.relieve_disk),
        )
        self._opener = LogOpener(
            folder,
            settings,
            bucket,
            self._appenders,
            clock=clock,
            check_room=self._reserve.refuse_when_breached,
        )
        self._tasks = [
            BackgroundTask("disk-reserve", self._reserve.check, interval_s=CHECK_S),
            self._copying,
            self._group_keeping,
            BackgroundTask(
                "janitor",
                self.janitor.run_round,
                interval_s=settings.retention_check_interval_ms / 1000,
            ),
            BackgroundTask(
                "compactor",
                self.compactor.run_round,
                interval_s=settings.log_cleaner_backoff_ms / 1000,
            ),
            BackgroundTask(
                "fences", self.janitor.check_fences, interval_s=settings.fence_check_ms / 1000
            ),
            BackgroundTask(
                "checkpoints",
                self.save_checkpoints,
                interval_s=settings.recovery_checkpoint_ms / 1000,
            ),
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
        folder = DataFolder(settings.data_dir)
        settings = settings.resolve()
        try:
            bucket = Bucket.open(folder, store, settings, clock=clock) if store else None
            broker = cls(folder, settings, bucket=bucket, clock=clock)
            broker._open_topics()
        except BaseException as error:
            folder.close(clean=False)
            if isinstance(error, OSError):
                raise refused(folder.path, error) from error
            raise
        for task in broker._tasks:
            task.start()
        broker._group_keeping.wake()
        return broker

    # --- topics -----------------------------------------------------------------------------------

    def create_topic(
        self, name: str, *, partitions: int = 1, config: Mapping[str, ConfigValue] | None = None
    ) -> TopicDescription:
        """Raises InvalidTopicName, InvalidConfig, InvalidPartitionCount, TopicExists."""
        check_topic_name(name)
        parsed = LogConfig.parse(config or {})
        _check_partition_count(partitions)
        with self._topics_lock:
            self._check_open()
            if name in self._topics:
                raise TopicExists(f"topic {name!r} exists")
            record = TopicRecord(
                name=name,
                topic_id=new_id(),
                partitions=partitions,
                config=dict(parsed.overrides),
                created_ms=self.clock(),
            )
            self.registry.put(record)
            topic = Topic(record, self._open_partitions(record, record.partition_numbers()))
            self._topics[name] = topic
        self._copying.wake()
        return topic.describe()

    def list_topics(self, *, prefix: str = "", internal: bool = False) -> list[TopicSummary]:
        """By name. Internal topics (`__…`) only where they are asked for."""
        topics = list(self._topics.values())
        return sorted(
            topic.summary()
            for topic in topics
            if topic.record.name.startswith(prefix) and (internal or not topic.record.internal)
        )

    def topic(self, name: str) -> Topic:
        found = self._topics.get(name)
        if found is None:
            raise UnknownTopic(name)
        return found

    def partition(self, topic: str, partition: int) -> Partition:
        return self.topic(topic).partition(partition)

    def partitions(self) -> Iterator[Partition]:
        """All of them, as they are now."""
        for topic in list(self._topics.values()):
            yield from topic.partitions.values()

    def damaged_partitions(self) -> Iterator[Damaged]:
        """Those whose logs could not be opened when the broker started."""
        for topic in list(self._topics.values()):
            yield from list(topic.damaged.values())

    def alter_topic(
        self,
        name: str,
        *,
        config: Mapping[str, ConfigValue | None] | None = None,
        partitions: int | None = None,
    ) -> TopicDescription:
        """None as a value puts the default back. Raises InvalidConfig, InvalidPartitionCount."""
        with self._topics_lock:
            self._check_open()
            topic = self.topic(name)
            changed = topic.config.altered(config or {})
            self._check_alteration(topic, changed)
            record = msgspec.structs.replace(
                topic.record, config=dict(changed.overrides), dirty=True
            )
            if partitions is not None:
                record = _grown(record, partitions)
            self.registry.put(record)
            known = topic.numbers
            new = [number for number in record.partition_numbers() if number not in known]
            topic.add(self._open_partitions(record, new))
            topic.record, topic.config = record, changed
            for partition in topic.partitions.values():
                partition.log.update_config(changed)
        self._copying.wake()
        return topic.describe()

    def delete_topic(self, name: str) -> None:
        """The topic is gone when this returns; its files and objects go in the background."""
        with self._topics_lock:
            self._check_open()
            topic = self.topic(name)
            self.registry.put(msgspec.structs.replace(topic.record, deleted=True, dirty=True))
            del self._topics[name]
            for partition in topic.partitions.values():
                partition.retire()
                partition.log.close()
            self._opener.set_aside(topic.record)
        self.save_checkpoints()  # a topic of the same name must not find them after a crash
        self.groups.forget_topic(name)
        self._copying.wake()

    # --- the log start ----------------------------------------------------------------------------

    def trim(self, topic: str, partition: int, before_offset: int) -> int:
        """Move the log start (Kafka's DeleteRecords); the new one. Below the present one: no
        change.
        """
        target = self.partition(topic, partition)
        target.check_leadership()
        now = target.offsets()
        if before_offset > now.high_watermark:
            raise OffsetPastEnd(
                f"offset {before_offset} is above the high watermark {now.high_watermark}",
                log_start_offset=now.log_start_offset,
                high_watermark=now.high_watermark,
            )
        if before_offset <= now.log_start_offset:
            return now.log_start_offset
        return self.janitor.trim(target, before_offset)

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
        found = self.topic(topic)
        if not self._verifying.acquire(blocking=False):
            raise Throttled("a verification is under way; there is one at a time")
        try:
            store = self.bucket.checked_store() if self.bucket is not None else None
            record = self.registry.by_name(topic)
            settled = record is not None and not record.dirty
            return verify_topic(found, store, settled=settled, deep=deep, clock=self.clock)
        finally:
            self._verifying.release()

    def repair(
        self, topic: str, *, apply: bool = False, deep: bool = False, accept_loss: bool = False
    ) -> list[RepairStep]:
        """What would mend the topic's logs and bucket; with `apply` it is done, step by step.

        `accept_loss`: also what gives up records that are nowhere else. Raises UnknownTopic,
        FencedError, StoreUnavailable, CorruptDataError.
        """
        steps = [
            self._mend_log(topic, damaged, apply=apply, accept_loss=accept_loss)
            for _, damaged in sorted(self.topic(topic).damaged.items())
        ]
        if steps and self.bucket is None:
            return steps
        for repair in self._repairs(topic):
            planned = repair.plan(deep=deep)
            steps += [repair.apply(one) for one in planned] if apply else [p.step for p in planned]
        return steps

    def collect_garbage(self, topic: str, *, apply: bool = False) -> dict[int, GarbagePlan]:
        """By partition, what no manifest version needs any more; with `apply` it is deleted."""
        plans: dict[int, GarbagePlan] = {}
        for number, partition in sorted(self.topic(topic).partitions.items()):
            if partition.cold is None:
                continue
            self.copier.claim(partition)
            plans[number] = partition.cold.collection_plan(self.janitor.policy)
            if apply:
                partition.cold.collect(self.janitor.policy)
        return plans

    def _mend_log(
        self, topic: str, damaged: Damaged, *, apply: bool, accept_loss: bool
    ) -> RepairStep:
        found = self.topic(topic)
        mending = LocalRepair(self.folder, damaged, cold_end_offset=self._cold_end(found, damaged))
        if not apply or not mending.may_be_done(accept_loss=accept_loss):
            return mending.step
        opened = self._opener.reopen(found.record, damaged, end_offset=mending.prepare())
        found.add({damaged.number: opened})
        done = not isinstance(opened, Damaged)
        return msgspec.structs.replace(mending.step, done=done)

    def _cold_end(self, topic: Topic, damaged: Damaged) -> int:
        if self.bucket is None or not topic.config.remote_storage_enable:
            return 0
        return self.bucket.cold_log(topic.record, damaged.number).end_offset

    def _repairs(self, topic: str) -> Iterator[Repair]:
        found = self.topic(topic)
        if self.bucket is None:
            raise ConfigurationError("this broker has no object store: there is nothing to repair")
        store = self.bucket.checked_store()
        for _, partition in sorted(found.partitions.items()):
            if partition.cold is not None:
                self.copier.claim(partition)
                yield Repair(
                    partition,
                    store,
                    scratch=self.folder.path / "tierlog" / "repair",
                    policy=self.janitor.policy,
                    clock=self.clock,
                )

    # --- what it says of itself -------------------------------------------------------------------

    def readiness(self) -> reports.Readiness:
        return reports.readiness(
            self.partitions(), self.damaged_partitions(), self.bucket, self._diverged()
        )

    def storage_report(self) -> reports.StorageReport:
        topics = sorted(self._topics.values(), key=lambda topic: topic.record.name)
        return reports.storage_report(
            topics, self.bucket, now_ms=self.clock(), diverged=self._diverged()
        )

    @property
    def commit_times(self) -> CommitTimes:
        """How long writes and flushes take, of all partitions together."""
        return self._opener.commit_times

    # --- running it -------------------------------------------------------------------------------

    def save_checkpoints(self) -> None:
        """Recovery points and high watermarks: what a crash need not check again."""
        partitions = list(self.partitions())
        points = {(p.topic, p.number): p.log.recovery_point for p in partitions}
        self.folder.write_checkpoint(
            RECOVERY_POINTS, with_recovery_points(points, self.damaged_partitions())
        )
        self.folder.write_checkpoint(
            HIGH_WATERMARKS, {(p.topic, p.number): p.log.high_watermark for p in partitions}
        )
        self._save_log_starts()

    def close(self) -> None:
        """Refuse new work, flush and close every log, and say so durably for the next start."""
        with self._topics_lock:
            if self._closing:
                return
            self._closing = True
        self.compactor.stop()
        for task in reversed(self._tasks):
            task.stop(self.settings.shutdown_timeout_ms / 1000)
        self.copier.close()
        self._opener.close_timer()
        self._appenders.shutdown(wait=True)
        clean = not any(self.damaged_partitions())
        for partition in self.partitions():
            try:
                clean = partition.log.close() and clean
            except TierlogError as error:
                clean = False
                log.error("log not closed cleanly", partition=str(partition), error=str(error))
        self.save_checkpoints()
        if self.bucket is not None:
            self.bucket.close()
        self.folder.close(clean=clean)

    def _diverged(self) -> list[reports.DivergedLog]:
        return reports.diverged_logs(self._set_apart)

    def _shrink_cache(self, missing_bytes: int) -> bool:
        return self.bucket is not None and self.bucket.cache.shrink(missing_bytes) > 0

    def _copy_round(self) -> None:
        if self.bucket is not None and self.bucket.settle(self.registry):
            self.copier.run_round()
        self._finish_deletions()

    def _open_topics(self) -> None:
        self._opener.adopt_found_folders(self.registry)
        for record in self.registry.deleted():
            self._opener.set_aside(record)
        live = self.registry.live()
        wanted = [(record, number) for record in live for number in record.partition_numbers()]
        opened = iter(self._opener.open_partitions(wanted, at_start=True))
        for record in live:
            mine = {number: next(opened) for number in record.partition_numbers()}
            self._topics[record.name] = Topic(record, mine)
        self._set_apart = self.folder.diverged()  # only a start sets records apart
        self._opener.forget_checkpoints()
        self.save_checkpoints()

    def _topic_of_ours(self, name: str, config: Mapping[str, ConfigValue]) -> Topic:
        """An internal topic, made where there is none yet."""
        try:
            return self.topic(name)
        except UnknownTopic:
            with contextlib.suppress(TopicExists):  # two first calls at a time
                self.create_topic(name, config=config)
        return self.topic(name)

    def _open_partitions(
        self, record: TopicRecord, numbers: list[int]
    ) -> dict[int, Partition | Damaged]:
        opened = self._opener.open_partitions((record, number) for number in numbers)
        return dict(zip(numbers, opened, strict=True))

    def _finish_deletions(self) -> None:
        """Files, then objects, then the debt itself: each step may be done again."""
        with self._topics_lock:  # a deletion under way closes its logs before their folders go
            deleted = self.registry.deleted()
        for record in deleted:
            if self.copier.is_busy(record.topic_id):
                continue  # its last object would stay behind
            with self._topics_lock:  # a new topic of the name may be half made
                aside = self._opener.set_aside(record)
            self._opener.remove(aside)
            if self.bucket is not None:
                self.bucket.delete_topic(record)
            self.registry.forget(record.topic_id)

    def _save_log_starts(self) -> None:
        """Kafka's rule: only starts that the first local segment does not say by itself."""
        starts = {
            (p.topic, p.number): p.log.log_start_offset
            for p in self.partitions()
            if p.log.log_start_offset > 0 or p.log.local_log_start_offset > 0
        }
        self.folder.write_checkpoint(LOG_STARTS, with_log_starts(starts, self.damaged_partitions()))

    def _check_open(self) -> None:
        if self._closing:
            raise ShuttingDown("the broker is shutting down")

    def _check_alteration(self, topic: Topic, changed: LogConfig) -> None:
        for partition in topic.partitions.values():
            if partition.cold is not None:
                partition.cold.check_config(
                    changed, local_log_start_offset=partition.log.local_log_start_offset
                )


def _check_partition_count(partitions: int) -> None:
    if not 1 <= partitions <= MAX_PARTITIONS:
        detail = f"partitions must be 1 to {MAX_PARTITIONS}, not {partitions}"
        raise InvalidRequest(detail, problems=(FieldProblem("partitions", detail),))


def _grown(record: TopicRecord, partitions: int) -> TopicRecord:
    _check_partition_count(partitions)
    if partitions < record.partitions:
        raise InvalidPartitionCount(
            f"topic {record.name!r} has {record.partitions} partitions; they only grow"
        )
    return msgspec.structs.replace(record, partitions=partitions)
