"""Detects holes: offsets between two local segments that neither holds, because a file was lost.

| the hole                                         | action                                        |
|--------------------------------------------------|-----------------------------------------------|
| is explained: by compaction, now or earlier, by  | none: readers skip it                         |
| a gap in the manifest, or by the log start       |                                               |
| is below the bucket's end                        | delete the local segments before it, once the |
|                                                  | bucket mirrors compaction: the bucket is read |
| is above the bucket's end                        | report it, and upload nothing after it until  |
|                                                  | it is repaired (the copier calls `check`)     |
| is in a log without a bucket, or one that is not | report it until it is repaired                |
| offloaded any more                               |                                               |

* Startup trusts file names, because reading ten thousand files takes too long. It only compares
  them with the entries in the manifest itself, and counts them against its pages (`lost_before`),
  also in compacted logs. Each segment is checked once in the background, a few per round, and
  before it is uploaded.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Final
from weakref import WeakKeyDictionary

import structlog

from tierlog.broker.partition.checkpoints import CompactionOffsets
from tierlog.broker.partition.partition import Partition
from tierlog.hot_tier.log import PartitionLog
from tierlog.hot_tier.sealed_segments import Gap
from tierlog.manifest.invariants import uncovered
from tierlog.manifest.state import Manifest, PageRef, UnwrittenPage
from tierlog.record_format.errors import CorruptDataError, OffsetTrimmed, UnknownSegment

log = structlog.get_logger(__name__)

SEGMENTS_PER_ROUND: Final = 256


class Holes:
    """One thread calls `check_next`."""

    def __init__(self, compaction_offsets: CompactionOffsets) -> None:
        self._compaction_offsets = compaction_offsets
        self._checked_before: WeakKeyDictionary[Partition, int] = WeakKeyDictionary()
        # By the segment before the hole. Replaced as a whole, because other threads read it.
        self._found: WeakKeyDictionary[Partition, dict[int, Gap]] = WeakKeyDictionary()

    def find_hole(self, partition: Partition, base_offset: int) -> Gap | None:
        """The hole after a sealed segment; None if there is none, or it is explained."""
        if partition.config.compacts:
            return None
        try:
            gap = partition.upkeep.gap_after(base_offset)
        except (UnknownSegment, OffsetTrimmed, CorruptDataError):
            return None  # deleted meanwhile, or corrupt, which its readers report
        if gap is None or self._is_explained(partition, gap):
            return None
        return gap

    def _is_explained(self, partition: Partition, gap: Gap) -> bool:
        place = (partition.topic, partition.number)
        start = max(partition.log_start_offset, self._compaction_offsets.cleaned_before(place))
        manifest = partition.manifest
        if manifest is None or start >= gap.base_offset:
            return start >= gap.base_offset
        return uncovered(manifest, max(start, gap.next_offset), gap.base_offset) is None

    def check(self, partition: Partition, base_offset: int) -> None:
        """Raise CorruptDataError if there is a hole after the segment that is to be uploaded next,
        because the missing records must not count as uploaded, or before it, because no manifest
        would accept it.
        """
        gap = _before(partition, base_offset) or self.find_hole(partition, base_offset)
        if gap is not None:
            raise CorruptDataError(missing(gap), file=str(partition.folder))

    def check_next(self, partition: Partition) -> None:
        """Check the next segments that were not checked yet."""
        if partition.is_defunct or not partition.is_claimed:
            return  # the bucket may know of gaps that are not known here yet
        self._forget_repaired(partition)
        start = self._checked_before.get(partition, 0)
        unchecked = [one for one in partition.upkeep.readable_ranges() if one[0] >= start]
        for base_offset, next_offset in unchecked[:SEGMENTS_PER_ROUND]:
            gap = self.find_hole(partition, base_offset)
            if gap is not None and not self._act(partition, base_offset, gap):
                return
            self._checked_before[partition] = next_offset

    def _act(self, partition: Partition, base_offset: int, gap: Gap) -> bool:
        """Returns False if it has to wait until the bucket mirrors compaction."""
        in_bucket = gap.base_offset <= partition.cold_end_offset
        if in_bucket and not partition.is_mirrored:
            return False
        log.error("local segment is missing", partition=str(partition), reason=missing(gap))
        if in_bucket:
            partition.upkeep.delete_local(gap.base_offset)
            log.warning(
                "local segments deleted: the bucket is read instead",
                partition=str(partition),
                before_offset=gap.base_offset,
            )
        else:
            self._keep(partition, {**self._found.get(partition, {}), base_offset: gap})
        return True

    def _forget_repaired(self, partition: Partition) -> None:
        found = self._found.get(partition, {})
        still = {base: gap for base, gap in found.items() if self.find_hole(partition, base) == gap}
        if still != found:
            self._keep(partition, still)

    def _keep(self, partition: Partition, gaps: dict[int, Gap]) -> None:
        found = WeakKeyDictionary(self._found)
        found[partition] = gaps
        self._found = found

    def report(self) -> dict[Partition, str]:
        """Partitions with holes that are not offloaded, and why. The copier reports the others."""
        return {
            partition: missing(there[0])
            for partition, gaps in self._found.items()
            if not partition.is_defunct
            and not partition.offloads
            and (there := [gap for gap in gaps.values() if not self._is_explained(partition, gap)])
        }


def _before(partition: Partition, base_offset: int) -> Gap | None:
    """The hole between the bucket's end and a local segment."""
    manifest = partition.manifest
    if manifest is None:
        return None
    start = max(manifest.end_offset, partition.log_start_offset)  # a trim may be ahead of it
    lost = uncovered(manifest, start, base_offset)
    return None if lost is None else Gap(*lost)


def lost_before(opened: PartitionLog, manifest: Manifest | None) -> int | None:
    """The offset below which the bucket has to be read, because a local file is missing that begins
    where an entry of the manifest does; None if all files exist.

    Once the bucket mirrors compaction, each entry corresponds to one segment. Needs no request, and
    reads files only if there are fewer of them than a page has entries. Raises OSError.
    """
    if manifest is None or not opened.sealed.mirrored:
        return None
    bases = frozenset(opened.base_offsets)
    here = range(opened.first_local_offset, opened.active_base_offset)
    for entry in reversed(manifest.segments):
        if entry.base_offset in here and entry.base_offset not in bases:
            return entry.next_offset
    for page in reversed(manifest.pages):
        if page.base_offset in here:
            is_plain = page.base_offset >= manifest.compacted_before
            lost = _lost_before_end_of(opened, page, is_plain=is_plain)
            if lost is not None:
                return lost
    return None


def _lost_before_end_of(
    opened: PartitionLog, page: PageRef | UnwrittenPage, *, is_plain: bool
) -> int | None:
    sealed = opened.base_offsets[:-1]
    first = bisect_left(sealed, page.base_offset)
    end = bisect_left(sealed, page.next_offset)
    if end - first >= page.entry_count:
        return None
    if not is_plain:  # compaction leaves holes too: nothing distinguishes them
        return page.next_offset
    before = sealed[max(0, first - 1) : end]
    gaps = (opened.sealed.gap_after(base_offset) for base_offset in reversed(before))
    return next((gap.base_offset for gap in gaps if gap is not None), None)


def missing(gap: Gap) -> str:
    return (
        f"offsets {gap.next_offset} to {gap.base_offset - 1} are missing between two segments: a "
        "file was lost"
    )
