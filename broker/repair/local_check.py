"""Checks the local segments of one partition, and that the tiers agree where both have data.

* Shallow: borders and sizes, and that the files are there. Deep: every batch of every local
  segment, that they reach to the next segment where nothing explains a hole (`holes`), and its
  CRC-32C against the manifest's.
* The log stays in use while it is checked. A segment that was deleted meanwhile is not a finding,
  nor is one that compaction replaced, here and in the bucket, while it was looked at: what differs
  is looked at again, against the manifest then in force. Of the active segment only what is flushed
  is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Final, NamedTuple

from broker.holes import missing
from broker.partition import Partition
from cold_tier.segment_scan import scan_segment
from hot_tier.segment_gaps import Gap
from hot_tier.segment_views import SegmentView
from manifest.invariants import uncovered
from manifest.state import Manifest, SegmentEntry
from record_format.errors import CorruptDataError
from record_format.findings import Findings, ProblemKind

LOOKS: Final = 3  # a busy compactor could go on for ever

InForce = Callable[[SegmentEntry], SegmentEntry | None]
"""What the manifest in force has now where that entry was."""

FindHole = Callable[[Partition, int], Gap | None]
"""The hole behind a sealed segment that nothing explains: see `holes`."""


class _Problem(NamedTuple):
    kind: ProblemKind
    detail: object


def as_it_was(entry: SegmentEntry) -> SegmentEntry:
    """There is no bucket to ask."""
    return entry


def check_local(
    partition: Partition,
    manifest: Manifest | None,
    entries: Sequence[SegmentEntry],
    *,
    deep: bool,
    find_hole: FindHole,
    in_force: InForce = as_it_was,
) -> Findings:
    """`manifest` and `entries` as the bucket had them."""
    found = Findings(partition.number)
    views = partition.log.segments()
    _check_borders(partition, views, manifest, found)
    cold = {entry.base_offset: entry for entry in entries}
    for view in views:
        found.checked.local_segments += 1
        entry = cold.get(view.base_offset)
        _check_view(partition, view, entry, found, deep=deep, in_force=in_force)
        if deep and view.sealed and (hole := find_hole(partition, view.base_offset)) is not None:
            at, file = view.base_offset, str(view.path)
            found.add(ProblemKind.GAP, missing(hole), file=file, base_offset=at)
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
            detail = (
                f"ends at offset {left.last_offset}, but the next begins at {right.base_offset}"
            )
            found.add(kind, detail, file=str(left.path), base_offset=left.base_offset)
    local_start, covered = views[0].base_offset, partition.log.log_start_offset
    if partition.cold is not None:
        # As it is now: what left the disk since `manifest` was loaded was in the bucket by then.
        manifest = partition.cold.manifest or manifest
    if manifest is not None:
        covered = max(manifest.end_offset, covered)
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
    in_force: InForce,
) -> None:
    """What is wrong counts only where a fresh look at both sides shows the same two."""
    for look in range(1, LOOKS + 1):
        problem = _problem(partition, view, entry, found, deep=deep)
        if problem is None:
            return
        now = next(
            (one for one in partition.log.segments() if one.base_offset == view.base_offset), None
        )
        if now is None:
            return  # retention let it go meanwhile
        entry_now = in_force(entry) if entry is not None else None
        if look == LOOKS or (_is_same(view, now) and entry_now == entry):
            at, file = view.base_offset, str(view.path)
            found.add(problem.kind, problem.detail, file=file, base_offset=at)
            return
        view, entry = now, entry_now


def _is_same(view: SegmentView, now: SegmentView) -> bool:
    return (view.last_offset, view.size_bytes, view.path) == (
        now.last_offset,
        now.size_bytes,
        now.path,
    )


def is_lost(partition: Partition, view: SegmentView) -> bool:
    """Whether its file is gone, and compaction is not just putting another in its place."""
    before = partition.log.sealed.swap_sequence
    is_missing = not view.path.exists()
    return is_missing and before % 2 == 0 and before == partition.log.sealed.swap_sequence


def is_corrupt(partition: Partition, view: SegmentView, entry: SegmentEntry | None) -> bool:
    """Whether its bytes fail their check, or are not those of the bucket's entry that begins
    there.
    """
    return _problem(partition, view, entry, Findings(partition.number), deep=True) is not None


def _problem(
    partition: Partition,
    view: SegmentView,
    entry: SegmentEntry | None,
    found: Findings,
    *,
    deep: bool,
) -> _Problem | None:
    # Between a swap of compaction's and its commit the bucket has what was there before.
    comparable = (
        entry is not None
        and view.sealed
        and entry.base_offset == view.base_offset
        and entry.last_offset == view.last_offset
        and partition.log.sealed.mirrored
    )
    if entry is not None and comparable and entry.size_bytes != view.size_bytes:
        detail = f"{view.size_bytes} bytes here, {entry.size_bytes} in the manifest"
        return _Problem(ProblemKind.TIERS_DIFFER, detail)
    lost = _Problem(ProblemKind.SEGMENT_CORRUPT, "the file is missing")
    if not deep:
        return lost if is_lost(partition, view) else None
    size_bytes = partition.log.flushed_bytes(view)
    try:
        table = scan_segment(view.path, base_offset=view.base_offset, size_bytes=size_bytes)
    except FileNotFoundError:
        return lost if is_lost(partition, view) else None
    except CorruptDataError as bad:
        return _Problem(ProblemKind.SEGMENT_CORRUPT, bad)
    found.checked.records += table.record_count
    found.checked.read_bytes += size_bytes
    if entry is not None and comparable and table.log_crc32c != entry.log_crc32c:
        detail = f"CRC-32C {table.log_crc32c:08x} here, {entry.log_crc32c:08x} in the manifest"
        return _Problem(ProblemKind.TIERS_DIFFER, detail)
    return None
