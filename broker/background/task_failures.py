"""Counts the failures of background tasks, for the metrics: how often each task failed, and for how
many partitions its last attempt did.

* A task that takes one partition after the other notes each attempt; `PeriodicTask` notes whole
  rounds of its own.
* Partitions that are not served any more do not count: they are reported as such.

Thread-safe.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final, Literal, NamedTuple, get_args
from weakref import WeakSet

from tierlog.broker.partition.partition import Partition
from tierlog.record_format.errors import FencedError, LogOfflineError, ShuttingDown, UnknownTopic

PartitionTask = Literal[
    "offload",
    "disk-retention",
    "bucket-retention",
    "garbage-collection",
    "hole-check",
    "compaction",
    "merging",
    "fence-check",
]
RoundTask = Literal[
    "disk-reserve",
    "copier",
    "deletions",
    "groups",
    "transactions",
    "share-groups",
    "janitor",
    "bucket",
    "compactor",
    "merger",
    "fence-checker",
    "checkpoints",
    "heartbeat",
    "members",
    "cluster",
    "balance",
    "replicas",
    "group-configs",
    "write-ahead",
]
TASKS: Final[tuple[str, ...]] = get_args(PartitionTask) + get_args(RoundTask)
_REPORTED_AS_SUCH: Final = (FencedError, LogOfflineError, ShuttingDown, UnknownTopic)


class Failures(NamedTuple):
    """`errors`: failed attempts so far. `failing`: partitions, or rounds, whose last one failed."""

    errors: int
    failing: int


class TaskFailures:
    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._errors: Counter[str] = Counter()
        self._failing_rounds: set[str] = set()
        self._failing: dict[str, WeakSet[Partition]] = {}

    @contextmanager
    def noting(self, task: PartitionTask, partition: Partition) -> Iterator[None]:
        """Note whether an attempt fails. That a partition is not served any more is no failure."""
        try:
            yield
        except _REPORTED_AS_SUCH:
            raise
        except Exception:
            self.note(task, partition, failed=True)
            raise
        self.note(task, partition, failed=False)

    def note(self, task: PartitionTask, partition: Partition, *, failed: bool) -> None:
        with self._lock:
            self._errors[task] += failed
            failing = self._failing.setdefault(task, WeakSet())
            if failed:
                failing.add(partition)
            else:
                failing.discard(partition)

    def note_round(self, task: RoundTask, *, failed: bool) -> None:
        with self._lock:
            self._errors[task] += failed
            if failed:
                self._failing_rounds.add(task)
            else:
                self._failing_rounds.discard(task)

    def by_task(self) -> Mapping[str, Failures]:
        with self._lock:
            return {task: Failures(self._errors[task], self._count_failing(task)) for task in TASKS}

    def _count_failing(self, task: str) -> int:
        partitions = self._failing.get(task, ())
        served = sum(not (one.is_defunct or one.is_offline) for one in partitions)
        return served + (task in self._failing_rounds)
