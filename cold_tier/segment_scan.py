"""One pass over a sealed segment before it goes up: its checksums, its chunks, and that it is
sound.

* Nothing goes to the bucket that its own checksums do not vouch for: every batch's CRC is
  checked, and that offsets rise. A segment that rotted on local disk is reported, not shipped.
* Memory is one chunk, or one batch where that is larger.
* Timestamps come from the records: a header does not hold their minimum.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from crc32c import crc32c as crc32c_of

from cold_tier.chunk_table import Chunk, ChunkTable
from record_format.batch import HEADER_SIZE, BatchHeader, check_crc, iter_headers, parse_header
from record_format.decode import min_timestamp_of
from record_format.errors import CorruptBatch

CHUNK_BYTES = 8 * 1024 * 1024


class _Batches(NamedTuple):
    """Whole batches that lie end to end from `position` on in the log."""

    position: int
    body: bytes
    headers: list[BatchHeader]


def scan_segment(
    path: Path, *, base_offset: int, size_bytes: int, chunk_bytes: int = CHUNK_BYTES
) -> ChunkTable:
    """The chunk table of the first `size_bytes` of a `.log` file.

    A chunk is as many whole batches as fit `chunk_bytes`, and at least one. Raises CorruptBatch.
    """
    chunks: list[Chunk] = []
    whole_crc, next_offset = 0, base_offset
    for batches in _read_batches(path, size_bytes=size_bytes, chunk_bytes=chunk_bytes):
        chunk = _chunk_of(batches, next_offset=next_offset, file=str(path))
        chunks.append(chunk)
        whole_crc = crc32c_of(batches.body, whole_crc)
        next_offset = chunk.last_offset + 1
    return ChunkTable(
        chunks, base_offset=base_offset, log_size_bytes=size_bytes, log_crc32c=whole_crc
    )


def _read_batches(path: Path, *, size_bytes: int, chunk_bytes: int) -> Iterator[_Batches]:
    position, window = 0, max(chunk_bytes, HEADER_SIZE)
    with path.open("rb", buffering=0) as file:
        while position < size_bytes:
            body = _read(file.fileno(), position, min(window, size_bytes - position))
            first = _first_header(body, position, path)
            if first.size_bytes > len(body):
                body = _read(file.fileno(), position, min(first.size_bytes, size_bytes - position))
            headers = list(iter_headers(body))
            if not headers:
                raise CorruptBatch("the last batch is cut", file=str(path), position=position)
            end = headers[-1].end_position
            yield _Batches(position, body if end == len(body) else body[:end], headers)
            position += end


def _read(fd: int, position: int, size_bytes: int) -> bytes:
    return os.pread(fd, size_bytes, position)


def _first_header(body: bytes, position: int, path: Path) -> BatchHeader:
    if len(body) < HEADER_SIZE:
        raise CorruptBatch("the last batch is cut", file=str(path), position=position)
    return parse_header(body)


def describe_chunk(body: bytes, position: int, *, next_offset: int, file: str) -> Chunk:
    """The chunk table's entry for `body`, whole batches that lie at `position` in `file`.

    Every batch is checked. `next_offset`: what comes before it ends there. Raises CorruptBatch.
    """
    headers = list(iter_headers(body))
    end = headers[-1].end_position if headers else 0
    if end != len(body):
        raise CorruptBatch("the last batch is cut", file=file, position=position + end)
    return _chunk_of(_Batches(position, body, headers), next_offset=next_offset, file=file)


def _chunk_of(batches: _Batches, *, next_offset: int, file: str) -> Chunk:
    position, body, headers = batches
    has_gap = has_transactions = False
    minimums: list[int | None] = []
    maximums: list[int] = []
    first_offset, records = headers[0].base_offset, 0
    for header in headers:
        check_crc(body, header)
        if header.base_offset < next_offset:
            raise CorruptBatch(
                f"begins below offset {next_offset}",
                file=file,
                position=position + header.position,
                offset=header.base_offset,
            )
        has_gap |= header.base_offset > next_offset
        has_gap |= header.record_count != header.last_offset_delta + 1
        has_transactions |= header.is_transactional or header.is_control
        if header.record_count:  # compaction keeps the last batch of a producer without records
            minimums.append(min_timestamp_of(body, header))
            maximums.append(header.max_timestamp)
        records += header.record_count
        next_offset = header.next_offset
    known = [one for one in minimums if one is not None]
    return Chunk(
        position=position,
        size_bytes=len(body),
        first_offset=first_offset,
        last_offset=next_offset - 1,
        record_count=records,
        min_timestamp=min(known) if known and len(known) == len(minimums) else None,
        max_timestamp=max(maximums, default=None),
        crc32c=crc32c_of(body),
        has_gap=has_gap,
        has_transactions=has_transactions,
    )
