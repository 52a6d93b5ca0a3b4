"""Checks the two objects of one cold segment against what the manifest says of them.

| depth   | read                               | compared                                     |
|---------|------------------------------------|----------------------------------------------|
| shallow | HEAD of both, the `.indexes` whole | sizes, the store's own CRC-32C; CRC-32C and  |
|         |                                    | sections of the `.indexes`                   |
| deep    | every byte of the `.log` too       | CRC of each chunk and batch, and of the whole|
|         |                                    | offsets, counts and times of each chunk      |

* What is wrong becomes a problem, and the check goes on with what can still be checked. Only what
  is no finding raises: a store that does not answer.
* Nothing is taken from a cache: the question is what the bucket holds.
* Memory is one chunk, or one index bundle.
"""

from __future__ import annotations

from typing import Protocol

from crc32c import crc32c as crc32c_of

from cold_tier.chunk_table import Chunk, ChunkTable
from cold_tier.index_bundle import ParsedBundle, parse_bundle
from cold_tier.object_store import ObjectStore, crc32c_checksum
from cold_tier.ranged_reader import read_range
from cold_tier.segment_indexes import SegmentIdentity, check_table
from cold_tier.segment_scan import describe_chunk
from record_format.errors import CorruptDataError, CorruptObject, MissingObject
from record_format.findings import Findings, ProblemKind
from record_format.index_layouts import parse_offset_index, parse_time_index, parse_txn_index
from record_format.producer_snapshot import parse_snapshot

PIECE_BYTES = 8 * 1024 * 1024


class CheckedSegment(SegmentIdentity, Protocol):
    """What a manifest says of a segment. Times in ms; the greatest is -1 where none is known."""

    @property
    def last_offset(self) -> int: ...
    @property
    def record_count(self) -> int: ...
    @property
    def min_timestamp(self) -> int | None: ...
    @property
    def max_timestamp(self) -> int: ...
    @property
    def log_key(self) -> str: ...
    @property
    def indexes_size_bytes(self) -> int: ...
    @property
    def indexes_crc32c(self) -> int: ...


def check_segment(
    store: ObjectStore, entry: CheckedSegment, *, partition: int, deep: bool
) -> Findings:
    """Raises StoreUnavailable, ConfigurationError; what it finds is in the answer."""
    check = _SegmentCheck(store, entry, partition)
    log_there = check.object_is_there(
        entry.log_key, size_bytes=entry.size_bytes, crc32c=entry.log_crc32c
    )
    table = check.indexes()
    if deep and log_there:
        check.log(table)
    check.findings.checked.segments += 1
    return check.findings


class _SegmentCheck:
    def __init__(self, store: ObjectStore, entry: CheckedSegment, partition: int) -> None:
        self.store, self.entry = store, entry
        self.findings = Findings(partition)

    def add(self, kind: ProblemKind, detail: object, *, key: str) -> None:
        self.findings.add(
            kind,
            detail,
            object_key=self.store.full_key(key),
            base_offset=self.entry.base_offset,
        )

    def object_is_there(self, key: str, *, size_bytes: int, crc32c: int) -> bool:
        """Whether it is worth reading."""
        self.findings.checked.objects += 1
        stat = self.store.head(key)
        if stat is None:
            self.add(ProblemKind.OBJECT_MISSING, "the bucket does not have it", key=key)
            return False
        if stat.size_bytes != size_bytes:
            detail = f"it has {stat.size_bytes} bytes, the manifest says {size_bytes}"
            self.add(ProblemKind.OBJECT_SIZE, detail, key=key)
            return False
        given = stat.checksum
        comparable = given is not None and given.algorithm == "crc32c"
        if comparable and given != crc32c_checksum(crc32c):
            detail = f"the store says CRC-32C {given and given.value}, the manifest {crc32c:08x}"
            self.add(ProblemKind.OBJECT_CHECKSUM, detail, key=key)
        return True

    # --- the .indexes object ----------------------------------------------------------------------

    def indexes(self) -> ChunkTable | None:
        """The chunk table, where it can be believed."""
        entry, key = self.entry, self.entry.indexes_key
        size_bytes, crc32c = entry.indexes_size_bytes, entry.indexes_crc32c
        if not self.object_is_there(key, size_bytes=size_bytes, crc32c=crc32c):
            return None
        body = self._read(key, 0, size_bytes)
        if body is None:
            return None
        if (actual := crc32c_of(body)) != crc32c:
            detail = f"its bytes have CRC-32C {actual:08x}, the manifest says {crc32c:08x}"
            self.add(ProblemKind.OBJECT_CHECKSUM, detail, key=key)
        try:
            bundle = parse_bundle(body, file=key)
            check_table(bundle.table, entry)
            self._check_sections(bundle)
        except CorruptDataError as bad:
            self.add(ProblemKind.INDEXES_CORRUPT, bad.detail, key=key)
            return None
        self._compare_table(bundle.table)
        return bundle.table

    def _check_sections(self, bundle: ParsedBundle) -> None:
        base_offset, key = self.entry.base_offset, self.entry.indexes_key
        size_bytes = self.entry.size_bytes
        parse_offset_index(
            bundle.offset_index, base_offset=base_offset, segment_size=size_bytes, file=key
        )
        parse_time_index(bundle.time_index, base_offset=base_offset, file=key)
        parse_txn_index(bundle.txn_index, base_offset=base_offset, file=key)
        if bundle.producer_snapshot:
            parse_snapshot(bundle.producer_snapshot, file=key)

    def _compare_table(self, table: ChunkTable) -> None:
        entry = self.entry
        said = (entry.record_count, entry.min_timestamp, entry.max_timestamp)
        greatest = -1 if table.max_timestamp is None else table.max_timestamp
        found = (table.record_count, table.min_timestamp, greatest)
        if said != found:
            detail = f"(records, first and last time) are {found}, the manifest says {said}"
            self.add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=entry.indexes_key)

    # --- the .log object --------------------------------------------------------------------------

    def log(self, table: ChunkTable | None) -> None:
        """Read it whole."""
        before = len(self.findings.problems)
        whole_crc = self._chunks(table) if table else self._plain()
        if whole_crc is None or len(self.findings.problems) > before:
            return  # what is wrong was said nearer to its place
        if whole_crc != self.entry.log_crc32c:
            detail = f"its bytes have CRC-32C {whole_crc:08x}, not {self.entry.log_crc32c:08x}"
            self.add(ProblemKind.OBJECT_CHECKSUM, detail, key=self.entry.log_key)

    def _chunks(self, table: ChunkTable) -> int | None:
        whole_crc, next_offset = 0, self.entry.base_offset
        for number, chunk in enumerate(table.chunks):
            body = self._read(self.entry.log_key, chunk.position, chunk.end_position)
            if body is None:
                return None
            self._chunk(number, chunk, body, next_offset=next_offset)
            whole_crc = crc32c_of(body, whole_crc)
            next_offset = chunk.last_offset + 1
        if next_offset > self.entry.last_offset + 1:
            detail = f"it reaches to offset {next_offset - 1}, past {self.entry.last_offset}"
            self.add(ProblemKind.OVERLAP, detail, key=self.entry.log_key)
        return whole_crc

    def _chunk(self, number: int, chunk: Chunk, body: bytes, *, next_offset: int) -> None:
        self.findings.checked.chunks += 1
        key = self.entry.log_key
        place = f"chunk {number} at position {chunk.position}, from offset {chunk.first_offset} on"
        if (actual := crc32c_of(body)) != chunk.crc32c:
            detail = f"{place}: CRC-32C {actual:08x}, the chunk table says {chunk.crc32c:08x}"
            self.add(ProblemKind.CHUNK_CORRUPT, detail, key=key)
            return
        try:
            found = describe_chunk(body, chunk.position, next_offset=next_offset, file=key)
        except CorruptDataError as bad:
            self.add(ProblemKind.BATCH_CORRUPT, f"{place}: {bad.detail}", key=key)
            return
        self.findings.checked.records += found.record_count
        if found != chunk:
            wrong = [name for name in Chunk._fields if getattr(found, name) != getattr(chunk, name)]
            detail = f"{place}: the chunk table is wrong about its {', '.join(wrong)}"
            self.add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=self.entry.indexes_key)

    def _plain(self) -> int | None:
        """Without a chunk table. The whole CRC vouches for what was checked before the upload."""
        whole_crc = 0
        for start in range(0, self.entry.size_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, self.entry.size_bytes)
            body = self._read(self.entry.log_key, start, end)
            if body is None:
                return None
            whole_crc = crc32c_of(body, whole_crc)
        return whole_crc

    def _read(self, key: str, start: int, end: int) -> bytes | None:
        """None, and a problem, where the object went or ends early."""
        try:
            body = read_range(self.store, key, start, end)
        except MissingObject:
            self.add(ProblemKind.OBJECT_MISSING, "the bucket does not have it", key=key)
            return None
        except CorruptObject as bad:
            self.add(ProblemKind.OBJECT_SIZE, bad.detail, key=key)
            return None
        self.findings.checked.read_bytes += len(body)
        return body
