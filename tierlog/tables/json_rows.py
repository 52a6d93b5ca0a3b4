"""Makes columns of records' JSON values, a batch at a time, by Arrow.

* Arrow is given the columns' types. A batch that it cannot read with them, or that has more fields,
  is looked at record by record: that finds new columns, and which records do not fit. Arrow then
  reads the others. What it refuses all the same is found by halving, and does not fit either.
* Arrow is never asked for the types of fields that are not known: it would make a column of as many
  rows as the batch has for each name, and call itself for each level.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import pyarrow as pa

from tierlog.record_format.json_columns import load_json, parse_json
from tierlog.tables.json_columns import Fields, Misfit, arrow_type, learn_columns

BATCH_BYTES: Final = 16 << 20


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
        return Decoded(columns, parse_json(values, arrow_type(columns), unexpected="error"), {})
    except pa.ArrowInvalid:
        return _decode_each(values, columns)


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
