"""Walks an encoded Avro value before it is decoded, and refuses what its few bytes would make of
memory and stack.

* fastavro calls itself for each level, without a limit: a few thousand bytes of a type that
  contains itself end the process.
* What takes no bytes is there any number of times: an array of nulls, a record of nulls in another.
* A value of a schema that has neither is not walked: it has a level for each of its schema's, and a
  byte for each value at least.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from tierlog.broker.schema_registry.avro_compatibility import Types, kind_of, named
from tierlog.record_format.schema_records import Malformed

DEPTH_MAX: Final = 200
EMPTY_MAX: Final = 100_000

_SIZES: Final[Mapping[str, int]] = {"boolean": 1, "float": 4, "double": 8}
_WHOLE: Final = frozenset(("int", "long", "enum"))


def is_limited(types: Types) -> bool:
    """Whether values are limited by their schema."""
    return _depth(types.schema, types.names, {}, 0) <= DEPTH_MAX


def _depth(schema: Any, names: Mapping[str, Any], known: dict[str, int], above: int) -> int:
    """How many levels there are below; more than DEPTH_MAX also if something takes no bytes."""
    schema = named(schema, names)
    if above > DEPTH_MAX or takes_no_bytes(schema):
        return DEPTH_MAX + 1
    match kind_of(schema):
        case "union":
            inner = [one for one in schema if not takes_no_bytes(named(one, names))]
            return max((_depth(one, names, known, above) for one in inner), default=0)
        case "array":
            inner = [schema["items"]]
        case "map":
            inner = [schema["values"]]
        case "record":
            if schema["name"] in known:
                return known[schema["name"]]
            known[schema["name"]] = DEPTH_MAX + 1  # while it is looked at: it contains itself
            inner = [field["type"] for field in schema["fields"]]
        case _:
            return 0
    depth = 1 + max((_depth(one, names, known, above + 1) for one in inner), default=0)
    if kind_of(schema) == "record":
        known[schema["name"]] = depth
    return depth


def takes_no_bytes(schema: Any) -> bool:
    """By itself, whatever is in it."""
    kind = kind_of(schema)
    if kind == "record":
        return not schema["fields"]
    return kind == "null" or (kind == "fixed" and not schema["size"])


def check_limits(types: Types, encoded: bytes) -> None:
    """Raises Malformed; not of what else is wrong, which decoding finds out."""
    _Walk(types.names, encoded).walk(types.schema)


class _Walk:
    def __init__(self, names: Mapping[str, Any], encoded: bytes) -> None:
        self._names, self._encoded = names, encoded
        self._at = self._empty = 0
        self._path: list[str] = []

    def walk(self, schema: Any) -> None:
        schema = named(schema, self._names)
        if len(self._path) > DEPTH_MAX:
            raise self._refused(f"nested more than {DEPTH_MAX} levels deep")
        if isinstance(schema, list):
            schema = self._branch(schema)
        elif takes_no_bytes(schema):
            self._empty += 1
            if self._empty > EMPTY_MAX:
                raise self._refused(f"more than {EMPTY_MAX} values that take no bytes")
        kind = kind_of(schema)
        if kind == "record":
            for field in schema["fields"]:
                self._walk_within(field["name"], field["type"])
        elif kind in ("array", "map"):
            self._walk_blocks(schema, kind)
        elif kind in _WHOLE:
            self._number()
        else:
            is_sized = kind in ("bytes", "string")
            fixed = schema["size"] if kind == "fixed" else _SIZES.get(kind, 0)
            self._pass(self._number() if is_sized else fixed)

    def _branch(self, union: list[Any]) -> Any:
        index = self._number()
        if not 0 <= index < len(union):
            raise self._refused(f"a union has no branch {index}")
        return named(union[index], self._names)

    def _walk_within(self, name: str, schema: Any) -> None:
        self._path.append(name)
        self.walk(schema)
        self._path.pop()

    def _walk_blocks(self, schema: Any, kind: str) -> None:
        while count := self._number():
            if count < 0:
                self._number()  # its bytes
            for _ in range(abs(count)):
                if kind == "map":
                    self._pass(self._number())
                self._walk_within("", schema["items" if kind == "array" else "values"])

    def _number(self) -> int:
        raw = shift = 0
        while True:
            byte = self._encoded[self._at] if self._at < len(self._encoded) else -1
            if byte < 0 or shift > 63:
                raise self._refused("it ends early, or a number is damaged")
            self._at += 1
            raw |= (byte & 0x7F) << shift
            if byte < 0x80:
                return raw >> 1 ^ -(raw & 1)
            shift += 7

    def _pass(self, size: int) -> None:
        if not 0 <= size <= len(self._encoded) - self._at:
            raise self._refused("it ends early, or a size is damaged")
        self._at += size

    def _refused(self, problem: str) -> Malformed:
        names = [name for name in self._path if name]
        shown = "/".join(names[:5]) + ("/…" if len(names) > 5 else "")
        return Malformed(f"/{shown}: {problem}")
