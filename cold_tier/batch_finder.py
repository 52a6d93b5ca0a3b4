"""Where batches begin inside a chunk: a walk over headers that remembers its way.

* Only the 27 bytes that say where a batch ends are looked at; the chunk's CRC was right, so what is
  wrong here was uploaded like that, and is CorruptObject.
* A sparse map (an entry every 16 KiB walked) stays in memory for chunks that are being read, within
  a limit: a sequential reader walks each header once, instead of starting over from the chunk's
  start at each read.
* A caller that must not wait walks with `Steps` that give up with BlockingIOError: if bytes are not
  in memory, or if the walk is long because there is no map yet. A walk that may wait then leaves a
  map.

Thread-safe.
"""

from __future__ import annotations

import errno
import os
import struct
import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from cold_tier.ranged_reader import ChunkKey, ChunkRef
from record_format.errors import CorruptObject
from record_format.file_slice import OpenFile
from record_format.page_cache import pread_nowait

SPARSE_BYTES: Final = 16 * 1024
WINDOW_BYTES: Final = 16 * 1024
FIRST_BYTES: Final = 512  # behind a large batch nobody looks at more than the next one's head
MAPS_MAX: Final = 512  # of about 16 KiB each for a chunk of 8 MiB
BATCHES_AT_ONCE: Final = 512  # about half a millisecond, for who must not wait

_HEAD: Final = struct.Struct(">qi11xi")  # base offset, length; 11 bytes on: last offset delta
_LENGTH_OVERHEAD: Final = 12
_LEAST_LENGTH: Final = 49


class Steps(NamedTuple):
    """How to walk: `pread`, like os.pread, and after how many batches to give up."""

    pread: Callable[[int, int, int], bytes] = os.pread
    batches_max: int | None = None


AS_FAR_AS_NEEDED: Final = Steps()
WITHOUT_WAITING: Final = Steps(pread_nowait, BATCHES_AT_ONCE)


class BatchPlace(NamedTuple):
    position: int
    size_bytes: int
    base_offset: int
    next_offset: int

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes


class _Map:
    """Batches that were met, in their order and `SPARSE_BYTES` apart or more.

    Written by one thread at a time, and read by any: a batch is there once its offset is, which is
    noted last.
    """

    __slots__ = ("_lock", "ends", "next_offsets", "offsets", "positions")

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.positions, self.ends = array("q"), array("q")
        self.offsets, self.next_offsets = array("q"), array("q")

    def note(self, batch: BatchPlace) -> None:
        with self._lock:
            if batch.position >= self.last_position + SPARSE_BYTES:
                self.positions.append(batch.position)
                self.ends.append(batch.end_position)
                self.next_offsets.append(batch.next_offset)
                self.offsets.append(batch.base_offset)

    @property
    def last_position(self) -> int:
        return self.positions[-1] if self.positions else -SPARSE_BYTES

    def at_offset(self, offset: int) -> BatchPlace | None:
        """The last of them that begins at or below `offset`."""
        return self._batch(bisect_right(self.offsets, offset) - 1)

    def before_end(self, stop: int, end_offset: int) -> BatchPlace | None:
        """The last of them before which all is within both limits."""
        by_position = bisect_right(self.positions, stop)
        by_offset = bisect_right(self.offsets, end_offset)
        return self._batch((by_position if by_position < by_offset else by_offset) - 1)

    def _batch(self, number: int) -> BatchPlace | None:
        if number < 0:
            return None
        position = self.positions[number]
        return BatchPlace(
            position,
            self.ends[number] - position,
            self.offsets[number],
            self.next_offsets[number],
        )


class BatchFinder:
    """The maps of chunks that are being read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._maps: OrderedDict[ChunkKey, _Map] = OrderedDict()

    def of(self, chunk: ChunkRef, file: OpenFile, *, steps: Steps = AS_FAR_AS_NEEDED) -> ChunkWalk:
        """For one look into a chunk, whose `file` this is."""
        with self._lock:
            known = self._maps.get(chunk.key)
            if known is None:
                known = self._maps[chunk.key] = _Map()
                if len(self._maps) > MAPS_MAX:
                    self._maps.popitem(last=False)
            self._maps.move_to_end(chunk.key)
        return ChunkWalk(chunk, file, known, steps)

    def forget(self, chunk: ChunkRef) -> None:
        """Forget what was found in a chunk whose bytes proved bad."""
        with self._lock:
            self._maps.pop(chunk.key, None)


class ChunkWalk:
    """Raises CorruptObject, and BlockingIOError where `steps` gave up."""

    __slots__ = ("_chunk", "_file", "_known", "_steps")

    def __init__(self, chunk: ChunkRef, file: OpenFile, known: _Map, steps: Steps) -> None:
        self._chunk, self._file, self._known, self._steps = chunk, file, known, steps

    def find(self, offset: int) -> BatchPlace | None:
        """The first batch that ends above `offset`; None if the chunk has none."""
        near = self._known.at_offset(offset)
        if near is not None and near.next_offset > offset:
            return near
        for batch in self._walk(near.end_position if near is not None else 0):
            if batch.next_offset > offset:
                return batch
        return None

    def find_end(self, first: BatchPlace, *, max_bytes: int, end_offset: int) -> tuple[int, int]:
        """Where whole batches from `first` on end, by position and by offset.

        They are within `max_bytes` and below `end_offset`, but the first is always included.
        """
        stop = first.position + max_bytes
        position, next_offset = first.end_position, first.next_offset
        near = self._known.before_end(stop, end_offset)
        if near is not None and near.position >= position:
            if _is_beyond(near, stop, end_offset):
                return near.position, max(next_offset, min(near.base_offset, end_offset))
            position, next_offset = near.end_position, near.next_offset
        for batch in self._walk(position):
            if _is_beyond(batch, stop, end_offset):
                # What lies before this batch is within both limits; its own start is the end.
                return batch.position, max(next_offset, min(batch.base_offset, end_offset))
            position, next_offset = batch.end_position, batch.next_offset
        return position, next_offset

    def _walk(self, start: int) -> Iterator[BatchPlace]:
        chunk, known, steps = self._chunk, self._known, self._steps
        walk = walk_batches(
            self._file, start, chunk.size_bytes, log_key=chunk.log_key, pread=steps.pread
        )
        noted = known.last_position
        for number, batch in enumerate(walk):
            if number == steps.batches_max:
                raise BlockingIOError(errno.EAGAIN, "the walk is long")
            if batch.position >= noted + SPARSE_BYTES:
                known.note(batch)
                noted = batch.position
            yield batch


def _is_beyond(batch: BatchPlace, stop: int, end_offset: int) -> bool:
    return batch.end_position > stop or batch.next_offset > end_offset


def walk_batches(
    file: OpenFile,
    start: int,
    end: int,
    *,
    log_key: str,
    pread: Callable[[int, int, int], bytes] = os.pread,
) -> Iterator[BatchPlace]:
    """The batches of [start, end) of a chunk's file. Raises CorruptObject."""
    position = window_start = start
    window, window_bytes = b"", FIRST_BYTES
    while position < end:
        at = position - window_start
        if at + _HEAD.size > len(window):
            window = pread(file.fd, min(window_bytes, end - position), position)
            window_start, at = position, 0
            if len(window) < _HEAD.size:
                raise CorruptObject("a chunk ends inside a batch", file=log_key, position=position)
        base_offset, length, delta = _HEAD.unpack_from(window, at)
        size_bytes = length + _LENGTH_OVERHEAD
        if length < _LEAST_LENGTH or delta < 0 or position + size_bytes > end:
            raise CorruptObject("a chunk holds no batch", file=log_key, position=position)
        yield BatchPlace(position, size_bytes, base_offset, base_offset + delta + 1)
        position += size_bytes
        window_bytes = WINDOW_BYTES if size_bytes < WINDOW_BYTES else FIRST_BYTES
