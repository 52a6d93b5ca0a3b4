"""Mirrors compaction in the bucket: a compacted local segment replaces the objects it was made
from.

* Compaction replaces segments on local disk first, independently of the store, and leaves a marker
  in the partition's folder. While the marker exists, the bucket may hold the segments from before:
  complete and correct, only larger.
* Segments to replace are found by comparison, so that a crash, a lost response or a store that was
  down only cost another pass. Compaction never merges segments across the point where the cold tier
  ends, or may end, so every local segment below it corresponds to whole entries of the manifest.
* One transition per segment: no manifest version contains half of a replacement.
* In offset order, and within one pass only segments from before it: a segment whose tombstone was
  removed must not be in the bucket while the value that it deleted still is. So a pass ends if
  compaction replaces something meanwhile.
* A local segment only replaces whole entries. One that covers part of an entry belongs to another
  history (an older copy of the folder), and would remove the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile

import structlog

from tierlog.broker.partition import Partition
from tierlog.hot_tier.sealed_segments import SegmentView
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed, UnknownSegment
from tierlog.record_format.segment_entry import SegmentEntry

log = structlog.get_logger(__name__)


def follow_compaction(partition: Partition, *, stopping: Callable[[], bool]) -> None:
    """Replace entries that differ. Raises what uploads and commits raise."""
    sealed = partition.log.sealed
    swap_sequence = sealed.swap_sequence
    for view in partition.log.segments():
        if stopping():
            return
        if view.sealed and view.last_offset < partition.cold_end_offset:
            _follow(partition, view, swap_sequence=swap_sequence)
    sealed.mark_mirrored(swap_sequence=swap_sequence)


def _follow(partition: Partition, view: SegmentView, *, swap_sequence: int) -> None:
    sealed = partition.log.sealed
    with sealed.lock:  # nothing is replaced within
        if sealed.swap_sequence != swap_sequence:
            return  # the segment may be newer than this pass
        try:
            _maybe_replace(partition, view)
        except (UnknownSegment, OffsetTrimmed, CorruptDataError):
            if view.base_offset in partition.log.base_offsets:
                raise  # otherwise retention has deleted it just now


def _maybe_replace(partition: Partition, view: SegmentView) -> None:
    files = partition.log.sealed.prepare_upload(view.base_offset)
    if files.last_offset >= partition.cold_end_offset:
        return
    reached = partition.cold_entries(files.base_offset)
    old = list(takewhile(lambda entry: entry.base_offset <= files.last_offset, reached))
    if not old or (len(old) == 1 and _same(partition, old[0], view)):
        return
    if old[0].base_offset < files.base_offset or old[-1].last_offset > files.last_offset:
        raise CorruptDataError(
            f"has offsets {files.base_offset} to {files.last_offset}, but the bucket has segments "
            f"of offsets {old[0].base_offset} to {old[-1].last_offset}: is this an older copy of "
            "the folder?",
            file=str(files.log),
        )
    entry = partition.replace_uploaded(old, files)
    log.info(
        "compacted segment offloaded",
        partition=str(partition),
        epoch=partition.log.leader_epoch,
        base_offset=entry.base_offset,
        replaced=len(old),
        size_bytes=entry.size_bytes,
    )


def _same(partition: Partition, entry: SegmentEntry, view: SegmentView) -> bool:
    # Last offsets may differ: a local segment ends where the next begins, an entry before a gap.
    there = (entry.base_offset, entry.size_bytes)
    if there != (view.base_offset, view.size_bytes):
        return False
    return entry.log_crc32c == partition.log.sealed.crc32c(view.base_offset)
