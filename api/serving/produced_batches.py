"""What both doors do with the batches that a producer made: check them by the topic's
configuration, and compress them anew if `compression.type` says so.
"""

from __future__ import annotations

from typing import Final

from tierlog.hot_tier.log_config import LogConfig
from tierlog.record_format import codecs
from tierlog.record_format.batch import CREATE_TIME, LOG_APPEND_TIME, parse_header
from tierlog.record_format.errors import CorruptBatch
from tierlog.record_format.produced import (
    CheckValues,
    ProducedBatches,
    ProduceLimits,
    check_produced,
    check_sizes,
    recompress,
)

AS_PRODUCED: Final = "producer"  # compression.type: batches stay as the producer sent them
_FEW_RECORDS: Final = 4096


def limits_of(
    config: LogConfig,
    *,
    now_ms: int,
    expanded_max_bytes: int,
    batch_max_bytes: int,
    records: int,
    transactions: bool = False,
    check_values: CheckValues | None = None,
) -> ProduceLimits:
    """The batches may decompress to `expanded_max_bytes`, each to `batch_max_bytes`, and have this
    many records.
    """
    return ProduceLimits(
        max_message_bytes=config.max_message_bytes,
        now_ms=now_ms,
        timestamp_type=LOG_APPEND_TIME if config.log_append_time else CREATE_TIME,
        before_max_ms=config.message_timestamp_before_max_ms,
        after_max_ms=config.message_timestamp_after_max_ms,
        max_expanded_bytes=expanded_max_bytes,
        max_expanded_batch_bytes=batch_max_bytes,
        max_records=records,
        require_keys=config.compacts,
        allow_transactions=transactions,
        check_values=check_values,
    )


def check_batches(
    body: bytearray | memoryview, limits: ProduceLimits, compression: str
) -> ProducedBatches:
    """Check raw batches. Raises what `check_produced` does. `compression` is the topic's."""
    produced = check_produced(body, limits)
    if compression == AS_PRODUCED:
        return produced
    produced = recompress(produced, codecs.CODEC_IDS[compression])
    check_sizes(produced, max_message_bytes=limits.max_message_bytes)
    return produced


def stays_as_produced(compression: str) -> bool:
    """Whether an uncompressed batch is stored unchanged under this `compression.type`."""
    return compression in (AS_PRODUCED, "uncompressed")


def is_small_uncompressed_batch(body: bytes | bytearray | memoryview) -> bool:
    """Whether this is one uncompressed batch of few records, which is checked quickly."""
    try:
        header = parse_header(body)
    except CorruptBatch:
        return False
    is_plain = header.codec == codecs.NONE and header.record_count <= _FEW_RECORDS
    return is_plain and header.size_bytes == len(body)
