"""What few bytes of Avro would make of memory and stack is refused before it is made."""

import json
from io import BytesIO
from typing import Any

import fastavro
import pytest

from tierlog.broker.schema_registry.avro import AvroSchema
from tierlog.broker.schema_registry.avro_limits import DEPTH_MAX, EMPTY_MAX, is_limited
from tierlog.record_format.schema_records import Malformed


def record(name: str, *fields: tuple[str, Any]) -> Any:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


def nested(levels: int, fields: int, last: Any) -> Any:
    """A record of a level has so many of the one below it, named rather than written again."""
    known = [record("Level0", *((f"f{n}", last) for n in range(fields)))]
    for level in range(1, levels):
        below = [(f"f{n}", f"Level{level - 1}") for n in range(fields)]
        known.append(record(f"Level{level}", *below))
    return record("Whole", *((f"of{n}", one) for n, one in enumerate(known)))


LIST = record("List", ("next", ["null", "List"]))
TREE = record("Tree", ("left", ["null", "Tree"]), ("more", {"type": "array", "items": "Tree"}))
NULLS = {"type": "array", "items": "null"}
NOTHING = {"type": "array", "items": record("Nothing")}
ENDLESS = b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f"
A_MILLION = b"\x80\x89\x7a"
WIDE = record("Wide", ("there", "boolean"), *((f"f{n}", "null") for n in range(500)))


@pytest.mark.parametrize(
    ("schema", "encoded", "problem"),
    [
        pytest.param(LIST, b"\2" * 1_000_000, "/next/next/next/next/next/…: nested", id="list"),
        pytest.param(TREE, b"\0\2" * 500_000, "/more/more/more", id="tree"),
        pytest.param(NULLS, ENDLESS, "^/: more than 100000 values that take no bytes", id="nulls"),
        pytest.param(NOTHING, ENDLESS, "take no bytes", id="records"),
        pytest.param(
            {"type": "map", "values": NULLS}, b"\2\0" + ENDLESS, "take no bytes", id="map"
        ),
        pytest.param(
            {"type": "array", "items": WIDE}, A_MILLION + b"\1" * 1_000_000, "/f", id="wide"
        ),
        pytest.param(nested(9, 10, "null"), b"", "^/of4/f8/f8/f8/f9/…: more", id="fan"),
        pytest.param(nested(500, 1, "int"), b"\2" * 500, "/of199/f0/f0/", id="chain"),
    ],
)
def test_a_value_that_would_take_much_memory_or_stack_is_refused_with_its_path(
    schema: Any, encoded: bytes, problem: str
) -> None:
    parsed = AvroSchema(json.dumps(schema), [])
    with pytest.raises(Malformed, match=problem):
        parsed.check_value(encoded)


def test_what_is_within_the_limits_is_decoded() -> None:
    def decoded(schema: Any, value: Any) -> Any:
        stream = BytesIO()
        fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), value)
        return AvroSchema(json.dumps(schema), []).decode(stream.getvalue())

    deep: Any = None
    for _ in range(DEPTH_MAX):
        deep = {"next": deep}
    every = record(
        "Every",
        *((kind, kind) for kind in ("boolean", "int", "long", "float", "double")),
        *((kind, kind) for kind in ("bytes", "string", "null")),
        ("fixed", {"type": "fixed", "name": "F", "size": 3}),
        ("enum", {"type": "enum", "name": "E", "symbols": ["A", "B"]}),
        ("map", {"type": "map", "values": ["null", "long"]}),
        ("list", {"type": "array", "items": {"type": "array", "items": "double"}}),
    )
    row = {"boolean": True, "int": -7, "long": 2**62, "float": 1.5, "double": -2.5}
    row |= {"bytes": b"\0\1", "string": "ö", "null": None, "fixed": b"abc", "enum": "B"}
    row |= {"map": {"a": None, "b": 2**40}, "list": [[1.5], [], [2.5, 3.5]]}
    for schema, value in (
        (LIST, deep),
        (NULLS, [None] * EMPTY_MAX),
        (NOTHING, [{}, {}]),
        (every, row),
    ):
        assert not is_limited(AvroSchema(json.dumps(schema), []).types)
        assert decoded(schema, value) == value


def test_values_of_most_schemas_are_not_walked() -> None:
    flight = record("Flight", ("carrier", "string"), ("delay", ["null", "int"]))
    for schema in (flight, {"type": "array", "items": flight}, nested(5, 2, "int"), "long"):
        assert is_limited(AvroSchema(json.dumps(schema), []).types)


def test_a_schema_whose_types_fan_out_is_parsed_at_once() -> None:
    AvroSchema(json.dumps({"type": "array", "items": nested(60, 10, "null")}), [])
