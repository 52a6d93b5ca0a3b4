"""Transitions that repair a manifest with damaged objects: they replace a segment's objects by ones
with the same records or with those that can still be read, or the segment by a gap.

Like all transitions they are pure, check invariants before and after, and return the same object if
there is nothing to do. They do not advance `compacted_before`, which would also excuse offsets that
are missing elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from tierlog.manifest.invariants import InvalidTransition, require, require_step, where
from tierlog.manifest.paging import find_entry
from tierlog.manifest.state import Manifest, OffsetGap
from tierlog.manifest.transitions import PageSource, replace_run
from tierlog.record_format.segment_entry import SegmentEntry


def replace_objects(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """Replace a segment's objects by others with the same log bytes; no change if it was trimmed.

    Raises InvalidTransition if the bytes differ, or if `old` is no longer in the manifest.
    """
    require(manifest)
    if not new.same_bytes(old):
        raise InvalidTransition(f"{where(manifest)}: segment {new.base_offset} has different bytes")
    return _replace_entry(manifest, old, new, pages=pages, now_ms=now_ms)


def replace_with_readable(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """`replace_objects`, but `new` has only the records of `old` that can still be read.

    Its batches must span the same offsets.
    """
    require(manifest)
    spans = (new.base_offset, new.last_offset)
    if spans != (old.base_offset, old.last_offset) or new.record_count > old.record_count:
        raise InvalidTransition(
            f"{where(manifest)}: segment {spans} does not match what is left of {old.base_offset}"
        )
    return _replace_entry(manifest, old, new, pages=pages, now_ms=now_ms)


def _replace_entry(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    if old.last_offset < manifest.log_start_offset:
        return manifest
    after = replace_run(manifest, [old], [new], pages=pages, now_ms=now_ms)
    return after if after is manifest else require_step(manifest, after)


def drop_lost_segment(
    manifest: Manifest, lost: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """Replace a segment that is lost in both tiers by a gap.

    Nothing changes if its log object is no longer in the manifest (dropped, replaced or trimmed).
    """
    require(manifest)
    there = find_entry(manifest, lost.base_offset, pages=pages)
    if there is None or there.log_key != lost.log_key:
        return manifest
    after = replace_run(manifest, [lost], [], pages=pages, now_ms=now_ms)
    gaps = _merged([*manifest.gaps, OffsetGap(lost.base_offset, lost.next_offset)])
    return require_step(manifest, replace(after, gaps=gaps))


def _merged(gaps: Sequence[OffsetGap]) -> tuple[OffsetGap, ...]:
    """In offset order, with adjacent gaps merged."""
    merged: list[OffsetGap] = []
    for gap in sorted(gaps, key=lambda one: one.start_offset):
        if merged and merged[-1].end_offset >= gap.start_offset:
            last = merged.pop()
            gap = OffsetGap(last.start_offset, max(last.end_offset, gap.end_offset))
        merged.append(gap)
    return tuple(merged)
