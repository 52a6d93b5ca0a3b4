"""Where a partition's offsets are, drawn to scale: one lane for the disk, one for the bucket.

* Pure: facts in, rectangles out. An axis is `WIDTH` units wide, whatever the offsets.
* An offset in both tiers is in both lanes; there is no third color.
* Everything is visible: an extent is never narrower than `LEAST_WIDTH`, even for one record among
  billions, and never reaches beyond the axis.
* Long holes are not to scale: a restore may skip a billion offsets, so a hole takes at most a tenth
  of the width of the offsets that exist.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple

WIDTH: Final = 1000.0
LEAST_WIDTH: Final = 2.0
HOLE_SHARE: Final = 10  # a hole is drawn as at most one tenth of the rest


class Extent(NamedTuple):
    """Offsets [start_offset, end_offset), and their place on the axis."""

    start_offset: int
    end_offset: int
    x: float
    width: float


class Axis(NamedTuple):
    """Offsets along a line. `left_out`: the parts of long holes that are not drawn."""

    start_offset: int
    end_offset: int
    left_out: tuple[tuple[int, int], ...] = ()

    @classmethod
    def over(cls, ranges: Iterable[tuple[int, int]]) -> Axis:
        """From the lowest start to the highest end; empty without ranges."""
        found = sorted(ranges)
        start, end = min((a for a, _ in found), default=0), max((b for _, b in found), default=0)
        there = [(a, b) for a, b in found if a < b]
        holes = list(_without(start, end, there))
        held = end - start - sum(b - a for a, b in holes if a < b)
        longest = max(1, held // HOLE_SHARE)
        cut = ((a + longest, b) for a, b in holes)
        return cls(start, end, tuple((a, b) for a, b in cut if a < b))

    def extent(self, start_offset: int, end_offset: int) -> Extent | None:
        """None if no part of the range is on the axis."""
        start, end = max(start_offset, self.start_offset), min(end_offset, self.end_offset)
        if start >= end:
            return None
        scale = WIDTH / self._length_to(self.end_offset)
        width = max((self._length_to(end) - self._length_to(start)) * scale, LEAST_WIDTH)
        x = min(self._length_to(start) * scale, WIDTH - width)
        return Extent(start, end, round(x, 2), round(width, 2))

    def _length_to(self, offset: int) -> int:
        left_out = sum(max(0, min(b, offset) - a) for a, b in self.left_out)
        return offset - self.start_offset - left_out


class Places(NamedTuple):
    """The offsets in each tier. Without a bucket, `bucket_end_offset` is the log start."""

    log_start_offset: int
    local_log_start_offset: int
    log_end_offset: int
    bucket_end_offset: int
    gaps: Sequence[tuple[int, int]] = ()

    def written(self) -> Iterable[tuple[int, int]]:
        """The log's ranges between the gaps; some may be empty."""
        return _without(self.log_start_offset, self.log_end_offset, self.gaps)


class TierMap(NamedTuple):
    disk: tuple[Extent, ...]
    bucket: tuple[Extent, ...]


def tier_map(places: Places, axis: Axis) -> TierMap:
    """Both lanes. Gaps recorded in the manifest are holes in the bucket's lane."""
    local_start = max(places.local_log_start_offset, places.log_start_offset)
    disk = axis.extent(local_start, places.log_end_offset)
    bucket_end = min(places.bucket_end_offset, places.log_end_offset)
    pieces = _without(places.log_start_offset, bucket_end, places.gaps)
    bucket = (axis.extent(start, end) for start, end in pieces)
    return TierMap((disk,) if disk else (), tuple(one for one in bucket if one))


def _without(
    start_offset: int, end_offset: int, gaps: Sequence[tuple[int, int]]
) -> Iterable[tuple[int, int]]:
    for gap_start, gap_end in sorted(gaps):
        yield start_offset, min(gap_start, end_offset)
        start_offset = max(start_offset, gap_end)
    yield start_offset, end_offset
