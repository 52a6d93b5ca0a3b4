"""The columns of a reader's type, which a kernel fills: nodes, one for each type within the type.

A kernel runs twice: `Columns.fill` gives it nothing to write to, allocates what it counted, and
gives it that.

Memory is bounded, whatever schemas and values say: a few lines of types that refer to each other
may be any number of columns, and a byte, such as a null, a row of each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple, Protocol, Self

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from tierlog.record_format import column_kernel as kernel
from tierlog.record_format.errors import ColumnsTooLarge, InvalidOption

REASONS: Final[Mapping[int, str]] = {
    kernel.ENDS_EARLY: "the value ends early",
    kernel.BAD_NUMBER: "a number is damaged, or out of range",
    kernel.NO_BRANCH: "a union's branch, or an enum's symbol, that the schema does not have",
    kernel.TOO_DEEP: f"nested more than {kernel.DEPTH_MAX} levels deep",
    kernel.BYTES_FOLLOW: "bytes follow the value's end",
    kernel.NOT_TEXT: "text that is not UTF-8",
    kernel.TOO_LARGE: "a decimal of more than 38 digits",
}
_WIDTHS: Final = {
    kernel.VOID: 0, kernel.BYTE: 1, kernel.I32: 4, kernel.I64: 8, kernel.F32: 4, kernel.F64: 8,
    kernel.I128: 16,
}  # fmt: skip
COLUMNS_MAX: Final = 10_000  # of a schema, with those that have columns themselves
ROOM_MAX: Final = 256 << 20  # bytes of a batch's columns; Arrow's ends can say eight times that

Numbers = np.ndarray[Any, Any]


class Node(NamedTuple):
    """`symbols`: the texts of numbers; one that is not among them is its digits."""

    type: pa.DataType
    kind: int
    children: tuple[int, ...] = ()
    symbols: Mapping[int, str] | None = None


class Values(NamedTuple):
    """Binary values, as kernels take them: value n is `content` from `ends[n]` to `ends[n + 1]`."""

    content: Numbers
    ends: Numbers

    @classmethod
    def of(cls, values: pa.Array) -> Self:
        _, ends, data = values.buffers()
        ends = np.frombuffer(ends, np.int32)[values.offset : values.offset + len(values) + 1].copy()
        content = np.frombuffer(data or b"", np.uint8)
        content.setflags(write=False)
        return cls(content, ends)


class Room(NamedTuple):
    """Where a kernel writes, and what it counts."""

    nodes: Numbers
    counts: Numbers
    heap: Numbers


class Kernel(Protocol):
    def __call__(self, room: Room, *, is_writing: bool) -> None:
        """Raises UndecodableValue."""


def check_columns(count: int, path: str) -> None:
    """Raises InvalidOption if a schema has more columns than there may be."""
    if count > COLUMNS_MAX:
        raise InvalidOption(
            f"{path or '/'} of the schema: there are more than {COLUMNS_MAX} columns, with those "
            "in others: read bytes"
        )


def check_room(type_: pa.DataType, *, rows: int, items: int) -> None:
    """Raises ColumnsTooLarge if so many rows, with so many items in lists, may take more memory
    than there is, without that of text.
    """
    row_bytes, item_bytes = _widths(type_)
    if (size := rows * row_bytes + items * item_bytes) > ROOM_MAX:
        raise ColumnsTooLarge(
            f"/: {rows} values with up to {items} items in lists may take {size} bytes as columns, "
            f"and may take {ROOM_MAX}"
        )


def _widths(type_: pa.DataType) -> tuple[int, int]:
    """The bytes of a row, and of an item of any list in it, at most."""
    if pa.types.is_struct(type_):
        found = [_widths(one.type) for one in type_]
        return 1 + sum(own for own, _ in found), max((item for _, item in found), default=0)
    if pa.types.is_list(type_):
        own, item = _widths(type_.value_type)
    elif pa.types.is_map(type_):
        own, item = _widths(pa.struct([("key", type_.key_type), ("value", type_.item_type)]))
    else:
        return 17, 0
    return 5, max(own, item)


class Columns:
    def __init__(self, nodes: Sequence[Node], tables: list[int]) -> None:
        """`nodes`: the first is the type's; `tables`: the kernel's, to which theirs are added."""
        self._nodes = nodes
        self._children: list[int] = []  # where in the tables those of each node are
        self._alike: list[tuple[int, int]] = []  # and those with as many rows, itself too
        self._symbol_bytes = np.array([_longest_symbol(node) for node in nodes], np.int64)
        for index, node in enumerate(nodes):
            self._children.append(len(tables))
            tables += node.children
            alike = list(self._with_as_many_rows(index))
            self._alike.append((len(tables), len(alike)))
            tables += alike

    def fill(self, run: Kernel) -> pa.Array:
        """What the kernel decodes. Raises UndecodableValue, ColumnsTooLarge."""
        counts = np.zeros(2 * len(self._nodes), np.int64)
        run(Room(self._layout(counts), counts, np.zeros(8, np.uint8)), is_writing=False)
        nodes = self._layout(counts)
        self._check_room(nodes, counts)
        heap = np.empty(int(nodes[-1]) // 8 + 1, np.int64).view(np.uint8)
        run(Room(nodes, np.zeros_like(counts), heap), is_writing=True)
        return self._column(0, Room(nodes, counts, heap))

    def _check_room(self, nodes: Numbers, counts: Numbers) -> None:
        """Raises ColumnsTooLarge."""
        ends = [*nodes[kernel.VALID_AT : -1 : kernel.NODE_WIDTH], nodes[-1]]
        sizes = np.diff(ends) + counts[::2] * self._symbol_bytes
        if (size := int(sizes.sum())) > ROOM_MAX:
            largest = int(np.argmax(sizes))
            raise ColumnsTooLarge(
                f"{self._path(largest) or '/'}: it has {int(counts[2 * largest])} rows of a "
                f"batch whose columns take up to {size} bytes, and may take {ROOM_MAX}"
            )

    def _path(self, index: int) -> str:
        for parent, node in enumerate(self._nodes):
            if index in node.children:
                place = node.children.index(index)
                is_struct = node.kind == kernel.STRUCT
                name = node.type.field(place).name if is_struct else "items"
                return f"{self._path(parent)}/{name}"
        return ""

    def _with_as_many_rows(self, index: int) -> Iterator[int]:
        yield index
        if self._nodes[index].kind == kernel.STRUCT:
            for child in self._nodes[index].children:
                yield from self._with_as_many_rows(child)

    def _layout(self, counts: Numbers) -> Numbers:
        """The kernel's nodes, and the heap's size."""
        rows: list[int] = []
        at = 0
        for index, node in enumerate(self._nodes):
            count, size = int(counts[2 * index]), int(counts[2 * index + 1])
            first = self._children[index]
            valid_at, at = at, _aligned(at + count)
            data_at = ends_at = at
            if node.kind in (kernel.VARIABLE, kernel.LIST):
                at = _aligned(at + 4 * (count + 1))
                data_at = at
                at = _aligned(at + (size if node.kind == kernel.VARIABLE else 0))
            else:
                at = _aligned(at + count * _WIDTHS.get(node.kind, 0))
            places = (valid_at, data_at, ends_at)
            rows += (node.kind, first, len(node.children), *places, *self._alike[index])
        return np.array([*rows, at], np.int64)

    def _column(self, index: int, room: Room) -> pa.Array:
        node, heap = self._nodes[index], room.heap
        rows = int(room.counts[2 * index])
        at = kernel.NODE_WIDTH * index
        valid_at, data_at, ends_at = (int(room.nodes[at + cell]) for cell in range(3, 6))
        there = heap[valid_at : valid_at + rows]
        nulls = rows - int(np.count_nonzero(there))
        valid = pa.py_buffer(np.packbits(there, bitorder="little")) if nulls else None
        children = [self._column(child, room) for child in node.children]
        if node.kind == kernel.VOID:
            return pa.nulls(rows)
        if node.kind == kernel.STRUCT:
            return pa.Array.from_buffers(node.type, rows, [valid], nulls, children=children)
        if node.kind in (kernel.VARIABLE, kernel.LIST):
            heap[ends_at : ends_at + 4] = 0
            ends = pa.py_buffer(heap[ends_at : ends_at + 4 * (rows + 1)])
            if node.kind == kernel.LIST:
                return pa.Array.from_buffers(
                    node.type, rows, [valid, ends], nulls, children=children
                )
            data = pa.py_buffer(heap[data_at : data_at + int(room.counts[2 * index + 1])])
            return pa.Array.from_buffers(node.type, rows, [valid, ends, data], nulls)
        data = heap[data_at : data_at + rows * _WIDTHS[node.kind]]
        if node.kind == kernel.BYTE:
            data = np.packbits(data, bitorder="little")
        if node.symbols is None:
            return pa.Array.from_buffers(node.type, rows, [valid, pa.py_buffer(data)], nulls)
        numbers = pa.Array.from_buffers(pa.int32(), rows, [valid, pa.py_buffer(data)], nulls)
        return _named(numbers, node.symbols)


def _longest_symbol(node: Node) -> int:
    return max((len(one.encode()) for one in (node.symbols or {}).values()), default=0)


def _named(numbers: pa.Array, symbols: Mapping[int, str]) -> pa.Array:
    found = pc.index_in(numbers, pa.array(symbols, pa.int32()))
    names = pa.array(symbols.values(), pa.string()).take(found)
    if names.null_count == numbers.null_count:
        return names
    return pc.coalesce(names, numbers.cast(pa.string()))


def _aligned(size: int) -> int:
    return (size + 15) & ~15
