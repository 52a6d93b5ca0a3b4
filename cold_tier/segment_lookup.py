"""Where an offset lies in a cold segment: in which chunk, by the chunk table of its `.indexes`
object, and at which batch of the chunk, by headers.

* One ranged GET loads the directory and the chunk table, which are first in the object. A section
  costs one more, and only when it is needed and not empty. All are kept in an LRU cache in memory.
* Spans and key filters come with the first GET, unless they are large or the chunk table was there
  before. Where they are corrupt, chunks are read as if there were none.
* Nothing is used before its CRC-32C and its segment were verified. Corrupt bytes are fetched once
  more, since the network may be at fault.
* Concurrent loads of the same thing are one, and the number of loads in flight is limited. A load
  that was waiting for a slot when another failed with StoreUnavailable fails too: otherwise, with a
  store that hangs, each would wait for its slot and then for its own timeout.
* In a chunk only the 27 bytes that tell where a batch ends are read. The chunk's CRC was verified,
  so an invalid header was uploaded that way, and is CorruptObject.
* A sparse index of the walk (an entry per 16 KiB) is kept for chunks that are being read, within a
  limit, so that a sequential reader walks each header once instead of starting at the beginning of
  the chunk for every read. A walk that never waits raises WouldBlock if bytes are not in the page
  cache, or if it is long because there is no index yet: the one in a thread that follows builds it.

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
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, Protocol, TypeVar, cast

from tierlog.cold_tier.aborted_transactions import (
    Producers,
    SegmentTransactions,
    parse_producers,
)
from tierlog.cold_tier.index_bundle import (
    ChunkTable,
    Directory,
    ParsedBundle,
    SectionKind,
    check_section,
    parse_bundle,
    parse_chunk_table,
    parse_directory,
    parse_spans,
)
from tierlog.cold_tier.key_filters import KeyFilters, parse_key_filters
from tierlog.cold_tier.ranged_reader import ChunkKey, ChunkRef, read_range
from tierlog.host.file_slice import OpenFile
from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import Wait, WouldBlock
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import (
    CorruptObject,
    CorruptSnapshot,
    StoreUnavailable,
    UnknownFormatVersion,
)
from tierlog.record_format.index_layouts import parse_txn_index
from tierlog.record_format.segment_entry import SegmentEntry, name_of

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

LIMIT_BYTES: Final = 16 * 1024 * 1024
LOADS_MAX: Final = 32  # of which searches for keys load half ahead
SNAPSHOT_MAX_BYTES: Final = 8 * 1024 * 1024
# Cache keys of an index, a parsed snapshot, key filters and spans; sections use their kind.
INDEX: Final = 0
PRODUCERS: Final = -1
KEYS: Final = -2
SPANS: Final = -3
SPANS_HEAD_BYTES: Final = 16 * 1024  # in one GET, of who looks for spans: they and the chunk table
KEYS_HEAD_BYTES: Final = 256 * 1024  # in one GET, of who looks for a key: those of 200,000 keys
OBJECT_OVERHEAD: Final = 12  # the size of a chunk's Python objects relative to its packed size

SPARSE_BYTES: Final = 16 * 1024
WINDOW_BYTES: Final = 16 * 1024
FIRST_WINDOW_BYTES: Final = 512  # after a large batch only the next header is needed
INDEXES_MAX: Final = 512  # of about 16 KiB each for a chunk of 8 MiB
IMMEDIATE_BATCHES_MAX: Final = 512  # takes about half a millisecond

_HEAD: Final = struct.Struct(">qi11xi")  # base offset, length; 11 bytes on: last offset delta
_LENGTH_OVERHEAD: Final = 12
_MIN_LENGTH: Final = 49


class SegmentIndex(NamedTuple):
    """A segment's directory and chunk table; `chunks` refers to the table's chunks by number."""

    directory: Directory
    table: ChunkTable
    chunks: tuple[ChunkRef, ...]


class _Kept(NamedTuple):
    """How a section beside the chunk table is fetched and kept in memory."""

    cache_key: int
    kind: SectionKind
    head_bytes: int
    overhead: int


class _ParseBeside(Protocol[T_co]):
    def __call__(self, data: bytes, table: ChunkTable, /, *, file: str) -> T_co: ...


class SegmentIndexes:
    """Thread-safe."""

    def __init__(
        self,
        store: ObjectStore,
        *,
        limit_bytes: int = LIMIT_BYTES,
        loads_max: int = LOADS_MAX,
    ) -> None:
        self._store, self._limit_bytes = store, limit_bytes
        self._lock = threading.Lock()
        self._loads = threading.BoundedSemaphore(loads_max)
        self._failed_loads = 0
        self._cached: OrderedDict[tuple[str, int], tuple[Any, int]] = OrderedDict()
        self._loading: dict[tuple[str, int], Future[Any]] = {}
        self._bytes = 0

    @property
    def cached_bytes(self) -> int:
        return self._bytes

    def has_index(self, segment: SegmentEntry) -> bool:
        """Whether `load_index` finds it in memory."""
        return (segment.indexes_key, INDEX) in self._cached

    def has_spans(self, segment: SegmentEntry) -> bool:
        """Whether `load_spans` finds them, or that there are none, in memory."""
        return (segment.indexes_key, SPANS) in self._cached

    def has_key_filters(self, segment: SegmentEntry) -> bool:
        """Whether `load_key_filters` finds them, or that there are none, in memory."""
        return (segment.indexes_key, KEYS) in self._cached

    def load_index(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> SegmentIndex:
        """Raises CorruptObject, MissingObject, UnknownFormatVersion, StoreUnavailable, and
        WouldBlock if it is not in memory.
        """
        end = segment.chunk_table_position + segment.chunk_table_size

        def load() -> tuple[SegmentIndex, int]:
            head = read_range(self._store, segment.indexes_key, 0, end)
            found = parse_index(head, segment)
            return found, OBJECT_OVERHEAD * end

        return self._get((segment.indexes_key, INDEX), load, wait)

    def load_section(self, segment: SegmentEntry, kind: SectionKind) -> bytes:
        """A section's bytes; empty if the segment does not have it."""
        section, file = self.load_index(segment).directory.section(kind), segment.indexes_key
        if section is None:
            return b""

        def load() -> tuple[bytes, int]:
            body = read_range(self._store, file, section.position, section.end_position)
            return check_section(section, body, file=file), len(body)

        return self._get((file, int(kind)), load)

    def transactions(self, segment: SegmentEntry) -> SegmentTransactions:
        """Raises what `get` does, and CorruptIndex."""
        file = segment.indexes_key
        section = self.load_section(segment, SectionKind.TXN_INDEX)
        aborted = parse_txn_index(section, base_offset=segment.base_offset, file=file)
        producers = self.find_producers(segment)
        return SegmentTransactions(segment.base_offset, segment.last_offset, aborted, producers)

    def find_producers(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> Producers | None:
        """The producers at the end of the segment; None if it has no valid snapshot. Raises as
        `load_index` does.
        """
        file = segment.indexes_key
        section = self.load_index(segment, wait).directory.section(SectionKind.PRODUCER_SNAPSHOT)
        if section is None or section.size_bytes > SNAPSHOT_MAX_BYTES:
            return None

        def load() -> tuple[Producers, int]:
            body = read_range(self._store, file, section.position, section.end_position)
            return parse_producers(check_section(section, body, file=file), file=file), len(body)

        try:
            return self._get((file, PRODUCERS), load, wait)
        except (CorruptObject, CorruptSnapshot, UnknownFormatVersion):
            return None

    def load_key_filters(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> KeyFilters | None:
        """None if it has none, or they are corrupt: then each chunk may have any key. Raises as
        `load_index` does.
        """
        kept = _Kept(KEYS, SectionKind.KEY_FILTERS, KEYS_HEAD_BYTES, overhead=1)
        return self._load_beside(segment, kept, parse_key_filters, wait)

    def load_spans(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> ChunkTable | None:
        """None if it has none, or they are corrupt. Raises as `load_index` does."""
        kept = _Kept(SPANS, SectionKind.SPANS, SPANS_HEAD_BYTES, overhead=OBJECT_OVERHEAD)
        return self._load_beside(segment, kept, parse_spans, wait)

    def _load_beside(
        self, segment: SegmentEntry, kept: _Kept, parse: _ParseBeside[T], wait: Wait
    ) -> T | None:
        """What is in a section beside the chunk table, which is fetched with it unless it is in
        memory.
        """
        file = segment.indexes_key
        table_end = segment.chunk_table_position + segment.chunk_table_size
        known, _ = self._cached.get((file, INDEX), (None, 0))

        def load() -> tuple[T | None, int]:
            index, head = known, b""
            if index is None:
                end = max(table_end, min(segment.indexes_size_bytes, kept.head_bytes))
                head = read_range(self._store, file, 0, end)
                index = parse_index(head, segment)
                with self._lock:
                    if (file, INDEX) not in self._cached:
                        self._keep((file, INDEX), index, OBJECT_OVERHEAD * table_end)
            section = index.directory.section(kept.kind)
            if section is None:
                return None, 0
            body = head[section.position : section.end_position]
            if len(body) < section.size_bytes:
                body = read_range(self._store, file, section.position, section.end_position)
            body = check_section(section, body, file=file)
            return parse(body, index.table, file=file), kept.overhead * len(body)

        try:
            return self._get((file, kept.cache_key), load, wait)
        except (CorruptObject, UnknownFormatVersion):
            return None

    def _get(
        self, key: tuple[str, int], load: Callable[[], tuple[T, int]], wait: Wait = Wait.WAIT
    ) -> T:
        with self._lock:
            if key in self._cached:
                self._cached.move_to_end(key)
                return cast(T, self._cached[key][0])
            wait.before("an index is fetched")
            loading = self._loading.get(key)
            if loading is None:
                ours: Future[Any] = Future()
                self._loading[key] = ours
            failed_loads = self._failed_loads
        if loading is not None:
            return cast(T, loading.result())
        try:
            with self._load_slot(failed_loads):
                found, size_bytes = _retry_if_corrupt(load)
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            ours.set_exception(error)
            raise
        with self._lock:
            del self._loading[key]
            self._keep(key, found, size_bytes)
        ours.set_result(found)
        return found

    @contextmanager
    def _load_slot(self, failed_loads: int) -> Iterator[None]:
        """Wait for a slot. `failed_loads` is the count of failed loads when the wait began."""
        with self._loads:
            if self._failed_loads != failed_loads:
                raise StoreUnavailable("not attempted: the store failed an earlier request")
            try:
                yield
            except StoreUnavailable:
                with self._lock:
                    self._failed_loads += 1
                raise

    def _keep(self, key: tuple[str, int], found: object, size_bytes: int) -> None:
        self._cached[key] = found, size_bytes
        self._bytes += size_bytes
        while self._bytes > self._limit_bytes and len(self._cached) > 1:
            _, (_, evicted_bytes) = self._cached.popitem(last=False)
            self._bytes -= evicted_bytes


def load_bundle(store: ObjectStore, segment: SegmentEntry) -> ParsedBundle:
    """Load a whole `.indexes` object. Raises CorruptObject, MissingObject, UnknownFormatVersion,
    StoreUnavailable.
    """
    body = store.get(segment.indexes_key, max_bytes=segment.indexes_size_bytes)
    return parse_bundle(body, file=segment.indexes_key)


def parse_index(head: bytes, segment: SegmentEntry) -> SegmentIndex:
    """Parse the directory and chunk table at the start of an `.indexes` object, and compare them
    with the manifest's facts about the segment.
    """
    file = segment.indexes_key
    directory = parse_directory(head, file=file)
    section = directory.section(SectionKind.CHUNK_TABLE)
    expected = (segment.chunk_table_position, segment.chunk_table_size)
    if section is None or (section.position, section.size_bytes) != expected:
        raise CorruptObject("the manifest has another position for the chunk table", file=file)
    table_bytes = check_section(section, head[section.position : section.end_position], file=file)
    table = parse_chunk_table(table_bytes, file=file)
    check_table(table, segment)
    return SegmentIndex(directory, table, _chunk_refs(table, segment.log_key))


def _chunk_refs(table: ChunkTable, log_key: str) -> tuple[ChunkRef, ...]:
    name = name_of(log_key)
    if name is None:
        raise CorruptObject("is not the key of a segment's log object", file=log_key)
    return tuple(
        ChunkRef(log_key, (name, number), chunk.position, chunk.size_bytes, chunk.crc32c)
        for number, chunk in enumerate(table.chunks)
    )


def check_table(table: ChunkTable, segment: SegmentEntry) -> None:
    """Raise CorruptObject if the chunk table belongs to another segment."""
    found = (table.base_offset, table.log_size_bytes, table.log_crc32c)
    if found != (segment.base_offset, segment.size_bytes, segment.log_crc32c):
        raise CorruptObject("the chunk table belongs to another segment", file=segment.indexes_key)


def _retry_if_corrupt(load: Callable[[], T]) -> T:
    try:
        return load()
    except UnknownFormatVersion:
        raise
    except CorruptObject:
        return load()


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

    def walk_chunk(self, chunk: ChunkRef, file: OpenFile, wait: Wait = Wait.WAIT) -> ChunkWalk:
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

    def find_batch(self, offset: int) -> BatchLocation | None:
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
