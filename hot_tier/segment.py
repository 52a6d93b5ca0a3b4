"""One segment: a run of batches in one file, its two sparse indexes, and what is known of it.

* A sealed segment is only facts and a name: no descriptor, no index of its own. Ten thousand of
  them cost little more than their file names; descriptors and images of indexes that are being read
  are in `OpenFiles`, within its limits.
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
from itertools import chain
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple

from hot_tier.batch_walk import ONE_HEADER_BYTES, WINDOW_BYTES, headers_from
from hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX, file_name, path_of
from hot_tier.index_file import (
    Entry,
    IndexImage,
    ReadAt,
    entries_around,
    floor_in_image,
    floor_on_disk,
)
from hot_tier.open_files import Files
from record_format.batch import HEADER_SIZE, NO_TIMESTAMP, BatchHeader
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
        "_folder_name",
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
        self._folder_name = str(folder)  # the same text for all segments of a folder
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

    def name(self, suffix: str) -> str:
        """As `path`, and cheaper."""
        return f"{self._folder_name}/{file_name(self.base_offset, suffix)}"

    def log_reader(self, files: Files) -> ReadAt:
        return reader_of(files, self.name(LOG))

    # --- by offset --------------------------------------------------------------------------------

    def find_offset(self, files: Files, offset: int) -> BatchHeader | None:
        """The first batch that ends at or after `offset`; None past the end."""
        size_bytes, next_offset = self.end
        if offset >= next_offset:
            return None
        entry, following = self._entries_around(files, self.relative(offset))
        first_bytes = ONE_HEADER_BYTES
        if entry is not None and following is not None:
            between = following[1] - entry[1]
            if between > WINDOW_BYTES:
                # Large batches have an entry each: most likely the next one is it, without a walk.
                header = next(self._headers_from(files, following, end=size_bytes))
                if header.base_offset <= offset:
                    return header
            else:
                first_bytes = between + HEADER_SIZE  # it is one of those that this read shows
        for header in self._headers_from(files, entry, end=size_bytes, first_bytes=first_bytes):
            if header.last_offset >= offset:
                return header
        return None

    def _entries_around(self, files: Files, target: int) -> tuple[Entry | None, Entry | None]:
        """The entry at or below a relative offset, and the one after it where both are in memory
        and the first is not that offset's.
        """
        active = self.offsets
        image = files.images.get(self.name(OFFSET_INDEX)) if active is None else active.image
        if image is None:
            return self._floor_offset_entry(files, column=0, target=target), None
        return entries_around(image, OFFSET_ENTRY, column=0, target=target)

    def find_end(
        self, files: Files, first: BatchHeader, *, max_bytes: int, end_offset: int
    ) -> SegmentEnd:
        """Where a read from `first` on ends: whole batches below `end_offset`, within `max_bytes`.

        The first batch counts however large it is.
        """
        size_bytes, next_offset = self.end
        stop = first.position + max_bytes
        if stop >= size_bytes and end_offset >= next_offset:
            return SegmentEnd(size_bytes, next_offset)
        end = SegmentEnd(first.position + first.size_bytes, first.next_offset)
        if stop <= end.size_bytes:
            return end
        position, headers = self._walk_near(files, end, stop=stop, end_offset=end_offset)
        for header in headers:
            if header.position + header.size_bytes > stop or header.last_offset >= end_offset:
                return SegmentEnd(header.position, header.base_offset)
        return self.end if position < size_bytes else end

    def _walk_near(
        self, files: Files, end: SegmentEnd, *, stop: int, end_offset: int
    ) -> tuple[int, Iterator[BatchHeader]]:
        """A walk that begins at or after `end`, all before it within both limits, and near the
        nearer of them.
        """
        size_bytes = self.end.size_bytes
        near = self._floor_offset_entry(files, column=1, target=min(stop, MAX_SEGMENT_BYTES))
        if near is not None and end_offset < self.end.next_offset:
            target = self.relative(end_offset - 1)
            by_offset = self._floor_offset_entry(files, column=0, target=target)
            near = min(near, by_offset) if by_offset is not None else None
        if near is not None and near[1] > end.size_bytes:
            return near[1], self._headers_from(files, near, end=size_bytes)
        return end.size_bytes, self._headers(files, end.size_bytes, end=size_bytes)

    def _headers_from(
        self,
        files: Files,
        entry: Entry | None,
        *,
        end: int,
        first_bytes: int = ONE_HEADER_BYTES,
    ) -> Iterator[BatchHeader]:
        """The headers from an entry of the offset index on; from the segment's start without one.

        The batch at an indexed position ends in the indexed offset, or the index is wrong: raises
        CorruptIndex.
        """
        if entry is None:
            return self._headers(files, 0, end=end)
        relative_offset, position = entry
        headers = self._headers(files, position, end=end, first_bytes=first_bytes)
        try:
            first = next(headers)
            right = first.last_offset == self.base_offset + relative_offset
        except BlockingIOError:
            raise  # of a reader that does not wait: it says nothing of the index
        except (CorruptBatch, StopIteration, OSError):
            right = False
        if not right:
            raise CorruptIndex(
                f"no batch that ends in offset {self.base_offset + relative_offset} "
                f"begins at position {position}",
                file=self.name(OFFSET_INDEX),
            )
        return chain((first,), headers)

    def relative(self, offset: int) -> int:
        return min(offset - self.base_offset, MAX_RELATIVE_OFFSET)

    def _floor_offset_entry(self, files: Files, *, column: int, target: int) -> Entry | None:
        image = self.offsets
        if image is not None:
            return image.floor(column=column, target=target)
        return self._floor_sealed(files, OFFSET_INDEX, column=column, target=target)

    def _floor_sealed(self, files: Files, suffix: str, *, column: int, target: int) -> Entry | None:
        layout = OFFSET_ENTRY if suffix == OFFSET_INDEX else TIME_ENTRY
        name = self.name(suffix)
        image = files.images.get(name)
        if image is not None:
            return floor_in_image(image, layout, column=column, target=target)
        try:
            return _floor_in_file(files, name, layout, column=column, target=target)
        except FileNotFoundError:
            raise CorruptIndex("is missing", file=name) from None
        except EOFError as short:
            raise CorruptIndex(str(short), file=name) from None

    def _headers(
        self, files: Files, position: int, *, end: int, first_bytes: int = ONE_HEADER_BYTES
    ) -> Iterator[BatchHeader]:
        read_at = self.log_reader(files)
        try:
            yield from headers_from(read_at, position, end=end, first_bytes=first_bytes)
        except CorruptBatch as bad:
            raise CorruptBatch(
                bad.detail, file=self.name(LOG), position=bad.position, offset=bad.offset
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

    def largest_timestamp(self, files: Files) -> LargestTimestamp:
        """The last time index entry, or what a walk over all headers finds where there is none."""
        largest = self.largest
        if largest is None:
            largest = self.last_time_entry(files) or self._walk_for_largest(files)
            self.largest = largest
        return largest

    def last_time_entry(self, files: Files) -> LargestTimestamp | None:
        entry = self._floor_time_entry(files, 2**63 - 1)
        if entry is None:
            return None
        return LargestTimestamp(entry[0], self.base_offset + entry[1])

    def _walk_for_largest(self, files: Files) -> LargestTimestamp:
        largest = LargestTimestamp(NO_TIMESTAMP, self.base_offset)
        for header in self._headers(files, 0, end=self.end.size_bytes):
            if header.max_timestamp > largest.timestamp:
                largest = LargestTimestamp(header.max_timestamp, header.last_offset)
        return largest

    def batches_from_time(
        self, files: Files, timestamp: int, *, start_offset: int
    ) -> Iterator[BatchHeader]:
        """Headers of the batches that may hold the first record at or after `timestamp`."""
        entry = self._floor_time_entry(files, timestamp)
        offset = max(start_offset, self.base_offset + entry[1] if entry else 0)
        target = self.relative(max(offset, self.base_offset))
        near = self._floor_offset_entry(files, column=0, target=target)
        for header in self._headers_from(files, near, end=self.end.size_bytes):
            if header.max_timestamp >= timestamp and header.last_offset >= start_offset:
                yield header

    def _floor_time_entry(self, files: Files, timestamp: int) -> tuple[int, ...] | None:
        image = self.times
        if image is not None:
            return image.floor(column=0, target=timestamp)
        return self._floor_sealed(files, TIME_INDEX, column=0, target=timestamp)


def _floor_in_file(
    files: Files, name: str, layout: Struct, *, column: int, target: int
) -> tuple[int, ...] | None:
    """Look into a sealed index that is not in memory; and keep it there where it is wanted."""
    forgotten = files.images.forgotten
    file = files.open(name)
    size_bytes = os.fstat(file.fd).st_size
    if size_bytes % layout.size:
        raise CorruptIndex(f"{size_bytes} bytes are not whole entries", file=name)
    if not files.images.is_wanted(name, size_bytes=size_bytes):
        count = size_bytes // layout.size
        return floor_on_disk(
            reader_of(files, name), layout, count=count, column=column, target=target
        )
    image = files.pread(file.fd, size_bytes, 0)
    if len(image) < size_bytes:
        raise CorruptIndex("the index became shorter", file=name)
    files.images.keep(name, image, forgotten=forgotten)
    return floor_in_image(image, layout, column=column, target=target)


def reader_of(files: Files, path: Path | str) -> ReadAt:
    file, pread = files.open(path), files.pread

    def read_at(size_bytes: int, position: int) -> bytes:
        return pread(file.fd, size_bytes, position)

    return read_at
