"""The broker's background tasks, and when they run.

* One thread for each task; each round covers all partitions that exist when it begins. No thread
  starts before `start`: in a broker that was opened idle the tasks are called one by one.
* The copier wakes up when a topic changes: it publishes the topic and uploads rolled segments.
* What deleted topics have left goes in a thread of its own, because the objects of a thousand
  partitions take many minutes.
* Stopping waits only for the disk. A task that waits for the store is left behind: it cannot change
  a closed log, registry or folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from tierlog.broker.background.compactor import Compactor, Rehydrator
from tierlog.broker.background.copier import Copier, Offloaded
from tierlog.broker.background.deletions import Deletions
from tierlog.broker.background.fence_checker import FenceChecker
from tierlog.broker.background.janitor import Janitor
from tierlog.broker.background.merger import Merged, Merger
from tierlog.broker.background.periodic_task import PeriodicTask
from tierlog.broker.background.task_failures import RoundTask, TaskFailures
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.data_folder.data_folder import DataFolder
from tierlog.broker.data_folder.disk_reserve import CHECK_S, DiskReserve
from tierlog.broker.group_coordinator.group_configs import GroupConfigs
from tierlog.broker.group_coordinator.groups import Groups
from tierlog.broker.partition.holes import Holes
from tierlog.broker.partition.partition import Partition
from tierlog.broker.settings import BrokerSettings
from tierlog.broker.share_coordinator.share_groups import ShareGroups
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topics import Topic
from tierlog.broker.transaction_coordinator.transactions import Transactions
from tierlog.manifest.forced_claims import ForcedClaims
from tierlog.record_format.errors import InvalidRequest
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry

if TYPE_CHECKING:
    from tierlog.broker.cluster.cluster import Cluster

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
        group_configs: GroupConfigs,
        transactions: Transactions,
        share_groups: ShareGroups,
        cluster: Cluster | None,
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
        self.fence_checker = FenceChecker(
            topics.partitions,
            self.failures,
            bucket.silence if bucket is not None else None,
            forced_claims=None if bucket is None or cluster is None else ForcedClaims(bucket.store),
        )
        self.janitor = Janitor(
            topics, settings, clock=clock, holes=self.holes, failures=self.failures
        )
        rehydrate = self.merger = None
        if bucket is not None:
            scratch, check_room = folder.scratch("bring-back"), reserve.check_fits
            rehydrate = Rehydrator(bucket, scratch=scratch, clock=clock, check_room=check_room)
            self.merger = Merger(
                topics,
                bucket,
                scratch=folder.scratch("merge"),
                check_room=check_room,
                failures=self.failures,
            )
        self.compactor = Compactor(
            topics, settings, clock=clock, failures=self.failures, rehydrate=rehydrate
        )
        is_gone = cluster.is_gone if cluster is not None else lambda _: False
        self.deletions = Deletions(topics, bucket, is_gone=is_gone)
        self._copy_again_s = 0.0
        self._tasks: list[PeriodicTask] = []
        check_s = settings.retention_check_interval_ms / 1000
        self._add("disk-reserve", self._check_reserve, CHECK_S)
        self.copying = self._add("copier", self.copy_round, COPY_INTERVAL_S)
        self.deleting = self._add(
            "deletions", self.deletions.run_round, DELETION_INTERVAL_S, DELETION_INTERVAL_MAX_S
        )
        self._coordinators = [
            self._add("groups", groups.run_round, GROUPS_INTERVAL_S),
            self._add("transactions", transactions.run_round, GROUPS_INTERVAL_S),
            self._add("share-groups", share_groups.run_round, GROUPS_INTERVAL_S),
        ]
        self._at_once = self._coordinators[:1]
        self._add("janitor", self.janitor.disk_round, check_s)
        self._add("bucket", self.bucket_round, check_s)
        self._add("compactor", self.compactor.run_round, settings.log_cleaner_backoff_ms / 1000)
        if self.merger is not None:
            self._add("merger", self.merger.run_round, check_s)
        self._add("fence-checker", self.fence_checker.run_round, settings.fence_check_ms / 2000)
        self._add("checkpoints", topics.checkpoints.save, settings.recovery_checkpoint_ms / 1000)
        if cluster is not None:
            self._add_cluster(cluster, group_configs)

    def _add(
        self,
        name: RoundTask,
        run_round: Callable[[], None],
        interval_s: float,
        interval_max_s: float = 0.0,
    ) -> PeriodicTask:
        """It starts after those before it, and stops before them."""
        task = PeriodicTask(
            name,
            run_round,
            failures=self.failures,
            interval_s=interval_s,
            interval_max_s=interval_max_s,
        )
        self._tasks.append(task)
        return task

    def _add_cluster(self, cluster: Cluster, group_configs: GroupConfigs) -> None:
        """What a broker of a cluster does besides."""
        beat_s = self._settings.heartbeat_interval_ms / 1000
        self._at_once += [
            self._add("heartbeat", cluster.members.beat, beat_s),
            self._add("members", cluster.members.look_around, min(beat_s, LOOK_INTERVAL_S)),
            self._add("cluster", cluster.run_round, REPORT_INTERVAL_S),
            self._add("balance", cluster.moves.run_round, REPORT_INTERVAL_S),
            self._add("replicas", cluster.replicas.run_round, min(beat_s, REPLICAS_INTERVAL_S)),
            self._add("write-ahead", cluster.collect_write_ahead, WRITE_AHEAD_INTERVAL_S),
            self._add("group-configs", group_configs.load, REPORT_INTERVAL_S),
        ]

    def coordinate_again(self) -> None:
        """Load what a coordinator's partitions here say, now."""
        for one in self._coordinators:
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

    def plan_merges(self, partition: Partition) -> MergePlan:
        """Merges of a partition for whoever makes the merged segments elsewhere."""
        return self._required_merger(partition).plan_merges(partition)

    def commit_merged(self, partition: Partition, merged: SegmentEntry) -> None:
        self._required_merger(partition).commit_merged(partition, merged)

    def _required_merger(self, partition: Partition) -> Merger:
        if self.merger is None:
            raise InvalidRequest(f"{partition} has no segments in a bucket")
        return self.merger

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
