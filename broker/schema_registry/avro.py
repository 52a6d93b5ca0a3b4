"""Avro schemas: parsed by fastavro, and what it takes for granted is checked here."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, Final

import fastavro

from tierlog.broker.schema_registry.avro_compatibility import (
    PRIMITIVES,
    Types,
    avro_incompatibilities,
)
from tierlog.broker.schema_registry.avro_json import encode_json
from tierlog.broker.schema_registry.avro_limits import check_limits, is_limited
from tierlog.broker.schema_registry.json_text import decode_text, encode_text
from tierlog.record_format.schema_records import Malformed

_NAME: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*")
_NAMED: Final = frozenset(("record", "error", "enum", "fixed"))
_INNER: Final = {"array": "items", "map": "values"}
_OF_THE_PARSER: Final = ("__fastavro_parsed", "__named_schemas")


class AvroSchema:
    """`identity`: equal for schemas that say the same, doc and aliases included."""

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """`dependencies`: what it refers to, each after those that it refers to itself. Raises
        Malformed.
        """
        names: dict[str, Any] = {}
        for one in dict.fromkeys(text for _, text in dependencies):  # it may have several names
            _parse(decode_text(one), names)
        document = decode_text(text)
        problem = next(_problems(document), None)
        if problem is not None:
            raise Malformed(problem)
        self.types = Types(_parse(document, names), names)
        self._is_limited = is_limited(self.types)
        self.text = encode_text(document)
        self.identity = encode_text(_plain(self.types.schema), sort=True)

    def incompatibilities(self, writer: AvroSchema) -> list[str]:
        """Why this schema cannot read what was written with that one; empty if it can."""
        return avro_incompatibilities(self.types, writer.types)

    def encode_value(self, text: bytes) -> bytes:
        """Of its JSON. Raises Malformed."""
        return encode_json(text, self.types)

    def check_value(self, encoded: bytes) -> None:
        """Raises Malformed."""
        self.decode(encoded)

    def decode(self, encoded: bytes) -> Any:
        """Of a union the value alone, dates and decimals as text. Raises Malformed."""
        if not self._is_limited:
            check_limits(self.types, encoded)
        stream = BytesIO(encoded)
        try:
            found = fastavro.schemaless_reader(stream, self.types.schema, None)
        except (EOFError, ArithmeticError, RecursionError, StopIteration) as error:
            raise Malformed(f"it ends early, or is damaged: {type(error).__name__}") from error
        except (ValueError, LookupError, TypeError, MemoryError) as error:
            raise Malformed(str(error)[:500] or type(error).__name__) from error
        if stream.tell() != len(encoded):
            raise Malformed(f"{len(encoded) - stream.tell()} bytes follow its end")
        return found


def _parse(document: Any, names: dict[str, Any]) -> Any:
    try:
        return fastavro.parse_schema(document, named_schemas=names)
    except fastavro.schema.UnknownType as error:
        raise Malformed(f"unknown type {error.name!r}") from error
    except (fastavro.schema.SchemaParseException, ValueError, TypeError, LookupError) as error:
        raise Malformed(str(error)) from error
    except (AttributeError, RecursionError) as error:
        raise Malformed(f"not an Avro schema: {error}") from error


def _problems(schema: Any, *, in_union: bool = False) -> Iterator[str]:
    if isinstance(schema, list):
        if in_union:
            yield "a union may not immediately contain a union"
        for branch in schema:
            yield from _problems(branch, in_union=True)
        kinds = [one if isinstance(one, str) else _union_kind(one) for one in schema]
        yield from (f"{one!r} is twice in a union" for one in kinds if kinds.count(one) > 1)
        return
    if isinstance(schema, str):
        return
    if not isinstance(schema, dict) or "type" not in schema:
        yield f"not an Avro schema: {encode_text(schema)[:100]}"
    elif not isinstance(schema["type"], str):
        yield from _problems(schema["type"], in_union=in_union)
    elif schema["type"] in _NAMED:
        yield from _definition_problems(schema)
    elif (inner := _INNER.get(schema["type"])) is not None:
        if inner not in schema:
            yield f"{schema['type']}: it has no {inner}"
        else:
            yield from _problems(schema[inner])


def _definition_problems(schema: dict[str, Any]) -> Iterator[str]:
    yield from _name_problems(schema)
    kind = schema["type"]
    if kind in ("record", "error"):
        yield from _field_problems(schema)
    elif kind == "enum" and not _are_names(schema.get("symbols")):
        yield f"{schema.get('name')}: its symbols are no list of names"
    elif kind == "fixed" and not _is_size(schema.get("size")):
        yield f"{schema.get('name')}: its size is no whole number"


def _union_kind(branch: Any) -> str:
    kind = branch.get("type") if isinstance(branch, dict) else branch
    if kind in _NAMED:
        namespace = branch.get("namespace", "")
        return f"{kind} {namespace}.{branch.get('name')}"
    return str(kind)


def _name_problems(schema: dict[str, Any]) -> Iterator[str]:
    name, namespace = schema.get("name"), schema.get("namespace", "")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        yield f"the name {name!r} of a {schema['type']} is not one of Avro"
    elif name in PRIMITIVES:
        yield f"schemas may not be named after primitives: {name!r}"
    if namespace and not (isinstance(namespace, str) and _NAME.fullmatch(namespace)):
        yield f"{name}: the namespace {namespace!r} is not one of Avro"


def _field_problems(schema: dict[str, Any]) -> Iterator[str]:
    fields = schema.get("fields")
    if not isinstance(fields, list) or not all(isinstance(one, dict) for one in fields):
        yield f"{schema.get('name')}: its fields are no list"
        return
    seen: set[str] = set()
    for field in fields:
        name = field.get("name")
        if not isinstance(name, str) or not _NAME.fullmatch(name) or "." in name:
            yield f"{schema.get('name')}: the name {name!r} of a field is not one of Avro"
        elif name in seen:
            yield f"{schema.get('name')}: two fields are named {name!r}"
        elif "type" not in field:
            yield f"{schema.get('name')}: the field {name!r} has no type"
        else:
            seen.add(name)
            yield from _problems(field["type"])


def _are_names(symbols: object) -> bool:
    return isinstance(symbols, list) and all(
        isinstance(one, str) and _NAME.fullmatch(one) and "." not in one for one in symbols
    )


def _is_size(size: object) -> bool:
    return isinstance(size, int) and not isinstance(size, bool) and size >= 0


def _plain(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_plain(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: value for name, value in schema.items() if name not in _OF_THE_PARSER}
    for inner in ("type", "items", "values"):
        if inner in found:
            found[inner] = _plain(found[inner])
    if "fields" in found and found["type"] in ("record", "error"):
        found["fields"] = [{**one, "type": _plain(one["type"])} for one in found["fields"]]
    return found["type"] if found.keys() == {"type"} else found
