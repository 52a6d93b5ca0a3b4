"""Encodes columns of records into record batches, for the JSON and NDJSON produce path.

Rules that keep it honest:

* The output passes `produced.check_produced`, and is byte for byte what Kafka's Java client writes
  for the same records (except for differences between compressors).
* Columns, not record objects: nothing is allocated per record except its own bytes.
* Batches are split by uncompressed size; one that grows too large by compression is halved.

The common case (no keys, no headers, one timestamp) has its own fast path, which encodes a million
records a second in plain Python.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from tierlog.record_format.batch import (
    CONTROL_BIT,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    TRANSACTIONAL_BIT,
    base_timestamp_for,
    set_checksum,
)
from tierlog.record_format.codecs import NONE, compress
from tierlog.record_format.errors import RecordTooLarge
from tierlog.record_format.varint import NULL, SMALL, encoded, size_of

Headers = tuple[tuple[str, bytes | None], ...]

NO_HEADERS: Final[Headers] = ()

# attributes, and four bytes each for the record's, the key's and the value's length
_FIXED_OVERHEAD: Final = 13
_HEADER_OVERHEAD: Final = 10


class _Columns(NamedTuple):
    """Records by column, of equal lengths. None if no record has a key, or headers."""

    values: Sequence[bytes | None]
    timestamps: Sequence[int]
    keys: Sequence[bytes | None] | None
    headers: Sequence[Headers | None] | None


class EncodedRange(NamedTuple):
    """Records `start` (inclusive) to `end` (exclusive) of the columns, as one batch."""

    start: int
    end: int
    batch: bytearray


def encode_batch(
    values: Sequence[bytes | None],
    *,
    timestamps: Sequence[int],
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    codec: int = NONE,
    base_offset: int = 0,
    leader_epoch: int = -1,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
    control: bool = False,
) -> bytearray:
    """One batch with all the records, at least one. All columns have the length of `values`."""
    assert values, "a batch holds at least one record"
    assert len(values) == len(timestamps)
    assert keys is None or len(keys) == len(values)
    assert headers is None or len(headers) == len(values)
    greatest = max(timestamps)
    base = base_timestamp_for(timestamps[0], greatest=greatest)
    columns = _Columns(values, timestamps, keys, headers)
    records = _encode_records(columns, base=base)
    if codec != NONE:
        records = [compress(codec, b"".join(records))]
    batch = bytearray(b"".join((bytes(HEADER_SIZE), *records)))  # faster than bytearray().join
    HEADER.pack_into(
        batch,
        0,
        base_offset,
        len(batch) - LOG_OVERHEAD,
        leader_epoch,
        MAGIC,
        0,
        codec | TRANSACTIONAL_BIT * transactional | CONTROL_BIT * control,
        len(values) - 1,
        base,
        greatest,
        producer_id,
        producer_epoch,
        base_sequence,
        len(values),
    )
    set_checksum(batch)
    return batch


def encode_batches(
    values: Sequence[bytes | None],
    *,
    timestamps: Sequence[int],
    max_bytes: int,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    codec: int = NONE,
) -> list[EncodedRange]:
    """The records in order, split into batches of at most `max_bytes`.

    Raises RecordTooLarge for a record that does not fit a batch of its own.
    """
    encoded_ranges: list[EncodedRange] = []
    columns = _Columns(values, timestamps, keys, headers)
    pending = [*_split(columns, max_bytes=max_bytes)][::-1]
    while pending:
        start, end = pending.pop()
        batch = encode_batch(
            values[start:end],
            timestamps=timestamps[start:end],
            keys=None if keys is None else keys[start:end],
            headers=None if headers is None else headers[start:end],
            codec=codec,
        )
        if len(batch) <= max_bytes:
            encoded_ranges.append(EncodedRange(start, end, batch))
        elif end - start == 1:
            raise _too_large(start, limit_bytes=max_bytes, size_bytes=len(batch))
        else:
            middle = (start + end) // 2
            pending += ((middle, end), (start, middle))
    return encoded_ranges


def record_size(
    value: bytes | None, key: bytes | None = None, headers: Headers | None = None
) -> int:
    """The encoded size of a record that is alone in its batch, without the batch header."""
    body = 4 + _bytes_size(key) + _bytes_size(value)
    if headers:
        body += size_of(len(headers)) - 1
        for name, content in headers:
            body += _bytes_size(name.encode()) + _bytes_size(content)
    return size_of(body) + body


def _bytes_size(content: bytes | None) -> int:
    return 1 if content is None else size_of(len(content)) + len(content)


def _split(columns: _Columns, *, max_bytes: int) -> Iterator[tuple[int, int]]:
    """Ranges that fit `max_bytes` uncompressed, by an upper bound of each record's size.

    A range of a single record may exceed the bound. Raises RecordTooLarge.
    """
    values, timestamps, keys, headers = columns
    room = max_bytes - HEADER_SIZE
    spread = max(timestamps) - min(timestamps)
    overhead = _FIXED_OVERHEAD + size_of(spread) + size_of(len(values)) + 1
    sizes = [overhead + len(value or b"") for value in values]
    if keys is not None:
        sizes = [size + len(key or b"") for size, key in zip(sizes, keys, strict=True)]
    if headers is not None:
        sizes = [size + _headers_bound(h) for size, h in zip(sizes, headers, strict=True)]
    start = total = 0
    for index, size in enumerate(sizes):
        total += size
        if total > room:
            if index > start:
                yield start, index
            start, total = index, size
            if size > room:
                _check_alone(columns, index, max_bytes=max_bytes)
    yield start, len(values)


def _headers_bound(headers: Headers | None) -> int:
    """An upper bound of their size: a character takes at most four bytes in UTF-8."""
    return 4 + sum(
        _HEADER_OVERHEAD + 4 * len(name) + len(content or b"") for name, content in headers or ()
    )


def _check_alone(columns: _Columns, index: int, *, max_bytes: int) -> None:
    """Raise RecordTooLarge if the record's exact size, not just its bound, exceeds the limit."""
    values, _, keys, headers = columns
    size = HEADER_SIZE + record_size(
        values[index], keys[index] if keys else None, headers[index] if headers else None
    )
    if size > max_bytes:
        raise _too_large(index, limit_bytes=max_bytes, size_bytes=size)


def _too_large(index: int, *, limit_bytes: int, size_bytes: int) -> RecordTooLarge:
    return RecordTooLarge(
        f"record {index} makes a batch of {size_bytes} bytes; max.message.bytes is {limit_bytes}",
        limit_bytes=limit_bytes,
        size_bytes=size_bytes,
        row=index,
    )


def _encode_records(columns: _Columns, *, base: int) -> list[bytes]:
    """In parts: they are joined once, with the header."""
    values, timestamps, keys, headers = columns
    simple = keys is None and headers is None and len(values) < len(SMALL) and None not in values
    if simple and timestamps.count(timestamps[0]) == len(timestamps):
        return _encode_values([value or b"" for value in values])
    return _encode_any(columns, base=base)


def _encode_values(values: Sequence[bytes]) -> list[bytes]:
    """Records with only a value: length, 0 0, offset delta, null key, value length, value, 0.

    The last byte of a record (no headers) is written together with the start of the next one.
    """
    lengths: dict[int, tuple[bytes, bytes]] = {}
    parts: list[bytes] = []
    add = parts.append
    for delta, value in enumerate(values):
        size = len(value)
        offset = SMALL[delta]
        shape = size << 2 | len(offset)
        pair = lengths.get(shape)
        if pair is None:
            value_length = encoded(size)
            body = 4 + len(offset) + len(value_length) + size
            pair = lengths[shape] = (b"\0" + encoded(body) + b"\0\0", NULL + value_length)
        add(pair[0])
        add(offset)
        add(pair[1])
        add(value)
    add(b"\0")
    parts[0] = parts[0][1:]
    return parts


def _encode_any(columns: _Columns, *, base: int) -> list[bytes]:
    values, timestamps, keys, headers = columns
    parts: list[bytes] = []
    deltas: dict[int, bytes] = {base: b"\0\0"}
    none = (None,) * len(values)
    rows = zip(values, timestamps, keys or none, headers or none, strict=True)
    for delta, (value, timestamp, key, record_headers) in enumerate(rows):
        start = deltas.get(timestamp)
        if start is None:
            start = deltas[timestamp] = b"\0" + encoded(timestamp - base)
        fields = (
            start,
            encoded(delta),
            NULL if key is None else encoded(len(key)),
            key or b"",
            NULL if value is None else encoded(len(value)),
            value or b"",
            _encode_headers(record_headers) if record_headers else b"\0",
        )
        size = sum(map(len, fields))
        parts.append(encoded(size))
        parts += fields
    return parts


def _encode_headers(headers: Headers) -> bytes:
    parts = [encoded(len(headers))]
    for name, content in headers:
        key = name.encode()
        parts += (encoded(len(key)), key)
        parts += (NULL,) if content is None else (encoded(len(content)), content)
    return b"".join(parts)
