"""`valueSchema`: values as columns of the dataset, by the registry's schemas or the bucket's."""

import itertools
import json
import pickle
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import fastavro
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyspark.sql.datasource import In

import tierlog
from tests.fakes.two_tiers import TwoTiers, two_tiers
from tierlog.errors import InvalidOption, UndecodableValue, UnknownSchema
from tierlog.hot_tier.log_writer import Acks
from tierlog.record_format import columns as value_columns
from tierlog.record_format.produced import build_produced
from tierlog.record_format.schema_records import Reference, Schema
from tierlog.spark_reader import value_schemas
from tierlog.spark_reader.source import TierlogSource

FLIGHT = {"type": "record", "name": "Flight", "fields": [{"name": "carrier", "type": "string"}]}
LATER = {
    **FLIGHT,
    "fields": [*FLIGHT["fields"], {"name": "delay", "type": ["null", "int"], "default": None}],  # type: ignore[misc]
}
_numbers = itertools.count()


@pytest.fixture(scope="module")
def tiers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TwoTiers]:
    with two_tiers(tmp_path_factory.mktemp("columns")) as tiers:
        yield tiers


def topic_of(tiers: TwoTiers) -> str:
    topic = f"flights-{next(_numbers)}"
    tiers.create(topic, partitions=1)
    return topic


def register(tiers: TwoTiers, subject: str, document: Any, kind: Any = "AVRO", *more: Any) -> int:
    schema = Schema(kind, json.dumps(document), tuple(more))
    return tiers.broker.schema_registry.register(subject, schema).schema_id


def avro(schema_id: int, schema: Any, row: Any) -> bytes:
    stream = BytesIO()
    fastavro.schemaless_writer(stream, fastavro.parse_schema(schema), row)
    return b"\0" + schema_id.to_bytes(4) + stream.getvalue()


def produce(tiers: TwoTiers, topic: str, *values: bytes | None) -> None:
    batches = build_produced(
        list(values), timestamps=[1_700_000_000_000] * len(values), max_message_bytes=1 << 20
    )
    tiers.broker.partition(topic, 0).append(batches, acks=Acks.ALL).result(10)


def values_of(table: pa.Table) -> Any:
    return table["value"].to_pylist()


@pytest.mark.parametrize("wanted", ["latest", "registry"])
def test_values_of_older_schemas_are_columns_of_the_latest_over_both_tiers(
    tiers: TwoTiers, wanted: str
) -> None:
    topic = topic_of(tiers)
    first = register(tiers, f"{topic}-value", FLIGHT)
    later = register(tiers, f"{topic}-value", LATER)
    produce(tiers, topic, avro(first, FLIGHT, {"carrier": "UA"}), None)
    tiers.broker.offload(topic, wait_ms=20_000)
    produce(tiers, topic, avro(later, LATER, {"carrier": "AA", "delay": 7}))
    for store in (None, tiers.store_url):
        rows = tierlog.dataset(topic, store=store, server=tiers.url, value_schema=wanted)
        expected = [{"carrier": "UA", "delay": None}, None, {"carrier": "AA", "delay": 7}]
        assert values_of(rows.to_table()) == expected
        assert rows.schema.field("value").type == pa.struct(
            [("carrier", pa.string()), ("delay", pa.int32())]
        )
        late = rows.filter((pc.field("value", "delay") > 5) & (pc.field("offset") > 0))
        assert values_of(late.to_table()) == expected[2:]
        only = rows.to_table(columns={"delay": pc.field("value", "delay")})
        assert only["delay"].to_pylist() == [None, None, 7]
        assert rows.count_rows() == 3
    read = tierlog.read_arrow(topic, server=tiers.url, value_schema=first, columns="value")
    assert values_of(read.read_all()) == [{"carrier": "UA"}, None, {"carrier": "AA"}]


def test_the_bucket_alone_has_the_schemas_and_what_they_refer_to(
    tiers: TwoTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(tiers)
    register(tiers, f"{topic}-carrier", FLIGHT)
    leg = {"type": "record", "name": "Leg", "fields": [{"name": "flight", "type": "Flight"}]}
    reference = Reference("Flight", f"{topic}-carrier", 1)
    schema_id = register(tiers, f"{topic}-value", leg, "AVRO", reference)
    whole = {**leg, "fields": [{"name": "flight", "type": FLIGHT}]}
    produce(tiers, topic, avro(schema_id, whole, {"flight": {"carrier": "UA"}}))
    over_the_broker = tierlog.dataset(topic, server=tiers.url, value_schema="latest").to_table()
    tiers.broker.offload(topic, wait_ms=20_000)
    tiers.broker.offload("_schemas", wait_ms=20_000)
    monkeypatch.setattr(value_schemas.Connections, "broker", property(lambda _: 1 / 0))
    rows = tierlog.dataset(topic, store=tiers.store_url, tier="cold", value_schema="latest")
    assert rows.to_table() == over_the_broker
    assert values_of(rows.to_table()) == [{"flight": {"carrier": "UA"}}]


def test_a_bucket_without_schemas_says_so(tmp_path: Path) -> None:
    with two_tiers(tmp_path) as tiers:
        tiers.create("flights", partitions=1)
        produce(tiers, "flights", b"x")
        tiers.broker.offload("flights", wait_ms=20_000)
        with pytest.raises(InvalidOption, match="has no topic _schemas"):
            tierlog.dataset("flights", store=tiers.store_url, tier="cold", value_schema="latest")


JSON_FLIGHT = {"type": "object", "properties": {"carrier": {"type": "string"}}}


def test_json_needs_no_head_unless_ids_are_asked_for(tiers: TwoTiers) -> None:
    topic = topic_of(tiers)
    schema_id = register(tiers, f"{topic}-value", JSON_FLIGHT, "JSON")
    head = b"\0" + schema_id.to_bytes(4)
    produce(tiers, topic, head + b'{"carrier":"UA"}', b'{"carrier":"AA"}', None)
    for wanted in ("latest", schema_id, str(schema_id)):
        rows = tierlog.dataset(topic, server=tiers.url, value_schema=wanted)
        assert values_of(rows.to_table()) == [{"carrier": "UA"}, {"carrier": "AA"}, None]
    rows = tierlog.dataset(topic, server=tiers.url, value_schema="registry")
    with pytest.raises(UndecodableValue, match=r"offset 1: .* does not begin with"):
        rows.to_table()
    rows = tierlog.dataset(topic, server=tiers.url, value_schema="registry", mode="PERMISSIVE")
    assert values_of(rows.to_table()) == [{"carrier": "UA"}, None, None]


PROTO = """
    syntax = "proto3";
    import "leg.proto";
    message Crew { int32 size = 1; }
    message Flight { string carrier = 1; optional int32 delay = 2; repeated Leg legs = 3; }
"""


def proto(schema_id: int, indexes: bytes, encoded: bytes) -> bytes:
    return b"\0" + schema_id.to_bytes(4) + indexes + encoded


def test_values_of_protobuf_are_columns_of_one_of_the_files_messages(tiers: TwoTiers) -> None:
    topic = topic_of(tiers)
    registry = tiers.broker.schema_registry
    leg = 'syntax = "proto3"; message Leg { int32 miles = 1; }'
    registry.register(f"{topic}-leg", Schema("PROTOBUF", leg))
    reference = Reference("leg.proto", f"{topic}-leg", 1)
    found = registry.register(f"{topic}-value", Schema("PROTOBUF", PROTO, (reference,)))
    flight = b"\x0a\x02UA\x1a\x02\x08\x07\x1a\x00"
    produce(tiers, topic, proto(found.schema_id, b"\x02\x02", flight), None)
    tiers.broker.offload(topic, wait_ms=20_000)
    tiers.broker.offload("_schemas", wait_ms=20_000)
    given = {"value_schema": "latest", "valueMessage": "Flight"}
    expected = [{"carrier": "UA", "delay": None, "legs": [{"miles": 7}, {"miles": 0}]}, None]
    rows = tierlog.dataset(topic, server=tiers.url, **given)
    assert values_of(rows.to_table()) == expected
    late = rows.filter(pc.field("value", "carrier") == "UA").to_table()
    assert values_of(late) == expected[:1]
    cold = tierlog.dataset(topic, store=tiers.store_url, tier="cold", **given)
    assert values_of(cold.to_table()) == expected
    # Without it the first message is read, which this is not.
    problem = rf"^{topic}-0: offset 0: .*schema {found.schema_id}: it is a Flight, and Crew is read"
    with pytest.raises(UndecodableValue, match=problem):
        tierlog.dataset(topic, server=tiers.url, value_schema="latest").to_table()
    with pytest.raises(InvalidOption, match="no message 'Plane'; it has Crew, Flight"):
        tierlog.dataset(topic, server=tiers.url, value_schema="latest", valueMessage="Plane")
    with pytest.raises(InvalidOption, match="valueMessage requires the option valueSchema"):
        tierlog.dataset(topic, server=tiers.url, valueMessage="Flight")
    avro_id = register(tiers, f"{topic}-avro", FLIGHT)
    with pytest.raises(InvalidOption, match="is of type AVRO; messages are of PROTOBUF"):
        tierlog.dataset(topic, server=tiers.url, value_schema=avro_id, valueMessage="Flight")


def test_a_value_that_does_not_decode_is_named_by_partition_offset_schema_and_path(
    tiers: TwoTiers,
) -> None:
    topic = topic_of(tiers)
    schema_id = register(tiers, f"{topic}-value", LATER)
    good = avro(schema_id, LATER, {"carrier": "UA", "delay": 1})
    expected = {"carrier": "UA", "delay": 1}
    damaged = good[:-1] + b"\xff"
    for bad, problem in (
        (damaged, f"schema {schema_id}: /delay: a number is damaged"),
        (b"plain", "it does not begin with the id of a schema"),
        (
            avro(schema_id + 1000, LATER, expected),
            f"schema {schema_id + 1000}: Schema ",
        ),
    ):
        topic = topic_of(tiers)
        register(tiers, f"{topic}-value", LATER)
        produce(tiers, topic, good, bad, good)
        given = {"server": tiers.url, "value_schema": "latest"}
        where = f"^{topic}-0: offset 1: the value does not decode: {problem}"
        with pytest.raises(UndecodableValue, match=where):
            tierlog.dataset(topic, **given).to_table(columns=["value"])
        rows = tierlog.dataset(topic, **given, mode="PERMISSIVE").to_table()
        assert values_of(rows) == [expected, None, expected]
        assert tierlog.dataset(topic, **given).to_table(columns=["offset"]).num_rows == 3


def test_what_cannot_be_columns_is_refused_when_the_dataset_is_made(tiers: TwoTiers) -> None:
    topic, other = topic_of(tiers), topic_of(tiers)
    for options, error, problem in (
        ({"value_schema": "newest"}, InvalidOption, "'newest' is not latest, registry, or the id"),
        ({"value_schema": 0}, InvalidOption, "'0' is not latest"),
        ({"value_schema": "latest"}, UnknownSchema, f"Subject '{topic}-value' not found"),
        ({"value_schema": 2**31 - 1}, UnknownSchema, "not found"),
        ({"value_schema": "latest", "mode": "DROPMALFORMED"}, InvalidOption, "failfast, perm"),
    ):
        with pytest.raises(error, match=problem):
            tierlog.dataset(topic, server=tiers.url, **options)
    with pytest.raises(InvalidOption, match="latest is of one topic, and there are 2"):
        tierlog.dataset([topic, other], server=tiers.url, value_schema="latest")
    register(tiers, f"{topic}-value", True, "JSON")
    with pytest.raises(InvalidOption, match="names no one type"):
        tierlog.dataset(topic, server=tiers.url, value_schema="latest")


def test_duckdb_and_polars_query_the_columns(tiers: TwoTiers) -> None:
    import duckdb
    import polars

    topic = topic_of(tiers)
    schema_id = register(tiers, f"{topic}-value", LATER)
    rows = [{"carrier": "UA", "delay": n} for n in range(9)]
    produce(tiers, topic, *(avro(schema_id, LATER, row) for row in rows))
    flights = tierlog.dataset(topic, server=tiers.url, value_schema="latest")
    query = "select value.carrier, sum(value.delay) from flights where value.delay > 5 group by 1"
    assert duckdb.sql(query).fetchall() == [("UA", 21)]
    lazy = polars.scan_pyarrow_dataset(flights).select(polars.col("value").struct.field("delay"))
    assert lazy.collect()["delay"].to_list() == list(range(9))


def test_a_version_that_is_registered_after_spark_has_asked_for_the_schema_ends_no_read(
    tiers: TwoTiers,
) -> None:
    topic = topic_of(tiers)
    first = register(tiers, f"{topic}-value", FLIGHT)
    produce(tiers, topic, avro(first, FLIGHT, {"carrier": "UA"}))
    source = TierlogSource({"server": tiers.url, "subscribe": topic, "valueSchema": "latest"})
    schema = source.schema()
    later = register(tiers, f"{topic}-value", LATER)
    produce(tiers, topic, avro(later, LATER, {"carrier": "AA", "delay": 7}))
    source = pickle.loads(pickle.dumps(source))  # as Spark does, for each plan
    reader = source.reader(schema)
    rows = [
        row for one in reader.partitions() for batch in reader.read(one) for row in values_of(batch)
    ]
    assert rows == [{"carrier": "UA"}, {"carrier": "AA"}]


def test_keys_are_columns_by_a_schema_of_their_own_and_filters_are_on_what_is_in_them(
    tiers: TwoTiers,
) -> None:
    topic = topic_of(tiers)
    value_id = register(tiers, f"{topic}-value", FLIGHT)
    key_id = register(tiers, f"{topic}-key", "bytes")
    keys = [avro(key_id, "bytes", b"UA"), None, avro(key_id, "bytes", b"AA")]
    values = [avro(value_id, FLIGHT, {"carrier": "UA"}), None, b"plain"]
    batches = build_produced(
        values, keys=keys, timestamps=[1_700_000_000_000] * 3, max_message_bytes=1 << 20
    )
    tiers.broker.partition(topic, 0).append(batches, acks=Acks.ALL).result(10)
    tiers.broker.offload(topic, wait_ms=20_000)
    tiers.broker.offload("_schemas", wait_ms=20_000)
    for given in ({"server": tiers.url}, {"store": tiers.store_url, "tier": "cold"}):
        rows = tierlog.dataset(topic, **given, key_schema="latest")
        assert rows.schema.field("key").type == pa.binary()
        found = rows.to_table()
        assert found["key"].to_pylist() == [b"UA", None, b"AA"]
        assert values_of(found) == values  # as they are
        # What says which chunks have which keys knows of keys as they were sent.
        assert rows.to_table(filter=pc.field("key") == b"UA")["offset"].to_pylist() == [0]
        assert rows.to_table(filter=pc.field("key") == keys[0]).num_rows == 0
    both = tierlog.dataset(
        topic, server=tiers.url, key_schema=key_id, value_schema="latest", mode="PERMISSIVE"
    )
    assert values_of(both.to_table()) == [{"carrier": "UA"}, None, None]
    assert both.to_table(columns=["key"])["key"].to_pylist() == [b"UA", None, b"AA"]
    with pytest.raises(UndecodableValue, match="offset 0: the key does not decode"):
        tierlog.dataset(topic, server=tiers.url, key_schema=value_id).to_table()
    with pytest.raises(UnknownSchema, match=f"Subject '{topic}-2-key' not found"):
        tierlog.dataset(f"{topic}-2", server=tiers.url, key_schema="latest")


def test_a_filter_of_spark_on_a_key_reads_no_segment_of_other_keys(tiers: TwoTiers) -> None:
    """Without a schema of keys, from the bucket: which chunks are read is said by filters of keys,
    which are wrong for fewer than one in a hundred.
    """
    topic = topic_of(tiers)
    keys = [b"\0\0\0\0\7\4UA", b"\0\0\0\0\7\4AA"]
    for key in keys:
        batches = build_produced(
            [b"value"], keys=[key], timestamps=[1_700_000_000_000], max_message_bytes=1 << 20
        )
        tiers.broker.partition(topic, 0).append(batches, acks=Acks.ALL).result(10)
        tiers.broker.offload(topic, wait_ms=20_000)
    given = {"subscribe": topic, "tier": "cold", "store": tiers.store_url, "singleQuery": "true"}
    source = TierlogSource(given)

    def found(*wanted: bytes) -> list[int]:
        reader = source.reader(source.schema())
        left = list(reader.pushFilters([In(("key",), tuple(map(bytearray, wanted)))]))
        assert left  # Spark looks at the rows itself
        batches = [batch for one in reader.partitions() for batch in reader.read(one)]
        return [offset for batch in batches for offset in batch.column("offset").to_pylist()]

    assert [found(keys[0]), found(keys[1]), found(*keys)] == [[0], [1], [0, 1]]
    others = [b"\0\0\0\0\7\4%02d" % number for number in range(100)]
    assert sum(len(found(one)) for one in others) <= 2


def test_columns_that_would_take_much_memory_are_made_in_parts(
    tiers: TwoTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = topic_of(tiers)
    row = {"type": "record", "name": "Row", "fields": [{"name": "n", "type": "long"}]}
    rows = {"name": "rows", "type": {"type": "array", "items": ["null", row]}}
    schema = {"type": "record", "name": "Rows", "fields": [rows]}
    schema_id = register(tiers, f"{topic}-value", schema)
    sizes = (3, 40, 5, 900, 2)
    values = [avro(schema_id, schema, {"rows": [None] * size}) for size in sizes]
    produce(tiers, topic, *values)
    given = {"server": tiers.url, "value_schema": "latest"}
    whole = tierlog.dataset(topic, **given).to_table()
    monkeypatch.setattr(value_columns, "ROOM_MAX", 1000)
    problem = (
        rf"^{topic}-0: offset 3: the value does not decode: schema {schema_id}: /rows/items/n: it "
        r"has 900 rows of a batch whose columns take up to \d+ bytes, and may take 1000"
    )
    with pytest.raises(UndecodableValue, match=problem):
        tierlog.dataset(topic, **given).to_table()
    found = tierlog.dataset(topic, **given, mode="PERMISSIVE").to_table()
    assert found["offset"].to_pylist() == list(range(5))
    assert values_of(found)[3] is None
    assert values_of(whole.filter(pc.field("offset") != 3)) == [
        value for offset, value in enumerate(values_of(found)) if offset != 3
    ]
