"""Decodes Avro values into columns, compiled: walks values by a table of operations.

Rules that keep it honest:

* `avro_columns` makes the tables, and alone calls this. A table says how to read what a writer
  wrote, and into which node of the reader's type; a node of -1 is read past.
* It runs twice over the same values: first nothing is written, and each node's rows and bytes are
  counted; the caller allocates exactly those, and the second run fills them.
* Values are untrusted: nothing is read past a value's end, and each item of an array or a map takes
  a byte at least. Nothing is raised here: the first failure's row, operation and reason are in
  `state`, or the row becomes null.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from tierlog.record_format.compiled import (
    BYTES,
    READ_ONLY,
    compiled,
    copy_bytes,
    pointer_to,
    varlong,
)

# Operations: kind, node, and two numbers; `tables` has the lists that they refer to.
OP_WIDTH: Final = 4
NULL: Final = 0
BOOL: Final = 1
INT: Final = 2  # times its first number
FLOAT: Final = 3
DOUBLE: Final = 4
TEXT: Final = 5  # bytes: of its own length, or of the first number's if that is not -1
ENUM: Final = 6  # the reader's index of each symbol: where in `tables`, and how many
ARRAY: Final = 7  # the operation of an item
MAP: Final = 8  # the operations of a value and of a key
UNION: Final = 9  # the operations of its branches: where in `tables`, and how many
RECORD: Final = 10  # those of its fields, in the same way
MEMBER: Final = 11  # the operation of one member, and which it is: the others are null
DEFAULT: Final = 12  # the operation of a value in `constants`, and where that is
DECIMAL: Final = 13  # as TEXT
REFUSE: Final = 14
STRING: Final = 15  # as TEXT, and UTF-8

# Nodes: kind, children (where in `tables`, and how many), and where in the heap its columns are.
NODE_WIDTH: Final = 8
CHILDREN: Final = 1
CHILD_COUNT: Final = 2
VALID_AT: Final = 3
DATA_AT: Final = 4
ENDS_AT: Final = 5
ALIKE: Final = 6  # it and those below it that have as many rows: where in `tables`, and how many
ALIKE_COUNT: Final = 7
VOID: Final = 0
BYTE: Final = 1
I32: Final = 2
I64: Final = 3
F32: Final = 4
F64: Final = 5
VARIABLE: Final = 6
LIST: Final = 7  # a map's only child is its entries
STRUCT: Final = 8
I128: Final = 9

# Cells of `state`.
FAILED_OP: Final = 0
REASON: Final = 1
STATE_SIZE: Final = 2
ENDS_EARLY: Final = 1
BAD_NUMBER: Final = 2
NO_BRANCH: Final = 3
REFUSED: Final = 4
TOO_DEEP: Final = 5
BYTES_FOLLOW: Final = 6
TOO_LARGE: Final = 7
NOT_TEXT: Final = 8

DEPTH_MAX: Final = 200
FRAME_WIDTH: Final = 3
_MAX: Final = 2**63 - 1

_I64: Final = types.int64
_NUMBERS: Final = types.CPointer(types.int64)
_ENV: Final = types.Tuple(
    (
        _NUMBERS,  # operations
        _NUMBERS,  # tables
        BYTES,  # constants
        _NUMBERS,  # nodes
        _NUMBERS,  # counts: rows and bytes of each node
        BYTES,  # the heap, and the same as other numbers
        types.CPointer(types.int32),
        _NUMBERS,
        types.CPointer(types.float32),
        types.CPointer(types.float64),
        _NUMBERS,  # state
        _I64,  # whether to write
        _NUMBERS,  # the stack: an operation, and two numbers of where it is
    )
)


@intrinsic
def _pointer_as(typing_context, pointer, like):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """The pointer, to numbers of the type of `like`."""
    signature = types.CPointer(like)(pointer, like)

    def generate(context, builder, signature, arguments):  # type: ignore[no-untyped-def]
        return builder.bitcast(arguments[0], context.get_value_type(signature.return_type))

    return signature, generate


@compiled(_I64(_I64, _I64, _ENV))
def _begin(node, there, env):  # type: ignore[no-untyped-def]
    """One more row of a node; its number."""
    nodes, counts, heap, is_writing = env[3], env[4], env[5], env[11]
    row = counts[2 * node]
    counts[2 * node] = row + 1
    if is_writing:
        heap[nodes[NODE_WIDTH * node + VALID_AT] + row] = there
    return row


@compiled(types.void(_I64, _I64, _ENV))
def _end(node, row, env):  # type: ignore[no-untyped-def]
    """The row ends where the node's bytes, or items, end so far."""
    if env[11]:
        env[6][env[3][NODE_WIDTH * node + ENDS_AT] // 4 + row + 1] = np.int32(env[4][2 * node + 1])


@compiled(types.void(_I64, _ENV))
def _null(node, env):  # type: ignore[no-untyped-def]
    """A null row of a node, and of those below it that have as many rows."""
    tables, nodes, heap, is_writing = env[1], env[3], env[5], env[11]
    first = nodes[NODE_WIDTH * node + ALIKE]
    for index in range(nodes[NODE_WIDTH * node + ALIKE_COUNT]):
        one = tables[first + index]
        row = _begin(one, 0, env)
        kind, data_at = nodes[NODE_WIDTH * one], nodes[NODE_WIDTH * one + DATA_AT]
        if kind in (VARIABLE, LIST):
            _end(one, row, env)
        elif is_writing:
            if kind == BYTE:
                heap[data_at + row] = 0
            elif kind in (I32, F32):
                env[6][data_at // 4 + row] = 0
            elif kind in (I64, F64):
                env[7][data_at // 8 + row] = 0
            elif kind == I128:
                env[7][data_at // 8 + 2 * row] = 0
                env[7][data_at // 8 + 2 * row + 1] = 0


@compiled(types.void(_I64, _I64, _ENV))
def _put_int(node, value, env):  # type: ignore[no-untyped-def]
    row = _begin(node, 1, env)
    if env[11]:
        at = NODE_WIDTH * node
        kind, data_at = env[3][at], env[3][at + DATA_AT]
        if kind == BYTE:
            env[5][data_at + row] = value
        elif kind == I32:
            env[6][data_at // 4 + row] = np.int32(value)
        elif kind == I64:
            env[7][data_at // 8 + row] = value
        elif kind == F32:
            env[8][data_at // 4 + row] = np.float32(value)
        else:
            env[9][data_at // 8 + row] = np.float64(value)


@compiled(types.void(_I64, BYTES, _I64, _I64, _ENV))
def _put_bytes(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = _begin(node, 1, env)
    used = env[4][2 * node + 1]
    if env[11] and size:
        copy_bytes(env[5], env[3][NODE_WIDTH * node + DATA_AT] + used, source, at, size)
    env[4][2 * node + 1] = used + size
    _end(node, row, env)


@compiled(types.void(_I64, BYTES, _I64, _I64, _ENV))
def _put_float(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = _begin(node, 1, env)
    if env[11]:
        kind, data_at = env[3][NODE_WIDTH * node], env[3][NODE_WIDTH * node + DATA_AT]
        place = data_at + row * (4 if kind == F32 else 8)
        copy_bytes(env[5], place, source, at, size)
        if size == 4 and kind == F64:
            env[9][place // 8] = np.float64(env[8][place // 4])


@compiled(types.void(_I64, BYTES, _I64, _I64, _ENV))
def _put_decimal(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = _begin(node, 1, env)
    if env[11]:
        place = env[3][NODE_WIDTH * node + DATA_AT] + 16 * row
        fill = 255 if size and source[at] >= 128 else 0
        for index in range(16):
            env[5][place + index] = source[at + size - 1 - index] if index < size else fill


@compiled(types.boolean(BYTES, _I64, _I64))
def _is_utf8(source, at, end):  # type: ignore[no-untyped-def]
    """The table of the Unicode Standard (3-7): no overlong forms, no surrogates."""
    while at < end:
        byte = source[at]
        at += 1
        if byte < 0x80:
            continue
        if byte < 0xC2 or byte > 0xF4:
            return False
        following = 1 if byte < 0xE0 else 2 if byte < 0xF0 else 3
        low = 0xA0 if byte == 0xE0 else 0x90 if byte == 0xF0 else 0x80
        high = 0x9F if byte == 0xED else 0x8F if byte == 0xF4 else 0xBF
        if following > end - at or source[at] < low or source[at] > high:
            return False
        for index in range(1, following):
            if source[at + index] & 0xC0 != 0x80:
                return False
        at += following
    return True


@compiled(_I64(_I64, _I64, _ENV))
def _fail(op, reason, env):  # type: ignore[no-untyped-def]
    env[10][FAILED_OP] = op
    env[10][REASON] = reason
    return np.int64(-1)


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _block(source, at, end):  # type: ignore[no-untyped-def]
    """(items, position after its head) of a block of an array or a map; -1 if it is damaged."""
    count, at = varlong(source, at, end)
    if at >= 0 and count < 0:  # its size in bytes follows
        count = -count
        _, at = varlong(source, at, end)
    return (count, at) if count >= 0 else (count, np.int64(-1))


@compiled(_I64(BYTES, _I64, _I64, _I64, _ENV))
def _read_bytes(source, at, end, op, env):  # type: ignore[no-untyped-def]
    kind, node, size = env[0][OP_WIDTH * op], env[0][OP_WIDTH * op + 1], env[0][OP_WIDTH * op + 2]
    if size < 0:
        size, at = varlong(source, at, end)
        if at < 0 or size < 0:
            return _fail(op, BAD_NUMBER, env)
    if size > end - at:
        return _fail(op, ENDS_EARLY, env)
    if kind == STRING and not env[11] and not _is_utf8(source, at, at + size):
        return _fail(op, NOT_TEXT, env)
    if node >= 0 and kind == DECIMAL:
        if size > 16:
            return _fail(op, TOO_LARGE, env)
        _put_decimal(node, source, at, size, env)
    elif node >= 0:
        _put_bytes(node, source, at, size, env)
    return at + size


@compiled(_I64(BYTES, _I64, _I64, _I64, _ENV))
def _read_plain(source, at, end, op, env):  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912
    """A value that has no others in it; the position after it, or -1."""
    kind, node, first = env[0][OP_WIDTH * op], env[0][OP_WIDTH * op + 1], env[0][OP_WIDTH * op + 2]
    if kind == INT:
        value, at = varlong(source, at, end)
        if at < 0:
            return _fail(op, BAD_NUMBER, env)
        if node >= 0:
            if first != 1:
                value = max(-(_MAX // first), min(_MAX // first, value)) * first
            elif env[3][NODE_WIDTH * node] == I32 and np.int64(np.int32(value)) != value:
                return _fail(op, BAD_NUMBER, env)
            _put_int(node, value, env)
        return at
    if kind in (TEXT, STRING, DECIMAL):
        return _read_bytes(source, at, end, op, env)
    if kind == NULL:
        if node >= 0:
            _null(node, env)
        return at
    if kind in (FLOAT, DOUBLE):
        size = 4 if kind == FLOAT else 8
        if size > end - at:
            return _fail(op, ENDS_EARLY, env)
        if node >= 0:
            _put_float(node, source, at, size, env)
        return at + size
    if kind == BOOL:
        if at >= end:
            return _fail(op, ENDS_EARLY, env)
        if source[at] > 1:
            return _fail(op, BAD_NUMBER, env)
        if node >= 0:
            _put_int(node, np.int64(source[at]), env)
        return at + 1
    if kind == ENUM:
        index, at = varlong(source, at, end)
        if at < 0:
            return _fail(op, BAD_NUMBER, env)
        if index < 0 or index >= env[0][OP_WIDTH * op + 3] or env[1][first + index] < 0:
            return _fail(op, NO_BRANCH, env)
        if node >= 0:
            _put_int(node, env[1][first + index], env)
        return at
    return _fail(op, REFUSED, env)


@compiled(_I64(BYTES, _I64, _I64, _I64, _ENV))
def _read_value(source, at, end, op, env):  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0915
    """Read one value; the position after it, or -1.

    What it is inside of is on a stack of its own: numba cannot cache a function that calls itself.
    """
    ops, tables, stack = env[0], env[1], env[12]
    depth = np.int64(0)
    while True:
        kind, node = ops[OP_WIDTH * op], ops[OP_WIDTH * op + 1]
        first, second = ops[OP_WIDTH * op + 2], ops[OP_WIDTH * op + 3]
        if kind == UNION:
            index, at = varlong(source, at, end)
            if at < 0:
                return _fail(op, BAD_NUMBER, env)
            if index < 0 or index >= second:
                return _fail(op, NO_BRANCH, env)
            op = tables[first + index]
            continue
        if kind == MEMBER:
            _begin(node, 1, env)
            children = env[3][NODE_WIDTH * node + CHILDREN]
            for index in range(env[3][NODE_WIDTH * node + CHILD_COUNT]):
                if index != second:
                    _null(tables[children + index], env)
            op = first
            continue
        if kind in (RECORD, ARRAY, MAP, DEFAULT):
            if depth == DEPTH_MAX:
                return _fail(op, TOO_DEEP, env)
            top = FRAME_WIDTH * depth
            depth += 1
            stack[top] = op
            stack[top + 1] = 0
            if kind == DEFAULT:
                stack[top + 1], stack[top + 2] = at, end
                kept = source
                source, at, end = env[2], tables[second], tables[second + 1]
                op = first
                continue
            if node >= 0:
                stack[top + 2] = _begin(node, 1, env)
        else:
            at = _read_plain(source, at, end, op, env)
            if at < 0:
                return at
        op = np.int64(-1)
        while depth and op < 0:
            top = FRAME_WIDTH * (depth - 1)
            above, done = stack[top], stack[top + 1]
            kind, node = ops[OP_WIDTH * above], ops[OP_WIDTH * above + 1]
            first, second = ops[OP_WIDTH * above + 2], ops[OP_WIDTH * above + 3]
            if kind == RECORD:
                if done == second:
                    depth -= 1
                else:
                    stack[top + 1] = done + 1
                    op = tables[first + done]
            elif kind == DEFAULT:
                source, at, end = kept, done, stack[top + 2]
                depth -= 1
            else:
                if done == 0:  # here: how many of the block are left
                    done, at = _block(source, at, end)
                    if at < 0:
                        return _fail(above, BAD_NUMBER, env)
                if done == 0:
                    if node >= 0:
                        _end(node, stack[top + 2], env)
                    depth -= 1
                    continue
                stack[top + 1] = done - 1
                if node >= 0:
                    env[4][2 * node + 1] += 1
                if kind == MAP:
                    if node >= 0:
                        _begin(tables[env[3][NODE_WIDTH * node + CHILDREN]], 1, env)
                    at = _read_bytes(source, at, end, second, env)
                    if at < 0:
                        return at
                op = first
        if op < 0:
            return at


_ARRAY: Final = types.Array(types.int64, 1, "C")
_ENDS: Final = types.Array(types.int32, 1, "C")
_RUN: Final = _I64(
    READ_ONLY, _ENDS, _I64, _ARRAY, _ARRAY, _ARRAY, READ_ONLY, _ARRAY, _ARRAY, _ARRAY,
    types.Array(types.uint8, 1, "C"), _ARRAY, _ARRAY, types.boolean, types.boolean,
)  # fmt: skip


@compiled(_RUN)
def decode_values(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data,
    ends,  # of values in `data`, one more than there are, as Arrow's are
    skipped,  # bytes of each value that are not Avro
    roots,  # the operation of each value; -1: null
    ops,
    tables,
    constants,
    nodes,
    counts,
    state,
    heap,
    saved,  # room for `counts`
    stack,
    is_writing,
    is_permissive,  # what does not decode becomes null, here and in `roots`
):
    """The number of the first value that does not decode; -1 if there is none."""
    source, counted, kept = pointer_to(data), pointer_to(counts), pointer_to(saved)
    bytes_of = pointer_to(heap)
    env = (
        pointer_to(ops),
        pointer_to(tables),
        pointer_to(constants),
        pointer_to(nodes),
        counted,
        bytes_of,
        _pointer_as(bytes_of, np.int32(0)),
        _pointer_as(bytes_of, np.int64(0)),
        _pointer_as(bytes_of, np.float32(0)),
        _pointer_as(bytes_of, np.float64(0)),
        pointer_to(state),
        np.int64(is_writing),
        pointer_to(stack),
    )
    for row in range(len(roots)):
        if is_permissive:
            for index in range(len(counts)):
                kept[index] = counted[index]
        if roots[row] >= 0:
            end = np.int64(ends[row + 1])
            at = _read_value(source, np.int64(ends[row]) + skipped, end, roots[row], env)
            if at == end:
                continue
            if at >= 0:
                _fail(roots[row], BYTES_FOLLOW, env)
            if not is_permissive:
                return row
            for index in range(len(counts)):
                counted[index] = kept[index]
            roots[row] = -1
        _null(np.int64(0), env)
    return -1
