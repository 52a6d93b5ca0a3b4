"""Kafka's `.snapshot` file: the state of a partition's idempotent producers at an offset.

Big-endian (docs/formats/snapshots-and-checkpoints.md):

    version i16 (1), crc u32 (CRC-32C over the rest), count i32, then for each producer 46 bytes:
    producer id i64, epoch i16, last sequence i32, last offset i64, offset delta i32, timestamp i64,
    coordinator epoch i32, first offset of the open transaction i64 (-1: none)

Rules that keep it honest:

* Formatting what was parsed gives the same bytes: the order of producers is preserved.
* The count is checked against the file size before any entry is read.
* The format stores only a producer's newest batch: the earlier ones, whose duplicates have to be
  recognized too, come from the log.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from typing import Final, NamedTuple

from tierlog.record_format.batch import MAX_SEQUENCE, Buffer
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptSnapshot, UnknownFormatVersion

VERSION: Final = 1
ENTRY_SIZE: Final = 46
_HEAD: Final = struct.Struct(">hIi")
_COUNT_AT: Final = 6
_COUNT: Final = struct.Struct(">i")
_ENTRY: Final = struct.Struct(">qhiqiqiq")

assert _ENTRY.size == ENTRY_SIZE


class ProducerEntry(NamedTuple):
    """A producer's state. -1 means none for sequence, offset, timestamp and transaction."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int
    current_txn_first_offset: int

    @property
    def first_sequence(self) -> int:
        """The last batch's first sequence; -1 if none. Sequences wrap from 2**31 - 1 to 0."""
        if self.last_sequence < 0:
            return -1
        return (self.last_sequence - self.offset_delta) & MAX_SEQUENCE


def format_snapshot(entries: Iterable[ProducerEntry]) -> bytes:
    packed = [_ENTRY.pack(*entry) for entry in entries]
    checked = _COUNT.pack(len(packed)) + b"".join(packed)
    return _HEAD.pack(VERSION, crc32c_of(checked), len(packed)) + checked[_COUNT.size :]


def parse_snapshot(data: Buffer, *, file: str = "") -> list[ProducerEntry]:
    """The producers in the file's order. Raises CorruptSnapshot, UnknownFormatVersion."""
    if len(data) < _HEAD.size:
        raise CorruptSnapshot(f"a producer snapshot is longer than {len(data)} bytes", file=file)
    version, crc, count = _HEAD.unpack_from(data)
    if version != VERSION:
        raise UnknownFormatVersion(f"unknown producer snapshot version {version}", file=file)
    found = crc32c_of(bytes(data[_COUNT_AT:]))
    if found != crc:
        raise CorruptSnapshot(f"checksum is {found:08x}, expected {crc:08x}", file=file)
    if count * ENTRY_SIZE != len(data) - _HEAD.size:
        raise CorruptSnapshot(f"{count} producers do not fit {len(data)} bytes", file=file)
    return [ProducerEntry(*fields) for fields in _ENTRY.iter_unpack(bytes(data[_HEAD.size :]))]
