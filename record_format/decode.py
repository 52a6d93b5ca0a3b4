"""Decodes record batches, for HTTP, compaction and recovery, and summarizes consecutive ones.

Rules that keep it honest:

* Every length is checked against its enclosing record, every record against the batch's body, and
  the records must fill the body exactly.
* The decompressed size is bounded by `max_bytes`.
* The caller has verified the checksum (`batch.check_crc`), once, where the bytes arrived.
* A summary has two implementations, the plain one here and the compiled one in `record_kernel`. For
  every input both return the same `BatchSummary` or raise the same error; a test feeds them the
  same bytes. Which one is in use is set once per process, by `native.load`.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Final, NamedTuple

from tierlog.record_format.batch import (
    LOG_APPEND_TIME_BIT,
    MIN_RECORD_SIZE,
    BatchHeader,
    Buffer,
    check_crc,
    check_whole,
    iter_headers,
)
from tierlog.record_format.codecs import MAX_EXPANDED_BYTES, DecompressedTooLarge, decompress
from tierlog.record_format.encode import NO_HEADERS, Headers
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.record_walk import I64_MAX, Walk, WalkRequest, walk
from tierlog.record_format.varint import read_varint


class Record(NamedTuple):
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


class BatchSummary(NamedTuple):
    """Consecutive batches. Timestamps are None if there are no records; `min_timestamp` also if
    the records of some batch cannot be read.
    """

    size_bytes: int
    first_offset: int
    next_offset: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int | None
    has_gap: bool
    """Offsets are missing between, inside, or before the batches."""
    has_transactions: bool


Summarize = Callable[[Buffer, int], BatchSummary | None]


def summarize_plain(body: Buffer, next_offset: int) -> BatchSummary | None:
    """`summarize_batches` in plain Python."""
    headers = list(iter_headers(body))
    if not headers:
        return None
    has_gap = False
    for header in headers:
        check_crc(body, header)
        if header.base_offset < next_offset:
            raise corrupt_batch(f"begins below offset {next_offset}", header)
        has_gap |= header.base_offset > next_offset
        has_gap |= header.record_count != header.last_offset_delta + 1
        next_offset = header.next_offset
    # Compaction keeps a producer's last batch even without records, for its sequence number.
    filled = [header for header in headers if header.record_count]
    return BatchSummary(
        size_bytes=headers[-1].end_position,
        first_offset=headers[0].base_offset,
        next_offset=next_offset,
        record_count=sum(header.record_count for header in filled),
        min_timestamp=min_timestamp_of_batches(body, filled),
        max_timestamp=max((header.max_timestamp for header in filled), default=None),
        has_gap=has_gap,
        has_transactions=any(one.is_transactional or one.is_control for one in headers),
    )


def min_timestamp_of_batches(body: Buffer, headers: list[BatchHeader]) -> int | None:
    """The minimum over all records; None if there are none, or if some batch cannot be read."""
    try:
        found = [min_timestamp_of(body, header) for header in headers]
    except CorruptBatch:
        return None
    return min((one for one in found if one is not None), default=None)


_summarize_in_use: Final[list[Summarize]] = [summarize_plain]


def use_summary(summarize: Summarize) -> None:
    _summarize_in_use[0] = summarize


def summarize_batches(body: Buffer, *, next_offset: int) -> BatchSummary | None:
    """Summarize the whole batches at the start of `body`, checking every CRC and offset; None if
    there are none.

    `next_offset`: where the preceding batches end. A batch truncated by the end of `body` is
    ignored. Raises CorruptBatch with a position in `body`.
    """
    return _summarize_in_use[0](body, next_offset)
