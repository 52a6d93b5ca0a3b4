"""Few bytes, and few lines of a schema, take a bounded amount of memory as columns."""

import json
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from tierlog.record_format.avro_columns import AvroColumns
from tierlog.record_format.columns import COLUMNS_MAX, ROOM_MAX
from tierlog.record_format.errors import ColumnsTooLarge, InvalidOption, UndecodableValue
from tierlog.record_format.json_columns import JsonColumns
from tierlog.record_format.proto_columns import ProtoColumns
from tierlog.record_format.schema_state import Source
from tierlog.spark_reader.values import columns_of_source

LEVELS, FIELDS = 8, 12
DEEP = 2000


def record(name: str, *fields: tuple[str, Any]) -> Any:
    return {"type": "record", "name": name, "fields": [{"name": n, "type": t} for n, t in fields]}


def avro_levels(levels: int, fields: int) -> str:
    """A record of a level has so many of the one below it, named rather than written again."""
    known = [record("Level0", *((f"f{n}", "null") for n in range(fields)))]
    for level in range(1, levels):
        below = [(f"f{n}", f"Level{level - 1}") for n in range(fields)]
        known.append(record(f"Level{level}", *below))
    return json.dumps(record("Whole", *((f"of{n}", one) for n, one in enumerate(known))))


def proto_levels(levels: int, fields: int, last: str = "int32 i = 1;") -> str:
    messages = [f"message M{levels} {{ {last} }}"]
    for level in range(levels):
        inner = " ".join(f"M{level + 1} f{n} = {n};" for n in range(1, fields + 1))
        messages.insert(0, f"message M{level} {{ {inner} }}")
    messages.sort(key=lambda one: int(one.split()[1][1:]))
    return 'syntax = "proto3"; ' + " ".join(messages)


def json_levels(levels: int, fields: int) -> str:
    def of(level: int) -> Any:
        if level == levels:
            return {"type": "integer"}
        ref = {"$ref": f"#/definitions/l{level + 1}"}
        return {"type": "object", "properties": {f"f{n}": ref for n in range(fields)}}

    definitions = {f"l{level}": of(level) for level in range(1, levels + 1)}
    return json.dumps({**of(0), "definitions": definitions})


@contextmanager
def within(bytes_: int) -> Iterator[None]:
    """Of the process, above what it ever had."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) << 10 < bytes_


@pytest.mark.parametrize(
    ("kind", "text", "problem"),
    [
        ("AVRO", avro_levels(LEVELS, FIELDS), f"more than {COLUMNS_MAX} columns"),
        ("PROTOBUF", proto_levels(LEVELS, FIELDS), f"more than {COLUMNS_MAX} columns"),
        ("PROTOBUF", proto_levels(30, FIELDS, ""), "has no fields: read bytes"),
        ("JSON", json_levels(LEVELS, FIELDS), f"more than {COLUMNS_MAX} columns"),
        ("AVRO", avro_levels(DEEP, 1), "nested too deep|more than 10000 columns"),
        ("PROTOBUF", proto_levels(DEEP, 1), "nested too deep"),
        ("JSON", json_levels(DEEP, 1), "nested too deep"),
    ],
    ids=["avro", "protobuf", "protobuf-empty", "json", "avro-deep", "protobuf-deep", "json-deep"],
)
def test_a_schema_of_very_many_columns_is_refused_where_there_are_too_many(
    kind: Any, text: str, problem: str
) -> None:
    with within(50 << 20), pytest.raises(InvalidOption, match=problem):
        columns_of_source(Source(kind, text))


def test_a_writers_unions_within_unions_are_refused_when_they_take_too_many_steps() -> None:
    def levels(branches: int) -> str:
        known: list[Any] = []
        for level in range(9):
            below: Any = [f"L{level - 1}b{n}" for n in range(branches)] if level else "int"
            known += [record(f"L{level}b{n}", ("f", below)) for n in range(branches)]
        last = record("Whole", ("f", [f"L8b{n}" for n in range(branches)]))
        return json.dumps(record("R", *((f"of{n}", one) for n, one in enumerate([*known, last]))))

    found = AvroColumns(json.dumps(record("R", (f"of{9 * 8}", json.loads(plain(9))))), [])
    with within(100 << 20), pytest.raises(InvalidOption, match=r"/of72/f.* takes more than 100000"):
        found.add_writer(levels(8), [])
    assert found.add_writer(levels(1), []) >= 0


def plain(levels: int) -> str:
    """Records in records, of which the last has a number."""
    found: Any = "int"
    for level in range(levels, -1, -1):
        found = record(f"P{level}", ("f", found))
    return json.dumps(found)


WIDE = 400
COUNT = 100_000


def avro_nulls() -> tuple[pa.Array, AvroColumns, int]:
    """Nulls of a wide record, each of which is a byte, and a row of each of its columns."""
    wide = record("Wide", *((f"f{n}", "long") for n in range(WIDE)))
    text = json.dumps(record("R", ("rows", {"type": "array", "items": ["null", wide]})))
    found = AvroColumns(text, [])
    head = b"\xc0\x9a\x0c"  # 100,000
    return pa.array([head + bytes(COUNT) + b"\0"]), found, found.add_writer(text, [])


def proto_messages() -> tuple[pa.Array, ProtoColumns, int]:
    """Messages without fields, each of which is two bytes."""
    fields = " ".join(f"int64 f{n} = {n + 1};" for n in range(WIDE))
    text = f'syntax = "proto3"; message R {{ repeated W rows = 1; }} message W {{ {fields} }}'
    found = ProtoColumns(text, [])
    return pa.array([b"\0" + b"\x0a\0" * COUNT]), found, found.add_writer(text, [])


@pytest.mark.parametrize("make", [avro_nulls, proto_messages])
def test_a_value_of_many_rows_of_a_wide_record_is_refused_before_memory_is_taken(make: Any) -> None:
    values, found, root = make()
    roots = np.array([root], np.int64)
    problem = rf"/rows/items/f\d+: it has {COUNT} rows .* up to \d+ bytes, and may take {ROOM_MAX}"
    with within(50 << 20):
        for permissive in (False, True):
            with pytest.raises(ColumnsTooLarge, match=problem):
                found.decode(values, roots, skipped=0, permissive=permissive)


def test_a_default_of_defaults_and_symbols_of_much_text_are_refused_too() -> None:
    known: list[Any] = [record("D0", ("n", "int"))]
    for level in range(1, 6):
        items = {"type": "array", "items": f"D{level - 1}"}
        values = [{"n": 1}] * 50 if level == 1 else [{}] * 50
        known.append(
            {**record(f"D{level}"), "fields": [{"name": "f", "type": items, "default": values}]}
        )
    reader = record("R", *((f"of{n}", one) for n, one in enumerate(known)))
    for field in reader["fields"]:
        field["default"] = {"n": 1} if field["name"] == "of0" else {}
    found = AvroColumns(json.dumps(reader), [])
    with within(50 << 20):
        roots = np.array([found.add_writer(json.dumps(record("R")), [])])
    with pytest.raises(UndecodableValue, match="/of3: its default has more than 65536 bytes"):
        found.decode(pa.array([b""]), roots, skipped=0, permissive=False)
    enum = {"type": "enum", "name": "E", "symbols": ["A" * 100_000, "B"]}
    text = json.dumps(record("R", ("e", enum)))
    found = AvroColumns(text, [])
    roots = np.full(3000, found.add_writer(text, []))
    with within(50 << 20), pytest.raises(ColumnsTooLarge, match=r"^/e: it has 3000 rows"):
        found.decode(pa.array([b"\0"] * 3000), roots, skipped=0, permissive=False)


def test_json_that_may_take_much_memory_as_columns_is_not_given_to_arrow() -> None:
    wide = {"type": "object", "properties": {f"f{n}": {"type": "integer"} for n in range(WIDE)}}
    schema = {"type": "object", "properties": {"rows": {"type": "array", "items": wide}}}
    found = JsonColumns(json.dumps(schema), [])
    value = b'{"rows":[' + b"{}," * COUNT + b"{}]}"
    with within(50 << 20):
        for permissive in (False, True):
            with pytest.raises(ColumnsTooLarge, match=f"up to {COUNT + 1} items in lists"):
                found.decode(pa.array([value]), permissive=permissive)
    # Commas are no items where there are few: it is read.
    text = b'{"more":"' + b"," * 20_000 + b'","rows":[{"f0":1}]}'
    (row,) = found.decode(pa.array([text]), permissive=False).to_pylist()
    assert row["rows"][0]["f0"] == 1


def test_json_that_is_nested_deep_where_there_is_no_column_is_read_past_or_refused() -> None:
    found = JsonColumns('{"type": "object", "properties": {"a": {"type": "integer"}}}', [])
    for depth, is_read in ((100, True), (300_000, False)):
        value = b'{"a":1,"b":' + b'[{"c":' * depth + b"1" + b"}]" * depth + b"}"
        rows = found.decode(pa.array([value, b'{"a":2}']), permissive=True).to_pylist()
        assert rows == [{"a": 1} if is_read else None, {"a": 2}]
    with pytest.raises(UndecodableValue, match="nested too deep"):
        found.decode(pa.array([value]), permissive=False)


@pytest.mark.parametrize("rest", [b',"w":2', b"} ", b'}\n{"v":{"a":3}', b',"v":{}', b"/**/"])
def test_json_that_goes_on_after_its_value_is_refused(rest: bytes) -> None:
    found = JsonColumns('{"type": "object", "properties": {"a": {"type": "integer"}}}', [])
    for more in (b"", b',"b":2'):
        value = b'{"a":1' + more + b"}"
        rows = found.decode(pa.array([value, value + rest]), permissive=True).to_pylist()
        assert rows == [{"a": 1}, None]


def test_json_that_has_no_number_for_a_number_is_read_as_before() -> None:
    found = JsonColumns('{"type": "object", "properties": {"a": {"type": "number"}}}', [])
    for value in (b'{"a":NaN}', b'{"a":1.5,"b":NaN}'):
        assert found.decode(pa.array([value]), permissive=False).null_count == 0
