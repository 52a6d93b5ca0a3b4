"""Runs of consecutive batches: whether they fit each other, and what they hold together.

Rules that keep it honest:

* No checksum covers a batch's base offset and length, which come before the bytes that it protects:
  batches that came over a network are compared with their neighbours.
* Recovery's fast path makes no object per batch. A run ends at a batch that does not continue it
  (an offset gap, another leader epoch), at a transactional or control batch, and at an invalid one:
  the caller handles it by itself. Of an idempotent producer's batches only the last few matter to
  its state: their headers are returned as bytes, to be parsed only if needed.
* A summary has two implementations, the plain one here and the compiled one in `record_kernel`. For
  every input both return the same `BatchSummary` or raise the same error; a test feeds them the
  same bytes. Which one is in use is set once per process, by `native.load`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from tierlog.record_format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    MIN_RECORD_SIZE,
    TRANSACTIONAL_BIT,
    BatchHeader,
    Buffer,
    check_crc,
    iter_headers,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.decode import corrupt_batch, min_timestamp_of
from tierlog.record_format.errors import CorruptBatch

_NOT_PLAIN: Final = TRANSACTIONAL_BIT | CONTROL_BIT


def headers_in_order(
    batches: Buffer, *, from_offset: int, next_offset: int | None
) -> Iterator[BatchHeader]:
    """The headers of whole batches in [from_offset, next_offset), of which the first may begin
    before; None: without a known end.

    Raises CorruptBatch at the batch whose offset is not between those of its neighbours, since its
    records would be given other offsets, or those that follow be left out; and for a truncated
    batch.
    """
    expected, before = from_offset, None
    headers = iter_headers(batches)
    while True:
        try:
            header = next(headers, None)
        except CorruptBatch:
            if before is not None:
                yield before
            raise
        end = next_offset if header is None else header.base_offset
        if before is not None:
            # It is this batch that is wrong, not the next one, unless it follows the previous one.
            is_wrong = end is not None and end < before.next_offset
            if is_wrong and (header is None or before.base_offset > expected):
                raise _out_of_order(before)
            yield before
            if is_wrong and header is not None:
                raise _out_of_order(header)
            expected = before.next_offset
        if header is None:
            break
        before = header
    if (end_position := before.end_position if before else 0) < len(batches):
        raise CorruptBatch("the batch is truncated", position=end_position)


def _out_of_order(header: BatchHeader) -> CorruptBatch:
    detail = f"the batch's base offset, {header.base_offset}, is out of order"
    return CorruptBatch(detail, position=header.position)


class HeaderRun(NamedTuple):
    """Columns of equal length, of at least one batch. Positions are relative to the buffer."""

    leader_epoch: int
    base_offset: int
    starts: list[int]
    ends: list[int]
    last_offsets: list[int]
    max_timestamps: list[int]
    remembered: dict[int, list[bytes]]  # last headers by producer id, oldest first

    @property
    def next_offset(self) -> int:
        return self.last_offsets[-1] + 1


def header_run(
    buf: bytes, *, base_offset: int, last_offset: int, remember: int
) -> HeaderRun | None:
    """The longest run of plain batches at the start of `buf`, from `base_offset` on, with every
    checksum verified; None if the first batch does not belong to one.

    The run ends before the first batch that is not plain, is truncated by the end of `buf`, extends
    past `last_offset`, or is invalid; the caller finds out which. `remember`: how many of each
    producer's last headers to return.
    """
    starts: list[int] = []
    ends: list[int] = []
    last_offsets: list[int] = []
    max_timestamps: list[int] = []
    by_producer: dict[int, list[int]] = {}
    unpack_from, size_bytes = HEADER.unpack_from, len(buf)
    start, next_offset, epoch = 0, base_offset, -1
    with memoryview(buf) as view:
        while size_bytes - start >= HEADER_SIZE:
            (
                first,
                length,
                of_epoch,
                magic,
                crc,
                attributes,
                delta,
                _,
                max_timestamp,
                producer_id,
                _,
                _,
                records,
            ) = unpack_from(buf, start)
            end, last = start + LOG_OVERHEAD + length, first + delta
            room = 0 if attributes & CODEC_MASK else MIN_RECORD_SIZE * records
            if (
                first != next_offset
                or magic != MAGIC
                or attributes & _NOT_PLAIN
                or not 0 <= records <= delta + 1
                or not start + HEADER_SIZE + room <= end <= size_bytes
                or delta < 0
                or last > last_offset
            ):
                break
            if of_epoch != epoch:
                if starts:
                    break
                epoch = of_epoch
            if crc32c_of(view[start + CRC_START : end]) != crc:
                break
            if producer_id >= 0:
                by_producer.setdefault(producer_id, []).append(start)
            starts.append(start)
            ends.append(end)
            last_offsets.append(last)
            max_timestamps.append(max_timestamp)
            start, next_offset = end, last + 1
    if not starts:
        return None
    remembered = {
        producer_id: [buf[at : at + HEADER_SIZE] for at in own[-remember:]]
        for producer_id, own in by_producer.items()
    }
    return HeaderRun(epoch, base_offset, starts, ends, last_offsets, max_timestamps, remembered)


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
