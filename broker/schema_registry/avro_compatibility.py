"""Whether a reader with one Avro schema can read what was written with another. Pure.

The rules are Avro's own (its specification's "Schema Resolution", and SchemaCompatibility in Java):
a record's fields are matched by name or by the reader's aliases, names of types without their
namespaces, and a pair of types that is being compared already counts as compatible.

Schemas are as `fastavro` parses them: a name stands for a type that was defined before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final, NamedTuple

PRIMITIVES: Final = frozenset(
    ("null", "boolean", "int", "long", "float", "double", "bytes", "string")
)
# What a reader's type also reads.
_PROMOTED: Final[Mapping[str, frozenset[str]]] = {
    "long": frozenset(("int",)),
    "float": frozenset(("int", "long")),
    "double": frozenset(("int", "long", "float")),
    "string": frozenset(("bytes",)),
    "bytes": frozenset(("string",)),
}


class Types(NamedTuple):
    """A schema, and what its names stand for."""

    schema: Any
    names: Mapping[str, Any]


def avro_incompatibilities(reader: Types, writer: Types) -> list[str]:
    """Why the reader cannot read it; empty if it can."""
    return list(_Comparison(reader.names, writer.names).compare(reader.schema, writer.schema, "/"))


class _Comparison:
    def __init__(self, reader_names: Mapping[str, Any], writer_names: Mapping[str, Any]) -> None:
        self._reader_names, self._writer_names = reader_names, writer_names
        self._known: set[tuple[str, str]] = set()  # pairs of records, compared or being compared

    def compare(self, reader: Any, writer: Any, path: str) -> Iterator[str]:
        reader, writer = named(reader, self._reader_names), named(writer, self._writer_names)
        kind, written = kind_of(reader), kind_of(writer)
        if written == "union":
            for index, branch in enumerate(writer):
                yield from self.compare(reader, branch, f"{path}{index}/")
        elif kind == "union":
            if not any(self._reads(branch, writer) for branch in reader):
                text = f"reader union lacking writer type: {written.upper()}"
                yield _problem("MISSING_UNION_BRANCH", path, text)
        elif kind != written:
            if written not in _PROMOTED.get(kind, ()):
                text = f"reader type: {kind.upper()} not compatible with writer type: "
                yield _problem("TYPE_MISMATCH", path, text + written.upper())
        else:
            yield from self._compare_same(kind, reader, writer, path)

    def _reads(self, reader: Any, writer: Any) -> bool:
        """Of a branch: what is found out about records while it is tried counts only if it does."""
        known = set(self._known)
        if any(True for _ in self.compare(reader, writer, "/")):
            self._known = known
            return False
        return True

    def _compare_same(self, kind: str, reader: Any, writer: Any, path: str) -> Iterator[str]:
        if kind == "array":
            yield from self.compare(reader["items"], writer["items"], f"{path}items/")
        elif kind == "map":
            yield from self.compare(reader["values"], writer["values"], f"{path}values/")
        elif kind not in PRIMITIVES:
            if not _same_name(reader, writer):
                text = f"expected: {writer['name']}"
                yield _problem("NAME_MISMATCH", f"{path}name", text)
            elif kind == "fixed" and reader["size"] != writer["size"]:
                text = f"expected: {writer['size']}, found: {reader['size']}"
                yield _problem("FIXED_SIZE_MISMATCH", f"{path}size", text)
            elif kind == "enum":
                yield from _compare_symbols(reader, writer, path)
            elif kind == "record":
                yield from self._compare_fields(reader, writer, path)

    def _compare_fields(self, reader: Any, writer: Any, path: str) -> Iterator[str]:
        pair = reader["name"], writer["name"]
        if pair in self._known:
            return
        self._known.add(pair)
        written = {field["name"]: field for field in writer["fields"]}
        for index, field in enumerate(reader["fields"]):
            at, names = f"{path}fields/{index}", (field["name"], *field.get("aliases", ()))
            found = next((written[name] for name in names if name in written), None)
            if found is not None:
                yield from self.compare(field["type"], found["type"], f"{at}/type/")
            elif "default" not in field and not self._has_enum_default(field["type"]):
                yield _problem("READER_FIELD_MISSING_DEFAULT_VALUE", at, field["name"])

    def _has_enum_default(self, schema: Any) -> bool:
        found = named(schema, self._reader_names)
        return kind_of(found) == "enum" and "default" in found


def _compare_symbols(reader: Any, writer: Any, path: str) -> Iterator[str]:
    missing = [one for one in writer["symbols"] if one not in reader["symbols"]]
    if missing and reader.get("default") not in reader["symbols"]:
        yield _problem("MISSING_ENUM_SYMBOLS", f"{path}symbols", f"[{', '.join(missing)}]")


def named(schema: Any, names: Mapping[str, Any]) -> Any:
    """The type that a name stands for; `{"type": …}` around a type without attributes that count is
    left out.
    """
    while True:
        if isinstance(schema, str) and schema not in PRIMITIVES:
            schema = names[schema]
        elif isinstance(schema, dict) and not isinstance(schema["type"], str):
            schema = schema["type"]
        elif isinstance(schema, dict) and schema["type"] in names:
            schema = names[schema["type"]]
        else:
            return schema


def kind_of(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    kind = str(schema["type"] if isinstance(schema, dict) else schema)
    return "record" if kind == "error" else kind


def _same_name(reader: Any, writer: Any) -> bool:
    aliases = {str(alias) for alias in reader.get("aliases", ())}
    namespace = reader["name"].rpartition(".")[0]
    full = {alias if "." in alias or not namespace else f"{namespace}.{alias}" for alias in aliases}
    return _short(reader) == _short(writer) or writer["name"] in full


def _short(schema: Any) -> str:
    return str(schema["name"]).rpartition(".")[2]


def _problem(kind: str, path: str, text: str) -> str:
    """As Confluent's registry words it."""
    return f"{{errorType:'{kind}', location:'{path.rstrip('/') or '/'}', additionalInfo:'{text}'}}"
