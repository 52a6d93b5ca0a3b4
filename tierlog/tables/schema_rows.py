"""Makes columns of records' values by the schemas that they were written by.

* A value begins with the id of its schema (`spark_reader/values.py`), and in Protobuf with where in
  the file its message is. It is decoded by that schema, as that message, and by no other, so that
  nothing of it is left out and a row is the same whenever it is added. Columns that it does not
  have are null.
* A schema that is met for the first time adds its columns, and widens those that Iceberg can. A
  new table has those of the subject's latest version first, which may be wider than older ones.
* What does not decode, and all of a schema that the columns cannot take, does not fit.
* In the bucket alone a schema may be missing because it is not there yet: that ends the run.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import Final, NamedTuple, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tierlog.record_format.columns import check_room
from tierlog.record_format.errors import (
    ColumnsTooLarge,
    InvalidOption,
    RetriableError,
    UndecodableValue,
    UnknownSchema,
)
from tierlog.record_format.json_columns import JsonColumns
from tierlog.record_format.proto_files import INDEXES_BYTES, ProtoFile, file_of, message_indexes
from tierlog.record_format.record_walk import HEAD_BYTES
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.schema_state import Source
from tierlog.spark_reader.options import ReadOptions
from tierlog.spark_reader.value_schemas import Schemas
from tierlog.spark_reader.values import Heads, columns_of_source, heads_of
from tierlog.tables.json_columns import Misfit, check_names, check_not_own, stored_type

_VALUE: Final = "value"
"""The column of values that are no records, and have no names."""
T = TypeVar("T")
_TAKES: Final[Mapping[pa.DataType, tuple[pa.DataType, ...]]] = {
    pa.int64(): (pa.int32(),),
    pa.float64(): (pa.float32(), pa.int32(), pa.int64()),
}
"""Whole numbers that a `double` cannot say do not fit."""
_WIDENED: Final = ((pa.int32(), pa.int64()), (pa.float32(), pa.float64()))


class SchemaNotUploaded(RetriableError):
    """The bucket does not have a schema of `_schemas` yet."""


class Rows(NamedTuple):
    """`rows` are those of the values that fit, in order; `reasons` has the places of the others.
    `added` is the type of the columns with these values, None if there were those already.
    """

    added: pa.StructType | None
    rows: pa.StructArray
    reasons: dict[int, str]


class SchemaRows:
    """Not thread-safe. May be pickled before it is used."""

    def __init__(self, options: ReadOptions, *, is_new: bool) -> None:
        """Of a topic; `is_new`: the table has no records yet."""
        self._schemas = Schemas(options.access, is_cold=options.tier == "cold")
        (self._topic,) = options.choice.named
        self._is_cold, self._is_new = options.tier == "cold", is_new
        self._sources: dict[int, Source | Misfit] = {}
        self._files: dict[int, ProtoFile] = {}
        self._writers: dict[tuple[int, str | None], _Writer | Misfit] = {}

    def decode(self, values: pa.BinaryArray, known: pa.StructType) -> Rows:
        """Raises SchemaNotUploaded, ColumnsTooLarge, and what the registry raises."""
        type_ = known
        if self._is_new:
            with suppress(Misfit):
                type_ = _with_columns(type_, self._latest)
        heads, reasons = heads_of(values), dict[int, str]()
        headless = np.flatnonzero(heads.there & ~heads.headed).tolist()
        reasons.update(dict.fromkeys(headless, "it does not begin with the id of a schema"))
        of_writers = []
        for schema_id, message, places in self._by_writer(values, heads, reasons):
            try:
                writer = self._writer(schema_id, message)
                type_ = _with_columns(type_, writer.type)
                of_writers.append((places, writer))
            except Misfit as error:
                reasons.update(dict.fromkeys(places.tolist(), f"schema {schema_id}: {error}"))
        found = [(np.flatnonzero(~heads.there), None), *of_writers]
        rows = _in_order(list(_read(values, found, type_, reasons)), type_)
        return Rows(None if type_ == known else type_, rows, reasons)

    def _by_writer(
        self, values: pa.BinaryArray, heads: Heads, reasons: dict[int, str]
    ) -> Iterator[tuple[int, str | None, np.ndarray]]:
        """The places of each schema's values, and in Protobuf of each message's; a place without a
        message is added to the reasons.
        """
        for schema_id in np.unique(heads.ids[heads.headed]).tolist():
            places = np.flatnonzero(heads.headed & (heads.ids == schema_id))
            self._source(schema_id)
            if (file := self._files.get(schema_id)) is None:
                yield schema_id, None, places
                continue
            of_messages: dict[str, list[int]] = {}
            names = _messages_of(values, places, file)
            for place, name in zip(places.tolist(), names, strict=True):
                if isinstance(name, Malformed):
                    reasons[place] = f"schema {schema_id}: {name}"
                else:
                    of_messages.setdefault(name, []).append(place)
            for name, found in of_messages.items():
                yield schema_id, name, np.array(found)

    def _writer(self, schema_id: int, message: str | None) -> _Writer:
        """Raises Misfit."""
        key = schema_id, message
        if key not in self._writers:
            try:
                self._writers[key] = _Writer(schema_id, _fit(self._source(schema_id)), message)
            except Misfit as error:
                self._writers[key] = error
        return _fit(self._writers[key])

    def _source(self, schema_id: int) -> Source | Misfit:
        if schema_id not in self._sources:
            self._sources[schema_id] = self._find_source(schema_id)
        return self._sources[schema_id]

    def _find_source(self, schema_id: int) -> Source | Misfit:
        try:
            source = self._schemas.of_id(schema_id)
            if source.kind == "PROTOBUF":
                self._files[schema_id] = file_of(source.text, source.dependencies)
            return source
        except InvalidOption as error:
            return Misfit(str(error))
        except UnknownSchema as error:
            if self._is_cold:
                raise SchemaNotUploaded(
                    f"{self._topic}: {error}; until it is uploaded, read with the broker"
                ) from error
            return Misfit("the registry does not have it")

    @cached_property
    def _latest(self) -> pa.StructType:
        """Columns of the subject's latest version; none if there is no such."""
        with suppress(UnknownSchema, Misfit):
            return _Writer(*self._schemas.latest(f"{self._topic}-value")).type
        return pa.struct([])


class _Writer:
    """Reads the values of one schema."""

    def __init__(self, schema_id: int, source: Source, message: str | None = None) -> None:
        """`message`: of Protobuf. Raises Misfit if the schema has no columns."""
        self.schema_id = schema_id
        try:
            self._columns = columns_of_source(source, message)
            if not isinstance(self._columns, JsonColumns):
                self._root = self._columns.add_writer(source.text, source.dependencies)
        except InvalidOption as error:
            raise Misfit(str(error)) from None
        self._is_record = pa.types.is_struct(self._columns.type)
        whole = self._columns.type if self._is_record else pa.struct([(_VALUE, self._columns.type)])
        self.type = stored_type(whole) or pa.struct([])
        check_not_own(self.type.names)
        check_names(self.type)

    def read(self, values: pa.BinaryArray) -> pa.StructArray:
        """Raises UndecodableValue."""
        if not isinstance(self._columns, JsonColumns):
            roots = np.full(len(values), self._root, np.int64)
            rows = self._columns.decode(values, roots, skipped=HEAD_BYTES, permissive=False)
        else:
            rows = self._columns.decode(pc.binary_slice(values, HEAD_BYTES), permissive=False)
        return rows if self._is_record else pa.StructArray.from_arrays([rows], names=[_VALUE])


def _fit(found: T | Misfit) -> T:
    """Raises Misfit."""
    if isinstance(found, Misfit):
        raise found
    return found


def _messages_of(
    values: pa.BinaryArray, places: np.ndarray, file: ProtoFile
) -> Iterator[str | Malformed]:
    """The names of the messages that these values are, by the indexes that each begins with."""

    @lru_cache(1)  # most have the same, a zero
    def name_of(encoded: bytes) -> str:
        return str(file.message_at(message_indexes(encoded)[0]).full_name)

    heads = pc.binary_slice(values.take(pa.array(places)), HEAD_BYTES, HEAD_BYTES + INDEXES_BYTES)
    for one in heads.to_pylist():
        try:
            yield name_of(one[: 1 if one[:1] == b"\0" else None])
        except Malformed as error:
            yield error


def _read(
    values: pa.BinaryArray,
    found: list[tuple[np.ndarray, _Writer | None]],
    type_: pa.StructType,
    reasons: dict[int, str],
) -> Iterator[tuple[np.ndarray, pa.StructArray]]:
    """Places and rows of what fits; of what does not, the reason is added."""
    for places, writer in found:
        if writer is None:
            yield places, pa.nulls(len(places), type_)
            continue
        yield from _read_each(values.take(pa.array(places)), places, writer, type_, reasons)


def _read_each(
    values: pa.BinaryArray,
    places: np.ndarray,
    writer: _Writer,
    type_: pa.StructType,
    reasons: dict[int, str],
) -> Iterator[tuple[np.ndarray, pa.StructArray]]:
    """By halves, until what does not fit is alone."""
    try:
        rows = writer.read(values)
        check_room(type_, rows=len(rows), items=_items_in(rows))
        yield places, rows.cast(type_)
    except ColumnsTooLarge:
        raise
    except (UndecodableValue, pa.ArrowInvalid) as error:
        if len(places) == 1:
            text = error.detail if isinstance(error, UndecodableValue) else str(error)
            reasons[int(places[0])] = f"schema {writer.schema_id}: {text}"
            return
        half = len(places) // 2
        yield from _read_each(values[:half], places[:half], writer, type_, reasons)
        yield from _read_each(values[half:], places[half:], writer, type_, reasons)


def _items_in(rows: pa.Array) -> int:
    """How many items all lists have; each has a row of all that the table's list has."""
    if pa.types.is_struct(rows.type):
        return sum(_items_in(rows.field(place)) for place in range(rows.type.num_fields))
    if not (pa.types.is_list(rows.type) or pa.types.is_map(rows.type)):
        return 0
    inner = rows.items if pa.types.is_map(rows.type) else rows.values
    return len(inner) + _items_in(inner)


def _in_order(
    parts: list[tuple[np.ndarray, pa.StructArray]], type_: pa.StructType
) -> pa.StructArray:
    rows = pa.concat_arrays([rows for _, rows in parts] or [pa.nulls(0, type_)])
    if len(parts) < 2:
        return rows
    order = np.argsort(np.concatenate([places for places, _ in parts]), kind="stable")
    return rows.take(pa.array(order))


# --- columns --------------------------------------------------------------------------------------


def join_columns(found: Sequence[pa.StructType]) -> pa.StructType:
    """Of what was learned apart, in the log's order: the first to have a column says its type. What
    does not agree with that is left out as a whole, to be judged anew.
    """
    joined = found[0]
    for one in found[1:]:
        with suppress(Misfit):
            joined = _with_columns(joined, one)
    return joined


def _with_columns(known: pa.StructType, more: pa.StructType) -> pa.StructType:
    """Raises Misfit."""
    found = _merged(known, more, "")
    if found != known:
        check_names(found)
    return found


def _merged(known: pa.DataType, more: pa.DataType, path: str) -> pa.DataType:
    """The type that takes both, if Iceberg makes it of `known`. Raises Misfit."""
    if known == more or more in _TAKES.get(known, ()):
        return known
    if pa.types.is_struct(known) and pa.types.is_struct(more):
        fields = {one.name: one.type for one in known}
        for one in more:
            below = f"{path}.{one.name}" if path else one.name
            has = fields.get(one.name)
            fields[one.name] = one.type if has is None else _merged(has, one.type, below)
        return pa.struct(list(fields.items()))
    if pa.types.is_list(known) and pa.types.is_list(more):
        return pa.list_(_merged(known.value_type, more.value_type, f"{path}.element"))
    if pa.types.is_map(known) and pa.types.is_map(more) and known.key_type == more.key_type:
        item = _merged(known.item_type, more.item_type, f"{path}.value")
        return pa.map_(known.key_type, item)
    if (known, more) in _WIDENED:
        return more
    if pa.types.is_decimal(known) and pa.types.is_decimal(more) and known.scale == more.scale:
        return pa.decimal128(max(known.precision, more.precision), known.scale)
    raise Misfit(f"{path}: {_name(more)}, where the column is {_name(known)}")


def _name(found: pa.DataType) -> str:
    """Iceberg's."""
    for nested in ("struct", "list", "map"):
        if getattr(pa.types, f"is_{nested}")(found):
            return f"a {nested}"
    return {"int64": "long", "int32": "int", "bool": "boolean"}.get(str(found), str(found))
