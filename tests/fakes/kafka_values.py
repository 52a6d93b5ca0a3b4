"""Values for Kafka's messages, made by Hypothesis from their definitions."""

import datetime
from collections.abc import Sequence
from dataclasses import fields, is_dataclass
from typing import NamedTuple
from uuid import UUID

import msgspec
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from tierlog.record_format.kafka_messages.definitions import definition
from tierlog.record_format.kafka_messages.messages import struct_types

BITS = {"int8": 7, "int16": 15, "int32": 31, "int64": 63}
UNSIGNED_BITS = {"uint16": 16, "uint32": 32}
# Half of the texts are too long for a length of one byte.
TEXTS = st.one_of(st.text(max_size=5), st.sampled_from(["", "ä" * 64, "x" * 127, "y" * 300]))
BYTES = st.one_of(st.binary(max_size=5), st.sampled_from([b"", b"x" * 126, b"y" * 20_000]))
# What kio has types of its own for: an error that Kafka knows, and a time and an id, of which it
# reads -1 and zeros as None.
TIMES = st.integers(0, 1 << 41)
IDS = st.binary(min_size=16, max_size=16).filter(any)
ERRORS = st.sampled_from([code.value for code in ErrorCode])


class Likely(NamedTuple):
    """What is drawn more often than the rest, because a broker has it."""

    texts: Sequence[str] = ()
    ids: Sequence[bytes] = ()
    numbers: range = range(0)


def messages(name, version, likely=Likely()):  # noqa: B008  it is immutable
    """Any value that this version can carry."""
    return _structs(definition(name).struct, version, struct_types(name), likely)


def _structs(of, version, types, likely):
    present = {
        f.name: _fields(f, version, types, likely) for f in of.fields if version in f.versions
    }
    return st.builds(types[of.name], **present)


def _fields(field, version, types, likely):
    values = _values(field, version, types, likely)
    if field.is_array:
        values = st.lists(values, max_size=3)
        if field.struct is None:
            values |= st.lists(_values(field, version, types, likely), min_size=130, max_size=130)
    if version in field.nullable:
        values |= st.none()
    return values


def _values(field, version, types, likely):
    if field.struct is not None:
        return _structs(field.struct, version, types, likely)
    drawn = _plain_values(field)
    if field.type in BITS and likely.numbers:
        return st.sampled_from(likely.numbers) | drawn
    if field.type == "string" and likely.texts:
        return st.sampled_from(likely.texts) | drawn
    if field.type == "uuid" and likely.ids:
        return st.sampled_from(likely.ids) | drawn
    return drawn


def _plain_values(field):
    if field.type == "int16" and "error_code" in field.name:
        return ERRORS
    if field.type in BITS:
        bits = BITS[field.type]
        if field.type == "int64" and ("time" in field.name or field.name.endswith("_ms")):
            return TIMES
        return st.integers(-(1 << bits), (1 << bits) - 1)
    if field.type in UNSIGNED_BITS:
        return st.integers(0, (1 << UNSIGNED_BITS[field.type]) - 1)
    return {
        "bool": st.booleans(),
        "float64": st.floats(allow_nan=False),
        "string": TEXTS,
        "bytes": BYTES,
        "records": BYTES,
        "uuid": IDS,
    }[field.type]


def leaves(value):
    """The plain values in a message of any library, in the order of its fields."""
    if isinstance(value, msgspec.Struct):
        value = [getattr(value, name) for name in value.__struct_fields__]
    elif is_dataclass(value):
        value = [getattr(value, field.name) for field in fields(value)]
    if isinstance(value, list | tuple):
        return [leaf for one in value for leaf in leaves(one)]
    return [_plain(value)]


def _plain(value):
    match value:
        case UUID():
            return value.bytes
        case datetime.timedelta():
            return value // datetime.timedelta(milliseconds=1)
        case datetime.datetime():
            return (value - datetime.datetime.fromtimestamp(0, datetime.UTC)) // (
                datetime.timedelta(milliseconds=1)
            )
        case memoryview() | bytearray():
            return bytes(value)
        case ErrorCode():
            return value.value
    return value


def leaves_of_version(value, name, version):
    """As `leaves`, of the fields that the version has."""

    def walk(value, of):
        for field in of.fields:
            if version in field.versions:
                one = getattr(value, field.name)
                if field.struct is not None:
                    for element in one if isinstance(one, list) else [one]:
                        yield from [None] if element is None else walk(element, field.struct)
                else:
                    yield from leaves(one)

    return list(walk(value, definition(name).struct))
