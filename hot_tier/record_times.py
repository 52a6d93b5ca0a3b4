"""How many records a `.log` holds and their least timestamp, found by reading it."""

from __future__ import annotations

from hot_tier.batch_walk import checked_batches
from hot_tier.open_files import FileReader
from record_format.decode import min_timestamp_of
from record_format.errors import CorruptBatch


def least_timestamp(log: FileReader, *, size_bytes: int) -> tuple[int, int | None]:
    """(records, least timestamp) of all batches; None without a record. Raises CorruptBatch."""
    count, least = 0, None
    for checked in checked_batches(log, end=size_bytes):
        count += checked.header.record_count
        try:
            of_batch = min_timestamp_of(checked.chunk, checked.at_start_of_chunk())
        except CorruptBatch as bad:
            raise checked.placed(bad, file=log.name) from None
        if of_batch is not None and (least is None or of_batch < least):
            least = of_batch
    return count, least
