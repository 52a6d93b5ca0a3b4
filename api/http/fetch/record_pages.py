"""Which records of a fetch a response has: whole batches as they are, or a page of decoded records.

* A page holds at least one record if there is one, and ends at the first limit it reaches;
  `next_offset` is where the next page begins. Its size is bounded even if a compressed batch
  expands a thousandfold, or if records are nearly empty.
* A record that would be too large for a page comes alone, as a `LargeRecord`: only where it is.
* Control batches, aborted batches and records below the given offset are left out. Of whole batches
  only the headers are read: the remaining slices exclude what is removed, and nothing is copied.
* A batch's checksum is verified before it is decoded.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import Final, NamedTuple

from tierlog.broker.partition.tiered_reads import Fetched
from tierlog.host.file_slice import FileSlice, OpenFile, pread_exactly
from tierlog.host.waiting import Wait
from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    HEADER_SIZE,
    BatchHeader,
    check_crc,
    check_crc_in_pieces,
    parse_header,
    truncated_batch,
)
from tierlog.record_format.batch_runs import headers_in_order
from tierlog.record_format.codecs import DecompressedTooLarge
from tierlog.record_format.decode import Columns, Record, decode_columns, expand
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.record_stream import Pread, RecordHead, RecordStream, stream_bytes

LARGE_RECORD_BYTES: Final = 1 << 20
PAGE_BYTES: Final = 16 << 20  # of records
CHUNK_BYTES: Final = 256 << 10  # encoded in one call
# A larger batch is read record by record: decoded at once it would take too much memory.
BATCH_BYTES: Final = 32 << 20
BATCH_RECORDS: Final = 250_000
# The least overhead of a record in a batch: with it, a page is never smaller than the uncompressed
# batches that were read for it.
RECORD_BYTES: Final = 7
PAGE_RECORDS: Final = 100_000  # as text, each takes some hundred bytes of memory


class LargeRecord(NamedTuple):
    """Where it is: `header` has its batch's position in the file."""

    file: OpenFile
    header: BatchHeader
    head: RecordHead
    memory_bytes: int

    def stream(self, position: int) -> RecordStream:
        """The expanded records of the batch from this position on."""
        stream = RecordStream(self.header, pread_of(self.file))
        stream.skip_to(position)
        return stream

    def prefixes(self, size_bytes: int) -> list[tuple[bytes | None, int]]:
        """(the first bytes, the size) of key and value; the size of null is -1."""
        stream = self.stream(self.head.position)
        found: list[tuple[bytes | None, int]] = []
        for _ in range(2):
            size = stream.read_size()
            end = stream.position + max(size, 0)
            kept = b"".join(stream.take(min(size, size_bytes)))
            stream.skip_to(end)
            found.append((kept if size >= 0 else None, size))
        return found


class Page(NamedTuple):
    """Records by batch with the size of each batch, or one `large` record; the offset after them,
    and their size as `max_bytes` counts it.
    """

    batches: list[Columns]
    sizes: list[int]
    next_offset: int
    large: LargeRecord | None = None

    @property
    def record_count(self) -> int:
        return sum(len(columns.offsets) for columns in self.batches) + (self.large is not None)

    @property
    def size_bytes(self) -> int:
        return sum(self.sizes) if self.large is None else self.large.head.size_bytes


class _Decoded(NamedTuple):
    """The first records of a batch."""

    columns: Columns
    piece: FileSlice
    header: BatchHeader  # with the position in the file


def read_page(
    fetched: Fetched,
    *,
    offset: int,
    max_bytes: int,
    max_records: int = PAGE_RECORDS,
    wait: Wait = Wait.WAIT,
) -> Page:
    """Decode the records from `offset` on. Reads files, so it may block.

    `max_bytes` counts keys, values and headers, and RECORD_BYTES per record; above PAGE_BYTES it
    has no effect, and neither has `max_records` above PAGE_RECORDS. A corrupt batch ends the page
    before it; if it is the first, raises CorruptBatch. Who never waits gets WouldBlock for what is
    not in memory or compressed, which is an unknown amount of work.
    """
    left_bytes, left = min(max_bytes, PAGE_BYTES), min(max_records, PAGE_RECORDS)
    page = Page([], [], max(fetched.next_offset, offset))
    try:
        for found in _visible_records(fetched, offset, left + 1, wait):
            if isinstance(found, LargeRecord):
                return _ended_at(page, found)
            columns = found.columns
            count, size, large = _fitting(columns, left_bytes, left, is_first=not page.batches)
            if large and not page.batches:
                at = columns.offsets[0]
                return _ended_at(page, large_record(found.piece.file, found.header, at))
            if count:
                page.batches.append(_part(columns, 0, count))
                page.sizes.append(size)
            left, left_bytes = left - count, left_bytes - size
            if count < len(columns.offsets):
                return page._replace(next_offset=columns.offsets[count])
    except CorruptBatch:
        if not page.batches:
            raise
        return page._replace(next_offset=page.batches[-1].offsets[-1] + 1)
    return page


def _ended_at(page: Page, large: LargeRecord) -> Page:
    """The page before a large record, or that record."""
    if page.batches:
        return page._replace(next_offset=large.head.offset)
    return page._replace(next_offset=large.head.offset + 1, large=large)


def _visible_records(
    fetched: Fetched, offset: int, max_records: int, wait: Wait
) -> Iterator[_Decoded | LargeRecord]:
    """The records from `offset` on of each visible batch, at most `max_records` of each. Raises
    CorruptBatch, WouldBlock.
    """
    for piece in fetched.slices:
        if piece.size_bytes > BATCH_BYTES:  # it is a single batch: a fetch has at least one
            yield from _large_batch(fetched, piece, offset, max_records, wait)
            continue
        data = piece.read(wait)
        for header in _batches(data, piece, offset, fetched.next_offset):
            if not _is_visible(fetched, header, offset):
                continue
            if header.codec != codecs.NONE:
                wait.before("a batch is decompressed")
            in_file = header.at(piece.position + header.position)
            try:
                columns = _decode(data, header, piece, offset, max_records)
            except DecompressedTooLarge:
                yield from _streamed(piece, in_file, offset, max_records)
            else:
                yield _Decoded(columns, piece, in_file)


def _is_visible(fetched: Fetched, header: BatchHeader, offset: int) -> bool:
    return not (
        header.last_offset < offset or header.is_control or is_aborted(header, fetched.aborted)
    )


def is_aborted(header: BatchHeader, aborted: Sequence[AbortedTxn]) -> bool:
    """Whether the batch belongs to an aborted transaction."""
    return header.is_transactional and any(
        transaction.producer_id == header.producer_id
        and transaction.first_offset <= header.base_offset <= transaction.last_offset
        for transaction in aborted
    )


def _batches(data: bytes, piece: FileSlice, offset: int, next_offset: int) -> Iterable[BatchHeader]:
    try:
        for header in headers_in_order(data, from_offset=offset, next_offset=next_offset):
            check_crc(data, header)
            yield header
    except CorruptBatch as error:
        raise _in_file(error, piece) from error


def _decode(
    data: bytes, header: BatchHeader, piece: FileSlice, offset: int, max_records: int
) -> Columns:
    """Raises DecompressedTooLarge for a batch that is too large to be decoded at once."""
    if header.record_count > BATCH_RECORDS:
        raise DecompressedTooLarge(header.codec, max_bytes=BATCH_BYTES)
    try:
        return decode_columns(
            data, header, from_offset=offset, max_records=max_records, max_bytes=BATCH_BYTES
        )
    except DecompressedTooLarge:
        raise
    except CorruptBatch as error:
        raise _in_file(error, piece) from error


def _large_batch(
    fetched: Fetched, piece: FileSlice, offset: int, max_records: int, wait: Wait
) -> Iterator[_Decoded | LargeRecord]:
    wait.before("a large batch is read")
    pread = pread_of(piece.file)
    try:
        header = parse_header(pread(HEADER_SIZE, piece.position), at=piece.position)
        end = piece.position + piece.size_bytes
        check_crc_in_pieces(pread, header, end=end, piece_bytes=CHUNK_BYTES)
    except CorruptBatch as error:
        raise _in_file(error, piece, at=0) from error
    if _is_visible(fetched, header, offset):
        yield from _streamed(piece, header, offset, max_records)


def _streamed(
    piece: FileSlice, header: BatchHeader, offset: int, max_records: int
) -> Iterator[_Decoded | LargeRecord]:
    """As much as a page may hold of a batch that is too large to be decoded at once."""
    pread = pread_of(piece.file)
    stream = RecordStream(header, pread)
    records: list[Record] = []
    size = 0
    try:
        while len(records) < max_records and size < PAGE_BYTES + LARGE_RECORD_BYTES:
            head = stream.next_head()
            if head is None:
                break
            if head.offset < offset:
                stream.skip_to(head.position + head.size_bytes)
            elif head.size_bytes <= LARGE_RECORD_BYTES:
                records.append(stream.whole_record(head))
                size += head.size_bytes
            else:
                if records:
                    yield _Decoded(_columns(records), piece, header)
                yield LargeRecord(piece.file, header, head, stream_bytes(header, pread))
                return
    except CorruptBatch as error:
        raise _in_file(error, piece, at=0) from error
    if records:
        yield _Decoded(_columns(records), piece, header)


def _columns(records: Sequence[Record]) -> Columns:
    return Columns(*map(list, zip(*records, strict=True)))


def pread_of(file: OpenFile) -> Pread:
    return partial(pread_exactly, file)


def large_record(file: OpenFile, header: BatchHeader, offset: int) -> LargeRecord:
    """The record of the batch that has `offset`."""
    pread = pread_of(file)
    stream = RecordStream(header, pread)
    while (head := stream.next_head()) is not None:
        if head.offset == offset:
            return LargeRecord(file, header, head, stream_bytes(header, pread))
        stream.skip_to(head.position + head.size_bytes)
    raise CorruptBatch("a record is not where it was found before", offset=offset)


def _in_file(error: CorruptBatch, piece: FileSlice, *, at: int | None = None) -> CorruptBatch:
    """`at`: the position in the file of what the error's position is relative to."""
    piece.file.report_corrupt()
    start = piece.position if at is None else at
    return CorruptBatch(
        error.detail,
        file=str(piece.file.path),
        position=start + (error.position or 0),
        offset=error.offset,
    )


def _fitting(
    columns: Columns, max_bytes: int, max_records: int, *, is_first: bool
) -> tuple[int, int, bool]:
    """(the number of records that fit, their bytes, whether a large one ends them). At least one
    record of the first batch fits unless it is large.
    """
    sizes = _sizes(columns)
    count, total = len(sizes), sum(sizes)
    if total > max_bytes:
        count = sum(1 for running in accumulate(sizes) if running <= max_bytes)
    count = min(count, max_records)
    if is_first and sizes:
        count = max(count, 1)
    if total > LARGE_RECORD_BYTES and max(sizes[:count], default=0) > LARGE_RECORD_BYTES:
        count = next(at for at, size in enumerate(sizes) if size > LARGE_RECORD_BYTES)
        return count, sum(sizes[:count]), not count
    return count, total if count == len(sizes) else sum(sizes[:count]), False


def _sizes(columns: Columns) -> list[int]:
    sizes = [
        RECORD_BYTES + len(key or b"") + len(value or b"")
        for key, value in zip(columns.keys, columns.values, strict=True)
    ]
    if any(columns.headers):
        sizes = [
            size + sum(len(name) + len(content or b"") for name, content in headers)
            for size, headers in zip(sizes, columns.headers, strict=True)
        ]
    return sizes


def _part(columns: Columns, start: int, end: int) -> Columns:
    if end - start == len(columns.offsets):
        return columns
    return Columns(
        columns.offsets[start:end],
        columns.timestamps[start:end],
        columns.keys[start:end],
        columns.values[start:end],
        columns.headers[start:end],
    )


def chunks_of(page: Page) -> Iterator[Columns]:
    """The records of the page, about CHUNK_BYTES at a time."""
    for columns, size_bytes in zip(page.batches, page.sizes, strict=True):
        if size_bytes <= CHUNK_BYTES:
            yield columns
            continue
        start = size = 0
        for end, record_bytes in enumerate(_sizes(columns), 1):
            size += record_bytes
            if size >= CHUNK_BYTES:
                yield _part(columns, start, end)
                start, size = end, 0
        if start < len(columns.offsets):
            yield _part(columns, start, len(columns.offsets))


def filter_batches(fetched: Fetched, *, offset: int, max_records: int | None) -> Fetched:
    """Keep whole batches with at most `max_records` records from `offset` on, but at least one.

    Aborted batches are removed; what is left holds its files too, and the caller closes both. A
    corrupt header ends the fetch before it; if nothing precedes it, raises CorruptBatch. Reads
    files, so it may block.
    """
    kept: list[FileSlice] = []
    records, next_offset = 0, offset
    try:
        for header, piece in _whole_batches(fetched):
            first = max(offset, header.base_offset)
            counted = min(header.record_count, header.last_offset - first + 1)
            if max_records is not None and kept and records + counted > max_records:
                # Not this batch's base offset: no checksum covers it, and nobody else reads it.
                break
            next_offset = header.next_offset
            if not is_aborted(header, fetched.aborted):
                kept.append(piece)
                records += 0 if header.is_control else counted
        else:
            next_offset = fetched.next_offset
    except CorruptBatch:
        if not kept:
            raise
    slices = tuple(piece._replace(file=piece.file.share()) for piece in _merged(kept))
    return fetched._replace(slices=slices, next_offset=next_offset)


def batches_with_key(fetched: Fetched, *, offset: int, key: bytes) -> Fetched:
    """Keep the visible batches, from `offset` on, that contain the bytes of the key: perhaps
    elsewhere, but no other batch has a record of it.

    As `filter_batches`: what is left holds its files too, a corrupt batch ends the fetch before it,
    and if nothing precedes it, raises CorruptBatch. Reads files, so it may block.
    """
    kept: list[FileSlice] = []
    next_offset = offset
    try:
        for piece in fetched.slices:
            if piece.size_bytes > BATCH_BYTES:  # a single batch: whoever decodes it looks into it
                kept.append(piece)
                continue
            data = piece.read()
            for header in _batches(data, piece, offset, fetched.next_offset):
                if _is_visible(fetched, header, offset) and _may_have(data, header, key):
                    position = piece.position + header.position
                    kept.append(piece._replace(position=position, size_bytes=header.size_bytes))
                next_offset = header.next_offset
        next_offset = max(fetched.next_offset, offset)
    except CorruptBatch:
        if next_offset == offset:
            raise
    slices = tuple(piece._replace(file=piece.file.share()) for piece in _merged(kept))
    return fetched._replace(slices=slices, next_offset=next_offset)


def _may_have(data: bytes, header: BatchHeader, key: bytes) -> bool:
    if header.codec == codecs.NONE:
        return data.find(key, header.body_position, header.end_position) >= 0
    try:
        return key in expand(data, header, max_bytes=BATCH_BYTES)
    except CorruptBatch:
        return True  # whoever decodes it finds out, or reads it record by record


def only_with_key(page: Page, key: bytes, *, max_records: int) -> Page:
    """The page's records of this key, at most so many. Reads the key of a large record."""
    batches: list[Columns] = []
    left, next_offset = max_records, page.next_offset
    for columns in page.batches:
        rows = [at for at, one in enumerate(columns.keys) if one == key]
        if len(rows) > left:
            next_offset = columns.offsets[rows[left]]
        if kept := rows[:left]:
            batches.append(Columns._make([column[at] for at in kept] for column in columns))
        left -= len(kept)
        if next_offset < page.next_offset:
            break
    large = page.large
    if large is not None and large.prefixes(len(key) + 1)[0] != (key, len(key)):
        large = None
    return Page(batches, [sum(_sizes(columns)) for columns in batches], next_offset, large)


def _whole_batches(fetched: Fetched) -> Iterator[tuple[BatchHeader, FileSlice]]:
    """Each batch, and where it is in its file. Raises CorruptBatch."""
    for piece in fetched.slices:
        position, end = piece.position, piece.position + piece.size_bytes
        while position < end:
            header = _header_at(piece, position, end=end)
            yield header, piece._replace(position=position, size_bytes=header.size_bytes)
            position += header.size_bytes


def _header_at(piece: FileSlice, position: int, *, end: int) -> BatchHeader:
    try:
        header = parse_header(os.pread(piece.file.fileno(), HEADER_SIZE, position), at=position)
        if header.end_position > end:
            raise truncated_batch(header, end=end)
    except CorruptBatch as bad:
        raise _in_file(bad, piece, at=0) from None
    return header


def _merged(pieces: list[FileSlice]) -> Iterator[FileSlice]:
    """Merge adjacent slices of a file."""
    run: FileSlice | None = None
    for piece in pieces:
        if run is not None and run.file is piece.file and _end(run) == piece.position:
            run = run._replace(size_bytes=run.size_bytes + piece.size_bytes)
            continue
        if run is not None:
            yield run
        run = piece
    if run is not None:
        yield run


def _end(piece: FileSlice) -> int:
    return piece.position + piece.size_bytes
