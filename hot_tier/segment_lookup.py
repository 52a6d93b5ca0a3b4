"""Look-ups in one segment, by offset and by timestamp.

* Index semantics are Kafka's, as `segment` describes them. The batch at an indexed position must
  end at the indexed offset, and an indexed timestamp must be that of the batch at its offset;
  otherwise the index is corrupt (CorruptIndex).
* The log file is opened once per look-up: what is found and what is then sent come from the same
  file, whatever its name means by then.
* The index of an active segment is in memory. Of another only the block that contains the entry is
  read, until the index is used often enough for `IndexCache` to keep it. It is read, never mapped:
  an error of the disk must not become a signal.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from itertools import chain
from struct import Struct

from tierlog.host.waiting import Wait, WouldBlock
from tierlog.hot_tier.batch_walk import ONE_HEADER_BYTES, WINDOW_BYTES, headers_from
from tierlog.hot_tier.indexes import Entry, IndexColumns
from tierlog.hot_tier.log_folder import OFFSET_INDEX, TIME_INDEX
from tierlog.hot_tier.open_files import FileReader, OpenFiles
from tierlog.hot_tier.segment import MAX_SEGMENT_BYTES, Part, Segment, SegmentEnd
from tierlog.record_format.batch import HEADER_SIZE, NO_TIMESTAMP, BatchHeader, parse_header
from tierlog.record_format.errors import CorruptBatch, CorruptIndex, eio_as
from tierlog.record_format.index_builder import LargestTimestamp
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


class SegmentLookup:
    """One short-lived look-up; holds the log file open until it is closed. Raises FileNotFoundError
    when created.
    """

    __slots__ = ("_columns", "_end", "_files", "_segment", "_start", "_wait", "log")

    def __init__(
        self,
        segment: Segment,
        files: OpenFiles,
        part: Part | None = None,
        *,
        wait: Wait = Wait.WAIT,
    ) -> None:
        """`part`: the sound part of a damaged segment to which the look-up is confined."""
        self._segment, self._files, self._wait = segment, files, wait
        self._start, self._end = (part.start, part.end) if part else (0, segment.end)
        self.log = segment.log_reader(files, wait)
        self._columns: IndexColumns | None = None  # the offset index, if it is in memory

    def close(self) -> None:
        self.log.close()

    def find_offset(self, offset: int) -> BatchHeader | None:
        """The first batch that ends at or after `offset`; None past the end."""
        segment = self._segment
        size_bytes, next_offset = self._end
        if offset >= next_offset:
            return None
        entry, following = self._entries_around(segment.relative(offset))
        first_bytes = ONE_HEADER_BYTES
        # The active index may have entries past the end that was read above.
        if entry is not None and following and self._start <= following[1] < size_bytes:
            between = following[1] - entry[1]
            if between > WINDOW_BYTES:
                # Large batches have an entry each: try the next one before scanning.
                header = self._indexed_header(following, end=size_bytes)
                if header.base_offset <= offset:
                    return header
            else:
                first_bytes = between + HEADER_SIZE  # this read covers the batch
        headers = self._headers_from(entry, end=size_bytes, first_bytes=first_bytes)
        return next((header for header in headers if header.last_offset >= offset), None)

    def _entries_around(self, target: int) -> tuple[Entry | None, Entry | None]:
        """The entry at or below a relative offset, and the one after it if the index is in memory
        and the first is not an exact match.
        """
        self._columns = in_memory(self._segment, self._files, OFFSET_INDEX)
        if self._columns is not None:
            return self._columns.around(target)
        return self._floor_offset(column=0, target=target), None

    def find_end(self, first: BatchHeader, *, max_bytes: int, end_offset: int) -> SegmentEnd:
        """Where a read that starts at `first` ends: whole batches below `end_offset`, within
        `max_bytes`.

        The first batch is included whatever its size.
        """
        size_bytes, next_offset = self._end
        stop = first.position + max_bytes
        if stop >= size_bytes and end_offset >= next_offset:
            return SegmentEnd(size_bytes, next_offset)
        end = SegmentEnd(first.position + first.size_bytes, first.next_offset)
        position = end.size_bytes
        if position >= min(stop, size_bytes):
            return end
        near = self._near_end(stop=min(stop, size_bytes - 1), end_offset=end_offset)
        if near is not None and near[1] > position:
            # All before it is within both limits; with large batches it is often the end itself.
            found = self._indexed_header(near, end=size_bytes)
            if _exceeds(found, stop=stop, end_offset=end_offset):
                return SegmentEnd(found.position, found.base_offset)
            end = SegmentEnd(found.position + found.size_bytes, found.next_offset)
        for header in headers_from(self.log, end.size_bytes, end=size_bytes):
            if _exceeds(header, stop=stop, end_offset=end_offset):
                return SegmentEnd(header.position, header.base_offset)
        return SegmentEnd(size_bytes, next_offset)

    def _near_end(self, *, stop: int, end_offset: int) -> Entry | None:
        """An index entry close to the nearer limit, before which everything is within both."""
        segment = self._segment
        next_offset = self._end.next_offset
        near = self._floor_offset(column=1, target=min(stop, MAX_SEGMENT_BYTES))
        if near is not None and end_offset < next_offset:
            by_offset = self._floor_offset(column=0, target=segment.relative(end_offset - 1))
            near = min(near, by_offset) if by_offset is not None else None
        return near

    def batches_from_time(self, timestamp: int, *, start_offset: int) -> Iterator[BatchHeader]:
        """Headers of the batches that may hold the first record at or after `timestamp`."""
        segment = self._segment
        entry = floor_entry(segment, self._files, TIME_INDEX, column=0, target=timestamp)
        offset = max(start_offset, segment.base_offset + entry[1] if entry else 0)
        near = self._floor_offset(
            column=0, target=segment.relative(max(offset, segment.base_offset))
        )
        indexed = LargestTimestamp(entry[0], segment.base_offset + entry[1]) if entry else None
        if indexed and indexed.offset >= segment.end.next_offset:
            _check_time_entry(segment, indexed, None)
        for header in self._headers_from(near, end=self._end.size_bytes):
            if indexed and header.base_offset <= indexed.offset <= header.last_offset:
                _check_time_entry(segment, indexed, header)
            if header.max_timestamp >= timestamp and header.last_offset >= start_offset:
                yield header

    def last_headers(self) -> Iterator[BatchHeader]:
        """The headers from the last offset index entry on."""
        size_bytes, next_offset = self._end
        last = self._floor_offset(column=0, target=self._segment.relative(next_offset))
        return self._headers_from(last, end=size_bytes)

    def _headers_from(
        self, entry: Entry | None, *, end: int, first_bytes: int = ONE_HEADER_BYTES
    ) -> Iterator[BatchHeader]:
        """The headers from an offset index entry on, or from the segment's start without one.

        Raises CorruptIndex if the batch at the indexed position does not end at the indexed offset.
        """
        if entry is None or entry[1] < self._start:
            return headers_from(self.log, self._start, end=end)
        if entry[1] >= end < self._segment.end.size_bytes:
            return iter(())  # damage is in between
        headers = headers_from(self.log, entry[1], end=end, first_bytes=first_bytes)
        try:
            first = next(headers)
        except WouldBlock:
            raise  # it says nothing about the index
        except (CorruptBatch, StopIteration, OSError):
            raise self._corrupt_index(entry) from None
        if first.last_offset != self._segment.base_offset + entry[0]:
            raise self._corrupt_index(entry)
        return chain((first,), headers)

    def _indexed_header(self, entry: Entry, *, end: int) -> BatchHeader:
        """The first of `_headers_from`, for a caller that needs no other."""
        relative_offset, position = entry
        try:
            header = parse_header(self.log.read(HEADER_SIZE, position), at=position)
        except WouldBlock:
            raise
        except (CorruptBatch, OSError):
            raise self._corrupt_index(entry) from None
        last_relative = header.base_offset + header.last_offset_delta - self._segment.base_offset
        if last_relative != relative_offset or position + header.size_bytes > end:
            raise self._corrupt_index(entry)
        return header

    def _corrupt_index(self, entry: Entry) -> CorruptIndex:
        relative_offset, position = entry
        indexed = self._segment.base_offset + relative_offset
        return CorruptIndex(
            f"there is no batch at position {position} that ends at offset {indexed}",
            file=self._segment.name(OFFSET_INDEX),
        )

    def _floor_offset(self, *, column: int, target: int) -> Entry | None:
        if self._columns is not None:
            return self._columns.floor(column=column, target=target)
        return floor_entry(
            self._segment, self._files, OFFSET_INDEX, column=column, target=target, wait=self._wait
        )


def _exceeds(header: BatchHeader, *, stop: int, end_offset: int) -> bool:
    return header.position + header.size_bytes > stop or header.last_offset >= end_offset


def find_largest_timestamp(segment: Segment, files: OpenFiles) -> LargestTimestamp:
    """The last time index entry, or the result of a scan over all headers if there is none. Stored
    in the segment.
    """
    largest = last_time_entry(segment, files)
    if largest is None:
        largest = _walk_for_largest(segment, files)
        if segment.times is None and largest.timestamp > NO_TIMESTAMP:
            raise CorruptIndex("is empty", file=segment.name(TIME_INDEX))
    elif segment.times is None:  # retention deletes segments by it, so it is verified
        _check_largest(segment, largest, files)
    segment.largest = largest
    return largest


def _check_largest(segment: Segment, largest: LargestTimestamp, files: OpenFiles) -> None:
    """A file that lost its end still has whole entries, but the last batches have later times."""
    found: BatchHeader | None = None
    with closing(SegmentLookup(segment, files)) as lookup:
        for header in lookup.last_headers():
            if header.max_timestamp > largest.timestamp:
                raise CorruptIndex(
                    f"timestamp {largest.timestamp} is not the largest: offset "
                    f"{header.last_offset} has {header.max_timestamp}",
                    file=segment.name(TIME_INDEX),
                )
            if header.base_offset <= largest.offset <= header.last_offset:
                found = header
        _check_time_entry(segment, largest, found or lookup.find_offset(largest.offset))


def _check_time_entry(
    segment: Segment, entry: LargestTimestamp, header: BatchHeader | None
) -> None:
    """An entry holds the timestamp of the batch that contains its offset: `header`. Batches that
    compaction emptied have kept only their offsets.
    """
    if header is None or (header.record_count and header.max_timestamp != entry.timestamp):
        raise CorruptIndex(
            f"timestamp {entry.timestamp} is not that of the batch with offset {entry.offset}",
            file=segment.name(TIME_INDEX),
        )


def last_time_entry(segment: Segment, files: OpenFiles) -> LargestTimestamp | None:
    entry = floor_entry(segment, files, TIME_INDEX, column=0, target=2**63 - 1)
    if entry is None:
        return None
    return LargestTimestamp(entry[0], segment.base_offset + entry[1])


def _walk_for_largest(segment: Segment, files: OpenFiles) -> LargestTimestamp:
    largest = LargestTimestamp(NO_TIMESTAMP, segment.base_offset)
    for header in segment.headers(files):
        if header.max_timestamp > largest.timestamp:
            largest = LargestTimestamp(header.max_timestamp, header.last_offset)
    return largest


BLOCK_ENTRIES = 512


def floor_entry(
    segment: Segment,
    files: OpenFiles,
    suffix: str,
    *,
    column: int,
    target: int,
    wait: Wait = Wait.WAIT,
) -> Entry | None:
    """The last entry of an index whose `column` is at most `target`. Raises CorruptIndex, and
    WouldBlock if it has to be read from disk.
    """
    columns = in_memory(segment, files, suffix)
    if columns is not None:
        return columns.floor(column=column, target=target)
    layout = OFFSET_ENTRY if suffix == OFFSET_INDEX else TIME_ENTRY
    name = segment.name(suffix)
    try:
        with eio_as(CorruptIndex, file=name):
            return _floor_in_file(files, name, layout, wait, column=column, target=target)
    except FileNotFoundError:
        raise CorruptIndex("is missing", file=name) from None
    except EOFError as short:
        raise CorruptIndex(str(short), file=name) from None


def in_memory(segment: Segment, files: OpenFiles, suffix: str) -> IndexColumns | None:
    """The index of an active segment, or one that is cached."""
    active = segment.offsets if suffix == OFFSET_INDEX else segment.times
    return active if active is not None else files.indexes.get(segment.name(suffix))


def _floor_in_file(
    files: OpenFiles, name: str, layout: Struct, wait: Wait, *, column: int, target: int
) -> Entry | None:
    """Look into a sealed index that is not cached, and cache it if it is used often enough."""
    generation = files.indexes.generation
    with closing(files.reader_of(files.open(name, wait), wait)) as index:
        size_bytes = os.fstat(index.file.fd).st_size
        if size_bytes % layout.size:
            raise CorruptIndex(f"{size_bytes} bytes are not whole entries", file=name)
        if not files.indexes.should_cache(name, size_bytes=size_bytes):
            count = size_bytes // layout.size
            return _floor_on_disk(index, layout, count=count, column=column, target=target)
        data = index.read(size_bytes, 0)
        if len(data) < size_bytes:
            raise CorruptIndex("the index shrank while it was read", file=name)
        columns = IndexColumns(layout, data)
        files.indexes.put_columns(name, columns, generation=generation)
        return columns.floor(column=column, target=target)


def _floor_on_disk(
    index: FileReader, layout: Struct, *, count: int, column: int, target: int
) -> Entry | None:
    """As `IndexColumns.floor`, for the file of a sealed segment with `count` entries.

    A binary search over the first entries of blocks (a few bytes each) picks the block to read.
    """
    size = layout.size
    first, last = 0, (count - 1) // BLOCK_ENTRIES
    while first < last:
        middle = (first + last + 1) // 2
        entry = layout.unpack(index.read(size, middle * BLOCK_ENTRIES * size))
        if entry[column] <= target:
            first = middle
        else:
            last = middle - 1
    start = first * BLOCK_ENTRIES
    in_block = min(BLOCK_ENTRIES, count - start)
    if in_block <= 0:
        return None
    block = index.read(in_block * size, start * size)
    if len(block) < in_block * size:
        raise EOFError("the index shrank while it was read")
    return IndexColumns(layout, block).floor(column=column, target=target)
