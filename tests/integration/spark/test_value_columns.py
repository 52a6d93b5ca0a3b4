"""`valueSchema`: values as a struct column of a batch and of a stream."""

import json
from io import BytesIO

import fastavro
import pytest

from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format.produced import build_produced
from tierlog.record_format.schema_records import Schema

pytestmark = pytest.mark.spark

FIELDS = [
    ("carrier", "string"),
    ("delay", ["null", "int"]),
    ("at", {"type": "long", "logicalType": "timestamp-millis"}),
    ("local", {"type": "long", "logicalType": "local-timestamp-millis"}),
    ("legs", {"type": "array", "items": "string"}),
    ("fares", {"type": "map", "values": "double"}),
    ("price", {"type": "bytes", "logicalType": "decimal", "precision": 9, "scale": 2}),
    ("either", ["int", "string"]),
]
FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": name, "type": kind} for name, kind in FIELDS],
}
ROW = {
    "carrier": "UA",
    "delay": None,
    "at": 0,
    "local": 0,
    "legs": ["EWR", "IAH"],
    "fares": {"Y": 1.5},
    "price": b"\x04\xd2",
    "either": "x",
}


def produce(tiers, topic, *values):
    times = [1_700_000_000_000] * len(values)
    batches = build_produced(list(values), timestamps=times, max_message_bytes=1 << 20)
    tiers.broker.partition(topic, 0).append(batches, acks=Acks.ALL).result(10)


@pytest.fixture(scope="module")
def flights(tiers):
    """A topic of one value, two tombstones and one value that is damaged; each read starts from
    the schema.
    """
    tiers.create("decoded", partitions=1)
    schema = Schema("AVRO", json.dumps(FLIGHT))
    schema_id = tiers.broker.schema_registry.register("decoded-value", schema).schema_id
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(FLIGHT), ROW)
    value = b"\0" + schema_id.to_bytes(4) + stream.getvalue()
    produce(tiers, "decoded", value, None, value, value[:-1])
    return {"server": tiers.url, "subscribe": "decoded", "valueSchema": "latest"}


def test_values_are_a_struct_column_of_a_batch(spark, flights):
    reader = spark.read.format("tierlog").options(**flights)
    frame = reader.load()
    assert frame.schema["value"].dataType.simpleString() == (
        "struct<carrier:string,delay:int,at:timestamp,local:timestamp_ntz,legs:array<string>,"
        "fares:map<string,double>,price:decimal(9,2),either:struct<member0:int,member1:string>>"
    )
    whole = reader.option("endingOffsets", '{"decoded": {"0": 3}}').load()
    good = whole.selectExpr("offset", "value.*", "value is null as gone")
    rows = [row.asDict(recursive=True) for row in good.orderBy("offset").collect()]
    assert [row["gone"] for row in rows] == [False, True, False]
    assert (rows[0]["carrier"], rows[0]["legs"], rows[0]["fares"]) == (
        "UA",
        ["EWR", "IAH"],
        {"Y": 1.5},
    )
    assert str(rows[0]["price"]) == "12.34"
    assert rows[0]["either"] == {"member0": None, "member1": "x"}
    assert whole.where("value.carrier = 'UA'").count() == 2
    # With the damaged value, which is named, or null.
    with pytest.raises(Exception, match="decoded-0: offset 3: the value does not decode: schema"):
        frame.select("value.carrier").collect()
    permissive = spark.read.format("tierlog").options(**flights, mode="PERMISSIVE").load()
    found = permissive.orderBy("offset").select("value.carrier").collect()
    assert [row[0] for row in found] == ["UA", None, "UA", None]


def test_values_are_a_struct_column_of_a_stream(spark, flights, tmp_path):
    source = spark.readStream.format("tierlog").options(**flights, mode="PERMISSIVE")
    frame = source.option("startingOffsets", "earliest").load().select("offset", "value.carrier")
    query = (
        frame.writeStream.format("parquet")
        .option("path", str(tmp_path / "out"))
        .option("checkpointLocation", str(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    rows = spark.read.parquet(str(tmp_path / "out")).orderBy("offset").collect()
    assert [tuple(row) for row in rows] == [(0, "UA"), (1, None), (2, "UA"), (3, None)]


def test_a_schema_that_is_not_there_is_an_error_of_the_plan(spark, flights):
    options = {**flights, "valueSchema": str(2**31 - 1)}
    with pytest.raises(Exception, match="Schema 2147483647 not found"):
        spark.read.format("tierlog").options(**options).load()


def test_values_of_protobuf_are_a_struct_column(spark, tiers):
    tiers.create("proto", partitions=1)
    text = """
        syntax = "proto3";
        import "google/protobuf/timestamp.proto";
        message Flight {
            string carrier = 1;
            optional int32 delay = 2;
            repeated string legs = 3;
            map<string, double> fares = 4;
            google.protobuf.Timestamp at = 5;
            uint64 number = 6;
        }
    """
    schema = Schema("PROTOBUF", text)
    schema_id = tiers.broker.schema_registry.register("proto-value", schema).schema_id
    flight = b"\x0a\x02UA\x1a\x03EWR\x1a\x03IAH\x22\x0c\x0a\x01Y\x11\0\0\0\0\0\0\xf8?\x2a\0\x30\x07"
    produce(tiers, "proto", b"\0" + schema_id.to_bytes(4) + b"\0" + flight, None)
    options = {"server": tiers.url, "subscribe": "proto", "valueSchema": "latest"}
    frame = spark.read.format("tierlog").options(**options).load()
    assert frame.schema["value"].dataType.simpleString() == (
        "struct<carrier:string,delay:int,legs:array<string>,fares:map<string,double>,at:timestamp,"
        "number:decimal(20,0)>"
    )
    columns = ("value.carrier", "value.delay", "value.legs", "value.fares", "value.number")
    rows = frame.orderBy("offset").selectExpr(*columns, "unix_micros(value.at)").collect()
    assert [tuple(row) for row in rows] == [
        ("UA", None, ["EWR", "IAH"], {"Y": 1.5}, 7, 0),
        (None,) * 6,
    ]


def test_keys_and_values_are_struct_columns_of_the_messages_that_are_named(spark, tiers):
    tiers.create("named", partitions=1)
    registry = tiers.broker.schema_registry
    texts = {
        "key": "message Other { int32 n = 1; } message Id { int64 number = 1; }",
        "value": "message Other { int32 n = 1; } message Flight { string carrier = 1; }",
    }
    heads = {}
    for column, text in texts.items():
        schema = Schema("PROTOBUF", f'syntax = "proto3"; {text}')
        schema_id = registry.register(f"named-{column}", schema).schema_id
        heads[column] = b"\0" + schema_id.to_bytes(4)
    keys = [heads["key"] + b"\2\2\x08\7", None, heads["key"] + b"\0\x08\1"]
    values = [heads["value"] + b"\2\2\x0a\2UA", heads["value"] + b"\2\2\x0a\2AA", None]
    batches = build_produced(
        values, keys=keys, timestamps=[1_700_000_000_000] * 3, max_message_bytes=1 << 20
    )
    tiers.broker.partition("named", 0).append(batches, acks=Acks.ALL).result(10)
    tiers.offload("named")
    tiers.offload("_schemas")
    options = {"subscribe": "named", "keySchema": "latest", "keyMessage": "Id"}
    options |= {"valueSchema": "latest", "valueMessage": "Flight", "mode": "PERMISSIVE"}
    for where in ({"server": tiers.url}, {"store": tiers.store_url, "tier": "cold"}):
        frame = spark.read.format("tierlog").options(**options, **where).load()
        rows = frame.orderBy("offset").select("key.number", "value.carrier").collect()
        assert [tuple(row) for row in rows] == [(7, "UA"), (None, "AA"), (None, None)]
        assert frame.where("key.number = 7").count() == 1
    strict = spark.read.format("tierlog").options(**options, **where).option("mode", "FAILFAST")
    with pytest.raises(Exception, match=r"offset 2: the key .*it is a Other, and Id is read"):
        strict.load().collect()
