"""Brings the segments of a compacted topic back to disk if only the bucket has them.

* Compaction works on local segments, and such a topic stays on disk whole; after a restore, or a
  repair that set a bad segment aside, the front of it is only in the bucket.
* The newest comes back first, each whole: after a stop or a crash less is left to do. Meanwhile
  reads take them from either tier.
* What the store gives is not trusted (`rebuilt_segment`), nothing in the bucket changes, and the
  disk's reserve is respected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from broker.bucket import Bucket
from broker.partition import Partition
from broker.repair.rebuilt_segment import object_pieces, rebuilt_segment, snapshot_before
from hot_tier.cleaner import Interrupted
from manifest.state import SegmentEntry
from record_format.errors import CorruptDataError

log = structlog.get_logger(__name__)


class Rehydrator:
    """`scratch` is a folder of its own on the disk of the logs; one call at a time."""

    def __init__(
        self,
        bucket: Bucket,
        *,
        scratch: Path,
        clock: Callable[[], int],
        check_room: Callable[[int], None],
    ) -> None:
        self._bucket, self._scratch, self._clock = bucket, scratch, clock
        self._check_room = check_room

    def __call__(self, partition: Partition, *, stopping: Callable[[], bool]) -> None:
        """Bring all of it back. Raises Interrupted, StoreUnavailable, ConfigurationError, DiskFull,
        CorruptDataError, LogOfflineError.
        """
        store = self._bucket.store_status.require_store()
        entries = list(cold_only(partition))
        for before, entry in reversed(list(zip([None, *entries[:-1]], entries, strict=True))):
            self._check_room(entry.size_bytes)
            snapshot = snapshot_before(store, entry, before)
            pieces = _until(stopping, object_pieces(store, entry))
            if not self._bring(partition, entry, pieces, snapshot=snapshot):
                return  # retention or a trim has passed it, and all that lies below
            log.info(
                "segment brought back",
                partition=str(partition),
                base_offset=entry.base_offset,
                size_bytes=entry.size_bytes,
            )

    def _bring(
        self,
        partition: Partition,
        entry: SegmentEntry,
        pieces: Iterator[bytes],
        *,
        snapshot: bytes | None,
    ) -> bool:
        if entry.next_offset > partition.log.first_local_offset:
            raise CorruptDataError(
                f"ends in offset {entry.last_offset}, but the local log begins at "
                f"{partition.log.first_local_offset}",
                file=entry.log_key,
            )
        with rebuilt_segment(
            self._scratch, partition.log, entry, pieces, clock=self._clock, snapshot=snapshot
        ) as rebuilt:
            if entry.modified_ms >= 0:  # compaction and retention go by it; else it is new
                modified_ns = entry.modified_ms * 1_000_000
                os.utime(rebuilt.files.log, ns=(modified_ns, modified_ns))
            return partition.log.sealed.prepend(
                rebuilt.files, epochs=rebuilt.epochs, crc32c=entry.log_crc32c
            )


def cold_only(partition: Partition) -> Iterator[SegmentEntry]:
    """The segments that are in the bucket and not on disk, oldest first."""
    if partition.cold is None:
        return
    local_start = partition.log.first_local_offset
    for entry in partition.cold.entries(partition.log.log_start_offset):
        if entry.base_offset >= local_start:
            return
        yield entry


def has_cold_only(partition: Partition) -> bool:
    """Where the manifest itself says it no page is read: this is asked in each round."""
    manifest = partition.cold.manifest if partition.cold is not None else None
    if manifest is None:
        return False
    log_start = partition.log.log_start_offset
    oldest = manifest.find(log_start)
    if oldest is None or oldest.base_offset >= partition.log.first_local_offset:
        return False
    if oldest.base_offset >= log_start or isinstance(oldest, SegmentEntry):
        return True
    return next(cold_only(partition), None) is not None  # the log start lies within a page


def _until(stopping: Callable[[], bool], pieces: Iterator[bytes]) -> Iterator[bytes]:
    for piece in pieces:
        if stopping():
            raise Interrupted
        yield piece
