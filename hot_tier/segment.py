"""One segment: consecutive batches in one file, its two sparse indexes, and what is known about it.

* A sealed segment holds only metadata, no descriptor and no index, so that ten thousand of them
  cost little more than their file names. `OpenFiles` keeps a bounded number of descriptors and
  cached indexes for those being read.
* `end` is one value (size and next offset together), replaced after the bytes were written: a
  reader takes it once and never sees a partial batch.
* Index semantics are Kafka's. A batch gets an offset index entry when more than
  `index.interval.bytes` were appended since the last entry; the entry holds the batch's LAST offset
  and the position where the batch starts. If the largest timestamp so far has grown, a time index
  entry is added with it: that timestamp and the last offset of the batch that has it. The last time
  index entry of a sealed segment is its largest timestamp.
"""

from __future__ import annotations

import copy
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.host.durable_file import read_whole
from tierlog.host.waiting import Wait
from tierlog.hot_tier.batch_walk import check_in_order, headers_from
from tierlog.hot_tier.indexes import IndexColumns
from tierlog.hot_tier.log_folder import (
    LOG,
    OFFSET_INDEX,
    TIME_INDEX,
    TRANSACTION_INDEX,
    file_name,
    path_of,
)
from tierlog.hot_tier.open_files import FileReader, OpenFiles
from tierlog.record_format.batch import NO_TIMESTAMP, BatchHeader
from tierlog.record_format.errors import CorruptBatch, CorruptIndex
from tierlog.record_format.index_builder import LargestTimestamp
from tierlog.record_format.index_layouts import (
    MAX_RELATIVE_OFFSET,
    AbortedTxn,
    parse_offset_index,
    parse_time_index,
)

MAX_SEGMENT_BYTES: Final = 2**31 - 1


class SegmentEnd(NamedTuple):
    """Where a segment ends: the size of its `.log` and its next offset."""

    size_bytes: int
    next_offset: int


class Part(NamedTuple):
    """Consecutive sound batches: positions [start, end.size_bytes) of a file, and their offsets
    [start_offset, end.next_offset).
    """

    start: int
    start_offset: int
    end: SegmentEnd


class Damage(NamedTuple):
    """What does not check in a segment: `first` says where and why. `parts` are sound."""

    first: CorruptBatch
    parts: tuple[Part, ...]

    def part_at(self, offset: int) -> Part:
        """Raises CorruptBatch if the offset is in no part."""
        for part in self.parts:
            if part.start_offset <= offset < part.end.next_offset:
                return part
        raise self.error()

    def error(self) -> CorruptBatch:
        """A copy to raise: each raise attaches the caller's traceback."""
        return copy.copy(self.first)


class Segment:
    """Metadata of a segment. `offsets` and `times` are set while it is active."""

    __slots__ = (
        "_folder_name",
        "aborted",
        "base_offset",
        "crc32c",
        "damage",
        "end",
        "first_append_ms",
        "folder",
        "has_transactions",
        "largest",
        "min_timestamp",
        "offsets",
        "record_count",
        "times",
        "unchecked_below",
    )

    def __init__(self, folder: Path, base_offset: int, end: SegmentEnd) -> None:
        self.folder, self.base_offset, self.end = folder, base_offset, end
        self._folder_name = str(folder)  # the same text for all segments of a folder
        self.largest: LargestTimestamp | None = None  # None: not looked up yet
        self.first_append_ms: int | None = None  # by the log's monotonic clock
        self.min_timestamp: int | None = None
        self.record_count: int | None = None
        self.crc32c: int | None = None
        self.has_transactions = False  # whether there is a .txnindex, once it is sealed
        self.aborted: list[AbortedTxn] | None = None  # while it is active, if there are any
        self.offsets: IndexColumns | None = None
        self.times: IndexColumns | None = None
        self.unchecked_below = base_offset  # what this process found on disk; see `border_check`
        self.damage: Damage | None = None

    def __repr__(self) -> str:
        return f"Segment({self.path(LOG)}, {self.end})"

    def path(self, suffix: str) -> Path:
        return path_of(self.folder, self.base_offset, suffix)

    def name(self, suffix: str) -> str:
        """As `path`, but a string, and cheaper."""
        return _name(self._folder_name, self.base_offset, suffix)

    def add_aborted(self, aborted: Sequence[AbortedTxn]) -> None:
        """Add transactions that a marker in this segment, which is active, aborts."""
        if aborted:
            self.has_transactions, self.aborted = True, [*(self.aborted or ()), *aborted]

    def log_reader(self, files: OpenFiles, wait: Wait = Wait.WAIT) -> FileReader:
        """The caller closes it. Raises FileNotFoundError, WouldBlock."""
        # To open the active log is no wait: it was just written.
        file = files.open(self.name(LOG), Wait.WAIT if self.offsets is not None else wait)
        return files.reader_of(file, wait)

    def headers(
        self, files: OpenFiles, *, start: int = 0, end_offset: int | None = None
    ) -> Generator[BatchHeader, None, None]:
        """All batch headers from the position `start`, as `headers_from` yields them, if their
        offsets are in order and below `end_offset` (default: the segment's end).

        To find one offset or timestamp use the indexes (`segment_lookup`). Raises CorruptBatch with
        the file and the next expected offset.
        """
        size_bytes, next_offset = self.end
        limit = next_offset if end_offset is None else end_offset
        with closing(self.log_reader(files)) as log:
            yield from self._in_order(
                headers_from(log, start, end=size_bytes),
                expected=None if start else self.base_offset,
                end_offset=min(limit, self.base_offset + MAX_RELATIVE_OFFSET + 1),
            )

    def _in_order(
        self, headers: Iterator[BatchHeader], *, expected: int | None, end_offset: int
    ) -> Iterator[BatchHeader]:
        next_offset = self.base_offset
        try:
            for header in headers:
                check_in_order(header, next_offset=next_offset, end_offset=end_offset)
                expected = next_offset = header.next_offset
                yield header
        except CorruptBatch as bad:
            raise bad.with_location(file=self.name(LOG), offset=expected) from None

    def first_timestamp(self, files: OpenFiles) -> int | None:
        """The first batch's largest timestamp, which Kafka uses as the segment's first; None if it
        is empty.
        """
        with closing(self.headers(files)) as headers:
            first = next(headers, None)
        return None if first is None else first.max_timestamp

    def relative(self, offset: int) -> int:
        return min(offset - self.base_offset, MAX_RELATIVE_OFFSET)

    def check_index_files(self) -> None:
        """Check that both indexes of a sealed segment are in order, and that the largest timestamp
        is the last, if it is known.

        Entries are compared with the log when they are used. Raises CorruptIndex,
        FileNotFoundError.
        """
        parse_offset_index(
            read_whole(self.path(OFFSET_INDEX), CorruptIndex),
            base_offset=self.base_offset,
            segment_size=self.end.size_bytes,
            file=str(self.path(OFFSET_INDEX)),
        )
        times = parse_time_index(
            read_whole(self.path(TIME_INDEX), CorruptIndex),
            base_offset=self.base_offset,
            file=str(self.path(TIME_INDEX)),
        )
        last = times[-1].timestamp if times else NO_TIMESTAMP
        if self.largest is not None and self.largest.timestamp != last:
            raise CorruptIndex("lost its last entries", file=str(self.path(TIME_INDEX)))


@dataclass(frozen=True, slots=True)
class SegmentFiles:
    """The files of a sealed segment.

    `snapshot` holds the producers at the end of the segment: the file at the next base offset.
    """

    base_offset: int
    last_offset: int
    size_bytes: int
    record_count: int | None  # None: unknown without reading it
    min_timestamp: int | None
    log: Path
    index: Path
    timeindex: Path
    txnindex: Path | None
    snapshot: Path


def segment_paths(segment: Segment, *, snapshot: Path) -> SegmentFiles:
    """Only names the files, and looks at none."""
    return SegmentFiles(
        base_offset=segment.base_offset,
        last_offset=segment.end.next_offset - 1,
        size_bytes=segment.end.size_bytes,
        record_count=segment.record_count,
        min_timestamp=segment.min_timestamp,
        log=segment.path(LOG),
        index=segment.path(OFFSET_INDEX),
        timeindex=segment.path(TIME_INDEX),
        txnindex=segment.path(TRANSACTION_INDEX) if segment.has_transactions else None,
        snapshot=snapshot,
    )


def age_timestamp(largest_timestamp: int, *, folder: Path, base_offset: int) -> int:
    """The timestamp by which a segment ages: its largest, or the file's if its records have none,
    as in Kafka. Raises FileNotFoundError.
    """
    if largest_timestamp >= 0:
        return largest_timestamp
    return modified_ms(path_of(folder, base_offset, LOG))


def modified_ms(path: Path) -> int:
    """When the file was last written. Raises FileNotFoundError."""
    return path.stat().st_mtime_ns // 1_000_000


@lru_cache(maxsize=1024)
def _name(folder_name: str, base_offset: int, suffix: str) -> str:
    return f"{folder_name}/{file_name(base_offset, suffix)}"
