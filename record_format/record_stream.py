"""Reads the records of one batch from its start, piece by piece: for what is too large to decode at
once.

Rules that keep it honest:

* In memory are a piece of the expanded records and what the codec itself needs: `stream_bytes` says
  how much at most. Snappy has no pieces: a batch of it is expanded whole.
* It only goes forward. To look at something twice is to open a second stream.
* A length is checked against what encloses it before it is used. The caller has verified the
  checksum (`batch.check_crc`).
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from typing import IO, Final, NamedTuple, cast

from tierlog.record_format import codecs
from tierlog.record_format.batch import LOG_APPEND_TIME_BIT, BatchHeader
from tierlog.record_format.decode import Record, corrupt_batch, read_headers
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.varint import read_varint, read_varlong

_HEAD_BYTES: Final = 64  # more than the fields of a record before its key
_ZSTD_USUAL_WINDOW: Final = 8 << 20

Pread = Callable[[int, int], bytes]  # (size, position in the file)


class RecordHead(NamedTuple):
    """A record up to its key. `position` is that of the key's length in the expanded records, and
    `size_bytes` what follows from there.
    """

    offset: int
    timestamp: int
    position: int
    size_bytes: int


def stream_bytes(header: BatchHeader, pread: Pread) -> int:
    """How much memory a stream of this batch takes at most."""
    expanded = codecs.MAX_EXPANDED_BYTES
    if header.codec == codecs.SNAPPY:
        return min(expanded, codecs.SNAPPY_MAX_RATIO * header.size_bytes) + header.size_bytes
    window = _ZSTD_USUAL_WINDOW
    if header.codec == codecs.ZSTD:
        body = pread(header.end_position - header.body_position, header.body_position)
        window = max(window, min(expanded, codecs.zstd_window(body)))
    return window + 8 * codecs.PIECE_BYTES


class RecordStream:
    """The expanded records of a batch whose header has its position in the file."""

    __slots__ = ("_at", "_header", "_left", "_pieces", "_window", "_window_start")

    def __init__(self, header: BatchHeader, pread: Pread) -> None:
        self._header, self._left = header, header.record_count
        source = cast("IO[bytes]", _Input(header, pread))
        self._pieces = codecs.decompress_in_pieces(header.codec, source)
        self._window, self._window_start, self._at = b"", 0, 0

    @property
    def position(self) -> int:
        """How many bytes of the expanded records were read."""
        return self._window_start + self._at

    def next_head(self) -> RecordHead | None:
        """The next record's head; None after the last. Call once the one before was read whole."""
        if not self._left:
            return None
        self._left -= 1
        self._load(_HEAD_BYTES)
        window, header = self._window, self._header
        size, at = read_varint(window, self._at)
        end = self._window_start + at + size
        timestamp, at = read_varlong(window, at + 1)
        delta, at = read_varint(window, at)
        self._at = at
        if not 0 <= delta <= header.last_offset_delta or end <= self.position:
            raise self._corrupt("a record's length or offset does not fit")
        is_stamped = header.attributes & LOG_APPEND_TIME_BIT
        timestamp = header.max_timestamp if is_stamped else header.base_timestamp + timestamp
        return RecordHead(header.base_offset + delta, timestamp, self.position, end - self.position)

    def whole_record(self, head: RecordHead) -> Record:
        """The record whose head was just read."""
        data = b"".join(self.take(head.size_bytes))
        key, at = _field(data, 0)
        value, at = _field(data, at)
        return Record(head.offset, head.timestamp, key, value, read_headers(data, at))

    def read_size(self) -> int:
        """The varint here: a length or a count."""
        self._load(_HEAD_BYTES)
        size, self._at = read_varint(self._window, self._at)
        return size

    def skip_to(self, position: int) -> None:
        for _ in self.take(position - self.position):
            pass

    def take(self, size_bytes: int) -> Iterator[bytes]:
        """The next bytes, in pieces."""
        while size_bytes > 0:
            if self._at == len(self._window):
                self._window_start += self._at
                self._window, self._at = self._next_piece(), 0
            piece = self._window[self._at : self._at + size_bytes]
            self._at += len(piece)
            size_bytes -= len(piece)
            yield piece

    def _next_piece(self) -> bytes:
        piece = self._expand_next()
        if not piece:
            raise self._corrupt("the records end too early")
        return piece

    def _load(self, size_bytes: int) -> None:
        """Have so many bytes in the window, or all that are left."""
        while len(self._window) - self._at < size_bytes:
            more = self._expand_next()
            if not more:
                return
            self._window_start += self._at
            self._window, self._at = self._window[self._at :] + more, 0

    def _expand_next(self) -> bytes:
        try:
            return next(self._pieces, b"")
        except CorruptBatch as error:
            raise self._corrupt(error.detail) from error

    def _corrupt(self, detail: str) -> CorruptBatch:
        return corrupt_batch(detail, self._header)


def _field(data: bytes, at: int) -> tuple[bytes | None, int]:
    size, at = read_varint(data, at)
    end = at + max(size, 0)
    if size < -1 or end > len(data):
        raise CorruptBatch("a field does not fit its record")
    return (None if size < 0 else data[at:end]), end


class _Input(io.RawIOBase):
    """The compressed records as a file."""

    def __init__(self, header: BatchHeader, pread: Pread) -> None:
        self._at, self._end, self._pread = header.body_position, header.end_position, pread

    def readable(self) -> bool:
        return True

    def read(self, size: int = -1, /) -> bytes:
        left = self._end - self._at
        data = self._pread(left if size < 0 else min(size, left), self._at)
        self._at += len(data)
        return data
