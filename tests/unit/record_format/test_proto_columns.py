"""Values of Protobuf as Arrow columns, judged by Google's library."""

import random
from datetime import UTC, datetime
from decimal import Decimal
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from google.protobuf import message_factory
from google.protobuf.message import DecodeError

from tierlog.record_format.errors import InvalidOption, UndecodableValue
from tierlog.record_format.proto_columns import ProtoColumns
from tierlog.record_format.proto_files import ProtoFile, describe

HEAD = b"head."
FIRST = HEAD + b"\0"
THREE = 'syntax = "proto3"; package a; '


def class_of(text: str, index: int = 0) -> Any:
    return message_factory.GetMessageClass(ProtoFile(describe(text), []).messages[index])


def decoded(
    reader: str,
    *values: tuple[str, bytes | None],
    permissive: bool = False,
    message: str | None = None,
) -> pa.Array:
    columns = ProtoColumns(reader, [], message)
    roots = [-1 if value is None else columns.add_writer(writer, []) for writer, value in values]
    given = pa.array([value for _, value in values], pa.binary())
    found = columns.decode(given, np.array(roots, np.int64), skipped=5, permissive=permissive)
    found.validate(full=True)
    assert found.type == columns.type
    return found


def rows(text: str, *encoded: bytes, **more: Any) -> list[Any]:
    """What becomes of these bytes of the first message."""
    found: list[Any] = decoded(text, *((text, FIRST + one) for one in encoded), **more).to_pylist()
    return found


# --- any schema, judged by the library ------------------------------------------------------------

_FIXED = ["double", "float", "fixed64", "fixed32", "sfixed32", "sfixed64"]
_FIXED = ["double", "float", "fixed64", "fixed32", "sfixed32", "sfixed64"]
_VARINTS = ["int64", "uint64", "int32", "bool", "uint32", "sint32", "sint64"]
_SCALARS = [*_FIXED, *_VARINTS, "string", "bytes"]
_KEYS = [one for one in _SCALARS if one not in ("double", "float", "bytes")]


class AnySchema:
    """A file of one message, with more in it, of proto2 or proto3."""

    def __init__(self, rng: random.Random) -> None:
        self._rng, self._is_three = rng, rng.random() < 0.5
        self._names = 0
        syntax = "proto3" if self._is_three else "proto2"
        self.text = f'syntax = "{syntax}"; {self._message("M", 2)}'

    def _name(self) -> str:
        self._names += 1
        return f"f{self._names}"

    def _message(self, name: str, depth: int) -> str:
        rng, inner, number = self._rng, [], 0
        for _ in range(rng.randrange(1, 6)):
            number += rng.choice((1, 1, 7, 400))
            inner.append(self._field(number, depth, rng.choice(("", "optional", "repeated"))))
        if rng.random() < 0.5:
            members = [self._field(number + n, depth, "oneof") for n in range(1, 4)]
            number += 4
            declared, members = zip(*members, strict=True)
            inner.append((" ".join(declared), f"oneof {self._name()} {{ {' '.join(members)} }}"))
        if rng.random() < 0.5:
            kind, declared = self._type(depth)
            field = f"map<{rng.choice(_KEYS)}, {kind}> {self._name()} = {number + 1};"
            inner.append((declared, field))
        return f"message {name} {{ {' '.join(' '.join(one) for one in inner)} }}"

    def _field(self, number: int, depth: int, label: str) -> tuple[str, str]:
        kind, declared = self._type(depth)
        if label != "oneof" and not label and not self._is_three:
            label = "optional"
        options = ""
        if label == "repeated" and kind in _SCALARS and kind not in ("string", "bytes"):
            options = f"[packed = {self._rng.choice(('true', 'false'))}]"
        elif not self._is_three and label == "optional" and self._rng.random() < 0.3:
            default = {"int32": "-7", "uint64": "18446744073709551615", "string": '"ö"'}
            default |= {"bytes": r'"\377"', "float": "-1.5", "double": "inf", "bool": "true"}
            options = f"[default = {default[kind]}]" if kind in default else ""
        word = "" if label == "oneof" else label
        return declared, f"{word} {kind} {self._name()} = {number} {options};"

    def _type(self, depth: int) -> tuple[str, str]:
        choice = self._rng.random()
        if choice < 0.1:
            name = self._name().upper()
            numbers = {0, *self._rng.sample(range(-3, 9), 2)}
            symbols = (
                f"{name}_{n if n >= 0 else f'M{-n}'} = {n};" for n in sorted(numbers, key=abs)
            )
            return name, f"enum {name} {{ {' '.join(symbols)} }}"
        if choice < 0.35 and depth:
            name = self._name().upper()
            return name, self._message(name, depth - 1)
        return self._rng.choice(_SCALARS), ""


def any_value(rng: random.Random, field: Any) -> Any:
    if field.enum_type is not None:
        return rng.choice([one.number for one in field.enum_type.values])
    size = rng.choice((1, 7, 31))
    match field.cpp_type:
        case field.CPPTYPE_INT32:
            return rng.randrange(-(2**size), 2**size)
        case field.CPPTYPE_INT64:
            return rng.randrange(-(2**63), 2**63) >> rng.randrange(64)
        case field.CPPTYPE_UINT32:
            return rng.randrange(2**32) >> rng.randrange(32)
        case field.CPPTYPE_UINT64:
            return rng.randrange(2**64) >> rng.randrange(64)
        case field.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case field.CPPTYPE_STRING:
            text = rng.choice(("", "a", "ö", "€uro", "𝔞" * 30))
            return text if field.type == field.TYPE_STRING else text.encode("utf-16")
    return rng.randrange(-99, 99) / 8


def fill(rng: random.Random, message: Any) -> Any:
    for field in message.DESCRIPTOR.fields:
        if rng.random() < 0.3:
            continue
        there = getattr(message, field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields
            for _ in range(rng.randrange(4)):
                if value.message_type is not None:
                    fill(rng, there[any_value(rng, key)])
                else:
                    there[any_value(rng, key)] = any_value(rng, value)
        elif field.is_repeated:
            for _ in range(rng.choice((0, 1, 3, 40 if field.message_type is None else 2))):
                if field.message_type is not None:
                    fill(rng, there.add())
                else:
                    there.append(any_value(rng, field))
        elif field.message_type is not None:
            there.SetInParent()
            fill(rng, there)
        else:
            setattr(message, field.name, any_value(rng, field))
    return message


def row_of(message: Any) -> dict[str, Any]:
    """By the library."""
    return {field.name: column_of(message, field) for field in message.DESCRIPTOR.fields}


def column_of(message: Any, field: Any) -> Any:
    there = getattr(message, field.name)
    if field.message_type is not None and field.message_type.GetOptions().map_entry:
        key, value = field.message_type.fields
        return {item(key, one): item(value, there[one]) for one in there}
    if field.is_repeated:
        return [item(field, one) for one in there]
    is_null = field.has_presence and not message.HasField(field.name)
    return None if is_null and not field.has_default_value else item(field, there)


def item(field: Any, value: Any) -> Any:
    if field.message_type is not None:
        return row_of(value)
    if field.enum_type is not None:
        symbol = field.enum_type.values_by_number.get(value)
        return str(value) if symbol is None else symbol.name
    if field.type == field.TYPE_STRING and not isinstance(value, str):
        raise DecodeError  # proto2 does not check that text is text, and gives bytes then
    return Decimal(value) if field.type in (field.TYPE_UINT64, field.TYPE_FIXED64) else value


def plain(value: Any, type_: pa.DataType) -> Any:
    """Arrow's pairs of a map as a dict."""
    if value is None:
        return None
    if pa.types.is_map(type_):
        return {plain(key, type_.key_type): plain(one, type_.item_type) for key, one in value}
    if pa.types.is_list(type_):
        return [plain(one, type_.value_type) for one in value]
    if pa.types.is_struct(type_):
        return {one.name: plain(value[one.name], one.type) for one in type_}
    return value


def shown(value: Any) -> str:
    """Equal for what is equal, in whatever order a map is, and for what is no number."""
    if isinstance(value, dict):
        return str(sorted((shown(key), shown(one)) for key, one in value.items()))
    return str([shown(one) for one in value]) if isinstance(value, list) else repr(value)


def judged(kind: Any, encoded: bytes) -> str:
    try:
        return shown(row_of(kind.FromString(encoded)))
    except DecodeError:
        return "None"


def check(text: str, kind: Any, values: list[bytes]) -> None:
    """All in one batch, as null if they do not decode."""
    found = decoded(text, *((text, FIRST + one) for one in values), permissive=True)
    for value, row in zip(values, found.to_pylist(), strict=True):
        assert shown(plain(row, found.type)) == judged(kind, value), (text, value)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_bytes_are_the_kernel_reads_what_googles_library_reads(seed: int) -> None:
    rng = random.Random(seed)
    text = AnySchema(rng).text
    kind = class_of(text)
    values = [bytes(fill(rng, kind()).SerializeToString()) for _ in range(6)]
    check(text, kind, values)
    # Two in one: the last of a field counts, lists and messages are joined.
    check(text, kind, [values[0] + values[1], values[2], values[4] + values[3]])
    # What is cut, and what another byte makes of it.
    longest = max(values, key=len)
    check(text, kind, [longest[:size] for size in range(min(len(longest), 60))])
    damaged = []
    for _ in range(25):
        position = rng.randrange(len(longest) + 1)
        damaged.append(longest[:position] + rng.randbytes(1) + longest[position + 1 :])
        damaged.append(
            longest[:position] + rng.randbytes(rng.randrange(1, 12)) + longest[position:]
        )
    check(text, kind, damaged)
    # Another schema reads by number what this one wrote.
    for _ in range(2):
        other = AnySchema(rng).text
        columns = ProtoColumns(other, [])
        roots = np.full(len(values), columns.add_writer(other, []))
        given = pa.array([FIRST + one for one in values], pa.binary())
        found = columns.decode(given, roots, skipped=5, permissive=True)
        for value, row in zip(values, found.to_pylist(), strict=True):
            assert shown(plain(row, found.type)) == judged(class_of(other), value)


# --- what is not said by a value alone ------------------------------------------------------------

OUTER = THREE + (
    "message Head { int32 n = 1; } "
    "message Flight { string carrier = 1; message Leg { int32 miles = 1; } }"
)


def test_what_is_absent_is_null_where_its_field_has_presence_and_else_its_default() -> None:
    text = THREE + (
        "message M { int32 i = 1; optional int32 o = 2; string s = 3; M2 m = 4; E e = 5;"
        " oneof x { int32 a = 6; string b = 7; } repeated int32 r = 8; map<string, M2> k = 9; }"
        " message M2 { bytes b = 1; } enum E { NONE = 0; ONE = 1; }"
    )
    nothing = {"i": 0, "o": None, "s": "", "m": None, "e": "NONE", "a": None, "b": None}
    assert rows(text, b"", b"\x30\x00") == [
        {**nothing, "r": [], "k": []},
        {**nothing, "a": 0, "r": [], "k": []},
    ]
    two = (
        'syntax = "proto2"; message M { optional int32 i = 1; optional string s = 2 [default="x"];'
        " required bool b = 3; optional E e = 4 [default = TWO]; enum E { ONE = 1; TWO = 2; } }"
    )
    assert rows(two, b"") == [{"i": None, "s": "x", "b": None, "e": "TWO"}]


def test_timestamps_are_times_and_numbers_without_a_sign_are_not_negative() -> None:
    text = THREE + (
        'import "google/protobuf/timestamp.proto"; message M { google.protobuf.Timestamp at = 1;'
        " repeated google.protobuf.Timestamp more = 2; uint32 u = 3; uint64 v = 4; }"
    )
    kind = class_of(text)
    message = kind(u=2**32 - 1, v=2**64 - 1)
    before = datetime(1913, 6, 1, 1, 2, 3, 4, UTC)
    message.at.FromDatetime(before)
    message.more.add(seconds=1)
    # As any other message it may be in parts; and it may have what is not known, here a group.
    parts = b"\x0a\x02\x08\x05" + b"\x0a\x05\x10\xe8\x07\x1b\x1c"
    found = rows(text, message.SerializeToString(), parts, b"\x0a\x01\xff", permissive=True)
    assert found[0] == {
        "at": before,
        "more": [datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)],
        "u": 2**32 - 1,
        "v": Decimal(2**64 - 1),
    }
    assert found[1]["at"] == datetime(1970, 1, 1, 0, 0, 5, 1, UTC)
    assert found[2] is None


def test_an_enum_is_text_and_a_number_that_an_open_one_does_not_have_its_digits() -> None:
    text = (
        THREE
        + "message M { repeated E e = 1; } enum E { option allow_alias = true; A = 0; B = 0; }"
    )
    assert rows(text, b"\x0a\x02\x00\x07") == [{"e": ["A", "7"]}]
    closed = 'syntax = "proto2"; message M { repeated E e = 1; } enum E { A = 0; }'
    assert rows(closed, b"\x0a\x02\x00\x07") == [{"e": ["A"]}]


def test_the_indexes_before_a_value_say_which_message_it_is() -> None:
    def read(encoded: bytes, message: str | None = None) -> list[Any]:
        return decoded(OUTER, (OUTER, HEAD + encoded), message=message).to_pylist()

    assert read(b"\x00\x08\x05") == read(b"\x02\x00\x08\x05") == [{"n": 5}]
    for name in ("Flight", "a.Flight"):
        assert read(b"\x02\x02\x0a\x02UA", name) == [{"carrier": "UA"}]
    assert read(b"\x04\x02\x00\x08\x07", "Flight.Leg") == [{"miles": 7}]
    for encoded, problem in (
        (b"\x02\x02", "it is a a.Flight, and a.Head is read"),
        (b"\x04\x02\x00", "it is a a.Flight.Leg, and a.Head is read"),
        (b"\x02\x04", r"has no message with the index \[2\]"),
        (b"", "does not begin with the indexes"),
        (b"\x02", "does not begin with the indexes"),
        (b"\x01", "does not begin with the indexes"),
        (b"\x00\x08", "/n: a number is damaged"),
    ):
        with pytest.raises(UndecodableValue, match=problem):
            read(encoded)
        assert decoded(OUTER, (OUTER, HEAD + encoded), permissive=True).to_pylist() == [None]
    with pytest.raises(InvalidOption, match=r"no message 'Leg'; it has a.Head, a.Flight, a.Flight"):
        read(b"", "Leg")


def test_a_writers_message_is_found_by_name_wherever_its_file_has_it() -> None:
    writer = THREE + "message New { } message Flight { string carrier = 1; int32 delay = 2; }"
    value = HEAD + b"\x02\x02\x0a\x02UA\x10\x07"
    found = decoded(OUTER, (writer, value), (writer, None), message="Flight")
    assert found.to_pylist() == [{"carrier": "UA"}, None]
    with pytest.raises(UndecodableValue, match=r"it is a a.New, and a.Flight is read"):
        decoded(OUTER, (writer, FIRST), message="Flight")


def test_an_error_names_the_row_and_the_field() -> None:
    text = (
        THREE
        + "message M { repeated L l = 1; message L { string s = 1; map<string, int32> k = 2; } }"
    )
    for encoded, problem in (
        (b"\x0a\x03\x0a\x01\xff", "/l/s: text that is not UTF-8"),
        (b"\x0a\x04\x12\x02\x0a\x05", "/l/k/key: the value ends early"),
        (b"\x0f", "/: what follows is no field"),
        (b"\x0a\x07\x0a\x01a\x0a\x01b\x0f", "Error parsing message"),  # by the library
    ):
        with pytest.raises(UndecodableValue, match=problem) as info:
            decoded(text, (text, FIRST), (text, None), (text, FIRST + encoded))
        assert info.value.row == 2


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (
            "message Tree { Branch b = 1; } message Branch { Tree t = 1; }",
            "/b/t of the schema cont",
        ),
        (
            'import "google/protobuf/struct.proto"; message M { google.protobuf.Struct s = 1; }',
            "/s/",
        ),
        ("message M { N n = 1; } message N {}", "the message a.M has no fields"),
        ("enum E { A = 0; }", "has no message"),
        ("nothing", "no .proto file"),
    ],
)
def test_what_has_no_columns_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InvalidOption, match=problem):
        ProtoColumns(THREE + text, [])


def test_a_message_without_columns_has_none_but_is_the_one_of_its_oneof() -> None:
    text = THREE + "message M { oneof x { N n = 1; string s = 2; } N o = 3; } message N {}"
    assert ProtoColumns(text, []).type == pa.struct([("s", pa.string())])
    assert rows(text, b"\x12\x01a\x0a\x00", b"\x0a\x00\x12\x01a") == [{"s": None}, {"s": "a"}]


def test_googles_own_messages_are_messages_as_any() -> None:
    names = ("duration", "wrappers", "any", "empty", "field_mask", "struct")
    imports = " ".join(f'import "google/protobuf/{name}.proto";' for name in names)
    text = f"""{THREE} {imports} message M {{
        google.protobuf.Duration took = 1;
        google.protobuf.StringValue name = 2;
        google.protobuf.Int64Value number = 3;
        repeated google.protobuf.BoolValue flags = 4;
        google.protobuf.Any any = 5;
        google.protobuf.Empty empty = 6;
        google.protobuf.FieldMask mask = 7;
        Outer.Inner inner = 8;
        message Outer {{ message Inner {{ repeated Outer outer = 1; }} int32 n = 1; }}
    }}"""
    message = class_of(text)()
    message.took.FromMilliseconds(1500)
    message.name.value = "ö"
    message.number.SetInParent()
    message.flags.add(value=True)
    message.any.Pack(message.took)
    message.empty.SetInParent()
    message.mask.paths.extend(["a.b", "c"])
    message.inner.outer.add(n=5)
    nothing = dict.fromkeys(("took", "name", "number", "any", "mask", "inner"), None)
    assert rows(text, message.SerializeToString(), b"") == [
        {
            "took": {"seconds": 1, "nanos": 500_000_000},
            "name": {"value": "ö"},
            "number": {"value": 0},
            "flags": [{"value": True}],
            "any": {
                "type_url": "type.googleapis.com/google.protobuf.Duration",
                "value": message.took.SerializeToString(),
            },
            "mask": {"paths": ["a.b", "c"]},
            "inner": {"outer": [{"n": 5}]},
        },
        {**nothing, "flags": []},
    ]
    with pytest.raises(InvalidOption, match="/s/fields/value/struct_value of the schema contains"):
        ProtoColumns(f"{THREE} {imports} message M {{ google.protobuf.Struct s = 1; }}", [])
