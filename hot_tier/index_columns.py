"""The entries of an index in memory, column by column, for `bisect`.

One thread at a time appends, any number look up meanwhile: an entry becomes visible with its first
column, which is written last.
"""

from __future__ import annotations

import sys
from array import array
from bisect import bisect_right
from struct import Struct

from tierlog.record_format.index_layouts import pack_entries

Entry = tuple[int, int]


class IndexColumns:
    """(relative offset, position) or (timestamp, relative offset) of each entry, as `layout` says.
    No column decreases.
    """

    __slots__ = ("_columns", "_layout", "entry_bytes")

    def __init__(self, layout: Struct, image: bytes = b"") -> None:
        """`image`: the bytes of whole entries."""
        self._layout, self.entry_bytes = layout, layout.size
        self._columns = _split(image, layout.size // 4)

    def __len__(self) -> int:
        return len(self._columns[0])

    def __getitem__(self, number: int) -> Entry:
        first, second = self._columns
        return first[number], second[number]

    @property
    def size_bytes(self) -> int:
        """The size of the entries in the file."""
        return len(self) * self.entry_bytes

    def image(self, start: int = 0) -> bytes:
        """The bytes of the entries from number `start` on."""
        first, second = self._columns
        return pack_entries(self._layout, zip(first[start:], second[start:], strict=True))

    def append(self, first: int, second: int) -> None:
        self._columns[1].append(second)
        self._columns[0].append(first)

    def truncate(self, *, column: int, target: int) -> None:
        """Drop the entries whose `column` is above `target`; for columns that nobody else has."""
        count = self._count(column, target)
        for numbers in self._columns:
            del numbers[count:]

    def floor(self, *, column: int, target: int) -> Entry | None:
        """The last entry whose `column` is at most `target`."""
        count = self._count(column, target)
        return self[count - 1] if count else None

    def around(self, target: int) -> tuple[Entry | None, Entry | None]:
        """The last entry whose first column is at most `target`, and the one after it; None for the
        latter if the first is an exact match.
        """
        count = self._count(0, target)
        floor = self[count - 1] if count else None
        if count == len(self) or (floor is not None and floor[0] == target):
            return floor, None
        return floor, self[count]

    def _count(self, column: int, target: int) -> int:
        return bisect_right(self._columns[column], target, 0, len(self))


def _split(image: bytes, words_per_entry: int) -> tuple[array[int], array[int]]:
    """The columns of an image, without an object for each entry. A timestamp has two words."""
    words = array("i", image)
    assert words.itemsize == 4, "a C int has the size of an index field"
    first, second = words[0::words_per_entry], words[words_per_entry - 1 :: words_per_entry]
    if words_per_entry == 3:
        halves = array("i", bytes(8 * len(first)))
        halves[0::2], halves[1::2] = first, words[1::3]
        first = array("q", halves.tobytes())
    if sys.byteorder == "little":
        first.byteswap()
        second.byteswap()
    return first, second
