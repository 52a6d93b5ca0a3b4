"""`tierlog table` over a bucket without a broker."""

import json
import re
from pathlib import Path

import httpx2
import pytest

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store

pytest.importorskip("pyiceberg")

from msgspec.structs import replace

from tests.fakes.topic_tables import TOPIC, JsonTable, TopicTable, check_each_once
from tests.fakes.waiting import until
from tierlog.cli.program import run_command
from tierlog.manifest.topic_objects import TopicObjects


@pytest.fixture(scope="module")
def places(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tables")
    put_topic(open_store(f"file://{folder}/bucket"), "Of-many", {0: "many-segments-0"})
    catalog = ["--catalog", f"sqlite:///{folder}/catalog.db", "--warehouse", f"file://{folder}"]
    return catalog, ["--store", f"file://{folder}/bucket"]


def test_a_table_is_created_filled_shown_listed_and_dropped(offline, places):
    catalog, store = places

    def run(*arguments):
        return json.loads(offline.ok("table", *arguments, *catalog))

    assert run("create", "Of-many", *store)["table"] == "tierlog.of_many"
    assert run("sync", "Of-many", *store) == {
        "table": "tierlog.of_many",
        "commits": 1,
        "records": 177,
        "errors": 0,
        "offsets": {"0": 177},
    }
    status = run("status", "Of-many", *store)
    assert (status["records"], status["mode"], status["problem"]) == (177, "raw", None)
    assert status["partitions"] == [
        {"partition": 0, "next_offset": 177, "end_offset": 177, "lag": 0}
    ]
    assert run("maintain", "tierlog.of_many")["files_rewritten"] == 0
    (listed,) = run("list")["tables"]
    assert (listed["table"], listed["topic"]) == ("tierlog.of_many", "Of-many")
    assert run("drop", "tierlog.of_many", "--purge", "--yes") == {"dropped": ["tierlog.of_many"]}
    assert run("list") == {"tables": []}


def test_all_topics_with_a_mode_are_tables_and_json_is_columns(offline, tmp_path):
    table = JsonTable(tmp_path)
    table.put_values({"id": 1, "price": 2}, b"x", {"price": 2.5})
    set_mode(table, "json")
    put_topic(open_store(table.url), "left-alone", {0: "many-segments-0"})
    catalog = ["--catalog", f"sqlite:///{tmp_path}/catalog.db", "--warehouse", table.warehouse]

    def run(*arguments):
        return json.loads(offline.ok("table", *arguments, *catalog, "--store", table.url))

    created = run("create", TOPIC, "--column", "price double")
    assert (created["table"], created["mode"]) == ("tierlog.many", "json")
    assert run("sync")["errors"] == 1
    assert table.json_rows() == {0: {"id": 1, "price": 2.0}, 2: {"price": 2.5}}
    assert (run("status", TOPIC)["records"], run("status", TOPIC)["errors"]) == (2, 1)
    dropped = json.loads(offline.ok("table", "drop", "tierlog.many", "--yes", *catalog))
    assert dropped == {"dropped": ["tierlog.many", "tierlog.many_errors"]}
    assert run("sync")["errors"] == 1, "made anew, without that column"
    assert table.json_rows()[2] == {"price": 2.5}


def test_a_table_of_schemas_is_created_filled_and_shown_with_the_schema_of_most_errors(
    tierlog, broker, tmp_path
):
    catalog = ["--catalog", f"sqlite:///{tmp_path}/c.db", "--warehouse", f"file://{tmp_path}"]

    def run(*arguments):
        answer = tierlog.ok("table", *arguments, *catalog, "--server", broker.server)
        return json.loads(answer)

    def put_values(kind, *values):
        """Of a new schema, with a number of that type; returns its id."""
        fields = [{"name": "n", "type": kind}, {"name": "carrier", "type": "string"}]
        schema = {"type": "record", "name": "Flight", "fields": fields}
        made = httpx2.post(f"{subject}/versions", json={"schema": json.dumps(schema)}).json()
        lines = "".join(f"{json.dumps({'n': one, 'carrier': 'UA'})}\n" for one in values)
        named = ("--value-schema", f"id:{made['id']}")
        tierlog.ok("produce", "schooled", *named, stdin=lines.encode())
        return made["id"]

    tierlog.ok("topic", "create", "schooled")
    subject = f"{broker.server}/subjects/schooled-value"
    level = {"compatibility": "NONE"}
    assert httpx2.put(f"{broker.server}/config/schooled-value", json=level).status_code == 200
    put_values("long", 1, 2)
    assert run("create", "schooled", "--mode", "schema")["mode"] == "schema"
    assert run("sync", "schooled")["records"] == 2
    status = run("status", "schooled")
    assert (status["records"], status["errors"], status["latest_errors_schema_id"]) == (2, 0, None)
    tierlog.ok("produce", "schooled", stdin=b"no head\n")
    of_text = put_values("string", "one", "two")
    assert run("sync", "schooled")["errors"] == 3
    status = run("status", "schooled")
    assert (status["mode"], status["records"], status["errors"]) == ("schema", 2, 3)
    assert status["latest_errors_schema_id"] == of_text
    assert [one["lag"] for one in status["partitions"]] == [0]


def set_mode(table, mode):
    topics = TopicObjects(open_store(table.url))
    topic = topics.find_topic(TOPIC)
    topics.write_topic(replace(topic, config={"iceberg.mode": mode}), check=lambda: None)


def test_a_table_follows_its_topic(offline, tmp_path):
    table = TopicTable(tmp_path)
    table.put(0, 4)
    table.create()
    catalog = ["--catalog", f"sqlite:///{tmp_path}/catalog.db", "--warehouse", table.warehouse]
    following = ["table", "sync", TOPIC, "--store", table.url, "--follow", "--every", "50ms"]
    with offline.started(*following, *catalog):
        until(lambda: table.rows().num_rows == 68)
        table.put(4)
        until(lambda: table.rows().num_rows == 177)
    check_each_once(table)


def test_a_table_whose_files_are_damaged_is_named_and_hides_no_other(tmp_path, capsys):
    table = JsonTable(tmp_path)
    table.put_values({"id": 1}, b"x")
    table.create()
    table.run()
    catalog = ["--catalog", f"sqlite:///{tmp_path}/catalog.db", "--warehouse", table.warehouse]

    def fails(*arguments):
        """What is printed, and the error."""
        assert run_command(["table", *arguments, *catalog, "--output", "json"]) == 1
        return capsys.readouterr()

    metadata = Path(table.load().metadata_location.removeprefix("file://"))
    whole = metadata.read_bytes()
    for damage in (lambda: metadata.write_text("{}"), metadata.unlink):
        damage()
        shown = fails("list")
        (listed,) = json.loads(shown.out)["tables"]
        assert listed["table"] == "tierlog.many_errors"
        damaged = "table tierlog.many: its files cannot be read: "
        assert damaged in shown.err
        for command in (
            ("status", TOPIC),
            ("sync", TOPIC, "--store", table.url),
            ("maintain", "tierlog.many"),
            ("drop", "tierlog.many", "--yes"),
        ):
            assert damaged in fails(*command).err
    metadata.write_bytes(whole)
    for snapshot in metadata.parent.glob("snap-*.avro"):
        snapshot.write_bytes(b"junk")
    assert damaged in fails("maintain", "tierlog.many").err


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ("sync", "Of-many"), "the catalog has no table tierlog.of_many"),
        (1, ("create", "nope"), "there is no topic 'nope'"),
        (2, ("sync", "Of-many", "--every", "0s"), "--every: '0s' is not above 0"),
        (2, ("sync", "--table", "a.b"), "--table: without TOPIC, each topic has a table"),
        (2, ("create", "Of-many", "--column", "a int"), "--column: a table of mode raw has"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(offline, places, code, arguments, message):
    catalog, store = places
    found = offline.fails(code, "table", *arguments, *catalog, *store)
    assert re.search(message, found), found
