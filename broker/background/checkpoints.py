"""The three checkpoints of a data folder, written from what the logs say now.

* A damaged partition's rows are written as they were read: with a recovery point of 0 the next
  start would cut off what this one refused.
* A log start is durable before anybody sees it, or deletes what is below it.
* What is written is the latest: whoever looked earlier never writes later.
* Rows go by names. Before a name gets another topic, those of the deleted one go (`forget`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping

from broker.damaged_partition import DamagedPartition, with_log_starts, with_recovery_points
from broker.data_folder import (
    HIGH_WATERMARKS,
    LOG_STARTS,
    RECOVERY_POINTS,
    DataFolder,
)
from broker.partition import Partition


class Checkpoints:
    def __init__(
        self,
        folder: DataFolder,
        partitions: Callable[[], Iterable[Partition]],
        damaged: Callable[[], Iterable[DamagedPartition]],
    ) -> None:
        self._folder, self._partitions, self._damaged = folder, partitions, damaged
        self._lock = threading.RLock()
        self._written: frozenset[str] = frozenset()  # topics that the files may have rows of

    def forget(self, name: str) -> None:
        """Forget, durably, the rows of a topic that no longer exists. Raises OSError."""
        with self._lock:
            if name in self._written:
                self.save()

    def save(self) -> None:
        """Recovery points and high watermarks: what a crash need not check again; and log starts.
        Raises OSError.
        """
        with self._lock:
            partitions, damaged = list(self._partitions()), list(self._damaged())
            topics = frozenset(p.topic for p in partitions) | {d.topic for d in damaged}
            self._written |= topics
            points = {(p.topic, p.number): p.log.recovery_point for p in partitions}
            self._folder.write_checkpoint(RECOVERY_POINTS, with_recovery_points(points, damaged))
            self._folder.write_checkpoint(
                HIGH_WATERMARKS, {(p.topic, p.number): p.log.high_watermark for p in partitions}
            )
            self._save_log_starts({})
            self._written = topics

    def move_log_start(self, partition: Partition, offset: int) -> int:
        """The new log start; it never moves back. If there is no room on disk, nothing has moved.

        Raises OSError, LogOfflineError, ShuttingDown.
        """
        with self._lock:
            self._save_log_starts({partition: offset})
            return partition.log.trim(offset)

    def _save_log_starts(self, moved: Mapping[Partition, int]) -> None:
        """Kafka's rule: only starts that the first local segment does not say by itself.

        `moved` goes by the partition: its name may be that of the next topic by now.
        """
        starts = {}
        for partition in self._partitions():
            place, log = (partition.topic, partition.number), partition.log
            start = max(log.log_start_offset, moved.get(partition, 0))
            if start > 0 or log.local_log_start_offset > 0:
                starts[place] = start
                self._written |= {partition.topic}
        self._folder.write_checkpoint(LOG_STARTS, with_log_starts(starts, self._damaged()))
