"""Reads the items of a log's file: `.log`, `.index`, `.timeindex`, `.txnindex`, `.snapshot`,
checkpoints, `partition.metadata`, `meta.properties`.

* A `.log` is read batch by batch, never whole, so a segment of a GiB takes little memory. Nothing
  is memory-mapped: a failing disk, or a file truncated meanwhile, would raise a signal.
* Damage is an item (`Problem`), not an exception: the items before it are yielded, and where the
  format allows it those after it. Only a file that cannot be opened, or of an unknown kind, raises.
* Live files of a running broker may be dumped: an index ends at its preallocated zeros.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from struct import Struct
from typing import Final, NamedTuple, Self

from tierlog.record_format.batch import (
    HEADER_SIZE,
    LOG_APPEND_TIME,
    MAX_SEQUENCE,
    BatchHeader,
    check_crc,
    parse_header,
)
from tierlog.record_format.checkpoint_files import (
    ProducerEntry,
    format_topic_id,
    parse_epoch_checkpoint,
    parse_offset_checkpoint,
    parse_partition_metadata,
    parse_properties,
    parse_snapshot,
)
from tierlog.record_format.decode import EndMarker, Record, control_type, decode_batch, end_marker
from tierlog.record_format.errors import CorruptBatch, CorruptDataError, RequestError
from tierlog.record_format.index_layouts import (
    OFFSET_ENTRY,
    TIME_ENTRY,
    TXN_ENTRY_SIZE,
    AbortedTxn,
    OffsetEntry,
    TimeEntry,
    parse_txn_index,
)


class FileBegin(NamedTuple):
    """`start_offset`: only for a `.log`."""

    name: str
    start_offset: int | None = None


class Empty(NamedTuple):
    """An offset index without entries: Kafka reports this only for this kind of file."""

    name: str


class BatchItem(NamedTuple):
    header: BatchHeader
    crc_matches: bool


class RecordItem(NamedTuple):
    """A record of the preceding batch."""

    record: Record
    sequence: int
    is_log_append_time: bool
    control_type: int | None = None
    marker: EndMarker | None = None


class Line(NamedTuple):
    """An entry of one of Kafka's text files, by member."""

    members: tuple[tuple[str, str | int], ...]


class Gaps(NamedTuple):
    """Where offsets are not consecutive: normal after compaction, otherwise a fault."""

    name: str
    pairs: tuple[tuple[int, int], ...]
    more: int = 0


class Problem(NamedTuple):
    """Something wrong in the file; a dump continues after it if it can."""

    file: str
    detail: str


Entry = OffsetEntry | TimeEntry | AbortedTxn | ProducerEntry | Line
Item = FileBegin | Empty | BatchItem | RecordItem | Entry | Gaps | Problem


READ_BYTES: Final = 1 << 20
_SEGMENT_FILE: Final = re.compile(
    r"([0-9]{20})(?:-[^.]*)?\.(log|index|timeindex|txnindex|snapshot)(\.deleted|\.cleaned|\.swap)?\Z"
)


class UnknownFileKind(RequestError):
    """The name is not that of a log's file."""


def base_offset_of(path: Path) -> int:
    """A segment file's base offset, from its name; 0 for names without one."""
    match = _SEGMENT_FILE.match(path.name)
    return int(match[1]) if match else 0


def kind_of(path: Path) -> str:
    """The suffix that says how the file is read. Raises UnknownFileKind."""
    match = _SEGMENT_FILE.match(path.name)
    if match:
        return match[2]
    for kind in ("leader-epoch-checkpoint", "partition.metadata", "meta.properties"):
        if path.name == kind:
            return kind
    if path.name.endswith("-checkpoint"):
        return "offset-checkpoint"
    raise UnknownFileKind(
        f"{path} is not a log file: expected 20 digits and .log, .index, .timeindex, .txnindex or "
        ".snapshot, a checkpoint, partition.metadata or meta.properties"
    )


def read_items(path: Path, *, with_records: bool = True) -> Iterator[Item]:
    """The items of one file, in order.

    Raises UnknownFileKind, and OSError for a file that cannot be opened.
    """
    kind = kind_of(path)
    if kind == "log":
        with LogFile(path) as log:
            yield from _log_items(path, log, with_records=with_records)
        return
    yield FileBegin(path.name)
    data = memoryview(path.read_bytes())
    try:
        yield from _READERS[kind](path, data)
    except CorruptDataError as error:
        yield Problem(path.name, _message(error, path))


class LogFile:
    """A `.log` with the length it had when it was opened."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("rb", buffering=READ_BYTES)
        self.size_bytes = os.fstat(self._file.fileno()).st_size

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def headers(self) -> Iterator[BatchHeader]:
        """Headers of whole batches. Raises CorruptBatch at invalid bytes, and OSError."""
        position = 0
        while position < self.size_bytes:
            header = parse_header(self._read_bytes(position, HEADER_SIZE), at=position)
            if header.end_position > self.size_bytes:
                raise CorruptBatch("the batch is truncated", position=position)
            yield header
            position = header.end_position

    def batch(self, header: BatchHeader) -> bytes:
        return self._read_bytes(header.position, header.size_bytes)

    def _read_bytes(self, position: int, size_bytes: int) -> bytes:
        self._file.seek(position)
        return self._file.read(min(size_bytes, self.size_bytes - position))


def _log_items(path: Path, log: LogFile, *, with_records: bool) -> Iterator[Item]:
    yield FileBegin(path.name, base_offset_of(path))
    gaps = _GapFinder()
    end = 0
    try:
        for header in log.headers():
            data = log.batch(header)
            yield BatchItem(header, _crc_matches(data, header.at(0)))
            if with_records:
                for item in _record_items(path, data, header):
                    gaps.note_item(item)
                    yield item
            end = header.end_position
    except CorruptBatch as error:
        yield Problem(
            path.name, f"{log.size_bytes - end} invalid bytes at the end: {_message(error, path)}"
        )
    except OSError as error:
        yield Problem(path.name, f"unreadable bytes from position {end}: {error}")
    if gaps.pairs:
        yield Gaps(path.name, tuple(gaps.pairs), gaps.more)


class _GapFinder:
    """Remembers the first `LIMIT` places where a record's offset is not consecutive."""

    LIMIT: Final = 10_000

    def __init__(self) -> None:
        self.pairs: list[tuple[int, int]] = []
        self.more = 0
        self._last = -1

    def note_item(self, item: Item) -> None:
        if not isinstance(item, RecordItem):
            return
        offset = item.record.offset
        if self._last >= 0 and offset != self._last + 1:
            if len(self.pairs) < self.LIMIT:
                self.pairs.append((self._last, offset))
            else:
                self.more += 1
        self._last = offset


def _crc_matches(data: bytes, header: BatchHeader) -> bool:
    try:
        check_crc(data, header)
    except CorruptBatch:
        return False
    return True


def _message(error: CorruptDataError, path: Path) -> str:
    """The error's message without the file, which a problem names separately."""
    return str(error).removeprefix(f"{path.name}: ")


def _record_items(path: Path, data: bytes, header: BatchHeader) -> Iterator[Item]:
    try:
        records = decode_batch(data, header.at(0))
    except CorruptBatch as error:
        where = f"position {header.position}: offset {header.base_offset}"
        yield Problem(path.name, f"{where}: {error.detail}")
        return
    for record in records:
        yield _record_item(record, header)


def _record_item(record: Record, header: BatchHeader) -> RecordItem:
    sequence = header.base_sequence
    if sequence >= 0:
        sequence = (sequence + record.offset - header.base_offset) & MAX_SEQUENCE
    by_log = header.timestamp_type == LOG_APPEND_TIME
    if not header.is_control:
        return RecordItem(record, sequence, by_log)
    try:
        return RecordItem(record, sequence, by_log, control_type(record.key), end_marker(record))
    except CorruptBatch:
        return RecordItem(record, sequence, by_log, -1)


def _offset_index(path: Path, data: memoryview) -> Iterator[Item]:
    base_offset = base_offset_of(path)
    if len(data) < OFFSET_ENTRY.size:
        yield Empty(path.name)
    yield from _index(
        path, data, OFFSET_ENTRY, lambda relative, at: OffsetEntry(base_offset + relative, at)
    )


def _time_index(path: Path, data: memoryview) -> Iterator[Item]:
    base_offset = base_offset_of(path)
    yield from _index(
        path, data, TIME_ENTRY, lambda time, relative: TimeEntry(time, base_offset + relative)
    )


def _index(
    path: Path,
    data: memoryview,
    layout: Struct,
    entry_of: Callable[[int, int], OffsetEntry | TimeEntry],
) -> Iterator[Item]:
    """The entries before the preallocated zeros of a live file."""
    base_offset, partial_bytes = base_offset_of(path), len(data) % layout.size
    for index, fields in enumerate(layout.iter_unpack(data[: len(data) - partial_bytes])):
        entry = entry_of(*fields)
        if entry.offset == base_offset and (index or not any(fields)):
            yield from _after_entries(path, data[index * layout.size :])
            return
        yield entry
    yield from _partial_entry(path, partial_bytes)


def _after_entries(path: Path, rest: memoryview) -> Iterator[Item]:
    """After the last entry of an index there must be only preallocated zeros."""
    if bytes(rest).strip(b"\0"):
        yield Problem(path.name, f"non-zero bytes in the last {len(rest)}, after the entries")


def _partial_entry(path: Path, size_bytes: int) -> Iterator[Item]:
    if size_bytes:
        yield Problem(path.name, f"{size_bytes} bytes of a partial entry at the end")


def _txn_index(path: Path, data: memoryview) -> Iterator[Item]:
    whole = len(data) - len(data) % TXN_ENTRY_SIZE
    yield from parse_txn_index(data[:whole], file=path.name)
    yield from _partial_entry(path, len(data) - whole)


def _snapshot(path: Path, data: memoryview) -> Iterator[Item]:
    yield from parse_snapshot(data, file=path.name)


def _epoch_checkpoint(path: Path, data: memoryview) -> Iterator[Item]:
    for entry in parse_epoch_checkpoint(bytes(data), file=path.name):
        yield Line((("epoch", entry.epoch), ("startOffset", entry.start_offset)))


def _offset_checkpoint(path: Path, data: memoryview) -> Iterator[Item]:
    for entry in parse_offset_checkpoint(bytes(data), file=path.name):
        yield Line(
            (("topic", entry.topic), ("partition", entry.partition), ("offset", entry.offset))
        )


def _partition_metadata(path: Path, data: memoryview) -> Iterator[Item]:
    topic_id = parse_partition_metadata(bytes(data), file=path.name)
    yield Line((("version", 0), ("topicId", format_topic_id(topic_id))))


def _properties(path: Path, data: memoryview) -> Iterator[Item]:
    for name, value in parse_properties(bytes(data), file=path.name).items():
        yield Line(((name, value),))


_READERS: Final[dict[str, Callable[[Path, memoryview], Iterator[Item]]]] = {
    "index": _offset_index,
    "timeindex": _time_index,
    "txnindex": _txn_index,
    "snapshot": _snapshot,
    "leader-epoch-checkpoint": _epoch_checkpoint,
    "offset-checkpoint": _offset_checkpoint,
    "partition.metadata": _partition_metadata,
    "meta.properties": _properties,
}
