"""Decodes Protobuf values into columns, compiled: walks their fields by a table of operations.

Rules that keep it honest:

* `proto_columns` makes the tables, and alone calls this. An operation is a field of the reader's
  message, or the message itself; what else is in a value is checked, and read past.
* It runs twice over the same values, as `column_kernel` says.
* A column's rows are in the order in which they are met, so each may be met once. A value that has
  a field that is no list twice, or two of a oneof, which serializers do not write, is in `again`:
  the library writes it anew.
* Values are untrusted: nothing is read past a value's end. The first value that fails is returned,
  or its row becomes null.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numba import types

from tierlog.record_format.column_kernel import ARRAY as NUMBERS
from tierlog.record_format.column_kernel import (
    BAD_NUMBER,
    BYTE,
    DATA_AT,
    DEPTH_MAX,
    ENDS,
    ENDS_EARLY,
    ENV,
    F32,
    HEAP,
    I32,
    I128,
    NODE_WIDTH,
    NOT_TEXT,
    REASON,
    begin_row,
    copy_counts,
    end_row,
    environment,
    fail,
    is_utf8,
    put_bytes,
    put_null,
)
from tierlog.record_format.compiled import BYTES, READ_ONLY, compiled, pointer_to, varint

# Operations. `tables` has the fields of a message, by number; the numbers of a closed enum; and
# where in `constants` the bytes are that a field without any has.
OP_WIDTH: Final = 10
KIND: Final = 0
NODE: Final = 1
NUMBER: Final = 2
WIRE: Final = 3
LIST_NODE: Final = 4  # -1: the field is no list
ABSENT: Final = 5  # what a field is that a message does not have
DEFAULT: Final = 6  # as 64 bits
ONEOF: Final = 7  # where in the stack it is said of which message a member was met; or -1
FIRST: Final = 8  # where in `tables`, or in `constants`
SIZE: Final = 9

# Kinds: the types of fields by Protobuf's own numbers, and some of ours.
DOUBLE: Final = 1
FLOAT: Final = 2
INT64: Final = 3
UINT64: Final = 4
INT32: Final = 5
FIXED64: Final = 6
FIXED32: Final = 7
BOOL: Final = 8
STRING: Final = 9
GROUP: Final = 10
MESSAGE: Final = 11
BYTES_KIND: Final = 12
UINT32: Final = 13
ENUM: Final = 14
SFIXED32: Final = 15
SFIXED64: Final = 16
SINT32: Final = 17
SINT64: Final = 18
CLOSED_ENUM: Final = 19
TIMESTAMP: Final = 20

# What is absent is null, its default, or a reason to have the value written anew. So is what an
# entry of a map has besides a key and a value: the library takes that for one that is not known.
IS_NULL: Final = 0
IS_DEFAULT: Final = 1
IS_AGAIN: Final = 2

VARINT: Final = 0
EIGHT: Final = 1
SIZED: Final = 2
START: Final = 3
END: Final = 4
FOUR: Final = 5

AGAIN: Final = 20
OTHER_MESSAGE: Final = 21
NO_INDEXES: Final = 22
BAD_TAG: Final = 23

FRAME_WIDTH: Final = 3
_I64: Final = types.int64
_NUMBER_MAX: Final = 2**29 - 1
_SECONDS_MAX: Final = 9_223_372_036_000  # as microseconds, with nanoseconds of 32 bits, they fit
_NO_TIME: Final = -(2**63)


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _varint(source, at, end):  # type: ignore[no-untyped-def]
    """(64 bits, position after them); the position is -1 if truncated or too long."""
    value = np.uint64(0)
    shift = np.uint64(0)
    while at < end and shift < np.uint64(70):
        byte = np.uint64(source[at])
        at += 1
        value |= (byte & np.uint64(0x7F)) << shift
        if byte < np.uint64(0x80):
            return np.int64(value), at
        shift += np.uint64(7)
    return np.int64(0), np.int64(-1)


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _sized(source, at, end):  # type: ignore[no-untyped-def]
    """(position of the bytes, position after them); the latter is -1 if they are not all there."""
    size, at = _varint(source, at, end)
    if at < 0 or size < 0 or size > end - at:
        return at, np.int64(-1)
    return at, at + size


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64))
def _tag(source, at, end):  # type: ignore[no-untyped-def]
    """(tag, position after it); the position is -1 if it is none."""
    start = at
    tag, at = _varint(source, at, end)
    if at - start > 5 or tag >> 3 < 1 or tag >> 3 > _NUMBER_MAX:
        return tag, np.int64(-1)
    return tag, at


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64, _I64))
def _little_endian(source, at, end, size):  # type: ignore[no-untyped-def]
    """(bits, without a sign if 4 bytes; position after them)."""
    if size > end - at:
        return np.int64(0), np.int64(-1)
    value = np.uint64(0)
    for index in range(size):
        value |= np.uint64(source[at + index]) << np.uint64(8 * index)
    return np.int64(value), at + size


@compiled(types.UniTuple(_I64, 2)(BYTES, _I64, _I64, _I64))
def _number(source, at, end, kind):  # type: ignore[no-untyped-def]
    """(the field's bits, position after it): of a number, what the kind makes of it."""
    if kind in (DOUBLE, FIXED64, SFIXED64):
        return _little_endian(source, at, end, 8)
    if kind in (FLOAT, FIXED32, SFIXED32):
        value, at = _little_endian(source, at, end, 4)
        return (value if kind == FIXED32 else np.int64(np.int32(value))), at
    value, at = _varint(source, at, end)
    if kind in (INT32, ENUM, CLOSED_ENUM):
        return np.int64(np.int32(value)), at
    if kind == UINT32:
        return value & 0xFFFFFFFF, at
    if kind == BOOL:
        return np.int64(value != 0), at
    if kind == SINT32:
        raw = value & 0xFFFFFFFF
        return np.int64(np.int32((raw >> 1) ^ -(raw & 1))), at
    if kind == SINT64:
        bits = np.uint64(value)
        return np.int64(bits >> np.uint64(1)) ^ -np.int64(bits & np.uint64(1)), at
    return value, at


@compiled(types.void(_I64, _I64, ENV))
def _put_number(node, value, env):  # type: ignore[no-untyped-def]
    row = begin_row(node, 1, env)
    if env[11]:
        kind, data_at = env[3][NODE_WIDTH * node], env[3][NODE_WIDTH * node + DATA_AT]
        if kind == BYTE:
            env[5][data_at + row] = value
        elif kind in (I32, F32):
            env[6][data_at // 4 + row] = np.int32(value)
        elif kind == I128:
            env[7][data_at // 8 + 2 * row] = value
            env[7][data_at // 8 + 2 * row + 1] = 0
        else:
            env[7][data_at // 8 + row] = value


@compiled(_I64(BYTES, _I64, _I64, _I64, _I64, ENV))
def _pass(source, at, end, tag, free, env):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """The position after a field that is not wanted, or minus a reason. `free`: where the stack is,
    for the numbers of groups that are in others.
    """
    stack, depth = env[12], 0
    while True:
        wire = tag & 7
        if wire == VARINT:
            _, at = _varint(source, at, end)
        elif wire == SIZED:
            _, at = _sized(source, at, end)
        elif wire in (EIGHT, FOUR):
            size = 8 if wire == EIGHT else 4
            at = at + size if size <= end - at else np.int64(-1)
        elif wire == START and depth < DEPTH_MAX:
            stack[free + depth] = tag >> 3
            depth += 1
        elif wire == END and depth and stack[free + depth - 1] == tag >> 3:
            depth -= 1
        else:
            return np.int64(-BAD_TAG)
        if at < 0:
            return np.int64(-ENDS_EARLY)
        if not depth:
            return at
        tag, at = _tag(source, at, end)
        if at < 0:
            return np.int64(-BAD_TAG)


@compiled(_I64(BYTES, _I64, _I64))
def _timestamp(source, at, end):  # type: ignore[no-untyped-def]
    """Microseconds; the least number of all if it has more, at which the library has to look."""
    seconds, nanos = np.int64(0), np.int64(0)
    while at < end:
        tag, at = _tag(source, at, end)
        if at < 0:
            return np.int64(_NO_TIME)
        if tag == 8:
            seconds, at = _varint(source, at, end)
        elif tag == 16:
            value, at = _varint(source, at, end)
            nanos = np.int64(np.int32(value))
        else:
            return np.int64(_NO_TIME)
        if at < 0:
            return np.int64(_NO_TIME)
    seconds = max(np.int64(-_SECONDS_MAX), min(np.int64(_SECONDS_MAX), seconds))
    return seconds * 1_000_000 + nanos // 1000


@compiled(_I64(_I64, _I64, ENV))
def _field(message, number, env):  # type: ignore[no-untyped-def]
    """The operation of the field with this number; -1 if the message has none."""
    ops, tables = env[0], env[1]
    low = ops[OP_WIDTH * message + FIRST]
    high = low + ops[OP_WIDTH * message + SIZE]
    while low < high:
        middle = (low + high) // 2
        found = ops[OP_WIDTH * tables[middle] + NUMBER]
        if found == number:
            return tables[middle]
        if found < number:
            low = middle + 1
        else:
            high = middle
    return np.int64(-1)


@compiled(types.boolean(_I64, _I64, ENV))
def _is_symbol(field, value, env):  # type: ignore[no-untyped-def]
    """Whether a closed enum has this number."""
    tables, first = env[1], env[0][OP_WIDTH * field + FIRST]
    for index in range(env[0][OP_WIDTH * field + SIZE]):  # noqa: SIM110  numba has no `any`
        if tables[first + index] == value:
            return True
    return False


@compiled(_I64(_I64, _I64, ENV))
def _met(field, instance, env):  # type: ignore[no-untyped-def]
    """Note that this message's field was met; -1 if it, or another of its oneof, was before."""
    ops, stack = env[0], env[12]
    oneof = ops[OP_WIDTH * field + ONEOF]
    if stack[field] == instance or (oneof >= 0 and stack[oneof] == instance):
        return fail(field, AGAIN, env)
    stack[field] = instance
    if oneof >= 0:
        stack[oneof] = instance
    return np.int64(0)


@compiled(_I64(_I64, _I64, ENV))
def _finish(message, instance, env):  # type: ignore[no-untyped-def]
    """Fill in what the message does not have; -1 if it has to be written anew."""
    ops, tables, stack = env[0], env[1], env[12]
    first = ops[OP_WIDTH * message + FIRST]
    for index in range(ops[OP_WIDTH * message + SIZE]):
        field = tables[first + index]
        node, list_node = ops[OP_WIDTH * field + NODE], ops[OP_WIDTH * field + LIST_NODE]
        if list_node >= 0:
            end_row(list_node, begin_row(list_node, 1, env), env)
        elif stack[field] != instance and node >= 0:
            absent, kind = ops[OP_WIDTH * field + ABSENT], ops[OP_WIDTH * field + KIND]
            if absent == IS_AGAIN:
                return fail(field, AGAIN, env)
            if absent == IS_NULL:
                put_null(node, env)
            elif kind in (STRING, BYTES_KIND):
                at, size = ops[OP_WIDTH * field + FIRST], ops[OP_WIDTH * field + SIZE]
                put_bytes(node, env[2], at, size, env)
            else:
                _put_number(node, ops[OP_WIDTH * field + DEFAULT], env)
    return np.int64(0)


@compiled(_I64(BYTES, _I64, _I64, _I64, _I64, ENV))
def _read_sized(source, at, end, field, instance, env):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """Text, bytes, a time, or what has no column; the position after it, or -1."""
    ops = env[0]
    kind, node = ops[OP_WIDTH * field + KIND], ops[OP_WIDTH * field + NODE]
    list_node = ops[OP_WIDTH * field + LIST_NODE]
    at, after = _sized(source, at, end)
    if after < 0:
        return fail(field, ENDS_EARLY, env)
    if kind == STRING and not env[11] and not is_utf8(source, at, after):
        return fail(field, NOT_TEXT, env)
    if list_node >= 0:
        env[4][2 * list_node + 1] += 1
    elif _met(field, instance, env) < 0:
        return np.int64(-1)
    if kind == TIMESTAMP:
        value = _timestamp(source, at, after)
        if value == _NO_TIME:
            return fail(field, AGAIN, env)
        _put_number(node, value, env)
    elif node >= 0:
        put_bytes(node, source, at, after - at, env)
    return after


@compiled(_I64(BYTES, _I64, _I64, _I64, _I64, _I64, ENV))
def _read_numbers(source, at, end, field, wire, instance, env):  # type: ignore[no-untyped-def]  # noqa: PLR0917
    """A number, or many of a list; the position after them, or -1."""
    ops = env[0]
    kind, node = ops[OP_WIDTH * field + KIND], ops[OP_WIDTH * field + NODE]
    list_node = ops[OP_WIDTH * field + LIST_NODE]
    after = np.int64(-1)
    if wire == SIZED:
        at, after = _sized(source, at, end)
        if after < 0:
            return fail(field, ENDS_EARLY, env)
        end = after
    while at != after:
        value, at = _number(source, at, end, kind)
        if at < 0:
            return fail(field, BAD_NUMBER, env)
        if kind == CLOSED_ENUM and not _is_symbol(field, value, env):
            if ops[OP_WIDTH * field + ABSENT] == IS_AGAIN:  # a map's value: its key is not there
                return fail(field, AGAIN, env)
        else:
            if list_node >= 0:
                env[4][2 * list_node + 1] += 1
            elif _met(field, instance, env) < 0:
                return np.int64(-1)
            _put_number(node, value, env)
        if after < 0:
            break
    return at


@compiled(_I64(BYTES, _I64, _I64, _I64, _I64, ENV))
def _read_message(source, at, end, message, frames, env):  # type: ignore[no-untyped-def]  # noqa: C901, PLR0912, PLR0917
    """Read a message up to `end`, its position; -1 if it fails.

    What it is inside of is on a stack of its own: numba cannot cache a function that calls itself.
    The stack begins with who met each field, and at `frames` has the number of messages so far.
    """
    ops, stack = env[0], env[12]
    depth = np.int64(0)
    stack[frames] += 1
    instance = stack[frames]
    begin_row(ops[OP_WIDTH * message + NODE], 1, env)
    while True:
        if at < end:
            tag, at = _tag(source, at, end)
            if at < 0:
                return fail(message, BAD_TAG, env)
            wire = tag & 7
            if wire != END:
                field = _field(message, tag >> 3, env)
                kind = ops[OP_WIDTH * field + KIND] if field >= 0 else np.int64(0)
                expected = ops[OP_WIDTH * field + WIRE] if field >= 0 else np.int64(-1)
                if wire == expected and kind in (MESSAGE, GROUP):
                    if kind == MESSAGE:
                        at, after = _sized(source, at, end)
                        if after < 0:
                            return fail(field, ENDS_EARLY, env)
                    else:
                        after = end
                    list_node = ops[OP_WIDTH * field + LIST_NODE]
                    if list_node >= 0:
                        env[4][2 * list_node + 1] += 1
                    elif _met(field, instance, env) < 0:
                        return np.int64(-1)
                    top = frames + 1 + FRAME_WIDTH * depth
                    stack[top], stack[top + 1], stack[top + 2] = message, instance, end
                    depth += 1
                    stack[frames] += 1
                    message, instance, end = field, stack[frames], after
                    begin_row(ops[OP_WIDTH * message + NODE], 1, env)
                elif wire == expected and expected == SIZED:
                    at = _read_sized(source, at, end, field, instance, env)
                elif wire == expected or (
                    wire == SIZED
                    and expected in (VARINT, EIGHT, FOUR)
                    and ops[OP_WIDTH * field + LIST_NODE] >= 0
                ):
                    at = _read_numbers(source, at, end, field, wire, instance, env)
                else:
                    free = frames + 1 + FRAME_WIDTH * depth
                    at = _pass(source, at, end, tag, free, env)
                    if at >= 0 and ops[OP_WIDTH * message + ABSENT] == IS_AGAIN:
                        at = np.int64(-AGAIN)
                    if at < 0:
                        return fail(message, -at, env)
                if at < 0:
                    return at
                continue
            if (
                ops[OP_WIDTH * message + KIND] != GROUP
                or ops[OP_WIDTH * message + NUMBER] != tag >> 3
            ):
                return fail(message, BAD_TAG, env)
        elif ops[OP_WIDTH * message + KIND] == GROUP:
            return fail(message, ENDS_EARLY, env)
        if _finish(message, instance, env) < 0:
            return np.int64(-1)
        if not depth:
            return at
        depth -= 1
        top = frames + 1 + FRAME_WIDTH * depth
        message, instance, end = stack[top], stack[top + 1], stack[top + 2]


@compiled(_I64(BYTES, _I64, _I64, _I64, ENV))
def _after_indexes(source, at, end, root, env):  # type: ignore[no-untyped-def]
    """The position after the way to the message, which has to be that in `tables`; or -1."""
    tables = env[1]
    count, at = varint(source, at, end)
    if at >= 0 and count == 0:  # the first message's is short
        return at if tables[root] == 1 and tables[root + 1] == 0 else fail(0, OTHER_MESSAGE, env)
    if at >= 0 and count != tables[root]:
        return fail(0, OTHER_MESSAGE if count > 0 else NO_INDEXES, env)
    for index in range(1, count + 1):
        number, at = varint(source, at, end)
        if at >= 0 and number != tables[root + index]:
            return fail(0, OTHER_MESSAGE, env)
        if at < 0:
            break
    return at if at >= 0 else fail(0, NO_INDEXES, env)


_RUN: Final = _I64(
    READ_ONLY, ENDS, _I64, NUMBERS, NUMBERS, NUMBERS, READ_ONLY, NUMBERS, NUMBERS, NUMBERS,
    HEAP, NUMBERS, NUMBERS, _I64, HEAP, types.boolean, types.boolean,
)  # fmt: skip


@compiled(_RUN)
def decode_values(  # type: ignore[no-untyped-def]  # noqa: PLR0917
    data,
    ends,  # of values in `data`, one more than there are, as Arrow's are
    skipped,  # bytes of each value before the indexes of its message
    roots,  # where in `tables` each value's message is by its writer, a count and indexes; -1: null
    ops,
    tables,
    constants,
    nodes,
    counts,
    state,
    heap,
    saved,  # room for `counts`
    stack,
    frames,  # where in `stack` those of messages begin
    again,  # for each value, whether it has to be written anew
    is_writing,
    is_permissive,  # what does not decode becomes null, here and in `roots`
):
    """The number of the first value that does not decode; -1 if there is none."""
    source = pointer_to(data)
    env = environment(ops, tables, constants, nodes, counts, heap, state, is_writing, stack)
    for row in range(len(roots)):
        if roots[row] >= 0:
            copy_counts(saved, counts)
            end = np.int64(ends[row + 1])
            at = _after_indexes(source, np.int64(ends[row]) + skipped, end, roots[row], env)
            if at >= 0:
                at = _read_message(source, at, end, np.int64(0), frames, env)
            if at >= 0:
                continue
            if state[REASON] == AGAIN:
                again[row] = 1
            elif not is_permissive:
                return row
            copy_counts(counts, saved)
            if state[REASON] != AGAIN:
                roots[row] = -1
        put_null(np.int64(0), env)
    return -1
