"""The columns that the kernel fills, and their conversion to Arrow arrays.

* No memory is allocated for unwanted parts of records.
* Arrow arrays share the kernel's buffers; nothing is copied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from tierlog.record_format import arrow_kernel as kernel

_HEADER_TYPE: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.field("element", _HEADER_TYPE))),
    ]
)
COLUMNS: Final[tuple[str, ...]] = tuple(SCHEMA.names)

_WANTS: Final = {
    "key": kernel.WANT_KEY,
    "value": kernel.WANT_VALUE,
    "headers": kernel.WANT_HEADERS,
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
        if want & kernel.WANT_KEY:
            self.keys = _allocate(rows, size)
        if want & kernel.WANT_VALUE:
            self.values = _allocate(rows, size)
        if want & kernel.WANT_HEADERS:
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


def constant_columns(
    names: Collection[str], *, topic: str, partition: int, rows: int
) -> dict[str, pa.Array]:
    """The topic and partition columns, built once and sliced for each batch.

    Built from buffers, because pyarrow's scalars import pandas if it is installed (40 MB).
    """
    columns: dict[str, pa.Array] = {}
    if "topic" in names:
        name = topic.encode()
        ends = np.arange(rows + 1, dtype=np.int32) * np.int32(len(name))
        buffers = [None, pa.py_buffer(ends), pa.py_buffer(name * rows)]
        columns["topic"] = pa.Array.from_buffers(pa.string(), rows, buffers, null_count=0)
    if "partition" in names:
        numbers = np.full(rows, partition, np.int32)
        columns["partition"] = _numbers(pa.int32(), numbers, rows)
    return columns


def _numbers(kind: pa.DataType, values: Array, rows: int) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(values[:rows])], null_count=0)


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
    rows, headers = int(state[kernel.ROWS]), int(state[kernel.HEADERS])
    contents = _binary(
        pa.binary(), columns.contents, rows=headers, nulls=int(state[kernel.NULL_CONTENTS])
    )
    pairs = pa.StructArray.from_arrays(
        [_names(columns.names, headers), contents], fields=list(_HEADER_TYPE)
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
        return _binary(pa.binary(), column, rows=int(state[kernel.ROWS]), nulls=int(state[nulls]))

    return build


BUILDERS: Final[dict[str, Callable[[Columns, Array], pa.Array]]] = {
    "key": _bytes_of("keys", kernel.NULL_KEYS),
    "value": _bytes_of("values", kernel.NULL_VALUES),
    "headers": _headers,
    "offset": lambda c, s: _numbers(pa.int64(), c.offsets, int(s[kernel.ROWS])),
    "timestamp": lambda c, s: _numbers(
        SCHEMA.field("timestamp").type, c.times, int(s[kernel.ROWS])
    ),
    "timestampType": lambda c, s: _numbers(pa.int32(), c.kinds, int(s[kernel.ROWS])),
}
