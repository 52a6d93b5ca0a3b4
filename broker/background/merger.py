"""Merges small segments in the bucket: reads their bytes, uploads them as one, and commits that in
their place. What is merged, `merging` decides.

* Only segments of which nothing is on local disk: a local segment begins and ends where segments of
  the bucket do, which compaction relies on. Never those of compacted topics.
* Batches stay as they are. Offset and time index and the chunk table are made anew; the producer
  snapshot is the last segment's, the aborted transactions are those of all.
* Each object is read in full and has to have the manifest's CRC-32C, and so has what was uploaded,
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
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import msgspec
import structlog

from tierlog.broker.background.merging import MergeLimits, Run, limits_of, plan_runs
from tierlog.broker.background.task_failures import TaskFailures
from tierlog.broker.bucket import Bucket
from tierlog.broker.live_topics import LiveTopics
from tierlog.broker.partition import Partition
from tierlog.broker.rebuilt_segment import check_log_crc, rebuilt_segment, with_transactions
from tierlog.broker.topics import Topic
from tierlog.broker.upkeep import PIECE_BYTES
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.host.threads import Threads
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    InvalidRequest,
    LogOfflineError,
    ShuttingDown,
    TierlogError,
    UnknownTopic,
)
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)

T = TypeVar("T")
R = TypeVar("R")

ROUND_BYTES: Final = 1 << 30
READS: Final = 8  # at once


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
        clock: Callable[[], int],
        check_room: Callable[[int], None],
        failures: TaskFailures,
    ) -> None:
        self._topics, self._bucket, self._scratch, self._clock = topics, bucket, scratch, clock
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
        if topic.config.compacts:
            raise InvalidRequest(
                f"topic {topic.record.name} has cleanup.policy {topic.config.cleanup_policy}: "
                "compaction merges its segments"
            )
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
            txn_index, snapshot = bytearray(), b""
            for bundle in self._ahead(run, partial(load_bundle, store)):
                txn_index += bundle.txn_index
                snapshot = bundle.producer_snapshot
            whole = msgspec.structs.replace(run[0], last_offset=run[-1].last_offset)
            body = _JoinedBytes(self._ahead(_pieces_of(run), partial(_read_piece, store)))
            with rebuilt_segment(
                self._scratch, partition, whole, body, clock=self._clock
            ) as rebuilt:
                files = with_transactions(
                    rebuilt.files, snapshot=snapshot, txn_index=bytes(txn_index)
                )
                partition.upkeep.replace_merged(run, files, log_crc32c=body.crc32c)
        log.info(
            "segments merged",
            partition=str(partition),
            epoch=partition.offsets().leader_epoch,
            base_offset=run[0].base_offset,
            segments=len(run),
            size_bytes=_size_of(run),
        )

    def _ahead(self, items: Iterable[T], call: Callable[[T], R]) -> Iterator[R]:
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


class _Piece(NamedTuple):
    entry: SegmentEntry
    start: int
    end: int


def _pieces_of(run: Iterable[SegmentEntry]) -> Iterator[_Piece]:
    for entry in run:
        for start in range(0, entry.size_bytes, PIECE_BYTES):
            yield _Piece(entry, start, min(start + PIECE_BYTES, entry.size_bytes))


def _read_piece(store: ObjectStore, piece: _Piece) -> tuple[_Piece, bytes]:
    return piece, read_range(store, piece.entry.log_key, piece.start, piece.end)


class _JoinedBytes:
    """The bytes of whole segments. `crc32c` is that of all, once they were iterated."""

    def __init__(self, reads: Iterable[tuple[_Piece, bytes]]) -> None:
        self._reads, self.crc32c = reads, 0

    def __iter__(self) -> Iterator[bytes]:
        """Raises CorruptDataError for a segment that has not the manifest's CRC-32C."""
        crc = 0
        for piece, body in self._reads:
            crc = crc32c_of(body, crc if piece.start else 0)
            if piece.end == piece.entry.size_bytes:
                check_log_crc(piece.entry, crc)
            self.crc32c = crc32c_of(body, self.crc32c)
            yield body


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
