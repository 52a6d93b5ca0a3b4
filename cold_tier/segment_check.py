"""Checks a segment's bytes at both borders: before they are uploaded, and in the bucket.

`scan_segment`, before the upload, verifies every batch's CRC and that offsets rise, and builds the
chunk table and its spans: a segment that was corrupted on local disk is reported, never uploaded.

`check_segment` compares the two objects with the manifest:

| depth   | read                               | compared                                     |
|---------|------------------------------------|----------------------------------------------|
| shallow | HEAD of both, the `.indexes` whole | sizes, the store's own CRC-32C; CRC-32C and  |
|         |                                    | sections of the `.indexes`                   |
| deep    | every byte of the `.log` too       | CRC-32C of each batch, each chunk and the    |
|         |                                    | whole; each chunk's offsets, counts, times,  |
|         |                                    | and spans, and that its key filter has its   |
|         |                                    | keys                                         |

* Every discrepancy in the bucket becomes a problem, and the check continues with what can still be
  checked. Only errors that are not findings are raised: a store that does not respond.
* Caches are bypassed, since the bucket itself is being verified.
* Uses the memory of one chunk, of one batch if that is larger, or of one index bundle.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from io import FileIO
from pathlib import Path
from typing import Final

from tierlog.cold_tier.index_bundle import (
    Chunk,
    ChunkTable,
    ParsedBundle,
    SectionKind,
    check_section,
    join_chunks,
    parse_bundle,
    parse_directory,
    parse_spans,
)
from tierlog.cold_tier.key_filters import KeyFilters, find_key_filters
from tierlog.cold_tier.ranged_reader import piece_ranges, read_range
from tierlog.cold_tier.segment_lookup import check_table
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.batch import (
    HEADER_SIZE,
    BatchHeader,
    Buffer,
    check_crc_in_pieces,
    parse_header,
)
from tierlog.record_format.batch_runs import summarize_batches
from tierlog.record_format.checkpoint_files import parse_snapshot
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    CorruptBatch,
    CorruptDataError,
    CorruptObject,
    MissingObject,
    StoreUnavailable,
    eio_as,
)
from tierlog.record_format.findings import Findings, ProblemKind
from tierlog.record_format.index_layouts import (
    parse_offset_index,
    parse_time_index,
    parse_txn_index,
)
from tierlog.record_format.key_filter import has_all_keys
from tierlog.record_format.segment_entry import SegmentEntry

CHUNK_BYTES = 8 * 1024 * 1024
SPAN_BYTES_MIN: Final = 16 * 1024
SPANS: Final = 128  # of a segment of 1 GiB, as many as it has chunks


def span_bytes_of(segment_bytes: int) -> int:
    """The size of a span: a small part of the segment, but worth an entry."""
    return max(SPAN_BYTES_MIN, segment_bytes // SPANS)


def scan_segment(
    path: Path,
    *,
    base_offset: int,
    size_bytes: int,
    chunk_bytes: int = CHUNK_BYTES,
    on_chunk: Callable[[Buffer], None] | None = None,
    on_span: Callable[[Chunk], None] | None = None,
) -> ChunkTable:
    """The chunk table of the first `size_bytes` of a `.log` file. `on_chunk` is called with the
    bytes of each, and `on_span` with each of its spans.

    A chunk holds as many whole batches as fit in `chunk_bytes`, at least one, and so does a span in
    its share of the segment. Raises CorruptBatch.
    """
    span_bytes = chunk_bytes if on_span is None else span_bytes_of(size_bytes)
    chunks: list[Chunk] = []
    whole_crc, position, next_offset = 0, 0, base_offset
    memory = bytearray(min(max(chunk_bytes, HEADER_SIZE), size_bytes))  # reused for every chunk
    with path.open("rb", buffering=0) as file:
        while position < size_bytes:
            body = _read(file, position, memoryview(memory)[: size_bytes - position])
            first = _first_header(body, position, path)
            if first.size_bytes > len(body):
                body = _read_large(file, first, memoryview(memory), end=size_bytes)
            spans = _split(
                body, position, span_bytes=span_bytes, next_offset=next_offset, file=str(path)
            )
            chunk = join_chunks(spans)
            chunks.append(chunk)
            if on_span is not None:
                for span in spans:
                    on_span(span)
            whole_crc = crc32c_of(body[: chunk.size_bytes], whole_crc)
            if on_chunk is not None:
                on_chunk(body[: chunk.size_bytes])
            position, next_offset = chunk.end_position, chunk.last_offset + 1
    return ChunkTable(
        chunks, base_offset=base_offset, log_size_bytes=size_bytes, log_crc32c=whole_crc
    )


def _read(file: FileIO, position: int, memory: memoryview) -> memoryview:
    """The file's bytes from `position` on, as many as there are and fit."""
    with eio_as(CorruptBatch, file=str(file.name), position=position):
        return memory[: os.preadv(file.fileno(), [memory], position)].toreadonly()


def _first_header(body: Buffer, position: int, path: Path) -> BatchHeader:
    """The header of the first batch, with its position in the file."""
    try:
        return parse_header(body, at=position)
    except CorruptBatch as bad:
        raise CorruptBatch(bad.detail, file=str(path), position=position) from None


def _read_large(file: FileIO, header: BatchHeader, memory: memoryview, *, end: int) -> memoryview:
    """A batch that is larger than `memory`, which is overwritten. Its checksum is verified first: a
    corrupt length may claim all the rest of the segment.
    """

    def read(count: int, position: int) -> memoryview:
        return _read(file, position, memory[:count])

    try:
        check_crc_in_pieces(read, header, end=end, piece_bytes=len(memory))
    except CorruptBatch as bad:
        raise bad.with_location(file=str(file.name)) from None
    return _read(file, header.position, memoryview(bytearray(header.size_bytes)))


def describe_chunk(body: Buffer, position: int, *, next_offset: int, file: str) -> Chunk:
    """The chunk table entry for `body`, whole batches at `position` in `file`.

    Verifies every batch. `next_offset` is where the preceding chunk ends. Raises CorruptBatch.
    """
    chunk = _first_chunk(body, position, next_offset=next_offset, file=file)
    if chunk.size_bytes != len(body):
        raise CorruptBatch("the last batch is truncated", file=file, position=chunk.end_position)
    return chunk


def _describe(spans: Sequence[Chunk], body: bytes, *, next_offset: int, file: str) -> list[Chunk]:
    """What the entries of the spans of a chunk should be. Raises CorruptBatch."""
    found: list[Chunk] = []
    for span in spans:
        start = span.position - spans[0].position
        part = memoryview(body)[start : start + span.size_bytes]
        found.append(describe_chunk(part, span.position, next_offset=next_offset, file=file))
        next_offset = found[-1].last_offset + 1
    return found


def _split(
    body: memoryview, position: int, *, span_bytes: int, next_offset: int, file: str
) -> list[Chunk]:
    """The entries for the whole batches at the start of `body`, the first of which is whole."""
    spans: list[Chunk] = []
    at = 0
    while at == 0 or len(body) - at >= HEADER_SIZE:
        try:
            size_bytes = parse_header(body, at, at=position + at).size_bytes
        except CorruptBatch as bad:
            raise bad.with_location(file=file) from None
        if at and size_bytes > len(body) - at:
            break
        span = _first_chunk(
            body[at : at + max(size_bytes, span_bytes)],
            position + at,
            next_offset=next_offset,
            file=file,
        )
        spans.append(span)
        at, next_offset = at + span.size_bytes, span.last_offset + 1
    return spans


def _first_chunk(body: Buffer, position: int, *, next_offset: int, file: str) -> Chunk:
    """The entry for the whole batches at the start of `body`."""
    try:
        run = summarize_batches(body, next_offset=next_offset)
    except CorruptBatch as error:
        at = None if error.position is None else position + error.position
        raise CorruptBatch(error.detail, file=file, position=at, offset=error.offset) from error
    if run is None:
        raise CorruptBatch("the last batch is truncated", file=file, position=position)
    return Chunk(
        position=position,
        size_bytes=run.size_bytes,
        first_offset=run.first_offset,
        last_offset=run.next_offset - 1,
        record_count=run.record_count,
        min_timestamp=run.min_timestamp,
        max_timestamp=run.max_timestamp,
        crc32c=crc32c_of(memoryview(body)[: run.size_bytes]),
        has_gap=run.has_gap,
        has_transactions=run.has_transactions,
    )


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
        self._filters: KeyFilters | None = None
        self._spans: ChunkTable | None = None

    def _add(self, kind: ProblemKind, detail: object, *, key: str) -> None:
        self.findings.add_problem(
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
            self._add(ProblemKind.OBJECT_SIZE, detail, key=key)
            return False
        if stat.crc32c is not None and stat.crc32c != crc32c:
            detail = f"the store has CRC-32C {stat.crc32c:08x}, the manifest {crc32c:08x}"
            self._add(ProblemKind.OBJECT_CHECKSUM, detail, key=key)
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
            self._add(ProblemKind.OBJECT_CHECKSUM, detail, key=key)
        try:
            bundle = parse_bundle(body, file=key)
            check_table(bundle.table, entry)
            self._check_sections(bundle)
        except CorruptDataError as bad:
            self._add(ProblemKind.INDEXES_CORRUPT, bad.detail, key=key)
            return None
        self._compare_table(bundle.table)
        self._filters = self._check_filters(body, bundle.table)
        self._spans = self._check_spans(body, bundle.table)
        return bundle.table

    def _check_filters(self, body: bytes, table: ChunkTable) -> KeyFilters | None:
        key = self.entry.indexes_key
        try:
            return find_key_filters(body, parse_directory(body, file=key), table, file=key)
        except CorruptDataError as bad:
            detail = f"{bad.detail}: no key is looked up by its key filters"
            self._add(ProblemKind.INDEXES_CORRUPT, detail, key=key)
            return None

    def _check_spans(self, body: bytes, table: ChunkTable) -> ChunkTable | None:
        key = self.entry.indexes_key
        section = parse_directory(body, file=key).section(SectionKind.SPANS)
        if section is None:
            return None
        try:
            data = check_section(section, body[section.position : section.end_position], file=key)
            return parse_spans(data, table, file=key)
        except CorruptDataError as bad:
            detail = f"{bad.detail}: chunks are read whole"
            self._add(ProblemKind.INDEXES_CORRUPT, detail, key=key)
            return None

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
            self._add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=entry.indexes_key)

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
            self._add(ProblemKind.OBJECT_CHECKSUM, detail, key=self.entry.log_key)

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
            self._add(ProblemKind.OVERLAP, detail, key=self.entry.log_key)
        return log_crc

    def _check_chunk(self, number: int, chunk: Chunk, body: bytes, *, next_offset: int) -> None:
        self.findings.checked.chunks += 1
        key = self.entry.log_key
        where = f"chunk {number} at position {chunk.position}, first offset {chunk.first_offset}"
        if (actual := crc32c_of(body)) != chunk.crc32c:
            detail = f"{where}: CRC-32C {actual:08x}, the chunk table says {chunk.crc32c:08x}"
            self._add(ProblemKind.CHUNK_CORRUPT, detail, key=key)
            return
        spans = (chunk,) if self._spans is None else self._spans.within(chunk)
        try:
            found_spans = _describe(spans, body, next_offset=next_offset, file=key)
        except CorruptDataError as bad:
            self._add(ProblemKind.BATCH_CORRUPT, f"{where}: {bad.detail}", key=key)
            return
        found = join_chunks(found_spans)
        self.findings.checked.records += found.record_count
        if found != chunk:
            wrong = [name for name in Chunk._fields if getattr(found, name) != getattr(chunk, name)]
            detail = f"{where}: the chunk table has a wrong {', '.join(wrong)}"
            self._add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=self.entry.indexes_key)
        elif found_spans != list(spans):
            detail = f"{where}: a span is not what the spans say"
            self._add(ProblemKind.CHUNK_TABLE_WRONG, detail, key=self.entry.indexes_key)
        bits = None if self._filters is None else self._filters.filters[number]
        if bits is not None and not has_all_keys(bits, body):
            detail = f"{where}: its key filter lacks a key"
            self._add(ProblemKind.INDEXES_CORRUPT, detail, key=self.entry.indexes_key)

    def _log_crc(self) -> int | None:
        """The log's CRC, for use without a chunk table: batches were verified before the upload."""
        log_crc = 0
        for start, end in piece_ranges(self.entry.size_bytes):
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
            self._add(ProblemKind.OBJECT_MISSING, "the object is missing", key=key)
            return None
        except CorruptObject as bad:
            self._add(ProblemKind.OBJECT_CHECKSUM, bad, key=key)
            return None
        self.findings.checked.read_bytes += len(body)
        return body
