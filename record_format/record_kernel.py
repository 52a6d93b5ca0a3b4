"""The compiled walk over records, for `record_walk` and for the summary of consecutive batches.

Rules that keep it honest:

* Only kernels and `native.load` import this module: numba takes a second to import.
* `read_record` is the one compiled function that knows a record's layout. It accepts what
  `record_walk.walk_plain` accepts: change both together.
* Compiled code checks no index, so `read_record` compares each with its limit itself. A header is
  read only if 61 bytes are left, and records only if the batch is whole.
* The kernels have explicit types and are cached on disk. The walk releases the GIL for large
  batches only: for one that takes a few microseconds, reacquiring the GIL would take longer.
* The kernels handle valid bytes only. Whenever a check fails, the plain implementation runs on the
  whole input, and finds what is wrong.
"""

from __future__ import annotations

from bisect import bisect_left
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
from tierlog.record_format.batch_runs import (
    BatchSummary,
    min_timestamp_of_batches,
    summarize_plain,
)
from tierlog.record_format.compiled import (
    BYTES,
    READ_ONLY,
    batch_header,
    compiled,
    pointer_to,
    varint,
    varlong,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.record_walk import (
    HEAD_BYTES,
    I64_MAX,
    I64_MIN,
    NO_FIELDS,
    NO_HEAD,
    NO_VALUE,
    Fields,
    Problem,
    Walk,
    WalkRequest,
    walk_plain,
)

RELEASE_BYTES: Final = 64 << 10

_I64: Final = types.int64
_TABLE: Final = types.Array(_I64, 2, "C")


@compiled(_I64(BYTES, _I64, _I64, _I64))
def _skip_headers(source, length, position, end):  # type: ignore[no-untyped-def]
    """The position after the headers, or -1 if they are invalid."""
    count, position = varint(source, position, length)
    if position < 0 or count < 0 or count > (end - position) // 2:
        return -1
    for _ in range(count):
        size, position = varint(source, position, length)
        if position < 0 or size < 0 or size > end - position:
            return -1
        size, position = varint(source, position + size, length)
        if position < 0 or size < -1 or size > end - position:
            return -1
        if size > 0:
            position += size
    return position


@compiled(types.UniTuple(_I64, 9)(BYTES, _I64, _I64, _I64, _I64, _I64), inline="always")
def read_record(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    source, start, length, base_timestamp, least_delta, most_delta
):
    """Check the record at `start`: (end, timestamp, rest, offset delta, key, its size, value, its
    size, headers). The end is -1 if it is invalid.

    All but sizes, the timestamp and the delta are positions; `rest` is that of the offset delta.
    Null has size -1; headers are -1 if there are none. The offset delta must be in (`least_delta`,
    `most_delta`].
    """
    bad = (-1, 0, 0, 0, 0, 0, 0, 0, 0)
    size, position = varint(source, start, length)
    if position < 0 or size <= 0 or size > length - position:
        return bad
    end = position + size
    delta, rest = varlong(source, position + 1, length)  # behind attributes, of which none is used
    if rest < 0:
        return bad
    if (delta > 0 and base_timestamp > I64_MAX - delta) or (
        delta < 0 and base_timestamp < I64_MIN - delta
    ):
        return bad
    offset_delta, position = varint(source, rest, length)
    if position < 0 or offset_delta <= least_delta or offset_delta > most_delta:
        return bad
    key_size, key = varint(source, position, length)
    if key < 0 or key_size < -1 or key_size > end - key:
        return bad
    value_size, value = varint(source, key + max(key_size, 0), length)
    if value < 0 or value_size < -1 or value_size > end - value:
        return bad
    headers = value + max(value_size, 0)
    if headers >= length:
        return bad
    if source[headers]:
        position = _skip_headers(source, length, headers, end)
    else:
        position = headers + 1
        headers = np.int64(-1)
    if position != end:
        return bad
    timestamp = base_timestamp + delta
    return end, timestamp, rest, offset_delta, key, key_size, value, value_size, headers


_WALK: Final = types.UniTuple(_I64, 4)(
    READ_ONLY, _I64, _I64, _I64, _I64, _TABLE, types.boolean, types.boolean
)


@compiled(_WALK, nogil=False)
def walk_kernel(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, record_count, base_timestamp, last_offset_delta, step, columns, with_columns, with_head
):
    """(valid, minimum timestamp, maximum timestamp, head); fills `columns`."""
    source, length = pointer_to(data), len(data)
    minimum, maximum = I64_MAX, I64_MIN
    head = np.int64(NO_VALUE)
    least, position = np.int64(-1), np.int64(0)
    for record in range(record_count):
        most = min(least + step, last_offset_delta)
        found = read_record(source, position, length, base_timestamp, least, most)
        position, timestamp, _, least, key, key_size, value, value_size, headers = found
        if position < 0:
            return 0, 0, 0, 0
        minimum = min(minimum, timestamp)
        maximum = max(maximum, timestamp)
        if with_head and value_size >= 0:
            own = np.int64(NO_HEAD)
            if value_size >= HEAD_BYTES:
                own = np.int64(0)
                for at in range(value, value + HEAD_BYTES):
                    own = (own << 8) | np.int64(source[at])
            if head != own:
                head = own if head == NO_VALUE else np.int64(NO_HEAD)
        if with_columns:
            columns[0, record] = timestamp
            columns[1, record] = least
            columns[2, record] = key if key_size >= 0 else -1
            columns[3, record] = key + max(key_size, 0)
            columns[4, record] = value if value_size >= 0 else -1
            columns[5, record] = value + max(value_size, 0)
            columns[6, record] = headers
    return position == length, minimum, maximum, head


@compiled(_WALK)
def _walk_released(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data, record_count, base_timestamp, last_offset_delta, step, columns, with_columns, with_head
):
    return walk_kernel(
        data,
        record_count,
        base_timestamp,
        last_offset_delta,
        step,
        columns,
        with_columns,
        with_head,
    )


NO_COLUMNS: Final = np.empty((7, 0), np.int64)


def walk_native(records: Buffer, request: WalkRequest) -> Walk:
    """`record_walk.walk_plain`, compiled."""
    record_count, base_timestamp, last_offset_delta, dense, with_columns, *wanted = request
    from_delta, columns_max, with_head = wanted
    columns = NO_COLUMNS
    if with_columns:
        # Allocated at once, since the caller has checked the count against the size of `records`.
        columns = np.empty((7, record_count), np.int64)
    compiled_walk = walk_kernel if len(records) < RELEASE_BYTES else _walk_released
    valid, minimum, maximum, head = compiled_walk(
        np.frombuffer(records, np.uint8),
        record_count,
        base_timestamp,
        last_offset_delta,
        1 if dense else last_offset_delta + 1,
        columns,
        with_columns,
        with_head,
    )
    if not valid:
        return walk_plain(records, request)
    fields = NO_FIELDS
    if with_columns:
        start = bisect_left(columns[1], from_delta)
        fields = Fields(*columns[:, start : start + columns_max].tolist())
    return Walk(Problem.NONE, record_count, len(records), minimum, maximum, fields, head)


# --- the summary of consecutive batches -----------------------------------------------------------

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
                readable, least, _, _ = walk_kernel(
                    data[position + HEADER_SIZE : end],
                    record_count,
                    base_timestamp,
                    delta,
                    delta + 1,
                    columns,
                    False,
                    False,
                )
                if not readable:
                    known = 0
                minimum = min(minimum, least)
        records += record_count
        next_offset = base_offset + delta + 1
        position = end
        count += 1
    return 1, count, position, next_offset, records, gap, transactions, minimum, maximum, known


def summarize_native(body: Buffer, next_offset: int) -> BatchSummary | None:
    """`batch_runs.summarize_plain`, compiled."""
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
