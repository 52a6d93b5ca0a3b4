"""Makes columns of records' JSON values, a batch at a time, by Arrow.

* Arrow is given the columns' types. A batch that it cannot read with them, or that has more fields,
  is looked at record by record: that finds new columns, and which records do not fit. Arrow then
  reads the others. What it refuses all the same is found by halving, and does not fit either.
* Fields that have no column may be of nulls alone: then there is nothing new. Arrow tells, and for
  that makes a column of each name, with a row for each object, and calls itself for each level: it
  is given no more at once than bounds both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from tierlog.record_format.json_columns import load_json, parse_json
from tierlog.tables.json_columns import Fields, Misfit, arrow_type, learn_columns

BATCH_BYTES: Final = 16 << 20
_PART: Final = 500
_CELLS_MAX: Final = (
    16 << 20
)  # rows of columns, of 8 bytes; and a depth of 4,000, a third of too much


class Decoded(NamedTuple):
    """`rows` are those of the values that fit, in order; `reasons` has the places of the others."""

    columns: Fields
    rows: pa.StructArray
    reasons: dict[int, str]


def decode_values(values: pa.BinaryArray, columns: Fields) -> Decoded:
    """With the columns that there are with these values. Null is a row of nulls. Raises
    ColumnsTooLarge.
    """
    try:
        return Decoded(columns, _read(values, arrow_type(columns)), {})
    except pa.ArrowInvalid:
        return _decode_each(values, columns)


def _read(values: pa.BinaryArray, type_: pa.StructType) -> pa.StructArray:
    """Raises ColumnsTooLarge, and ArrowInvalid, also of fields that have a type and no column."""
    try:
        return parse_json(values, type_, unexpected="error")
    except pa.ArrowInvalid:
        parts = (values.slice(at, _PART) for at in range(0, len(values), _PART))
        if any(_has_new_columns(one, type_) for one in parts):
            raise
        return parse_json(values, type_, unexpected="ignore")


def _has_new_columns(values: pa.BinaryArray, type_: pa.StructType) -> bool:
    """True also if it would take too much to tell. Raises ArrowInvalid."""
    text = b"".join(values.drop_null().to_pylist())
    openings = text.count(b"{") + text.count(b"[")
    if openings * (openings + text.count(b":")) > _CELLS_MAX:
        half = len(values) // 2
        parts = (values.slice(0, half), values.slice(half))
        return not half or any(_has_new_columns(one, type_) for one in parts)
    return _adds(parse_json(values, type_, unexpected="infer").type, type_)


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
                columns = learn_columns(columns, load_json(value.as_py()))
            except (Misfit, pa.ArrowInvalid) as error:
                reasons[place] = str(error)
    places = [place for place in range(len(values)) if place not in reasons]
    rows, type_ = [], arrow_type(columns)
    for read in _read_parts(values.take(pa.array(places, pa.int64())), places, type_):
        if isinstance(read, pa.StructArray):
            rows.append(read)
        else:
            reasons.update([read])
    return Decoded(columns, pa.concat_arrays(rows or [pa.array([], type_)]), reasons)


def _read_parts(
    values: pa.BinaryArray, places: list[int], type_: pa.DataType
) -> Iterator[pa.StructArray | tuple[int, str]]:
    """In order; a value that cannot be read is its place and why."""
    if not places:
        return
    try:
        yield parse_json(values, type_, unexpected="ignore")
    except pa.ArrowInvalid as error:
        if len(places) == 1:
            yield places[0], str(error).replace("Column(/v/", "Column(/").removesuffix(" in row 0")
            return
        half = len(places) // 2
        yield from _read_parts(values.slice(0, half), places[:half], type_)
        yield from _read_parts(values.slice(half), places[half:], type_)
