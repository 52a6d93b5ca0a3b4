"""What a broker does by itself, in the background: who does it, and when.

* One thread for each chore; each looks at all partitions, as they are when its turn comes. None
  starts before `start`: in a broker that was opened idle they are called one by one.
* The copier comes first when a topic changed: it tells the bucket, and uploads what is rolled.
* Meanwhile, what was deleted is removed: for a thousand partitions that takes many minutes. Files
  go before objects, because asking the store may take long, or fail.
* Stopping waits only for the disk. A chore that waits for the store is left behind: nobody can
  change a closed log, registry or folder.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final

import structlog

from broker.background.checkpoints import Checkpoints
from broker.background.compactor import Compactor
from broker.background.copier import Copier
from broker.background.janitor import Janitor
from broker.background.periodic_task import PeriodicTask
from broker.background.rehydration import Rehydrator
from broker.bucket import Bucket
from broker.data_folder import DataFolder
from broker.disk_reserve import CHECK_S, DiskReserve
from broker.groups.groups import Groups
from broker.holes import Holes
from broker.live_topics import LiveTopics
from broker.ownership.fence_checker import FenceChecker
from broker.partition import Partition
from broker.settings import BrokerSettings
from broker.topic_registry import TopicRecord, TopicRegistry
from record_format.errors import FencedError

log = structlog.get_logger(__name__)

COPY_INTERVAL_S: Final = 1.0
GROUPS_INTERVAL_S: Final = 10.0


class BackgroundTasks:
    """Thread-safe. `copying.wake` makes the next round begin at once."""

    def __init__(
        self,
        folder: DataFolder,
        settings: BrokerSettings,
        bucket: Bucket | None,
        *,
        registry: TopicRegistry,
        topics: LiveTopics,
        groups: Groups,
        clock: Callable[[], int],
    ) -> None:
        self._settings, self._bucket = settings, bucket
        self._registry, self._topics = registry, topics
        partitions = topics.partitions
        self.checkpoints = Checkpoints(folder, partitions, topics.damaged)
        self.holes = Holes(self._cleaned_before)
        self.copier = Copier(
            partitions,
            concurrency=settings.offload_concurrency,
            holes=self.holes,
            store_answers=bucket.store_status.recheck if bucket else lambda: True,
        )
        self.fence_checker = FenceChecker(partitions)
        self.janitor = Janitor(
            partitions,
            settings,
            clock=clock,
            holes=self.holes,
            move_log_start=self.checkpoints.move_log_start,
        )
        self.reserve = DiskReserve(
            folder.path,
            reserve_bytes=settings.disk_reserve_bytes or 0,
            reliefs=(self._shrink_cache, self.janitor.relieve_disk),
        )
        self.compactor = Compactor(
            partitions,
            folder,
            settings,
            clock=clock,
            save_recovery_points=self.checkpoints.save,
            rehydrate=self._rehydrator(folder, bucket, clock) if bucket else None,
        )
        self.copying = PeriodicTask("copier", self.copy_round, interval_s=COPY_INTERVAL_S)
        self.deleting = PeriodicTask("deletions", self.deletion_round, interval_s=COPY_INTERVAL_S)
        self._group_keeping = PeriodicTask("groups", groups.run_round, interval_s=GROUPS_INTERVAL_S)
        self._tasks = self._background_tasks()

    def _rehydrator(
        self, folder: DataFolder, bucket: Bucket, clock: Callable[[], int]
    ) -> Rehydrator:
        return Rehydrator(
            bucket,
            scratch=folder.scratch("bring-back"),
            clock=clock,
            check_room=self.reserve.check_fits,
        )

    def _background_tasks(self) -> list[PeriodicTask]:
        """In the order they start; they stop in the reverse."""
        settings = self._settings
        timed = (
            ("janitor", self.janitor.disk_round, settings.retention_check_interval_ms),
            ("bucket", self.janitor.bucket_round, settings.retention_check_interval_ms),
            ("compactor", self.compactor.run_round, settings.log_cleaner_backoff_ms),
            ("fences", self.fence_checker.look, settings.fence_check_ms),
            ("checkpoints", self.checkpoints.save, settings.recovery_checkpoint_ms),
        )
        return [
            PeriodicTask("disk-reserve", self.reserve.check, interval_s=CHECK_S),
            self.copying,
            self.deleting,
            self._group_keeping,
            *(PeriodicTask(name, run, interval_s=ms / 1000) for name, run, ms in timed),
        ]

    def start(self) -> None:
        """A broker that lost a partition to another folder knows it when this returns, if the store
        answers.
        """
        if self._bucket is not None and self._bucket.store_status.answers:
            self.fence_checker.check_before_serving(
                timeout_s=self._settings.store_start_timeout_ms / 1000
            )
        self.reserve.check()  # the task's first look is CHECK_S away
        for task in self._tasks:
            task.start()
        self._group_keeping.wake()

    def stop(self, deadline_s: float) -> None:
        self.copier.stop()
        self.janitor.stop()
        if self._bucket is not None:
            self._bucket.stop_uploads()
        self.compactor.stop()
        for task in self._tasks:
            task.stop(0)
        for task in reversed(self._tasks):
            task.stop(max(0.0, deadline_s - time.monotonic()))
        self.copier.wait_until_idle(timeout_s=max(0.0, deadline_s - time.monotonic()))

    def copy_round(self) -> None:
        if self._bucket is not None and self._bucket.settle(self._registry):
            self.copier.run_round()

    def deletion_round(self) -> None:
        with suppress(OSError):  # what fails is told by who tries again, below
            self._topics.remove_files()
        self._topics.finish_deletions(self._delete_objects)

    def _delete_objects(self, record: TopicRecord) -> None:
        if self._bucket is None:
            return
        self._bucket.store_status.require_store()  # else what is ours is in none that answers now
        try:
            self._bucket.delete_topic(record)
        except FencedError as error:
            log.error("objects stay: not ours to delete", topic=record.name, reason=str(error))

    def _cleaned_before(self, partition: Partition) -> int:
        return self.compactor.cleaned_before(partition)

    def _shrink_cache(self, missing_bytes: int) -> bool:
        return self._bucket is not None and self._bucket.cache.shrink(missing_bytes) > 0
