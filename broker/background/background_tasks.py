"""The broker's background tasks, and when they run.

* One thread for each task; each round covers all partitions that exist when it begins. No thread
  starts before `start`: in a broker that was opened idle the tasks are called one by one.
* A round that fails with a TierlogError or OSError is logged, and the next round runs as scheduled.
  Any other exception is a bug: it is logged with its traceback, but does not end the thread either,
  because the logs still need maintenance. A repeated failure is logged once, and so is the recovery
  from it.
* The copier wakes up when a topic changes: it publishes the topic and uploads rolled segments.
* What deleted topics have left goes in a thread of its own, because the objects of a thousand
  partitions take many minutes: files of all topics first, because the disk may need the room, then
  objects, then the entry in `topics.json`. Each step may be repeated by the next round or start.
* Stopping waits only for the disk. A task that waits for the store is left behind: it cannot change
  a closed log, registry or folder.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Final

import structlog

from tierlog.broker.background.compactor import Compactor, Rehydrator
from tierlog.broker.background.copier import Copier, Offloaded
from tierlog.broker.background.fence_checker import FenceChecker
from tierlog.broker.background.janitor import Janitor
from tierlog.broker.background.merger import Merged, Merger
from tierlog.broker.background.task_failures import RoundTask, TaskFailures
from tierlog.broker.bucket import Bucket
from tierlog.broker.data_folder import DataFolder
from tierlog.broker.disk_reserve import CHECK_S, DiskReserve
from tierlog.broker.group_configs import GroupConfigs
from tierlog.broker.groups import Groups
from tierlog.broker.holes import Holes
from tierlog.broker.live_topics import LiveTopics
from tierlog.broker.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.share_groups import ShareGroups
from tierlog.broker.topic_registry import TopicRecord
from tierlog.broker.topics import Topic
from tierlog.broker.transactions import Transactions
from tierlog.host.deferred_errors import DeferredErrors
from tierlog.host.retry import backoff_s
from tierlog.manifest.forced_claims import ForcedClaims
from tierlog.record_format.errors import FencedError, TierlogError

if TYPE_CHECKING:
    from tierlog.broker.cluster.cluster import Cluster

log = structlog.get_logger(__name__)


class PeriodicTask:
    """`wake` starts the next round at once. With `interval_max_s`, the interval doubles with each
    failure in a row, up to that.
    """

    def __init__(
        self,
        name: RoundTask,
        run_round: Callable[[], None],
        *,
        failures: TaskFailures,
        interval_s: float,
        interval_max_s: float = 0.0,
    ) -> None:
        self._name, self._run_round, self._interval_s = name, run_round, interval_s
        self._interval_max_s, self._failures = interval_max_s, failures
        self._failure: str | None = None
        self._failed_rounds = 0  # in a row
        self._woken = threading.Event()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def stop(self, timeout_s: float) -> None:
        """Let the round in progress be the last, and wait for it."""
        self._stopping.set()
        self._woken.set()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    def _loop(self) -> None:
        while not self._stopping.is_set():
            self._woken.wait(self._wait_s())
            self._woken.clear()
            if self._stopping.is_set():
                return
            succeeded = self._run()
            self._failures.note_round(self._name, failed=not succeeded)
            self._failed_rounds = 0 if succeeded else self._failed_rounds + 1

    def _run(self) -> bool:
        """Run a round. Returns whether it succeeded."""
        try:
            self._run_round()
        except (TierlogError, OSError) as error:
            self._report(str(error))
        except Exception:
            log.exception("background round failed: a bug", task=self._name)
        else:
            self._report(None)
            return True
        return False

    def _wait_s(self) -> float:
        """The interval; after failures, from twice the interval up."""
        longest_s = max(self._interval_s, self._interval_max_s)
        return backoff_s(self._failed_rounds + 1, first_s=self._interval_s, max_s=longest_s)

    def _report(self, failure: str | None) -> None:
        if failure == self._failure:
            return
        if failure is None:
            log.info("background task recovered", task=self._name)
        else:
            log.warning("background task failed, will retry", task=self._name, error=failure)
        self._failure = failure


COPY_INTERVAL_S: Final = 1.0


DELETION_INTERVAL_S: Final = 1.0


DELETION_INTERVAL_MAX_S: Final = 60.0  # each attempt costs a dozen requests or more a partition


GROUPS_INTERVAL_S: Final = 10.0


LOOK_INTERVAL_S: Final = 0.5  # whether it is time to look who lives


REPLICAS_INTERVAL_S: Final = 0.5  # what is due for the replicas


WRITE_AHEAD_INTERVAL_S: Final = 60.0


REPORT_INTERVAL_S: Final = 1.0  # what the other brokers lead, asked of them


class BackgroundTasks:
    """Thread-safe. `copying.wake` starts the next round at once."""

    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        bucket: Bucket | None,
        *,
        topics: LiveTopics,
        groups: Groups,
        transactions: Transactions,
        share_groups: ShareGroups,
        reserve: DiskReserve,
        clock: Callable[[], int],
    ) -> None:
        self._settings, self._bucket, self._topics = settings, bucket, topics
        self._reserve = reserve
        self.holes = Holes(topics.compaction_offsets)
        self.failures = TaskFailures()
        self.copier = Copier(
            topics.partitions,
            concurrency=settings.offload_concurrency,
            holes=self.holes,
            failures=self.failures,
        )
        in_cluster = bucket is not None and settings.cluster_join
        self.fence_checker = FenceChecker(
            topics.partitions,
            self.failures,
            bucket.silence if bucket is not None else None,
            forced_claims=ForcedClaims(bucket.store) if bucket and in_cluster else None,
        )
        self.janitor = Janitor(
            topics, settings, clock=clock, holes=self.holes, failures=self.failures
        )
        rehydrate = None
        if bucket is not None:
            scratch, check_room = folder.scratch("bring-back"), reserve.check_fits
            rehydrate = Rehydrator(bucket, scratch=scratch, clock=clock, check_room=check_room)
        self.compactor = Compactor(
            topics, settings, clock=clock, failures=self.failures, rehydrate=rehydrate
        )
        self.merger: Merger | None = None
        if bucket is not None:
            self.merger = Merger(
                topics,
                bucket,
                scratch=folder.scratch("merge"),
                clock=clock,
                check_room=reserve.check_fits,
                failures=self.failures,
            )
        self.deletions = Deletions(topics, bucket)
        self._copy_again_s = 0.0
        task = partial(PeriodicTask, failures=self.failures)
        check_s = settings.retention_check_interval_ms / 1000
        self.copying = task("copier", self.copy_round, interval_s=COPY_INTERVAL_S)
        self.deleting = task(
            "deletions",
            self.deletions.run_round,
            interval_s=DELETION_INTERVAL_S,
            interval_max_s=DELETION_INTERVAL_MAX_S,
        )
        self._group_keeping = task("groups", groups.run_round, interval_s=GROUPS_INTERVAL_S)
        self._transaction_keeping = task(
            "transactions", transactions.run_round, interval_s=GROUPS_INTERVAL_S
        )
        self._share_keeping = task(
            "share-groups", share_groups.run_round, interval_s=GROUPS_INTERVAL_S
        )
        cleaner_s, fence_s = settings.log_cleaner_backoff_ms / 1000, settings.fence_check_ms / 2000
        checkpoint_s = settings.recovery_checkpoint_ms / 1000
        # In the order in which they start; they stop in reverse order.
        self._tasks: tuple[PeriodicTask, ...] = (
            task("disk-reserve", self._check_reserve, interval_s=CHECK_S),
            self.copying,
            self.deleting,
            self._group_keeping,
            self._transaction_keeping,
            self._share_keeping,
            task("janitor", self.janitor.disk_round, interval_s=check_s),
            task("bucket", self.bucket_round, interval_s=check_s),
            task("compactor", self.compactor.run_round, interval_s=cleaner_s),
            *(
                [task("merger", self.merger.run_round, interval_s=check_s)]
                if self.merger is not None
                else []
            ),
            task("fence-checker", self.fence_checker.run_round, interval_s=fence_s),
            task("checkpoints", topics.checkpoints.save, interval_s=checkpoint_s),
        )
        self._at_once = [self._group_keeping]

    def add_cluster(self, cluster: Cluster, group_configs: GroupConfigs) -> None:
        """What a broker of a cluster does besides. Call it before `start`."""
        task = partial(PeriodicTask, failures=self.failures)
        beat_s = self._settings.heartbeat_interval_ms / 1000
        replicas_s = min(REPLICAS_INTERVAL_S, beat_s)
        tasks = (
            task("heartbeat", cluster.members.beat, interval_s=beat_s),
            task("members", cluster.members.look_around, interval_s=min(beat_s, LOOK_INTERVAL_S)),
            task("cluster", cluster.run_round, interval_s=REPORT_INTERVAL_S),
            task("balance", cluster.moves.run_round, interval_s=REPORT_INTERVAL_S),
            task("replicas", cluster.replicas.run_round, interval_s=replicas_s),
            task("write-ahead", cluster.collect_write_ahead, interval_s=WRITE_AHEAD_INTERVAL_S),
            task("group-configs", group_configs.load, interval_s=REPORT_INTERVAL_S),
        )
        self._tasks += tasks
        self._at_once += tasks

    def coordinate_again(self) -> None:
        """Load what a coordinator's partitions here say, now."""
        for one in (self._group_keeping, self._transaction_keeping, self._share_keeping):
            one.wake()

    def start(self) -> None:
        """If the store responds, it is known when this returns whether another folder has taken a
        partition over.
        """
        if self._bucket is not None and self._bucket.store_status.is_reachable:
            self.fence_checker.check_before_serving(
                timeout_s=self._settings.store_start_timeout_ms / 1000
            )
        self._check_reserve()  # the task's first round is CHECK_S away
        for task in self._tasks:
            task.start()
        for task in self._at_once:
            task.wake()

    def stop(self, deadline_s: float) -> None:
        self.copier.stop()
        self.janitor.stop()
        if self._bucket is not None:
            self._bucket.stop_uploads()
        self.compactor.stop()
        if self.merger is not None:
            self.merger.stop()
        for task in self._tasks:
            task.stop(0)
        for task in reversed(self._tasks):
            task.stop(max(0.0, deadline_s - time.monotonic()))
        self.copier.wait_until_idle(timeout_s=max(0.0, deadline_s - time.monotonic()))

    def offload_topic(self, topic: Topic, *, wait_ms: int | None) -> Offloaded:
        """Roll the active segments, upload all rolled segments, then apply retention."""
        copier, partitions = self.copier, list(topic.partitions.values())
        before = copier.progress(partitions)
        for partition in partitions:
            partition.check_leadership()
            with partition.reporting_defunct():
                partition.upkeep.roll()
        copier.reset_backoff(partitions)
        self.copying.wake()
        if wait_ms is not None and copier.wait_until_done(partitions, timeout_s=wait_ms / 1000):
            for partition in partitions:
                with partition.reporting_defunct():
                    self.janitor.maintain(partition)
                partition.check_leadership()
        after = copier.progress(partitions)
        return Offloaded(
            after.uploaded_segments - before.uploaded_segments,
            after.uploaded_bytes - before.uploaded_bytes,
            after.remaining_segments,
        )

    def merge_topic(self, topic: Topic, *, wait_ms: int) -> Merged:
        """Merge small segments of the partitions that are led here."""
        if self.merger is None:
            return Merged(0, 0, 0, 0)
        return self.merger.merge_topic(topic, wait_ms=wait_ms)

    def offload_partition(self, partition: Partition, timeout_s: float) -> bool:
        """Upload what is sealed of it; whether all was within this time."""
        self.copier.reset_backoff([partition])
        self.copying.wake()
        return self.copier.wait_until_done([partition], timeout_s=timeout_s)

    def copy_round(self) -> None:
        if self._bucket is None or not self._bucket.store_status.poll():
            return
        try:
            self._bucket.publish_topics(self._topics.registry, meanwhile=self._copy_if_due)
        finally:  # a topic that cannot be published does not delay uploads
            self._copy()

    def bucket_round(self) -> None:
        self.janitor.bucket_round()
        bucket = self._bucket
        if bucket is not None and bucket.names is not None and bucket.store_status.is_reachable:
            led = {one.topic_id for one in self._topics.partitions() if one.number == 0}
            bucket.find_unpublished(self._topics.registry, led)

    def _copy_if_due(self) -> None:
        if time.monotonic() >= self._copy_again_s:
            self._copy()

    def _copy(self) -> None:
        self.copier.run_round()
        self._copy_again_s = time.monotonic() + COPY_INTERVAL_S

    def _check_reserve(self) -> None:
        self._reserve.check((self._shrink_cache, self.janitor.relieve_disk))
        with suppress(OSError):  # there is still no room
            self._topics.allocate_waiting_epochs()

    def _shrink_cache(self, missing_bytes: int) -> bool:
        return self._bucket is not None and self._bucket.cache.shrink(missing_bytes) > 0


class Deletions:
    """Thread-safe: one round at a time removes folders, which another would miss."""

    def __init__(self, topics: LiveTopics, bucket: Bucket | None) -> None:
        self._topics, self._bucket = topics, bucket
        self._round = threading.Lock()

    def run_round(self) -> None:
        """Raises the first error once every topic was tried."""
        with self._round:
            with suppress(OSError):  # `_finish` tries again, and raises it
                self._for_each(self._topics.remove_files)
            self._for_each(self._finish)

    def _for_each(self, act: Callable[[TopicRecord], None]) -> None:
        failures = DeferredErrors(TierlogError, OSError)
        for record in self._topics.deleted():
            if self._topics.is_closed:
                break
            with failures:
                act(record)
        failures.raise_first()

    def _finish(self, record: TopicRecord) -> None:
        if self._topics.is_busy(record):
            return  # an object whose upload is in progress would be left behind
        self._topics.remove_files(record)
        if self._bucket is not None:
            self._delete_objects(self._bucket, record)
        self._topics.forget(record)

    def _delete_objects(self, bucket: Bucket, record: TopicRecord) -> None:
        bucket.store_status.require_store()  # not in another cluster's bucket
        try:
            bucket.delete_topic(record)
        except FencedError as error:
            log.error(
                "objects not deleted: another folder owns them",
                topic=record.name,
                reason=str(error),
            )
