"""Finds problems in a log's files: `tierlog dump --verify`.

* A `.log` is checked by itself: every batch's checksum, its records, and the order of offsets.
* An index is checked against the `.log` beside it, in one pass over its batch headers; memory is
  bounded by the index.
* A gap between offsets is not a problem: compaction leaves gaps.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Final

from tierlog.cli.dump_reader import (
    BatchItem,
    Item,
    LogFile,
    Problem,
    RecordItem,
    base_offset_of,
    kind_of,
    read_items,
)
from tierlog.record_format.batch import BatchHeader
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.index_layouts import OffsetEntry, TimeEntry

_CHECKED_AGAINST_LOG: Final = ("index", "timeindex")


def find_problems(path: Path) -> Iterator[Problem]:
    """Yields nothing for an intact file. Raises as `read_items`."""
    items = read_items(path)
    kind = kind_of(path)
    if kind == "log":
        yield from _log_problems(path.name, items, base_offset=base_offset_of(path))
    elif kind in _CHECKED_AGAINST_LOG:
        entries: list[OffsetEntry | TimeEntry] = []
        for item in items:
            if isinstance(item, Problem):
                yield item
            elif isinstance(item, (OffsetEntry, TimeEntry)):
                entries.append(item)
        yield from _index_problems(path, entries)
    else:
        yield from (item for item in items if isinstance(item, Problem))


def _log_problems(name: str, items: Iterator[Item], *, base_offset: int) -> Iterator[Problem]:
    next_offset = base_offset
    for item in items:
        if isinstance(item, Problem):
            yield item
        elif isinstance(item, BatchItem):
            header = item.header
            where = f"position {header.position}, offset {header.base_offset}"
            if not item.crc_matches:
                yield Problem(name, f"a batch whose checksum does not match at {where}")
            if header.base_offset < next_offset:
                yield Problem(name, f"an offset below {next_offset} at {where}")
            next_offset = header.next_offset
        elif isinstance(item, RecordItem) and item.control_type == -1:
            yield Problem(name, f"a control record without a type at {item.record.offset}")


def _index_problems(path: Path, entries: list[OffsetEntry | TimeEntry]) -> Iterator[Problem]:
    log = path.with_name(re.sub(r"\.(time)?index(?=\.|\Z)", ".log", path.name))
    if not log.exists():
        yield Problem(path.name, f"cannot be checked: {log.name} is missing")
        return
    yield from _order_problems(path.name, entries)
    by_offset = sorted(set(entries), key=lambda entry: entry.offset, reverse=True)
    with LogFile(log) as file:
        try:
            for header in file.headers():
                while by_offset and by_offset[-1].offset <= header.last_offset:
                    yield from _mismatch(path.name, by_offset.pop(), header)
        except (CorruptBatch, OSError) as error:
            yield Problem(path.name, f"cannot be checked: {log.name} is not readable: {error}")
            return
    for entry in reversed(by_offset):
        yield Problem(path.name, f"an entry for offset {entry.offset}, past the end of the log")


def _order_problems(name: str, entries: list[OffsetEntry | TimeEntry]) -> Iterator[Problem]:
    for last, entry in pairwise(entries):
        if _out_of_order(last, entry):
            yield Problem(name, f"an entry out of order for offset {entry.offset}")


def _out_of_order(last: OffsetEntry | TimeEntry, entry: OffsetEntry | TimeEntry) -> bool:
    if isinstance(last, TimeEntry) and isinstance(entry, TimeEntry):
        return entry.timestamp < last.timestamp or entry.offset <= last.offset
    return entry.offset <= last.offset


def _mismatch(name: str, entry: OffsetEntry | TimeEntry, header: BatchHeader) -> Iterator[Problem]:
    """Compare an entry with the first batch that ends at or after its offset."""
    if isinstance(entry, OffsetEntry):
        if (entry.position, entry.offset) != (header.position, header.last_offset):
            yield Problem(
                name,
                f"an entry (offset {entry.offset}, position {entry.position}) where the batch "
                f"has (offset {header.last_offset}, position {header.position})",
            )
    elif header.record_count and entry.timestamp != header.max_timestamp:
        yield Problem(
            name,
            f"timestamp {entry.timestamp} for offset {entry.offset}, whose batch has "
            f"{header.max_timestamp}",
        )
