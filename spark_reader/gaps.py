"""Offsets that no record has or ever had, because a restore skipped them: pure.

Rule: they are neither loss nor backlog; what counts or limits offsets counts those outside them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

Gaps = Iterable[tuple[int, int]]
"""[start, end) each, in order, apart from each other."""


def past_gap(offset: int, gaps: Gaps) -> int:
    """`offset`, or the end of the gap that it lies in."""
    for start, end in gaps:
        if start <= offset < end:
            return end
    return offset


def stretches(start: int, end: int, gaps: Gaps) -> Iterator[tuple[int, int]]:
    """The parts of [start, end) outside the gaps, in order."""
    for gap_start, gap_end in gaps:
        if start < min(gap_start, end):
            yield start, min(gap_start, end)
        start = max(start, gap_end)
    if start < end:
        yield start, end


def count_offsets(start: int, end: int, gaps: Gaps) -> int:
    return sum(last - first for first, last in stretches(start, end, gaps))
