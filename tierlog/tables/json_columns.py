"""Which columns JSON records have: those of the table, and those that new records add. Pure.

| JSON                  | column                                                               |
|-----------------------|----------------------------------------------------------------------|
| a whole number        | `long`; `double` if fractions are among those that make the column   |
| a fraction            | `double`                                                             |
| a string, true, false | `string`, `boolean`                                                  |
| an object, a list     | `struct`, whose fields may be added to, `list`                       |
| null, `[]`, `{}`      | none until there is more                                             |

* A record either fits all columns, or adds what it needs, or is a `Misfit` and adds nothing.
* What a table has is never changed: a fraction does not fit a `long`. Columns of other types that
  somebody gave the table take what Arrow can make of strings and numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.types import NestedField

from tierlog.record_format.errors import InvalidRequest

COLUMNS_MAX: Final = 2000  # of a table, with those that have columns themselves
DEPTH_MAX: Final = 32
FIRST_ID: Final = 10
NAME_MAX: Final = 500  # characters, with those of what it is in
OWN: Final = ("_key", "_partition", "_offset", "_timestamp", "_headers")
"""Columns of a record, beside those of its value."""

_TYPES: Final = (
    "boolean, int, long, float, double, decimal(P,S), string, binary, timestamp and timestamptz"
)
_GIVEN: Final = re.compile(
    r"boolean|int|long|float|double|decimal\(\d+,\d+\)|string|binary|timestamp(tz)?"
)
_LONG: Final = range(-(1 << 63), 1 << 63)
_NAMES: Final = {"int64": "long", "uint64": "long", "int32": "int", "bool": "boolean"}
_VALUES: Final = {
    bool: "a boolean",
    int: "a whole number",
    float: "a fraction",
    str: "a string",
    dict: "an object",
    list: "a list",
}
_TAKEN: Final = {
    bool: ("boolean",),
    int: ("integer", "floating", "decimal"),
    float: ("floating", "decimal"),
    str: ("string", "binary", "timestamp", "decimal"),
}


class Misfit(Exception):
    """Why a record does not fit."""


@dataclass(frozen=True, slots=True)
class Plain:
    arrow: pa.DataType


@dataclass(frozen=True, slots=True)
class Fields:
    by_name: Mapping[str, Kind]


@dataclass(frozen=True, slots=True)
class ListOf:
    element: Kind


Kind = Plain | Fields | ListOf

_WHOLE: Final = Plain(pa.uint64())
"""A `long` that the table does not have yet."""
_NEW: Final = {
    bool: Plain(pa.bool_()),
    int: _WHOLE,
    float: Plain(pa.float64()),
    str: Plain(pa.string()),
}


def given_columns(texts: Sequence[str]) -> list[NestedField]:
    """Columns as `NAME TYPE`, for a table that is not there yet. Raises InvalidRequest."""
    found = []
    for number, text in enumerate(texts):
        name, _, type_ = text.strip().rpartition(" ")
        if not name or not _GIVEN.fullmatch(type_):
            raise InvalidRequest(f"column {text!r}: expected NAME TYPE, with a type of {_TYPES}")
        found.append(NestedField(FIRST_ID + number, name.strip(), type_))
    try:
        given = {one.name: Plain(schema_to_pyarrow(one.field_type)) for one in found}
        learn_columns(Fields({}), dict.fromkeys(given))
        check_names(arrow_type(Fields(given)))
    except Misfit as error:
        raise InvalidRequest(f"column {error}") from None
    if len(given) < len(found):
        raise InvalidRequest(f"columns {', '.join(texts)}: a name is there twice")
    return found


def columns_of(schema: Schema) -> pa.StructType:
    """Those of a table's values, in Arrow, without its own."""
    fields = [
        (one.name, stored_type(schema_to_pyarrow(one.field_type, include_field_ids=False)))
        for one in schema.fields
        if one.name not in OWN
    ]
    return pa.struct(fields)


def stored_type(found: pa.DataType) -> pa.DataType | None:
    """As a table has it, with Arrow's short types; None if it is of nulls, or empty."""
    if pa.types.is_struct(found):
        fields = [(one.name, stored_type(one.type)) for one in found]
        fields = [(name, one) for name, one in fields if one is not None]
        return pa.struct(fields) if fields else None
    if pa.types.is_list(found) or pa.types.is_large_list(found):
        element = stored_type(found.value_type)
        return None if element is None else pa.list_(element)
    if pa.types.is_map(found):
        item = stored_type(found.item_type)
        return None if item is None else pa.map_(stored_type(found.key_type), item)
    if pa.types.is_null(found):
        return None
    return {pa.large_string(): pa.string(), pa.large_binary(): pa.binary()}.get(found, found)


def fields_of(columns: pa.StructType) -> Fields:
    return Fields({one.name: _kind_of(one.type) for one in columns})


def _kind_of(arrow: pa.DataType) -> Kind:
    if pa.types.is_struct(arrow):
        return fields_of(arrow)
    if pa.types.is_list(arrow):
        return ListOf(_kind_of(arrow.value_type))
    return Plain(arrow)


def arrow_type(kind: Kind) -> pa.DataType:
    if isinstance(kind, Fields):
        return pa.struct([(name, arrow_type(one)) for name, one in kind.by_name.items()])
    if isinstance(kind, ListOf):
        return pa.list_(arrow_type(kind.element))
    return pa.int64() if kind is _WHOLE else kind.arrow


def learn_columns(columns: Fields, record: object) -> Fields:
    """Those that there are with this record: the same object if it fits them. Null fits, as one
    without fields. Raises Misfit.
    """
    if record is None:
        return columns
    if not isinstance(record, dict):
        raise Misfit(f"{_VALUES[type(record)]}, not an object")
    check_not_own(record)
    learned = _learn_fields(columns, record, ())
    if learned is not columns:
        try:
            check_names(arrow_type(learned))
        except UnicodeEncodeError as error:
            raise Misfit(f"{error.object[:NAME_MAX]!r}: not the name of a column") from None
    return learned


def check_not_own(names: Iterable[str]) -> None:
    """Raises Misfit."""
    for name in names:
        if name.lower() in OWN:
            raise Misfit(f"{name}: the table has a column of that name for each record's own")


def _learn(kind: Kind | None, value: object, path: tuple[str, ...]) -> Kind | None:
    """None if nothing is known."""
    if value is None:
        return kind
    if len(path) > DEPTH_MAX:
        raise Misfit(f"{_dotted(path[:3])}…: nested more than {DEPTH_MAX} deep")
    if isinstance(value, dict) and (kind is None or isinstance(kind, Fields)):
        learned = _learn_fields(kind or Fields({}), value, path)
        return learned if learned.by_name else kind
    if isinstance(value, list) and (kind is None or isinstance(kind, ListOf)):
        return _learn_list(kind, value, path)
    return _learn_plain(kind, value, path)


def _learn_fields(kind: Fields, value: Mapping[str, object], path: tuple[str, ...]) -> Fields:
    added: dict[str, Kind] = {}
    for name, one in value.items():
        known = kind.by_name.get(name)
        learned = _learn(known, one, (*path, name))
        if learned is not known:
            assert learned is not None
            added[name] = learned
    return Fields({**kind.by_name, **added}) if added else kind


def _learn_list(kind: ListOf | None, value: list[object], path: tuple[str, ...]) -> ListOf | None:
    known = element = None if kind is None else kind.element
    for one in value:
        element = _learn(element, one, (*path, "element"))
    return kind if element is known or element is None else ListOf(element)


def _learn_plain(kind: Kind | None, value: object, path: tuple[str, ...]) -> Kind:
    if isinstance(value, int) and value not in _LONG:
        raise Misfit(f"{_dotted(path)}: {str(value)[:30]} is too large for a long")
    if kind is None:
        return _NEW[type(value)]
    if kind is _WHOLE and isinstance(value, float):
        return _NEW[float]
    if isinstance(kind, Plain) and _takes(kind.arrow, value):
        return kind
    raise Misfit(f"{_dotted(path)}: {_VALUES[type(value)]}, where the column is {_name(kind)}")


def _takes(kind: pa.DataType, value: object) -> bool:
    """Whether Arrow makes it of some values of this type, at least."""
    return any(getattr(pa.types, f"is_{one}")(kind) for one in _TAKEN.get(type(value), ()))


def check_names(columns: pa.StructType) -> None:
    """Engines tell names apart by more than case, and paths by their dots. Raises Misfit."""
    seen: dict[str, str] = {}
    for name in _names(columns, ""):
        if not name.isprintable() or name.endswith(".") or len(name) > NAME_MAX:
            raise Misfit(f"{name[:NAME_MAX]!r}: not the name of a column")
        other = seen.setdefault(name.lower(), name)
        if len(seen) > COLUMNS_MAX:
            raise Misfit(f"{name}: a table has at most {COLUMNS_MAX} columns")
        if other is not name:
            raise Misfit(f"{name}: the name of another column, {other}, but for case or dots")


def _names(columns: pa.DataType, path: str) -> Iterator[str]:
    children: list[tuple[str, pa.DataType]] = []
    if pa.types.is_struct(columns):
        children = [(one.name, one.type) for one in columns]
    elif pa.types.is_list(columns):
        children = [("element", columns.value_type)]
    elif pa.types.is_map(columns):
        children = [("key", columns.key_type), ("value", columns.item_type)]
    for name, one in children:
        full = f"{path}.{name}" if path else name or "."
        yield full
        yield from _names(one, full)


def _dotted(path: tuple[str, ...]) -> str:
    return ".".join(path)


def _name(kind: Kind) -> str:
    if isinstance(kind, Plain):
        return _NAMES.get(str(kind.arrow), str(kind.arrow))
    return "a struct" if isinstance(kind, Fields) else "a list"
