"""One pass over a sealed segment before its upload: verifies it, and builds its chunk table.

* Only verified data is uploaded: every batch's CRC is checked, and that offsets rise. A segment
  that was corrupted on local disk is reported instead.
* Uses the memory of one chunk, or of one batch if that is larger.
"""

from __future__ import annotations

import os
from io import FileIO
from pathlib import Path

from tierlog.cold_tier.chunk_table import Chunk, ChunkTable
from tierlog.record_format.batch import (
    HEADER_SIZE,
    BatchHeader,
    Buffer,
    check_crc_in_pieces,
    parse_header,
)
from tierlog.record_format.batch_summary import summarize_batches
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch, eio_as

CHUNK_BYTES = 8 * 1024 * 1024


def scan_segment(
    path: Path, *, base_offset: int, size_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> ChunkTable:
    """The chunk table of the first `size_bytes` of a `.log` file.

    A chunk holds as many whole batches as fit in `chunk_bytes`, at least one. Raises CorruptBatch.
    """
    chunks: list[Chunk] = []
    whole_crc, position, next_offset = 0, 0, base_offset
    memory = bytearray(min(max(chunk_bytes, HEADER_SIZE), size_bytes))  # reused for every chunk
    with path.open("rb", buffering=0) as file:
        while position < size_bytes:
            body = _read(file, position, memoryview(memory)[: size_bytes - position])
            first = _first_header(body, position, path)
            if first.size_bytes > len(body):
                body = _read_large(file, first, memoryview(memory), end=size_bytes)
            chunk = _first_chunk(body, position, next_offset=next_offset, file=str(path))
            chunks.append(chunk)
            whole_crc = crc32c_of(body[: chunk.size_bytes], whole_crc)
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
