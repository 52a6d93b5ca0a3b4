"""The indexes of a segment: which batches get entries, the entries in memory, and a cache of those.

* Which batches get entries is Kafka's rule, in `IndexBuilder` alone: appends, rebuilds and
  compaction use it, so a rebuilt index equals the original. It writes nothing.
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
from typing import Final, NamedTuple

from tierlog.record_format.batch import NO_TIMESTAMP, BatchHeader
from tierlog.record_format.batch_runs import HeaderRun
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY, pack_entries

Entry = tuple[int, int]


class LargestTimestamp(NamedTuple):
    """The largest timestamp of a segment and the last offset of the batch that has it."""

    timestamp: int
    offset: int


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


class IndexBuilder:
    """See the module. Not thread-safe."""

    __slots__ = (
        "base_offset",
        "bytes_since_entry",
        "interval_bytes",
        "largest",
        "last_indexed_timestamp",
        "offset_entries",
        "time_entries",
    )

    def __init__(
        self,
        base_offset: int,
        *,
        interval_bytes: int,
        bytes_since_entry: int = 0,
        largest: LargestTimestamp | None = None,
        last_indexed_timestamp: int = NO_TIMESTAMP,
    ) -> None:
        self.base_offset, self.interval_bytes = base_offset, interval_bytes
        self.bytes_since_entry = bytes_since_entry
        self.largest = largest or LargestTimestamp(NO_TIMESTAMP, base_offset)
        self.last_indexed_timestamp = last_indexed_timestamp
        self.offset_entries: list[tuple[int, int]] = []
        self.time_entries: list[tuple[int, int]] = []

    def index_batch(self, header: BatchHeader, *, position: int) -> None:
        """The next batch, which begins at `position` in the file."""
        last_offset = header.last_offset
        if header.max_timestamp > self.largest.timestamp:
            self.largest = LargestTimestamp(header.max_timestamp, last_offset)
        if self.bytes_since_entry > self.interval_bytes:
            self.offset_entries.append((last_offset - self.base_offset, position))
            self.add_time_entry()
            self.bytes_since_entry = 0
        self.bytes_since_entry += header.size_bytes

    def index_run(self, run: HeaderRun, *, position: int) -> None:
        """As `index_batch` for each of a run whose buffer begins at `position` in the file."""
        largest, at = self.largest
        since, interval, base_offset = self.bytes_since_entry, self.interval_bytes, self.base_offset
        columns = zip(run.starts, run.ends, run.last_offsets, run.max_timestamps, strict=True)
        for start, end, last_offset, max_timestamp in columns:
            if max_timestamp > largest:
                largest, at = max_timestamp, last_offset
            if since > interval:
                self.offset_entries.append((last_offset - base_offset, position + start))
                if largest > self.last_indexed_timestamp:
                    self.time_entries.append((largest, at - base_offset))
                    self.last_indexed_timestamp = largest
                since = 0
            since += end - start
        self.largest, self.bytes_since_entry = LargestTimestamp(largest, at), since

    def add_time_entry(self) -> None:
        """Index the largest timestamp so far, if it has grown since the last entry."""
        timestamp, offset = self.largest
        if timestamp > self.last_indexed_timestamp:
            self.time_entries.append((timestamp, offset - self.base_offset))
            self.last_indexed_timestamp = timestamp

    def images(self) -> tuple[bytes, bytes]:
        """The contents of `.index` and `.timeindex`."""
        return (
            pack_entries(OFFSET_ENTRY, self.offset_entries),
            pack_entries(TIME_ENTRY, self.time_entries),
        )


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
