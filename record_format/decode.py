"""Decodes record batches, for HTTP, compaction and recovery; and control records, the markers with
which a coordinator ends a transaction.

Rules that keep it honest:

* Every length is checked against its enclosing record, every record against the batch's body, and
  the records must fill the body exactly.
* The decompressed size is bounded by `max_bytes`.
* The caller has verified the checksum (`batch.check_crc`), once, where the bytes arrived.
* Control records of a newer version are read by their first four bytes, as Kafka does. An unknown
  type is returned as a number, and is neither a commit nor an abort:

    key    version i16 (0), type i16 (0 abort, 1 commit, from 2 on KRaft's)
    value  of an end marker: version i16 (0), coordinator epoch i32, and in version 1 tagged fields
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from typing import Final, NamedTuple

from tierlog.record_format.batch import (
    LOG_APPEND_TIME_BIT,
    MIN_RECORD_SIZE,
    BatchHeader,
    Buffer,
    check_whole,
)
from tierlog.record_format.codecs import MAX_EXPANDED_BYTES, DecompressedTooLarge, decompress
from tierlog.record_format.encode import NO_HEADERS, Headers
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.record_walk import I64_MAX, Walk, WalkRequest, walk
from tierlog.record_format.varint import read_varint


class Record(NamedTuple):
    """A record as it was read."""

    offset: int
    timestamp: int
    key: bytes | None
    value: bytes | None
    headers: Headers


class Columns(NamedTuple):
    """Records by column; all lists have the same length."""

    offsets: list[int]
    timestamps: list[int]
    keys: list[bytes | None]
    values: list[bytes | None]
    headers: list[Headers]


def expand(buf: Buffer, header: BatchHeader, *, max_bytes: int = MAX_EXPANDED_BYTES) -> bytes:
    """The batch's records, decompressed.

    Raises CorruptBatch, in particular DecompressedTooLarge beyond `max_bytes`.
    """
    check_whole(buf, header)
    body = bytes(buf[header.body_position : header.end_position])
    try:
        return bytes(decompress(header.codec, body, max_bytes=max_bytes))
    except DecompressedTooLarge:
        raise
    except CorruptBatch as error:
        raise corrupt_batch(error.detail, header) from error


def corrupt_batch(detail: str, header: BatchHeader) -> CorruptBatch:
    return CorruptBatch(detail, position=header.position, offset=header.base_offset)


def walk_batch(
    records: Buffer,
    header: BatchHeader,
    *,
    with_columns: bool = False,
    from_delta: int = 0,
    columns_max: int = I64_MAX,
) -> Walk:
    """Check the decompressed records of a batch in a log. Offset deltas increase; gaps are allowed.

    Raises CorruptBatch.
    """
    if header.record_count * MIN_RECORD_SIZE > len(records):
        raise corrupt_batch(
            f"{header.record_count} records cannot fit in {len(records)} bytes", header
        )
    request = WalkRequest(
        record_count=header.record_count,
        base_timestamp=header.base_timestamp,
        last_offset_delta=header.last_offset_delta,
        dense=False,
        with_columns=with_columns,
        from_delta=from_delta,
        columns_max=columns_max,
    )
    found = walk(records, request)
    if found.problem:
        raise corrupt_batch(found.describe(), header)
    return found


def decode_columns(
    buf: Buffer,
    header: BatchHeader,
    *,
    from_offset: int = 0,
    end_offset: int | None = None,
    max_records: int = I64_MAX,
    max_bytes: int = MAX_EXPANDED_BYTES,
) -> Columns:
    """The batch's records in [from_offset, end_offset), the first `max_records` of them, by column.
    Raises CorruptBatch.

    Control batches are decoded like any other.
    """
    data = expand(buf, header, max_bytes=max_bytes)
    from_delta = from_offset - header.base_offset
    fields = walk_batch(
        data, header, with_columns=True, from_delta=from_delta, columns_max=max_records
    ).fields
    high = len(fields.offset_deltas)
    if end_offset is not None:
        high = bisect_left(fields.offset_deltas, end_offset - header.base_offset)
    base = header.base_offset
    offsets = [base + delta for delta in fields.offset_deltas[:high]]
    timestamps = fields.timestamps[:high]
    if header.attributes & LOG_APPEND_TIME_BIT:
        timestamps = [header.max_timestamp] * len(offsets)
    return Columns(
        offsets,
        timestamps,
        _slices(data, fields.key_starts[:high], fields.key_ends[:high]),
        _slices(data, fields.value_starts[:high], fields.value_ends[:high]),
        [NO_HEADERS if at < 0 else read_headers(data, at) for at in fields.header_starts[:high]],
    )


def _slices(data: bytes, starts: list[int], ends: list[int]) -> list[bytes | None]:
    return [None if start < 0 else data[start:end] for start, end in zip(starts, ends, strict=True)]


def read_headers(data: bytes, position: int) -> Headers:
    """Decode headers that the walk has checked. Bad UTF-8 becomes U+FFFD, as in Kafka's client."""
    count, position = read_varint(data, position)
    found: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        size, position = read_varint(data, position)
        name = data[position : position + size].decode(errors="replace")
        size, position = read_varint(data, position + size)
        found.append((name, None if size < 0 else data[position : position + size]))
        position += max(size, 0)
    return tuple(found)


def decode_batch(buf: Buffer, header: BatchHeader) -> list[Record]:
    """All records of a batch, control records included. Raises CorruptBatch."""
    return list(map(Record, *decode_columns(buf, header)))


def first_at_time(
    buf: Buffer, header: BatchHeader, *, timestamp: int, start_offset: int = 0
) -> tuple[int, int] | None:
    """Offset and timestamp of the first record at or after both `start_offset` and `timestamp`;
    None if there is none. Raises CorruptBatch.

    Transaction markers count, as in Kafka's ListOffsets.
    """
    if header.max_timestamp < timestamp or header.last_offset < start_offset:
        return None
    fields = walk_batch(expand(buf, header), header, with_columns=True).fields
    is_stamped = header.attributes & LOG_APPEND_TIME_BIT
    for delta, given in zip(fields.offset_deltas, fields.timestamps, strict=True):
        stamped = header.max_timestamp if is_stamped else given
        offset = header.base_offset + delta
        if offset >= start_offset and stamped >= timestamp:
            return offset, stamped
    return None


def min_timestamp_of(buf: Buffer, header: BatchHeader) -> int | None:
    """The minimum timestamp of the batch's records; None if it has none. Raises CorruptBatch.

    The header does not have it: its base timestamp is the first record's, or a delete horizon.
    """
    if not header.record_count:
        return None
    if header.attributes & LOG_APPEND_TIME_BIT:
        return header.max_timestamp
    if header.codec:
        return walk_batch(expand(buf, header), header).min_timestamp
    check_whole(buf, header)
    with memoryview(buf) as view, view[header.body_position : header.end_position] as records:
        return walk_batch(records, header).min_timestamp


ABORT: Final = 0
COMMIT: Final = 1
_KEY: Final = struct.Struct(">hh")
_VALUE: Final = struct.Struct(">hi")


class EndMarker(NamedTuple):
    """The end of a producer's transaction."""

    committed: bool
    coordinator_epoch: int


def encode_marker(marker: EndMarker) -> tuple[bytes, bytes]:
    """The key and the value of its control record."""
    kind = COMMIT if marker.committed else ABORT
    return _KEY.pack(0, kind), _VALUE.pack(0, marker.coordinator_epoch)


def control_type(key: bytes | None) -> int:
    """The type of a control record. Raises CorruptBatch if the key is truncated or its version is
    negative.
    """
    if key is None or len(key) < _KEY.size:
        raise CorruptBatch("the key of a control record is shorter than four bytes")
    version, kind = _KEY.unpack_from(key)
    if version < 0:
        raise CorruptBatch(f"the key of a control record has version {version}")
    return int(kind)


def end_marker(record: Record) -> EndMarker | None:
    """The marker in `record`; None if it is of another control type. Raises CorruptBatch."""
    kind = control_type(record.key)
    if kind not in (ABORT, COMMIT):
        return None
    if record.value is None or len(record.value) < _VALUE.size:
        raise CorruptBatch(
            "the value of an end marker is shorter than six bytes", offset=record.offset
        )
    version, epoch = _VALUE.unpack_from(record.value)
    if version < 0:
        raise CorruptBatch(f"an end marker has version {version}", offset=record.offset)
    return EndMarker(kind == COMMIT, epoch)


def end_marker_of(buf: Buffer, header: BatchHeader) -> EndMarker | None:
    """The marker of a control batch; None if compaction removed it, or it is of another type."""
    assert header.is_control, "only control batches hold markers"
    records = decode_batch(buf, header)
    return end_marker(records[0]) if records else None
