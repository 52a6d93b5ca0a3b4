"""Keys and values decoded: `keySchema` and `valueSchema` say by which schema they are read.

* A value begins with the id of the schema that it was written by, as serializers of Confluent's
  registry write it: a zero byte and four bytes. All are read as the reader's schema says, so that a
  column has one type.
* Whole batches are decoded by native code: no value becomes a Python object.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tierlog.record_format.errors import (
    ColumnsTooLarge,
    InvalidOption,
    UndecodableValue,
    UnknownSchema,
)
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_state import Source
from tierlog.spark_reader.options import Reading, ReadOptions
from tierlog.spark_reader.value_schemas import Schemas

if TYPE_CHECKING:
    from tierlog.record_format.avro_columns import AvroColumns
    from tierlog.record_format.json_columns import JsonColumns
    from tierlog.record_format.proto_columns import ProtoColumns

_NULL: Final = -1


def find_readings(options: ReadOptions) -> ReadOptions:
    """The same with `readings`, if keys or values are wanted as columns: which schemas they are
    read by is decided now. Raises InvalidOption, UnknownSchema, and what the registry raises.
    """
    return options.with_readings({name: _reading(options, name) for name in options.wanted})


def _reading(options: ReadOptions, column: str) -> Reading:
    wanted, message = options.wanted[column]
    schemas = _schemas(options)
    if isinstance(wanted, int):
        schema_id, source = wanted, schemas.of_id(wanted)
    else:
        topics = list(options.choice.named)
        if len(topics) != 1:
            given = f"there are {len(topics)}" if topics else "subscribePattern names none"
            raise InvalidOption(
                f"option {column}Schema: {wanted} is of one topic, and {given}; give a schema's id"
            )
        schema_id, source = schemas.latest(f"{topics[0]}-{column}")
    if message is not None and source.kind != "PROTOBUF":
        raise InvalidOption(
            f"option {column}Message: schema {schema_id} is of type {source.kind}; messages are of "
            "PROTOBUF"
        )
    try:
        return Reading(schema_id, source, columns_of_source(source, message).type)
    except InvalidOption as error:
        raise InvalidOption(f"option {column}Schema: {error}") from error


def _schemas(options: ReadOptions) -> Schemas:
    return Schemas(options.access, is_cold=options.tier == "cold")


def columns_of_source(
    source: Source, message: str | None = None
) -> AvroColumns | JsonColumns | ProtoColumns:
    """Raises InvalidOption if it has none. `message`: of a Protobuf file, by default the first."""
    try:
        return _columns_of_source(source, message)
    except RecursionError as error:
        raise InvalidOption("the schema is nested too deep for columns: read bytes") from error


def _columns_of_source(
    source: Source, message: str | None
) -> AvroColumns | JsonColumns | ProtoColumns:
    # Imported here: kernels take a second to load, and few reads need more than one of them.
    if source.kind == "JSON":
        from tierlog.record_format.json_columns import JsonColumns

        return JsonColumns(source.text, source.dependencies)
    if source.kind == "PROTOBUF":
        from tierlog.record_format.proto_columns import ProtoColumns

        return ProtoColumns(source.text, source.dependencies, message)
    from tierlog.record_format.avro_columns import AvroColumns

    return AvroColumns(source.text, source.dependencies)


class Heads(NamedTuple):
    """Of each value: whether it is there, whether it has a head, and the id in that."""

    there: np.ndarray[Any, Any]
    headed: np.ndarray[Any, Any]
    ids: np.ndarray[Any, Any]


class ValueDecoder:
    """Decodes the keys, or the values, of one partition's batches. Not thread-safe."""

    def __init__(self, options: ReadOptions, column: str, where: str) -> None:
        self._reading, self._column, self._where = options.readings[column], column, where
        self._permissive = options.mode == "permissive"
        # JSON says itself what it is: it may be without a head, but not where ids are asked for.
        self._needs_head = options.wanted[column].schema == "registry"
        self._schemas = _schemas(options)
        self._columns: Any = columns_of_source(self._reading.source, options.wanted[column].message)
        self._root = lru_cache(None)(self._find_root)

    def decode(self, values: pa.Array, offsets: pa.Array) -> pa.Array:
        """Raises UndecodableValue, ColumnsTooLarge of more than one value, and what the registry
        raises.
        """
        heads = heads_of(values)
        try:
            if self._reading.source.kind == "JSON":
                return self._decode_json(values, heads)
            return self._decode_by_id(values, heads)
        except UndecodableValue as error:
            if isinstance(error, ColumnsTooLarge):
                if len(values) > 1:
                    raise
                if self._permissive:
                    return pa.nulls(1, self._reading.type)
            schema_id = int(heads.ids[error.row]) if heads.headed[error.row] else None
            by = f"schema {schema_id}: " if schema_id is not None else ""
            raise UndecodableValue(
                f"the {self._column} does not decode: {by}{error.detail} (option mode=PERMISSIVE "
                f"reads such {self._column}s as null)",
                file=self._where,
                offset=offsets[error.row].as_py(),
                row=error.row,
            ) from error

    def _decode_json(self, values: pa.Array, heads: Heads) -> pa.Array:
        body = pc.binary_slice(values, HEAD_BYTES)
        if not heads.headed[heads.there].all():
            if self._needs_head:
                self._refuse_headless(heads)
                values = pc.if_else(pa.array(heads.headed), values, pa.scalar(None, pa.binary()))
            body = pc.if_else(pa.array(heads.headed), body, values)
        return self._columns.decode(body, permissive=self._permissive)

    def _decode_by_id(self, values: pa.Array, heads: Heads) -> pa.Array:
        if not heads.headed[heads.there].all():
            self._refuse_headless(heads)
        roots = np.full(len(values), _NULL, np.int64)
        for schema_id in np.unique(heads.ids[heads.headed]).tolist():
            rows = heads.headed & (heads.ids == schema_id)
            root, problem = self._root(schema_id)
            if problem and not self._permissive:
                raise UndecodableValue(problem, row=int(np.flatnonzero(rows)[0]))
            roots[rows] = root
        return self._columns.decode(values, roots, skipped=HEAD_BYTES, permissive=self._permissive)

    def _refuse_headless(self, heads: Heads) -> None:
        if not self._permissive:
            row = int(np.flatnonzero(heads.there & ~heads.headed)[0])
            raise UndecodableValue("it does not begin with the id of a schema", row=row)

    def _find_root(self, schema_id: int) -> tuple[int, str]:
        """How to read what was written by this schema, or why that is not possible."""
        kind = self._reading.source.kind
        try:
            source = self._schemas.of_id(schema_id)
            if source.kind != kind:
                return _NULL, f"it is of type {source.kind}, where {kind} is read"
            return self._columns.add_writer(source.text, source.dependencies), ""
        except (UnknownSchema, InvalidOption) as error:
            return _NULL, str(error)


def heads_of(values: pa.Array) -> Heads:
    _, ends, data = values.buffers()
    ends = np.frombuffer(ends, np.int32)[values.offset : values.offset + len(values) + 1]
    content = np.frombuffer(data or b"", np.uint8)
    there = np.asarray(values.is_valid())
    headed = there & (ends[1:] - ends[:-1] >= HEAD_BYTES)
    starts = ends[:-1][headed]
    headed[headed] = content[starts] == 0
    starts = ends[:-1][headed]
    ids = np.zeros(len(values), np.int64)
    for index in range(1, HEAD_BYTES):
        ids[headed] = ids[headed] << 8 | content[starts + index]
    return Heads(there, headed, ids)
