"""Encodes records as JSON: for fetch responses, NDJSON lines and server-sent events.

Rules:

* A page holds at least one record if there is one, and ends at the first limit it reaches;
  `next_offset` is where the next page begins. Its size is bounded even if a compressed batch
  expands a thousandfold, or if records are nearly empty.
* Control batches, aborted batches and records below the given offset are left out.
* A batch's checksum is verified before it is decoded.
* Records are processed by column; msgspec creates and encodes one struct per record. It holds the
  interpreter meanwhile, so it is given a part of a large batch at a time.
* Escaping makes text up to six times as large: the text is limited too, and a record that would be
  too large for a page comes alone, as a `LargeText`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, repeat
from typing import Final, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tierlog.api.http.fetch.large_records import (
    LARGE_RECORD_BYTES,
    Encoding,
    LargeRecord,
    LargeText,
    large_record,
    pread_of,
)
from tierlog.broker.partition import Fetched
from tierlog.host.file_slice import FileSlice
from tierlog.host.waiting import Wait
from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    HEADER_SIZE,
    BatchHeader,
    check_crc,
    check_crc_in_pieces,
    parse_header,
)
from tierlog.record_format.batch_runs import headers_in_order
from tierlog.record_format.codecs import DecompressedTooLarge
from tierlog.record_format.decode import Columns, Record, decode_columns
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn
from tierlog.record_format.record_stream import RecordStream, stream_bytes

Shown = str | Raw | None | UnsetType
Bytes64 = bytes | UnsetType

PAGE_BYTES: Final = 16 << 20  # of records
TEXT_BYTES: Final = 32 << 20
CHUNK_BYTES: Final = 256 << 10  # encoded in one call
# A larger batch is read record by record: decoded at once it would take too much memory.
BATCH_BYTES: Final = 32 << 20
BATCH_RECORDS: Final = 250_000
# The least overhead of a record in a batch: with it, a page is never smaller than the uncompressed
# batches that were read for it.
RECORD_BYTES: Final = 7
PAGE_RECORDS: Final = 100_000  # as text, each takes some hundred bytes of memory
_LINE_BREAKS: Final = b"\r\n"
_CR, _LF = _LINE_BREAKS  # as integers: `b"x" in …` costs an exception


class HeaderOut(msgspec.Struct):
    name: str
    value: str | UnsetType | None = UNSET
    value_base64: bytes | UnsetType | None = UNSET


class RecordOut(msgspec.Struct):
    """`*_base64` replaces a member whose bytes are not UTF-8."""

    offset: int
    timestamp: int
    key: Shown
    key_base64: Bytes64 | None
    value: Shown
    value_base64: Bytes64 | None
    headers: list[HeaderOut]


class RecordLine(msgspec.Struct):
    """As RecordOut, for NDJSON and events: with the partition."""

    partition: int
    offset: int
    timestamp: int
    key: Shown
    key_base64: Bytes64 | None
    value: Shown
    value_base64: Bytes64 | None
    headers: list[HeaderOut]


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


Part = bytes | LargeText


class PageText(NamedTuple):
    """A page as text, perhaps cut short; the offset after it, and the number of its records."""

    parts: tuple[Part, ...]
    next_offset: int
    records: int

    @property
    def size_bytes(self) -> int:
        return size_of(self.parts)


class _Decoded(NamedTuple):
    """The first records of a batch."""

    columns: Columns
    piece: FileSlice
    header: BatchHeader  # with the position in the file


_ENCODER: Final = msgspec.json.Encoder()
_ANY: Final = msgspec.json.Decoder(Raw)
_NO_HEADERS: Final[list[HeaderOut]] = []


def size_of(parts: Iterable[Part]) -> int:
    return sum(
        len(part) if isinstance(part, bytes) else part.record.head.size_bytes for part in parts
    )


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


def is_aborted(header: BatchHeader, aborted: Sequence[AbortedTxn]) -> bool:
    """Whether the batch belongs to an aborted transaction."""
    return header.is_transactional and any(
        transaction.producer_id == header.producer_id
        and transaction.first_offset <= header.base_offset <= transaction.last_offset
        for transaction in aborted
    )


def write_array(page: Page, encoding: Encoding, *, text_bytes: int = TEXT_BYTES) -> PageText:
    """The records as the elements of a JSON array, without its brackets."""
    if page.large is not None:
        return PageText((LargeText(page.large, encoding),), page.next_offset, 1)

    def encode(columns: Columns) -> bytes:
        return _ENCODER.encode(list(_records(columns, encoding)))[1:-1]

    return _write(page, encode, b",", text_bytes)


def write_lines(page: Page, *, partition: int, encoding: Encoding) -> PageText:
    """The records as NDJSON, each line with its line break."""
    if page.large is not None:
        line = LargeText(page.large, encoding, partition)
        return PageText((line, b"\n"), page.next_offset, 1)

    def encode(columns: Columns) -> bytes:
        return _ENCODER.encode_lines(list(_lines(columns, partition, encoding)))

    return _write(page, encode, b"", TEXT_BYTES)


def event_lines(page: Page, *, partition: int, encoding: Encoding) -> list[tuple[int, Part]]:
    """(offset, line without a line break) of each record."""
    if page.large is not None:
        return [(page.large.head.offset, LargeText(page.large, encoding, partition))]
    return [
        (line.offset, _ENCODER.encode(line))
        for columns in page.batches
        for line in _lines(columns, partition, encoding)
    ]


def _write(
    page: Page, encode: Callable[[Columns], bytes], separator: bytes, text_bytes: int
) -> PageText:
    """Encode chunk by chunk, until the text has `text_bytes`."""
    texts: list[bytes] = []
    size = records = 0
    for columns in _chunks(page):
        text = encode(columns)
        size += len(text)
        if texts and size > text_bytes:
            return PageText((separator.join(texts),), columns.offsets[0], records)
        texts.append(text)
        records += len(columns.offsets)
    return PageText((separator.join(texts),), page.next_offset, records)


def _chunks(page: Page) -> Iterator[Columns]:
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


def _records(columns: Columns, encoding: Encoding) -> Iterable[RecordOut]:
    return map(RecordOut, *_members(columns, encoding, one_line=False))


def _lines(columns: Columns, partition: int, encoding: Encoding) -> Iterable[RecordLine]:
    return map(RecordLine, repeat(partition), *_members(columns, encoding, one_line=True))


def _members(
    columns: Columns, encoding: Encoding, *, one_line: bool
) -> tuple[Iterable[object], ...]:
    """The members of all records by column, in RecordOut's order."""
    keys, key_bytes = _texts(columns.keys, encoding)
    values, value_bytes = _texts(columns.values, encoding)
    if encoding == "json":
        values = _documents(columns.values, values, one_line=one_line)
    headers: Iterable[list[HeaderOut]] = repeat(_NO_HEADERS)
    if any(columns.headers):
        headers = [
            [_header_out(name, content, encoding) for name, content in item]
            for item in columns.headers
        ]
    return (
        columns.offsets,
        columns.timestamps,
        keys,
        key_bytes,
        values,
        value_bytes,
        headers,
    )


def _texts(
    column: Sequence[bytes | None], encoding: Encoding
) -> tuple[Iterable[Shown], Iterable[Bytes64 | None]]:
    """(texts, bytes): each record has exactly one; the other is UNSET and not encoded."""
    if encoding == "base64":
        return repeat(UNSET), column
    try:
        return [None if item is None else item.decode() for item in column], repeat(UNSET)
    except UnicodeDecodeError:
        texts = [_text(item) for item in column]
        return texts, [
            item if text is UNSET else UNSET for item, text in zip(column, texts, strict=True)
        ]


def _text(item: bytes | None) -> str | UnsetType | None:
    if item is None:
        return None
    try:
        return item.decode()
    except UnicodeDecodeError:
        return UNSET


def _documents(
    column: Sequence[bytes | None], texts: Iterable[Shown], *, one_line: bool
) -> list[Shown]:
    return [
        text if item is None or text is UNSET else _document(item, text, one_line=one_line)
        for item, text in zip(column, texts, strict=False)
    ]


def _document(item: bytes, text: Shown, *, one_line: bool) -> Shown:
    """The value's source text if it is JSON, otherwise the text as a string."""
    try:
        raw = _ANY.decode(item)
    except (msgspec.DecodeError, RecursionError):
        return text
    if one_line and (_LF in item or _CR in item):
        # JSON escapes line breaks inside strings, so these are whitespace between tokens.
        return Raw(bytes(raw).translate(None, _LINE_BREAKS))
    return raw


def _header_out(name: str, content: bytes | None, encoding: Encoding) -> HeaderOut:
    if encoding == "base64":
        return HeaderOut(name, value_base64=content)
    text = _text(content)
    if text is UNSET:
        return HeaderOut(name, value_base64=content)
    return HeaderOut(name, value=text)
