"""Summarizes consecutive whole batches in one value, after checking each of them.

Rules that keep it honest:

* There are two implementations, the plain one here and the compiled one in `native_summary`. For
  every input both return the same `BatchSummary` or raise the same error; a test feeds them the
  same bytes.
* Which one is in use is set once per process, by `native.load`.
* Timestamps come from the records: a header does not hold their minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from tierlog.record_format.batch import BatchHeader, Buffer, check_crc, iter_headers
from tierlog.record_format.decode import corrupt_batch, min_timestamp_of
from tierlog.record_format.errors import CorruptBatch


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


_in_use: Final[list[Summarize]] = [summarize_plain]


def use(summarize: Summarize) -> None:
    _in_use[0] = summarize


def summarize_batches(body: Buffer, *, next_offset: int) -> BatchSummary | None:
    """Summarize the whole batches at the start of `body`, checking every CRC and offset; None if
    there are none.

    `next_offset`: where the preceding batches end. A batch truncated by the end of `body` is
    ignored. Raises CorruptBatch with a position in `body`.
    """
    return _in_use[0](body, next_offset)
