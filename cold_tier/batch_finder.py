"""Finds batches inside a chunk by walking their headers, and keeps a sparse index of the walk.

* Only the 27 bytes that tell where a batch ends are read. The chunk's CRC was verified, so an
  invalid header was uploaded that way, and is CorruptObject.
* A sparse index (an entry per 16 KiB walked) is kept in memory for chunks that are being read,
  within a limit, so that a sequential reader walks each header once instead of starting at the
  beginning of the chunk for every read.
* A walk that never waits raises WouldBlock if bytes are not in the page cache, or if the walk is
  long because there is no index yet. The one in a thread that follows builds the index.

Thread-safe.
"""

from __future__ import annotations

import os
import struct
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tierlog.cold_tier.ranged_reader import ChunkKey, ChunkRef
from tierlog.host.file_slice import OpenFile
from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.record_format.errors import CorruptObject

SPARSE_BYTES: Final = 16 * 1024
WINDOW_BYTES: Final = 16 * 1024
FIRST_WINDOW_BYTES: Final = 512  # after a large batch only the next header is needed
INDEXES_MAX: Final = 512  # of about 16 KiB each for a chunk of 8 MiB
IMMEDIATE_BATCHES_MAX: Final = 512  # takes about half a millisecond

_HEAD: Final = struct.Struct(">qi11xi")  # base offset, length; 11 bytes on: last offset delta
_LENGTH_OVERHEAD: Final = 12
_MIN_LENGTH: Final = 49


class BatchLocation(NamedTuple):
    position: int
    size_bytes: int
    base_offset: int
    next_offset: int

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes


class _SparseIndex:
    """Batches seen by walks, in order and at least `SPARSE_BYTES` apart.

    Written by one thread at a time and read without a lock: a batch becomes visible with its
    offset, which is appended last.
    """

    __slots__ = ("_lock", "ends", "next_offsets", "offsets", "positions")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.positions, self.ends = array("q"), array("q")
        self.offsets, self.next_offsets = array("q"), array("q")

    def maybe_add(self, batch: BatchLocation) -> None:
        with self._lock:
            if batch.position >= self.last_position + SPARSE_BYTES:
                self.positions.append(batch.position)
                self.ends.append(batch.end_position)
                self.next_offsets.append(batch.next_offset)
                self.offsets.append(batch.base_offset)

    @property
    def last_position(self) -> int:
        return self.positions[-1] if self.positions else -SPARSE_BYTES

    def at_offset(self, offset: int) -> BatchLocation | None:
        """The last entry that begins at or below `offset`."""
        return self._batch(bisect_right(self.offsets, offset) - 1)

    def before_end(self, stop: int, end_offset: int) -> BatchLocation | None:
        """The last entry before which everything is within both limits."""
        by_position = bisect_right(self.positions, stop)
        by_offset = bisect_right(self.offsets, end_offset)
        return self._batch((by_position if by_position < by_offset else by_offset) - 1)

    def _batch(self, number: int) -> BatchLocation | None:
        if number < 0:
            return None
        position = self.positions[number]
        return BatchLocation(
            position,
            self.ends[number] - position,
            self.offsets[number],
            self.next_offsets[number],
        )


class BatchFinder:
    """Holds the sparse indexes of the chunks that are being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._indexes: OrderedDict[ChunkKey, _SparseIndex] = OrderedDict()

    def walk(self, chunk: ChunkRef, file: OpenFile, wait: Wait = Wait.WAIT) -> ChunkWalk:
        """A walk over `chunk`, whose open file is `file`."""
        with self._lock:
            index = self._indexes.get(chunk.key)
            if index is None:
                index = self._indexes[chunk.key] = _SparseIndex()
                if len(self._indexes) > INDEXES_MAX:
                    self._indexes.popitem(last=False)
            self._indexes.move_to_end(chunk.key)
        return ChunkWalk(chunk, file, index, wait)

    def forget(self, chunk: ChunkRef) -> None:
        """Drop the index of a chunk whose file turned out to be corrupt."""
        with self._lock:
            self._indexes.pop(chunk.key, None)


class ChunkWalk:
    """Finds batches in one chunk. Raises CorruptObject, WouldBlock."""

    __slots__ = ("_chunk", "_file", "_index", "_wait")

    def __init__(self, chunk: ChunkRef, file: OpenFile, index: _SparseIndex, wait: Wait) -> None:
        self._chunk, self._file, self._index, self._wait = chunk, file, index, wait

    def find(self, offset: int) -> BatchLocation | None:
        """The first batch that ends above `offset`; None if the chunk has none."""
        near = self._index.at_offset(offset)
        if near is not None and near.next_offset > offset:
            return near
        for batch in self._walk(near.end_position if near is not None else 0):
            if batch.next_offset > offset:
                return batch
        return None

    def find_end(self, first: BatchLocation, *, max_bytes: int, end_offset: int) -> tuple[int, int]:
        """The position and offset where the whole batches from `first` on end that fit `max_bytes`
        and lie below `end_offset`. `first` is always included.
        """
        stop = first.position + max_bytes
        position, next_offset = first.end_position, first.next_offset
        near = self._index.before_end(stop, end_offset)
        if near is not None and near.position >= position:
            if _is_beyond(near, stop, end_offset):
                return near.position, max(next_offset, min(near.base_offset, end_offset))
            position, next_offset = near.end_position, near.next_offset
        for batch in self._walk(position):
            if _is_beyond(batch, stop, end_offset):
                # Everything before this batch is within both limits, so its start is the end.
                return batch.position, max(next_offset, min(batch.base_offset, end_offset))
            position, next_offset = batch.end_position, batch.next_offset
        return position, next_offset

    def _walk(self, start: int) -> Iterator[BatchLocation]:
        chunk, index = self._chunk, self._index
        never = self._wait is Wait.NEVER
        pread = pread_nowait if never else os.pread
        walk = walk_batches(self._file, start, chunk.size_bytes, log_key=chunk.log_key, pread=pread)
        last_indexed = index.last_position
        for number, batch in enumerate(walk):
            if never and number == IMMEDIATE_BATCHES_MAX:
                raise WouldBlock("many batches are walked")
            if batch.position >= last_indexed + SPARSE_BYTES:
                index.maybe_add(batch)
                last_indexed = batch.position
            yield batch


def _is_beyond(batch: BatchLocation, stop: int, end_offset: int) -> bool:
    return batch.end_position > stop or batch.next_offset > end_offset


def walk_batches(
    file: OpenFile,
    start: int,
    end: int,
    *,
    log_key: str,
    pread: Callable[[int, int, int], bytes] = os.pread,
) -> Iterator[BatchLocation]:
    """The batches of [start, end) of a chunk's file. Raises CorruptObject."""
    position = window_start = start
    window, window_bytes = b"", FIRST_WINDOW_BYTES
    while position < end:
        at = position - window_start
        if at + _HEAD.size > len(window):
            window = pread(file.fd, min(window_bytes, end - position), position)
            window_start, at = position, 0
            if len(window) < _HEAD.size:
                raise CorruptObject("a chunk ends inside a batch", file=log_key, position=position)
        base_offset, length, delta = _HEAD.unpack_from(window, at)
        size_bytes = length + _LENGTH_OVERHEAD
        if length < _MIN_LENGTH or delta < 0 or position + size_bytes > end:
            raise CorruptObject("invalid batch header in a chunk", file=log_key, position=position)
        yield BatchLocation(position, size_bytes, base_offset, base_offset + delta + 1)
        position += size_bytes
        window_bytes = WINDOW_BYTES if size_bytes < WINDOW_BYTES else FIRST_WINDOW_BYTES
