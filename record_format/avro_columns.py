"""Avro values as Arrow columns: a reader's schema becomes a type, each writer's a way to read it.

* Types are those of Spark's `from_avro`: what Arrow and Spark both have. A union of null and a type
  is that type; of several, a struct of which one member is not null. Dates, timestamps and decimals
  are what they say; times of day, durations and UUIDs stay numbers, bytes and text.
* Schemas are resolved by Avro's own rules: fields by name or by the reader's aliases, defaults for
  what a writer did not have, promotions. What a reader cannot take is refused when it is met.
* A type that contains itself has no columns, and is refused.

Not thread-safe.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from operator import index as index_of
from typing import Any, Final

import fastavro
import numpy as np
import pyarrow as pa

from tierlog.record_format import avro_kernel as kernel
from tierlog.record_format import column_kernel as column
from tierlog.record_format.columns import REASONS, Columns, Node, Room, Values, check_columns
from tierlog.record_format.errors import InvalidOption, UndecodableValue

_ANY_LENGTH: Final = "an array of what takes no bytes, which may be of any length"
_NAMED: Final = frozenset(("record", "error", "enum", "fixed"))
_PLAIN: Final[Mapping[str, tuple[pa.DataType, int]]] = {
    "null": (pa.null(), column.VOID),
    "boolean": (pa.bool_(), column.BYTE),
    "int": (pa.int32(), column.I32),
    "long": (pa.int64(), column.I64),
    "float": (pa.float32(), column.F32),
    "double": (pa.float64(), column.F64),
    "bytes": (pa.binary(), column.VARIABLE),
    "fixed": (pa.binary(), column.VARIABLE),
    "string": (pa.string(), column.VARIABLE),
}
_LOGICAL: Final[Mapping[tuple[str, str], pa.DataType]] = {
    ("int", "date"): pa.date32(),
    ("long", "timestamp-millis"): pa.timestamp("us", "UTC"),
    ("long", "timestamp-micros"): pa.timestamp("us", "UTC"),
    ("long", "local-timestamp-millis"): pa.timestamp("us"),
    ("long", "local-timestamp-micros"): pa.timestamp("us"),
}
_OPERATIONS: Final[Mapping[str, int]] = {
    "boolean": kernel.BOOL,
    "int": kernel.INT,
    "long": kernel.INT,
    "float": kernel.FLOAT,
    "double": kernel.DOUBLE,
    "bytes": kernel.TEXT,
    "string": kernel.TEXT,
}
_READ_AS: Final[Mapping[str, frozenset[str]]] = {
    "int": frozenset(("int", "long", "float", "double")),
    "long": frozenset(("long", "float", "double")),
    "float": frozenset(("float", "double")),
    "bytes": frozenset(("bytes", "string")),
    "string": frozenset(("string", "bytes")),
}
_OPERATIONS_MAX: Final = 100_000  # of a writer
_DEFAULT_MAX: Final = 64 << 10  # bytes
_PACKED: Final = {"boolean": "<?", "float": "<f", "double": "<d"}
Names = Mapping[str, Any]


class AvroColumns:
    """Decodes values into columns of a reader's schema, whoever wrote them."""

    def __init__(self, text: str, dependencies: Sequence[tuple[str, str]]) -> None:
        """`dependencies`: names and schemas, each after those that it refers to itself. Raises
        InvalidOption if the schema has no columns.
        """
        self._reader, self._names = _parse(text, dependencies)
        self._nodes: list[Node] = []
        self._add_node(self._reader, "", frozenset())
        self.type = self._nodes[0].type
        self._ops: list[tuple[int, int, int, int]] = []
        self._paths: list[tuple[str, str]] = []  # of each operation, and why it refuses
        self._tables: list[int] = []
        self._constants = bytearray()
        self._columns = Columns(self._nodes, self._tables)

    def add_writer(self, text: str, dependencies: Sequence[tuple[str, str]]) -> int:
        """What `decode` takes for a value of this schema. Raises InvalidOption."""
        schema, names = _parse(text, dependencies)
        return _Resolution(self, names).resolve(schema, self._reader, 0, "")

    def decode(
        self, values: pa.Array, roots: np.ndarray[Any, Any], *, skipped: int, permissive: bool
    ) -> pa.Array:
        """The columns. `values` are binary; of each, `skipped` bytes are not Avro; `roots` say who
        wrote it, and -1 that it is null. What does not decode is null if `permissive`, and then -1
        in `roots`. Raises UndecodableValue.
        """
        given = Values.of(values)
        constants = np.frombuffer(bytes(self._constants), np.uint8)
        ops = np.array(self._ops or [(0, 0, 0, 0)], np.int64).ravel()
        tables = np.array([*self._tables, 0], np.int64)
        stack = np.empty(kernel.FRAME_WIDTH * column.DEPTH_MAX, np.int64)

        def run(room: Room, *, is_writing: bool) -> None:
            state = np.zeros(column.STATE_SIZE, np.int64)
            row = kernel.decode_values(
                given.content, given.ends, skipped, roots, ops, tables, constants, room.nodes,
                room.counts, state, room.heap, np.empty_like(room.counts), stack, is_writing,
                permissive and not is_writing,
            )  # fmt: skip
            if row >= 0:
                path, reason = self._paths[int(state[column.FAILED_OP])]
                reason = REASONS.get(int(state[column.REASON]), reason)
                raise UndecodableValue(f"{path or '/'}: {reason}", row=row)

        return self._columns.fill(run)

    # --- the reader's type ------------------------------------------------------------------------

    def _add_node(self, schema: Any, path: str, within: frozenset[str]) -> int:
        """Its number; those below it follow."""
        schema = _named(schema, self._names)
        index = len(self._nodes)
        check_columns(index, path)
        self._nodes.append(Node(pa.null(), column.VOID))
        self._nodes[index] = self._node(schema, path, within)
        return index

    def _node(self, schema: Any, path: str, within: frozenset[str]) -> Node:
        kind = _kind(schema)
        if kind == "union":
            branches = [one for one in schema if _kind(_named(one, self._names)) != "null"]
            if len(branches) == 1:
                return self._node(_named(branches[0], self._names), path, within)
            if not branches:
                return Node(*_PLAIN["null"])
            fields = [(f"member{index}", one) for index, one in enumerate(branches)]
            return self._struct(fields, path, within)
        if kind in ("record", "error"):
            if schema["name"] in within:
                raise InvalidOption(
                    f"{path or '/'} of the schema contains itself ({schema['name']}), "
                    "which columns cannot: read bytes"
                )
            fields = [(field["name"], field["type"]) for field in schema["fields"]]
            return self._struct(fields, path, within | {schema["name"]})
        if kind == "array":
            child = self._add_node(schema["items"], f"{path}/items", within)
            element = pa.field("element", self._nodes[child].type)
            return Node(pa.list_(element), column.LIST, (child,))
        if kind == "map":
            return self._map(schema, path, within)
        if kind == "enum":
            return Node(pa.string(), column.I32, symbols=dict(enumerate(schema["symbols"])))
        if (decimal := _decimal(schema)) is not None:
            return Node(decimal, column.I128)
        type_, node_kind = _PLAIN[kind]
        return Node(_LOGICAL.get((kind, _logical(schema)), type_), node_kind)

    def _struct(self, fields: Iterable[tuple[str, Any]], path: str, within: frozenset[str]) -> Node:
        children = {name: self._add_node(one, f"{path}/{name}", within) for name, one in fields}
        named = [(name, self._nodes[child].type) for name, child in children.items()]
        return Node(pa.struct(named), column.STRUCT, tuple(children.values()))

    def _map(self, schema: Any, path: str, within: frozenset[str]) -> Node:
        entries, key = len(self._nodes), len(self._nodes) + 1
        self._nodes += [Node(pa.null(), column.STRUCT), Node(pa.string(), column.VARIABLE)]
        value = self._add_node(schema["values"], f"{path}/values", within)
        pair = [pa.field("key", pa.string(), nullable=False)]
        pair.append(pa.field("value", self._nodes[value].type))
        self._nodes[entries] = Node(pa.struct(pair), column.STRUCT, (key, value))
        return Node(pa.map_(pa.string(), self._nodes[value].type), column.LIST, (entries,))


class _Resolution:
    """A writer's schema, made into operations that fill a reader's nodes."""

    def __init__(self, columns: AvroColumns, names: Names) -> None:
        self._columns, self._names = columns, names
        self._passed: dict[str, int] = {}  # named types that are read past
        self._empty: dict[str, bool] = {}  # and that take no bytes
        self._end = len(columns._ops) + _OPERATIONS_MAX

    # It is the other half of AvroColumns, parted from it by what is of one writer alone.
    # ruff: noqa: SLF001

    def resolve(self, writer: Any, reader: Any, node: int, path: str) -> int:
        """The operation that reads a value of `writer` into the node of `reader`."""
        writer = _named(writer, self._names)
        reader = _named(reader, self._columns._names)
        kind, wanted = _kind(writer), _kind(reader)
        if kind == "union":
            branches = [self.resolve(one, reader, node, path) for one in writer]
            return self._listed(kernel.UNION, node, branches, path)
        if wanted == "union":
            return self._into_union(writer, reader, node, path)
        if kind == "null" and wanted == "null":
            return self._add(kernel.NULL, node, path)
        if not _reads(writer, reader, by_name=False):
            return self._refuse(path, f"written as {_shown(writer)}, read as {_shown(reader)}")
        if kind in ("record", "error"):
            return self._record(writer, reader, node, path)
        if kind in ("array", "map"):
            return self._repeated(writer, reader, node, path)
        if kind == "enum":
            symbols = {one: index for index, one in enumerate(reader["symbols"])}
            default = symbols.get(reader.get("default"), -1)
            found = [symbols.get(one, default) for one in writer["symbols"]]
            return self._listed(kernel.ENUM, node, found, path)
        return self._plain(writer, reader, node, path)

    def _plain(self, writer: Any, reader: Any, node: int, path: str) -> int:
        kind = _kind(writer)
        if self._columns._nodes[node].kind == column.I128:
            if _decimal(writer) not in (None, self._columns._nodes[node].type) and (
                writer.get("scale", 0) != reader.get("scale", 0)
            ):
                return self._refuse(path, "written as a decimal of another scale")
            return self._add(kernel.DECIMAL, node, path, writer.get("size", -1))
        if kind == "fixed":
            return self._add(kernel.TEXT, node, path, writer["size"])
        factor = 1
        if kind in ("int", "long") and pa.types.is_timestamp(self._columns._nodes[node].type):
            unit = _logical(writer) or _logical(reader)
            factor = 1000 if unit.endswith("timestamp-millis") else 1
        if self._columns._nodes[node].type == pa.string():
            return self._add(kernel.STRING, node, path, -1)
        return self._add(_OPERATIONS[kind], node, path, factor if kind in ("int", "long") else -1)

    def _into_union(self, writer: Any, reader: Any, node: int, path: str) -> int:
        columns = self._columns
        branches = [_named(one, columns._names) for one in reader]
        if _kind(writer) == "null":
            if any(_kind(one) == "null" for one in branches):
                return self._add(kernel.NULL, node, path)
            return self._refuse(path, "written as null, which the schema does not have here")
        branches = [one for one in branches if _kind(one) != "null"]
        found = _branch(writer, branches)
        if found is None:
            return self._refuse(
                path, f"written as {_shown(writer)}, which the schema does not have"
            )
        if len(branches) == 1:
            return self.resolve(writer, found, node, path)
        member = next(index for index, one in enumerate(branches) if one is found)
        below = columns._nodes[node].children[member]
        inner = self.resolve(writer, found, below, f"{path}/member{member}")
        return self._add(kernel.MEMBER, node, path, inner, member)

    def _record(self, writer: Any, reader: Any, node: int, path: str) -> int:
        children = self._columns._nodes[node].children
        wanted = {field["name"]: index for index, field in enumerate(reader["fields"])}
        for index, field in enumerate(reader["fields"]):
            for alias in field.get("aliases", ()):
                wanted.setdefault(alias, index)
        found: list[int] = []
        missing = set(range(len(children)))
        for field in writer["fields"]:
            below, index = f"{path}/{field['name']}", wanted.get(field["name"], -1)
            if index in missing:
                missing.remove(index)
                inner = reader["fields"][index]["type"]
                found.append(self.resolve(field["type"], inner, children[index], below))
            else:
                found.append(self._read_past(field["type"], below))
        for index in sorted(missing):
            field = reader["fields"][index]
            found.append(self._default(field, children[index], f"{path}/{field['name']}"))
        return self._listed(kernel.RECORD, node, found, path)

    def _default(self, field: Any, node: int, path: str) -> int:
        if "default" not in field:
            return self._refuse(path, "not written, and the schema has no default for it")
        names = self._columns._names
        try:
            encoded = _encoded(field["type"], field["default"], names)
        except _TooLarge:
            return self._refuse(path, f"its default has more than {_DEFAULT_MAX} bytes")
        except (ValueError, TypeError, LookupError, AttributeError, struct.error):
            return self._refuse(path, "its default is not of its type")
        start = len(self._columns._constants)
        self._columns._constants += encoded
        inner = _Resolution(self._columns, names).resolve(field["type"], field["type"], node, path)
        tables = self._columns._tables
        tables += (start, start + len(encoded))
        return self._add(kernel.DEFAULT, node, path, inner, len(tables) - 2)

    def _repeated(self, writer: Any, reader: Any, node: int, path: str) -> int:
        children, nodes = self._columns._nodes[node].children, self._columns._nodes
        if writer["type"] == "map":
            key, value = nodes[children[0]].children
            inner = self.resolve(writer["values"], reader["values"], value, f"{path}/values")
            return self._add(kernel.MAP, node, path, inner, self._add(kernel.STRING, key, path, -1))
        if self._takes_no_bytes(writer["items"]):
            return self._refuse(path, _ANY_LENGTH)
        inner = self.resolve(writer["items"], reader["items"], children[0], f"{path}/items")
        return self._add(kernel.ARRAY, node, path, inner)

    def _read_past(self, writer: Any, path: str) -> int:
        """The operation that reads a value into nothing. A type may contain itself."""
        writer = _named(writer, self._names)
        kind = _kind(writer)
        if kind in ("record", "error") and writer["name"] in self._passed:
            return self._passed[writer["name"]]
        if kind in ("record", "error"):
            op = self._passed[writer["name"]] = self._add(kernel.RECORD, -1, path)
            fields = [
                self._read_past(one["type"], f"{path}/{one['name']}") for one in writer["fields"]
            ]
            at = len(self._columns._tables)
            self._columns._tables += fields
            self._columns._ops[op] = (kernel.RECORD, -1, at, len(fields))
            return op
        if kind == "union":
            branches = [self._read_past(one, path) for one in writer]
            return self._listed(kernel.UNION, -1, branches, path)
        if kind == "array":
            if self._takes_no_bytes(writer["items"]):
                return self._refuse(path, _ANY_LENGTH)
            return self._add(kernel.ARRAY, -1, path, self._read_past(writer["items"], path))
        if kind == "map":
            key = self._add(kernel.TEXT, -1, path, -1)
            return self._add(kernel.MAP, -1, path, self._read_past(writer["values"], path), key)
        if kind == "enum":
            return self._listed(kernel.ENUM, -1, [0] * len(writer["symbols"]), path)
        if kind == "fixed":
            return self._add(kernel.TEXT, -1, path, writer["size"])
        if kind == "null":
            return self._add(kernel.NULL, -1, path)
        return self._add(_OPERATIONS[kind], -1, path, 1 if kind in ("int", "long") else -1)

    def _takes_no_bytes(self, schema: Any) -> bool:
        schema = _named(schema, self._names)
        kind = _kind(schema)
        if kind not in ("record", "error"):
            return kind == "null" or (kind == "fixed" and schema["size"] == 0)
        name = schema["name"]
        if name not in self._empty:
            self._empty[name] = True  # while it is looked at
            found = [self._takes_no_bytes(field["type"]) for field in schema["fields"]]
            self._empty[name] = all(found)
        return self._empty[name]

    def _add(self, kind: int, node: int, path: str, first: int = 0, second: int = 0) -> int:
        if len(self._columns._ops) == self._end:
            raise InvalidOption(
                f"{path or '/'} of the schema: to read it takes more than {_OPERATIONS_MAX} steps, "
                "for each branch of unions within unions: read bytes"
            )
        self._columns._ops.append((kind, node, first, second))
        self._columns._paths.append((path, ""))
        return len(self._columns._ops) - 1

    def _listed(self, kind: int, node: int, found: Sequence[int], path: str) -> int:
        at = len(self._columns._tables)
        self._columns._tables += found
        return self._add(kind, node, path, at, len(found))

    def _refuse(self, path: str, reason: str) -> int:
        op = self._add(kernel.REFUSE, -1, path)
        self._columns._paths[op] = (path, reason)
        return op


def _parse(text: str, dependencies: Sequence[tuple[str, str]]) -> tuple[Any, Names]:
    names: dict[str, Any] = {}
    for one in dict.fromkeys(one for _, one in dependencies):
        fastavro.parse_schema(json.loads(one), named_schemas=names)
    return fastavro.parse_schema(json.loads(text), named_schemas=names), names


def _named(schema: Any, names: Names) -> Any:
    return names.get(schema, schema) if isinstance(schema, str) else schema


def _kind(schema: Any) -> str:
    if isinstance(schema, list):
        return "union"
    return str(schema if isinstance(schema, str) else schema["type"])


def _logical(schema: Any) -> str:
    return str(schema.get("logicalType", "")) if isinstance(schema, dict) else ""


def _decimal(schema: Any) -> pa.DataType | None:
    """None also for more digits than 16 bytes have: they stay bytes."""
    if _logical(schema) != "decimal" or _kind(schema) not in ("bytes", "fixed"):
        return None
    precision, scale = schema.get("precision", 0), schema.get("scale", 0)
    return pa.decimal128(precision, scale) if 0 < precision <= 38 else None


def _reads(writer: Any, reader: Any, *, by_name: bool) -> bool:
    """Whether a value of `writer` may be one of `reader`, neither a union, at first sight."""
    kind, wanted = _kind(writer), _kind(reader)
    if kind in ("record", "error") and wanted in ("record", "error"):
        return not by_name or _last_name(writer["name"]) in {
            _last_name(one) for one in (reader["name"], *reader.get("aliases", ()))
        }
    if kind == "fixed" and wanted == "fixed":
        return bool(writer["size"] == reader["size"])
    return kind == wanted or wanted in _READ_AS.get(kind, ())


def _branch(writer: Any, branches: Sequence[Any]) -> Any:
    """The branch that takes a value of `writer`, its own type rather than one it is promoted to."""
    same = [one for one in branches if _kind(one) == _kind(writer)]
    for by_name in (True, False):
        for one in (*same, *branches):
            if _reads(writer, one, by_name=by_name):
                return one
    return None


def _last_name(name: str) -> str:
    return name.rpartition(".")[2]


def _shown(schema: Any) -> str:
    kind = _kind(schema)
    return f"{kind} {schema['name']}" if kind in _NAMED else kind


class _TooLarge(Exception):
    """A default, whose lists and records may have defaults of their own."""


def _encoded(schema: Any, value: Any, names: Names) -> bytes:
    """A field's default, which JSON says, as Avro. Raises what a value of another type does."""
    schema = _named(schema, names)
    kind = _kind(schema)
    match kind:
        case "union":  # of its first branch by older versions of Avro, of any by newer ones
            for index, branch in enumerate(schema):
                with suppress(ValueError, TypeError, LookupError, AttributeError, struct.error):
                    return _zigzag(index) + _encoded(branch, value, names)
            raise ValueError(kind)
        case "null":
            if value is not None:
                raise ValueError(kind)
            return b""
        case "boolean" | "float" | "double":
            if (kind == "boolean") != isinstance(value, bool):
                raise TypeError(kind)
            return struct.pack(_PACKED[kind], value)
        case "int" | "long":
            return _zigzag(index_of(value))
        case "enum":
            return _zigzag(schema["symbols"].index(value))
        case "fixed":
            return bytes(value.encode("latin-1").ljust(schema["size"], b"\0"))
        case "bytes" | "string":
            text = value.encode("latin-1" if kind == "bytes" else "utf-8")
            return _zigzag(len(text)) + bytes(text)
        case "array" | "map":
            return _encoded_items(schema, value, names)
        case _:
            return _joined(
                _encoded(field["type"], value.get(field["name"], field.get("default")), names)
                for field in schema["fields"]
            )


def _joined(parts: Iterable[bytes]) -> bytes:
    found = bytearray()
    for one in parts:
        found += one
        if len(found) > _DEFAULT_MAX:
            raise _TooLarge
    return bytes(found)


def _encoded_items(schema: Any, value: Any, names: Names) -> bytes:
    if schema["type"] == "array":
        items = (_encoded(schema["items"], one, names) for one in value)
    else:
        items = (
            _encoded("string", name, names) + _encoded(schema["values"], one, names)
            for name, one in value.items()
        )
    return (_zigzag(len(value)) if value else b"") + _joined(items) + b"\0"


def _zigzag(value: int) -> bytes:
    raw = (value << 1) ^ (value >> 63)
    out = bytearray()
    while raw >= 0x80:
        out.append(raw & 0x7F | 0x80)
        raw >>= 7
    return bytes((*out, raw))
