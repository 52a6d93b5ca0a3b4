"""Entries of Kafka's three index files: encoding, decoding and checks. No file I/O.

Big-endian (docs/formats/indexes.md):

    .index      8 bytes   relative offset i32, position i32
    .timeindex  12 bytes  timestamp i64, relative offset i32
    .txnindex   34 bytes  version i16 (0), producer id i64, first offset i64, last offset i64,
                          last stable offset i64

Rules that keep it honest:

* Entries are ordered; anything else is corrupt. In an offset index, offsets and positions strictly
  increase. In a time index, offsets strictly increase, and timestamps do not decrease. A
  transaction index is ordered by last offset.
* An active `.index` or `.timeindex` is preallocated with zeros: only a caller that knows how many
  entries are valid can parse one.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import CorruptIndex

TXN_ENTRY_SIZE: Final = 34
MAX_RELATIVE_OFFSET: Final = 2**31 - 1

OFFSET_ENTRY: Final = struct.Struct(">ii")  # relative offset, position
TIME_ENTRY: Final = struct.Struct(">qi")  # timestamp, relative offset
_TXN_ENTRY: Final = struct.Struct(">hqqqq")
_TXN_VERSION: Final = 0


class OffsetEntry(NamedTuple):
    """`offset` is the last offset of the batch that begins at `position`."""

    offset: int
    position: int


class TimeEntry(NamedTuple):
    """`timestamp` is the largest so far; `offset` is that of its record, or of its batch's end."""

    timestamp: int
    offset: int


class AbortedTxn(NamedTuple):
    """An aborted transaction; `last_offset` is that of its abort marker."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


def pack_entries(layout: struct.Struct, entries: Iterable[tuple[int, ...]]) -> bytes:
    """The bytes of an `.index` or `.timeindex` with these entries; their offsets are relative."""
    return b"".join(layout.pack(*entry) for entry in entries)


def pack_txn_entry(entry: AbortedTxn) -> bytes:
    return _TXN_ENTRY.pack(_TXN_VERSION, *entry)


def parse_offset_index(
    data: Buffer, *, base_offset: int, segment_size: int | None = None, file: str = ""
) -> list[OffsetEntry]:
    """All entries of an `.index` without preallocated space. Raises CorruptIndex.

    If `segment_size` is given, every position must be below it.
    """
    _check_size(data, OFFSET_ENTRY.size, file)
    entries: list[OffsetEntry] = []
    last_relative = last_position = -1
    for relative, position in OFFSET_ENTRY.iter_unpack(data):
        if relative <= last_relative or position <= last_position or position < 0:
            raise _disorder(file, len(entries) * OFFSET_ENTRY.size, f"{relative}, {position}")
        if segment_size is not None and position >= segment_size:
            raise _disorder(file, len(entries) * OFFSET_ENTRY.size, f"position {position}")
        entries.append(OffsetEntry(base_offset + relative, position))
        last_relative, last_position = relative, position
    return entries


def parse_time_index(data: Buffer, *, base_offset: int, file: str = "") -> list[TimeEntry]:
    """All entries of a `.timeindex` without preallocated space. Raises CorruptIndex."""
    _check_size(data, TIME_ENTRY.size, file)
    entries: list[TimeEntry] = []
    last_timestamp, last_relative = -(2**63), -1
    for timestamp, relative in TIME_ENTRY.iter_unpack(data):
        if relative <= last_relative or timestamp < last_timestamp:
            raise _disorder(file, len(entries) * TIME_ENTRY.size, f"{timestamp}, {relative}")
        entries.append(TimeEntry(timestamp, base_offset + relative))
        last_timestamp, last_relative = timestamp, relative
    return entries


def parse_txn_index(data: Buffer, *, base_offset: int = 0, file: str = "") -> list[AbortedTxn]:
    """All entries of a `.txnindex`. Raises CorruptIndex.

    `last_offset` strictly increases, from `base_offset` on; a transaction may begin below that.
    """
    _check_size(data, TXN_ENTRY_SIZE, file)
    entries: list[AbortedTxn] = []
    last = base_offset - 1
    for version, *fields in _TXN_ENTRY.iter_unpack(data):
        position = len(entries) * TXN_ENTRY_SIZE
        if version != _TXN_VERSION:
            raise CorruptIndex(f"unknown entry version {version}", file=file, position=position)
        entry = AbortedTxn(*fields)
        if entry.last_offset <= last or not 0 <= entry.first_offset <= entry.last_offset:
            raise _disorder(file, position, f"{entry}")
        entries.append(entry)
        last = entry.last_offset
    return entries


def pack_txn_index(entries: Iterable[AbortedTxn]) -> bytes:
    return b"".join(map(pack_txn_entry, entries))


def _check_size(data: Buffer, entry_size: int, file: str) -> None:
    if len(data) % entry_size:
        raise CorruptIndex(f"size {len(data)} is not a multiple of {entry_size}", file=file)


def _disorder(file: str, position: int, found: str) -> CorruptIndex:
    return CorruptIndex(
        f"entry ({found}) is out of order or out of range", file=file, position=position
    )
