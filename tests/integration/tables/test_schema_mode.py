"""A table of mode schema has columns by the registry's schemas, which change while it is synced."""

import itertools
import json
from collections.abc import Iterator
from datetime import UTC, date, datetime
from decimal import Decimal
from io import BytesIO
from typing import Any

import fastavro
import pytest

pytest.importorskip("pyiceberg")

import polars as pl
from pyiceberg.catalog.sql import SqlCatalog

from tests.fakes.topic_tables import TOPIC, JsonTable, runs_of
from tests.fakes.two_tiers import TwoTiers, two_tiers
from tests.unit.tables.test_maintain import ALL_OLD, maintain
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format import columns as value_columns
from tierlog.record_format.produced import build_produced
from tierlog.record_format.schema_records import LEVEL, Schema
from tierlog.tables.catalog import SCHEMA_MODE, create_table
from tierlog.tables.json_columns import given_columns
from tierlog.tables.schema_rows import SchemaNotUploaded
from tierlog.tables.status import status_of
from tierlog.tables.sync import Synced, begin_tables

_topics = itertools.count()


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTiers]:
    with two_tiers(tmp_path_factory.mktemp("schemas")) as tiers:
        yield tiers


class SchemaTable(JsonTable):
    """Of a topic of its own on the broker, whose schemas are registered."""

    def __init__(self, tiers: TwoTiers, folder: Any) -> None:
        topic = f"{TOPIC}-{next(_topics)}"
        super().__init__(folder, topic=topic, server=tiers.url, store=tiers.store_url)
        self.tiers = tiers
        tiers.create(self.topic, partitions=1)

    def make(self, *columns: str) -> None:
        ((position, _),) = begin_tables(self.options())
        given = given_columns(columns)
        create_table(self.open_catalog(), self.name, position, mode=SCHEMA_MODE, columns=given)

    def register(self, document: Any, kind: Any = "AVRO") -> int:
        """`document`: a text if it is of Protobuf."""
        schema = Schema(kind, document if kind == "PROTOBUF" else json.dumps(document))
        registry = self.tiers.broker.schema_registry
        registry.put_setting(LEVEL, f"{self.topic}-value", "NONE")
        return registry.register(f"{self.topic}-value", schema).schema_id

    def send(self, *values: bytes | None) -> None:
        times = [1_700_000_000_000] * len(values)
        batches = build_produced(list(values), timestamps=times, max_message_bytes=1 << 20)
        self.tiers.broker.partition(self.topic, 0).append(batches, acks=Acks.ALL).result(10)
        self.values += values

    def types(self) -> dict[str, str]:
        """Of the columns of values."""
        fields = self.load().schema().fields
        return {one.name: str(one.field_type) for one in fields if one.name[0] != "_"}


@pytest.fixture
def table(tiers: TwoTiers, tmp_path: Any) -> SchemaTable:
    return SchemaTable(tiers, tmp_path)


def record(*fields: tuple[str, Any]) -> dict[str, Any]:
    return {
        "type": "record",
        "name": "Flight",
        "fields": [{"name": name, "type": kind} for name, kind in fields],
    }


def headed(schema_id: int, body: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4) + body


def avro(schema_id: int, schema: Any, row: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return headed(schema_id, stream.getvalue())


def text(schema_id: int, value: Any) -> bytes:
    return headed(schema_id, json.dumps(value).encode())


def test_a_new_version_adds_and_widens_columns_in_the_commit_of_its_first_records(table):
    first = record(("id", "int"), ("carrier", "string"), ("at", record(("x", "float"))))
    first["fields"][2]["type"]["name"] = "At"
    old = table.register(first)
    table.make()
    table.send(avro(old, first, {"id": 1, "carrier": "UA", "at": {"x": 0.5}}))
    table.run()
    before = table.load()
    assert table.types() == {
        "id": "int",
        "carrier": "string",
        "at": "struct<12: x: optional float>",
    }

    later = json.loads(json.dumps(first))
    later["fields"][0]["type"] = "long"
    later["fields"][2]["type"]["fields"] = [{"name": "x", "type": "double"}]
    later["fields"].append({"name": "delay", "type": ["null", "int"], "default": None})
    new = table.register(later)
    commits = counting_commits(table)
    row = {"id": 1 << 40, "carrier": "AA", "at": {"x": 0.1}, "delay": 7}
    table.send(avro(new, later, row), avro(old, first, {"id": 2, "carrier": "B", "at": {"x": 2}}))
    assert table.run(catalog=commits) == Synced(commits=1, records=2)
    assert commits.names == [table.name]
    assert table.json_rows() == {
        0: {"id": 1, "carrier": "UA", "at": {"x": 0.5}},
        1: row,
        2: {"id": 2, "carrier": "B", "at": {"x": 2.0}},
    }
    after = table.load()
    assert ids_of(after).items() > ids_of(before).items()
    assert after.snapshot_by_id(before.current_snapshot().snapshot_id).schema_id != (
        after.current_snapshot().schema_id
    )
    assert after.current_snapshot().schema_id == after.schema().schema_id


def counting_commits(table: SchemaTable) -> Any:
    class Counting(SqlCatalog):
        def commit_table(self, one: Any, *arguments: Any) -> Any:
            self.names.append(one.name())
            return super().commit_table(one, *arguments)

    found = table.open_catalog(Counting)
    found.names = []
    return found


def ids_of(table: Any) -> dict[str, int]:
    schema = table.schema()
    return {name: schema.find_field(name).field_id for name in schema.column_names}


def test_rows_that_were_written_before_a_type_was_widened_are_found_and_maintained(
    table, monkeypatch
):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    small, large = record(("n", "int")), record(("n", "long"))
    old = table.register(small)
    table.make()
    table.send(avro(old, small, {"n": 5}), avro(old, small, {"n": 6}))
    table.run()
    new = table.register(large)
    table.send(avro(new, large, {"n": 1 << 33}))
    table.run()
    for _ in "12":
        assert table.load().scan(row_filter="n = 6").to_arrow()["_offset"].to_pylist() == [1]
        rows = pl.scan_iceberg(table.load()).filter(pl.col("n") >= 6).collect()
        assert sorted(rows["n"]) == [6, 1 << 33]
        maintain(table, ALL_OLD)
    assert status_of(table.load(), None).files == 1


def test_a_row_has_all_that_its_own_schema_says_also_what_the_latest_does_not(table):
    first, later = record(("a", "int"), ("b", "string")), record(("a", "int"), ("c", "string"))
    old, new = table.register(first), table.register(later)
    table.make()
    table.send(avro(old, first, {"a": 1, "b": "x"}), None, avro(new, later, {"a": 2, "c": "y"}))
    assert table.run().records == 3
    assert list(table.types()) == ["a", "c", "b"]  # those of the latest version come first
    assert table.json_rows() == {0: {"a": 1, "b": "x"}, 1: {}, 2: {"a": 2, "c": "y"}}


def test_types_are_icebergs_own_where_it_has_them(table):
    schema = record(
        ("day", {"type": "int", "logicalType": "date"}),
        ("at", {"type": "long", "logicalType": "timestamp-millis"}),
        ("price", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
        ("tags", {"type": "array", "items": "string"}),
        ("counts", {"type": "map", "values": "long"}),
        ("kind", {"type": "enum", "name": "Kind", "symbols": ["A", "B"]}),
        ("either", ["null", "int", "string"]),
        ("nothing", "null"),
        ("raw", "bytes"),
    )
    number = table.register(schema)
    table.make()
    row = {"day": date(2026, 5, 1), "at": datetime(2026, 5, 1, 7, tzinfo=UTC), "raw": b"\0"}
    row |= {"price": Decimal("12.50"), "tags": ["a"], "counts": {"k": 3}, "kind": "B"}
    table.send(avro(number, schema, {**row, "either": "text", "nothing": None}))
    table.run()
    types = table.types()
    assert types.keys() == {*row, "either"}
    assert (types["day"], types["at"], types["price"]) == ("date", "timestamptz", "decimal(9, 2)")
    (found,) = table.json_rows().values()
    assert found["counts"] == [("k", 3)]
    assert {**found, "counts": {"k": 3}} == row | {"either": {"member0": None, "member1": "text"}}


def test_what_columns_cannot_take_is_among_the_errors_with_its_schema_and_reason(table):
    number, words = record(("n", "long")), record(("n", "string"))
    first = table.register(number)
    table.make()
    table.send(avro(first, number, {"n": 1}))
    table.run()
    changed = table.register(words)
    taken = table.register(record(("_offset", "long")))
    table.send(
        avro(changed, words, {"n": "two"}),
        avro(first, number, {"n": 3}) + b"more",
        avro(first, number, {"n": 4}),
        b"no head",
        headed(99_999, b""),
        headed(taken, b"\2"),
        headed(first, b""),
    )
    assert table.run() == Synced(commits=1, records=1, errors=6)
    assert table.json_rows() == {0: {"n": 1}, 3: {"n": 4}}
    assert {offset: reason for offset, (_, reason) in table.errors().items()} == {
        1: f"schema {changed}: n: string, where the column is long",
        2: f"schema {first}: /: bytes follow the value's end",
        4: "it does not begin with the id of a schema",
        5: "schema 99999: the registry does not have it",
        6: f"schema {taken}: _offset: the table has a column of that name for each record's own",
        7: f"schema {first}: /n: a number is damaged, or out of range",
    }
    assert {one: value for one, (value, _) in table.errors().items()} == {
        one: table.values[one] for one in (1, 2, 4, 5, 6, 7)
    }
    assert table.types() == {"n": "long"}


def test_json_is_columns_by_its_schema_and_a_fraction_needs_a_column_that_takes_it(table):
    def document(kind):
        return {"type": "object", "properties": {"price": {"type": kind}, "s": {"type": "string"}}}

    whole = table.register(document("integer"), "JSON")
    table.make()
    table.send(text(whole, {"price": 3, "s": "a", "more": 1}), text(whole, {"price": "free"}))
    assert table.run() == Synced(commits=1, records=1, errors=1)
    number = table.register(document("number"), "JSON")
    table.send(text(number, {"price": 0.5}))
    assert table.run() == Synced(commits=1, errors=1)
    assert table.errors()[2][1] == f"schema {number}: price: double, where the column is long"
    assert table.json_rows() == {0: {"price": 3, "s": "a"}}


def test_each_value_of_protobuf_is_the_message_that_its_indexes_lead_to(table):
    text = (
        'syntax = "proto3"; message Flight { string carrier = 1; Leg leg = 2;'
        " message Leg { int32 miles = 1; } } message Other { int32 n = 1; string leg = 2; }"
    )
    schema_id = table.register(text, "PROTOBUF")
    table.make()
    table.send(
        headed(schema_id, b"\0\x0a\2UA\x12\2\x08\7"),
        headed(schema_id, b"\2\0\x0a\2AA"),  # the same, at length
        headed(schema_id, b"\4\0\0\x08\5"),
        headed(schema_id, b"\2\2\x08\1"),
        headed(schema_id, b"\2\6\x08\1"),
        headed(schema_id, b""),
        headed(schema_id, b"\x01"),
    )
    assert table.run() == Synced(commits=1, records=3, errors=4)
    assert table.json_rows() == {
        0: {"carrier": "UA", "leg": {"miles": 7}},
        1: {"carrier": "AA"},
        2: {"miles": 5},
    }
    assert {offset: reason for offset, (_, reason) in table.errors().items()} == {
        3: f"schema {schema_id}: leg: string, where the column is a struct",
        4: f"schema {schema_id}: the schema has no message with the index [3]",
        5: f"schema {schema_id}: it does not begin with the indexes of a message",
        6: f"schema {schema_id}: -1 message indexes are not from 0 to 64",
    }


def test_a_message_is_the_same_wherever_a_later_file_has_it(table):
    flight = "message Flight { string carrier = 1; }"
    first = table.register(f'syntax = "proto3"; {flight}', "PROTOBUF")
    later = 'syntax = "proto3"; message New { int32 n = 1; } ' + flight
    second = table.register(later, "PROTOBUF")
    table.make()
    table.send(
        headed(first, b"\0\x0a\2UA"),
        headed(second, b"\2\2\x0a\2AA"),
        headed(second, b"\0\x08\7"),
    )
    assert table.run() == Synced(commits=1, records=3)
    assert table.json_rows() == {0: {"carrier": "UA"}, 1: {"carrier": "AA"}, 2: {"n": 7}}


def test_items_of_one_schema_take_the_memory_of_all_that_other_schemas_have(table, monkeypatch):
    def of(*names):
        row = {**record(*((name, "long") for name in names)), "name": "Row"}
        return record(("rows", {"type": "array", "items": row}))

    narrow, wide = of("a"), of("a", *(f"f{n}" for n in range(300)))
    ids = [table.register(one) for one in (narrow, wide)]
    table.make()
    few, many = ({"rows": [{"a": n} for n in range(count)]} for count in (2, 100))
    table.send(avro(ids[0], narrow, few), avro(ids[0], narrow, many))
    monkeypatch.setattr(value_columns, "ROOM_MAX", 100_000)
    assert table.run() == Synced(commits=1, records=1, errors=1)
    assert "with up to 100 items in lists may take" in table.errors()[1][1]


def test_what_would_take_much_memory_as_columns_is_among_the_errors(table, monkeypatch):
    row = {**record(("n", "long")), "name": "Row"}
    schema = record(("rows", {"type": "array", "items": ["null", row]}))
    number = table.register(schema)
    table.make()
    sizes = (3, 40, 5, 900, 2)
    table.send(*(avro(number, schema, {"rows": [None] * size}) for size in sizes))
    monkeypatch.setattr(value_columns, "ROOM_MAX", 1000)
    assert table.run() == Synced(commits=1, records=4, errors=1)
    assert {offset: len(row["rows"]) for offset, row in table.json_rows().items()} == {
        offset: size for offset, size in enumerate(sizes) if offset != 3
    }
    assert "/rows/items/n: it has 900 rows of a batch whose columns" in table.errors()[3][1]


def test_columns_of_a_new_table_are_wide_enough_for_the_latest_version(tiers, tmp_path):
    for name, columns in (("latest", ()), ("given", ("n double",))):
        (tmp_path / name).mkdir()
        table = SchemaTable(tiers, tmp_path / name)
        versions = [record(("n", "long")), record(("n", "double"))]
        ids = [table.register(one) for one in versions[: 1 if columns else 2]]
        table.make(*columns)
        table.send(*(avro(ids[0], versions[0], {"n": n}) for n in (7, (1 << 60) + 1)))
        assert table.run() == Synced(commits=1, records=1, errors=1)
        assert table.types() == {"n": "double"}
        assert "1152921504606846977 not in range" in table.errors()[1][1]


def test_a_schema_that_the_bucket_lacks_ends_the_run_and_one_that_was_deleted_does_not(table):
    schema = record(("n", "long"), ("of_this_test", "null"))
    first = table.register(schema)
    table.make()
    table.send(avro(first, schema, {"n": 1, "of_this_test": None}))
    table.tiers.broker.offload(table.topic, wait_ms=20_000)
    table.tiers.broker.offload("_schemas", wait_ms=20_000)
    later = table.register({**schema, "doc": "later"})
    table.send(avro(later, schema, {"n": 2, "of_this_test": None}))
    table.tiers.broker.offload(table.topic, wait_ms=20_000)
    table.is_cold = True
    with pytest.raises(SchemaNotUploaded, match=f"Schema {later} not found in what is in the buck"):
        table.run()
    assert table.load().current_snapshot() is None
    table.is_cold = False
    for permanent in (False, True):
        registry = table.tiers.broker.schema_registry
        registry.delete_subject(f"{table.topic}-value", permanent=permanent)
    assert table.run() == Synced(commits=1, errors=2)
    lost = "the registry does not have it"
    assert [reason for _, (_, reason) in sorted(table.errors().items())] == [
        f"schema {one}: {lost}" for one in (first, later)
    ]
    assert not [path for path in table.files() if "attempts" in path]


def test_runs_that_are_killed_while_versions_change_leave_nothing_out_and_nothing_twice(
    table, tmp_path_factory
):
    fields = [("n", "int")]
    table.make()
    with runs_of(tmp_path_factory.mktemp("runs")) as runs:
        for number, calls in enumerate((5, 6, 7, 8)):
            schema = record(*fields, (f"c{number}", "int"))
            schema_id = table.register(schema)
            rows = [{"n": n, f"c{number}": n} for n in range(3)]
            table.send(*(avro(schema_id, schema, row) for row in rows), b"no head")
            pids = [runs.start(table, killed_at=calls) for _ in "12"]
            assert -9 in [runs.wait(pid) for pid in pids]
    table.run()
    found, errors = table.json_rows(), table.errors()
    assert sorted([*found, *errors]) == list(range(16))
    assert sorted(errors) == [3, 7, 11, 15]
    assert all(found[4 * c + n] == {"n": n, f"c{c}": n} for c in range(4) for n in range(3))
