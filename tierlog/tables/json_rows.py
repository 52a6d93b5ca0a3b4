"""Makes columns of records' JSON values, a batch at a time, by Arrow.

* Arrow is given the columns' types. A batch that it cannot read with them, or that has more fields,
  is looked at record by record: that finds new columns, and which records do not fit. Arrow then
  reads the others. What it refuses all the same is found by halving, and does not fit either.
* Each value stands in an object of its own, `{"v":…}`. Text of JSON ends where it ends, so as many
  rows as values, each with `v` alone, are the values' rows: a value that holds two objects, or
  half of one, makes another number of rows, another field, or an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tierlog.tables.json_columns import Fields, Misfit, arrow_type, learn_columns

BATCH_BYTES: Final = 16 << 20

_OPENINGS_MAX: Final = 500  # Arrow fails at a depth of thousands, by ending the process
_BEFORE, _AFTER, _JOINED = pa.scalar(b'{"v":'), pa.scalar(b"}\n"), pa.scalar(b"")


class Decoded(NamedTuple):
    """`rows` are those of the values that fit, in order; `reasons` has the places of the others."""

    columns: Fields
    rows: pa.StructArray
    reasons: dict[int, str]


def decode_values(values: pa.BinaryArray, columns: Fields) -> Decoded:
    """With the columns that there are with these values. Null is a row of nulls."""
    type_ = arrow_type(columns)
    try:
        rows = _read(values, type_)
    except pa.ArrowInvalid:
        return _decode_each(values, columns)
    return Decoded(columns, rows, {})


def _read(values: pa.BinaryArray, type_: pa.DataType) -> pa.StructArray:
    """Raises ArrowInvalid, also of fields that are not in `type_` but have a type."""
    text = values.cast(pa.string())  # checks that it is UTF-8, which Arrow's JSON does not
    openings = pc.add(pc.count_substring(text, "{"), pc.count_substring(text, "["))
    if (pc.max(openings).as_py() or 0) > _OPENINGS_MAX:
        raise pa.ArrowInvalid("may be nested deeply")
    rows = _parse(values, type_, "infer")
    if rows.type == type_:
        return rows
    if _adds(rows.type, type_):
        raise pa.ArrowInvalid("new fields")
    return _parse(values, type_, "ignore")


def _parse(values: pa.BinaryArray, type_: pa.DataType, unexpected: str) -> pa.StructArray:
    objects = pc.binary_join_element_wise(
        _BEFORE, values.fill_null(b"null"), _AFTER, _JOINED, null_handling="skip"
    )
    text = objects.buffers()[2]
    found = pj.read_json(
        pa.BufferReader(text),
        read_options=pj.ReadOptions(use_threads=False, block_size=text.size + 1),
        parse_options=pj.ParseOptions(
            explicit_schema=pa.schema([("v", type_)]), unexpected_field_behavior=unexpected
        ),
    )
    if found.num_rows != len(values) or found.num_columns != 1:
        raise pa.ArrowInvalid("not one object a value")
    (rows,) = found.column(0).chunks
    return rows


def _adds(found: pa.DataType, known: pa.DataType) -> bool:
    """Whether there is more in it than nulls and what is empty."""
    if pa.types.is_struct(found):
        fields = {one.name: one.type for one in known} if pa.types.is_struct(known) else {}
        return any(_adds(one.type, fields.get(one.name, pa.null())) for one in found)
    if pa.types.is_list(found):
        return _adds(found.value_type, known.value_type if pa.types.is_list(known) else pa.null())
    return not pa.types.is_null(found) and pa.types.is_null(known)


def _decode_each(values: pa.BinaryArray, columns: Fields) -> Decoded:
    reasons: dict[int, str] = {}
    for place, value in enumerate(values):
        if value.is_valid:
            try:
                columns = learn_columns(columns, _object_of(value.as_py()))
            except Misfit as error:
                reasons[place] = str(error)
    places = [place for place in range(len(values)) if place not in reasons]
    rows, type_ = [], arrow_type(columns)
    for read in _read_parts(values.take(pa.array(places, pa.int64())), places, type_):
        if isinstance(read, pa.StructArray):
            rows.append(read)
        else:
            reasons.update([read])
    return Decoded(columns, pa.concat_arrays(rows or [pa.array([], type_)]), reasons)


def _object_of(value: bytes) -> object:
    try:
        return json.loads(value.decode())
    except UnicodeDecodeError as error:
        raise Misfit(f"not UTF-8: {error}") from None
    except ValueError as error:
        raise Misfit(f"not JSON: {error}") from None
    except RecursionError:
        raise Misfit("nested too deep") from None


def _read_parts(
    values: pa.BinaryArray, places: list[int], type_: pa.DataType
) -> Iterator[pa.StructArray | tuple[int, str]]:
    """In order; a value that cannot be read is its place and why."""
    if not places:
        return
    try:
        yield _parse(values, type_, "ignore")
    except pa.ArrowInvalid as error:
        if len(places) == 1:
            yield places[0], str(error).replace("Column(/v/", "Column(/").removesuffix(" in row 0")
            return
        half = len(places) // 2
        yield from _read_parts(values.slice(0, half), places[:half], type_)
        yield from _read_parts(values.slice(half), places[half:], type_)
