"""One batch through compaction: which of its records stay, and the batch they then make.

Rules that keep it honest:

* A batch keeps its base offset, last offset, epoch, codec and producer fields, whatever leaves it:
  offsets are not assigned twice, and a producer's sequence continues.
* The first time that a batch with tombstones (or a marker whose transaction is gone) is rewritten
  it gets a delete horizon: attribute bit 6, and the horizon as base timestamp (KIP-534). Before the
  horizon they stay; from then on they may go.
* A record newer than what the table covers stays. A record without a key goes.
* What is written is byte for byte what Kafka's cleaner writes (MemoryRecords.filterTo), except for
  the compressors' own choices.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple, Protocol

from record_format.batch import (
    CODEC_MASK,
    DELETE_HORIZON_BIT,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    MAGIC,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    base_timestamp_for,
    set_max_timestamp,
)
from record_format.codecs import compress
from record_format.decode import expand


class Retention(Enum):
    """What becomes of a batch without any remaining record, in Kafka's terms."""

    DELETE = "delete"  # it goes whole, unread
    DELETE_EMPTY = "delete-empty"  # it goes where nothing stays
    RETAIN_EMPTY = "retain-empty"  # it stays, as a header without records


class Verdict(NamedTuple):
    """What the caller knows of a batch. `drop_records`: an aborted transaction's, or a marker past
    its horizon. `empty_marker`: a marker whose transaction has nothing left.
    """

    retention: Retention
    drop_records: bool = False
    empty_marker: bool = False


class Round(NamedTuple):
    """One round's clock: `now_ms`, and the horizon that it gives to tombstones. `may_forget`: one
    that is past it may go.
    """

    now_ms: int
    delete_retention_ms: int
    may_forget: bool = True

    def is_past(self, horizon_ms: int) -> bool:
        return self.may_forget and self.now_ms >= horizon_ms

    @property
    def delete_horizon_ms(self) -> int:
        # As it fits the header: that is for ever.
        return min(self.now_ms + self.delete_retention_ms, 2**63 - 1)


class Choice(NamedTuple):
    """Records of a batch that stay. `keep` is the table's own; the timestamps are whole."""

    records: int
    tombstones: int
    first_timestamp: int
    max_timestamp: int
    keep: object


class KeyTable(Protocol):
    """Which offset was a key's last in the part of the log that was entered."""

    latest_offset: int  # up to it keys were entered; what comes later is not known

    def clear(self, *, start_offset: int) -> None: ...

    def add(self, data: bytes, header: BatchHeader) -> bool:
        """Enter the keys of a batch's records; False if the table is full."""

    def choose(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        """The records that are their key's last, or newer than the table."""

    def copy(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        """The chosen records (all where `choice.keep` is None), from another base timestamp."""


class Compacted(NamedTuple):
    """A batch as it is kept; if nothing changed, `body` is the very same bytes."""

    header: BatchHeader
    body: Buffer


def compact_batch(
    buf: Buffer, header: BatchHeader, verdict: Verdict, *, table: KeyTable, clock: Round
) -> Compacted | None:
    """The batch with what stays of it, or None if it goes. Raises CorruptBatch."""
    if verdict.retention is Retention.DELETE:
        return None
    retains_empty = verdict.retention is Retention.RETAIN_EMPTY
    if not header.record_count:  # it was emptied before
        return _as_it_is(buf, header) if retains_empty else None
    if verdict.drop_records:
        return emptied(header) if retains_empty else None
    horizon = header.base_timestamp if header.has_delete_horizon else None
    data = expand(buf, header)
    if header.is_control:
        choice = _all_of(header)
    else:
        past_horizon = horizon is not None and clock.is_past(horizon)
        choice = table.choose(data, header, drop_tombstones=past_horizon)
    if not choice.records:
        return emptied(header) if retains_empty else None
    sets_horizon = horizon is None and bool(choice.tombstones or verdict.empty_marker)
    if choice.records == header.record_count and not sets_horizon:
        return _as_it_is(buf, header)
    new_horizon = clock.delete_horizon_ms if sets_horizon else horizon
    return _rewritten(data, header, choice, table=table, horizon_ms=new_horizon)


def _as_it_is(buf: Buffer, header: BatchHeader) -> Compacted:
    return Compacted(header, memoryview(buf)[header.position : header.end_position])


def _all_of(header: BatchHeader) -> Choice:
    times = (header.max_timestamp, header.max_timestamp)
    return Choice(header.record_count, 0, *times, keep=None)


def emptied(header: BatchHeader) -> Compacted:
    """The header alone: it holds a producer's last sequence, or the end of a round."""
    attributes = header.attributes & ~(CODEC_MASK | DELETE_HORIZON_BIT)
    changed = header._replace(
        size_bytes=HEADER_SIZE,
        attributes=attributes,
        base_timestamp=NO_TIMESTAMP,
        record_count=0,
    )
    return _sealed(changed, b"", max_timestamp=header.max_timestamp)


def empty_batch(start_offset: int, end_offset: int, *, leader_epoch: int) -> Compacted:
    """A batch without records that spans [start_offset, end_offset)."""
    nobody = -1  # no producer, no sequence
    header = BatchHeader(
        position=0,
        base_offset=start_offset,
        size_bytes=HEADER_SIZE,
        leader_epoch=leader_epoch,
        magic=MAGIC,
        crc=0,
        attributes=0,
        last_offset_delta=end_offset - start_offset - 1,
        base_timestamp=NO_TIMESTAMP,
        max_timestamp=NO_TIMESTAMP,
        producer_id=nobody,
        producer_epoch=nobody,
        base_sequence=nobody,
        record_count=0,
    )
    return _sealed(header, b"", max_timestamp=NO_TIMESTAMP)


def _rewritten(
    data: bytes,
    header: BatchHeader,
    choice: Choice,
    *,
    table: KeyTable,
    horizon_ms: int | None,
) -> Compacted:
    stamped = bool(header.attributes & LOG_APPEND_TIME_BIT)
    first = header.max_timestamp if stamped else choice.first_timestamp
    greatest = header.max_timestamp if stamped else choice.max_timestamp
    base_timestamp = horizon_ms
    if base_timestamp is None:
        base_timestamp = base_timestamp_for(first, greatest=greatest)
    records = table.copy(data, header, choice, base_timestamp=base_timestamp)
    body = compress(header.codec, records)
    attributes = header.attributes & ~DELETE_HORIZON_BIT
    changed = header._replace(
        size_bytes=HEADER_SIZE + len(body),
        attributes=attributes | (0 if horizon_ms is None else DELETE_HORIZON_BIT),
        base_timestamp=base_timestamp,
        record_count=choice.records,
    )
    return _sealed(changed, body, max_timestamp=greatest)


def _sealed(header: BatchHeader, body: bytes, *, max_timestamp: int) -> Compacted:
    batch = bytearray(header.pack()) + body
    return Compacted(set_max_timestamp(batch, header.at(0), timestamp=max_timestamp), batch)
