"""Builds or checks the batches to append, by the topic's configuration.

Pure: the time is a parameter. Under LogAppendTime records may have any timestamp; otherwise the
limits of `message.timestamp.*` apply to each record.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from tierlog.api.http.produce.columns import RecordColumns
from tierlog.api.http.settings import HttpSettings
from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format import codecs
from tierlog.record_format.batch import (
    CREATE_TIME,
    LOG_APPEND_TIME,
    NO_PRODUCER_ID,
    NO_SEQUENCE,
    parse_header,
)
from tierlog.record_format.errors import CorruptBatch, FieldProblem, InvalidRecord, RecordTooLarge
from tierlog.record_format.produced import (
    KEY_REQUIRED,
    ProducedBatches,
    ProduceLimits,
    build_produced,
    check_produced,
    check_sizes,
    recompress,
    timestamp_problem,
)

AS_PRODUCED: Final = "producer"  # compression.type: batches stay as the producer sent them
_FEW_RECORDS: Final = 4096


class ProducerState(NamedTuple):
    """The id, epoch and sequence number that an idempotent producer gives to a batch."""

    producer_id: int
    producer_epoch: int
    base_sequence: int


_NO_PRODUCER: Final = ProducerState(NO_PRODUCER_ID, -1, NO_SEQUENCE)


def limits_of(config: LogConfig, settings: HttpSettings, *, now_ms: int) -> ProduceLimits:
    return ProduceLimits(
        max_message_bytes=config.max_message_bytes,
        now_ms=now_ms,
        timestamp_type=LOG_APPEND_TIME if config.log_append_time else CREATE_TIME,
        before_max_ms=config.message_timestamp_before_max_ms,
        after_max_ms=config.message_timestamp_after_max_ms,
        max_expanded_bytes=settings.expanded_max_bytes,
        max_records=settings.records_max,
        require_keys=config.compacts,
    )


def is_expired(produced: ProducedBatches, config: LogConfig, *, now_ms: int) -> bool:
    """Whether the next retention check would delete all of these records."""
    if config.retention_ms < 0 or config.log_append_time or not config.deletes:
        return False
    newest = max(header.max_timestamp for header in produced.headers)
    return 0 <= newest < now_ms - config.retention_ms


def check_batches(body: bytearray, limits: ProduceLimits, compression: str) -> ProducedBatches:
    """Check the raw batches. Raises what `check_produced` does. `compression` is the topic's."""
    produced = check_produced(body, limits)
    if compression == AS_PRODUCED:
        return produced
    produced = recompress(produced, codecs.CODEC_IDS[compression])
    check_sizes(produced, max_message_bytes=limits.max_message_bytes)
    return produced


def is_small_uncompressed_batch(body: bytes | bytearray) -> bool:
    """Whether this is one uncompressed batch of few records, which is checked quickly."""
    try:
        header = parse_header(body)
    except CorruptBatch:
        return False
    is_plain = header.codec == codecs.NONE and header.record_count <= _FEW_RECORDS
    return is_plain and header.size_bytes == len(body)


def build_appends(
    by_partition: Mapping[int, RecordColumns],
    limits: ProduceLimits,
    compression: str,
    producer: ProducerState | None,
) -> dict[int, ProducedBatches]:
    """Encode each partition's columns as batches. Raises InvalidRecord, TooLarge. `compression` is
    the topic's.
    """
    codec = codecs.NONE if compression == AS_PRODUCED else codecs.CODEC_IDS[compression]
    appends = {}
    for partition, columns in by_partition.items():
        try:
            appends[partition] = _build(columns, limits, codec, producer or _NO_PRODUCER)
        except RecordTooLarge as error:
            raise _located(error, columns) from None
    return appends


def _located(error: RecordTooLarge, columns: RecordColumns) -> RecordTooLarge:
    """Name the record by its place in the request, which may have records of other partitions."""
    assert error.row is not None, "a single record is too large"
    limit, size = error.limit_bytes, error.size_bytes
    return RecordTooLarge(
        f"{columns.record(error.row)} makes a batch of {size} bytes; max.message.bytes is {limit}",
        limit_bytes=limit,
        size_bytes=size,
    )


def _build(
    columns: RecordColumns, limits: ProduceLimits, codec: int, producer: ProducerState
) -> ProducedBatches:
    if limits.require_keys and (columns.keys is None or None in columns.keys):
        row = 0 if columns.keys is None else columns.keys.index(None)
        raise _invalid(columns.path(row, "key"), KEY_REQUIRED)
    return build_produced(
        columns.values,
        timestamps=_timestamps(columns, limits),
        keys=columns.keys,
        headers=columns.headers,
        max_message_bytes=limits.max_message_bytes,
        codec=codec,
        producer_id=producer.producer_id,
        producer_epoch=producer.producer_epoch,
        base_sequence=producer.base_sequence,
    )


def _timestamps(columns: RecordColumns, limits: ProduceLimits) -> list[int]:
    now_ms = limits.now_ms
    if columns.timestamps is None:
        return [now_ms] * len(columns.values)
    timestamps = [now_ms if given is None else given for given in columns.timestamps]
    if limits.timestamp_type == CREATE_TIME:
        for timestamp in (max(timestamps), min(timestamps)):
            problem = timestamp_problem(timestamp, limits)
            if problem:
                index = timestamps.index(timestamp)
                raise _invalid(columns.path(index, "timestamp"), problem)
    return timestamps


def _invalid(loc: str, problem: str) -> InvalidRecord:
    return InvalidRecord(f"{loc}: {problem}", problems=(FieldProblem(loc, problem),))
