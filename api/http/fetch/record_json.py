"""Encodes records as JSON: for fetch responses, NDJSON lines and server-sent events.

Rules:

* A page holds at least one record if there is one, and ends at the first limit it reaches;
  `next_offset` is where the next page begins. Its size is bounded even if a compressed batch
  expands a thousandfold, or if records are nearly empty.
* Control batches, aborted batches and records below the given offset are left out.
* A batch's checksum is verified before it is decoded.
* Records are processed by column; msgspec creates and encodes one struct per record.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate, repeat
from typing import Final, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tierlog.broker.partition import Fetched
from tierlog.host import page_cache
from tierlog.host.file_slice import FileSlice
from tierlog.record_format import codecs
from tierlog.record_format.batch import BatchHeader, check_crc
from tierlog.record_format.batch_order import headers_in_order
from tierlog.record_format.decode import Columns, decode_columns
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import AbortedTxn

Encoding = Literal["utf8", "json", "base64"]
Shown = str | Raw | None | UnsetType
Bytes64 = bytes | UnsetType

MAX_EXPANDED_BATCH: Final = 256 << 20
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
    """Records by batch, the offset after them, and their size as `max_bytes` counts it."""

    batches: list[Columns]
    next_offset: int
    size_bytes: int

    @property
    def record_count(self) -> int:
        return sum(len(columns.offsets) for columns in self.batches)


_ENCODER: Final = msgspec.json.Encoder()
_ANY: Final = msgspec.json.Decoder(Raw)
_NO_HEADERS: Final[list[HeaderOut]] = []


class WouldBlock(Exception):
    """Bytes would have to be read from disk, or a batch decompressed to an unknown size."""


def read_page(
    fetched: Fetched,
    *,
    offset: int,
    max_bytes: int,
    max_records: int = PAGE_RECORDS,
    nowait: bool = False,
) -> Page:
    """Decode the records from `offset` on. Reads files, so it may block.

    `max_bytes` counts keys, values and headers, and RECORD_BYTES per record; `max_records` above
    PAGE_RECORDS has no effect. A corrupt batch ends the page before it; if it is the first, raises
    CorruptBatch. With `nowait`, raises WouldBlock rather than decompress a batch or wait for the
    disk.
    """
    max_records = min(max_records, PAGE_RECORDS)
    batches: list[Columns] = []
    size = 0
    next_offset = max(fetched.next_offset, offset)
    try:
        for columns in _visible_columns(fetched, offset, max_records + 1, nowait=nowait):
            count, count_bytes = _fitting(
                columns, max_bytes - size, max_records, is_first=not batches
            )
            if count:
                batches.append(_first(columns, count))
            size += count_bytes
            max_records -= count
            if count < len(columns.offsets):
                next_offset = columns.offsets[count]
                break
    except CorruptBatch:
        if not batches:
            raise
        next_offset = batches[-1].offsets[-1] + 1
    return Page(batches, next_offset, size)


def _read_now(piece: FileSlice) -> bytes:
    """Raises WouldBlock. A residency check beforehand would not do: it only takes samples."""
    try:
        data = page_cache.pread_nowait(piece.file.fd, piece.size_bytes, piece.position)
    except BlockingIOError as error:
        raise WouldBlock from error
    return data if len(data) == piece.size_bytes else piece.read()


def _visible_columns(
    fetched: Fetched, offset: int, max_records: int, *, nowait: bool
) -> Iterable[Columns]:
    """The records from `offset` on of each visible batch, at most `max_records` of each. Raises
    CorruptBatch, WouldBlock.
    """
    for piece in fetched.slices:
        data = _read_now(piece) if nowait else piece.read()
        for header in _batches(data, piece, offset, fetched.next_offset):
            if header.last_offset < offset or header.is_control:
                continue
            if is_aborted(header, fetched.aborted):
                continue
            if nowait and header.codec != codecs.NONE:
                raise WouldBlock
            yield _decode(data, header, piece, offset, max_records)


def is_aborted(header: BatchHeader, aborted: Sequence[AbortedTxn]) -> bool:
    """Whether the batch belongs to an aborted transaction."""
    return header.is_transactional and any(
        transaction.producer_id == header.producer_id
        and transaction.first_offset <= header.base_offset <= transaction.last_offset
        for transaction in aborted
    )


def write_array(page: Page, encoding: Encoding) -> bytes:
    """The records as the elements of a JSON array, without its brackets."""
    parts = [_ENCODER.encode(list(_records(columns, encoding))) for columns in page.batches]
    return b",".join(part[1:-1] for part in parts if len(part) > 2)


def write_lines(page: Page, *, partition: int, encoding: Encoding) -> bytes:
    """The records as NDJSON, each line with its line break."""
    return b"".join(
        _ENCODER.encode_lines(list(_lines(columns, partition, encoding)))
        for columns in page.batches
    )


def event_lines(page: Page, *, partition: int, encoding: Encoding) -> list[tuple[int, bytes]]:
    """(offset, line without a line break) of each record."""
    return [
        (line.offset, _ENCODER.encode(line))
        for columns in page.batches
        for line in _lines(columns, partition, encoding)
    ]


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
    try:
        return decode_columns(
            data,
            header,
            from_offset=offset,
            max_records=max_records,
            max_bytes=MAX_EXPANDED_BATCH,
        )
    except CorruptBatch as error:
        raise _in_file(error, piece) from error


def _in_file(error: CorruptBatch, piece: FileSlice) -> CorruptBatch:
    piece.file.report_corrupt()
    return CorruptBatch(
        error.detail,
        file=str(piece.file.path),
        position=piece.position + (error.position or 0),
        offset=error.offset,
    )


def _fitting(
    columns: Columns, max_bytes: int, max_records: int, *, is_first: bool
) -> tuple[int, int]:
    """(the number of records that fit, their bytes); at least one record of the first batch."""
    sizes = _sizes(columns)
    count, total = len(sizes), sum(sizes)
    if total > max_bytes:
        count = sum(1 for running in accumulate(sizes) if running <= max_bytes)
    count = min(count, max_records)
    if is_first and sizes:
        count = max(count, 1)
    return count, total if count == len(sizes) else sum(sizes[:count])


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


def _first(columns: Columns, count: int) -> Columns:
    if count == len(columns.offsets):
        return columns
    return Columns(
        columns.offsets[:count],
        columns.timestamps[:count],
        columns.keys[:count],
        columns.values[:count],
        columns.headers[:count],
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
