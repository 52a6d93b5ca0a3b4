"""A record too large for a page: it is alone in a response, whose text is made as it is sent.

* Key, value and headers follow each other in the JSON as they do in the batch: the records are
  expanded once, from the start of the batch, and only a piece of them is in memory. Only whether a
  large field is UTF-8 has to be known before its first byte: it is found in a second pass.
* With `json` a large value is decoded whole, once, to see whether it is JSON; `memory_bytes` says
  so.
"""

from __future__ import annotations

import binascii
import codecs
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Final, Literal, NamedTuple

import msgspec

from tierlog.host.file_slice import OpenFile, pread_exactly
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.record_stream import Pread, RecordHead, RecordStream, stream_bytes

Encoding = Literal["utf8", "json", "base64"]

LARGE_RECORD_BYTES: Final = 1 << 20
PIECE_BYTES: Final = 128 << 10
_LINE_BREAKS: Final = b"\r\n"
_JSON_STARTS: Final = b'{["-0123456789tfn \t\r\n'
_ANY: Final = msgspec.json.Decoder(msgspec.Raw)
_TEXT: Final = msgspec.json.Encoder()


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
            yield from _text(stream.take(stream.read_size()), errors="replace")
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
            yield from _text(source)


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


def _text(pieces: Iterable[bytes], *, errors: str = "strict") -> Iterator[bytes]:
    decoder = codecs.getincrementaldecoder("utf-8")(errors)
    yield b'"'
    for piece in pieces:
        yield _TEXT.encode(decoder.decode(piece))[1:-1]
    yield _TEXT.encode(decoder.decode(b"", final=True))[1:-1] + b'"'


def _base64(pieces: Iterable[bytes]) -> Iterator[bytes]:
    yield b'"'
    rest = b""
    for piece in pieces:
        data = rest + piece
        whole = len(data) - len(data) % 3  # of such lengths the texts can be joined
        yield binascii.b2a_base64(data[:whole], newline=False)
        rest = data[whole:]
    yield binascii.b2a_base64(rest, newline=False) + b'"'
