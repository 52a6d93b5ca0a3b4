"""Checks the local segments of one partition, and that both tiers say the same where both speak.

* Shallow: borders and sizes. Deep: every batch of every local segment, and its CRC-32C against the
  manifest's.
* The log goes on while it is checked. A segment that went meanwhile is no finding; of the active
  one only what is flushed is read.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from broker.partition import Partition
from cold_tier.segment_scan import scan_segment
from hot_tier.segment_views import SegmentView
from manifest.invariants import uncovered
from manifest.state import Manifest, SegmentEntry
from record_format.errors import CorruptDataError
from record_format.findings import Findings, ProblemKind


def check_local(
    partition: Partition,
    manifest: Manifest | None,
    entries: Sequence[SegmentEntry],
    *,
    deep: bool,
) -> Findings:
    """`manifest` and `entries` as the bucket has them."""
    found = Findings(partition.number)
    views = partition.log.segments()
    _check_borders(partition, views, manifest, found)
    cold = {entry.base_offset: entry for entry in entries}
    for view in views:
        found.checked.local_segments += 1
        _check_view(partition, view, cold.get(view.base_offset), found, deep=deep)
    return found


def _check_borders(
    partition: Partition,
    views: Sequence[SegmentView],
    manifest: Manifest | None,
    found: Findings,
) -> None:
    for left, right in pairwise(views):
        if left.last_offset + 1 != right.base_offset:
            kind = ProblemKind.GAP if left.last_offset < right.base_offset else ProblemKind.OVERLAP
            detail = f"ends in offset {left.last_offset}, the next begins at {right.base_offset}"
            found.add(kind, detail, file=str(left.path), base_offset=left.base_offset)
    local_start, log_start = views[0].base_offset, partition.log.log_start_offset
    if manifest is None:
        covered = log_start
    else:
        covered = max(manifest.end_offset, log_start)
    hole = (covered, local_start) if covered < local_start else None
    if manifest is not None and hole is not None:
        hole = uncovered(manifest, *hole)
    if hole is not None:
        detail = f"offsets {hole[0]} to {hole[1] - 1} are in neither tier"
        found.add(ProblemKind.GAP, detail, file=str(views[0].path))


def _check_view(
    partition: Partition,
    view: SegmentView,
    entry: SegmentEntry | None,
    found: Findings,
    *,
    deep: bool,
) -> None:
    # Between a swap of compaction's and its commit the bucket has what was there before.
    comparable = (
        entry is not None
        and view.sealed
        and entry.last_offset == view.last_offset
        and partition.log.mirrored
    )
    if entry is not None and comparable and entry.size_bytes != view.size_bytes:
        detail = f"{view.size_bytes} bytes here, {entry.size_bytes} in the manifest"
        _add(found, ProblemKind.TIERS_DIFFER, detail, view)
        return
    if not deep:
        return
    size_bytes = partition.log.active_flushed_bytes if view.active else view.size_bytes
    try:
        table = scan_segment(view.path, base_offset=view.base_offset, size_bytes=size_bytes)
    except FileNotFoundError:
        return  # retention let it go meanwhile
    except CorruptDataError as bad:
        _add(found, ProblemKind.SEGMENT_CORRUPT, bad, view)
        return
    found.checked.records += table.record_count
    found.checked.read_bytes += size_bytes
    if entry is not None and comparable and table.log_crc32c != entry.log_crc32c:
        detail = f"CRC-32C {table.log_crc32c:08x} here, {entry.log_crc32c:08x} in the manifest"
        _add(found, ProblemKind.TIERS_DIFFER, detail, view)


def _add(found: Findings, kind: ProblemKind, detail: object, view: SegmentView) -> None:
    found.add(kind, detail, file=str(view.path), base_offset=view.base_offset)
