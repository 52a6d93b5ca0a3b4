"""Verifies the two objects of one cold segment against the manifest.

| depth   | read                               | compared                                     |
|---------|------------------------------------|----------------------------------------------|
| shallow | HEAD of both, the `.indexes` whole | sizes, the store's own CRC-32C; CRC-32C and  |
|         |                                    | sections of the `.indexes`                   |
| deep    | every byte of the `.log` too       | CRC-32C of each batch, each chunk and the    |
|         |                                    | whole; each chunk's offsets, counts, times   |

* Every discrepancy becomes a problem, and the check continues with what can still be checked. Only
  errors that are not findings are raised: a store that does not respond.
* Caches are bypassed, since the bucket itself is being verified.
* Uses the memory of one chunk or one index bundle.
"""

from __future__ import annotations

from tierlog.cold_tier.chunk_table import Chunk, ChunkTable
from tierlog.cold_tier.index_bundle import ParsedBundle, parse_bundle
from tierlog.cold_tier.ranged_reader import read_range
from tierlog.cold_tier.segment_indexes import check_table
from tierlog.cold_tier.segment_scan import describe_chunk
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    CorruptDataError,
    CorruptObject,
    MissingObject,
    StoreUnavailable,
)
from tierlog.record_format.findings import Findings, ProblemKind
from tierlog.record_format.index_layouts import (
    parse_offset_index,
    parse_time_index,
    parse_txn_index,
)
from tierlog.record_format.producer_snapshot import parse_snapshot
from tierlog.record_format.segment_entry import SegmentEntry

PIECE_BYTES = 8 * 1024 * 1024


def check_segment(
    store: ObjectStore, entry: SegmentEntry, *, partition: int, deep: bool
) -> Findings:
    """Verify a segment and return the findings. Raises StoreUnavailable, ConfigurationError."""
    check = _SegmentCheck(store, entry, partition)
    is_readable = check.check_object(
        entry.log_key, size_bytes=entry.size_bytes, crc32c=entry.log_crc32c
    )
    table = check.check_indexes()
    if deep and is_readable:
        check.check_log(table)
    check.findings.checked.segments += 1
    return check.findings


class _SegmentCheck:
    def __init__(self, store: ObjectStore, entry: SegmentEntry, partition: int) -> None:
        self.store, self.entry = store, entry
        self.findings = Findings(partition)

    def add(self, kind: ProblemKind, detail: object, *, key: str) -> None:
        self.findings.add(
            kind,
            detail,
            object_key=self.store.full_key(key),
            base_offset=self.entry.base_offset,
        )

    def check_object(self, key: str, *, size_bytes: int, crc32c: int) -> bool:
        """Check existence, size and checksum by HEAD. Whether the object is worth reading."""
        self.findings.checked.objects += 1
        stat = self.store.head(key)
        if stat is None:
            # The response to a HEAD does not say what is missing: this object, or the whole bucket.
            if self._read(key, 0, 1) is not None:
                raise StoreUnavailable(f"{key}: the store has it for a GET, but not for a HEAD")
            return False
        if stat.size_bytes != size_bytes:
            detail = f"the object has {stat.size_bytes} bytes, the manifest says {size_bytes}"
            self.add(ProblemKind.OBJECT_SIZE, detail, key=key)
            return False
        if stat.crc32c is not None and stat.crc32c != crc32c:
            detail = f"the store has CRC-32C {stat.crc32c:08x}, the manifest {crc32c:08x}"
            self.add(ProblemKind.OBJECT_CHECKSUM, detail, key=key)
        return True

    # --- the .indexes object ----------------------------------------------------------------------

    def check_indexes(self) -> ChunkTable | None:
        """Check the whole object. The chunk table if it is valid."""
        entry, key = self.entry, self.entry.indexes_key
        size_bytes, crc32c = entry.indexes_size_bytes, entry.indexes_crc32c
        if not self.check_object(key, size_bytes=size_bytes, crc32c=crc32c):
            return None
        body = self._read(key, 0, size_bytes)
        if body is None:
            return None
        if (actual := crc32c_of(body)) != crc32c:
            detail = f"the object has CRC-32C {actual:08x}, the manifest says {crc32c:08x}"
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
        expected = (entry.record_count, entry.min_timestamp, entry.max_timestamp)
        max_timestamp = -1 if table.max_timestamp is None else table.max_timestamp
        found = (table.record_count, table.min_timestamp, max_timestamp)
        if found != expected:
            detail = (
                f"(record count, minimum and maximum timestamp) is {found}, "
                f"the manifest says {expected}"
            )
            self.add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=entry.indexes_key)

    # --- the .log object --------------------------------------------------------------------------

    def check_log(self, table: ChunkTable | None) -> None:
        """Check every byte."""
        before = len(self.findings.problems)
        log_crc = self._check_chunks(table) if table else self._log_crc()
        if log_crc is None or len(self.findings.problems) > before:
            return  # a more specific problem was reported
        if log_crc != self.entry.log_crc32c:
            detail = (
                f"the object has CRC-32C {log_crc:08x}, "
                f"the manifest says {self.entry.log_crc32c:08x}"
            )
            self.add(ProblemKind.OBJECT_CHECKSUM, detail, key=self.entry.log_key)

    def _check_chunks(self, table: ChunkTable) -> int | None:
        log_crc, next_offset = 0, self.entry.base_offset
        for number, chunk in enumerate(table.chunks):
            body = self._read(self.entry.log_key, chunk.position, chunk.end_position)
            if body is None:
                return None
            self._check_chunk(number, chunk, body, next_offset=next_offset)
            log_crc = crc32c_of(body, log_crc)
            next_offset = chunk.last_offset + 1
        if next_offset > self.entry.last_offset + 1:
            detail = (
                f"the last offset is {next_offset - 1}, the manifest says {self.entry.last_offset}"
            )
            self.add(ProblemKind.OVERLAP, detail, key=self.entry.log_key)
        return log_crc

    def _check_chunk(self, number: int, chunk: Chunk, body: bytes, *, next_offset: int) -> None:
        self.findings.checked.chunks += 1
        key = self.entry.log_key
        where = f"chunk {number} at position {chunk.position}, first offset {chunk.first_offset}"
        if (actual := crc32c_of(body)) != chunk.crc32c:
            detail = f"{where}: CRC-32C {actual:08x}, the chunk table says {chunk.crc32c:08x}"
            self.add(ProblemKind.CHUNK_CORRUPT, detail, key=key)
            return
        try:
            found = describe_chunk(body, chunk.position, next_offset=next_offset, file=key)
        except CorruptDataError as bad:
            self.add(ProblemKind.BATCH_CORRUPT, f"{where}: {bad.detail}", key=key)
            return
        self.findings.checked.records += found.record_count
        if found != chunk:
            wrong = [name for name in Chunk._fields if getattr(found, name) != getattr(chunk, name)]
            detail = f"{where}: the chunk table has a wrong {', '.join(wrong)}"
            self.add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=self.entry.indexes_key)

    def _log_crc(self) -> int | None:
        """The log's CRC, for use without a chunk table: batches were verified before the upload."""
        log_crc = 0
        for start in range(0, self.entry.size_bytes, PIECE_BYTES):
            end = min(start + PIECE_BYTES, self.entry.size_bytes)
            body = self._read(self.entry.log_key, start, end)
            if body is None:
                return None
            log_crc = crc32c_of(body, log_crc)
        return log_crc

    def _read(self, key: str, start: int, end: int) -> bytes | None:
        """None, and a problem, if the object is gone, ends early or cannot be read."""
        try:
            body = read_range(self.store, key, start, end)
        except MissingObject:
            self.add(ProblemKind.OBJECT_MISSING, "the object is missing", key=key)
            return None
        except CorruptObject as bad:
            self.add(ProblemKind.OBJECT_CHECKSUM, bad, key=key)
            return None
        self.findings.checked.read_bytes += len(body)
        return body
