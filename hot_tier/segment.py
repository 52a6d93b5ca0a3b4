"""One segment: a run of batches in one file, its two sparse indexes, and what is known of it.

* A sealed segment is only facts and a name: no descriptor, no index in memory. Ten thousand of them
  cost little more than their file names.
* `end` is one value (size and next offset together), replaced after the bytes were written: a
  reader takes it once and never sees a batch half written.
* Index semantics are Kafka's. An offset index entry is made before a batch when more than
  `index.interval.bytes` came since the last entry; it holds the batch's LAST offset and the
  position where the batch starts. With it goes a time index entry when the largest timestamp so far
  grew: that timestamp, and the last offset of the batch that brought it. The last time entry of a
  sealed segment is its largest timestamp.
* A batch found at an indexed position must end in the indexed offset; where it does not the index
  is wrong, and CorruptIndex says so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from hot_tier.batch_walk import headers_from
from hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX, path_of
from hot_tier.index_file import IndexImage, ReadAt, floor_on_disk
from hot_tier.open_files import OpenFiles
from record_format.batch import NO_TIMESTAMP, BatchHeader
from record_format.errors import CorruptBatch, CorruptIndex
from record_format.index_layouts import parse_offset_index, parse_time_index

OFFSET_ENTRY: Final = Struct(">ii")  # relative offset, position
TIME_ENTRY: Final = Struct(">qi")  # timestamp, relative offset
MAX_RELATIVE_OFFSET: Final = 2**31 - 1
MAX_SEGMENT_BYTES: Final = 2**31 - 1


class SegmentEnd(NamedTuple):
    """Where a segment ends: bytes of its `.log`, and the offset that comes next."""

    size_bytes: int
    next_offset: int


class LargestTimestamp(NamedTuple):
    """The largest timestamp of a segment and the last offset of the batch that brought it."""

    timestamp: int
    offset: int


class Segment:
    """Facts and lookups. `offsets` and `times` are there while the segment is active."""

    __slots__ = (
        "base_offset",
        "crc32c",
        "end",
        "folder",
        "has_transactions",
        "largest",
        "min_timestamp",
        "offsets",
        "record_count",
        "times",
    )

    def __init__(self, folder: Path, base_offset: int, end: SegmentEnd) -> None:
        self.folder, self.base_offset, self.end = folder, base_offset, end
        self.largest: LargestTimestamp | None = None  # None: not looked up yet
        self.min_timestamp: int | None = None
        self.record_count: int | None = None
        self.crc32c: int | None = None
        self.has_transactions = False  # whether there is a .txnindex
        self.offsets: IndexImage | None = None
        self.times: IndexImage | None = None

    def __repr__(self) -> str:
        return f"Segment({self.path(LOG)}, {self.end})"

    def path(self, suffix: str) -> Path:
        return path_of(self.folder, self.base_offset, suffix)

    def log_reader(self, files: OpenFiles) -> ReadAt:
        return reader_of(files, self.path(LOG))

    # --- by offset --------------------------------------------------------------------------------

    def find_offset(self, files: OpenFiles, offset: int) -> BatchHeader | None:
        """The first batch that ends at or after `offset`; None past the end."""
        size_bytes, next_offset = self.end
        if offset >= next_offset:
            return None
        position = self.position_at_or_before(files, offset)
        for header in self._headers(files, position, end=size_bytes):
            if header.last_offset >= offset:
                return header
        return None

    def find_end(
        self, files: OpenFiles, first: BatchHeader, *, max_bytes: int, end_offset: int
    ) -> SegmentEnd:
        """Where a read from `first` on ends: whole batches below `end_offset`, within `max_bytes`.

        The first batch counts however large it is.
        """
        size_bytes, next_offset = self.end
        stop = first.position + max_bytes
        if stop >= size_bytes and end_offset >= next_offset:
            return SegmentEnd(size_bytes, next_offset)
        end = SegmentEnd(first.position + first.size_bytes, first.next_offset)
        position = max(end.size_bytes, self._walk_start(files, stop, end_offset=end_offset))
        for header in self._headers(files, position, end=size_bytes):
            if header.position + header.size_bytes > stop or header.last_offset >= end_offset:
                return SegmentEnd(header.position, header.base_offset)
        return self.end if position < size_bytes else end

    def _walk_start(self, files: OpenFiles, stop: int, *, end_offset: int) -> int:
        """Start of a batch such that all before it is within both limits, near the nearer of
        them.
        """
        by_position = self._floor_offset_entry(files, column=1, target=min(stop, MAX_SEGMENT_BYTES))
        by_offset = self._floor_offset_entry(files, column=0, target=self._relative(end_offset - 1))
        if by_position is None or by_offset is None:
            return 0
        nearer = min(by_position, by_offset)
        self._check_entry(files, relative_offset=nearer[0], position=nearer[1])
        return nearer[1]

    def position_at_or_before(self, files: OpenFiles, offset: int) -> int:
        """Start of a batch from which a walk finds `offset`. Raises CorruptIndex."""
        entry = self._floor_offset_entry(files, column=0, target=self._relative(offset))
        if entry is None:
            return 0
        self._check_entry(files, relative_offset=entry[0], position=entry[1])
        return entry[1]

    def _check_entry(self, files: OpenFiles, *, relative_offset: int, position: int) -> None:
        """The batch at an indexed position ends in the indexed offset, or the index is wrong."""
        try:
            header = next(headers_from(self.log_reader(files), position, end=self.end.size_bytes))
            right = header.last_offset == self.base_offset + relative_offset
        except (CorruptBatch, StopIteration, OSError):
            right = False
        if not right:
            raise CorruptIndex(
                f"no batch that ends in offset {self.base_offset + relative_offset} "
                f"begins at position {position}",
                file=str(self.path(OFFSET_INDEX)),
            )

    def _relative(self, offset: int) -> int:
        return min(offset - self.base_offset, MAX_RELATIVE_OFFSET)

    def _floor_offset_entry(
        self, files: OpenFiles, *, column: int, target: int
    ) -> tuple[int, ...] | None:
        image = self.offsets
        if image is not None:
            return image.floor(column=column, target=target)
        return self._floor_sealed(files, OFFSET_INDEX, column=column, target=target)

    def _floor_sealed(
        self, files: OpenFiles, suffix: str, *, column: int, target: int
    ) -> tuple[int, ...] | None:
        layout = OFFSET_ENTRY if suffix == OFFSET_INDEX else TIME_ENTRY
        path = self.path(suffix)
        try:
            file = files.open(path)
            size_bytes = os.fstat(file.fd).st_size
            if size_bytes % layout.size:
                raise CorruptIndex(f"{size_bytes} bytes are not whole entries", file=str(path))
            return floor_on_disk(
                reader_of(files, path),
                layout,
                count=size_bytes // layout.size,
                column=column,
                target=target,
            )
        except FileNotFoundError:
            raise CorruptIndex("is missing", file=str(path)) from None
        except EOFError as short:
            raise CorruptIndex(str(short), file=str(path)) from None

    def _headers(self, files: OpenFiles, position: int, *, end: int) -> Iterator[BatchHeader]:
        try:
            yield from headers_from(self.log_reader(files), position, end=end)
        except CorruptBatch as bad:
            raise CorruptBatch(
                bad.detail, file=str(self.path(LOG)), position=bad.position, offset=bad.offset
            ) from None

    def check_index_files(self) -> None:
        """See that both indexes of a sealed segment are whole and in order.

        Raises CorruptIndex, FileNotFoundError. The entries are compared with the log when they are
        used.
        """
        parse_offset_index(
            self.path(OFFSET_INDEX).read_bytes(),
            base_offset=self.base_offset,
            segment_size=self.end.size_bytes,
            file=str(self.path(OFFSET_INDEX)),
        )
        parse_time_index(
            self.path(TIME_INDEX).read_bytes(),
            base_offset=self.base_offset,
            file=str(self.path(TIME_INDEX)),
        )

    # --- by time ----------------------------------------------------------------------------------

    def largest_timestamp(self, files: OpenFiles) -> LargestTimestamp:
        """The last time index entry, or what a walk over all headers finds where there is none."""
        largest = self.largest
        if largest is None:
            largest = self.last_time_entry(files) or self._walk_for_largest(files)
            self.largest = largest
        return largest

    def last_time_entry(self, files: OpenFiles) -> LargestTimestamp | None:
        entry = self._floor_time_entry(files, 2**63 - 1)
        if entry is None:
            return None
        return LargestTimestamp(entry[0], self.base_offset + entry[1])

    def _walk_for_largest(self, files: OpenFiles) -> LargestTimestamp:
        largest = LargestTimestamp(NO_TIMESTAMP, self.base_offset)
        for header in self._headers(files, 0, end=self.end.size_bytes):
            if header.max_timestamp > largest.timestamp:
                largest = LargestTimestamp(header.max_timestamp, header.last_offset)
        return largest

    def batches_from_time(
        self, files: OpenFiles, timestamp: int, *, start_offset: int
    ) -> Iterator[BatchHeader]:
        """Headers of the batches that may hold the first record at or after `timestamp`."""
        entry = self._floor_time_entry(files, timestamp)
        offset = max(start_offset, self.base_offset + entry[1] if entry else 0)
        position = self.position_at_or_before(files, max(offset, self.base_offset))
        for header in self._headers(files, position, end=self.end.size_bytes):
            if header.max_timestamp >= timestamp and header.last_offset >= start_offset:
                yield header

    def _floor_time_entry(self, files: OpenFiles, timestamp: int) -> tuple[int, ...] | None:
        image = self.times
        if image is not None:
            return image.floor(column=0, target=timestamp)
        return self._floor_sealed(files, TIME_INDEX, column=0, target=timestamp)


def reader_of(files: OpenFiles, path: Path) -> ReadAt:
    file = files.open(path)

    def read_at(size_bytes: int, position: int) -> bytes:
        return os.pread(file.fd, size_bytes, position)

    return read_at
