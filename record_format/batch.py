"""The record batch, version 2: its header, its checksum, and the fields that a broker changes.

Rules that keep it honest:

* A length or count is trusted only after it was checked against the bytes that are there.
* Nothing here reads the records themselves; `decode` and `produced` do.
* A header is a value. Only the functions named `stamp…` and `set_…` write, into a buffer that
  the caller owns.

Kafka's DefaultRecordBatch, big-endian (with the attribute bits: docs/formats/record-batch.md):

    0  base_offset i64        21  attributes i16             51  producer_epoch i16
    8  batch_length i32       23  last_offset_delta i32      53  base_sequence i32
    12 leader_epoch i32       27  base_timestamp i64         57  record_count i32
    16 magic i8 (2)           35  max_timestamp i64          61  records, compressed as one block
    17 crc u32 (Castagnoli,   43  producer_id i64
       over 21..end)

`batch_length` counts from byte 12. The base offset and the leader epoch precede the checksummed
part, so that a broker can assign them without recomputing the checksum.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptBatch

Buffer = bytes | bytearray | memoryview
Writable = bytearray | memoryview

HEADER_SIZE: Final = 61
LOG_OVERHEAD: Final = 12  # base offset and length, not included in the length
MAGIC: Final = 2
CRC_START: Final = 21
NO_TIMESTAMP: Final = -1
NO_PRODUCER_ID: Final = -1
NO_SEQUENCE: Final = -1
MIN_RECORD_SIZE: Final = 7  # seven one-byte fields
MAX_SEQUENCE: Final = 2**31 - 1

CODEC_MASK: Final = 0x07
LOG_APPEND_TIME_BIT: Final = 0x08
TRANSACTIONAL_BIT: Final = 0x10
CONTROL_BIT: Final = 0x20
DELETE_HORIZON_BIT: Final = 0x40

CREATE_TIME: Final = 0
LOG_APPEND_TIME: Final = 1

HEADER: Final = struct.Struct(">qiibIhiqqqhii")
_OFFSET_LENGTH_EPOCH: Final = struct.Struct(">qii")
_MAX_TIMESTAMP_AT: Final = 35
_PRODUCER_AT: Final = 43
_PRODUCER: Final = struct.Struct(">qhi")
_I64: Final = struct.Struct(">q")
_U32: Final = struct.Struct(">I")
_I16: Final = struct.Struct(">h")
_make: Final = tuple.__new__  # three times as fast as a NamedTuple's own constructor

assert HEADER.size == HEADER_SIZE


class BatchHeader(NamedTuple):
    """A parsed header. `position` is the batch's first byte in the buffer it was parsed from."""

    position: int
    base_offset: int
    size_bytes: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp: int
    max_timestamp: int
    producer_id: int
    producer_epoch: int
    base_sequence: int
    record_count: int

    @property
    def last_offset(self) -> int:
        return self.base_offset + self.last_offset_delta

    @property
    def next_offset(self) -> int:
        return self.base_offset + self.last_offset_delta + 1

    @property
    def body_position(self) -> int:
        """Where the records begin."""
        return self.position + HEADER_SIZE

    @property
    def end_position(self) -> int:
        return self.position + self.size_bytes

    @property
    def codec(self) -> int:
        """The codec's id, 0 to 4; 5 to 7 are unassigned, and such a batch cannot be decoded."""
        return self.attributes & CODEC_MASK

    @property
    def timestamp_type(self) -> int:
        return LOG_APPEND_TIME if self.attributes & LOG_APPEND_TIME_BIT else CREATE_TIME

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_BIT)

    @property
    def is_control(self) -> bool:
        return bool(self.attributes & CONTROL_BIT)

    @property
    def has_delete_horizon(self) -> bool:
        """Whether the base timestamp is the time when compaction may drop tombstones (KIP-534).

        Timestamp deltas are then relative to it: a record's timestamp is still base + delta.
        """
        return bool(self.attributes & DELETE_HORIZON_BIT)

    @property
    def last_sequence(self) -> int:
        """The last record's sequence; -1 if none. Sequences wrap from 2**31 - 1 to 0."""
        if self.base_sequence == NO_SEQUENCE:
            return NO_SEQUENCE
        return (self.base_sequence + self.last_offset_delta) & MAX_SEQUENCE

    def at(self, position: int) -> BatchHeader:
        """The same header, for a buffer in which the batch is at `position`."""
        return _make(BatchHeader, (position, *self[1:]))

    def assigned(self, base_offset: int, *, leader_epoch: int) -> BatchHeader:
        """The header as it is after `stamp` with the same arguments."""
        return _make(BatchHeader, (self[0], base_offset, self[2], leader_epoch, *self[4:]))

    def pack(self) -> bytes:
        """The header's 61 bytes; `crc` is written as it is, not recomputed."""
        return HEADER.pack(self.base_offset, self.size_bytes - LOG_OVERHEAD, *self[3:])


def parse_header(buf: Buffer, position: int = 0, *, at: int | None = None) -> BatchHeader:
    """Parse the 61 bytes at `position`; the records need not be in `buf`.

    `at`: the position to report in the header or an error, if `buf` is a part of something larger.
    Raises CorruptBatch if fewer than 61 bytes are left, or a field is invalid.
    """
    place = position if at is None else at
    if position < 0 or len(buf) - position < HEADER_SIZE:
        raise CorruptBatch(
            f"a batch header has {HEADER_SIZE} bytes, but {max(len(buf) - position, 0)} are left",
            position=place,
        )
    # fmt: off
    (base_offset, length, epoch, magic, crc, attributes, last_delta, base_timestamp, max_timestamp,
     producer_id, producer_epoch, base_sequence, count) = HEADER.unpack_from(buf, position)
    # fmt: on
    size = length + LOG_OVERHEAD
    header = _make(
        BatchHeader,
        (
            place,
            base_offset,
            size,
            epoch,
            magic,
            crc,
            attributes,
            last_delta,
            base_timestamp,
            max_timestamp,
            producer_id,
            producer_epoch,
            base_sequence,
            count,
        ),
    )
    # After compaction the count may be less than delta + 1.
    if (
        magic != MAGIC
        or size < HEADER_SIZE
        or base_offset < 0
        or last_delta < 0
        or not 0 <= count <= last_delta + 1
        or (count * MIN_RECORD_SIZE > size - HEADER_SIZE and not attributes & CODEC_MASK)
    ):
        raise CorruptBatch(_invalid_field(header), position=place)
    return header


def _invalid_field(header: BatchHeader) -> str:
    """Describe the first of the checks in `parse_header` that fails."""
    if header.magic != MAGIC:
        return f"magic is {header.magic}: only version 2 batches are supported"
    if header.size_bytes < HEADER_SIZE:
        return f"batch length {header.size_bytes - LOG_OVERHEAD} is shorter than a batch header"
    if header.base_offset < 0:
        return f"base offset {header.base_offset} is negative"
    if header.last_offset_delta < 0:
        return f"last offset delta {header.last_offset_delta} is negative"
    if not 0 <= header.record_count <= header.last_offset_delta + 1:
        return (
            f"{header.record_count} records do not fit last offset delta {header.last_offset_delta}"
        )
    room = header.size_bytes - HEADER_SIZE
    return f"{header.record_count} records cannot fit in {room} bytes"


def iter_headers(buf: Buffer) -> Iterator[BatchHeader]:
    """The headers of the whole batches in `buf`, in order.

    A last batch that is truncated is ignored, as at the end of a fetch. Raises CorruptBatch for
    bytes that are not a batch.
    """
    position = 0
    while len(buf) - position >= HEADER_SIZE:
        header = parse_header(buf, position)
        position += header.size_bytes
        if position > len(buf):
            return
        yield header


def check_whole(buf: Buffer, header: BatchHeader) -> None:
    """Raise CorruptBatch if the batch extends past the end of `buf`."""
    if header.position + header.size_bytes > len(buf):
        raise truncated_batch(header, end=len(buf))


def truncated_batch(header: BatchHeader, *, end: int) -> CorruptBatch:
    """The error for a batch that extends past the position `end`."""
    return CorruptBatch(
        f"the batch has {header.size_bytes} bytes, but {end - header.position} are left",
        position=header.position,
        offset=header.base_offset,
    )


def compute_crc(buf: Buffer, header: BatchHeader) -> int:
    """CRC-32C from the attributes to the end of the batch."""
    with memoryview(buf) as view:
        part = view[header.position + CRC_START : header.position + header.size_bytes]
        value: int = crc32c_of(part)
        part.release()
    return value


def check_crc(buf: Buffer, header: BatchHeader) -> None:
    """Raise CorruptBatch if the batch is truncated or its checksum differs."""
    check_whole(buf, header)
    _check_found(header, compute_crc(buf, header))


def check_crc_in_pieces(
    read: Callable[[int, int], Buffer], header: BatchHeader, *, end: int, piece_bytes: int
) -> None:
    """As `check_crc`, for a batch that is not in memory, in a file that ends at `end`: a corrupt
    length may claim all the rest of it. `read(size_bytes, position)` returns bytes of the file.
    """
    if header.end_position > end:
        raise truncated_batch(header, end=end)
    crc = 0
    for at in range(header.position + CRC_START, header.end_position, piece_bytes):
        crc = crc32c_of(read(min(piece_bytes, header.end_position - at), at), crc)
    _check_found(header, crc)


def _check_found(header: BatchHeader, crc: int) -> None:
    if crc != header.crc:
        raise CorruptBatch(
            f"checksum is {crc:08x}, expected {header.crc:08x}",
            position=header.position,
            offset=header.base_offset,
        )


def set_checksum(batch: bytearray) -> None:
    """Compute the checksum of a single batch, and write it in place."""
    _U32.pack_into(batch, CRC_START - 4, crc32c_of(memoryview(batch)[CRC_START:]))


def stamp(buf: Writable, position: int, *, base_offset: int, leader_epoch: int) -> None:
    """Assign offset and epoch, in place: neither is covered by the checksum."""
    length = _OFFSET_LENGTH_EPOCH.unpack_from(buf, position)[1]
    _OFFSET_LENGTH_EPOCH.pack_into(buf, position, base_offset, length, leader_epoch)


def stamp_log_append_time(buf: Writable, header: BatchHeader, *, timestamp: int) -> BatchHeader:
    """Set every record's timestamp, in place, as Kafka does; return the new header.

    Attribute bit 3, the maximum timestamp and the checksum change. The records' own deltas stay.
    """
    attributes = header.attributes | LOG_APPEND_TIME_BIT
    _I16.pack_into(buf, header.position + CRC_START, attributes)
    return set_max_timestamp(buf, header._replace(attributes=attributes), timestamp=timestamp)


def set_producer(
    buf: bytearray,
    *,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    transactional: bool = False,
) -> BatchHeader:
    """Write an idempotent producer's fields and the checksum, in place; return the new header."""
    if transactional:
        (attributes,) = _I16.unpack_from(buf, CRC_START)
        _I16.pack_into(buf, CRC_START, attributes | TRANSACTIONAL_BIT)
    _PRODUCER.pack_into(buf, _PRODUCER_AT, producer_id, producer_epoch, base_sequence)
    header = parse_header(buf)
    return set_max_timestamp(buf, header, timestamp=header.max_timestamp)


def base_timestamp_for(first: int, *, greatest: int) -> int:
    """The base timestamp of a batch: its first record's, as in Kafka's builder.

    It is the greatest instead if their difference does not fit 64 bits (-1 to 2**63 - 1).
    """
    return first if greatest - first < 2**63 else greatest


def set_max_timestamp(buf: Writable, header: BatchHeader, *, timestamp: int) -> BatchHeader:
    """Write the maximum timestamp and the checksum, in place; return the new header."""
    _I64.pack_into(buf, header.position + _MAX_TIMESTAMP_AT, timestamp)
    crc = compute_crc(buf, header)
    _U32.pack_into(buf, header.position + CRC_START - 4, crc)
    base_offset, _, leader_epoch = _OFFSET_LENGTH_EPOCH.unpack_from(buf, header.position)
    return header._replace(
        max_timestamp=timestamp, crc=crc, base_offset=base_offset, leader_epoch=leader_epoch
    )
