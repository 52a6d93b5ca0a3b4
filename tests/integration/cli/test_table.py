"""`tierlog table` over a bucket without a broker."""

import json
import re

import pytest

from tests.fakes.bucket import put_topic
from tierlog.object_store.open import open_store

pytest.importorskip("pyiceberg")

from tests.fakes.topic_tables import TOPIC, TopicTable, check_each_once
from tests.fakes.waiting import until


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
    assert run("drop", "tierlog.of_many", "--purge", "--yes") == {"dropped": "tierlog.of_many"}
    assert run("list") == {"tables": []}


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


@pytest.mark.parametrize(
    ("code", "arguments", "message"),
    [
        (1, ("sync", "Of-many"), "the catalog has no table tierlog.of_many"),
        (1, ("create", "nope"), "there is no topic 'nope'"),
        (2, ("sync", "Of-many", "--every", "0s"), "--every: '0s' is not above 0"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(offline, places, code, arguments, message):
    catalog, store = places
    found = offline.fails(code, "table", *arguments, *catalog, *store)
    assert re.search(message, found), found
