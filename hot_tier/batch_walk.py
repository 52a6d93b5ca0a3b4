"""Iterating over the batches of a `.log` file, by headers alone or read and verified.

* `headers_from` trusts headers and reads no records: for bytes that were verified before (below the
  recovery point, or sealed). `checked_batches` reads everything and trusts nothing: for recovery,
  compaction and checks.
* Neither knows about offsets or indexes or makes decisions: they stop with CorruptBatch at bytes
  that are not a batch, naming the file and the position.
* A batch's base offset has no checksum. Whoever relies on it calls `check_in_order`.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Protocol

from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.open_files import FileReader, Pread
from tierlog.record_format.batch import (
    HEADER_SIZE,
    BatchHeader,
    check_crc,
    check_crc_in_pieces,
    parse_header,
    truncated_batch,
)
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET

WINDOW_BYTES = 8 * 1024
ONE_HEADER_BYTES = 2 * HEADER_SIZE
CHECK_CHUNK_BYTES = 1 << 20


class LogBytes(Protocol):
    """The bytes of a `.log`: of a file (`FileReader`) or an object."""

    @property
    def name(self) -> str: ...

    def read(self, size_bytes: int, position: int) -> bytes:
        """As os.pread."""


def headers_from(
    log: FileReader,
    position: int,
    *,
    end: int,
    first_bytes: int = ONE_HEADER_BYTES,
) -> Iterator[BatchHeader]:
    """The headers of the batches in [position, end); `header.position` is a position in the file.

    Reads `first_bytes` first; then a single header after a large batch, which is often the last one
    wanted, and a window of them after a small one. Raises CorruptBatch if the bytes are not a batch
    or a batch extends beyond `end`.
    """
    window, window_start = b"", position
    size_bytes = first_bytes
    try:
        while position < end:
            relative = position - window_start
            if relative + HEADER_SIZE > len(window):
                window = log.read(min(size_bytes, end - position), position)
                window_start, relative = position, 0
            header = parse_header(window, relative, at=position)
            if position + header.size_bytes > end:
                raise truncated_batch(header, end=end)
            yield header
            size_bytes = WINDOW_BYTES if header.size_bytes < WINDOW_BYTES else ONE_HEADER_BYTES
            position += header.size_bytes
    except CorruptBatch as bad:
        raise bad.with_location(file=log.name) from None


def check_in_order(header: BatchHeader, *, next_offset: int, end_offset: int) -> None:
    """Raise CorruptBatch unless the batch's offsets are in [next_offset, end_offset), where
    `next_offset` is the end of the batch before it.
    """
    if header.base_offset < next_offset:
        raise CorruptBatch(
            f"offset {header.base_offset} follows {next_offset - 1}", position=header.position
        )
    if header.last_offset >= end_offset:
        raise CorruptBatch(
            f"offset {header.last_offset} is out of the segment's range", position=header.position
        )


def headers_of(log: Path, *, pread: Pread = os.pread) -> Generator[BatchHeader, None, None]:
    """Every batch header of a closed log's `.log`. Raises CorruptBatch."""
    with closing(FileReader(OpenFile(log), pread)) as reader:
        yield from headers_from(reader, 0, end=log.stat().st_size)


def batch_of(log: LogBytes, header: BatchHeader) -> bytes:
    """The whole batch of a header that was read alone. Raises CorruptBatch."""
    check_large_batch(log, header, end=header.end_position)
    return log.read(header.size_bytes, header.position)


def end_offset_of(log: Path, base_offset: int, *, pread: Pread = os.pread) -> int:
    """Next offset after the last whole batch of a closed log's `.log`; `base_offset` if there is
    none.

    Stops at the first bytes that are not a batch. A batch whose base offset is impossible counts
    for nothing; of two that contradict each other the first does not, if the second fits without
    it: its base offset may be too high.
    """
    before = end = base_offset
    limit = base_offset + MAX_RELATIVE_OFFSET + 1
    with suppress(CorruptBatch):
        for header in headers_of(log, pread=pread):
            if header.last_offset >= limit or header.base_offset < before:
                continue
            if header.base_offset >= end:
                before = end
            end = header.next_offset
    return end


class CheckedBatch:
    """A batch with a valid checksum: `header.position` refers to the file, `start` to `chunk`."""

    __slots__ = ("chunk", "header", "start")

    def __init__(self, header: BatchHeader, chunk: bytes, start: int) -> None:
        self.header, self.chunk, self.start = header, chunk, start

    def header_in_chunk(self) -> BatchHeader:
        """The header with the batch's position in `chunk`."""
        return self.header.at(self.start)

    def with_location(self, bad: CorruptBatch, *, file: str = "") -> CorruptBatch:
        """An error in its records, with the batch's position in the file."""
        return bad.with_location(
            file=file, position=self.header.position, offset=self.header.base_offset
        )


def checked_batches(log: LogBytes, *, end: int, start: int = 0) -> Iterator[CheckedBatch]:
    """Every batch from `start`, where one must begin, read and verified.

    Raises CorruptBatch at the first that is truncated, is not a batch, or fails its checksum.
    """
    position = start
    try:
        while position < end:
            chunk = log.read(min(CHECK_CHUNK_BYTES, end - position), position)
            consumed = 0
            for checked in checked_in(chunk, position):
                yield checked
                consumed = checked.start + checked.header.size_bytes
            if consumed == 0:
                batch = one_large_batch(log, position, end=end)
                yield batch
                consumed = batch.header.size_bytes
            position += consumed
    except CorruptBatch as bad:
        raise bad.with_location(file=log.name) from None


def checked_in(chunk: bytes, chunk_position: int, *, start: int = 0) -> Iterator[CheckedBatch]:
    """The whole batches of a chunk, from `start` on; the chunk is at `chunk_position` in the
    file.
    """
    while len(chunk) - start >= HEADER_SIZE:
        try:
            header = parse_header(chunk, start)
            if start + header.size_bytes > len(chunk):
                return
            check_crc(chunk, header)
        except CorruptBatch as bad:
            position = chunk_position + start
            raise bad.with_location(position=position) from None
        yield CheckedBatch(header.at(chunk_position + start), chunk, start)
        start += header.size_bytes


def one_large_batch(log: LogBytes, position: int, *, end: int) -> CheckedBatch:
    """The batch at `position`, which is larger than a chunk or truncated by the end of the file.

    It is read as a whole only once its checksum has been verified: a corrupt length may claim all
    the rest of the file.
    """
    if end - position < HEADER_SIZE:
        raise CorruptBatch(f"{end - position} bytes are not a batch", position=position)
    header = parse_header(log.read(HEADER_SIZE, position), at=position)
    check_large_batch(log, header, end=end)
    return CheckedBatch(header, log.read(header.size_bytes, position), 0)


def check_large_batch(log: LogBytes, header: BatchHeader, *, end: int) -> None:
    """Raise CorruptBatch unless the batch ends before `end` and has its checksum."""
    try:
        check_crc_in_pieces(log.read, header, end=end, piece_bytes=CHECK_CHUNK_BYTES)
    except CorruptBatch as bad:
        raise bad.with_location(file=log.name) from None
