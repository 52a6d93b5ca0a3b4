"""Offsets that a restore skipped. Pure.

They are neither data loss nor backlog: offsets are counted and limited outside of them. Records
that the lost disk alone had were among the first of them; only a range that ends there shows it.
"""

from __future__ import annotations

from collections.abc import Iterator

Gaps = tuple[tuple[int, int], ...]
"""Ranges [start, end), in order and disjoint."""


def skip_gap(offset: int, gaps: Gaps) -> int:
    """`offset`, or the end of the gap that contains it."""
    for start, end in gaps:
        if start <= offset < end:
            return end
    return offset


def first_lost(start: int, end: int, gaps: Gaps) -> int | None:
    """Where the records of [start, end) are gone, if it ends inside a gap: the log had reached its
    end, so what the gap has of it was lost. Else None.
    """
    for gap_start, gap_end in gaps:
        if gap_start < end < gap_end and start < end:
            return max(start, gap_start)
    return None


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
