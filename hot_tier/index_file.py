"""Sorted fixed-size entries: in memory while the segment is active, looked up on disk once it is
sealed.

* Entries are written with pwrite into a preallocated (sparse) file and never through a mapping, so
  that a full disk is an error and not a signal.
* While the segment is active, the entries in memory are authoritative. Those that could not be
  written yet are written with the next ones, or at the seal; after a crash recovery rebuilds the
  file.
* A look-up in a sealed index reads only the block that contains the entry, until the index is used
  often enough for `index_cache` to keep it.
* One writer, under the log's lock; any number of concurrent readers.
"""

from __future__ import annotations

import os
from pathlib import Path
from struct import Struct

from hot_tier.disk import Disk, write_all
from hot_tier.index_columns import Entry, IndexColumns
from hot_tier.open_files import FileReader

BLOCK_ENTRIES = 512


class ActiveIndex:
    """The index of an active segment: its entries in memory, and the file they are written to."""

    __slots__ = ("_disk", "_fd", "_written", "columns")

    def __init__(self, path: Path, columns: IndexColumns, *, disk: Disk) -> None:
        """Open (or create) `path`, which has the entries of `columns`."""
        self.columns, self._disk = columns, disk
        self._written = len(columns)
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT)

    def preallocate(self, size_bytes: int) -> None:
        """Set the file's length to `size_bytes`, rounded down to whole entries, with zeros after
        the entries.
        """
        room = size_bytes // self.columns.entry_bytes
        self._disk.truncate(self._fd, self.columns.size_bytes)
        self._disk.truncate(self._fd, room * self.columns.entry_bytes)
        self._written = min(self._written, room)

    def write(self) -> None:
        """Write the entries that are not in the file yet. Raises OSError; may be repeated."""
        unwritten = self.columns.image(self._written)
        if unwritten:
            write_all(self._disk, self._fd, [unwritten], self._written * self.columns.entry_bytes)
            self._written = len(self.columns)

    def trim(self) -> None:
        """Write everything and truncate the file to its entries. Raises OSError."""
        self.write()
        self._disk.truncate(self._fd, self.columns.size_bytes)

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def floor_on_disk(
    index: FileReader, layout: Struct, *, count: int, column: int, target: int
) -> Entry | None:
    """As `IndexColumns.floor`, for the file of a sealed segment with `count` entries.

    A binary search over the first entries of blocks (a few bytes each) picks the block to read.
    """
    size = layout.size
    first, last = 0, (count - 1) // BLOCK_ENTRIES
    while first < last:
        middle = (first + last + 1) // 2
        entry = layout.unpack(index.read(size, middle * BLOCK_ENTRIES * size))
        if entry[column] <= target:
            first = middle
        else:
            last = middle - 1
    start = first * BLOCK_ENTRIES
    in_block = min(BLOCK_ENTRIES, count - start)
    if in_block <= 0:
        return None
    block = index.read(in_block * size, start * size)
    if len(block) < in_block * size:
        raise EOFError("the index shrank while it was read")
    return IndexColumns(layout, block).floor(column=column, target=target)
