"""A topic's table has each committed record once, whatever becomes of those who write it."""

import errno
import json
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

import polars as pl
from pyiceberg.catalog.sql import SqlCatalog
from pyiceberg.io.pyarrow import PyArrowFile
from sqlalchemy.exc import OperationalError

from tests.fakes.bucket import put_topic
from tests.fakes.topic_tables import (
    COLUMNS,
    ROOT,
    TOPIC,
    TopicTable,
    check_each_once,
    in_order,
    runs_of,
)
from tierlog.object_store.open import open_store
from tierlog.tables.attempts import begin_attempt, remove_lost_attempts
from tierlog.tables.catalog import CommitUnanswered
from tierlog.tables.position import PROPERTY, OtherTopic, TableRolledBack
from tierlog.tables.sync import UNANSWERED_MAX, Synced

GUIDE = ROOT / "docs/guides/tables.md"
LOST = OperationalError("commit", {}, Exception("the connection was closed"))


@pytest.fixture
def table(tmp_path):
    made = TopicTable(tmp_path)
    made.put()
    made.create()
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with runs_of(tmp_path_factory.mktemp("runs")) as started:
        yield started


def test_a_row_has_what_the_record_has_for_each_reader(table, monkeypatch):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    assert table.run() == Synced(commits=3, records=177)
    check_each_once(table)
    polars = in_order(pl.scan_iceberg(table.load()).collect().to_arrow())
    assert polars.to_pylist() == table.rows().to_pylist()
    assert [field.name for field in table.load().schema().fields] == list(COLUMNS)
    many = table.load().scan().to_duckdb("many")
    assert many.sql('select count(distinct "offset"), count(*) from many').fetchall() == [
        (177,) * 2
    ]


def test_a_later_run_adds_what_is_new_and_without_new_records_nothing_is_committed(tmp_path):
    table = TopicTable(tmp_path)
    table.put(0, 4)
    table.create()
    assert table.run() == Synced(commits=1, records=68)
    assert table.run() == Synced()
    table.put(4)
    assert table.run().records == 177 - 68
    check_each_once(table)


def test_records_of_aborted_transactions_are_left_out(tmp_path):
    table = TopicTable(tmp_path)
    put_topic(open_store(table.url), TOPIC, {0: "txn-multi-0", 1: "txn-multi-1"})
    table.create()
    table.run()
    check_each_once(table)


def test_a_table_that_was_rolled_back_is_refused_also_with_newer_rows(table):
    table.run()
    loaded = table.load()
    newest, second = loaded.current_snapshot(), loaded.snapshots()[1]
    loaded.manage_snapshots().rollback_to_snapshot(second.snapshot_id).commit()
    with pytest.raises(TableRolledBack, match=f"rolled back: .* snapshot {newest.snapshot_id}"):
        table.run()
    add_a_file_of_another(table)
    with pytest.raises(TableRolledBack):
        table.run()
    table.load().manage_snapshots().set_current_snapshot(newest.snapshot_id).commit()
    assert table.run() == Synced()
    check_each_once(table)


def test_a_commit_of_another_and_expired_snapshots_are_no_rollback(table):
    table.run()
    add_a_file_of_another(table)
    assert table.run() == Synced()
    table.load().maintenance.expire_snapshots().older_than(datetime.now()).commit()  # noqa: DTZ005
    assert len(table.load().snapshots()) == 1
    assert table.run() == Synced()


def add_a_file_of_another(table):
    loaded = table.load()
    file = Path(next(iter(loaded.scan().plan_files())).file.file_path.removeprefix("file://"))
    other = file.with_name("another.parquet")
    shutil.copy(file, other)
    loaded.add_files([f"file://{other}"])


def test_a_topic_that_was_created_anew_is_refused_before_anything_is_read(table):
    table.run()
    loaded = table.load()
    position = json.loads(loaded.properties[PROPERTY])
    longer = {one: end + 1000 for one, end in position["offsets"].items()}
    text = json.dumps(position | {"topic_id": "id-of-another", "offsets": longer})
    loaded.transaction().set_properties({PROPERTY: text}).commit_transaction()
    with pytest.raises(OtherTopic, match=r"re-created \(its id is id-of-many, the table's"):
        table.run()


def test_what_another_run_committed_meanwhile_is_not_added_again(table):
    class Overtaken(SqlCatalog):
        others = iter([100, 40])

        def commit_table(self, *arguments):
            if (until := next(self.others, None)) is not None:
                table.run(until=until)
            return super().commit_table(*arguments)

    assert table.run(catalog=table.open_catalog(Overtaken)).records == 77
    assert [note for note in table.notes if "position" in note]
    check_each_once(table)
    check_no_other_files(table)


def test_a_commit_that_was_not_answered_is_known_by_reading_the_table_again(table):
    class Unanswered(SqlCatalog):
        calls = 0

        def commit_table(self, *arguments):
            self.calls += 1
            if self.calls % 3 == 1:
                raise LOST
            answer = super().commit_table(*arguments)
            if self.calls % 3 == 2:
                raise LOST
            return answer

    assert table.run(catalog=table.open_catalog(Unanswered)).records == 177
    check_each_once(table)
    check_no_other_files(table)


def test_a_commit_that_takes_place_after_all_keeps_its_files(table):
    """It was not answered, and its run goes on: the next commit finds another's snapshot."""

    class Late(SqlCatalog):
        pending = None

        def commit_table(self, *arguments):
            if self.pending is None:
                self.pending = arguments
                raise LOST
            if self.pending:
                super().commit_table(*self.pending)
                self.pending = ()
            return super().commit_table(*arguments)

    table.run(catalog=table.open_catalog(Late))
    check_each_once(table)
    check_no_other_files(table)


def test_a_catalog_that_does_not_answer_ends_a_run_and_the_next_one_goes_on(table):
    class Dead(SqlCatalog):
        calls = 0

        def commit_table(self, *arguments):
            self.calls += 1
            raise LOST

    dead = table.open_catalog(Dead)
    with pytest.raises(CommitUnanswered, match=r"tierlog.many: .* the connection was closed"):
        table.run(catalog=dead)
    assert dead.calls == UNANSWERED_MAX
    assert table.run().records == 177
    table.run()
    check_each_once(table)
    check_no_other_files(table)


def test_a_full_disk_is_an_error_that_leaves_no_files(table, monkeypatch):
    create, left = PyArrowFile.create, iter([2, 1])

    def full(file, *arguments, **named):
        if ".parquet" in file.location and next(left, None) is None:
            raise OSError(errno.ENOSPC, "No space left on device")
        return create(file, *arguments, **named)

    monkeypatch.setattr(PyArrowFile, "create", full)
    with pytest.raises(OSError, match="No space left"):
        table.run()
    monkeypatch.undo()
    check_no_other_files(table)
    table.run()
    check_each_once(table)


def test_an_attempt_that_may_still_be_committed_keeps_its_files(table):
    loaded = table.load()
    attempt = begin_attempt(loaded)
    path = f"{attempt.folder(loaded)}/2013-07-04-00000.parquet"
    loaded.io.new_output(path).create().close()
    assert remove_lost_attempts(table.load()) == 0
    assert loaded.io.new_input(path).exists()
    table.run()
    table.run()
    assert not loaded.io.new_input(path).exists()
    check_no_other_files(table)


def test_a_run_that_is_killed_at_any_call_leaves_nothing_out_and_nothing_twice(table, runs):
    calls = 0
    while runs.wait(runs.start(table, killed_at=calls + 1)):
        calls += 1
        assert calls < 60
    assert calls >= 9  # of one commit
    table.run()
    check_each_once(table)
    check_no_other_files(table)


def test_four_runs_at_once_add_each_record_once(table, runs):
    assert [runs.wait(pid) for pid in [runs.start(table) for _ in range(4)]] == [0] * 4
    check_each_once(table)
    table.run()
    check_no_other_files(table)


def check_no_other_files(table):
    """Than those of the table; and no attempt is under way."""
    found = {one.file.file_path for one in table.load().scan().plan_files()}
    assert table.files() == {path.removeprefix(f"file://{table.folder}/") for path in found}


def test_the_program_of_the_guide_reads_the_table(table):
    table.run()
    code = re.search(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.M | re.S)[1]
    changed = {
        "sqlite:///catalog.db": f"sqlite:///{table.folder}/catalog.db",
        "file:///…/tables": table.warehouse,
        "tierlog.orders": "tierlog.many",
        "2026-06-01": "2023-06-01",
    }
    for printed, real in changed.items():
        code = code.replace(printed, real)
    exec(code, defined := {})
    assert defined["june"].num_rows == 177
