import json
import re
import secrets
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.broker_harness import run_janitor
from tests.fakes.damage import flip
from tests.fakes.faulty_object_store import Slow
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import Console, open_console
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token

HEADING = "document.querySelector('#view h1')"
ENDED = "document.querySelector('[data-search]')?.dataset.ended"
ROWS = "document.querySelectorAll('.found details').length"


@pytest.fixture(scope="module")
def flights(console: Console) -> str:
    return console.two_tiers("searched")


def find(console: Console, topic: str, **query: Any) -> list[dict[str, Any]]:
    """The lines of a search, from the oldest record on if nothing else is said."""
    params = {"order": "oldest", **query}
    response = console.get(f"/console/topics/{topic}/found", params=params)
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def places(lines: list[dict[str, Any]]) -> list[tuple[int, int]]:
    return [(one["partition"], one["offset"]) for line in lines for one in line["records"]]


@pytest.mark.parametrize(
    ("query", "offsets"),
    [
        ({"text": "key 17"}, [17, *range(170, 180)]),
        ({"key": "key 17"}, [17]),
        ({"header": "source=tower 3"}, [3]),
        ({"json": "$.n = 199"}, [199]),
        ({"json": "n >= 198"}, [198, 199]),
        ({"text": "only on disk"}, [200]),
        ({"by": "offset", "start": "5", "end": "8"}, [5, 6, 7]),
        ({"start": "2013-07-04 01:06:40", "end": "2013-07-04 01:06:43"}, [0, 1, 2]),
        ({"start": "1372900100000", "end": "1372900102000", "text": "key 101"}, [101]),
        ({"text": "nothing has this"}, []),
    ],
)
def test_what_is_searched_for_is_found_in_both_tiers(
    console: Console, flights: str, query: dict[str, str], offsets: list[int]
) -> None:
    for order in ("oldest", "newest"):
        found = find(console, flights, order=order, **query)
        expected = offsets if order == "oldest" else offsets[::-1]
        assert places(found) == [(0, one) for one in expected]
        assert found[-1]["progress"]["end"] == "complete"
        assert found[-1]["progress"]["offsets"] == found[-1]["progress"]["offsets_in_all"] == 201


def test_segments_outside_of_the_times_are_not_read(console: Console) -> None:
    topic = console.topic("hours", segment_bytes=1 << 20, retention_ms=-1)
    for hour in range(6):
        timestamp = 1_372_900_000_000 + hour * 3_600_000
        console.produce(topic, {"value": "x" * 700_000, "timestamp": timestamp})
    times = {"start": "2013-07-04T03:00:00Z", "end": "2013-07-04T04:00:00Z"}
    for order in ("oldest", "newest"):
        found = find(console, topic, order=order, **times)
        assert places(found) == [(0, 2)]
        assert found[-1]["progress"]["records"] == 1
    assert len(places(find(console, topic))) == 6


DAYS = 60
RARE = (10, 31, 50, 51, 59)
DAY_MS = 86_400_000


@pytest.fixture(scope="module")
def year(console: Console) -> str:
    """Of two partitions, with a segment for each six days: in the bucket alone, but for the newest
    two. Each has keys of its own; the last record of a few has the same.
    """
    topic = console.topic(
        "year", partitions=2, segment_bytes=1 << 20, local_retention_ms=0, retention_ms=-1
    )

    def produce(day: int) -> None:
        time = 1_700_000_000_000 + day * 6 * DAY_MS
        keys = [f"day {day} {number}" for number in range(20)]
        if day in RARE:
            keys[-1] = "rare"
        records = [{"key": key, "value": "x" * 100, "timestamp": time} for key in keys]
        path = f"/v1/topics/{topic}/partitions/{day % 2}/records"
        assert console.post(path, json={"records": records}).status_code == 200

    for day in range(DAYS - 2):
        produce(day)
        console.broker.partition(topic, day % 2).upkeep.roll()
    offloaded = console.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
    assert offloaded.json()["remaining_segments"] == 0
    run_janitor(console.broker)
    produce(DAYS - 2)
    produce(DAYS - 1)
    return topic


def logs_read(console: Console) -> set[str]:
    """Those of which a byte was fetched."""
    assert console.store is not None
    calls = console.store.calls
    return {key for call, key in calls if call == "get_range" and key.endswith(".log")}


@pytest.mark.parametrize("order", ["oldest", "newest"])
def test_a_search_of_a_key_reads_the_chunks_that_may_have_it(
    console: Console, year: str, order: str
) -> None:
    assert console.store is not None
    console.store.calls.clear()
    found = find(console, year, key="day 20 7", order=order)
    assert places(found) == [(0, 207)]
    assert found[-1]["progress"]["end"] == "complete"
    assert found[-1]["progress"]["offsets"] == DAYS * 20
    assert len(logs_read(console)) <= 2  # one may seem to have it
    # Two segments are on local disk, and read once.
    assert found[-1]["progress"]["records"] <= (2 + 2) * 20
    console.store.calls.clear()
    found = find(console, year, key="no such key", order=order)
    assert places(found) == []
    assert len(logs_read(console)) <= 1
    assert found[-1]["progress"]["records"] <= (2 + 1) * 20


def test_records_of_a_key_come_in_the_order_of_their_times(console: Console, year: str) -> None:
    found, after = [], ""
    for _ in RARE:
        lines = find(console, year, key="rare", order="newest", limit=1, after=after)
        found, after = found + places(lines), lines[-1]["place"]
    assert found == [(day % 2, day // 2 * 20 + 19) for day in reversed(RARE)]
    last = find(console, year, key="rare", order="newest", after=after)
    assert (places(last), last[-1]["progress"]["end"]) == ([], "complete")


def test_a_search_ends_at_its_limit_and_goes_on_from_there(console: Console) -> None:
    topic = console.topic("many-partitions", partitions=3)
    for partition in range(3):
        records = [{"value": f"{partition} {n}"} for n in range(10)]
        path = f"/v1/topics/{topic}/partitions/{partition}/records"
        assert console.post(path, json={"records": records}).status_code == 200
    every, after = [], ""
    for _ in range(8):
        found = find(console, topic, limit=4, after=after)
        every += places(found)
        after = found[-1]["place"]
        if found[-1]["progress"]["end"] == "complete":
            break
        assert found[-1]["progress"]["end"] == "limit"
    assert every == [(partition, n) for partition in range(3) for n in range(10)]
    assert places(find(console, topic, partition=1, limit=3)) == [(1, 0), (1, 1), (1, 2)]
    assert places(find(console, topic, text=" 3", until="1:4")) == [(0, 3), (1, 3)]


def test_from_the_newest_the_partitions_are_searched_side_by_side(console: Console) -> None:
    topic = console.topic("newest", partitions=3, retention_ms=-1)
    for start in range(0, 1200, 400):
        console.produce(
            topic,
            *(
                {"value": n, "timestamp": 1_700_000_000_000 + n * 1000, "partition": n % 3}
                for n in range(start, start + 400)
            ),
        )
    found = find(console, topic, order="newest", limit=300)
    assert found[-1]["progress"]["end"] == "limit"
    assert {partition for partition, _ in places(found)} == {0, 1, 2}
    every, after = [], ""
    while True:
        found = find(console, topic, order="newest", limit=250, after=after)
        every += places(found)
        if found[-1]["progress"]["end"] == "complete":
            break
        after = found[-1]["place"]
    for number in range(3):
        offsets = [offset for partition, offset in every if partition == number]
        assert offsets == [*range(399, -1, -1)]
    some = find(console, topic, order="newest", limit=100)
    again = find(console, topic, order="newest", limit=100, until=some[-1]["place"])
    assert places(again) == places(some)


def test_from_the_newest_a_range_without_records_is_stepped_over(console: Console) -> None:
    topic = console.topic("sparse", cleanup_policy="compact", segment_bytes=1024)
    console.produce(topic, {"key": "first", "value": "kept"})
    for _ in range(40):
        console.produce(topic, *({"key": "k", "value": "x" * 20} for _ in range(50)))
    console.broker.partition(topic, 0).upkeep.roll()
    console.broker.background.compactor.run_round()
    found = find(console, topic, order="newest", key="first")
    assert places(found) == [(0, 0)]
    assert found[-1]["progress"]["end"] == "complete"


@pytest.mark.parametrize(
    ("limits", "end"), [({"search_max_bytes": 1}, "bytes"), ({"search_max_ms": 0}, "time")]
)
def test_a_search_ends_with_its_budget(tmp_path: Path, limits: dict[str, int], end: str) -> None:
    with open_console(tmp_path, http=HttpSettings(**limits)) as console:
        topic = console.topic("budget")
        for _ in range(3):
            console.produce(topic, {"value": "x" * 900_000})
        for order in ("oldest", "newest"):
            found = find(console, topic, text="y", order=order)[-1]["progress"]
            assert found["end"] == end
            assert found["records"] < 3


@pytest.mark.parametrize(
    "query", [{"json": "a["}, {"start": "yesterday"}, {"after": "x"}, {"partition": "-1"}]
)
def test_a_search_that_cannot_be_read_is_refused_beside_its_form(
    console: Console, flights: str, query: dict[str, str]
) -> None:
    assert console.get(f"/console/topics/{flights}/found", params=query).status_code == 400
    page = console.get(f"/console/topics/{flights}/search", params=query)
    assert page.status_code == 200
    assert 'class="refusal"' in page.text
    assert "data-search=" not in page.text


def test_only_a_few_searches_run_at_once(tmp_path: Path) -> None:
    with open_console(tmp_path, http=HttpSettings(searches_max=0)) as console:
        topic = console.topic("busy")
        response = console.get(f"/console/topics/{topic}/found")
        assert (response.status_code, response.json()["code"]) == (429, "throttled")


def test_a_large_record_is_searched_and_a_very_large_one_is_counted(console: Console) -> None:
    topic = console.topic("large-found", max_message_bytes=16 << 20)
    console.produce(topic, {"value": "x" * (2 << 20) + "needle"})
    console.produce(topic, {"value": "x" * (9 << 20) + "needle"})
    console.produce(topic, {"value": "needle"})
    found = find(console, topic, text="needle")
    assert places(found) == [(0, 0), (0, 2)]
    assert found[0]["records"][0]["value"]["text"].endswith("xxxneedle")
    assert found[-1]["progress"]["too_large"] == 1


def test_a_damaged_partition_is_reported_and_the_others_are_searched(tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        topic = console.topic("rotten", partitions=2)
        for partition in range(2):
            path = f"/v1/topics/{topic}/partitions/{partition}/records"
            console.post(path, json={"records": [{"value": "here"}]})
        flip(tmp_path / "data" / f"{topic}-0" / f"{0:020}.log", -2)
        found = find(console, topic, text="here")
        assert places(found) == [(1, 0)]
        [trouble] = found[-1]["progress"]["troubles"]
        assert trouble.startswith("Partition 0: ")
        assert found[-1]["progress"]["end"] == "complete"


# --- in the browser -------------------------------------------------------------------------------


def open_search(browser: Chromium, console: Console, topic: str, query: str = "") -> None:
    browser.open(f"{console.url}/#/topics/{topic}/search{query}")
    browser.until(f"{HEADING}?.textContent.includes('{topic}')")


def test_a_record_is_searched_for_opened_and_shown_in_colour(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_search(browser, console, flights)
    browser.press("/")
    browser.type('"n":17')
    browser.press("Enter")
    browser.until(f"{ENDED} === 'complete'")
    assert browser.run(ROWS) == 11
    assert "11 found; everything was searched" in browser.text()
    assert "text=" in browser.run("location.hash")
    rows = "[...document.querySelectorAll('.found details')]"
    offsets = f"{rows}.map(one => Number(one.dataset.offset))"
    assert browser.run(offsets) == [*range(179, 169, -1), 17]
    browser.press("Escape")
    browser.press("j")
    browser.press("Enter")
    browser.until("document.querySelector('details[open] .json-number')")
    coloured = "[...document.querySelectorAll('details[open] pre [class^=json]')]"
    assert browser.run(f"{coloured}.map(one => one.className)") == [
        "json-name",
        "json-number",
        "json-name",
        "json-text",
    ]
    shown = "document.querySelector('details[open] pre[data-json]').textContent"
    pretty = browser.run(shown)
    assert json.loads(pretty) == {"n": 179, "pad": "x" * 60}
    assert "tower 179" in browser.run("document.querySelector('details[open]').innerText")
    browser.run("document.querySelector('details[open] [data-raw]').click()")
    browser.until(f"{shown} !== {json.dumps(pretty)}")
    assert browser.run(shown) == '{"n":179,"pad":"' + "x" * 60 + '"}'
    browser.run("document.querySelector('details[open] [data-raw]').click()")
    browser.until(f"{shown} === {json.dumps(pretty)}")
    browser.run("document.querySelector('details[open] .opened > a').click()")
    browser.until("document.querySelector('#record-179')")


def test_a_search_that_was_ended_by_its_limit_goes_on(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_search(browser, console, flights, "?limit=150")
    browser.until(f"{ENDED} === 'limit'")
    assert browser.run(ROWS) == 150
    browser.run("document.querySelector('[data-search-stop]').click()")
    browser.until(f"{ENDED} === 'complete'")
    assert browser.run(ROWS) == 201
    assert browser.run("document.querySelector('#record-0-200 .tier').textContent") == "hot"


def test_a_key_is_searched_for_in_a_year_of_which_little_is_read(
    browser: Chromium, console: Console, year: str
) -> None:
    assert console.store is not None
    open_search(browser, console, year)
    console.store.calls.clear()
    browser.run("document.querySelector('#view [name=key]').focus()")
    browser.type("rare")
    browser.press("Enter")
    browser.until(f"{ENDED} === 'complete'")
    assert browser.run(ROWS) == len(RARE)
    assert "5 found; everything was searched" in browser.text()
    assert len(logs_read(console)) <= len(RARE) + 2


def test_leaving_the_page_of_a_search_ends_its_reads(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path) as console:
        topic = console.topic("long", segment_bytes=1 << 20, local_retention_bytes=1)
        for _ in range(40):
            console.produce(topic, {"value": secrets.token_hex(400_000)})
        offloaded = console.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000})
        assert offloaded.json()["remaining_segments"] == 0
        run_janitor(console.broker)
        store = console.store
        assert store is not None

        def is_read(key: str) -> bool:
            return key.endswith(".log")

        def waiting() -> str | None:
            metric = r"^tierlog_http_waiting_requests (\d+)"
            found = re.search(metric, console.get("/metrics").text, re.MULTILINE)
            return found and found[1]

        def read() -> int:
            return len({key for call, key in store.calls if call == "get_range" and is_read(key)})

        store.calls.clear()
        slow = Slow()
        store.fail("get_range", slow, when=is_read)
        open_search(browser, console, topic, "?text=zz")
        until(lambda: waiting() == "1" and read())
        browser.run("location.hash = '#/overview'")
        browser.until(f"{HEADING}?.textContent === 'Topics'")
        slow.gate.set()
        until(lambda: waiting() == "0")
        assert 0 < read() < 20


def test_what_a_search_finds_never_becomes_markup(browser: Chromium, console: Console) -> None:
    attack = "<img src=x onerror='window.owned = 1'>"
    topic = console.topic("hostile-found")
    console.produce(
        topic,
        {"key": attack, "value": attack, "headers": [{"name": attack, "value": attack}]},
        {"value": {attack: [attack, 1]}},
    )
    open_search(browser, console, topic, f"?text={attack[1:4]}")
    browser.until(f"{ENDED} === 'complete'")
    browser.run("document.querySelectorAll('.found details').forEach(one => { one.open = true; })")
    browser.until("document.querySelectorAll('.found .json-text').length === 1")
    browser.until("document.querySelectorAll('.found .headers').length === 1")
    assert browser.run("document.querySelector('#view').textContent").count(attack) >= 7
    assert browser.run("document.querySelectorAll('#view img').length") == 0
    assert browser.run("window.owned") is None


def test_a_search_needs_a_token_that_may_read_the_topic(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    admin = create_token(file, "admin", scopes=(Scope.ADMIN,), now_ms=1)
    reader = create_token(file, "eu", scopes=(Scope.READ,), topics="orders.", now_ms=1)
    producer = create_token(file, "sensor", scopes=(Scope.PRODUCE,), now_ms=1)
    with open_console(tmp_path, bucket=False, tokens=file) as console:
        console.headers["authorization"] = f"Bearer {admin}"
        for topic in ("orders.eu", "private"):
            console.topic(topic)
            console.produce(topic, {"value": "secret"})
        for call in ("search", "found", "download", "samples", "partitions/0/records/0"):

            def status(topic: str, token: str, call: str = call) -> int:
                headers = {"authorization": f"Bearer {token}"} if token else {}
                path = f"{console.url}/console/topics/{topic}/{call}"
                return httpx2.get(path, headers=headers).status_code

            tokens = [("orders.eu", reader), ("private", reader), ("private", producer)]
            assert [status(*one) for one in tokens] == [200, 403, 403]
            assert status("orders.eu", "") == 401
            assert status("orders.none", reader) == 404
