"""The gate: what a client sent as record batches, checked whole before any of it is appended.

Rules that keep it honest:

* After `check_produced`, every batch is one that Kafka's own broker would accept, and the log may
  append it without looking inside: lengths, checksum, codec, count, offset deltas 0, 1, 2, ...,
  timestamps, headers.
* The bytes stay as they were sent. The one exception is Kafka's: a maximum timestamp that is not
  the records' own is put right, for the time index stands on it.
* Each batch's least timestamp is found on the way: no later step has to open a batch for it.
* What compressed records expand to is bounded for the whole request.

The checks are those of Kafka's LogValidator and UnifiedLog.analyzeAndValidateRecords.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple, Protocol

from record_format import codecs
from record_format.batch import (
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
    iter_headers,
    parse_header,
    set_max_timestamp,
    set_producer,
)
from record_format.decode import expand
from record_format.encode import EncodedRange, Headers, encode_batches
from record_format.errors import (
    CorruptBatch,
    FieldProblem,
    InvalidBatch,
    InvalidRecord,
    RecordTooLarge,
    RequestTooLarge,
)
from record_format.record_walk import Walk, WalkRequest
from record_format.walker import walk

_I64_MAX: Final = 2**63 - 1


@dataclass(slots=True)
class ProducedBatches:
    """Whole, checked batches that lie behind one another in `body`; one entry a batch in each list.

    `min_timestamps[i]` is the least timestamp of batch i's records. It does not hold once the log
    stamps its own time on the batch.
    """

    body: bytearray
    headers: list[BatchHeader]
    min_timestamps: list[int | None]

    @property
    def record_count(self) -> int:
        return sum(header.record_count for header in self.headers)


class TimeLimits(Protocol):
    """Now, and how far from it a record's time may be; all in ms."""

    @property
    def now_ms(self) -> int: ...
    @property
    def before_max_ms(self) -> int: ...
    @property
    def after_max_ms(self) -> int: ...


class ProduceLimits(NamedTuple):
    """What a topic and the front door allow. Times in ms, sizes in bytes."""

    max_message_bytes: int
    now_ms: int
    timestamp_type: int = CREATE_TIME
    before_max_ms: int = _I64_MAX
    after_max_ms: int = _I64_MAX
    max_expanded_bytes: int = codecs.MAX_EXPANDED_BYTES
    max_records: int = 2**31 - 1
    allow_transactional: bool = False
    allow_control: bool = False


def check_produced(
    body: bytearray,
    *,
    max_message_bytes: int,
    now_ms: int,
    timestamp_type: int = CREATE_TIME,
    before_max_ms: int = _I64_MAX,
    after_max_ms: int = _I64_MAX,
    max_expanded_bytes: int = codecs.MAX_EXPANDED_BYTES,
    max_records: int = 2**31 - 1,
    allow_transactional: bool = False,
    allow_control: bool = False,
) -> ProducedBatches:
    """Check every batch of a produce request.

    Raises InvalidBatch (bytes that are no valid batch, with its position), InvalidRecord (a batch
    that may not be appended), RecordTooLarge (a batch above `max_message_bytes`), RequestTooLarge
    (too many records, or too large once expanded). `body` may be changed only where it is accepted.
    """
    limits = ProduceLimits(
        max_message_bytes=max_message_bytes,
        now_ms=now_ms,
        timestamp_type=timestamp_type,
        before_max_ms=before_max_ms,
        after_max_ms=after_max_ms,
        max_expanded_bytes=max_expanded_bytes,
        max_records=max_records,
        allow_transactional=allow_transactional,
        allow_control=allow_control,
    )
    headers = _check_headers(body, limits)
    walks = _walk_all(body, headers, limits)
    # Only now, that all are accepted, may the body change.
    for index, (header, found) in enumerate(zip(headers, walks, strict=True)):
        if header.max_timestamp != found.max_timestamp:
            headers[index] = set_max_timestamp(body, header, timestamp=found.max_timestamp)
    return ProducedBatches(body, headers, [found.min_timestamp for found in walks])


def _check_headers(body: bytearray, limits: ProduceLimits) -> list[BatchHeader]:
    """Cut the body into batches, to its last byte, and check all but the records."""
    headers: list[BatchHeader] = []
    position = records = 0
    while position < len(body):
        try:
            header = parse_header(body, position)
            _check_size(body, header, limits)
            check_crc(body, header)
        except CorruptBatch as error:
            raise InvalidBatch(error.detail, position=position) from error
        _check_shape(header)
        _check_attributes(header, len(headers), limits)
        headers.append(header)
        position += header.size_bytes
        records += header.record_count
        if records > limits.max_records:
            raise RequestTooLarge(
                f"more than {limits.max_records} records in one request",
                limit_bytes=limits.max_records,
                size_bytes=records,
            )
    if not headers:
        raise InvalidRecord("the request holds no record")
    return headers


def _check_size(body: bytearray, header: BatchHeader, limits: ProduceLimits) -> None:
    left = len(body) - header.position
    if header.size_bytes > left:
        raise CorruptBatch(f"the batch takes {header.size_bytes} bytes, {left} are there")
    if header.size_bytes > limits.max_message_bytes:
        raise _too_large(header, limits.max_message_bytes)


def _too_large(header: BatchHeader, max_message_bytes: int) -> RecordTooLarge:
    return RecordTooLarge(
        f"the batch at position {header.position} has {header.size_bytes} bytes; "
        f"max.message.bytes is {max_message_bytes}",
        limit_bytes=max_message_bytes,
        size_bytes=header.size_bytes,
    )


def _check_shape(header: BatchHeader) -> None:
    problem = ""
    if header.codec not in codecs.CODEC_NAMES:
        problem = f"codec {header.codec} is not known"
    elif header.record_count != header.last_offset_delta + 1 or not header.record_count:
        problem = f"{header.record_count} records, last offset delta {header.last_offset_delta}"
    elif header.producer_id != NO_PRODUCER_ID and not _sequence_is_sound(header):
        problem = (
            f"producer id {header.producer_id}, epoch {header.producer_epoch} and sequence "
            f"{header.base_sequence} do not go together"
        )
    if problem:
        raise InvalidBatch(problem, position=header.position)


def _sequence_is_sound(header: BatchHeader) -> bool:
    if header.producer_id < 0 or header.producer_epoch < 0:
        return False
    return header.is_control or 0 <= header.base_sequence <= MAX_SEQUENCE


def _check_attributes(header: BatchHeader, index: int, limits: ProduceLimits) -> None:
    problem = ""
    if header.is_control and not limits.allow_control:
        problem = "control batches are the broker's own"
    elif header.is_transactional and not limits.allow_transactional:
        problem = "transactional batches are not taken"
    elif header.has_delete_horizon:
        problem = "a delete horizon is set by the broker's own compaction only"
    elif header.timestamp_type != CREATE_TIME:
        problem = "a producer may not set the timestamp type LogAppendTime"
    if problem:
        raise _invalid(index, header, problem)


def _invalid(index: int, header: BatchHeader, problem: str) -> InvalidRecord:
    return InvalidRecord(
        f"batch {index}, at position {header.position}: {problem}",
        problems=(FieldProblem(f"batches[{index}]", problem),),
    )


def _walk_all(body: bytearray, headers: Sequence[BatchHeader], limits: ProduceLimits) -> list[Walk]:
    left = limits.max_expanded_bytes
    walks: list[Walk] = []
    with memoryview(body) as view:
        for index, header in enumerate(headers):
            with view[header.body_position : header.end_position] as part:
                records = _expand(part, header, left, limits)
                left -= len(records) if header.codec else 0
                found = _walk_one(records, header)
                problem = _time_problem(records, header, found, limits)
            if problem:
                raise _invalid(index, header, problem)
            walks.append(found)
    return walks


def _expand(part: memoryview, header: BatchHeader, left: int, limits: ProduceLimits) -> Buffer:
    try:
        return codecs.decompress(header.codec, part, max_bytes=left)
    except codecs.ExpandsTooFar as error:
        limit = limits.max_expanded_bytes
        raise RequestTooLarge(
            f"the request's batches expand to more than {limit} bytes",
            limit_bytes=limit,
            size_bytes=limit + 1,
        ) from error
    except CorruptBatch as error:
        raise InvalidBatch(error.detail, position=header.position) from error


def _walk_one(records: Buffer, header: BatchHeader) -> Walk:
    if header.record_count * MIN_RECORD_SIZE > len(records):
        raise InvalidBatch(
            f"{header.record_count} records cannot fit in {len(records)} bytes",
            position=header.position,
        )
    found = walk(records, _request(header))
    if found.problem:
        raise InvalidBatch(found.describe(), position=header.position)
    return found


def _request(header: BatchHeader, *, with_columns: bool = False) -> WalkRequest:
    return WalkRequest(
        record_count=header.record_count,
        base_timestamp=header.base_timestamp,
        last_offset_delta=header.last_offset_delta,
        dense=True,
        with_columns=with_columns,
    )


def _time_problem(records: Buffer, header: BatchHeader, found: Walk, limits: ProduceLimits) -> str:
    """What Kafka's rule has against the batch's timestamps. -1 (none) is always allowed."""
    low, high = found.min_timestamp, found.max_timestamp
    if low < NO_TIMESTAMP:
        return f"the timestamp {low} is negative"
    if limits.timestamp_type != CREATE_TIME:
        return ""
    if low == NO_TIMESTAMP < high:  # a real one that is too old may hide behind it
        fields = walk(records, _request(header, with_columns=True)).fields
        assert fields is not None
        low = min(timestamp for timestamp in fields.timestamps if timestamp != NO_TIMESTAMP)
    return timestamp_problem(high, limits) or timestamp_problem(low, limits)


def timestamp_problem(timestamp: int, limits: TimeLimits) -> str:
    """What `message.timestamp.before.max.ms` and `.after.max.ms` say against it; "" if nothing.

    Allowed are -1 (none) and now - before.max <= timestamp <= now + after.max. Under LogAppendTime
    the caller does not ask.
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


def recompress(produced: ProducedBatches, codec: int) -> ProducedBatches:
    """The same batches with their records under `codec` (a topic's `compression.type`).

    Gives `produced` itself where all have it already. The caller checks sizes again: a batch may
    grow.
    """
    if all(header.codec == codec for header in produced.headers):
        return produced
    body = bytearray()
    headers = [_recompress_one(produced.body, header, codec, body) for header in produced.headers]
    return ProducedBatches(body, headers, produced.min_timestamps)


def _recompress_one(
    source: bytearray, header: BatchHeader, codec: int, target: bytearray
) -> BatchHeader:
    """Append the batch to `target` under `codec`; gives its header there."""
    position = len(target)
    if header.codec == codec:
        target += source[header.position : header.end_position]
        return header._replace(position=position)
    records = codecs.compress(codec, expand(source, header))
    changed = header._replace(
        size_bytes=HEADER_SIZE + len(records), attributes=header.attributes & ~CODEC_MASK | codec
    )
    target += changed.pack()
    target += records
    return set_max_timestamp(target, parse_header(target, position), timestamp=header.max_timestamp)


def check_sizes(produced: ProducedBatches, *, max_message_bytes: int) -> None:
    """Raise RecordTooLarge where a batch is above the limit: for after `recompress`."""
    for header in produced.headers:
        if header.size_bytes > max_message_bytes:
            raise _too_large(header, max_message_bytes)


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
) -> ProducedBatches:
    """The JSON path's counterpart of `check_produced`: columns in, batches cut at the limit out.

    Raises RecordTooLarge for a record that does not fit a batch, and RequestTooLarge where an
    idempotent producer's records do not fit one: they share one sequence number. Timestamps are the
    caller's to check, record by record (`timestamp_problem`).
    """
    ranges = encode_batches(
        values,
        timestamps=timestamps,
        keys=keys,
        headers=headers,
        codec=codec,
        max_bytes=max_message_bytes,
    )
    if producer_id != NO_PRODUCER_ID:
        _check_single(ranges, max_message_bytes)
        set_producer(
            ranges[0].batch,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=base_sequence,
        )
    body = bytearray().join(item.batch for item in ranges)
    return ProducedBatches(
        body,
        list(iter_headers(body)),
        [min(timestamps[item.start : item.end]) for item in ranges],
    )


def _check_single(ranges: Sequence[EncodedRange], max_message_bytes: int) -> None:
    if len(ranges) > 1:
        raise RequestTooLarge(
            "an idempotent producer's request must fit one batch; "
            f"max.message.bytes is {max_message_bytes}",
            limit_bytes=max_message_bytes,
            size_bytes=sum(len(item.batch) for item in ranges),
        )
