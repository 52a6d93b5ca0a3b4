"""Missing offsets between two segments, found by batch headers alone.

A crash can keep a later file and lose the end of an earlier one, and files can be lost; compaction
leaves the same picture. The folder alone does not tell which; the recovery point does, or whether
the log was ever compacted.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from tierlog.hot_tier.batch_walk import headers_of
from tierlog.hot_tier.closed_log import base_offsets
from tierlog.hot_tier.file_names import LOG, path_of
from tierlog.hot_tier.log_reader import with_index_rebuild
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.segment import Segment
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.record_format.errors import CorruptBatch, eio_as


class Gap(NamedTuple):
    """A segment ends at `next_offset`, and the one after it begins at a higher `base_offset`."""

    next_offset: int
    base_offset: int


def first_gap(folder: Path) -> Gap | None:
    """The first gap between two segments; skips segments with corrupt bytes. Raises OSError."""
    for base_offset, following in pairwise(base_offsets(folder)):
        next_offset = _next_offset(folder, base_offset)
        if next_offset is not None and next_offset < following:
            return Gap(next_offset, following)
    return None


def gap_after(state: LogState, segment: Segment) -> Gap | None:
    """The gap between the last batch of a sealed segment, found by the index, and the next segment.
    None also if the bytes there are corrupt or unreadable.
    """
    following = segment.end.next_offset

    def is_reached() -> bool:
        return SegmentLookup(segment, state.files).find_offset(following - 1) is not None

    try:
        with eio_as(CorruptBatch, file=segment.name(LOG)):
            if with_index_rebuild(state, segment, is_reached):
                return None
            headers = segment.headers(state.files)
            next_offset = max(
                (header.next_offset for header in headers), default=segment.base_offset
            )
    except CorruptBatch:
        return None
    return Gap(next_offset, following) if next_offset < following else None


def _next_offset(folder: Path, base_offset: int) -> int | None:
    """The offset after the segment's last batch; None if its bytes are corrupt."""
    next_offset = base_offset
    try:
        for header in headers_of(path_of(folder, base_offset, LOG)):
            next_offset = header.next_offset
    except CorruptBatch:
        return None
    return next_offset
