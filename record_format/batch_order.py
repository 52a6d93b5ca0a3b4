"""Whether the batches of a response fit each other. No checksum covers a batch's base offset and
length, which come before the bytes that it protects.
"""

from __future__ import annotations

from collections.abc import Iterator

from tierlog.record_format.batch import BatchHeader, Buffer, iter_headers
from tierlog.record_format.errors import CorruptBatch


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
