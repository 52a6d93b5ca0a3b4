"""The offset index of a sealed segment in memory, column by column, for `bisect`."""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right

Entry = tuple[int, ...]


class OffsetColumns:
    """(relative offset, position) of each entry; both increase. Its length is the file's in
    bytes.
    """

    __slots__ = ("_columns", "_positions", "_relative_offsets")

    def __init__(self, image: bytes) -> None:
        numbers = array("i", image)
        assert numbers.itemsize == 4, "a C int has the size of an index field"
        if sys.byteorder == "little":
            numbers.byteswap()
        self._relative_offsets, self._positions = numbers[0::2], numbers[1::2]
        self._columns = (self._relative_offsets, self._positions)

    def __len__(self) -> int:
        return 8 * len(self._positions)

    def floor(self, *, column: int, target: int) -> Entry | None:
        """The last entry whose `column` is at most `target`."""
        number = bisect_right(self._columns[column], target) - 1
        return self._entry(number) if number >= 0 else None

    def around(self, target: int) -> tuple[Entry | None, Entry | None]:
        """The last entry at or below a relative offset, and the one after it; None for the latter
        if the first is an exact match.
        """
        following = bisect_right(self._relative_offsets, target)
        floor = self._entry(following - 1) if following else None
        if following == len(self._positions) or (floor is not None and floor[0] == target):
            return floor, None
        return floor, self._entry(following)

    def _entry(self, number: int) -> Entry:
        return self._relative_offsets[number], self._positions[number]
