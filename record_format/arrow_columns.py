"""The compiled half of `arrow`: headers into a table, records into columns, columns to Arrow.

Rules that keep it honest:

* Records are read and checked by `read_record`. Nothing is written past what the caller allocated:
  rows and headers are checked against the arrays' sizes, and keys, values and headers cannot exceed
  the source they are copied from.
* Nothing is raised here. Of a batch that is `BROKEN`, the plain walk tells what is wrong.
* A call can stop at any record, and the next one continues from `state`. That bounds the memory for
  a batch with millions of records.
* No memory is allocated for unwanted parts of records, and Arrow arrays share the kernel's buffers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from tierlog.record_format.arrow_schema import HEADER_TYPE, SCHEMA, number_column
from tierlog.record_format.batch import HEADER_SIZE
from tierlog.record_format.compiled import batch_header, compiled, copy_bytes, pointer_to, varint
from tierlog.record_format.record_kernel import read_record

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
STATE_SIZE: Final = 13

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

    One long function for speed. `data` must be as large as the table says; `keys`, `values`,
    `names` and `contents`, if wanted, as large as the rest of `data`.
    """
    source = pointer_to(data)
    rows, headers = state[ROWS], state[HEADERS]
    key_bytes, value_bytes = state[KEY_BYTES], state[VALUE_BYTES]
    name_bytes, content_bytes = state[NAME_BYTES], state[CONTENT_BYTES]
    batch, record, at, delta = state[BATCH], state[RECORD], state[AT], state[DELTA]
    outcome = DONE
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
            before = delta
            found = read_record(source, at, limit, base_time, before, last_delta)
            end, time, _, delta, key_at, key_size, value_at, value_size, part_at = found
            if end < 0:
                outcome = BROKEN
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

            if want & WANT_HEADERS:
                count_of = np.int64(0)
                if part_at >= 0:
                    count_of, part_at = varint(source, part_at, end)
                if headers + count_of > content_there.shape[0]:
                    delta = before
                    outcome = HEADERS_FULL
                    break
                for _ in range(count_of):
                    part, part_at = varint(source, part_at, end)
                    copy_bytes(pointer_to(names), name_bytes, source, part_at, part)
                    name_bytes += part
                    part, part_at = varint(source, part_at + part, end)
                    if part >= 0:
                        copy_bytes(pointer_to(contents), content_bytes, source, part_at, part)
                        content_bytes += part
                        part_at += part
                        content_there[headers] = 1
                    else:
                        content_there[headers] = 0
                        state[NULL_CONTENTS] += 1
                    headers += 1
                    name_ends[headers] = name_bytes
                    content_ends[headers] = content_bytes
                header_ends[rows + 1] = headers
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
        if outcome != DONE:
            break
        if not cut_short and at != limit:
            outcome = BROKEN
            break
        batch += 1
        record = np.int64(0)
    state[BATCH], state[RECORD], state[AT], state[DELTA] = batch, record, at, delta
    state[ROWS], state[HEADERS] = rows, headers
    state[KEY_BYTES], state[VALUE_BYTES] = key_bytes, value_bytes
    state[NAME_BYTES], state[CONTENT_BYTES] = name_bytes, content_bytes
    return outcome


_WANTS: Final = {
    "key": WANT_KEY,
    "value": WANT_VALUE,
    "headers": WANT_HEADERS,
}

Array = np.ndarray[Any, Any]


def wanted_parts(names: Collection[str]) -> int:
    """The kernel's flags for the parts of a record that it has to copy."""
    return sum(_WANTS.get(name, 0) for name in names)


class Columns:
    """The arrays that the kernel fills for one Arrow batch; unwanted ones are empty."""

    def __init__(self, rows: int) -> None:
        self.offsets, self.times = np.empty(rows, np.int64), np.empty(rows, np.int64)
        self.kinds = np.empty(rows, np.int32)
        self.keys = self.values = self.headers = _NO_BYTES
        self.names = self.contents = _NO_BYTES
        self.header_ends = _NO_ENDS

    def allocate(self, want: int, size: int, headers: int) -> None:
        """Allocate for `size` bytes of records. Memory that is never written costs nothing."""
        rows = len(self.offsets)
        if want & WANT_KEY:
            self.keys = _allocate(rows, size)
        if want & WANT_VALUE:
            self.values = _allocate(rows, size)
        if want & WANT_HEADERS:
            self.names, self.contents = _allocate(headers, size), _allocate(headers, size)
            self.header_ends = np.zeros(rows + 1, np.int32)

    def grow_headers(self) -> int:
        self.names, self.contents = _grow(self.names), _grow(self.contents)
        return len(self.names.there)

    @property
    def all(self) -> tuple[Array, ...]:
        """In the order of the kernel's arguments."""
        return (
            self.offsets,
            self.times,
            self.kinds,
            *self.keys,
            *self.values,
            self.header_ends,
            *self.names[:2],
            *self.contents,
        )


class _Bytes(NamedTuple):
    """A binary column in Arrow's layout, except that validity has one byte per row."""

    ends: Array
    data: Array
    there: Array


_NO_ENDS: Final = np.zeros(1, np.int32)
_NO_BYTES: Final = _Bytes(_NO_ENDS, np.zeros(0, np.uint8), np.zeros(0, np.uint8))


def _allocate(rows: int, size: int) -> _Bytes:
    ends = np.empty(rows + 1, np.int32)
    ends[0] = 0
    return _Bytes(ends, np.empty(size, np.uint8), np.empty(rows, np.uint8))


def _grow(column: _Bytes) -> _Bytes:
    """The column with room for four times the rows, and the same data buffer."""
    rows = len(column.there)
    larger = _Bytes(np.empty(4 * rows + 1, np.int32), column.data, np.empty(4 * rows, np.uint8))
    larger.ends[: rows + 1] = column.ends
    larger.there[:rows] = column.there
    return larger


def _binary(kind: pa.DataType, column: _Bytes, *, rows: int, nulls: int) -> pa.Array:
    validity = None
    if nulls:
        validity = pa.py_buffer(np.packbits(column.there[:rows], bitorder="little"))
    used = int(column.ends[rows])
    buffers = [validity, pa.py_buffer(column.ends[: rows + 1]), pa.py_buffer(column.data[:used])]
    return pa.Array.from_buffers(kind, rows, buffers, null_count=nulls)


def _names(column: _Bytes, headers: int) -> pa.Array:
    """Header names. Invalid UTF-8 becomes U+FFFD, as in Kafka's client."""
    names = _binary(pa.string(), column, rows=headers, nulls=0)
    try:
        names.validate(full=True)
    except pa.ArrowInvalid:
        raw = _binary(pa.binary(), column, rows=headers, nulls=0)
        return pa.array([name.decode(errors="replace") for name in raw.to_pylist()], pa.string())
    return names


def _headers(columns: Columns, state: Array) -> pa.Array:
    """The headers column; null for a record without headers, as in Spark's Kafka source."""
    rows, headers = int(state[ROWS]), int(state[HEADERS])
    contents = _binary(pa.binary(), columns.contents, rows=headers, nulls=int(state[NULL_CONTENTS]))
    pairs = pa.StructArray.from_arrays(
        [_names(columns.names, headers), contents], fields=list(HEADER_TYPE)
    )
    ends = columns.header_ends[: rows + 1]
    there = ends[1:] > ends[:-1]
    nulls = rows - int(np.count_nonzero(there))
    validity = pa.py_buffer(np.packbits(there, bitorder="little")) if nulls else None
    kind, buffers = SCHEMA.field("headers").type, [validity, pa.py_buffer(ends)]
    return pa.Array.from_buffers(kind, rows, buffers, null_count=nulls, children=[pairs])


def _bytes_of(name: str, nulls: int) -> Callable[[Columns, Array], pa.Array]:
    def build(columns: Columns, state: Array) -> pa.Array:
        column: _Bytes = getattr(columns, name)
        return _binary(pa.binary(), column, rows=int(state[ROWS]), nulls=int(state[nulls]))

    return build


BUILDERS: Final[dict[str, Callable[[Columns, Array], pa.Array]]] = {
    "key": _bytes_of("keys", NULL_KEYS),
    "value": _bytes_of("values", NULL_VALUES),
    "headers": _headers,
    "offset": lambda c, s: number_column(pa.int64(), c.offsets, int(s[ROWS])),
    "timestamp": lambda c, s: number_column(SCHEMA.field("timestamp").type, c.times, int(s[ROWS])),
    "timestampType": lambda c, s: number_column(pa.int32(), c.kinds, int(s[ROWS])),
}
