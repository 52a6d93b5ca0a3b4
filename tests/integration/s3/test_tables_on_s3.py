"""A topic's table in a warehouse on a real S3 server."""

import pytest

pytest.importorskip("pyiceberg")

from tests.fakes.topic_tables import TopicTable, check_each_once
from tests.integration.console.conftest import open_console
from tests.integration.console.test_table_page import Lab
from tierlog.settings import load_settings
from tierlog.tables.attempts import begin_attempt, remove_lost_attempts
from tierlog.tables.catalog import drop_table

pytestmark = pytest.mark.s3


def test_files_are_written_cleaned_up_and_purged(s3, prefix, tmp_path):
    table = TopicTable(
        tmp_path,
        warehouse=f"s3://{s3['BUCKET']}/{prefix}/tables",
        **{
            "s3.endpoint": s3["ENDPOINT"],
            "s3.region": "us-east-1",
            "s3.access-key-id": s3["ACCESS_KEY"],
            "s3.secret-access-key": s3["SECRET_KEY"],
        },
    )
    table.put()
    loaded = table.create()
    lost = begin_attempt(loaded)
    path = f"{lost.folder(loaded)}/2013-07-04-00000.parquet"
    loaded.io.new_output(path).create().close()
    assert table.run().records == 177
    check_each_once(table)
    assert loaded.io.new_input(path).exists()
    assert remove_lost_attempts(table.load()) == 1
    assert not loaded.io.new_input(path).exists()
    file = next(iter(table.load().scan().plan_files())).file.file_path
    drop_table(table.open_catalog(), table.load(), purge=True)
    assert not loaded.io.new_input(file).exists()


def test_the_console_shows_a_table_of_a_warehouse_at_the_endpoint_of_the_brokers_bucket(
    s3, prefix, tmp_path, monkeypatch
):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3["ACCESS_KEY"])
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3["SECRET_KEY"])
    catalog, warehouse = f"sqlite:///{tmp_path}/c.db", f"s3://{s3['BUCKET']}/{prefix}/tables"
    near = {"s3.endpoint": s3["ENDPOINT"], "s3.region": "us-east-1"}
    flags = {"data.dir": tmp_path / "data", "catalog": catalog, "warehouse": warehouse, **near}
    with open_console(tmp_path, http=load_settings(flags, {}, None).http) as console:
        lab = Lab(tmp_path, console, (catalog, {"warehouse": warehouse, **near}))
        topic = console.topic("orders", iceberg_mode="json")
        console.produce(topic, {"value": {"id": 1}}, {"value": "no object"})
        lab.sync(topic)
        assert "Rows 1 Refused 1 Last commit 20" in (shown := lab.text(topic))
        assert f"Location {warehouse}/tierlog/orders" in shown
        assert "Latest refused records" in shown
