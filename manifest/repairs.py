"""Changes of a manifest whose objects were damaged: other objects for the same offsets, with the
same records or with those that are left, or a gap.

Like all transitions: pure, checked before and after, and returning the same object if there is
nothing to do. Neither counts as compaction: `compacted_before` stays, so that a hole elsewhere is
still a hole.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec.structs import replace

from manifest.invariants import InvalidTransition, require, require_step, where
from manifest.paging import find_entry
from manifest.state import Manifest, OffsetGap, SegmentEntry
from manifest.transitions import PageSource, replace_run


def replace_objects(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """The same records under other objects. Raises InvalidTransition if the log's bytes differ, or
    if `old` is no longer what the manifest names. If it was trimmed away meanwhile, nothing
    happens.
    """
    require(manifest)
    if not new.same_bytes(old):
        raise InvalidTransition(f"{where(manifest)}: segment {new.base_offset} has other bytes")
    return _in_its_place(manifest, old, new, pages=pages, now_ms=now_ms)


def replace_with_readable(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """The records of `old` that can still be read, under other objects: the batches of `new` have
    all its offsets. Else as `replace_objects`.
    """
    require(manifest)
    spans = (new.base_offset, new.last_offset)
    if spans != (old.base_offset, old.last_offset) or new.record_count > old.record_count:
        raise InvalidTransition(
            f"{where(manifest)}: segment {spans} is not what is left of segment {old.base_offset}"
        )
    return _in_its_place(manifest, old, new, pages=pages, now_ms=now_ms)


def _in_its_place(
    manifest: Manifest, old: SegmentEntry, new: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    if old.last_offset < manifest.log_start_offset:
        return manifest
    after = replace_run(manifest, [old], [new], pages=pages, now_ms=now_ms)
    return after if after is manifest else require_step(manifest, after)


def drop_lost_segment(
    manifest: Manifest, lost: SegmentEntry, *, pages: PageSource, now_ms: int
) -> Manifest:
    """A segment that nobody has any more leaves the manifest; its offsets become a gap.

    If it is not there under that name (already dropped, swapped or trimmed), nothing happens.
    """
    require(manifest)
    there = find_entry(manifest, lost.base_offset, pages=pages)
    if there is None or there.log_key != lost.log_key:
        return manifest
    after = replace_run(manifest, [lost], [], pages=pages, now_ms=now_ms)
    gaps = _merged([*manifest.gaps, OffsetGap(lost.base_offset, lost.next_offset)])
    return require_step(manifest, replace(after, gaps=gaps))


def _merged(gaps: Sequence[OffsetGap]) -> tuple[OffsetGap, ...]:
    """In order; those that touch are one."""
    merged: list[OffsetGap] = []
    for gap in sorted(gaps, key=lambda one: one.start_offset):
        if merged and merged[-1].end_offset >= gap.start_offset:
            last = merged.pop()
            gap = OffsetGap(last.start_offset, max(last.end_offset, gap.end_offset))
        merged.append(gap)
    return tuple(merged)
