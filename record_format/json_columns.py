"""JSON values as Arrow columns: a JSON Schema becomes a type, and Arrow's own parser reads them.

* What the schema gives no one type has no column: a property that may be an object or text, an
  object whose properties are not named. So have properties that the schema does not name.
* A value is what the reader's schema makes of it, whichever schema it was written by: JSON says
  itself what it is.
* Memory is bounded as that of other columns is. Arrow cannot be asked how much it will take, so a
  batch that may take more, by its text, is not given to it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tierlog.record_format.columns import check_columns, check_room
from tierlog.record_format.errors import ColumnsTooLarge, InvalidOption, UndecodableValue
from tierlog.record_format.workarounds import decode_json

_PLAIN: Final[Mapping[str, pa.DataType]] = {
    "integer": pa.int64(),
    "number": pa.float64(),
    "string": pa.string(),
    "boolean": pa.bool_(),
}


class JsonColumns:
    """Decodes values into columns of a reader's schema."""

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """Raises InvalidOption if the schema has no columns."""
        self._documents: dict[str, Any] = {name: json.loads(one) for name, one in dependencies}
        self._documents[""] = document = json.loads(text)
        self._count = 0
        found = self._type(document, "", ())
        if found is None:
            raise InvalidOption(
                "the JSON Schema names no one type with columns for a value: read bytes"
            )
        self.type = found

    def decode(self, values: pa.Array, *, permissive: bool) -> pa.Array:
        """The columns of binary values. What does not decode is null if `permissive`. Raises
        UndecodableValue, ColumnsTooLarge.
        """
        parts = list(self._parts(values, 0, permissive=permissive))
        return pa.concat_arrays(parts) if len(parts) != 1 else parts[0]

    def _parts(self, values: pa.Array, first: int, *, permissive: bool) -> Iterator[pa.Array]:
        if not len(values):
            yield pa.nulls(0, self.type)
            return
        try:
            yield self._parse(values)
        except pa.ArrowInvalid as error:
            if len(values) > 1:
                half = len(values) // 2
                yield from self._parts(values[:half], first, permissive=permissive)
                yield from self._parts(values[half:], first + half, permissive=permissive)
            elif permissive:
                yield pa.nulls(1, self.type)
            else:
                raise _undecodable(first, str(error)) from error

    def _parse(self, values: pa.Array) -> pa.Array:
        """Raises ArrowInvalid, ColumnsTooLarge."""
        try:
            return parse_json(values, self.type, unexpected="error").cast(self.type)
        except pa.ArrowInvalid:
            for value in values.drop_null().to_pylist():
                _check_is_one(value)
            return parse_json(values, self.type, unexpected="ignore").cast(self.type)

    # --- the type ---------------------------------------------------------------------------------

    def _type(self, schema: Any, base: str, within: tuple[str, ...]) -> pa.DataType | None:
        """`base`: the document that its references are of; `within`: those that led here."""
        self._count += 1
        check_columns(self._count, within[-1] if within else "")
        if not isinstance(schema, dict):
            return None
        if (ref := schema.get("$ref")) is not None:
            name, _, place = str(ref).partition("#")
            whole = f"{name or base}#{place}"
            if whole in within:
                return None
            return self._type(self._at(name or base, place), name or base, (*within, whole))
        for several in ("oneOf", "anyOf", "allOf"):
            if isinstance(branches := schema.get(several), list):
                left = [one for one in branches if not _is_null(one)]
                return self._type(left[0], base, within) if len(left) == 1 else None
        kind = _kind(schema)
        if kind == "array":
            items = self._type(schema.get("items"), base, within)
            return None if items is None else pa.list_(pa.field("element", items))
        if kind == "object":
            found = {
                name: self._type(one, base, within)
                for name, one in dict(schema.get("properties", {})).items()
            }
            fields = [(name, one) for name, one in found.items() if one is not None]
            return pa.struct(fields) if fields else None
        return _PLAIN.get(kind)

    def _at(self, name: str, place: str) -> Any:
        """What a JSON pointer leads to; None if it leads nowhere."""
        found = self._documents.get(name)
        for part in place.split("/")[1:]:
            part = part.replace("~1", "/").replace("~0", "~")
            found = found.get(part) if isinstance(found, dict) else None
        return found


def parse_json(values: pa.Array, type_: pa.DataType, *, unexpected: str) -> pa.Array:
    """Binary values as rows. `unexpected`: of fields that are not in the type, "error", "ignore" or
    "infer" to have them too. With "ignore" each value has to be known to be one of JSON, and no
    more; the memory that "infer" takes is the caller's concern. Raises ArrowInvalid,
    ColumnsTooLarge.

    Each value is a member of an object on a line of its own, so that it may be of any type, and
    none can run into the next: as many rows as values, each with that member alone.
    """
    text = values.cast(pa.string())  # checks that it is UTF-8, which Arrow's JSON does not
    _check_room(text, type_)
    lines = pc.binary_join_element_wise(
        '{"v":', text, "}\n", "", null_handling="replace", null_replacement="null"
    )
    given = pa.BufferReader(lines.buffers()[2])
    found = pj.read_json(
        given,
        pj.ReadOptions(use_threads=False, block_size=given.size() + 1),
        pj.ParseOptions(
            explicit_schema=pa.schema([("v", type_)]), unexpected_field_behavior=unexpected
        ),
    )
    if found.num_rows != len(values) or found.num_columns != 1:
        raise pa.ArrowInvalid("more than one JSON value")
    (rows,) = found.column("v").chunks
    return rows


def _check_room(text: pa.Array, type_: pa.DataType) -> None:
    """Raises ColumnsTooLarge. Items of lists are no more than there are commas and brackets."""
    try:
        check_room(type_, rows=len(text), items=text.nbytes)
    except ColumnsTooLarge:
        items = pc.sum(pc.add(pc.count_substring(text, ","), pc.count_substring(text, "[")))
        check_room(type_, rows=len(text), items=items.as_py() or 0)


def _check_is_one(value: bytes) -> None:
    """Raises ArrowInvalid unless it is one value of JSON."""
    try:
        decode_json(value, msgspec.Raw)
    except msgspec.DecodeError:
        load_json(value)  # it takes NaN, as Arrow does, and says what is wrong


def load_json(value: bytes) -> object:
    """Raises ArrowInvalid."""
    try:
        return json.loads(value.decode())
    except UnicodeDecodeError as error:
        raise pa.ArrowInvalid(f"not UTF-8: {error}") from None
    except ValueError as error:
        raise pa.ArrowInvalid(f"not JSON: {error}") from None
    except RecursionError:
        raise pa.ArrowInvalid("nested too deep") from None


def _undecodable(row: int, text: str) -> UndecodableValue:
    """Of Arrow's error, which names columns within `v`."""
    detail = text.removeprefix("JSON parse error: ").replace("Column(/v)", "Column(/)")
    detail = detail.replace("Column(/v/", "Column(/")
    return UndecodableValue(detail.replace(" in row 0", ""), row=row)


def _is_null(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "null"


def _kind(schema: Mapping[str, Any]) -> str:
    """Of one type besides null; empty if there is none, or several."""
    given = schema.get("type")
    kinds = set(given if isinstance(given, list) else [given]) - {"null", None}
    if kinds == {"integer", "number"}:
        return "number"
    if not kinds and "properties" in schema:
        return "object"
    if not kinds and (values := schema.get("enum", [schema["const"]] if "const" in schema else [])):
        return "string" if all(isinstance(one, str | None) for one in values) else ""
    return str(kinds.pop()) if len(kinds) == 1 else ""
