"""What kernels that decode values share: the columns of a reader's type, which they fill.

* A kernel runs twice over the same values: first nothing is written, and each node's rows and bytes
  are counted; the caller allocates exactly those, and the second run fills them.
* Nothing is raised: the first failure's operation and reason are in `state`.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from tierlog.record_format.compiled import BYTES, READ_ONLY, compiled, copy_bytes, pointer_to

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

HEAP: Final = types.Array(types.uint8, 1, "C")
ARRAY: Final = types.Array(types.int64, 1, "C")
ENDS: Final = types.Array(types.int32, 1, "C")
_I64: Final = types.int64
_NUMBERS: Final = types.CPointer(types.int64)
ENV: Final = types.Tuple(
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


@compiled(_I64(_I64, _I64, ENV))
def begin_row(node, there, env):  # type: ignore[no-untyped-def]
    """One more row of a node; its number."""
    nodes, counts, heap, is_writing = env[3], env[4], env[5], env[11]
    row = counts[2 * node]
    counts[2 * node] = row + 1
    if is_writing:
        heap[nodes[NODE_WIDTH * node + VALID_AT] + row] = there
    return row


@compiled(types.void(_I64, _I64, ENV))
def end_row(node, row, env):  # type: ignore[no-untyped-def]
    """The row ends where the node's bytes, or items, end so far."""
    if env[11]:
        env[6][env[3][NODE_WIDTH * node + ENDS_AT] // 4 + row + 1] = np.int32(env[4][2 * node + 1])


@compiled(types.void(_I64, ENV))
def put_null(node, env):  # type: ignore[no-untyped-def]
    """A null row of a node, and of those below it that have as many rows."""
    tables, nodes, heap, is_writing = env[1], env[3], env[5], env[11]
    first = nodes[NODE_WIDTH * node + ALIKE]
    for index in range(nodes[NODE_WIDTH * node + ALIKE_COUNT]):
        one = tables[first + index]
        row = begin_row(one, 0, env)
        kind, data_at = nodes[NODE_WIDTH * one], nodes[NODE_WIDTH * one + DATA_AT]
        if kind in (VARIABLE, LIST):
            end_row(one, row, env)
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


@compiled(types.void(_I64, BYTES, _I64, _I64, ENV))
def put_bytes(node, source, at, size, env):  # type: ignore[no-untyped-def]
    row = begin_row(node, 1, env)
    used = env[4][2 * node + 1]
    if env[11] and size:
        copy_bytes(env[5], env[3][NODE_WIDTH * node + DATA_AT] + used, source, at, size)
    env[4][2 * node + 1] = used + size
    end_row(node, row, env)


@compiled(types.boolean(BYTES, _I64, _I64))
def is_utf8(source, at, end):  # type: ignore[no-untyped-def]
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


@compiled(_I64(_I64, _I64, ENV))
def fail(op, reason, env):  # type: ignore[no-untyped-def]
    env[10][FAILED_OP] = op
    env[10][REASON] = reason
    return np.int64(-1)


@compiled(types.void(ARRAY, ARRAY))
def copy_counts(target, source):  # type: ignore[no-untyped-def]
    """Before a value, and back after one that does not count."""
    for index in range(len(source)):
        target[index] = source[index]


@compiled(ENV(ARRAY, ARRAY, READ_ONLY, ARRAY, ARRAY, HEAP, ARRAY, types.boolean, ARRAY))
def environment(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    ops, tables, constants, nodes, counts, heap, state, is_writing, stack
):
    """What functions of kernels hand on; the caller keeps the arrays alive."""
    bytes_of = pointer_to(heap)
    return (
        pointer_to(ops),
        pointer_to(tables),
        pointer_to(constants),
        pointer_to(nodes),
        pointer_to(counts),
        bytes_of,
        _pointer_as(bytes_of, np.int32(0)),
        _pointer_as(bytes_of, np.int64(0)),
        _pointer_as(bytes_of, np.float32(0)),
        _pointer_as(bytes_of, np.float64(0)),
        pointer_to(state),
        np.int64(is_writing),
        pointer_to(stack),
    )
