"""The three checkpoint files of a data folder, written from the current state of the logs.

* A damaged partition's rows are written back unchanged: with a recovery point of 0 the next start
  would truncate a log that this start refused to open.
* A log start is durable before it is visible, and before anything below it is deleted.
* Reading the state and writing the file is one atomic step: an older state never overwrites a
  newer.
* Rows are keyed by topic name. Before a name is used again, the deleted topic's rows are removed
  (`forget`).
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
        self._written: frozenset[str] = frozenset()  # topics that may have rows in the files

    def forget(self, name: str) -> None:
        """Remove, durably, the rows of a deleted topic. Raises OSError."""
        with self._lock:
            if name in self._written:
                self.save()

    def save(self) -> None:
        """Write all three files. Raises OSError."""
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
        """Advance the log start, and return it; it never moves back. On an error nothing has moved.

        Raises OSError (a full disk), LogOfflineError, ShuttingDown.
        """
        with self._lock:
            self._save_log_starts({partition: offset})
            return partition.log.trim(offset)

    def _save_log_starts(self, moved: Mapping[Partition, int]) -> None:
        """Kafka's rule: only log starts that the first local segment does not imply.

        `moved` is keyed by partition, because its name may belong to another topic by now.
        """
        starts = {}
        for partition in self._partitions():
            place, log = (partition.topic, partition.number), partition.log
            start = max(log.log_start_offset, moved.get(partition, 0))
            if start > 0 or log.local_log_start_offset > 0:
                starts[place] = start
                self._written |= {partition.topic}
        self._folder.write_checkpoint(LOG_STARTS, with_log_starts(starts, self._damaged()))
