"""The plain batches at the front of a buffer as columns: no object and no call a batch but its
checksum.

A batch is plain here where nothing but its place, offsets and time matter to a log: it begins
exactly where the one before it ended, was not written by an idempotent producer, is no control
batch, and is of the same leader epoch as the first. That is most of what is checked after a crash;
whoever meets a batch that is not plain looks at it by itself.
"""

from __future__ import annotations

from typing import NamedTuple

from crc32c import crc32c

from record_format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    MIN_RECORD_SIZE,
)


class HeaderRun(NamedTuple):
    """Columns of one length, of at least one batch. Positions are of the buffer."""

    leader_epoch: int
    base_offset: int
    starts: list[int]
    ends: list[int]
    last_offsets: list[int]
    max_timestamps: list[int]

    @property
    def next_offset(self) -> int:
        return self.last_offsets[-1] + 1


def header_run(buf: bytes, *, base_offset: int, last_offset: int) -> HeaderRun | None:
    """The longest run of plain batches at the front of `buf` that begins with `base_offset`, every
    checksum verified; None where the first batch is not plain.

    It ends before the first batch that is not plain, is cut by the end of `buf`, goes beyond
    `last_offset`, or is bad in any way: what that is, is for the caller to find out.
    """
    starts: list[int] = []
    ends: list[int] = []
    last_offsets: list[int] = []
    max_timestamps: list[int] = []
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
                or producer_id >= 0
                or attributes & CONTROL_BIT
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
            if crc32c(view[start + CRC_START : end]) != crc:
                break
            starts.append(start)
            ends.append(end)
            last_offsets.append(last)
            max_timestamps.append(max_timestamp)
            start, next_offset = end, last + 1
    if not starts:
        return None
    return HeaderRun(epoch, base_offset, starts, ends, last_offsets, max_timestamps)
