"""Tables in the catalogs that others run: exactly once, as in a file of SQLite."""

import signal

import pytest

pytest.importorskip("pyiceberg")

from tests.fakes.iceberg_catalogs import CATALOGS
from tests.fakes.topic_tables import JsonTable, runs_of
from tierlog.tables.catalog import (
    CatalogUnavailable,
    UnknownTable,
    drop_table,
    open_catalog,
    tables_of_topics,
)
from tierlog.tables.maintain import Ages, maintain_table


@pytest.fixture(params=sorted(CATALOGS))
def table(request, tmp_path):
    with CATALOGS[request.param](tmp_path) as url:
        yield JsonTable(tmp_path, catalog=url)


def records(first, end):
    return [{"id": "x" if n % 5 == 4 else n, "pad": "x" * 5000} for n in range(first, end)]


def test_a_table_has_each_record_once_over_kills_and_four_runs_at_once(table):
    table.put_values({"id": 1, "pad": ""}, *records(1, 30))
    table.create()
    with runs_of(table.folder) as runs:
        for killed_at in (5, 9):
            assert runs.wait(runs.start(table, killed_at=killed_at)) == -signal.SIGKILL
        table.put_values(*({"more": n} for n in range(30, 80)))
        assert [runs.wait(pid) for pid in [runs.start(table) for _ in range(4)]] == [0] * 4
    table.check_each_once()
    catalog = table.open_catalog()
    assert len(list(tables_of_topics(catalog, pytest.fail))) == 2
    assert maintain_table(catalog, table.name, Ages(), log=print).files_rewritten > 0
    table.check_each_once()
    drop_table(catalog, table.load(), purge=False)
    with pytest.raises(UnknownTable):
        table.load()


@pytest.mark.parametrize("url", ["http://127.0.0.1:1", "postgresql+psycopg2://127.0.0.1:1/none"])
def test_a_catalog_that_does_not_answer_is_named(url):
    pytest.importorskip("psycopg2")
    with pytest.raises(CatalogUnavailable, match=r"catalog .*: "):
        list(tables_of_topics(open_catalog(url, {}), pytest.fail))
