"""JSON values as Arrow columns: a JSON Schema becomes a type, and Arrow's own parser reads them.

* What the schema gives no one type has no column: a property that may be an object or text, an
  object whose properties are not named. So have properties that the schema does not name.
* A value is what the reader's schema makes of it, whichever schema it was written by: JSON says
  itself what it is.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json as pj

from tierlog.record_format.errors import InvalidOption, UndecodableValue

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
        found = self._type(document, "", ())
        if found is None:
            raise InvalidOption(
                "the JSON Schema names no one type with columns for a value: read bytes"
            )
        self.type = found
        self._schema = pa.schema([("v", found)])

    def decode(self, values: pa.Array, *, permissive: bool) -> pa.Array:
        """The columns of binary values. What does not decode is null if `permissive`. Raises
        UndecodableValue.
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
        """Raises ArrowInvalid. Each value is a member of an object, which may be of any type."""
        lines = pc.binary_join_element_wise(
            '{"v":',
            values.cast(pa.string()),
            "}\n",
            "",
            null_handling="replace",
            null_replacement="null",
        )
        text = pa.BufferReader(lines.buffers()[2])
        found = pj.read_json(
            text,
            pj.ReadOptions(use_threads=False, block_size=text.size() + 1),
            pj.ParseOptions(explicit_schema=self._schema, unexpected_field_behavior="ignore"),
        )
        if len(found) != len(values):
            raise pa.ArrowInvalid("more than one JSON value")
        return found.column("v").combine_chunks().cast(self.type)

    # --- the type ---------------------------------------------------------------------------------

    def _type(self, schema: Any, base: str, within: tuple[str, ...]) -> pa.DataType | None:
        """`base`: the document that its references are of; `within`: those that led here."""
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
