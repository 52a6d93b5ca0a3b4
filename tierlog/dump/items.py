"""The items of a dumped file: only data."""

from __future__ import annotations

from typing import NamedTuple

from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.checkpoint_files import ProducerEntry
from tierlog.record_format.control import EndMarker
from tierlog.record_format.decode import Record
from tierlog.record_format.index_layouts import AbortedTxn, OffsetEntry, TimeEntry


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
