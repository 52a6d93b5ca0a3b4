"""Removes batches from a fetch: those beyond `max_records`, and those of aborted transactions.

Only headers are read. The remaining slices exclude what is removed; nothing is copied.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from tierlog.api.http.fetch.record_json import is_aborted
from tierlog.broker.partition import Fetched
from tierlog.host.file_slice import FileSlice
from tierlog.record_format.batch import HEADER_SIZE, BatchHeader, parse_header, truncated_batch
from tierlog.record_format.errors import CorruptBatch


def filter_batches(fetched: Fetched, *, offset: int, max_records: int | None) -> Fetched:
    """Keep whole batches with at most `max_records` records from `offset` on, but at least one.

    Aborted batches are removed. A corrupt header ends the fetch before it; if nothing precedes it,
    raises CorruptBatch. Reads files, so it may block.
    """
    kept: list[FileSlice] = []
    records, next_offset = 0, offset
    try:
        for header, piece in _batches(fetched):
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
    return fetched._replace(slices=tuple(_merged(kept)), next_offset=next_offset)


def _batches(fetched: Fetched) -> Iterator[tuple[BatchHeader, FileSlice]]:
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
        piece.file.report_corrupt()
        raise bad.with_location(file=str(piece.file.path)) from None
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
