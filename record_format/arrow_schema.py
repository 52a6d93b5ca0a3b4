"""The columns of records: their names and types, and those that are known without reading records.

It needs no compiled kernel, which takes a third of a second to load: counts, and what the chunk
tables tell, do without.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import pyarrow as pa

HEADER_TYPE: Final = pa.struct([("key", pa.string()), ("value", pa.binary())])
SCHEMA: Final = pa.schema(
    [
        ("key", pa.binary()),
        ("value", pa.binary()),
        ("topic", pa.string()),
        ("partition", pa.int32()),
        ("offset", pa.int64()),
        ("timestamp", pa.timestamp("us", "UTC")),
        ("timestampType", pa.int32()),
        ("headers", pa.list_(pa.field("element", HEADER_TYPE))),
    ]
)
COLUMNS: Final[tuple[str, ...]] = tuple(SCHEMA.names)


def schema_of(
    names: Iterable[str], types: Mapping[str, pa.DataType] = MappingProxyType({})
) -> pa.Schema:
    """These columns, of these types where they are not as usual."""
    fields = [SCHEMA.field(name) for name in names]
    return pa.schema([one.with_type(types.get(one.name, one.type)) for one in fields])


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
        columns["partition"] = number_column(pa.int32(), numbers, rows)
    return columns


def offset_column(first: int, rows: int) -> pa.Array:
    """Consecutive offsets."""
    return number_column(pa.int64(), np.arange(first, first + rows, dtype=np.int64), rows)


def number_column(kind: pa.DataType, values: np.ndarray[Any, Any], rows: int) -> pa.Array:
    return pa.Array.from_buffers(kind, rows, [None, pa.py_buffer(values[:rows])], null_count=0)


def batch_of(arrays: Sequence[pa.Array], schema: pa.Schema, *, rows: int) -> pa.RecordBatch:
    """A record batch of these columns, of which there may be none."""
    if not arrays:
        return pa.RecordBatch.from_struct_array(
            pa.StructArray.from_buffers(pa.struct([]), rows, [None])
        )
    return pa.RecordBatch.from_arrays(arrays, schema=schema)
