"""Offsets that a restore skipped, which no record ever had. Pure.

They are neither data loss nor backlog: offsets are counted and limited outside of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Gaps = Iterable[tuple[int, int]]
"""Ranges [start, end), in order and disjoint."""


def skip_gap(offset: int, gaps: Gaps) -> int:
    """`offset`, or the end of the gap that contains it."""
    for start, end in gaps:
        if start <= offset < end:
            return end
    return offset


def ranges_outside(start: int, end: int, gaps: Gaps) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) outside the gaps, in order."""
    for gap_start, gap_end in gaps:
        if start < min(gap_start, end):
            yield start, min(gap_start, end)
        start = max(start, gap_end)
    if start < end:
        yield start, end


def count_offsets(start: int, end: int, gaps: Gaps) -> int:
    return sum(last - first for first, last in ranges_outside(start, end, gaps))
