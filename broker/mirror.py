"""The bucket follows compaction: a local segment takes the place of the objects it was made of.

* Compaction replaces segments on local disk first, whatever the store is doing, and leaves a mark
  in the partition's folder. While that is there the bucket may hold what was there before: complete
  and true, only longer.
* What has to be replaced is found by comparing, so that a crash, a lost answer or a store that was
  down cost nothing but another look. Groups never reach across where the cold tier ends, or may
  end, so every local segment below stands for whole entries of the manifest.
* One transition a segment: no version of the manifest has half of a replacement.
"""

from __future__ import annotations

from collections.abc import Callable

import structlog

from broker.partition import Partition
from hot_tier.segment_views import SegmentView
from manifest.state import SegmentEntry
from record_format.errors import UnknownSegment

log = structlog.get_logger(__name__)


def follow_compaction(partition: Partition, *, stopping: Callable[[], bool]) -> int:
    """Replace what differs; how many segments. Raises what an upload and a commit raise."""
    cold, replaced = partition.cold, 0
    assert cold is not None, "there is no bucket to follow"
    replacements = partition.log.replacements
    for view in partition.log.segments():
        if stopping():
            return replaced
        if view.sealed and view.last_offset < cold.end_offset:
            replaced += _follow(partition, view)
    partition.log.note_mirrored(replacements=replacements)
    return replaced


def _follow(partition: Partition, view: SegmentView) -> bool:
    """Whether the bucket got another object for this segment."""
    cold = partition.cold
    assert cold is not None
    with partition.log.files_lock:
        try:
            files = partition.log.sealed_segment_files(view.base_offset)
        except UnknownSegment:
            return False  # replaced once more: its mark is there again
        if files.last_offset >= cold.end_offset:
            return False
        old = [
            entry
            for entry in cold.entries(files.base_offset)
            if entry.base_offset <= files.last_offset
        ]
        if not old or (len(old) == 1 and _same(partition, old[0], view)):
            return False
        entry = cold.replace(old, files)
    log.info(
        "compacted segment offloaded",
        partition=str(partition),
        epoch=partition.log.leader_epoch,
        base_offset=entry.base_offset,
        replaced=len(old),
        size_bytes=entry.size_bytes,
    )
    return True


def _same(partition: Partition, entry: SegmentEntry, view: SegmentView) -> bool:
    # Not by their ends: a local segment ends where the next begins, an entry where a gap does.
    there = (entry.base_offset, entry.size_bytes)
    if there != (view.base_offset, view.size_bytes):
        return False
    return entry.log_crc32c == partition.log.segment_crc32c(view.base_offset)
