"""What a run of whole batches holds: checked batch by batch, summed up in one value.

Rules that keep it honest:

* There are two, this plain one and the compiled one in `native_run`; for every input they give the
  same `BatchRun` or the same error. A test feeds both the same bytes.
* One switch for the process decides which is in use; `native.load` throws it, once.
* Timestamps come from the records: a header does not hold their minimum.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from record_format.batch import BatchHeader, Buffer, check_crc, iter_headers
from record_format.decode import located, min_timestamp_of
from record_format.errors import CorruptBatch


class BatchRun(NamedTuple):
    """Batches that lie end to end. Timestamps are None if no record has one, or the minimum is
    not known of some batch.
    """

    size_bytes: int
    first_offset: int
    next_offset: int
    record_count: int
    min_timestamp: int | None
    max_timestamp: int | None
    has_gap: bool
    """Offsets are missing in it or before it."""
    has_transactions: bool


Describe = Callable[[Buffer, int], BatchRun | None]


def describe_plain(body: Buffer, next_offset: int) -> BatchRun | None:
    """As `describe_run`, step by step."""
    headers = list(iter_headers(body))
    if not headers:
        return None
    has_gap = False
    for header in headers:
        check_crc(body, header)
        if header.base_offset < next_offset:
            raise located(f"begins below offset {next_offset}", header)
        has_gap |= header.base_offset > next_offset
        has_gap |= header.record_count != header.last_offset_delta + 1
        next_offset = header.next_offset
    # Compaction keeps the last batch of a producer without records.
    filled = [header for header in headers if header.record_count]
    return BatchRun(
        size_bytes=headers[-1].end_position,
        first_offset=headers[0].base_offset,
        next_offset=next_offset,
        record_count=sum(header.record_count for header in filled),
        min_timestamp=least_timestamp(body, filled),
        max_timestamp=max((header.max_timestamp for header in filled), default=None),
        has_gap=has_gap,
        has_transactions=any(one.is_transactional or one.is_control for one in headers),
    )


def least_timestamp(body: Buffer, headers: list[BatchHeader]) -> int | None:
    """Of all their records; None if there is none, or one batch's cannot be read."""
    try:
        found = [min_timestamp_of(body, header) for header in headers]
    except CorruptBatch:
        return None
    return min((one for one in found if one is not None), default=None)


_in_use: Final[list[Describe]] = [describe_plain]


def use(describe: Describe) -> None:
    _in_use[0] = describe


def describe_run(body: Buffer, *, next_offset: int) -> BatchRun | None:
    """The whole batches at the front of `body`, every CRC and offset checked; None for no batch.

    `next_offset`: what comes before them ends there. A batch cut off by the end of `body` is left
    out. Raises CorruptBatch with a position in `body`.
    """
    return _in_use[0](body, next_offset)
