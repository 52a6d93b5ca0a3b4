"""Maintenance of a table changes none of its rows, whoever writes to it meanwhile."""

from datetime import timedelta

import pytest

pytest.importorskip("pyiceberg")

from pyiceberg.catalog.sql import SqlCatalog

from tests.fakes.topic_tables import TopicTable, check_each_once
from tierlog.tables.catalog import position_of
from tierlog.tables.maintain import Ages, Maintained, maintain_table
from tierlog.tables.position import TableRolledBack
from tierlog.tables.sync import Synced

NOTHING_OLD = Ages(timedelta(days=5), timedelta(days=3))
ALL_OLD = Ages(timedelta(0), timedelta(seconds=-60))


@pytest.fixture
def table(tmp_path):
    made = TopicTable(tmp_path)
    made.put(0, 8)
    made.create()
    made.run()
    return made


def maintain(table, ages=NOTHING_OLD, catalog=None):
    return maintain_table(catalog or table.open_catalog(), table.name, ages, log=table.notes.append)


def files_of(table):
    return {one.file.file_path for one in table.load().scan().plan_files()}


def test_small_files_become_one_a_day_and_a_sync_goes_on_after_them(table):
    before, position = files_of(table), position_of(table.load())
    days = {one.file.partition for one in table.load().scan().plan_files()}
    done = maintain(table)
    small = [one for one in before if one not in files_of(table)]
    assert len(files_of(table)) == len(days)
    assert (done.files_rewritten, done.files_removed) == (len(small), 0)
    check_each_once(table)
    assert position_of(table.load()) == position
    assert maintain(table) == Maintained()
    table.put(8)
    assert table.run().records == 177 - 149
    check_each_once(table)


def test_what_a_sync_commits_meanwhile_is_kept(table):
    table.put(8)

    class Overtaken(SqlCatalog):
        is_overtaken = False

        def commit_table(self, *arguments):
            if not self.is_overtaken:
                self.is_overtaken = True
                assert table.run().records == 177 - 149
            return super().commit_table(*arguments)

    assert maintain(table, catalog=table.open_catalog(Overtaken)).files_written
    assert [note for note in table.notes if "beginning again" in note]
    check_each_once(table)


def test_what_only_expired_snapshots_had_and_orphans_are_removed_and_nothing_else(table):
    folder = table.folder / "tables/tierlog/many"
    orphans = [folder / "data/left/2013-07-04-00000.parquet", folder / "metadata/left.avro"]
    for orphan in orphans:
        orphan.parent.mkdir(exist_ok=True)
        orphan.write_bytes(b"")
    assert maintain(table).files_removed == 0
    assert all(orphan.exists() for orphan in orphans)
    old = len(table.load().metadata.snapshots) - 1
    done = maintain(table, ALL_OLD)
    assert done.snapshots_expired == old
    assert not any(orphan.exists() for orphan in orphans)
    there = {f"file://{path}" for path in (folder / "data").rglob("*.parquet")}
    assert there == files_of(table)
    check_each_once(table)
    assert table.run() == Synced()
    assert maintain(table, ALL_OLD).files_removed == 0


def test_a_table_that_was_rolled_back_keeps_what_it_was_rolled_back_from(table):
    table.put(8)
    table.run()
    loaded = table.load()
    loaded.manage_snapshots().rollback_to_snapshot(loaded.snapshots()[0].snapshot_id).commit()
    with pytest.raises(TableRolledBack):
        maintain(table, ALL_OLD)
    assert len(table.load().snapshots()) == len(loaded.snapshots())
