"""Values of a schema as Arrow columns: Avro by a kernel, judged by fastavro, and JSON by Arrow."""

import io
import json
import random
from datetime import UTC, date, datetime
from decimal import Decimal
from typing import Any

import fastavro
import numpy as np
import pyarrow as pa
import pytest

from tierlog.record_format.avro_columns import AvroColumns
from tierlog.record_format.errors import InvalidOption, UndecodableValue
from tierlog.record_format.json_columns import JsonColumns


def encoded(schema: Any, value: Any) -> bytes:
    out = io.BytesIO()
    fastavro.schemaless_writer(out, fastavro.parse_schema(schema), value)
    return out.getvalue()


def record(*fields: Any, name: str = "R") -> Any:
    pairs = [one if isinstance(one, dict) else {"name": one[0], "type": one[1]} for one in fields]
    return {"type": "record", "name": name, "fields": pairs}


def decoded(reader: Any, *values: tuple[Any, bytes | None], permissive: bool = False) -> pa.Array:
    columns = AvroColumns(json.dumps(reader), [])
    roots = [
        -1 if value is None else columns.add_writer(json.dumps(writer), [])
        for writer, value in values
    ]
    given = pa.array([None if one is None else b"head." + one for _, one in values], pa.binary())
    found = columns.decode(given, np.array(roots, np.int64), skipped=5, permissive=permissive)
    found.validate(full=True)
    assert found.type == columns.type
    return found


def of(kind: Any, *values: Any) -> list[Any]:
    """What becomes of values of a field of this type."""
    schema = record(("x", kind))
    found = decoded(schema, *((schema, encoded(schema, {"x": value})) for value in values))
    return [row["x"] for row in found.to_pylist()]


JUNE = datetime(2013, 6, 1, tzinfo=UTC)
LOGICAL = [
    ({"type": "int", "logicalType": "date"}, date(2013, 6, 1)),
    ({"type": "long", "logicalType": "timestamp-millis"}, datetime(2013, 6, 1, 1, 2, 3, 4000, UTC)),
    ({"type": "long", "logicalType": "timestamp-micros"}, datetime(1913, 6, 1, 1, 2, 3, 4, UTC)),
    ({"type": "long", "logicalType": "local-timestamp-micros"}, JUNE.replace(tzinfo=None)),
    ({"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}, Decimal("-12.05")),
    (
        {"type": "fixed", "size": 5, "name": "D", "logicalType": "decimal", "precision": 9},
        Decimal(70_000),
    ),
]


@pytest.mark.parametrize(("kind", "value"), LOGICAL)
def test_logical_types_are_what_they_say(kind: Any, value: Any) -> None:
    assert of(kind, value) == [value]


def test_a_union_of_several_types_is_a_struct_of_which_one_member_is_there() -> None:
    found = of(["null", "int", "string"], "a", None, 7)
    assert found == [{"member0": None, "member1": "a"}, None, {"member0": 7, "member1": None}]
    assert of(["null", "double"], 1.5, None) == [1.5, None]


_PLAIN = ("boolean", "int", "long", "float", "double", "bytes", "string")


def any_type(random: random.Random, depth: int, names: list[str]) -> Any:
    kind = random.choice((*_PLAIN, "fixed", "enum", "array", "map", "record", "optional"))
    name = f"N{len(names)}"
    if kind == "fixed":
        names.append(name)
        return {"type": "fixed", "name": name, "size": random.randrange(4)}
    if kind == "enum":
        names.append(name)
        return {"type": "enum", "name": name, "symbols": ["A", "B", "C"]}
    if kind in _PLAIN or depth == 0:
        return kind if kind in _PLAIN else "int"
    if kind == "optional":
        inner = any_type(random, 0, names)
        return ["null", inner] if random.random() < 0.5 else [inner, "null"]
    if kind == "record":
        names.append(name)
        inner = [(f"f{index}", any_type(random, depth - 1, names)) for index in range(3)]
        return record(*inner, name=name)
    inner = any_type(random, depth - 1, names)
    if kind == "array" and isinstance(inner, dict) and inner.get("size") == 0:
        inner = "int"  # else any number of items in no bytes
    return {"type": kind, "items" if kind == "array" else "values": inner}


def any_value(random: random.Random, schema: Any) -> Any:  # noqa: C901  a case a kind
    kind = schema["type"] if isinstance(schema, dict) else schema
    if isinstance(schema, list):
        return any_value(random, random.choice(schema))
    match kind:
        case "null":
            return None
        case "boolean":
            return random.random() < 0.5
        case "int":
            return random.randrange(-(2**31), 2**31) >> random.randrange(32)
        case "long":
            return random.randrange(-(2**63), 2**63) >> random.randrange(64)
        case "float" | "double":
            return random.randrange(-99, 99) / 8
        case "bytes":
            return random.randbytes(random.randrange(5))
        case "string":
            return random.choice(("", "a", "ö", "€uro", "𝔞"))
        case "fixed":
            return random.randbytes(schema["size"])
        case "enum":
            return random.choice(schema["symbols"])
        case "array":
            return [any_value(random, schema["items"]) for _ in range(random.randrange(4))]
        case "map":
            return {
                f"k{n}": any_value(random, schema["values"]) for n in range(random.randrange(4))
            }
    return {one["name"]: any_value(random, one["type"]) for one in schema["fields"]}


def plain(value: Any) -> Any:
    """Arrow's pairs of a map as a dict."""
    if isinstance(value, dict):
        return {name: plain(one) for name, one in value.items()}
    if isinstance(value, list) and value and isinstance(value[0], tuple):
        return {name: plain(one) for name, one in value}
    return [plain(one) for one in value] if isinstance(value, list) else value


def without_empty(value: Any) -> Any:
    """An empty map and an empty list look the same in Arrow's rows."""
    if isinstance(value, dict):
        return {name: without_empty(one) for name, one in value.items()} or []
    return [without_empty(one) for one in value] if isinstance(value, list) else value


@pytest.mark.parametrize("seed", range(40))
def test_what_fastavro_writes_is_read_and_what_is_cut_is_refused(seed: int) -> None:
    rng = random.Random(seed)
    names: list[str] = []
    schema = record(*((f"f{n}", any_type(rng, 3, names)) for n in range(4)))
    rows = [any_value(rng, schema) for _ in range(5)]
    values = [encoded(schema, row) for row in rows]
    found = decoded(schema, *((schema, value) for value in values), (schema, None))
    assert [without_empty(plain(row)) for row in found.to_pylist()] == [
        *map(without_empty, rows),
        None,
    ]
    # No byte more or less is taken for the same, nor read past.
    last = values[-1]
    for damaged in (*(last[:size] for size in range(len(last))), last + b"\0"):
        with pytest.raises(UndecodableValue) as info:
            decoded(schema, (schema, values[0]), (schema, damaged))
        assert info.value.row == 1
    # Whatever a byte becomes, fastavro and the kernel agree whether it is a value.
    for _ in range(40):
        position = rng.randrange(len(last))
        damaged = last[:position] + rng.randbytes(1) + last[position + 1 :]
        found = decoded(schema, (schema, damaged), (schema, values[0]), permissive=True)
        assert found[1].is_valid
        if found[0].is_valid:
            stream = io.BytesIO(damaged)
            expected = fastavro.schemaless_reader(stream, fastavro.parse_schema(schema), None)
            assert stream.tell() == len(damaged)
            assert repr(without_empty(plain(found[0].as_py()))) == repr(without_empty(expected))


def field(kind: Any, name: str = "x", **more: Any) -> Any:
    return {"name": name, "type": kind, **more}


STRINGS = {"type": "array", "items": "string"}
INNER = record({"name": "i", "type": "long", "default": 7}, name="Inner")
EVOLVED = [
    ("int", 5, field("double"), 5.0),
    ("float", 1.5, field("double"), 1.5),
    ("string", "a", field("bytes"), b"a"),
    ("string", "a", field(["null", "string"]), "a"),
    (["null", "string"], "a", field("string"), "a"),
    ("int", 5, field("long", "y", aliases=["x"]), 5),
    ("int", 5, field(["null", "string"], "y", default=None), None),
    ("int", 5, field("bytes", "y", default="\u00ff"), b"\xff"),
    ("int", 5, field(STRINGS, "y", default=["a"]), ["a"]),
    ("int", 5, field(["int", "string"], "y", default="b"), {"member0": None, "member1": "b"}),
    ("int", 5, field(INNER, "y", default={}), {"i": 7}),
    (
        {"type": "enum", "name": "E", "symbols": ["A", "B"]},
        "A",
        field({"type": "enum", "name": "E", "symbols": ["B"], "default": "B"}),
        "B",
    ),
    (
        {"type": "long", "logicalType": "timestamp-millis"},
        JUNE,
        field({"type": "long", "logicalType": "timestamp-micros"}),
        JUNE,
    ),
]


@pytest.mark.parametrize(("written", "value", "read", "expected"), EVOLVED)
def test_a_reader_reads_what_another_schema_wrote(
    written: Any, value: Any, read: Any, expected: Any
) -> None:
    writer = record(("before", "string"), ("x", written), ("after", ["null", "int"]))
    data = encoded(writer, {"before": "b", "x": value, "after": 3})
    found = decoded(record(read), (writer, data)).to_pylist()
    assert found == [{read["name"]: expected}]


def test_what_a_reader_does_not_have_is_read_past_even_if_it_contains_itself() -> None:
    tree = record(("left", ["null", "Tree"]), ("right", ["null", "Tree"]), name="Tree")
    writer = record(("tree", tree), ("z", "int"))
    leaf = {"left": None, "right": None}
    value = encoded(
        writer, {"tree": {"left": leaf, "right": {"left": leaf, "right": None}}, "z": 5}
    )
    assert decoded(record(("z", "int")), (writer, value)).to_pylist() == [{"z": 5}]
    with pytest.raises(InvalidOption, match="/tree/left of the schema contains itself"):
        AvroColumns(json.dumps(writer), [])


LENGTHLESS = {"type": "array", "items": "null"}
REFUSED = [
    (record(("x", "string")), record(("x", "int")), b"\0", "/x: written as string, read as int"),
    (record(("x", "int")), record(("y", "int")), b"\0", "/y: not written, and the schema has no"),
    (record(("x", ["null", "int"])), record(("x", "int")), b"\0", "/x: written as null, read"),
    (record(("x", "string")), record(("x", "string")), b"\4\xff\xff", "/x: text that is not UTF-8"),
    (record(("x", "int")), record(("x", "int")), b"\x80\x80\x80\x80\x80\x01", "/x: a number is"),
    (record(("x", LENGTHLESS)), record(("x", LENGTHLESS)), b"\xfe\xfe\1\0", "takes no bytes"),
    (record(("x", LENGTHLESS), ("y", "int")), record(("y", "int")), b"\xfe\1\0\0", "takes no"),
]  # fmt: skip


@pytest.mark.parametrize(("writer", "reader", "value", "expected"), REFUSED)
def test_a_value_that_does_not_decode_is_refused_by_its_path_or_read_as_null(
    writer: Any, reader: Any, value: bytes, expected: str
) -> None:
    with pytest.raises(UndecodableValue, match=expected):
        decoded(reader, (writer, value))
    assert decoded(reader, (writer, value), permissive=True).to_pylist() == [None]


# --- JSON -----------------------------------------------------------------------------------------

FLIGHT = {
    "type": "object",
    "properties": {
        "carrier": {"type": "string"},
        "delay": {"oneOf": [{"type": "null"}, {"type": "number"}]},
        "legs": {"type": "array", "items": {"$ref": "#/definitions/leg"}},
        "kind": {"enum": ["a", "b"]},
        "crew": {"$ref": "crew.json"},
        "anything": {},
        "either": {"type": ["string", "integer"]},
    },
    "definitions": {
        "leg": {
            "type": "object",
            "properties": {"miles": {"type": "integer"}, "next": {"$ref": "#/definitions/leg"}},
        }
    },
}
CREW = {"type": "object", "properties": {"size": {"type": "integer"}}}


def of_json(*values: bytes | None, permissive: bool = False) -> list[Any]:
    columns = JsonColumns(json.dumps(FLIGHT), [("crew.json", json.dumps(CREW))])
    found = columns.decode(pa.array(values, pa.binary()), permissive=permissive)
    found.validate(full=True)
    assert found.type == columns.type
    rows: list[Any] = found.to_pylist()
    return rows


def test_json_is_what_its_schema_says_and_no_more() -> None:
    given = {
        "carrier": "UÄ",
        "delay": 1,
        "legs": [{"miles": 7, "next": {}}],
        "kind": "b",
        "crew": {"size": 2},
        "anything": [1],
        "either": 1,
        "unnamed": {"a": 1},
    }
    expected = {name: given[name] for name in ("carrier", "delay", "kind", "crew")}
    expected["legs"] = [{"miles": 7}]
    nothing = dict.fromkeys(expected)
    pretty = json.dumps(given, indent=2, ensure_ascii=False).encode()
    assert of_json(pretty, None, b"{}", b"null") == [expected, None, nothing, None]
    assert of_json() == []


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (b'{"carrier":1}', r"Column\(/carrier\) changed from string to number"),
        (b'{"legs":[{"miles":1.5}]}', "int64"),
        (b"7", r"Column\(/\) changed"),
        (b"", "not JSON: Expecting value"),
        (b'{"carrier":"a', "string"),
        (b'{}}\n{"v":{}', "not JSON: Extra data"),
        (b'{"carrier":"\xff"}', "UTF"),
    ],
)
def test_json_that_does_not_fit_is_refused_where_it_is_or_read_as_null(
    value: bytes, expected: str
) -> None:
    with pytest.raises(UndecodableValue, match=expected) as info:
        of_json(b"{}", None, b"{}", value, b"{}")
    assert info.value.row == 3
    found = of_json(b"{}", value, b'{"carrier":"b"}', value, permissive=True)
    assert [row and row["carrier"] for row in found] == [None, None, "b", None]
    assert [row is None for row in found] == [False, True, False, True]


def test_a_json_schema_of_no_one_type_has_no_columns() -> None:
    for schema in (True, {}, {"type": "object"}, {"anyOf": [{"type": "string"}, CREW]}):
        with pytest.raises(InvalidOption, match="names no one type"):
            JsonColumns(json.dumps(schema), [])
    assert JsonColumns('{"type": "integer"}', []).type == pa.int64()


def any_json_schema(rng: random.Random, depth: int) -> Any:
    kind = rng.choice(("integer", "number", "string", "boolean", "array", "object"))
    if kind == "array" and depth:
        return {"type": "array", "items": any_json_schema(rng, depth - 1)}
    if kind == "object" and depth:
        names = rng.sample("abcdef", rng.randrange(1, 4))
        properties = {name: any_json_schema(rng, depth - 1) for name in names}
        return {"type": "object", "properties": properties}
    return {"type": kind if kind not in ("array", "object") else "integer"}


def any_json(rng: random.Random, schema: Any) -> Any:
    """With nulls, and members that the schema does not have."""
    if rng.random() < 0.1:
        return None
    match schema["type"]:
        case "integer":
            return rng.randrange(-(2**63), 2**63) >> rng.randrange(64)
        case "number":
            return rng.choice((rng.randrange(-99, 99) / 8, rng.randrange(9), 1e300))
        case "string":
            return rng.choice(("", "a", '"\\\n', "ö€𝔞", "\x00", "{[,", "null"))
        case "boolean":
            return rng.random() < 0.5
        case "array":
            return [any_json(rng, schema["items"]) for _ in range(rng.randrange(4))]
    found = {name: any_json(rng, one) for name, one in schema["properties"].items()}
    if rng.random() < 0.3:
        found["more"] = rng.choice((1, None, "x", [], [{"a": [1]}], {"a": {}}))
    return found


def read_as(schema: Any, value: Any) -> Any:
    if value is None:
        return None
    match schema["type"]:
        case "array":
            return [read_as(schema["items"], one) for one in value]
        case "object":
            properties = schema["properties"].items()
            return {name: read_as(one, value.get(name)) for name, one in properties}
    return value


@pytest.mark.parametrize("seed", range(12))
def test_json_is_read_as_pythons_own_parser_reads_it(seed: int) -> None:
    rng = random.Random(seed)
    schema = any_json_schema(rng, 3)
    columns = JsonColumns(json.dumps(schema), [])
    rows = [any_json(rng, schema) for _ in range(6)]
    values = [json.dumps(row, ensure_ascii=rng.random() < 0.5).encode() for row in rows]
    found = columns.decode(pa.array(values), permissive=False)
    assert found.type == columns.type
    assert found.to_pylist() == [read_as(schema, row) for row in rows]
    # What is cut, and what a few other bytes make of it: a row, if it is one, is of one value.
    last = max(values, key=len)
    damaged = [last[:size] for size in range(min(len(last), 40))]
    for _ in range(60):
        at, more = (
            rng.randrange(len(last) + 1),
            rng.choice((b"}", b"]", b",", b'"', b"{", b"1", b"")),
        )
        damaged.append(last[:at] + more + last[at + rng.randrange(2) :])
    found = columns.decode(pa.array(damaged), permissive=True)
    for value, row in zip(damaged, found.to_pylist(), strict=True):
        if row is not None:
            assert row == read_as(schema, json.loads(value))
