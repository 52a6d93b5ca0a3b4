"""Decides which neighbouring segments in the bucket are merged into one. Pure.

* A merged segment is one that the log could have rolled: within `segment.bytes`, and `segment.ms`
  by its timestamps. Since retention deletes whole segments, it also spans at most a tenth of
  `retention.ms`, and has at most a tenth of `retention.bytes`.
* It begins where the first begins and ends where the last ends, with no offset missing in between:
  neither a gap nor what compaction removed is within it.
* A segment of unknown age is left alone: it would make the others as old.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET
from tierlog.record_format.segment_entry import SegmentEntry

SEGMENTS_MAX: Final = 1024
"""At most so many become one, so that a merge ends in time; they may be merged again."""

RETENTION_SHARE: Final = 10


class MergeLimits(NamedTuple):
    """A merged segment has at most `max_bytes` and spans at most `max_span_ms`; one that has
    `enough_bytes` is not merged any further.
    """

    max_bytes: int
    max_span_ms: int
    enough_bytes: int


class Run(NamedTuple):
    """Segments to merge, if they are several. `is_whole`: nothing can follow in it."""

    entries: tuple[SegmentEntry, ...]
    is_whole: bool


def limits_of(config: LogConfig, *, enough_bytes: int | None = None) -> MergeLimits:
    """`enough_bytes`: that of a merged segment unless it is given."""
    max_bytes, max_span_ms = config.segment_bytes, config.segment_ms
    if config.deletes and config.retention_bytes >= 0:
        max_bytes = min(max_bytes, config.retention_bytes // RETENTION_SHARE)
    if config.deletes and config.retention_ms >= 0:
        max_span_ms = min(max_span_ms, config.retention_ms // RETENTION_SHARE)
    enough = max_bytes if enough_bytes is None else min(max_bytes, enough_bytes)
    return MergeLimits(max_bytes, max_span_ms, enough)


def plan_runs(entries: Iterable[SegmentEntry], limits: MergeLimits) -> Iterator[Run]:
    """All entries, in order, as runs that are as long as the limits allow."""
    run: list[SegmentEntry] = []
    extent: _Extent | None = None
    for entry in entries:
        added = _extent_of(entry)
        wider = _joined(extent, added, limits)
        if wider is None and run:
            yield Run(tuple(run), is_whole=True)
            run = []
        run.append(entry)
        extent = wider or added
    if run:
        is_whole = extent is None or extent.size_bytes >= limits.enough_bytes
        yield Run(tuple(run), is_whole)


class _Extent(NamedTuple):
    segments: int
    base_offset: int
    next_offset: int
    size_bytes: int
    oldest_ms: int
    newest_ms: int


def _extent_of(entry: SegmentEntry) -> _Extent | None:
    """None if its age is not known."""
    newest_ms = entry.age_timestamp
    oldest_ms = entry.min_timestamp if entry.max_timestamp >= 0 else newest_ms
    if oldest_ms is None or min(oldest_ms, newest_ms) < 0:
        return None
    offsets = entry.base_offset, entry.next_offset
    return _Extent(1, *offsets, entry.size_bytes, oldest_ms, newest_ms)


def _joined(left: _Extent | None, right: _Extent | None, limits: MergeLimits) -> _Extent | None:
    """None if they are not to be merged."""
    if left is None or right is None or left.next_offset != right.base_offset:
        return None
    both = _Extent(
        left.segments + right.segments,
        left.base_offset,
        right.next_offset,
        left.size_bytes + right.size_bytes,
        min(left.oldest_ms, right.oldest_ms),
        max(left.newest_ms, right.newest_ms),
    )
    fits = (
        both.segments <= SEGMENTS_MAX
        and both.size_bytes <= limits.max_bytes
        and both.newest_ms - both.oldest_ms <= limits.max_span_ms
        and both.next_offset - 1 - both.base_offset <= MAX_RELATIVE_OFFSET
        and max(left.size_bytes, right.size_bytes) < limits.enough_bytes
    )
    return both if fits else None
