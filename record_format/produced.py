"""Validates the record batches of a produce request, all of them before any is appended.

Rules that keep it honest:

* After `check_produced`, every batch is one that Kafka's own broker would accept, and the log can
  append it without reading its records: lengths, checksum, codec, count, offset deltas 0, 1, 2,
  ..., timestamps and headers were checked.
* Batches are checked in this order: length, size limit, checksum, header fields, decompression,
  records. Each check relies on those before it.
* The bytes stay as they were sent. There is one exception, which is also Kafka's: a maximum
  timestamp that is not the records' maximum is corrected, because the time index relies on it.
* The minimum timestamp of each batch is computed on the way, so that no later step has to
  decompress a batch for it.
* The decompressed size is bounded for the whole request.

The checks are those of Kafka's LogValidator and UnifiedLog.analyzeAndValidateRecords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    CODEC_MASK,
    CREATE_TIME,
    HEADER_SIZE,
    MAX_SEQUENCE,
    MIN_RECORD_SIZE,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    NO_TIMESTAMP,
    BatchHeader,
    Buffer,
    check_crc,
    check_whole,
    iter_headers,
    parse_header,
    set_max_timestamp,
)
from tierlog.record_format.decode import EndMarker, encode_marker, expand
from tierlog.record_format.encode import Headers, encode_batch, encode_batches
from tierlog.record_format.errors import (
    CorruptBatch,
    DamagedBatch,
    FieldProblem,
    InvalidBatch,
    InvalidRecord,
    InvalidTimestamp,
    RecordTooLarge,
    RequestTooLarge,
    SchemaMismatch,
    TooManyRecords,
)
from tierlog.record_format.record_walk import (
    I64_MAX,
    NO_HEAD,
    NO_VALUE,
    Walk,
    WalkRequest,
    walk,
)


@dataclass(slots=True)
class ProducedBatches:
    """Validated batches, contiguous in `body`. Each list has one entry per batch.

    `min_timestamps[i]` is the minimum over batch i's records, unless the log then sets its own time
    (LogAppendTime).
    """

    body: bytearray | memoryview
    headers: list[BatchHeader]
    min_timestamps: list[int | None]

    @property
    def record_count(self) -> int:
        return sum(header.record_count for header in self.headers)


def check_produced(body: bytearray | memoryview, limits: ProduceLimits) -> ProducedBatches:
    """Check every batch of a produce request.

    Raises InvalidBatch (bytes that are not a valid batch, with the position), InvalidRecord (a
    batch that may not be appended), RecordTooLarge (a batch above `max_message_bytes`) and
    RequestTooLarge (too many records, or too large when decompressed). `body` is writable, and
    modified only if all of it is valid.
    """
    headers = check_headers(body, limits)
    walks = walk_all(body, headers, limits)
    # Every batch is valid: from here on the body may be modified.
    for index, found in enumerate(walks):
        if headers[index].max_timestamp != found.max_timestamp:
            headers[index] = set_max_timestamp(body, headers[index], timestamp=found.max_timestamp)
    return ProducedBatches(body, headers, [found.min_timestamp for found in walks])


def recompress(produced: ProducedBatches, codec: int) -> ProducedBatches:
    """The same batches compressed with `codec` (a topic's `compression.type`).

    Returns `produced` itself if all batches have that codec. The caller checks the sizes again,
    since a batch may grow.
    """
    if all(header.codec == codec for header in produced.headers):
        return produced
    body = bytearray()
    headers = [_recompress_one(produced.body, header, codec, body) for header in produced.headers]
    return ProducedBatches(body, headers, produced.min_timestamps)


def _recompress_one(
    source: Buffer, header: BatchHeader, codec: int, target: bytearray
) -> BatchHeader:
    """Append the batch to `target`, compressed with `codec`; return its new header."""
    position = len(target)
    if header.codec == codec:
        target += source[header.position : header.end_position]
        return header.at(position)
    records = codecs.compress(codec, expand(source, header))
    changed = header._replace(
        size_bytes=HEADER_SIZE + len(records), attributes=header.attributes & ~CODEC_MASK | codec
    )
    target += changed.pack()
    target += records
    return set_max_timestamp(target, parse_header(target, position), timestamp=header.max_timestamp)


def check_sizes(produced: ProducedBatches, *, max_message_bytes: int) -> None:
    """Raise RecordTooLarge if a batch is above the limit. Call after `recompress`."""
    for header in produced.headers:
        if header.size_bytes > max_message_bytes:
            raise too_large(header, max_message_bytes)


def build_produced(
    values: Sequence[bytes | None],
    *,
    timestamps: Sequence[int],
    max_message_bytes: int,
    keys: Sequence[bytes | None] | None = None,
    headers: Sequence[Headers | None] | None = None,
    codec: int = codecs.NONE,
    producer_id: int = NO_PRODUCER_ID,
    producer_epoch: int = -1,
    base_sequence: int = NO_SEQUENCE,
    transactional: bool = False,
) -> ProducedBatches:
    """Encode columns into batches within the limit: the JSON counterpart of `check_produced`.

    Raises RecordTooLarge for a record that does not fit a batch, and RequestTooLarge if an
    idempotent producer's records do not fit in a single batch: they share one base sequence.
    The caller checks keys (`KEY_REQUIRED`) and timestamps (`timestamp_problem`) of each record.
    """
    if producer_id != NO_PRODUCER_ID:
        body = encode_batch(
            values,
            timestamps=timestamps,
            keys=keys,
            headers=headers,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
            transactional=transactional,
        )
        if len(body) <= max_message_bytes:
            return ProducedBatches(body, [parse_header(body)], [min(timestamps)])
    ranges = encode_batches(
        values,
        timestamps=timestamps,
        keys=keys,
        headers=headers,
        codec=codec,
        max_bytes=max_message_bytes,
    )
    if producer_id != NO_PRODUCER_ID:
        raise _not_one_batch(len(body), max_message_bytes)  # each record fits one of its own
    body = ranges[0].batch if len(ranges) == 1 else bytearray().join(r.batch for r in ranges)
    return ProducedBatches(
        body,
        list(iter_headers(body)),
        [min(timestamps[item.start : item.end]) for item in ranges],
    )


def build_marker(
    marker: EndMarker, *, producer_id: int, producer_epoch: int, timestamp: int
) -> ProducedBatches:
    """The control batch that ends a producer's transaction."""
    key, value = encode_marker(marker)
    body = encode_batch(
        [value],
        keys=[key],
        timestamps=[timestamp],
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        transactional=True,
        control=True,
    )
    return ProducedBatches(body, [parse_header(body)], [timestamp])


def _not_one_batch(size_bytes: int, max_message_bytes: int) -> RequestTooLarge:
    return RequestTooLarge(
        f"an idempotent producer's request must fit one batch; it makes one of {size_bytes} bytes, "
        f"and max.message.bytes is {max_message_bytes}",
        limit_bytes=max_message_bytes,
        size_bytes=size_bytes,
    )


_NAMED_MAX: Final = 100  # of the records that are refused: their batch is, as a whole
KEY_REQUIRED: Final = "a compacted topic requires a key in every record"


class RefusedValues(NamedTuple):
    """What is wrong with the first of these records."""

    problem: str
    records: tuple[int, ...]


class CheckValues(Protocol):
    """Checks the values of a batch against their schemas."""

    def knows(self, head: int) -> bool:
        """Whether values with this head (`record_walk.HEAD_BYTES`) need no further check."""

    def __call__(
        self, data: bytes, starts: Sequence[int], ends: Sequence[int]
    ) -> RefusedValues | None:
        """Of the values that begin and end there; a start of -1 is null."""


class ProduceLimits(NamedTuple):
    """Limits of the topic and the HTTP server. A timestamp may be `before_max_ms` before `now_ms`,
    and `after_max_ms` after it. `require_keys` is set for compacted topics, `check_values` for
    those whose values have schemas.
    """

    max_message_bytes: int
    now_ms: int
    timestamp_type: int = CREATE_TIME
    before_max_ms: int = I64_MAX
    after_max_ms: int = I64_MAX
    max_expanded_bytes: int = codecs.MAX_EXPANDED_BYTES  # of the request
    max_expanded_batch_bytes: int = I64_MAX
    max_records: int = 2**31 - 1
    require_keys: bool = False
    allow_transactions: bool = False
    check_values: CheckValues | None = None


def check_headers(body: Buffer, limits: ProduceLimits) -> list[BatchHeader]:
    """Split the whole body into batches and check everything except their records.

    Raises InvalidBatch, InvalidRecord, RecordTooLarge, TooManyRecords.
    """
    headers: list[BatchHeader] = []
    position = records = 0
    while position < len(body):
        try:
            header = parse_header(body, position)
            if header.size_bytes > limits.max_message_bytes:
                check_whole(body, header)  # a truncated batch is reported as such
                raise too_large(header, limits.max_message_bytes)
            check_whole(body, header)
        except CorruptBatch as error:
            raise InvalidBatch(error.detail, position=position) from error
        try:
            check_crc(body, header)
        except CorruptBatch as error:
            raise DamagedBatch(error.detail, position=position) from error
        _check_shape(header)
        if header.attributes & ~CODEC_MASK:
            _check_attributes(header, len(headers), limits)
        headers.append(header)
        position += header.size_bytes
        records += header.record_count
        if records > limits.max_records:
            raise TooManyRecords(limit_records=limits.max_records, records=records)
    if not headers:
        raise InvalidRecord("the request has no records")
    return headers


def too_large(header: BatchHeader, max_message_bytes: int) -> RecordTooLarge:
    return RecordTooLarge(
        f"the batch at position {header.position} has {header.size_bytes} bytes; "
        f"max.message.bytes is {max_message_bytes}",
        limit_bytes=max_message_bytes,
        size_bytes=header.size_bytes,
    )


def _check_shape(header: BatchHeader) -> None:
    problem = ""
    if header.codec not in codecs.CODEC_NAMES:
        problem = f"unknown codec {header.codec}"
    elif header.record_count != header.last_offset_delta + 1:
        problem = (
            f"{header.record_count} records do not match last offset delta "
            f"{header.last_offset_delta}"
        )
    elif header.producer_id != NO_PRODUCER_ID and not _sequence_is_valid(header):
        problem = (
            f"producer id {header.producer_id}, epoch {header.producer_epoch} and base sequence "
            f"{header.base_sequence} are inconsistent"
        )
    if problem:
        raise InvalidBatch(problem, position=header.position)


def _sequence_is_valid(header: BatchHeader) -> bool:
    if header.producer_id < 0 or header.producer_epoch < 0:
        return False
    return header.is_control or 0 <= header.base_sequence <= MAX_SEQUENCE


def _check_attributes(header: BatchHeader, index: int, limits: ProduceLimits) -> None:
    problem = ""
    if header.is_control:
        problem = "a producer may not send control batches"
    elif header.is_transactional and not limits.allow_transactions:
        problem = "a batch of a transaction belongs to a producer with a transactional id"
    elif header.is_transactional and header.producer_id < 0:
        problem = "a batch of a transaction needs a producer id"
    elif header.has_delete_horizon:
        problem = "a producer may not set a delete horizon"
    elif header.timestamp_type != CREATE_TIME:
        problem = "a producer may not set the timestamp type LogAppendTime"
    if problem:
        raise _invalid(index, header, _Refused(problem))


class _Refused(NamedTuple):
    """What is wrong with a batch, and with which of its records."""

    problem: str
    records: tuple[int, ...] = ()
    kind: type[InvalidRecord] = InvalidRecord


def _invalid(index: int, header: BatchHeader, refused: _Refused) -> InvalidRecord:
    problem, records, kind = refused
    return kind(
        f"batch {index}, at position {header.position}: {problem}",
        problems=(FieldProblem(f"batches[{index}]", problem),),
        records=records,
    )


def walk_all(body: Buffer, headers: Sequence[BatchHeader], limits: ProduceLimits) -> list[Walk]:
    left = limits.max_expanded_bytes
    walks: list[Walk] = []
    with memoryview(body) as view:
        for index, header in enumerate(headers):
            with view[header.body_position : header.end_position] as part:
                records: Buffer = part
                if header.codec:
                    records = _expand(part, header, left, limits)
                    left -= len(records)
                found = _walk_one(records, header, with_head=limits.check_values is not None)
                refused = _refused_times(records, header, found, limits)
                if limits.require_keys and refused is None:
                    refused = _refused_keys(records, header)
                if limits.check_values is not None and refused is None:
                    refused = _refused_values(records, header, found.head, limits.check_values)
            if refused is not None:
                raise _invalid(index, header, refused)
            walks.append(found)
    return walks


def _expand(part: memoryview, header: BatchHeader, left: int, limits: ProduceLimits) -> Buffer:
    """Decompress a batch, within the limits of the request, the batch, and its readers."""
    most = min(limits.max_expanded_batch_bytes, codecs.MAX_EXPANDED_BYTES)
    try:
        return codecs.decompress(header.codec, part, max_bytes=min(left, most))
    except codecs.DecompressedTooLarge as error:
        limit, what = limits.max_expanded_bytes, "the request's batches decompress"
        if left > most:
            limit, what = most, "a batch decompresses"
        raise RequestTooLarge(
            f"{what} to more than {limit} bytes",
            limit_bytes=limit,
            size_bytes=limit + 1,
        ) from error
    except CorruptBatch as error:
        raise InvalidBatch(error.detail, position=header.position) from error


def _walk_one(
    records: Buffer, header: BatchHeader, *, with_columns: bool = False, with_head: bool = False
) -> Walk:
    count = header.record_count
    if count * MIN_RECORD_SIZE > len(records):
        raise InvalidBatch(
            f"{count} records cannot fit in {len(records)} bytes", position=header.position
        )
    found = walk(
        records,
        WalkRequest(
            count,
            header.base_timestamp,
            header.last_offset_delta,
            True,
            with_columns,
            with_head=with_head,
        ),
    )
    if found.problem:
        raise InvalidBatch(found.describe(), position=header.position)
    return found


def _refused_times(
    records: Buffer, header: BatchHeader, found: Walk, limits: ProduceLimits
) -> _Refused | None:
    """What is wrong with the batch's timestamps by Kafka's rules. -1 (none) is allowed."""
    low, high = found.min_timestamp, found.max_timestamp
    if low < NO_TIMESTAMP:
        return _Refused(f"the timestamp {low} is negative")
    if limits.timestamp_type != CREATE_TIME:
        return None
    # A -1 may hide an actual minimum that is too old.
    hides_low = low == NO_TIMESTAMP < high
    if not (hides_low or timestamp_problem(high, limits) or timestamp_problem(low, limits)):
        return None
    timestamps = _walk_one(records, header, with_columns=True).fields.timestamps
    refused = [i for i, timestamp in enumerate(timestamps) if timestamp_problem(timestamp, limits)]
    if not refused:
        return None
    problem = timestamp_problem(timestamps[refused[0]], limits)
    return _Refused(problem, tuple(refused[:_NAMED_MAX]), InvalidTimestamp)


def _refused_keys(records: Buffer, header: BatchHeader) -> _Refused | None:
    starts = _walk_one(records, header, with_columns=True).fields.key_starts
    refused = [index for index, start in enumerate(starts) if start == -1]
    return _Refused(KEY_REQUIRED, tuple(refused[:_NAMED_MAX])) if refused else None


def _refused_values(
    records: Buffer, header: BatchHeader, head: int, check: CheckValues
) -> _Refused | None:
    if head == NO_VALUE or (head != NO_HEAD and check.knows(head)):
        return None
    fields = _walk_one(records, header, with_columns=True).fields
    found = check(bytes(records), fields.value_starts, fields.value_ends)
    return None if found is None else _Refused(*found, SchemaMismatch)


def timestamp_problem(timestamp: int, limits: ProduceLimits) -> str:
    """How `timestamp` violates `message.timestamp.before.max.ms` or `.after.max.ms`, or "".

    Allowed are -1 (none) and now - before.max <= timestamp <= now + after.max. Not to be called
    under LogAppendTime.
    """
    if timestamp == NO_TIMESTAMP:
        return ""
    age = limits.now_ms - timestamp
    if age > limits.before_max_ms:
        return (
            f"the timestamp {timestamp} is {age} ms before now; "
            f"message.timestamp.before.max.ms is {limits.before_max_ms}"
        )
    if -age > limits.after_max_ms:
        return (
            f"the timestamp {timestamp} is {-age} ms after now; "
            f"message.timestamp.after.max.ms is {limits.after_max_ms}"
        )
    return ""
