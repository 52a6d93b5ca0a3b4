"""Encodes JSON by an Avro schema.

* Of a union a branch is written as Avro's JSON encoding has it, `{"string": "x"}`, or as the value
  alone: then the first branch that takes it is meant.
* Bytes and fixed are text of the characters U+0000 to U+00FF, as in Avro's JSON encoding. Logical
  types are what they stand on.
* What does not fit is refused with its path. Trying unions within unions takes a number of steps
  that is bounded by the size of the JSON.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from typing import Any, Final

import msgspec

from tierlog.broker.schema_registry.avro_compatibility import Types, kind_of, named
from tierlog.record_format.schema_records import Malformed
from tierlog.record_format.varint import zigzag

_STEPS: Final = 1000
_STEPS_PER_BYTE: Final = 100
_BITS: Final[Mapping[str, int]] = {"int": 31, "long": 63}
_FLOATS: Final[Mapping[str, str]] = {"float": "<f", "double": "<d"}


def encode_json(text: bytes, types: Types) -> bytes:
    """Raises Malformed."""
    try:
        value = msgspec.json.decode(text)
        return _Encoder(types.names, len(text)).encode(types.schema, value, "/")
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise Malformed(f"not JSON: {error}") from error
    except RecursionError as error:
        raise Malformed("nested too deeply") from error


class _Encoder:
    def __init__(self, names: Mapping[str, Any], size: int) -> None:
        self._names = names
        self._left = _STEPS + _STEPS_PER_BYTE * size

    def encode(self, schema: Any, value: Any, path: str) -> bytes:
        self._left -= 1
        if self._left < 0:
            raise Malformed("it takes too many steps to find which branches of unions are meant")
        schema = named(schema, self._names)
        kind = kind_of(schema)
        return _BY_KIND[kind](self, schema, value, path)

    def null(self, _: Any, value: Any, path: str) -> bytes:
        _expect(value is None, "null", value, path)
        return b""

    def boolean(self, _: Any, value: Any, path: str) -> bytes:
        _expect(isinstance(value, bool), "true or false", value, path)
        return b"\1" if value else b"\0"

    def whole(self, schema: Any, value: Any, path: str) -> bytes:
        bits = _BITS[kind_of(schema)]
        fits = type(value) is int and -(1 << bits) <= value < 1 << bits
        _expect(fits, f"a whole number of {bits + 1} bits", value, path)
        return zigzag(value)

    def real(self, schema: Any, value: Any, path: str) -> bytes:
        _expect(type(value) in (int, float), "a number", value, path)
        try:
            return struct.pack(_FLOATS[kind_of(schema)], value)
        except (OverflowError, struct.error) as error:
            raise Malformed(f"{_shown(path)}: {value} is too large") from error

    def text(self, _: Any, value: Any, path: str) -> bytes:
        _expect(isinstance(value, str), "a string", value, path)
        return _sized(value.encode())

    def octets(self, _: Any, value: Any, path: str) -> bytes:
        return _sized(_latin(value, path))

    def fixed(self, schema: Any, value: Any, path: str) -> bytes:
        found = _latin(value, path)
        _expect(len(found) == schema["size"], f"{schema['size']} characters", value, path)
        return found

    def enum(self, schema: Any, value: Any, path: str) -> bytes:
        symbols = schema["symbols"]
        known = isinstance(value, str) and value in symbols
        _expect(known, f"one of {', '.join(symbols)[:200]}", value, path)
        return zigzag(symbols.index(value))

    def array(self, schema: Any, value: Any, path: str) -> bytes:
        _expect(isinstance(value, list), "an array", value, path)
        items = [
            self.encode(schema["items"], one, f"{path}{index}/") for index, one in enumerate(value)
        ]
        return b"".join([zigzag(len(items)), *items, b"\0" if items else b""])

    def mapping(self, schema: Any, value: Any, path: str) -> bytes:
        _expect(isinstance(value, dict), "an object", value, path)
        items = [
            _sized(name.encode()) + self.encode(schema["values"], one, f"{path}{name}/")
            for name, one in value.items()
        ]
        return b"".join([zigzag(len(items)), *items, b"\0" if items else b""])

    def record(self, schema: Any, value: Any, path: str) -> bytes:
        _expect(isinstance(value, dict), "an object", value, path)
        unknown = value.keys() - {field["name"] for field in schema["fields"]}
        if unknown:
            raise Malformed(f"{path}{min(unknown)[:100]}: {schema['name']} has no such field")
        parts = list[bytes]()
        for field in schema["fields"]:
            at = f"{path}{field['name']}/"
            if field["name"] in value:
                parts.append(self.encode(field["type"], value[field["name"]], at))
            elif "default" in field:
                parts.append(self.encode(field["type"], field["default"], at))
            else:
                raise Malformed(f"{_shown(at)}: missing")
        return b"".join(parts)

    def union(self, schema: Any, value: Any, path: str) -> bytes:
        branches = [(index, named(one, self._names)) for index, one in enumerate(schema)]
        if isinstance(value, dict) and len(value) == 1:
            ((name, inner),) = value.items()
            for index, branch in branches:
                if name in _names_of(branch):
                    try:
                        return zigzag(index) + self.encode(branch, inner, f"{path}{name}/")
                    except Malformed:
                        if not any(kind_of(one) in ("record", "map") for _, one in branches):
                            raise
        problems = list[str]()
        for index, branch in branches:
            try:
                return zigzag(index) + self.encode(branch, value, path)
            except Malformed as error:
                if kind_of(branch) != "null":
                    problems.append(str(error))
        if len(problems) == 1:
            raise Malformed(problems[0])
        kinds = ", ".join(_names_of(branch)[0] for _, branch in branches)
        raise Malformed(f"{_shown(path)}: {_brief(value)} is of no branch: {kinds[:200]}")


_BY_KIND: Final[Mapping[str, Callable[[_Encoder, Any, Any, str], bytes]]] = {
    "null": _Encoder.null,
    "boolean": _Encoder.boolean,
    "int": _Encoder.whole,
    "long": _Encoder.whole,
    "float": _Encoder.real,
    "double": _Encoder.real,
    "string": _Encoder.text,
    "bytes": _Encoder.octets,
    "fixed": _Encoder.fixed,
    "enum": _Encoder.enum,
    "array": _Encoder.array,
    "map": _Encoder.mapping,
    "record": _Encoder.record,
    "union": _Encoder.union,
}


def _names_of(branch: Any) -> tuple[str, ...]:
    """In full, and without its namespace."""
    if not isinstance(branch, dict) or "name" not in branch:
        return (kind_of(branch),)
    return str(branch["name"]), str(branch["name"]).rpartition(".")[2]


def _expect(fits: bool, wanted: str, value: Any, path: str) -> None:
    if not fits:
        raise Malformed(f"{_shown(path)}: {wanted} is expected, not {_brief(value)}")


def _shown(path: str) -> str:
    return path.rstrip("/") or "/"


def _brief(value: Any) -> str:
    return msgspec.json.encode(value).decode()[:60]


def _latin(value: Any, path: str) -> bytes:
    fits = isinstance(value, str) and all(one <= "\xff" for one in value)
    _expect(fits, "text of U+0000 to U+00FF", value, path)
    return bytes(value.encode("latin-1"))


def _sized(found: bytes) -> bytes:
    return zigzag(len(found)) + found
