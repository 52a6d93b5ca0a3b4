"""The indexes of a segment: the entries in memory, and a cache of those.

* `IndexColumns` holds entries column by column, for `bisect`. One thread at a time appends, any
  number look up meanwhile: an entry becomes visible with its first column, which is written last.
* `IndexCache` has those of sealed segments, within one limit for all logs. A small index (one block
  of a look-up) is cached on its first use, a larger one on its second: a single look-up does not
  read two megabytes. It is trusted no more than its file: whoever uses an entry checks the batch
  there, and whoever replaces or renames the file calls `invalidate`.
"""

from __future__ import annotations

import sys
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterator
from struct import Struct
from typing import Final

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

    def __iter__(self) -> Iterator[Entry]:
        return zip(*self._columns, strict=True)

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


LIMIT_BYTES: Final = 32 << 20
SMALL_BYTES: Final = 4096
ENTRY_BYTES: Final = 512  # overhead of an entry: name, object, position in the order
ASKED_MAX: Final = 1024


class IndexCache:
    """Least recently used indexes by file name. Thread-safe."""

    def __init__(self, limit_bytes: int = LIMIT_BYTES) -> None:
        self._limit_bytes = limit_bytes
        self._indexes: OrderedDict[str, IndexColumns] = OrderedDict()
        self._asked: OrderedDict[str, None] = OrderedDict()
        self._bytes = 0
        self.generation = 0  # counts invalidations
        self._lock = threading.Lock()

    def get(self, name: str) -> IndexColumns | None:
        with self._lock:
            columns = self._indexes.get(name)
            if columns is not None:
                self._indexes.move_to_end(name)
            return columns

    def should_cache(self, name: str, *, size_bytes: int) -> bool:
        """Whether the caller should read this file whole and `put` it."""
        if size_bytes <= SMALL_BYTES:
            return True
        with self._lock:
            if name in self._asked:
                return size_bytes <= self._limit_bytes // 4
            self._asked[name] = None
            if len(self._asked) > ASKED_MAX:
                self._asked.popitem(last=False)
            return False

    def put_columns(
        self, name: str, columns: IndexColumns, *, generation: int | None = None
    ) -> None:
        """`generation`: from before the file was opened; if it has changed since, the index may be
        stale and is not cached.
        """
        with self._lock:
            if generation not in (None, self.generation):
                return
            self._drop(name)
            self._indexes[name] = columns
            self._bytes += columns.size_bytes + ENTRY_BYTES
            while self._bytes > self._limit_bytes and len(self._indexes) > 1:
                self._drop(next(iter(self._indexes)))

    def invalidate(self, name: str) -> None:
        with self._lock:
            self.generation += 1
            self._asked.pop(name, None)
            self._drop(name)

    def clear(self) -> None:
        with self._lock:
            self.generation += 1
            self._indexes.clear()
            self._asked.clear()
            self._bytes = 0

    def _drop(self, name: str) -> None:
        columns = self._indexes.pop(name, None)
        if columns is not None:
            self._bytes -= columns.size_bytes + ENTRY_BYTES
