"""Merges small segments in the bucket: reads their bytes, uploads them as one, and commits that in
their place. What is merged, `merging` decides.

* Only segments of which nothing is on local disk: a local segment begins and ends where segments of
  the bucket do, which compaction relies on. Never those of compacted topics.
* `merged_segment` makes the files, here as on executors. What was uploaded has to have their bytes
  before the commit. Until then the manifest names the old objects: whatever is interrupted leaves
  at most an orphan. After it they are garbage (`manifest.garbage`), so readers in flight and pins
  still have them.
* In the background, topics with `cold.merge.min.bytes`: one merge a partition and round, and no
  further one after ROUND_BYTES. Who was not reached is first in the next round.
* One merge at a time: it has a scratch folder. It needs room for the merged segment on disk, which
  `disk.reserve.bytes` must leave. Uploads are paced by `offload.bandwidth`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import structlog

from tierlog.broker.background.merging import MergeLimits, Run, limits_of, plan_runs
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket.bucket import Bucket
from tierlog.broker.data_folder.disk_reserve import raising_disk_full
from tierlog.broker.partition.partition import Partition
from tierlog.broker.topics.live_topics import LiveTopics
from tierlog.broker.topics.topics import Topic
from tierlog.cold_tier.merged_segment import merged_files
from tierlog.host.threads import Threads
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.errors import (
    InvalidRequest,
    LogOfflineError,
    ShuttingDown,
    TierlogError,
    UnknownTopic,
)
from tierlog.record_format.segment_entry import MergePlan, SegmentEntry

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

ROUND_BYTES: Final = 1 << 30
READS: Final = 8  # at once
PLANNED_MAX: Final = 4096  # segments of one answer, about


class Merged(msgspec.Struct, frozen=True):
    """`merged_segments` became `new_segments`; `remaining_segments` can be merged as well."""

    merged_segments: int
    new_segments: int
    merged_bytes: int
    remaining_segments: int


class _Settled(NamedTuple):
    """Below the offset nothing is left to merge within these limits."""

    limits: MergeLimits
    offset: int


class Merger:
    """Thread-safe. `scratch`: an exclusive folder on the disk of the logs."""

    def __init__(
        self,
        topics: LiveTopics,
        bucket: Bucket,
        *,
        scratch: Path,
        check_room: Callable[[int], None],
        failures: TaskFailures,
    ) -> None:
        self._topics, self._bucket, self._scratch = topics, bucket, scratch
        self._check_room, self._failures = check_room, failures
        self._reads = Threads(READS, name="merge")
        self._merging, self._stopping = threading.Lock(), threading.Event()
        self._settled: WeakKeyDictionary[Partition, _Settled] = WeakKeyDictionary()
        self._rounds: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()  # the last with it
        self._round = 0

    def stop(self) -> None:
        """End the merge in progress; it has no effect."""
        self._stopping.set()

    def close(self) -> None:
        self.stop()
        self._reads.shutdown()

    def run_round(self) -> None:
        """A partition that fails does not delay the others."""
        self._round += 1
        left = ROUND_BYTES
        partitions = (one for one in self._topics.partitions() if _is_due(one))
        for partition in sorted(partitions, key=lambda one: self._rounds.get(one, 0)):
            if left <= 0 or self._stopping.is_set():
                return
            self._rounds[partition] = self._round
            try:
                with self._failures.noting("merging", partition):
                    left -= self._merge_next(partition)
            except (LogOfflineError, ShuttingDown, UnknownTopic):
                continue
            except (TierlogError, OSError) as error:
                log.warning("not merged, will retry", partition=str(partition), error=str(error))
            except Exception:
                log.exception("not merged: a bug", partition=str(partition))

    def merge_topic(self, topic: Topic, *, wait_ms: int) -> Merged:
        """Merge all that the limits of the topic allow. No merge begins after `wait_ms`, but one
        does. Raises InvalidRequest for a compacted topic, and what a merge raises.
        """
        _check_mergeable(topic.record.name, topic.config)
        deadline_s, done, left = time.monotonic() + wait_ms / 1000, Merged(0, 0, 0, 0), 0
        limits = limits_of(topic.config)
        for partition in topic.partitions.values():
            partition.claim()
            for run in self._runs(partition, limits, from_offset=0):
                if len(run.entries) == 1:
                    continue
                if done.new_segments and time.monotonic() >= deadline_s:
                    left += len(run.entries)
                    continue
                self._merge(partition, run.entries)
                done = Merged(
                    done.merged_segments + len(run.entries),
                    done.new_segments + 1,
                    done.merged_bytes + _size_of(run.entries),
                    0,
                )
        return msgspec.structs.replace(done, remaining_segments=left)

    def plan_merges(self, partition: Partition) -> MergePlan:
        """The first merges that the limits of the topic allow, for whoever makes them elsewhere.
        Raises InvalidRequest for a compacted topic, FencedError, StoreUnavailable.
        """
        _check_mergeable(partition.topic, partition.config)
        partition.claim()
        runs: list[list[SegmentEntry]] = []
        for run in self._runs(partition, limits_of(partition.config), from_offset=0):
            if len(run.entries) > 1:
                runs.append(list(run.entries))
            if sum(map(len, runs)) >= PLANNED_MAX:
                break
        return partition.upkeep.merge_plan(runs)

    def commit_merged(self, partition: Partition, merged: SegmentEntry) -> None:
        """Commit a segment that was made elsewhere in place of those whose bytes it has. Raises
        UnknownSegment if they have changed, and what `plan_merges` raises.
        """
        _check_mergeable(partition.topic, partition.config)
        partition.claim()
        partition.upkeep.resolve_failed_commit()
        partition.upkeep.commit_merged(merged)

    def _merge_next(self, partition: Partition) -> int:
        """Merge the oldest run that is whole; the bytes that were merged."""
        limits = limits_of(partition.config, enough_bytes=partition.config.cold_merge_min_bytes)
        settled = self._settled.get(partition)
        start = settled.offset if settled is not None and settled.limits == limits else 0
        for run in self._runs(partition, limits, from_offset=start):
            if not run.is_whole:
                break
            if len(run.entries) > 1:
                self._merge(partition, run.entries)
                return _size_of(run.entries)
            start = run.entries[-1].next_offset
            self._settled[partition] = _Settled(limits, start)
        return 0

    def _runs(
        self, partition: Partition, limits: MergeLimits, *, from_offset: int
    ) -> Iterator[Run]:
        if not partition.has_bucket:
            return iter(())
        partition.upkeep.resolve_failed_commit()
        return plan_runs(partition.upkeep.mergeable_entries(from_offset), limits)

    def _merge(self, partition: Partition, run: tuple[SegmentEntry, ...]) -> None:
        """Raises StoreUnavailable, CorruptDataError, DiskFull, FencedError, ShuttingDown,
        OutcomeUnknownError.
        """
        store = self._bucket.store_status.require_store()
        with self._merging:
            self._check_room(_size_of(run))
            merged = merged_files(
                store,
                run,
                scratch=self._scratch,
                index_interval_bytes=partition.config.index_interval_bytes,
                in_order=self._ahead,
            )
            with raising_disk_full(self._scratch), merged as files:
                partition.upkeep.replace_merged(run, files)
        log.info(
            "segments merged",
            partition=str(partition),
            epoch=partition.offsets().leader_epoch,
            base_offset=run[0].base_offset,
            segments=len(run),
            size_bytes=_size_of(run),
        )

    def _ahead(self, call: Callable[[T], R], items: Iterable[T], /) -> Iterator[R]:
        """`call` of each item, in order, some ahead in threads. Raises ShuttingDown."""
        pending: deque[Future[R]] = deque()
        for item in items:
            if len(pending) == READS:
                yield pending.popleft().result()
            if self._stopping.is_set():
                raise ShuttingDown("the broker is shutting down")
            pending.append(self._reads.submit(call, item))
        while pending:
            yield pending.popleft().result()


def _check_mergeable(topic: str, config: LogConfig) -> None:
    if config.compacts:
        raise InvalidRequest(
            f"topic {topic} has cleanup.policy {config.cleanup_policy}: "
            "compaction merges its segments"
        )


def _is_due(partition: Partition) -> bool:
    config = partition.config
    return (
        config.cold_merge_min_bytes > 0
        and not config.compacts
        and partition.is_claimed
        and partition.has_bucket
        and partition.is_store_reachable
        and not partition.is_defunct
    )


def _size_of(run: Iterable[SegmentEntry]) -> int:
    return sum(one.size_bytes for one in run)
