"""The plain batches at the front of a buffer as columns: no object per batch, and no call but for
its checksum.

A batch is plain here if nothing but its place, offsets, time and producer's sequence matters to a
log: it begins exactly where the one before it ended, is not part of a transaction, is not a control
batch, and has the same leader epoch as the first. That is most of what is checked after a crash; a
batch that is not plain has to be looked at by itself.

Of an idempotent producer's batches only the last few matter once all are there: the bytes of their
headers are returned, for whoever still wants them in the end.
"""

from __future__ import annotations

from typing import Final, NamedTuple

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
    TRANSACTIONAL_BIT,
)

_NOT_PLAIN: Final = TRANSACTIONAL_BIT | CONTROL_BIT


class HeaderRun(NamedTuple):
    """Columns of one length, of at least one batch. Positions are of the buffer."""

    leader_epoch: int
    base_offset: int
    starts: list[int]
    ends: list[int]
    last_offsets: list[int]
    max_timestamps: list[int]
    remembered: dict[int, list[bytes]]  # last headers of each producer id, oldest first

    @property
    def next_offset(self) -> int:
        return self.last_offsets[-1] + 1


def header_run(
    buf: bytes, *, base_offset: int, last_offset: int, remember: int
) -> HeaderRun | None:
    """The longest run of plain batches at the front of `buf` that begins with `base_offset`, every
    checksum verified; None if the first batch is not plain.

    It ends before the first batch that is not plain, is cut off by the end of `buf`, goes beyond
    `last_offset`, or is bad in any way: the caller has to find out which. `remember`: how many of a
    producer's last headers are given.
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
            if crc32c(view[start + CRC_START : end]) != crc:
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
