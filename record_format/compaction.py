"""Compacts one batch: selects the records to keep by a table of keys, and rewrites the batch.

Rules that keep it honest:

* A batch keeps its base offset, last offset, epoch, codec and producer fields, whichever records
  are dropped: offsets are not assigned twice, and a producer's sequence continues.
* When a batch with tombstones (or the marker of an empty transaction) is first rewritten, it gets a
  delete horizon: attribute bit 6, with the horizon as base timestamp (KIP-534). They are kept until
  the horizon, and may be dropped from then on.
* A record newer than the key table covers is kept. A record without a key is dropped.
* The output is byte for byte what Kafka's cleaner writes (MemoryRecords.filterTo), except for
  differences between compressors.
* A key table's memory is bounded: it holds as many keys as fit its size, and then reports that it
  is full. The caller continues in another round. The plain table here and the compiled one in
  `key_kernel` return the same results.
* Keys are identified by their hash alone, as in Kafka's offset map: reading a key back from the log
  for each lookup would cost a disk seek per record (docs/decisions/0014-compaction.md).
"""

from __future__ import annotations

import hashlib
import os
from enum import Enum
from typing import Final, NamedTuple, Protocol

from tierlog.record_format.batch import (
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
from tierlog.record_format.codecs import compress
from tierlog.record_format.decode import expand, walk_batch
from tierlog.record_format.native import can_compile
from tierlog.record_format.record_walk import Fields
from tierlog.record_format.varint import encoded, read_varint, read_varlong, zigzag


class BatchRetention(Enum):
    """What happens to a batch that has no records left (Kafka's RecordFilter.BatchRetention)."""

    DELETE = "delete"  # drop the whole batch, without reading it
    DELETE_EMPTY = "delete-empty"  # drop it if no record is kept
    RETAIN_EMPTY = "retain-empty"  # keep its header even if no record is kept


class BatchRetentionResult(NamedTuple):
    """The caller's decision about a batch, before its records are read.

    `drop_records`: it belongs to an aborted transaction, or is a marker past its delete horizon.
    `marker_of_empty_txn`: it is the marker of a transaction that has no records left.
    """

    retention: BatchRetention
    drop_records: bool = False
    marker_of_empty_txn: bool = False


class TombstonePolicy(NamedTuple):
    """When one round drops tombstones: past their delete horizon, if `may_drop`."""

    now_ms: int
    delete_retention_ms: int
    may_drop: bool = True

    def is_past(self, horizon_ms: int) -> bool:
        return self.may_drop and self.now_ms >= horizon_ms

    @property
    def delete_horizon_ms(self) -> int:
        """For tombstones that have none yet, clamped to what the header holds (i64)."""
        return min(self.now_ms + self.delete_retention_ms, 2**63 - 1)


class Choice(NamedTuple):
    """The records of a batch to keep.

    `keep` is opaque: the key table's own representation. Timestamps are absolute.
    """

    records: int
    tombstones: int
    first_timestamp: int
    max_timestamp: int
    keep: object


class KeyTable(Protocol):
    """Maps each key to its last offset in the range of the log whose keys were added."""

    latest_offset: int  # the end of that range, inclusive

    def clear(self, *, start_offset: int) -> None: ...

    def add_batch_keys(self, data: bytes, header: BatchHeader) -> bool:
        """Add the keys of a batch's records; False if the table is full."""

    def choose_records(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        """Select the records that are their key's last, or newer than the table's range."""

    def copy_chosen(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        """Encode the chosen records (all if `choice.keep` is None) relative to `base_timestamp`."""


class Compacted(NamedTuple):
    """A compacted batch. If nothing changed, `body` is a view of the original bytes."""

    header: BatchHeader
    body: Buffer


def compact_batch(
    buf: Buffer,
    header: BatchHeader,
    result: BatchRetentionResult,
    *,
    table: KeyTable,
    policy: TombstonePolicy,
) -> Compacted | None:
    """Compact one batch; None if it is dropped. Raises CorruptBatch."""
    if result.retention is BatchRetention.DELETE:
        return None
    retains_empty = result.retention is BatchRetention.RETAIN_EMPTY
    if not header.record_count:  # an earlier round emptied it
        return _unchanged(buf, header) if retains_empty else None
    if result.drop_records:
        return emptied(header) if retains_empty else None
    horizon = header.base_timestamp if header.has_delete_horizon else None
    data = expand(buf, header)
    if header.is_control:
        choice = _choose_all(header)
    else:
        past_horizon = horizon is not None and policy.is_past(horizon)
        choice = table.choose_records(data, header, drop_tombstones=past_horizon)
    if not choice.records:
        return emptied(header) if retains_empty else None
    sets_horizon = horizon is None and bool(choice.tombstones or result.marker_of_empty_txn)
    if choice.records == header.record_count and not sets_horizon:
        return _unchanged(buf, header)
    new_horizon = policy.delete_horizon_ms if sets_horizon else horizon
    return _rewritten(data, header, choice, table=table, horizon_ms=new_horizon)


def _unchanged(buf: Buffer, header: BatchHeader) -> Compacted:
    return Compacted(header, memoryview(buf)[header.position : header.end_position])


def _choose_all(header: BatchHeader) -> Choice:
    times = (header.max_timestamp, header.max_timestamp)
    return Choice(header.record_count, 0, *times, keep=None)


def emptied(header: BatchHeader) -> Compacted:
    """The batch's header without records: keeps a producer's last sequence, or a round's end."""
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
    none = -1  # no producer id, epoch or sequence
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
        producer_id=none,
        producer_epoch=none,
        base_sequence=none,
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
    records = table.copy_chosen(data, header, choice, base_timestamp=base_timestamp)
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


PLAIN_ENTRY_BYTES: Final = 160  # a dict entry, a bytes object of 16, an int
MAX_SPAN: Final = 0xFFFFFFFF  # offsets per round: the compiled table has 32 bits for them


class PlainKeyTable:
    """A dict of 128-bit hashes."""

    def __init__(self, memory_bytes: int) -> None:
        self._max_keys = max(1, memory_bytes // PLAIN_ENTRY_BYTES)
        self._seed = os.urandom(16)
        self._offsets: dict[bytes, int] = {}
        self.latest_offset = self.start_offset = -1

    def clear(self, *, start_offset: int) -> None:
        self._offsets.clear()
        self.start_offset, self.latest_offset = start_offset, -1

    def __len__(self) -> int:
        return len(self._offsets)

    def add_batch_keys(self, data: bytes, header: BatchHeader) -> bool:
        fields = walk_batch(data, header, with_columns=True).fields
        rows = zip(fields.offset_deltas, fields.key_starts, fields.key_ends, strict=True)
        for delta, start, end in rows:
            offset = header.base_offset + delta
            if start < 0 or offset < self.start_offset:
                continue
            if len(self._offsets) >= self._max_keys or offset - self.start_offset >= MAX_SPAN:
                return False
            self._offsets[self._hash(data[start:end])] = offset
        return True

    def choose_records(self, data: bytes, header: BatchHeader, *, drop_tombstones: bool) -> Choice:
        fields = walk_batch(data, header, with_columns=True).fields
        keep = bytearray(header.record_count)
        times, tombstones = [], 0
        for number, delta in enumerate(fields.offset_deltas):
            if not self._is_kept(data, header.base_offset + delta, fields, number, drop_tombstones):
                continue
            keep[number] = 1
            times.append(fields.timestamps[number])
            tombstones += fields.value_starts[number] < 0
        first, greatest = (times[0], max(times)) if times else (0, 0)
        return Choice(len(times), tombstones, first, greatest, keep)

    def _is_kept(
        self, data: bytes, offset: int, fields: Fields, number: int, drop_tombstones: bool
    ) -> bool:
        if offset > self.latest_offset:
            return True
        start, end = fields.key_starts[number], fields.key_ends[number]
        if start < 0 or (drop_tombstones and fields.value_starts[number] < 0):
            return False
        return offset >= self._offsets.get(self._hash(data[start:end]), -1)

    def copy_chosen(
        self, data: bytes, header: BatchHeader, choice: Choice, *, base_timestamp: int
    ) -> bytes:
        keep = choice.keep
        assert keep is None or isinstance(keep, bytearray)
        stamped = bool(header.attributes & LOG_APPEND_TIME_BIT)
        parts: list[bytes] = []
        position = 0
        for number in range(header.record_count):
            size, position = read_varint(data, position)
            end = position + size
            if keep is None or keep[number]:
                delta, behind = read_varlong(data, position + 1)
                timestamp = header.max_timestamp if stamped else header.base_timestamp + delta
                moved = zigzag(timestamp - base_timestamp)
                rest = data[behind:end]
                parts += (encoded(1 + len(moved) + len(rest)), b"\0", moved, rest)
            position = end
        return b"".join(parts)

    def _hash(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, digest_size=16, key=self._seed).digest()


def make_key_table(memory_bytes: int) -> KeyTable:
    """A table of at most `memory_bytes`: the compiled one if it is available."""
    if not can_compile():
        return PlainKeyTable(memory_bytes)
    from tierlog.record_format.key_kernel import NativeKeyTable

    return NativeKeyTable(memory_bytes)
