"""Encodes records as JSON: for fetch responses, NDJSON lines and server-sent events.

* Records are processed by column; msgspec creates and encodes one struct per record. It holds the
  interpreter meanwhile, so it is given a part of a large batch at a time.
* Escaping makes text up to six times as large: the text is limited too.
* The text of a large record is made as it is sent. Key, value and headers follow each other in the
  JSON as they do in the batch: the records are expanded once, from the start of the batch, and only
  a piece of them is in memory. Only whether a large field is UTF-8 has to be known before its first
  byte: it is found in a second pass.
* With `json` a large value is decoded whole, once, to see whether it is JSON; `memory_bytes` says
  so.
"""

from __future__ import annotations

import binascii
import codecs
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Final, Literal, NamedTuple, TypeVar

import msgspec
from msgspec import UNSET, Raw, UnsetType

from tierlog.api.http.fetch.record_pages import LargeRecord, Page, chunks_of
from tierlog.broker.schema_registry.decoding import DecodedBy, RecordDecoder
from tierlog.record_format.codecs import PIECE_BYTES
from tierlog.record_format.decode import Columns
from tierlog.record_format.record_stream import RecordStream

Shown = str | Raw | None | UnsetType
Bytes64 = bytes | UnsetType
TEXT_BYTES: Final = 32 << 20
_LINE_BREAKS: Final = b"\r\n"
_CR, _LF = _LINE_BREAKS  # as integers: `b"x" in …` costs an exception
_ENCODER: Final = msgspec.json.Encoder()
_ANY: Final = msgspec.json.Decoder(Raw)
_NO_HEADERS: Final[list[HeaderOut]] = []
Encoding = Literal["utf8", "json", "base64"]
AnyRecord = TypeVar("AnyRecord", "RecordOut", "RecordLine")
_JSON_STARTS: Final = b'{["-0123456789tfn \t\r\n'


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
    key_schema: DecodedBy | UnsetType = UNSET
    value_schema: DecodedBy | UnsetType = UNSET


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
    key_schema: DecodedBy | UnsetType = UNSET
    value_schema: DecodedBy | UnsetType = UNSET


class LargeText(NamedTuple):
    """A large record as JSON; on one line and with its partition if there is one."""

    record: LargeRecord
    encoding: Encoding
    partition: int | None = None

    @property
    def memory_bytes(self) -> int:
        whole = self.record.head.size_bytes if self.encoding == "json" else 0
        return self.record.memory_bytes + 16 * PIECE_BYTES + whole

    def pieces(self) -> Iterator[bytes]:
        """The text; each piece has some hundred KiB. Reads the file, so it may block."""
        return _in_pieces(self._written())

    def _written(self) -> Iterator[bytes]:
        head = self.record.head
        first = b"{" if self.partition is None else b'{"partition":%d,' % self.partition
        yield first + b'"offset":%d,"timestamp":%d,' % (head.offset, head.timestamp)
        stream = self.record.stream(head.position)
        yield from self._field(stream, b"key", stream.read_size())
        yield b","
        yield from self._field(stream, b"value", stream.read_size(), is_value=True)
        yield b',"headers":['
        for number in range(stream.read_size()):
            yield b',{"name":' if number else b'{"name":'
            yield from _text_in_pieces(stream.take(stream.read_size()), errors="replace")
            yield b","
            yield from self._field(stream, b"value", stream.read_size())
            yield b"}"
        yield b"]}"

    def _field(
        self, stream: RecordStream, name: bytes, size_bytes: int, *, is_value: bool = False
    ) -> Iterator[bytes]:
        if size_bytes < 0:
            yield b'"%b%b":null' % (name, b"_base64" if self.encoding == "base64" else b"")
            return
        small = size_bytes <= PIECE_BYTES
        data = b"".join(stream.take(size_bytes)) if small else b""
        start = stream.position

        def field() -> Iterable[bytes]:
            """Its bytes, as often as asked."""
            return (data,) if small else self.record.stream(start).take(size_bytes)

        source = (data,) if small else stream.take(size_bytes)
        if self.encoding == "base64" or not _is_text(field()):
            yield b'"%b_base64":' % name
            yield from _base64(source)
            return
        yield b'"%b":' % name
        if is_value and self.encoding == "json" and _is_json(field):
            one_line = self.partition is not None
            for piece in source:
                yield piece.translate(None, _LINE_BREAKS) if one_line else piece
        else:
            yield from _text_in_pieces(source)


Part = bytes | LargeText


class PageText(NamedTuple):
    """A page as text, perhaps cut short; the offset after it, and the number of its records."""

    parts: tuple[Part, ...]
    next_offset: int
    records: int

    @property
    def size_bytes(self) -> int:
        return size_of(self.parts)


def size_of(parts: Iterable[Part]) -> int:
    return sum(
        len(part) if isinstance(part, bytes) else part.record.head.size_bytes for part in parts
    )


def write_array(
    page: Page,
    encoding: Encoding,
    *,
    text_bytes: int = TEXT_BYTES,
    decoder: RecordDecoder | None = None,
) -> PageText:
    """The records as the elements of a JSON array, without its brackets."""
    if page.large is not None:
        return PageText((LargeText(page.large, encoding),), page.next_offset, 1)

    def encode(columns: Columns) -> bytes:
        records = map(RecordOut, *_members(columns, encoding, one_line=False))
        return _ENCODER.encode(list(_decoded(records, columns, decoder)))[1:-1]

    return _write(page, encode, b",", text_bytes)


def write_lines(
    page: Page, *, partition: int, encoding: Encoding, decoder: RecordDecoder | None = None
) -> PageText:
    """The records as NDJSON, each line with its line break."""
    if page.large is not None:
        line = LargeText(page.large, encoding, partition)
        return PageText((line, b"\n"), page.next_offset, 1)

    def encode(columns: Columns) -> bytes:
        records = lines_of(columns, partition, encoding)
        return _ENCODER.encode_lines(list(_decoded(records, columns, decoder)))

    return _write(page, encode, b"", TEXT_BYTES)


def event_lines(page: Page, *, partition: int, encoding: Encoding) -> list[tuple[int, Part]]:
    """(offset, line without a line break) of each record."""
    if page.large is not None:
        return [(page.large.head.offset, LargeText(page.large, encoding, partition))]
    return [
        (line.offset, _ENCODER.encode(line))
        for columns in page.batches
        for line in lines_of(columns, partition, encoding)
    ]


def _write(
    page: Page, encode: Callable[[Columns], bytes], separator: bytes, text_bytes: int
) -> PageText:
    """Encode chunk by chunk, until the text has `text_bytes`."""
    texts: list[bytes] = []
    size = records = 0
    for columns in chunks_of(page):
        text = encode(columns)
        size += len(text)
        if texts and size > text_bytes:
            return PageText((separator.join(texts),), columns.offsets[0], records)
        texts.append(text)
        records += len(columns.offsets)
    return PageText((separator.join(texts),), page.next_offset, records)


def lines_of(columns: Columns, partition: int, encoding: Encoding) -> Iterable[RecordLine]:
    return map(RecordLine, repeat(partition), *_members(columns, encoding, one_line=True))


def _decoded(
    records: Iterable[AnyRecord], columns: Columns, decoder: RecordDecoder | None
) -> Iterable[AnyRecord]:
    """With what their keys and values say in place of them, where they begin with an id."""
    if decoder is None:
        return records
    return map(partial(_decode, decoder), records, columns.keys, columns.values)


def _decode(
    decoder: RecordDecoder, record: AnyRecord, key: bytes | None, value: bytes | None
) -> AnyRecord:
    if (found := decoder.decode(key, "key")) is not None:
        record.key_schema = found.schema
        if found.text is not None:
            record.key, record.key_base64 = Raw(found.text), UNSET
    if (found := decoder.decode(value, "value")) is not None:
        record.value_schema = found.schema
        if found.text is not None:
            record.value, record.value_base64 = Raw(found.text), UNSET
    return record


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


def _in_pieces(parts: Iterable[bytes]) -> Iterator[bytes]:
    """The same bytes, in pieces that are worth a hand-over between threads."""
    piece = bytearray()
    for part in parts:
        piece += part
        if len(piece) >= PIECE_BYTES:
            yield bytes(piece)
            piece.clear()
    if piece:
        yield bytes(piece)


def _is_text(pieces: Iterable[bytes]) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for piece in pieces:
            decoder.decode(piece)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def _is_json(field: Callable[[], Iterable[bytes]]) -> bool:
    first = next(iter(field()), b"")[:1]
    if not first or first not in _JSON_STARTS:
        return False
    whole = bytearray()
    for piece in field():
        whole += piece
    try:
        _ANY.decode(whole)
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _text_in_pieces(pieces: Iterable[bytes], *, errors: str = "strict") -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    yield b'"'
    for piece in pieces:
        yield _ENCODER.encode(decoder.decode(piece))[1:-1]
    yield _ENCODER.encode(decoder.decode(b"", final=True))[1:-1] + b'"'


def _base64(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield b'"'
    rest = b""
    for piece in pieces:
        data = rest + piece
        whole = len(data) - len(data) % 3  # of such lengths the texts can be joined
        yield binascii.b2a_base64(data[:whole], newline=False)
        rest = data[whole:]
    yield binascii.b2a_base64(rest, newline=False) + b'"'
