"""Turns a segment that the manifest names back into Kafka's files, in a scratch folder of its own.

* Its bytes must have the manifest's CRC-32C (`verified_pieces`), or be its salvaged batches
  (`ObjectSalvage` of `repair`).
* Apart from those, only the producer snapshot before it is taken from the bucket: the folder is
  opened as after a crash, which checks every batch and rebuilds the indexes.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from tierlog.broker.partition.partition import Partition
from tierlog.cold_tier.index_bundle import ParsedBundle
from tierlog.cold_tier.merged_segment import check_log_crc
from tierlog.cold_tier.ranged_reader import piece_ranges, read_range
from tierlog.cold_tier.segment_lookup import load_bundle
from tierlog.host.disk import disk_full, is_disk_full
from tierlog.hot_tier import closed_log
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.log_config import LogConfig
from tierlog.hot_tier.log_folder import LOG, TRANSACTION_INDEX, path_of
from tierlog.hot_tier.recovery_scan import OpenRequest
from tierlog.hot_tier.segment import SegmentFiles
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import EpochEntry
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.segment_entry import SegmentEntry


class RebuiltSegment(NamedTuple):
    """A sealed segment's files, synced, and the leader epochs of its records."""

    files: SegmentFiles
    epochs: tuple[EpochEntry, ...]


@contextmanager
def rebuilt_segment(
    scratch: Path,
    partition: Partition,
    entry: SegmentEntry,
    pieces: Iterable[bytes],
    *,
    clock: Callable[[], int],
    snapshot: bytes | None = None,
) -> Iterator[RebuiltSegment]:
    """Rebuild `entry`, of this partition, from `pieces`; `scratch` is removed afterwards.

    `snapshot`: the producer snapshot before it. Raises CorruptDataError, DiskFull, LogOfflineError,
    OSError.
    """
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    try:
        closed_log.replace_with_empty(scratch, entry.base_offset, snapshot=snapshot)
        _write(path_of(scratch, entry.base_offset, LOG), pieces)
        opened = _opened(scratch, partition, entry, clock)
        try:
            opened.roll()
            yield RebuiltSegment(opened.sealed.prepare_upload(entry.base_offset), opened.epochs)
        finally:
            opened.close()
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def with_producers_of(files: SegmentFiles, bundle: ParsedBundle) -> SegmentFiles:
    """`files`, with the producer and transaction state from before the loss."""
    if bundle.producer_snapshot:
        _write(files.snapshot, [bundle.producer_snapshot])
    txnindex = path_of(files.log.parent, files.base_offset, TRANSACTION_INDEX)
    _write(txnindex, [bundle.txn_index])
    return replace(files, txnindex=txnindex)


def object_pieces(store: ObjectStore, entry: SegmentEntry) -> Iterator[bytes]:
    """The bytes of an entry's `.log` object. Raises StoreUnavailable, MissingObject, and at the end
    CorruptDataError.
    """
    ranges = piece_ranges(entry.size_bytes)
    return verified_pieces((read_range(store, entry.log_key, *each) for each in ranges), entry)


def verified_pieces(pieces: Iterable[bytes], entry: SegmentEntry) -> Iterator[bytes]:
    """Yield the pieces; raise CorruptDataError at the end unless the manifest's CRC-32C matches."""
    crc = 0
    for piece in pieces:
        crc = crc32c_of(piece, crc)
        yield piece
    check_log_crc(entry, crc)


def snapshot_before(
    store: ObjectStore, entry: SegmentEntry, before: SegmentEntry | None
) -> bytes | None:
    """The producer snapshot of the segment before `entry`: a transaction that is aborted in `entry`
    may have begun there. None if that is damaged too. Raises StoreUnavailable.
    """
    if before is None or before.next_offset != entry.base_offset:
        return None
    bundle = indexes_of(store, before)
    return bundle.producer_snapshot or None if bundle else None


def indexes_of(store: ObjectStore, entry: SegmentEntry) -> ParsedBundle | None:
    """The entry's indexes; None if they are damaged. Raises StoreUnavailable."""
    try:
        return load_bundle(store, entry)
    except CorruptDataError:
        return None


def _write(path: Path, pieces: Iterable[bytes]) -> None:
    try:
        with path.open("wb") as file:
            file.writelines(pieces)
    except OSError as error:
        if not is_disk_full(error):
            raise
        raise disk_full(path, error) from error


def _opened(
    scratch: Path, partition: Partition, entry: SegmentEntry, clock: Callable[[], int]
) -> PartitionLog:
    whole = {"segment.bytes": 2**31 - 1, "segment.index.bytes": 2**31 - 8}
    opened = PartitionLog.open(
        scratch,
        topic=partition.topic,
        partition=partition.number,
        topic_id=partition.topic_id,
        config=LogConfig.parse({**partition.config.overrides, **whole}),
        clock=clock,
        request=OpenRequest(clean=False, log_start_offset=entry.base_offset),
    )
    cut = opened.recovery
    if cut.truncate_reason or not entry.base_offset < opened.log_end_offset <= entry.next_offset:
        opened.close()
        detail = cut.truncate_reason or f"ends at offset {opened.log_end_offset - 1}"
        raise CorruptDataError(detail, file=entry.log_key, position=cut.truncated_position or None)
    return opened
