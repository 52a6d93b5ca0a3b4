"""Decodes Avro values into columns, compiled: walks values by a table of operations.

Rules that keep it honest:

* `avro_columns` makes the tables, and alone calls this. A table says how to read what a writer
  wrote, and into which node of the reader's type; a node of -1 is read past.
* It runs twice over the same values, as `column_kernel` says.
* Values are untrusted: nothing is read past a value's end, and each item of an array or a map takes
  a byte at least. The first value that fails is returned, or its row becomes null.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from tierlog.record_format.column_kernel import (
    ARRAY as NUMBERS,
)
from tierlog.record_format.column_kernel import (
    BAD_NUMBER,
    BYTE,
    BYTES_FOLLOW,
    CHILD_COUNT,
    CHILDREN,
    DATA_AT,
    DEPTH_MAX,
    ENDS,
    ENDS_EARLY,
    ENV,
    F32,
    F64,
    HEAP,
    I32,
    I64,
    NO_BRANCH,
    NODE_WIDTH,
    NOT_TEXT,
    REFUSED,
    TOO_DEEP,
    TOO_LARGE,
    begin_row,
    copy_counts,
    end_row,
    environment,
    fail,
    is_utf8,
    put_bytes,
    put_null,
)
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

FRAME_WIDTH: Final = 3
_MAX: Final = 2**63 - 1

_I64: Final = types.int64


@compiled(types.void(_I64, _I64, ENV))
def _put_int(node, value, env):  # type: ignore[no-untyped-def]
    row = begin_row(node, 1, env)
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


@compiled(types.void(_I64, BYTES, _I64, _I64, ENV))
def _put_float(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = begin_row(node, 1, env)
    if env[11]:
        kind, data_at = env[3][NODE_WIDTH * node], env[3][NODE_WIDTH * node + DATA_AT]
        place = data_at + row * (4 if kind == F32 else 8)
        copy_bytes(env[5], place, source, at, size)
        if size == 4 and kind == F64:
            env[9][place // 8] = np.float64(env[8][place // 4])


@compiled(types.void(_I64, BYTES, _I64, _I64, ENV))
def _put_decimal(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = begin_row(node, 1, env)
    if env[11]:
        place = env[3][NODE_WIDTH * node + DATA_AT] + 16 * row
        fill = 255 if size and source[at] >= 128 else 0
        for index in range(16):
            env[5][place + index] = source[at + size - 1 - index] if index < size else fill


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _block(source, at, end):  # type: ignore[no-untyped-def]
    """(items, position after its head) of a block of an array or a map; -1 if it is damaged."""
    count, at = varlong(source, at, end)
    if at >= 0 and count < 0:  # its size in bytes follows
        count = -count
        _, at = varlong(source, at, end)
    return (count, at) if count >= 0 else (count, np.int64(-1))


@compiled(_I64(BYTES, _I64, _I64, _I64, ENV))
def _read_bytes(source, at, end, op, env):  # type: ignore[no-untyped-def]
    kind, node, size = env[0][OP_WIDTH * op], env[0][OP_WIDTH * op + 1], env[0][OP_WIDTH * op + 2]
    if size < 0:
        size, at = varlong(source, at, end)
        if at < 0 or size < 0:
            return fail(op, BAD_NUMBER, env)
    if size > end - at:
        return fail(op, ENDS_EARLY, env)
    if kind == STRING and not env[11] and not is_utf8(source, at, at + size):
        return fail(op, NOT_TEXT, env)
    if node >= 0 and kind == DECIMAL:
        if size > 16:
            return fail(op, TOO_LARGE, env)
        _put_decimal(node, source, at, size, env)
    elif node >= 0:
        put_bytes(node, source, at, size, env)
    return at + size


@compiled(_I64(BYTES, _I64, _I64, _I64, ENV))
def _read_plain(source, at, end, op, env):  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912
    """A value that has no others in it; the position after it, or -1."""
    kind, node, first = env[0][OP_WIDTH * op], env[0][OP_WIDTH * op + 1], env[0][OP_WIDTH * op + 2]
    if kind == INT:
        value, at = varlong(source, at, end)
        if at < 0:
            return fail(op, BAD_NUMBER, env)
        if node >= 0:
            if first != 1:
                value = max(-(_MAX // first), min(_MAX // first, value)) * first
            elif env[3][NODE_WIDTH * node] == I32 and np.int64(np.int32(value)) != value:
                return fail(op, BAD_NUMBER, env)
            _put_int(node, value, env)
        return at
    if kind in (TEXT, STRING, DECIMAL):
        return _read_bytes(source, at, end, op, env)
    if kind == NULL:
        if node >= 0:
            put_null(node, env)
        return at
    if kind in (FLOAT, DOUBLE):
        size = 4 if kind == FLOAT else 8
        if size > end - at:
            return fail(op, ENDS_EARLY, env)
        if node >= 0:
            _put_float(node, source, at, size, env)
        return at + size
    if kind == BOOL:
        if at >= end:
            return fail(op, ENDS_EARLY, env)
        if source[at] > 1:
            return fail(op, BAD_NUMBER, env)
        if node >= 0:
            _put_int(node, np.int64(source[at]), env)
        return at + 1
    if kind == ENUM:
        index, at = varlong(source, at, end)
        if at < 0:
            return fail(op, BAD_NUMBER, env)
        if index < 0 or index >= env[0][OP_WIDTH * op + 3] or env[1][first + index] < 0:
            return fail(op, NO_BRANCH, env)
        if node >= 0:
            _put_int(node, env[1][first + index], env)
        return at
    return fail(op, REFUSED, env)


@compiled(_I64(BYTES, _I64, _I64, _I64, ENV))
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
                return fail(op, BAD_NUMBER, env)
            if index < 0 or index >= second:
                return fail(op, NO_BRANCH, env)
            op = tables[first + index]
            continue
        if kind == MEMBER:
            begin_row(node, 1, env)
            children = env[3][NODE_WIDTH * node + CHILDREN]
            for index in range(env[3][NODE_WIDTH * node + CHILD_COUNT]):
                if index != second:
                    put_null(tables[children + index], env)
            op = first
            continue
        if kind in (RECORD, ARRAY, MAP, DEFAULT):
            if depth == DEPTH_MAX:
                return fail(op, TOO_DEEP, env)
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
                stack[top + 2] = begin_row(node, 1, env)
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
                        return fail(above, BAD_NUMBER, env)
                if done == 0:
                    if node >= 0:
                        end_row(node, stack[top + 2], env)
                    depth -= 1
                    continue
                stack[top + 1] = done - 1
                if node >= 0:
                    env[4][2 * node + 1] += 1
                if kind == MAP:
                    if node >= 0:
                        begin_row(tables[env[3][NODE_WIDTH * node + CHILDREN]], 1, env)
                    at = _read_bytes(source, at, end, second, env)
                    if at < 0:
                        return at
                op = first
        if op < 0:
            return at


_RUN: Final = _I64(
    READ_ONLY, ENDS, _I64, NUMBERS, NUMBERS, NUMBERS, READ_ONLY, NUMBERS, NUMBERS, NUMBERS,
    HEAP, NUMBERS, NUMBERS, types.boolean, types.boolean,
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
    source = pointer_to(data)
    env = environment(ops, tables, constants, nodes, counts, heap, state, is_writing, stack)
    for row in range(len(roots)):
        if is_permissive:
            copy_counts(saved, counts)
        if roots[row] >= 0:
            end = np.int64(ends[row + 1])
            at = _read_value(source, np.int64(ends[row]) + skipped, end, roots[row], env)
            if at == end:
                continue
            if at >= 0:
                fail(roots[row], BYTES_FOLLOW, env)
            if not is_permissive:
                return row
            copy_counts(counts, saved)
            roots[row] = -1
        put_null(np.int64(0), env)
    return -1
