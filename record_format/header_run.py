"""Scans a run of plain batches into columns, without an object per batch: recovery's fast path.

A batch is plain if it continues the run (no offset gap, same leader epoch) and is neither
transactional nor a control batch. Most batches are. Any other batch, and an invalid one, ends the
run: the caller handles it by itself.

Of an idempotent producer's batches only the last few matter to its state: their headers are
returned as bytes, to be parsed only if needed.
"""

from __future__ import annotations

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
)
from tierlog.record_format.crc32c import crc32c_of

_NOT_PLAIN: Final = TRANSACTIONAL_BIT | CONTROL_BIT


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
