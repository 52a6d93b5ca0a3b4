"""The console's page of a topic's Iceberg table."""

import re
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

pytest.importorskip("pyiceberg")

from tests.fakes.iceberg_catalogs import CATALOGS
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE, TABLE, Console, open_console
from tests.integration.console.test_accessibility import SETTLED, findings
from tierlog.api.console import table_pages
from tierlog.api.http.settings import HttpSettings
from tierlog.tables.catalog import create_table, open_catalog, table_name
from tierlog.tables.errors_table import REFUSED_SHOWN
from tierlog.tables.shown import table_finder
from tierlog.tables.sync import TableSync, begin_tables, read_options

Place = tuple[str, dict[str, str]]
"""A catalog's URL, and its properties."""


class Lab:
    """A console whose broker knows a catalog, and what `tierlog table` does with that."""

    def __init__(self, root: Path, console: Console, place: Place) -> None:
        self.root, self.console, self._place = root, console, place

    def page(self, topic: str) -> str:
        answer = self.console.get(f"/console/topics/{topic}/table")
        assert answer.status_code == 200, answer.text
        return " ".join(answer.text.split())

    def text(self, topic: str) -> str:
        return " ".join(re.sub("<[^>]+>", " ", self.page(topic)).split())

    def sync(self, topic: str) -> None:
        catalog = open_catalog(*self._place)
        given = {"store": f"file://{self.root}/bucket", "server": self.console.url}
        options = read_options({**given, "includeHeaders": "true"}, topic)
        name = table_name(None, topic)
        if not catalog.table_exists(name):
            ((position, mode),) = begin_tables(options)
            create_table(catalog, name, position, mode=mode)
        TableSync(catalog=catalog, name=name, topic=topic, options=options).sync_table()


def settings_of(place: Place) -> HttpSettings:
    return HttpSettings(find_table=table_finder(*place))


def place_of(root: Path, catalog: str = "") -> Place:
    return catalog or f"sqlite:///{root}/secret.db", {"warehouse": f"file://{root}/tables"}


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    root = tmp_path_factory.mktemp("lab")
    place = place_of(root)
    with open_console(root, http=settings_of(place)) as console:
        lab = Lab(root, console, place)
        topic = console.topic("orders.new", iceberg_mode="json")
        console.produce(topic, {"value": {"id": 1}}, {"value": {"id": 2}})
        lab.sync(topic)
        bad = ({"value": f"<b>bad {n}</b>", "timestamp": 1_700_000_000_000 + n} for n in range(30))
        console.produce(topic, *bad)
        lab.sync(topic)
        console.produce(topic, *[{"value": {"id": 3}}] * 7)
        yield lab


def test_a_topics_table_shows_rows_lag_and_what_was_refused(browser: Chromium, lab: Lab) -> None:
    browser.open(f"{lab.console.url}/#/topics/orders.new/table")
    browser.until("document.querySelectorAll('#view table').length === 2")
    text = " ".join(browser.text().split())
    assert "Table tierlog.orders_new Mode json Rows 2 Refused 30 Last commit 20" in text
    lag = "[...document.querySelectorAll('#view table')[0].querySelectorAll('td')]"
    assert browser.run(f"{lag}.map(one => one.textContent)") == ["32", "39", "7"]
    rows = "[...document.querySelectorAll('#view table')[1].querySelectorAll('tbody tr')]"
    shown = browser.run(f"{rows}.map(one => one.innerText)")
    assert len(shown) == REFUSED_SHOWN
    assert shown[0].startswith("0:31")
    assert "<b>bad 29</b>" in shown[0]
    assert "JSON" in shown[0]
    browser.run(f"{rows}[0].querySelector('a').click()")
    browser.until("document.querySelector('#record-31')")


def test_axe_finds_nothing_on_the_page_of_a_table(browser: Chromium, lab: Lab) -> None:
    for width in (TABLE, PHONE):
        browser.emulate(width=width)
        browser.open(f"{lab.console.url}/#/topics/orders.new/table")
        browser.until("document.querySelector('#view h2')")
        browser.until(SETTLED)
        assert findings(browser) == []
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_a_topic_without_a_table_says_how_there_is_one(lab: Lab) -> None:
    lab.console.topic("plain")
    assert "Set the topic's <code>iceberg.mode</code>" in lab.page("plain")
    lab.console.topic("wanted", iceberg_mode="raw")
    assert "<code>tierlog table sync --follow</code> makes it" in lab.page("wanted")
    lab.console.topic("orders-new", iceberg_mode="raw")  # its table would have the same name
    assert "The catalog has no table of this topic" in lab.page("orders-new")


def test_a_table_of_an_earlier_topic_is_named_as_such(lab: Lab) -> None:
    topic = lab.console.topic("again", iceberg_mode="raw")
    lab.console.produce(topic, {"value": "1"})
    lab.sync(topic)
    assert "Nothing is added" not in lab.page(topic)
    assert lab.console.delete(f"/v1/topics/{topic}").status_code == 204
    lab.console.topic(topic, iceberg_mode="raw")
    assert "it is of a topic of this name that was deleted" in lab.page(topic)


def test_what_is_missing_to_see_tables_is_named(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    topic = console.topic("untabled")
    page = f"/console/topics/{topic}/table"
    assert "<code>--catalog URL</code>" in console.get(page).text
    with monkeypatch.context() as without:
        without.setattr(table_pages, "find_spec", lambda _: None)
        assert "tierlog[iceberg]" in console.get(page).text


def test_a_catalog_that_is_broken_is_named_without_its_password(tmp_path: Path) -> None:
    (tmp_path / "secret.db").write_text("no database, but long enough to be looked at as one " * 9)
    with open_console(tmp_path, bucket=False, http=settings_of(place_of(tmp_path))) as console:
        topic = console.topic("orders")
        shown = console.get(f"/console/topics/{topic}/table").text
        assert "not a database" in shown
        assert "secret" not in shown


def test_a_catalog_that_hangs_holds_up_no_other_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr(table_pages, "ANSWER_S", 0.01)
    hung = HttpSettings(find_table=lambda *_: is_over.wait() and None)
    with open_console(tmp_path, bucket=False, http=hung) as console:
        topic = console.topic("orders")
        try:
            shown = console.get(f"/console/topics/{topic}/table")
            assert "The catalog does not answer within" in shown.text
            assert console.get(f"/console/topics/{topic}").status_code == 200
        finally:
            is_over.set()


@pytest.mark.parametrize("kind", sorted(CATALOGS))
def test_tables_of_the_catalogs_that_others_run_are_shown_while_these_answer(
    tmp_path: Path, kind: str
) -> None:
    with ExitStack() as running, ExitStack() as answering:
        url = answering.enter_context(CATALOGS[kind](tmp_path))
        place = place_of(tmp_path, url)
        console = running.enter_context(open_console(tmp_path, http=settings_of(place)))
        lab, topic = Lab(tmp_path, console, place), console.topic("orders", iceberg_mode="json")
        assert "The catalog has no table of this topic" in lab.page(topic)
        console.produce(topic, {"value": {"id": 1}}, {"value": "no object"})
        lab.sync(topic)
        console.produce(topic, {"value": {"id": 2}})
        shown = lab.text(topic)
        assert "Table tierlog.orders Mode json Rows 1 Refused 1 Last commit 20" in shown
        assert "0 2 3 1 Latest refused records" in shown
        answering.close()
        assert "catalog default: " in lab.text(topic)
        assert url not in lab.page(topic)
