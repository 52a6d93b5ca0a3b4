"""Cold segments' chunk tables and index sections, in an LRU cache within a limit; and the aborted
transactions that they tell of.

* One ranged GET loads the directory and the chunk table, which are first in the object. A section
  costs one more, and only when it is needed and not empty.
* Nothing is used before its CRC-32C and its segment were verified. Corrupt bytes are fetched once
  more, since the network may be at fault.
* Concurrent loads of the same thing are one, and the number of loads in flight is limited. A load
  that was waiting for a slot when another failed with StoreUnavailable fails too: otherwise, with a
  store that hangs, each would wait for its slot and then for its own timeout.
* A transaction's marker, and with it its `.txnindex` entry, may be many segments after its records.
  The producer snapshot at a segment's end tells which transactions are open there: once all that
  began in a range of offsets have ended, no later segment can have an entry for one. Without a
  snapshot nothing is known, and all following segments are read.
* A transaction has ended if the snapshot has its producer either in no transaction or in a later
  one. A producer that is missing may have expired. A snapshot may have been built from an
  incomplete log: then it has a transaction's start too late, or lacks the producer.
* An entry's last stable offset at or past the end of the range ends the search too.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, Final, NamedTuple, TypeVar, cast

from tierlog.cold_tier.index_bundle import (
    ChunkTable,
    Directory,
    ParsedBundle,
    SectionKind,
    check_section,
    parse_bundle,
    parse_chunk_table,
    parse_directory,
)
from tierlog.cold_tier.ranged_reader import ChunkRef, read_range
from tierlog.host.waiting import Wait
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.errors import (
    CorruptObject,
    CorruptSnapshot,
    StoreUnavailable,
    UnknownFormatVersion,
)
from tierlog.record_format.index_layouts import AbortedTxn, parse_txn_index
from tierlog.record_format.segment_entry import SegmentEntry, name_of


class Producers(NamedTuple):
    """The producers at the end of a segment: all ids, sorted, and the first offset of each open
    transaction by producer id.
    """

    ids: array[int]
    open_transactions: Mapping[int, int]

    def has_ended(self, producer_id: int, first_offset: int) -> bool:
        open_since = self.open_transactions.get(producer_id)
        if open_since is not None and open_since <= first_offset:
            return False
        number = bisect_left(self.ids, producer_id)
        return number < len(self.ids) and self.ids[number] == producer_id


def parse_producers(snapshot: bytes, *, file: str) -> Producers:
    """Raises CorruptSnapshot, UnknownFormatVersion."""
    found = parse_snapshot(snapshot, file=file)
    return Producers(
        array("q", sorted(one.producer_id for one in found)),
        {
            one.producer_id: one.current_txn_first_offset
            for one in found
            if one.current_txn_first_offset >= 0
        },
    )


class SegmentTransactions(NamedTuple):
    """`aborted` have their markers in the segment; `producers` is None if they are unknown."""

    base_offset: int
    last_offset: int
    aborted: Sequence[AbortedTxn]
    producers: Producers | None


def aborted_transactions(
    segments: Iterable[SegmentTransactions], *, start_offset: int, end_offset: int
) -> list[AbortedTxn]:
    """The transactions with records in [start_offset, end_offset). `segments` starts with the one
    that holds `start_offset`; it is read as far as an entry may lie.
    """
    found: list[AbortedTxn] = []
    pending = _OpenTransactions(end_offset=end_offset)
    for segment in segments:
        found += [
            txn
            for txn in segment.aborted
            if txn.last_offset >= start_offset and txn.first_offset < end_offset
        ]
        is_stable = any(txn.last_stable_offset >= end_offset for txn in segment.aborted)
        if is_stable or pending.have_ended_after(segment):
            break
    return found


class _OpenTransactions:
    """Tracks, segment by segment, the open transactions with records below `end_offset`."""

    def __init__(self, *, end_offset: int) -> None:
        self._end_offset, self._is_known = end_offset, True
        self._open: set[tuple[int, int]] = set()

    def have_ended_after(self, segment: SegmentTransactions) -> bool:
        """Whether all of them have ended at the end of this segment."""
        producers = segment.producers
        if producers is not None:
            self._open = {txn for txn in self._open if not producers.has_ended(*txn)}
        if segment.base_offset < self._end_offset:
            still_open = producers.open_transactions.items() if producers is not None else ()
            self._open.update(txn for txn in still_open if txn[1] < self._end_offset)
            self._is_known &= producers is not None
        return self._is_known and not self._open and segment.last_offset + 1 >= self._end_offset


T = TypeVar("T")

LIMIT_BYTES: Final = 16 * 1024 * 1024
LOADS_MAX: Final = 8
SNAPSHOT_MAX_BYTES: Final = 8 * 1024 * 1024
PRODUCERS: Final = -1  # cache key of a parsed snapshot; sections use their kind
OBJECT_OVERHEAD: Final = 12  # the size of a chunk's Python objects relative to its packed size


class SegmentIndex(NamedTuple):
    """A segment's directory and chunk table; `chunks` refers to the table's chunks by number."""

    directory: Directory
    table: ChunkTable
    chunks: tuple[ChunkRef, ...]


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

    def load_index(self, segment: SegmentEntry, wait: Wait = Wait.WAIT) -> SegmentIndex:
        """Raises CorruptObject, MissingObject, UnknownFormatVersion, StoreUnavailable, and
        WouldBlock if it is not in memory.
        """
        end = segment.chunk_table_position + segment.chunk_table_size

        def load() -> tuple[SegmentIndex, int]:
            head = read_range(self._store, segment.indexes_key, 0, end)
            found = parse_index(head, segment)
            return found, OBJECT_OVERHEAD * end

        return self._get((segment.indexes_key, 0), load, wait)

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
        producers = self._producers(segment)
        return SegmentTransactions(segment.base_offset, segment.last_offset, aborted, producers)

    def _producers(self, segment: SegmentEntry) -> Producers | None:
        """The producers at the end of the segment; None if it has no valid snapshot."""
        file = segment.indexes_key
        section = self.load_index(segment).directory.section(SectionKind.PRODUCER_SNAPSHOT)
        if section is None or section.size_bytes > SNAPSHOT_MAX_BYTES:
            return None

        def load() -> tuple[Producers, int]:
            body = read_range(self._store, file, section.position, section.end_position)
            return parse_producers(check_section(section, body, file=file), file=file), len(body)

        try:
            return self._get((file, PRODUCERS), load)
        except (CorruptObject, CorruptSnapshot, UnknownFormatVersion):
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
            try:
                return cast(T, loading.result())
            finally:
                del loading  # or the error would refer to itself, and keep open files alive
        try:
            with self._load_slot(failed_loads):
                found, size_bytes = _retry_if_corrupt(load)
        except BaseException as error:
            with self._lock:
                del self._loading[key]
            ours.set_exception(error)
            del ours  # or the error would refer to itself
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
