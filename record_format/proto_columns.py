"""Protobuf values as Arrow columns: a message becomes a struct, and values fill it by number.

* What is not in a value is null if its field has presence (`optional`, a message, a member of a
  oneof), unless its schema gives it a default; else it is zero, empty, or an enum's first. That is
  what Spark's `from_protobuf` makes of it with `emit.default.values`.
* Numbers without a sign have a type that holds them all: uint32 is int64, uint64 a decimal of 20
  digits. An enum is text, and a number that it does not have is its digits. A Timestamp is one;
  other messages of Google's are as any. A message that has no columns has no column.
* A message that contains itself has no columns, and is refused.
* A value is what the reader's schema makes of it, whichever schema it was written by: numbers say
  which field they are. The writer's says which message it is.

Not thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from tierlog.record_format import column_kernel as column
from tierlog.record_format import proto_kernel as kernel
from tierlog.record_format.columns import (
    REASONS,
    Columns,
    Node,
    Numbers,
    Room,
    Values,
    check_columns,
)
from tierlog.record_format.errors import InvalidOption, UndecodableValue
from tierlog.record_format.proto_files import ProtoFile, file_of, message_indexes
from tierlog.record_format.schema_records import Malformed

_PLAIN: Final[Mapping[int, tuple[pa.DataType, int, int]]] = {
    kernel.DOUBLE: (pa.float64(), column.F64, kernel.EIGHT),
    kernel.FLOAT: (pa.float32(), column.F32, kernel.FOUR),
    kernel.INT64: (pa.int64(), column.I64, kernel.VARINT),
    kernel.UINT64: (pa.decimal128(20, 0), column.I128, kernel.VARINT),
    kernel.INT32: (pa.int32(), column.I32, kernel.VARINT),
    kernel.FIXED64: (pa.decimal128(20, 0), column.I128, kernel.EIGHT),
    kernel.FIXED32: (pa.int64(), column.I64, kernel.FOUR),
    kernel.BOOL: (pa.bool_(), column.BYTE, kernel.VARINT),
    kernel.STRING: (pa.string(), column.VARIABLE, kernel.SIZED),
    kernel.BYTES_KIND: (pa.binary(), column.VARIABLE, kernel.SIZED),
    kernel.UINT32: (pa.int64(), column.I64, kernel.VARINT),
    kernel.SFIXED32: (pa.int32(), column.I32, kernel.FOUR),
    kernel.SFIXED64: (pa.int64(), column.I64, kernel.EIGHT),
    kernel.SINT32: (pa.int32(), column.I32, kernel.VARINT),
    kernel.SINT64: (pa.int64(), column.I64, kernel.VARINT),
}
_ENUMS: Final = frozenset((kernel.ENUM, kernel.CLOSED_ENUM))
_TEXTS: Final = frozenset((kernel.STRING, kernel.BYTES_KIND))
_FLOATS: Final = {kernel.DOUBLE: "<d", kernel.FLOAT: "<f"}
_REASONS: Final[Mapping[int, str]] = {
    **REASONS,
    kernel.NO_INDEXES: "it does not begin with the indexes of a message",
    kernel.BAD_TAG: "what follows is no field",
}


class _Operation(NamedTuple):
    """As the kernel's."""

    kind: int
    node: int
    number: int = 0
    wire: int = -1
    list_node: int = -1
    absent: int = kernel.IS_NULL
    default: int = 0
    oneof: int = -1
    first: int = 0
    size: int = 0


class _Again(UndecodableValue):
    """Some values have to be written anew: in `rows` those are 1."""

    def __init__(self, rows: Numbers) -> None:
        super().__init__("a field twice", row=int(np.argmax(rows)))
        self.rows = rows


class ProtoColumns:
    """Decodes values into columns of a reader's message, whoever wrote them."""

    def __init__(
        self, text: str, dependencies: Sequence[tuple[str, str]], message: str | None = None
    ) -> None:
        """`message`: its name, with or without its package; by default the first of the file.
        Raises InvalidOption if it has no columns.
        """
        self._message = _find(file_of(text, dependencies), message)
        self._class = message_factory.GetMessageClass(self._message)
        self._nodes: list[Node] = []
        self._ops: list[_Operation] = []
        self._paths: list[str] = []  # of each operation
        self._oneofs: list[str] = []
        self._tables: list[int] = []
        self._constants = bytearray()
        self._has_maps = False
        self._with_columns: dict[str, bool] = {}
        self._add_message(self._message, _Operation(kernel.MESSAGE, 0), "", frozenset())
        self.type = self._nodes[0].type
        if not self.type.num_fields:
            raise InvalidOption(f"the message {self._message.full_name} has no fields: read bytes")
        self._ops = [
            op._replace(oneof=op.oneof + len(self._ops) if op.oneof >= 0 else -1)
            for op in self._ops
        ]
        self._columns = Columns(self._nodes, self._tables)
        self._writers: dict[int, ProtoFile] = {}

    @property
    def message(self) -> str:
        return str(self._message.full_name)

    def add_writer(self, text: str, dependencies: Sequence[tuple[str, str]]) -> int:
        """What `decode` takes for a value of this schema."""
        file = file_of(text, dependencies)
        path = next((way for way, one in _messages(file) if one.full_name == self.message), ())
        root = len(self._tables)
        self._tables += (len(path) or -1, *path)
        self._writers[root] = file
        return root

    def decode(
        self, values: pa.Array, roots: Numbers, *, skipped: int, permissive: bool
    ) -> pa.Array:
        """The columns. `values` are binary; of each, `skipped` bytes come before the indexes of its
        message; `roots` say who wrote it, and -1 that it is null. What does not decode is null if
        `permissive`, and then -1 in `roots`. Raises UndecodableValue.
        """
        try:
            found = self._decoded(values, roots, skipped, permissive=permissive)
            if not self._has_maps or not _has_keys_twice(found):
                return found
            rows = np.ones(len(values), np.uint8)
        except _Again as error:
            rows = error.rows
        values = self._written_anew(values, roots, rows, skipped, permissive=permissive)
        return self._decoded(values, roots, skipped, permissive=permissive)

    def _decoded(
        self, values: pa.Array, roots: Numbers, skipped: int, *, permissive: bool
    ) -> pa.Array:
        given = Values.of(values)
        constants = np.frombuffer(bytes(self._constants), np.uint8)
        ops, tables = np.array(self._ops, np.int64).ravel(), np.array([*self._tables, 0], np.int64)
        frames = len(self._ops) + len(self._oneofs)
        stack = np.zeros(
            frames + 1 + kernel.FRAME_WIDTH * len(self._ops) + column.DEPTH_MAX, np.int64
        )

        def run(room: Room, *, is_writing: bool) -> None:
            state, again = np.zeros(column.STATE_SIZE, np.int64), np.zeros(len(roots), np.uint8)
            row = kernel.decode_values(
                given.content, given.ends, skipped, roots, ops, tables, constants, room.nodes,
                room.counts, state, room.heap, np.empty_like(room.counts), stack, frames, again,
                is_writing, permissive and not is_writing,
            )  # fmt: skip
            if row >= 0:
                op, reason = int(state[column.FAILED_OP]), int(state[column.REASON])
                if reason == kernel.OTHER_MESSAGE:
                    problem = self._other_message(values[row].as_py()[skipped:], int(roots[row]))
                else:
                    problem = f"{self._paths[op] or '/'}: {_REASONS[reason]}"
                raise UndecodableValue(problem, row=row)
            if again.any():
                raise _Again(again)

        return self._columns.fill(run)

    def _other_message(self, encoded: bytes, root: int) -> str:
        try:
            found = self._writers[root].message_at(message_indexes(encoded)[0]).full_name
        except Malformed as error:
            return str(error)
        return f"it is a {found}, and {self.message} is read"

    def _written_anew(
        self, values: pa.Array, roots: Numbers, rows: Numbers, skipped: int, *, permissive: bool
    ) -> pa.Array:
        """As serializers write them: each field once, and those alone that are known."""
        found = values.to_pylist()
        for row in np.flatnonzero(rows & (roots >= 0)).tolist():
            position = skipped + message_indexes(found[row][skipped:])[1]
            try:
                message = self._class.FromString(found[row][position:])
            except DecodeError as error:
                if not permissive:
                    raise UndecodableValue(str(error), row=row) from error
                roots[row] = -1
                continue
            message.DiscardUnknownFields()
            found[row] = found[row][:position] + message.SerializePartialToString()
        return pa.array(found, pa.binary())

    # --- the reader's type ------------------------------------------------------------------------

    def _add_message(
        self, message: Any, operation: _Operation, path: str, within: frozenset[str]
    ) -> int:
        """Its node; those below it follow, as do their operations its own."""
        if message.full_name in within:
            raise InvalidOption(
                f"{path or '/'} of the schema contains itself ({message.full_name}), "
                "which columns cannot: read bytes"
            )
        within |= {message.full_name}
        node, op = len(self._nodes), self._add(operation, path)
        self._nodes.append(Node(pa.null(), column.VOID))
        is_entry = message.GetOptions().map_entry
        found: list[tuple[pa.Field, int]] = []
        fields: dict[int, int] = {}
        for field in message.fields:
            before = len(self._ops)
            child = self._add_field(field, f"{path}/{field.name}", within, is_entry=is_entry)
            if len(self._ops) > before:
                fields[field.number] = before
            if child >= 0:
                nullable = not (is_entry and field.number == 1)
                found.append((pa.field(field.name, self._nodes[child].type, nullable), child))
        type_ = pa.struct([one for one, _ in found])
        self._nodes[node] = Node(type_, column.STRUCT, tuple(child for _, child in found))
        self._ops[op] = operation._replace(node=node, first=len(self._tables), size=len(fields))
        self._tables += (fields[number] for number in sorted(fields))
        return node

    def _add_field(self, field: Any, path: str, within: frozenset[str], *, is_entry: bool) -> int:
        """The node of its column; -1 if there is none."""
        check_columns(len(self._nodes), path)
        absent = kernel.IS_NULL
        if is_entry and (field.message_type or field.enum_type) is not None:
            absent = kernel.IS_AGAIN
        elif is_entry or not field.has_presence or field.has_default_value:
            absent = kernel.IS_DEFAULT
        oneof = field.containing_oneof
        operation = _Operation(
            field.type,
            -1,
            number=field.number,
            absent=absent,
            oneof=-1 if oneof is None else self._oneof(f"{path.rpartition('/')[0]}/{oneof.name}"),
        )
        if field.message_type is not None and not self._has_columns(field.message_type):
            if oneof is not None:  # it says that the others are not there
                self._add(operation._replace(kind=kernel.BYTES_KIND, wire=kernel.SIZED), path)
            return -1
        if not field.is_repeated:
            return self._add_item(field, operation, path, within)
        list_node = len(self._nodes)
        self._nodes.append(Node(pa.null(), column.VOID))
        is_map = field.message_type is not None and field.message_type.GetOptions().map_entry
        operation = operation._replace(
            list_node=list_node, absent=kernel.IS_AGAIN if is_map else kernel.IS_NULL
        )
        child = self._add_item(field, operation, path, within)
        item = self._nodes[child].type
        if is_map:
            self._has_maps = True
            type_ = pa.map_(item.field(0).type, item.field(1).type)
        else:
            type_ = pa.list_(pa.field("element", item))
        self._nodes[list_node] = Node(type_, column.LIST, (child,))
        return list_node

    def _has_columns(self, message: Any) -> bool:
        """Whether any of its fields has one; a group always has. What contains itself is refused
        elsewhere.
        """
        name = message.full_name
        if name not in self._with_columns:
            self._with_columns[name] = True  # while it is looked at
            fields = message.fields[1:] if message.GetOptions().map_entry else message.fields
            inner = [one.message_type for one in fields]
            self._with_columns[name] = any(one is None or self._has_columns(one) for one in inner)
        return self._with_columns[name]

    def _add_item(
        self, field: Any, operation: _Operation, path: str, within: frozenset[str]
    ) -> int:
        """The node of a field, or of what a list is of."""
        node = len(self._nodes)
        if field.message_type is not None:
            if field.message_type.full_name != "google.protobuf.Timestamp":
                wire = kernel.START if field.type == kernel.GROUP else kernel.SIZED
                return self._add_message(
                    field.message_type, operation._replace(wire=wire), path, within
                )
            self._nodes.append(Node(pa.timestamp("us", "UTC"), column.I64))
            operation = operation._replace(kind=kernel.TIMESTAMP, wire=kernel.SIZED)
        elif field.enum_type is not None:
            operation = self._enum(field, operation)
        else:
            type_, kind, wire = _PLAIN[field.type]
            self._nodes.append(Node(type_, kind))
            operation = operation._replace(wire=wire)
            if field.type in _TEXTS and not field.is_repeated:
                default = field.default_value
                default = default.encode() if isinstance(default, str) else default
                first = len(self._constants)
                self._constants += default
                operation = operation._replace(first=first, size=len(default))
            elif not field.is_repeated:
                operation = operation._replace(default=_bits(field.type, field.default_value))
        self._add(operation._replace(node=node), path)
        return node

    def _enum(self, field: Any, operation: _Operation) -> _Operation:
        symbols: dict[int, str] = {}
        for one in field.enum_type.values:
            symbols.setdefault(one.number, one.name)
        self._nodes.append(Node(pa.string(), column.I32, symbols=symbols))
        operation = operation._replace(wire=kernel.VARINT)
        if not field.is_repeated:
            operation = operation._replace(default=field.default_value)
        if field.enum_type.is_closed:
            first = len(self._tables)
            self._tables += symbols
            return operation._replace(kind=kernel.CLOSED_ENUM, first=first, size=len(symbols))
        return operation

    def _oneof(self, name: str) -> int:
        if name not in self._oneofs:
            self._oneofs.append(name)
        return self._oneofs.index(name)

    def _add(self, operation: _Operation, path: str) -> int:
        self._ops.append(operation)
        self._paths.append(path)
        return len(self._ops) - 1


def _messages(file: ProtoFile) -> Iterator[tuple[tuple[int, ...], Any]]:
    """Each message of the file, and the indexes that lead to it; the first is the first."""
    waiting: list[tuple[tuple[int, ...], Any]] = [
        ((index,), one) for index, one in enumerate(file.messages)
    ]
    for way, one in waiting:
        yield way, one
        waiting += (((*way, index), inner) for index, inner in enumerate(one.nested_types))


def _find(file: ProtoFile, name: str | None) -> Any:
    """Raises InvalidOption."""
    package = file.description.package
    found = {str(one.full_name): one for _, one in _messages(file)}
    if not found:
        raise InvalidOption("the schema has no message")
    if name is None:
        return next(iter(found.values()))
    message = found.get(name, found.get(f"{package}.{name}"))
    if message is None:
        raise InvalidOption(f"the schema has no message {name!r}; it has {', '.join(found)}"[:1000])
    return message


def _bits(kind: int, value: Any) -> int:
    if kind in _FLOATS:
        return int.from_bytes(struct.pack(_FLOATS[kind], value), "little", signed=True)
    return (int(value) + 2**63) % 2**64 - 2**63


def _has_keys_twice(found: pa.Array) -> bool:
    """Whether a map within it has."""
    if pa.types.is_map(found.type):
        keys = np.asarray(found.keys.dictionary_encode().indices, np.int64)
        maps = np.repeat(np.arange(len(found)), np.diff(np.asarray(found.offsets)))
        pairs = np.sort(maps * len(keys) + keys)
        return bool((pairs[1:] == pairs[:-1]).any()) or _has_keys_twice(found.items)
    if pa.types.is_struct(found.type):
        return any(_has_keys_twice(found.field(index)) for index in range(found.type.num_fields))
    return pa.types.is_list(found.type) and _has_keys_twice(found.values)
