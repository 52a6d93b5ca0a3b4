"""How many records a `.log` holds and their least timestamp, found by reading it."""

from __future__ import annotations

from pathlib import Path

from hot_tier.batch_walk import CheckedBatch, checked_batches
from hot_tier.open_files import ReadAt
from record_format.batch import LOG_APPEND_TIME
from record_format.decode import decode_batch
from record_format.errors import CorruptBatch


def least_timestamp(read_at: ReadAt, *, size_bytes: int, file: Path) -> tuple[int, int | None]:
    """(records, least timestamp) of all batches; None without a record. Raises CorruptBatch."""
    count, least = 0, None
    try:
        for checked in checked_batches(read_at, end=size_bytes):
            count += checked.header.record_count
            of_batch = _least_of(checked)
            if of_batch is not None and (least is None or of_batch < least):
                least = of_batch
    except CorruptBatch as bad:
        raise CorruptBatch(
            bad.detail, file=str(file), position=bad.position, offset=bad.offset
        ) from None
    return count, least


def _least_of(checked: CheckedBatch) -> int | None:
    header = checked.at_start_of_chunk()
    if header.record_count == 0:
        return None
    if header.timestamp_type == LOG_APPEND_TIME:
        return header.max_timestamp
    return min(record.timestamp for record in decode_batch(checked.chunk, header))
