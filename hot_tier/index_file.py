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
from hot_tier.offset_columns import Entry
from hot_tier.open_files import FileReader

BLOCK_ENTRIES = 512


def floor_entry(
    image: bytes | bytearray, layout: Struct, *, column: int, target: int, count: int
) -> int:
    """Index of the last of the first `count` entries whose `column` is at most `target`; -1 if
    there is none.
    """
    low, high, size = 0, count, layout.size
    unpack_from = layout.unpack_from
    while low < high:
        middle = (low + high) // 2
        if unpack_from(image, middle * size)[column] <= target:
            low = middle + 1
        else:
            high = middle
    return low - 1


class ActiveIndex:
    """The index of an active segment: its entries in memory, and the file they are written to."""

    __slots__ = ("_disk", "_fd", "_layout", "_written_bytes", "image")

    def __init__(self, path: Path, layout: Struct, *, image: bytes, disk: Disk) -> None:
        """Open (or create) `path`, whose valid entries are `image`."""
        self._layout, self._disk = layout, disk
        self.image = bytearray(image)
        self._written_bytes = len(image)
        self._fd = disk.open(path, os.O_RDWR | os.O_CREAT)

    def __len__(self) -> int:
        return len(self.image) // self._layout.size

    def preallocate(self, size_bytes: int) -> None:
        """Set the file's length to `size_bytes`, rounded down to whole entries, with zeros after
        the entries.
        """
        size_bytes -= size_bytes % self._layout.size
        self._disk.truncate(self._fd, len(self.image))
        self._disk.truncate(self._fd, size_bytes)
        self._written_bytes = min(self._written_bytes, size_bytes)

    def add(self, *entry: int) -> None:
        self.image += self._layout.pack(*entry)

    def write(self) -> None:
        """Write the entries that are not in the file yet. Raises OSError; may be repeated."""
        unwritten = self.image[self._written_bytes :]
        if unwritten:
            write_all(self._disk, self._fd, [unwritten], self._written_bytes)
            self._written_bytes += len(unwritten)

    def entry(self, number: int) -> Entry:
        size = self._layout.size
        return self._layout.unpack_from(self.image, (number % len(self)) * size)

    def floor(self, *, column: int, target: int) -> Entry | None:
        return floor_in_image(self.image, self._layout, column=column, target=target)

    def trim(self) -> None:
        """Write everything and truncate the file to its entries. Raises OSError."""
        self.write()
        self._disk.truncate(self._fd, len(self.image))

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def floor_on_disk(
    index: FileReader, layout: Struct, *, count: int, column: int, target: int
) -> Entry | None:
    """As `ActiveIndex.floor`, for the file of a sealed segment with `count` entries.

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
    return floor_in_image(block, layout, column=column, target=target)


def floor_in_image(
    image: bytes | bytearray, layout: Struct, *, column: int, target: int
) -> Entry | None:
    """The last of the entries in `image` whose `column` is at most `target`."""
    count = len(image) // layout.size
    number = floor_entry(image, layout, column=column, target=target, count=count)
    return layout.unpack_from(image, number * layout.size) if number >= 0 else None


def entries_around(
    image: bytes | bytearray, layout: Struct, *, column: int, target: int
) -> tuple[Entry | None, Entry | None]:
    """As `floor_in_image`, and the entry after it; None for the second if the first is an exact
    match.
    """
    count, size = len(image) // layout.size, layout.size
    number = floor_entry(image, layout, column=column, target=target, count=count)
    floor = layout.unpack_from(image, number * size) if number >= 0 else None
    if number + 1 >= count or (floor is not None and floor[column] == target):
        return floor, None
    return floor, layout.unpack_from(image, (number + 1) * size)
