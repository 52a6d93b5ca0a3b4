"""The compiled half of `arrow`: headers into a table, records into columns.

Rules that keep it honest:

* No byte is read before its position is checked against the end of its record, and none is written
  past what the caller allocated: rows and headers are checked against the arrays' sizes, and keys,
  values and headers cannot exceed the source they are copied from.
* Nothing is raised here. A problem is returned as a number in `state` (a `record_walk.Problem`).
  This module refuses exactly what `record_walk` refuses; a test feeds both the same corrupt bytes.
* A call can stop at any record, and the next one continues from `state`. That bounds the memory for
  a batch with millions of records.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from tierlog.record_format.batch import HEADER_SIZE
from tierlog.record_format.compiled import compiled
from tierlog.record_format.kernel_bytes import batch_header, copy_bytes, pointer_to, varint, varlong
from tierlog.record_format.record_walk import Problem

# Columns of the header table, one row per batch; SIZE to COUNT are those of `batch_header`.
POSITION: Final = 0
SIZE: Final = 1
BASE_OFFSET: Final = 2
CRC: Final = 3
ATTRIBUTES: Final = 4
LAST_DELTA: Final = 5
BASE_TIME: Final = 6
MAX_TIME: Final = 7
PRODUCER: Final = 8
COUNT: Final = 9
START: Final = 10  # of the expanded records in the source, set by the caller
END: Final = 11
TABLE_WIDTH: Final = 12

# Cells of `state`. The first four are where to continue.
BATCH: Final = 0
RECORD: Final = 1
AT: Final = 2
DELTA: Final = 3
ROWS: Final = 4
HEADERS: Final = 5
KEY_BYTES: Final = 6
VALUE_BYTES: Final = 7
NAME_BYTES: Final = 8
CONTENT_BYTES: Final = 9
NULL_KEYS: Final = 10
NULL_VALUES: Final = 11
NULL_CONTENTS: Final = 12
PROBLEM: Final = 13
PROBLEM_AT: Final = 14
STATE_SIZE: Final = 15

WANT_KEY: Final = 1
WANT_VALUE: Final = 2
WANT_HEADERS: Final = 4

DONE: Final = 0
ROWS_FULL: Final = 1
HEADERS_FULL: Final = 2
BROKEN: Final = 3


_MAX_MS: Final = (2**63 - 1) // 1000  # the greatest that fits as microseconds


@compiled()
def scan_headers(data, start, end, table):  # type: ignore[no-untyped-def]
    """Fill `table` with the headers of whole batches; returns (count, position after them).

    Stops at the end, when the table is full, at a truncated batch, and at a header that
    `batch.parse_header` refuses. The caller finds out which.
    """
    source, count = pointer_to(data), 0
    while start + HEADER_SIZE <= end and count < table.shape[0]:
        header = batch_header(source, start)
        size, valid = header[0], header[9]
        if not valid or size > end - start:
            break
        row = table[count]
        row[POSITION] = start
        for column in range(9):
            row[SIZE + column] = header[column]
        count += 1
        start += size
    return count, start


@compiled()
def _micros(milliseconds):  # type: ignore[no-untyped-def]
    """Convert to microseconds, clamped to 64 bits."""
    return max(-_MAX_MS, min(_MAX_MS, milliseconds)) * 1000


@compiled()
def fill_offsets(table, batches, bounds, state, offsets, kinds):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Fill rows (offset, timestamp type) of batches without gaps, from their headers alone."""
    rows = np.int64(0)
    batch = state[BATCH]
    delta = state[RECORD]
    while batch < batches:
        row = table[batch]
        first = max(delta, bounds[0] - row[BASE_OFFSET])
        last = min(row[COUNT], bounds[1] - row[BASE_OFFSET])
        for record in range(first, last):
            if rows == offsets.shape[0]:
                state[BATCH] = batch
                state[RECORD] = record
                state[ROWS] = rows
                return ROWS_FULL
            offsets[rows] = row[BASE_OFFSET] + record
            kinds[rows] = (row[ATTRIBUTES] >> 3) & 1
            rows += 1
        batch += 1
        delta = np.int64(0)
    state[BATCH] = batch
    state[ROWS] = rows
    return DONE


@compiled()
def decode_records(  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915, PLR0917
    data,  # the expanded records of all batches
    table,
    batches,  # how many rows of the table count
    bounds,  # first offset, end offset, first time, last time
    want,
    state,
    offsets,
    times,
    kinds,
    key_ends,  # one more than rows, as Arrow's offsets are; the first is 0
    keys,
    key_there,
    value_ends,
    values,
    value_there,
    header_ends,
    name_ends,
    names,
    content_ends,
    contents,
    content_there,
):
    """Decode from `state` on, until the end, rows or headers are full, or a problem is found.

    One long function for speed. Unwanted headers are skipped unread; everything else in a record is
    checked. `data` must be as large as the table says; `keys`, `values`, `names` and `contents`, if
    wanted, as large as the rest of `data`.
    """
    source = pointer_to(data)
    rows, headers = state[ROWS], state[HEADERS]
    key_bytes, value_bytes = state[KEY_BYTES], state[VALUE_BYTES]
    name_bytes, content_bytes = state[NAME_BYTES], state[CONTENT_BYTES]
    batch, record, at, delta = state[BATCH], state[RECORD], state[AT], state[DELTA]
    outcome = DONE
    problem = 0
    while batch < batches:
        row = table[batch]
        base_offset, base_time, max_time = row[BASE_OFFSET], row[BASE_TIME], row[MAX_TIME]
        append_time = (row[ATTRIBUTES] >> 3) & 1
        limit, count, last_delta = row[END], row[COUNT], row[LAST_DELTA]
        if record == 0:
            at = row[START]
            delta = np.int64(-1)
        cut_short = False
        while record < count:
            if rows == offsets.shape[0]:
                outcome = ROWS_FULL
                break
            start = at
            size, at = varint(source, at, limit)
            if at < 0:
                problem = Problem.VARINT
                break
            if size <= 0 or size > limit - at:
                problem = Problem.RECORD_LENGTH
                break
            end = at + size
            at += 1
            time_delta, at = varlong(source, at, end)
            if at < 0:
                problem = Problem.VARINT
                break
            time = base_time + time_delta
            # The addition overflowed if both operands have one sign and the sum has the other.
            if (base_time >= 0) == (time_delta >= 0) and (time >= 0) != (base_time >= 0):
                problem = Problem.TIMESTAMP
                break
            before = delta
            delta, at = varint(source, at, end)
            if at < 0:
                problem = Problem.VARINT
                break
            if delta <= before or delta > last_delta:
                problem = Problem.OFFSET_DELTA
                break
            if append_time:
                time = max_time
            offset = base_offset + delta
            if offset >= bounds[1]:
                cut_short = True
                break
            if offset < bounds[0] or time < bounds[2] or time > bounds[3]:
                at = end
                record += 1
                continue

            size, at = varint(source, at, end)
            if at < 0:
                problem = Problem.VARINT
                break
            if size < -1 or size > end - at:
                problem = Problem.KEY_LENGTH
                break
            key_at, key_size = at, size
            at += max(size, 0)
            size, at = varint(source, at, end)
            if at < 0:
                problem = Problem.VARINT
                break
            if size < -1 or size > end - at:
                problem = Problem.VALUE_LENGTH
                break
            value_at, value_size = at, size
            at += max(size, 0)

            if want & WANT_HEADERS:
                size, at = varint(source, at, end)
                if at < 0:
                    problem = Problem.VARINT
                    break
                if size < 0 or size > (end - at) // 2:
                    problem = Problem.HEADERS
                    break
                if headers + size > content_there.shape[0]:
                    at, delta = start, before
                    outcome = HEADERS_FULL
                    break
                for _ in range(size):
                    part, at = varint(source, at, end)
                    if at < 0 or part < 0 or part > end - at:
                        problem = Problem.HEADERS
                        break
                    copy_bytes(pointer_to(names), name_bytes, source, at, part)
                    name_bytes += part
                    at += part
                    part, at = varint(source, at, end)
                    if at < 0 or part < -1 or part > end - at:
                        problem = Problem.HEADERS
                        break
                    if part >= 0:
                        copy_bytes(pointer_to(contents), content_bytes, source, at, part)
                        content_bytes += part
                        at += part
                        content_there[headers] = 1
                    else:
                        content_there[headers] = 0
                        state[NULL_CONTENTS] += 1
                    headers += 1
                    name_ends[headers] = name_bytes
                    content_ends[headers] = content_bytes
                if problem:
                    break
                header_ends[rows + 1] = headers
                if at != end:
                    problem = Problem.RECORD_END
                    break
            elif at >= end or (data[at] == 0 and at + 1 != end):
                problem = Problem.RECORD_END
                break
            at = end

            if want & WANT_KEY:
                if key_size > 0:
                    copy_bytes(pointer_to(keys), key_bytes, source, key_at, key_size)
                    key_bytes += key_size
                key_there[rows] = key_size >= 0
                state[NULL_KEYS] += key_size < 0
                key_ends[rows + 1] = key_bytes
            if want & WANT_VALUE:
                if value_size > 0:
                    copy_bytes(pointer_to(values), value_bytes, source, value_at, value_size)
                    value_bytes += value_size
                value_there[rows] = value_size >= 0
                state[NULL_VALUES] += value_size < 0
                value_ends[rows + 1] = value_bytes
            offsets[rows] = offset
            times[rows] = _micros(time)
            kinds[rows] = append_time
            rows += 1
            record += 1
        if problem:
            state[PROBLEM_AT] = start - row[START]
            outcome = BROKEN
            break
        if outcome != DONE:
            break
        if not cut_short and at != limit:
            state[PROBLEM_AT] = at - row[START]
            problem = Problem.TRAILING
            outcome = BROKEN
            break
        batch += 1
        record = np.int64(0)
    state[BATCH], state[RECORD], state[AT], state[DELTA] = batch, record, at, delta
    state[ROWS], state[HEADERS] = rows, headers
    state[KEY_BYTES], state[VALUE_BYTES] = key_bytes, value_bytes
    state[NAME_BYTES], state[CONTENT_BYTES] = name_bytes, content_bytes
    state[PROBLEM] = problem
    return outcome
