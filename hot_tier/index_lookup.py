"""Look-ups in the index of a segment: in memory while the segment is active, else in its file.

* A look-up in a file reads only the block that contains the entry, until the index is used often
  enough for `indexes` to keep it.
* A file is read, never mapped: an error of the disk must not become a signal.
"""

from __future__ import annotations

import os
from struct import Struct

from tierlog.host.waiting import Wait
from tierlog.hot_tier.file_names import OFFSET_INDEX
from tierlog.hot_tier.indexes import Entry, IndexColumns
from tierlog.hot_tier.open_files import FileReader, OpenFiles
from tierlog.hot_tier.segment import Segment
from tierlog.record_format.errors import CorruptIndex, eio_as
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY

BLOCK_ENTRIES = 512


def floor_entry(
    segment: Segment,
    files: OpenFiles,
    suffix: str,
    *,
    column: int,
    target: int,
    wait: Wait = Wait.WAIT,
) -> Entry | None:
    """The last entry of an index whose `column` is at most `target`. Raises CorruptIndex, and
    WouldBlock if it has to be read from disk.
    """
    columns = in_memory(segment, files, suffix)
    if columns is not None:
        return columns.floor(column=column, target=target)
    layout = OFFSET_ENTRY if suffix == OFFSET_INDEX else TIME_ENTRY
    name = segment.name(suffix)
    try:
        with eio_as(CorruptIndex, file=name):
            return _floor_in_file(files, name, layout, wait, column=column, target=target)
    except FileNotFoundError:
        raise CorruptIndex("is missing", file=name) from None
    except EOFError as short:
        raise CorruptIndex(str(short), file=name) from None


def in_memory(segment: Segment, files: OpenFiles, suffix: str) -> IndexColumns | None:
    """The index of an active segment, or one that is cached."""
    active = segment.offsets if suffix == OFFSET_INDEX else segment.times
    return active if active is not None else files.indexes.get(segment.name(suffix))


def _floor_in_file(
    files: OpenFiles, name: str, layout: Struct, wait: Wait, *, column: int, target: int
) -> Entry | None:
    """Look into a sealed index that is not cached, and cache it if it is used often enough."""
    generation = files.indexes.generation
    index = files.reader_of(files.open(name, wait), wait)
    size_bytes = os.fstat(index.file.fd).st_size
    if size_bytes % layout.size:
        raise CorruptIndex(f"{size_bytes} bytes are not whole entries", file=name)
    if not files.indexes.should_cache(name, size_bytes=size_bytes):
        count = size_bytes // layout.size
        return _floor_on_disk(index, layout, count=count, column=column, target=target)
    data = index.read(size_bytes, 0)
    if len(data) < size_bytes:
        raise CorruptIndex("the index shrank while it was read", file=name)
    columns = IndexColumns(layout, data)
    files.indexes.put(name, columns, generation=generation)
    return columns.floor(column=column, target=target)


def _floor_on_disk(
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
