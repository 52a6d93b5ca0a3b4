"""Checks the local segments of one partition, and that the tiers agree where both have data.

* Shallow: offsets, sizes, and that the files exist. Deep: every batch of every local segment, that
  there is no unexplained hole before the next segment (`holes`), and the CRC-32C against the
  manifest's.
* The log stays in use during the check. A segment that is deleted meanwhile is not a finding, nor
  is one that compaction replaces, here and in the bucket: a difference is checked again, against
  the manifest then in force. Only the flushed part of the active segment is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from tierlog.broker.partition.holes import missing
from tierlog.broker.partition.partition import Partition
from tierlog.cold_tier.segment_check import scan_segment
from tierlog.hot_tier.sealed_segments import Gap, SegmentView
from tierlog.manifest.invariants import uncovered
from tierlog.manifest.state import Manifest
from tierlog.record_format.errors import CorruptDataError
from tierlog.record_format.findings import Findings, ProblemKind
from tierlog.record_format.segment_entry import SegmentEntry

ATTEMPTS: Final = 3  # a busy compactor could keep changing a segment

InForce = Callable[[SegmentEntry], SegmentEntry | None]
"""Returns the manifest's present entry for the offsets of an earlier one."""

FindHole = Callable[[Partition, int], Gap | None]
"""Returns the unexplained hole after a sealed segment: see `holes`."""


class _Problem(NamedTuple):
    kind: ProblemKind
    detail: object


def check_local(
    partition: Partition,
    manifest: Manifest | None,
    entries: Sequence[SegmentEntry],
    *,
    deep: bool,
    find_hole: FindHole,
    in_force: InForce = lambda entry: entry,
) -> Findings:
    """Check against `manifest` and `entries`, as they were read from the bucket."""
    found = Findings(partition.number)
    views = partition.local_segments()
    _check_seam(partition, views, manifest, found)
    cold = {entry.base_offset: entry for entry in entries}
    for view in views:
        found.checked.local_segments += 1
        entry = cold.get(view.base_offset)
        _check_view(partition, view, entry, found, deep=deep, in_force=in_force)
        if deep and view.sealed and (hole := find_hole(partition, view.base_offset)) is not None:
            at, file = view.base_offset, str(view.path)
            found.add_problem(ProblemKind.GAP, missing(hole), file=file, base_offset=at)
    return found


def _check_seam(
    partition: Partition,
    views: Sequence[SegmentView],
    manifest: Manifest | None,
    found: Findings,
) -> None:
    local_start, covered = views[0].base_offset, partition.log_start_offset
    # The latest one: it has every segment that left the disk since `manifest` was loaded.
    manifest = partition.manifest or manifest
    if manifest is not None:
        covered = max(manifest.end_offset, covered)
    hole = (covered, local_start) if covered < local_start else None
    if manifest is not None and hole is not None:
        hole = uncovered(manifest, *hole)
    if hole is not None:
        detail = f"offsets {hole[0]} to {hole[1] - 1} are in neither tier"
        found.add_problem(ProblemKind.GAP, detail, file=str(views[0].path))


def _check_view(
    partition: Partition,
    view: SegmentView,
    entry: SegmentEntry | None,
    found: Findings,
    *,
    deep: bool,
    in_force: InForce,
) -> None:
    """A problem counts only if neither the segment nor its entry has changed meanwhile."""
    for attempt in range(1, ATTEMPTS + 1):
        problem = _problem(partition, view, entry, found, deep=deep)
        if problem is None:
            return
        now = next(
            (one for one in partition.local_segments() if one.base_offset == view.base_offset), None
        )
        if now is None:
            return  # deleted by retention meanwhile
        entry_now = in_force(entry) if entry is not None else None
        if attempt == ATTEMPTS or (_is_same(view, now) and entry_now == entry):
            at, file = view.base_offset, str(view.path)
            found.add_problem(problem.kind, problem.detail, file=file, base_offset=at)
            return
        view, entry = now, entry_now


def _is_same(view: SegmentView, now: SegmentView) -> bool:
    return (view.last_offset, view.size_bytes, view.path) == (
        now.last_offset,
        now.size_bytes,
        now.path,
    )


def is_corrupt(partition: Partition, view: SegmentView, entry: SegmentEntry | None) -> bool:
    """Whether the segment fails its check, or differs from the bucket's entry at its offset."""
    return _problem(partition, view, entry, Findings(partition.number), deep=True) is not None


def _problem(
    partition: Partition,
    view: SegmentView,
    entry: SegmentEntry | None,
    found: Findings,
    *,
    deep: bool,
) -> _Problem | None:
    # Between compaction's swap and the commit, the bucket still has the old segment.
    comparable = (
        entry is not None
        and view.sealed
        and entry.base_offset == view.base_offset
        and entry.last_offset == view.last_offset
        and partition.is_mirrored
    )
    if entry is not None and comparable and entry.size_bytes != view.size_bytes:
        detail = f"{view.size_bytes} bytes here, {entry.size_bytes} in the manifest"
        return _Problem(ProblemKind.TIERS_DIFFER, detail)
    lost = _Problem(ProblemKind.SEGMENT_CORRUPT, "the file is missing")
    if not deep:
        return lost if partition.upkeep.is_lost(view) else None
    size_bytes = partition.upkeep.readable_bytes(view)
    try:
        table = scan_segment(view.path, base_offset=view.base_offset, size_bytes=size_bytes)
    except FileNotFoundError:
        return lost if partition.upkeep.is_lost(view) else None
    except CorruptDataError as bad:
        return _Problem(ProblemKind.SEGMENT_CORRUPT, bad)
    found.checked.records += table.record_count
    found.checked.read_bytes += size_bytes
    if entry is not None and comparable and table.log_crc32c != entry.log_crc32c:
        detail = f"CRC-32C {table.log_crc32c:08x} here, {entry.log_crc32c:08x} in the manifest"
        return _Problem(ProblemKind.TIERS_DIFFER, detail)
    return None
