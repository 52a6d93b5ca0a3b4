"""Downloads segments of a compacted topic that only the bucket has.

* Compaction needs local segments, so a compacted topic stays on disk entirely; but after a restore,
  or a repair that set a corrupt segment aside, the front of it is only in the bucket.
* The newest segment comes first, and each is attached once it is complete, so that progress
  survives a stop or a crash. Meanwhile reads are served from either tier.
* The downloaded bytes are verified (`rebuilt_segment`), nothing in the bucket changes, and the disk
  reserve is respected.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import structlog

from tierlog.broker.bucket import Bucket
from tierlog.broker.partition import Partition
from tierlog.broker.repair.rebuilt_segment import object_pieces, rebuilt_segment, snapshot_before
from tierlog.hot_tier.cleaner import Interrupted
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)


class Rehydrator:
    """`scratch`: an exclusive folder on the disk of the logs. One call at a time."""

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
        """Download all missing segments. Raises Interrupted, StoreUnavailable, ConfigurationError,
        DiskFull, CorruptDataError, LogOfflineError.
        """
        store = self._bucket.store_status.require_store()
        entries = list(cold_only(partition))
        for before, entry in reversed(list(zip([None, *entries], entries, strict=False))):
            self._check_room(entry.size_bytes)
            snapshot = snapshot_before(store, entry, before)
            pieces = _until(stopping, object_pieces(store, entry))
            if not self._attach(partition, entry, pieces, snapshot=snapshot):
                return  # retention or a trim has deleted it and everything below
            log.info(
                "segment rehydrated",
                partition=str(partition),
                base_offset=entry.base_offset,
                size_bytes=entry.size_bytes,
            )

    def _attach(
        self,
        partition: Partition,
        entry: SegmentEntry,
        pieces: Iterator[bytes],
        *,
        snapshot: bytes | None,
    ) -> bool:
        if entry.next_offset > partition.log.first_local_offset:
            raise CorruptDataError(
                f"ends at offset {entry.last_offset}, but the local log begins at "
                f"{partition.log.first_local_offset}",
                file=entry.log_key,
            )
        with rebuilt_segment(
            self._scratch, partition.log, entry, pieces, clock=self._clock, snapshot=snapshot
        ) as rebuilt:
            if entry.modified_ms >= 0:  # compaction and retention use it; else it counts as new
                modified_ns = entry.modified_ms * 1_000_000
                os.utime(rebuilt.files.log, ns=(modified_ns, modified_ns))
            return partition.log.sealed.prepend(
                rebuilt.files, epochs=rebuilt.epochs, crc32c=entry.log_crc32c
            )


def cold_only(partition: Partition) -> Iterator[SegmentEntry]:
    """The segments that are only in the bucket, oldest first."""
    if partition.cold is None:
        return
    local_start = partition.log.first_local_offset
    for entry in partition.cold.entries(partition.log.log_start_offset):
        if entry.base_offset >= local_start:
            return
        yield entry


def has_cold_only(partition: Partition) -> bool:
    """Whether there are segments only in the bucket. Called each round, so it reads a page only if
    the manifest itself does not tell.
    """
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
