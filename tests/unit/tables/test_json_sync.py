"""A table of mode json and its table of errors have each committed record once between them,
whatever becomes of those who write them.
"""

import pytest

pytest.importorskip("pyiceberg")

import polars as pl
from pyiceberg.catalog.sql import SqlCatalog

from tests.fakes.topic_tables import JsonTable, runs_of
from tests.unit.tables.test_maintain import ALL_OLD, maintain
from tests.unit.tables.test_sync import LOST
from tierlog.record_format.errors import InvalidRequest
from tierlog.tables.catalog import UnknownTable, drop_table, load_table
from tierlog.tables.errors_table import OtherTable, errors_name
from tierlog.tables.maintain import maintain_table
from tierlog.tables.position import TableRolledBack
from tierlog.tables.status import status_of
from tierlog.tables.sync import Synced, TableSync

PAD = "x" * 5000


@pytest.fixture
def table(tmp_path):
    made = JsonTable(tmp_path)
    made.put_values({"id": 1, "price": 9.5, "pad": ""}, b"no JSON", None)
    made.create()
    return made


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    with runs_of(tmp_path_factory.mktemp("runs")) as started:
        yield started


def records(first, end):
    """Every fifth does not fit; some commits for hundreds of them."""
    return [{"id": "x" if n % 5 == 4 else n, "pad": PAD} for n in range(first, end)]


def test_fields_are_columns_and_what_does_not_fit_is_beside_them(table, monkeypatch):
    monkeypatch.setenv("POLARS_ICEBERG_PLANNER", "pyiceberg")
    assert table.run() == Synced(commits=1, records=2, errors=1)
    names = [field.name for field in table.load().schema().fields]
    own = ["_key", "_partition", "_offset", "_timestamp", "_headers"]
    assert names == [*own, "id", "price", "pad"]
    assert table.json_rows() == {0: {"id": 1, "price": 9.5, "pad": ""}, 2: {}}
    errors = load_table(table.open_catalog(), errors_name(table.name))
    (row,) = errors.scan().to_arrow().to_pylist()
    assert (row["partition"], row["offset"], row["value"]) == (0, 1, b"no JSON")
    assert row["reason"] == "not JSON: Expecting value: line 1 column 1 (char 0)"
    found = pl.scan_iceberg(table.load()).select("_offset", "price").collect()
    assert sorted(found.rows()) == [(0, 9.5), (2, None)]
    status = status_of(table.load(), None)
    assert (status.records, status.errors, status.mode) == (2, 1, "json")


def test_columns_are_added_when_records_have_them_and_no_run_changes_their_types(table):
    table.run()
    table.put_values({"id": 2, "tags": ["a"], "at": {"x": 1}}, {"id": 3, "price": 7})
    table.put_values({"at": {"y": "z"}, "n": None}, {"id": 4.5}, {"price": "free"})
    assert table.run() == Synced(commits=1, records=3, errors=2)
    rows = table.json_rows()
    assert rows[3] == {"id": 2, "tags": ["a"], "at": {"x": 1, "y": None}}
    assert rows[5]["at"] == {"x": None, "y": "z"}
    assert {offset: reason for offset, (_, reason) in table.errors().items() if offset > 1} == {
        6: "id: a fraction, where the column is long",
        7: "price: a string, where the column is double",
    }


def test_where_nothing_fits_the_table_goes_on_all_the_same(tmp_path):
    table = JsonTable(tmp_path)
    table.put_values(b"1", b"2")
    table.create()
    assert table.run() == Synced(commits=1, records=0, errors=2)
    assert table.run() == Synced()
    table.put_values(b"3", {"a": 1})
    assert table.run() == Synced(commits=1, records=1, errors=1)
    table.check_each_once()


def test_columns_that_were_given_stay_what_they_are(tmp_path):
    table = JsonTable(tmp_path)
    table.put_values({"price": 1}, {"price": 2.5})
    table.create("price double")
    assert table.run().errors == 0
    assert table.json_rows() == {0: {"price": 1.0}, 1: {"price": 2.5}}


def test_who_is_late_adds_no_errors_twice(table):
    """Another run catches up, and goes on, between a run's commit and that of its errors."""

    class Late(SqlCatalog):
        more = 1

        def commit_table(self, late, *arguments):
            if late.name() == errors_name(table.name) and self.more:
                self.more = 0
                table.put_values(*records(3, 40))
                table.run()
            return super().commit_table(late, *arguments)

    table.run(catalog=table.open_catalog(Late))
    assert [note for note in table.notes if "new position" in note]
    table.check_each_once()
    assert len(table.errors()) == 1 + 8


def test_commits_that_were_not_answered_are_known_by_reading_the_tables_again(table):
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

    table.put_values(*records(3, 200))
    done = table.run(catalog=table.open_catalog(Unanswered))
    table.check_each_once()
    assert (done.records, done.errors) == (len(table.json_rows()), len(table.errors()))
    table.run()
    check_no_other_files(table)


def test_runs_that_are_killed_at_many_calls_leave_nothing_out_and_nothing_twice(table, runs):
    table.put_values(*records(3, 20), *({"late": n} for n in range(5)))
    calls = 1
    while runs.wait(runs.start(table, killed_at=calls)):
        calls += 2
        assert calls < 60
    assert calls >= 13  # of both tables
    table.run()
    table.check_each_once()
    check_no_other_files(table)


def test_four_runs_at_once_add_each_record_once(table, runs):
    table.put_values(*records(3, 200))
    assert [runs.wait(pid) for pid in [runs.start(table) for _ in range(4)]] == [0] * 4
    table.check_each_once()
    table.run()
    check_no_other_files(table)


def check_no_other_files(table):
    """Than those of the tables; and no attempt is under way."""
    catalog = table.open_catalog()
    found = {
        one.file.file_path.removeprefix(f"file://{table.folder}/")
        for name in (table.name, errors_name(table.name))
        for one in load_table(catalog, name).scan().plan_files()
    }
    assert table.files() == found


def test_maintenance_is_of_both_tables_and_changes_no_row(table):
    table.run()
    for first in range(3, 33, 10):
        table.put_values(*records(first, first + 8), {"tags": None}, {"tags": [], "n": {"a": 1}})
        table.run()
    before = table.json_rows()
    done = maintain(table, ALL_OLD)
    assert (done.files_rewritten, done.files_written) == (9, 2)
    assert done.snapshots_expired > 0
    assert table.json_rows() == before
    table.put_values(*records(33, 50))
    table.run()
    assert {offset for offset in table.json_rows() if offset < 33} == set(before)
    assert len(table.json_rows()) + len(table.errors()) == 50
    with pytest.raises(InvalidRequest, match="many_errors is maintained with the table"):
        maintain_table(table.open_catalog(), errors_name(table.name), ALL_OLD, log=print)


def test_errors_that_a_killed_run_left_outlive_maintenance(table, runs):
    """It committed, and its errors are not in their table yet."""
    calls = 1
    while table.load().current_snapshot() is None:
        runs.wait(runs.start(table, killed_at=(calls := calls + 1)))
    assert table.load().properties["tierlog.errors"]
    maintain(table, ALL_OLD)
    assert table.run() == Synced()
    table.check_each_once()


def test_a_table_of_errors_that_was_dropped_is_made_anew(table):
    table.run()
    catalog = table.open_catalog()
    drop_table(catalog, load_table(catalog, errors_name(table.name)), purge=True)
    table.put_values(b"x", {"id": 5})
    assert table.run() == Synced(commits=1, records=1, errors=1)
    assert 3 in table.errors()


def test_a_table_of_errors_of_another_table_or_rolled_back_is_refused(table):
    table.run()
    table.put_values(b"x")
    table.run()
    catalog = table.open_catalog()
    errors = load_table(catalog, errors_name(table.name))
    first = errors.snapshots()[0].snapshot_id
    errors.manage_snapshots().rollback_to_snapshot(first).commit()
    with pytest.raises(TableRolledBack, match="many_errors: the table was rolled back"):
        table.run()
    assert "many_errors" in status_of(table.load(), None).problem
    drop_table(catalog, table.load(), purge=False)
    with pytest.raises(UnknownTable, match="the catalog has no table"):
        table.run()
    table.create()
    with pytest.raises(OtherTable, match="many_errors has the errors of another table"):
        table.run()


def test_a_table_of_errors_is_not_synced_by_itself(table):
    table.run()
    run = TableSync(
        catalog=table.open_catalog(),
        name=errors_name(table.name),
        topic="many",
        options=table.options(),
    )
    with pytest.raises(InvalidRequest, match="filled with what does not fit"):
        run.sync_table()
