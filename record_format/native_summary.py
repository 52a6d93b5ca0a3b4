"""`batch_summary.summarize_plain`, compiled except for the checksums, which crc32c computes.

Rules that keep it honest:

* Only `native.load` imports this module: numba takes a second to import.
* The kernel handles valid batches only. Whenever a check fails, the plain implementation runs on
  the whole input and raises the error.
* `data` is never indexed past its end: a header is read only if 61 bytes are left, and records only
  if the batch is whole.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from tierlog.record_format.batch import (
    CODEC_MASK,
    CONTROL_BIT,
    CRC_START,
    HEADER_SIZE,
    LOG_APPEND_TIME_BIT,
    TRANSACTIONAL_BIT,
    Buffer,
    parse_header,
)
from tierlog.record_format.batch_summary import (
    BatchSummary,
    min_timestamp_of_batches,
    summarize_plain,
)
from tierlog.record_format.compiled import compiled
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.kernel_bytes import READ_ONLY, batch_header, pointer_to
from tierlog.record_format.native_walk import NO_COLUMNS, walk_kernel
from tierlog.record_format.record_walk import I64_MAX, I64_MIN

_I64: Final = types.int64
_TABLE: Final = types.Array(_I64, 2, "C")

_TRANSACTIONS: Final = TRANSACTIONAL_BIT | CONTROL_BIT

START, END, CRC, TO_EXPAND = range(4)


@compiled(types.UniTuple(_I64, 10)(READ_ONLY, _I64, _TABLE, _TABLE))
def _summarize(data, next_offset, table, columns):  # type: ignore[no-untyped-def]
    """(valid, batches, end, next offset, records, has gap, has transactions, minimum timestamp,
    maximum timestamp, minimum is known); fills `table`.
    """
    source, count, position = pointer_to(data), 0, 0
    records, gap, transactions, known = 0, 0, 0, 1
    minimum, maximum = I64_MAX, I64_MIN
    invalid = (0, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    while len(data) - position >= HEADER_SIZE:
        header = batch_header(source, position)
        size, base_offset, crc, attributes, delta, base_timestamp, max_timestamp = header[:7]
        record_count, valid = header[8:]
        if not valid:
            return invalid
        if size > len(data) - position:
            break
        if base_offset < next_offset:
            return invalid
        end = position + size
        table[count, START] = position
        table[count, END] = end
        table[count, CRC] = crc
        table[count, TO_EXPAND] = 0
        if base_offset > next_offset or record_count != delta + 1:
            gap = 1
        if attributes & _TRANSACTIONS:
            transactions = 1
        if record_count > 0:
            maximum = max(maximum, max_timestamp)
            if attributes & LOG_APPEND_TIME_BIT:
                minimum = min(minimum, max_timestamp)
            elif attributes & CODEC_MASK:
                table[count, TO_EXPAND] = 1
            else:
                problem, _, _, least, _ = walk_kernel(
                    data[position + HEADER_SIZE : end],
                    record_count,
                    base_timestamp,
                    delta,
                    delta + 1,
                    columns,
                    False,
                )
                if problem:
                    known = 0
                minimum = min(minimum, least)
        records += record_count
        next_offset = base_offset + delta + 1
        position = end
        count += 1
    return 1, count, position, next_offset, records, gap, transactions, minimum, maximum, known


def summarize_native(body: Buffer, next_offset: int) -> BatchSummary | None:
    """`batch_summary.summarize_plain`, compiled."""
    table = np.empty((len(body) // HEADER_SIZE, 4), np.int64)
    found = _summarize(np.frombuffer(body, np.uint8), next_offset, table, NO_COLUMNS)
    valid, count, size_bytes, end_offset, records, gap, txns, least, greatest, known = found
    if not valid or not _crcs_match(body, table[:count]):
        return summarize_plain(body, next_offset)
    if not count:
        return None
    minimum = least if records and known else None
    expanded = [parse_header(body, at) for at in table[:count][table[:count, TO_EXPAND] > 0, START]]
    if expanded and minimum is not None:
        rest = min_timestamp_of_batches(body, expanded)
        minimum = None if rest is None else min(minimum, rest)
    return BatchSummary(
        size_bytes=size_bytes,
        first_offset=parse_header(body).base_offset,
        next_offset=end_offset,
        record_count=records,
        min_timestamp=minimum,
        max_timestamp=greatest if records else None,
        has_gap=bool(gap),
        has_transactions=bool(txns),
    )


def _crcs_match(body: Buffer, table: np.ndarray) -> bool:
    starts = (table[:, START] + CRC_START).tolist()
    places = zip(starts, table[:, END].tolist(), table[:, CRC].tolist(), strict=True)
    with memoryview(body) as view:
        for start, end, crc in places:
            if crc32c_of(view[start:end]) != crc:
                return False
    return True
