import base64
import dataclasses
import json
import re
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import httpx2
import pytest

from tests.fakes.damage import flip
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE, Console, enter_token, open_console
from tierlog.api.console import topic_pages
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token
from tierlog.object_store.ledger import FREE, PriceTable
from tierlog.object_store.open import open_store
from tierlog.record_format.errors import StoreUnavailable
from tierlog.repair.restore import RestoreOptions, restore

TICK = "document.body.dispatchEvent(new CustomEvent('tick'))"
RECORDS = "document.querySelectorAll('.list details').length"
SETTLED = "!document.querySelector('#view').hasAttribute('aria-busy')"
ERROR_LOGS = ("htmx:", "status of 4", "Error Code 4")  # what a browser logs for a 4xx response
HEADING = "document.querySelector('#view h1')"


@pytest.fixture(scope="module")
def flights(console: Console) -> str:
    return console.two_tiers("flights")


def open_page(browser: Chromium, console: Console, path: str, *, heading: str) -> None:
    browser.open(f"{console.url}/{path}")
    browser.until(f"{HEADING}?.textContent.includes('{heading}')")
    browser.until(SETTLED)


# --- pages ---------------------------------------------------------------------------------------


def test_an_empty_broker_shows_the_first_commands(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        open_page(browser, console, "", heading="Topics")
        assert f"tierlog topic create hello --server {console.url}" in browser.text()
        assert "no bucket" in browser.text()
        console.topic("hello")
        browser.run(TICK)
        browser.until("document.querySelector('#topic-hello')")
        browser.until("document.querySelector('[data-chart=bytes] canvas')")


def test_both_tiers_are_drawn_to_scale(browser: Chromium, console: Console, flights: str) -> None:
    open_page(browser, console, f"#/topics/{flights}", heading=flights)
    now = console.get(f"/v1/topics/{flights}/partitions/0/offsets").json()
    assert 0 < now["local_log_start_offset"] < 200
    end = now["log_end_offset"]
    drawn = browser.run(
        """(() => {
            const lane = document.querySelector('.map .lane').getBoundingClientRect();
            return ['hot', 'cold'].map(tier => {
                const box = document.querySelector(`.map rect.${tier}`).getBoundingClientRect();
                return [(box.left - lane.left) / lane.width, (box.right - lane.left) / lane.width];
            });
        })()"""
    )
    hot, cold = drawn
    assert hot == pytest.approx([now["local_log_start_offset"] / end, 1], abs=0.01)
    assert cold == pytest.approx([0, 200 / end], abs=0.01)


def test_records_of_both_tiers_are_read_by_offset_and_by_time(
    browser: Chromium, console: Console, flights: str
) -> None:
    records = f"#/topics/{flights}/partitions/0/records"
    open_page(browser, console, f"{records}?at=earliest&limit=10", heading=flights)
    browser.until(f"{RECORDS} === 10")
    assert browser.run("document.querySelector('summary .tier').textContent") == "cold"
    assert browser.run("document.querySelector('.pager .tier').textContent") == "cold"
    browser.run("document.querySelector('a[data-next]').click()")
    browser.until("document.querySelector('#record-10')")
    browser.run("[...document.querySelectorAll('a.button')].at(-1).click()")
    browser.until("document.querySelector('#record-200')")
    last = "document.querySelector('#record-200 .tier').textContent"
    assert browser.run(last) == "hot"
    browser.run("document.querySelector('select[name=by]').value = 'timestamp'")
    browser.run("document.querySelector('input[name=at]').value = '2013-07-04 01:08:20'")
    browser.run("document.querySelector('form[data-route]').requestSubmit()")
    browser.until("document.querySelector('summary')?.id === 'record-100'")
    assert "key 100" in browser.text()


def test_a_slider_goes_to_the_records_of_a_time_by_keyboard_too(
    browser: Chromium, console: Console, flights: str
) -> None:
    topic = console.topic("travelled", retention_ms=-1)
    hour = 3_600_000
    start = 1_372_900_000_000
    for n in range(11):
        console.produce(topic, {"value": str(n), "timestamp": start + n * hour})
    records = f"#/topics/{topic}/partitions/0/records?at=earliest&limit=10"
    open_page(browser, console, records, heading=topic)
    slider = "document.querySelector('#travel')"
    ends = browser.run(f"(({{ min, max, value }}) => [min, max, value])({slider})")
    assert ends == [str(start), str(start + 10 * hour), str(start)]
    assert browser.run(f"{slider}.ariaValueText ?? {slider}.getAttribute('aria-valuetext')") == (
        "2013-07-04 01:06:40.000Z"
    )
    browser.run(f"{slider}.focus()")
    browser.press("ArrowRight")  # a little after the first record
    browser.until("document.querySelector('#view summary')?.id === 'record-1'")
    assert browser.run("document.activeElement.id") == "travel"
    browser.press("End")
    browser.until("document.querySelector('#view summary')?.id === 'record-10'")
    assert "by=timestamp" in browser.run("location.hash")
    browser.run("history.back()")
    browser.until("document.querySelector('#view summary')?.id === 'record-1'")
    one = console.topic("timeless")
    console.produce(one, {"value": "one"})
    assert "travel" not in console.get(f"/console/topics/{one}/partitions/0/records").text
    page = console.get(f"/console/topics/{flights}/partitions/0/records").text
    assert 'min="1372900000000"' in page, "the first record is in the bucket"


@pytest.mark.parametrize("secure", [True, False], ids=["https", "http"])
def test_a_key_or_value_is_copied_whole_and_as_it_was_produced(
    browser: Chromium, console: Console, secure: bool
) -> None:
    browser.expected += ("status of 410",)
    topic = console.topic(f"copied-{secure}")
    source = '{"a":  1.0}'
    long = "x" * 100_000
    console.produce(topic, {"key": "k\u200b", "value": source}, {"value": long})
    console.produce(topic, {"key_base64": "/wA=", "value_base64": "eAD/"})
    console.produce(topic, {"value_base64": base64.b64encode(long.encode() * 2 + b"\xff").decode()})
    open_page(browser, console, f"#/topics/{topic}/partitions/0/records", heading=topic)
    if secure:
        permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
        browser.call("Browser.grantPermissions", permissions=permissions, origin=console.url)
    else:
        browser.run("delete window.ClipboardItem")
    browser.run(
        "window.addEventListener('copy', ({ clipboardData }) => "
        "{ window.taken = clipboardData.getData('text/plain') })"
    )

    def copied(offset: int, part: int) -> str:
        row = f"document.querySelector('details[data-offset=\"{offset}\"]')"
        browser.run(f"{row}.open = true")
        browser.run(f"{row}.querySelectorAll('button')[{part}].focus()")
        browser.press("Enter")
        browser.until("document.querySelector('#said').textContent === 'Copied'")
        browser.run("document.querySelector('#said').textContent = ''")
        return str(
            browser.run("window.ClipboardItem ? navigator.clipboard.readText() : window.taken")
        )

    assert copied(0, 0) == "k\u200b"
    assert copied(0, 1) == source
    assert copied(1, 0) == long
    assert [copied(2, 0), copied(2, 1)] == ["/wA=", "eAD/"]
    assert base64.b64decode(copied(3, 0)) == long.encode() * 2 + b"\xff"
    names = "[...document.querySelectorAll('details[open] button')].map(one => one.textContent)"
    assert set(browser.run(names)) == {
        "Copy key",
        "Copy value",
        "Copy key as base64",
        "Copy value as base64",
        "As it was sent: value",
    }
    console.post(f"/v1/topics/{topic}/partitions/0/trim", json={"before_offset": 2})
    browser.run("document.querySelector('details[open] button').click()")
    browser.until("document.querySelector('#notice').innerText.startsWith('Nothing was copied: ')")


def test_a_page_of_records_can_begin_at_a_keyword_and_have_any_length(
    console: Console, flights: str
) -> None:
    page = f"/console/topics/{flights}/partitions/0/records"
    by_time = console.get(page, params={"by": "timestamp", "at": "earliest", "limit": 7}).text
    assert (by_time.count("<summary"), 'id="record-0"' in by_time) == (7, True)
    assert "<option selected>7</option>" in by_time
    assert console.get(page, params={"by": "timestamp", "at": " "}).text.count("<summary") == 50
    newest = console.get(page, params={"by": "timestamp", "at": "latest"}).text
    assert newest.count("<summary") == 50
    assert "expected milliseconds" in console.get(page, params={"by": "timestamp", "at": "x"}).text


def test_the_newest_page_of_large_records_ends_with_the_newest(console: Console) -> None:
    topic = console.topic("large-records")
    for _ in range(8):
        console.produce(topic, {"value": "x" * 300_000})
    page = f"/console/topics/{topic}/partitions/0/records"
    newest = console.get(page).text
    assert (newest.count("<summary"), 'id="record-7"' in newest) == (3, True)
    assert "?at=0&amp;" in newest  # the page before may have fifty
    one = console.get(page, params={"limit": 1}).text
    assert (one.count("<summary"), 'id="record-7"' in one) == (1, True)


def test_an_offset_out_of_range_is_an_error_next_to_the_form(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_page(
        browser, console, f"#/topics/{flights}/partitions/0/records?at=90000", heading=flights
    )
    assert "above the high watermark" in browser.text()
    assert browser.run("document.querySelector('input[name=at]').value") == "90000"


def test_segments_and_manifest_versions_are_listed(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_page(browser, console, f"#/topics/{flights}/partitions/0/segments", heading=flights)
    listed = console.get(f"/v1/topics/{flights}/partitions/0/segments").json()["segments"]
    rows = "document.querySelectorAll('#view tbody tr').length"
    assert browser.run(rows) == len(listed)
    for segment in listed:
        assert segment["crc32c"] is None or segment["crc32c"] in browser.text()
    browser.run("[...document.querySelectorAll('.tabs a')].at(-1).click()")
    browser.until("document.querySelector('.versions')")
    assert "in force" in browser.text()
    browser.run("document.querySelectorAll('.versions a')[1].click()")
    browser.until("location.hash.includes('version=')")
    browser.until("document.querySelector('.versions tr.chosen a')?.hash.includes('version=')")
    assert "Against version" in browser.text()


def test_a_partition_without_a_manifest_says_why(console: Console) -> None:
    """Here the broker has a bucket, which the topic does not use."""
    topic = console.topic("local", remote_storage_enable=False)
    page = console.get(f"/console/topics/{topic}/partitions/0/manifest").text
    assert "remote.storage.enable=false" in page


def test_open_pages_of_segments_and_of_the_manifest_are_refreshed(
    browser: Chromium, console: Console
) -> None:
    topic = console.two_tiers("watched")
    path = f"topics/{topic}/partitions/0"

    def upload_one_more() -> int:
        console.produce(topic, {"value": "one more"})
        console.post(f"/v1/topics/{topic}/offload", params={"wait_ms": 20_000}).raise_for_status()
        return int(console.get(f"/v1/{path}/manifest").json()["version"])

    open_page(browser, console, f"#/{path}/segments", heading=topic)
    last = "document.querySelector('#segments tbody tr:last-child .tier').textContent"
    assert browser.run(last) == "hot"
    browser.run("document.querySelector('#segment-20').focus()")
    upload_one_more()
    browser.run(TICK)
    browser.until(f"{last} === 'both'")
    assert browser.run("document.activeElement.id") == "segment-20"

    open_page(browser, console, f"#/{path}/manifest?version=3", heading=topic)
    assert browser.run("document.querySelector('#version-3').ariaCurrent") == "true"
    browser.run("document.querySelector('#version-2').focus({ preventScroll: true })")
    version = upload_one_more()
    browser.run(TICK)
    browser.until(f"document.querySelector('#version-{version}')")
    assert browser.run("document.activeElement.id") == "version-2"
    assert browser.run("document.querySelector('#version-3').ariaCurrent") == "true"

    console.set_down(True)  # with nothing new the store is not asked
    seen = {"version": 3, "seen": version}
    assert console.get(f"/console/{path}/manifest", params=seen).status_code == 204
    older = console.get(f"/console/{path}/manifest", params=seen | {"seen": version - 1})
    console.set_down(False)
    assert "The object store does not respond" in older.text


def test_the_settings_of_a_topic_have_units(console: Console, flights: str) -> None:
    page = re.sub(r"<[^>]*>", " ", console.get(f"/console/topics/{flights}").text)
    settings = " ".join(page.split()).split("Key Value ")[1]
    assert "preallocate false" in settings
    assert "delete.retention.ms 1 d" in settings
    assert "max.message.bytes 1048588 B" in settings
    assert "segment.bytes 2 KiB set" in settings
    assert "retention.ms unlimited set" in settings
    assert "flush.ms 100 ms" in settings
    assert "max.compaction.lag.ms unlimited max.message" in settings


def test_store_requests_and_their_cost_are_shown(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_page(browser, console, "#/store", heading="Store")
    text = browser.text()
    assert "offload" in text
    assert "$0." in text
    assert "list prices of S3" in text


@pytest.mark.parametrize("prices", [FREE, PriceTable(put_per_1000=3.0)], ids=["free", "custom"])
def test_the_store_page_names_the_source_of_its_prices(
    console: Console, flights: str, monkeypatch: pytest.MonkeyPatch, prices: PriceTable
) -> None:
    settings = dataclasses.replace(console.broker.settings, prices=prices)
    monkeypatch.setattr(console.broker, "settings", settings)
    page = console.get("/console/store").text
    assert "S3 Standard" not in page
    free = prices == FREE
    assert ("costs nothing" in page, "a month" in page) == (free, not free)


def test_groups_show_their_lag(browser: Chromium, console: Console, flights: str) -> None:
    offsets = [{"topic": flights, "partition": 0, "offset": 150}]
    created = console.put("/v1/groups/a<b>b/offsets".replace("<", "%3C"), json={"offsets": offsets})
    assert created.status_code == 204
    open_page(browser, console, "#/groups", heading="Groups")
    (committed,) = console.get("/v1/groups/a%3Cb%3Eb").json()["offsets"]
    lag = committed["lag"]
    assert f"a<b>b\tclassic\tEmpty\t0\t1\t{lag}" in browser.text()
    joined = console.post("/v1/groups/a%3Cb%3Eb/members", json={"topics": [flights]})
    assert joined.status_code == 200
    others = len(console.get(f"/v1/topics/{flights}").json()["partitions"])
    open_page(browser, console, "#/topics", heading="Topics")
    open_page(browser, console, "#/groups", heading="Groups")
    assert f"a<b>b\tclassic\tStable\t1\t{others}\t{lag}" in browser.text()
    browser.run("document.querySelector('#groups a[href*=\"a%3Cb\"]').click()")
    browser.until("document.querySelector('#group')")
    reader = joined.json()["member_id"][: len("http-") + 8]
    assert f"{flights} 0\t150\t{committed['log_end_offset']}\t{lag}\t{reader}" in browser.text()
    read_by = "[...document.querySelectorAll('[data-label=\"Read by\"]')].map(one => one.innerText)"
    assert browser.run(read_by) == [reader] * others, "also of partitions without a commit"


def test_throughput_is_drawn_over_time(browser: Chromium, console: Console, flights: str) -> None:
    open_page(browser, console, "", heading="Topics")
    for _ in range(3):
        console.produce(flights, {"value": "more"})
        time.sleep(0.12)
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
    measured = console.get("/console/samples").json()
    assert max(measured["produced_records_per_s"]) > 0
    assert len({len(column) for column in measured.values()}) == 1


def test_a_topic_has_charts_of_its_own(browser: Chromium, console: Console) -> None:
    topic = console.topic("charted")
    offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": 2}]}
    console.produce(topic, *({"value": str(n)} for n in range(10)))
    assert console.put("/v1/groups/charting/offsets", json=offsets).status_code == 204
    open_page(browser, console, f"#/topics/{topic}", heading=topic)
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 4")
    values = "[...document.querySelectorAll('[data-value]')].map(one => one.textContent)"
    browser.until(f"{values}[4] === '8'")
    before = sum(console.get(f"/console/topics/{topic}/samples").json()["read_records_per_s"])
    console.get(f"/v1/topics/{topic}/partitions/0/records")
    until(
        lambda: (
            sum(console.get(f"/console/topics/{topic}/samples").json()["read_records_per_s"])
            > before
        )
    )
    browser.run("location.hash = '#/overview'")
    browser.until("document.querySelector('[data-chart=bytes] canvas')")
    assert console.delete("/v1/groups/charting").status_code == 204


def test_a_chart_shows_the_values_under_the_pointer_and_their_time_in_utc(
    browser: Chromium, console: Console, flights: str
) -> None:
    browser.call("Emulation.setTimezoneOverride", timezoneId="Asia/Tokyo")
    open_page(browser, console, "", heading="Topics")
    chart = "document.querySelector('[data-chart=lag] canvas')"
    browser.until(chart)
    caption = f"{chart}.closest('figure').querySelector('[data-at]').textContent"
    assert browser.run(caption) == "UTC"
    right, middle = browser.run(
        f"(({{ right, top, height }}) => [right, top + height / 2])"
        f"({chart}.parentElement.querySelector('.u-over').getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=right - 2, y=middle)
    browser.until(f"{caption}.endsWith(' UTC')")
    browser.call("Emulation.setTimezoneOverride", timezoneId="")
    samples = console.get("/console/samples").json()["at_ms"]
    times = {f"{datetime.fromtimestamp(ms // 1000, UTC):%H:%M:%S} UTC" for ms in samples}
    assert browser.run(caption) in times
    values = f"[...{chart}.closest('figure').querySelectorAll('[data-value]')]"
    lag, waiting = browser.run(f"{values}.map(one => one.textContent)")
    assert (lag[-1], waiting[-1]) == ("B", "s"), "how much is not in the bucket, and for how long"


def test_a_chart_ends_an_hour_ago(browser: Chromium, console: Console, flights: str) -> None:
    """Whatever the samples: here the machine was asleep for a night."""
    end = 1_372_939_200  # 12:00:00
    at = [end - 30_000, end - 1800, end - 10, end]
    measured = {name: [1.0] * len(at) for name in console.get("/console/samples").json()}
    samples = json.dumps(measured | {"at_ms": [1000 * s for s in at]})
    open_page(browser, console, "#/store", heading="Store")
    browser.run(f"""void (window.fetch = async (url) => new Response({json.dumps(samples)}))""")
    browser.run("location.hash = '#/overview'")
    chart = "document.querySelector('[data-chart=lag] .u-over')"
    browser.until(chart)
    left, middle = browser.run(
        f"(({{ left, top, height }}) => [left, top + height / 2])({chart}.getBoundingClientRect())"
    )
    browser.call("Input.dispatchMouseEvent", type="mouseMoved", x=left + 2, y=middle)
    caption = f"{chart}.closest('figure').querySelector('[data-at]').textContent"
    browser.until(f"{caption} !== 'UTC'")
    assert browser.run(caption) == "11:30:00 UTC"


def test_a_chart_is_drawn_from_the_second_sample_on(
    browser: Chromium, console: Console, flights: str
) -> None:
    """A single one would be an empty grid."""
    names = list(console.get("/console/samples").json())
    open_page(browser, console, "#/store", heading="Store")
    browser.run(f"""void (() => {{
        window.samples = [1];
        window.fetch = async (url) => {{
            const more = samples.filter((at) => at > url.split('after_ms=')[1]);
            const columns = Object.fromEntries({names}.map((name) => [name, more]));
            window.fetched = true;
            return {{ ok: true, json: async () => columns }};
        }};
    }})()""")
    browser.run("location.hash = '#/overview'")
    browser.until("window.fetched")
    assert browser.run("document.querySelectorAll('.chart-empty').length") == 3
    browser.run(f"samples.push(2); {TICK}")
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")


def test_samples_that_two_slow_requests_return_are_drawn_once(
    browser: Chromium, console: Console, flights: str
) -> None:
    measured = {name: [1.0] * 3 for name in console.get("/console/samples").json()}
    samples = json.dumps(measured | {"at_ms": [1000, 2000, 3000]})
    open_page(browser, console, "#/store", heading="Store")
    browser.run("""void (() => {
        window.held = [];
        window.fetch = () => new Promise((resolve) => held.push(resolve));
        const construct = (chart, given) => (window.drawn = new chart(...given));
        window.uPlot = new Proxy(uPlot, { construct });
    })()""")
    browser.run("location.hash = '#/overview'")
    browser.until("held.length >= 1")
    browser.run(TICK)
    browser.until("held.length >= 2")
    browser.run(f"held.forEach((give) => give({{ ok: true, json: async () => ({samples}) }}))")
    browser.until("window.drawn")
    assert browser.run("[...drawn.data[0]]") == [1, 2, 3]


def test_many_topics_are_paged_and_filtered(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        for number in range(120):
            console.topic(f"team-{number % 10}.service-{number:03}")
        browser.open(console.url)
        rows = "document.querySelectorAll('#topics tbody tr').length"
        browser.until(f"{rows} === 50")
        assert "Page 1 of 3" in browser.text()
        browser.press("n")
        browser.until("document.body.innerText.includes('Page 2 of 3')")
        browser.until(SETTLED)
        browser.press("/")
        browser.type("SERVICE-07")
        browser.until(f"{rows} === 10")
        browser.run(TICK)
        browser.until("document.activeElement.id === 'filter'")
        assert browser.run(rows) == 10
        browser.run("addEventListener('keydown', (event) => { window.pressed = event; })")
        browser.press("ArrowDown")
        assert browser.run("document.activeElement.textContent") == "team-0.service-070"
        assert browser.run("pressed.defaultPrevented"), "the page scrolls"


def test_topics_can_be_sorted_by_their_figures(browser: Chromium, tmp_path: Path) -> None:
    """All of them, not only those of the page; the chosen order outlasts a filter and a refresh."""
    with open_console(tmp_path, bucket=False) as console:
        for number in range(60):
            console.topic(f"{'b' if number % 2 else 'a'}-{number:02}")
        for number, count in ((7, 5), (31, 50), (58, 500)):
            console.produce(f"{'b' if number % 2 else 'a'}-{number:02}", *[{"value": "x"}] * count)
        open_page(browser, console, "", heading="Topics")
        browser.emulate(height=500)
        rows = "[...document.querySelectorAll('#topics tbody a')].map(one => one.textContent)"
        records = "document.querySelector('#sort-records')"
        browser.run(f"{records}.scrollIntoView()")
        browser.run(f"{records}.focus()")
        scrolled = browser.run("window.scrollY")
        assert scrolled > 0
        browser.press("Enter")
        browser.until(f"{records}?.parentElement.ariaSort === 'descending'")
        browser.until(SETTLED)
        assert browser.run(rows)[:4] == ["a-58", "b-31", "b-07", "a-00"]
        assert browser.run("document.activeElement.id") == "sort-records"
        assert browser.run("window.scrollY") == scrolled
        browser.run(TICK)
        browser.press("/")
        browser.type("b")
        browser.until(f"{rows}.join().startsWith('b-31,b-07,b-01,')")
        browser.press("Escape")
        browser.run(f"{records}.click()")
        browser.until(f"{records}?.parentElement.ariaSort === 'ascending'")
        browser.until(f"{rows}.slice(-2).join() === 'b-07,b-31'")
        browser.run("document.querySelector('#sort-name').click()")
        browser.until(f"{rows}.slice(-2).join() === 'b-57,b-59'")
        browser.run("document.querySelector('#sort-name').click()")
        browser.until(f"{rows}[0] === 'b-59'")
        browser.run("location.hash = '#/overview?sort=-hot'")
        browser.until(f"{rows}[0] === 'a-58'")
        browser.press("n")
        browser.until(f"{rows}.length === 10")
        assert browser.run(rows)[-1] == "b-59"
        browser.emulate(width=PHONE)
        assert browser.run(f"{records}.checkVisibility() && {records}.offsetWidth") > 20


def test_partitions_can_be_sorted_by_their_figures(browser: Chromium, tmp_path: Path) -> None:
    """All of them, not only those of the page; the chosen order outlasts a refresh."""
    with open_console(tmp_path, bucket=False) as console:
        topic = console.topic("wide", partitions=60)
        for number, count in ((7, 5), (58, 50)):
            url = f"/v1/topics/{topic}/partitions/{number}/records"
            console.post(url, json={"records": [{"value": "x"}] * count}).raise_for_status()
        open_page(browser, console, f"#/topics/{topic}", heading=topic)
        rows = "[...document.querySelectorAll('#partitions tbody a')].map(one => one.textContent)"
        assert browser.run(rows)[:3] == ["0", "1", "2"]
        browser.run("document.querySelector('#sort-hot').click()")
        browser.until(f"{rows}.slice(0, 4).join() === '58,7,0,1'")
        browser.until(SETTLED)
        browser.run(f"document.querySelector('#partitions').isOld = true; {TICK}")
        browser.until("!document.querySelector('#partitions').isOld")
        assert browser.run(rows)[:2] == ["58", "7"]
        browser.run("document.querySelector('#sort-hot').click()")
        browser.until(f"{rows}[0] === '0'")
        browser.press("n")
        browser.until(f"{rows}.slice(-2).join() === '7,58'")


def test_groups_can_be_sorted_by_their_lag(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        topic = console.topic("read")
        console.produce(topic, *[{"value": "x"}] * 9)
        for group, offset in (("ahead", 9), ("behind", 1), ("middle", 5)):
            offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": offset}]}
            console.put(f"/v1/groups/{group}/offsets", json=offsets).raise_for_status()
        open_page(browser, console, "#/groups", heading="Groups")
        rows = (
            "[...document.querySelectorAll('#groups tbody bdi')].map(one => one.textContent).join()"
        )
        assert browser.run(rows) == "ahead,behind,middle"
        browser.run("document.querySelector('#sort-lag').click()")
        browser.until(f"{rows} === 'behind,middle,ahead'")
        browser.emulate(width=PHONE)
        headings = "[...document.querySelectorAll('thead th')].filter(one => one.checkVisibility())"
        assert browser.run(f"{headings}.map(one => one.textContent)") == [
            "Group",
            "Members",
            "Partitions",
            "Lag",
        ]


# --- from page to page ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("address", "title"),
    [
        ("#/topics", "Topics · tierlog"),
        ("#/topics/", "Topics · tierlog"),
        ("#/topics/flights/", "flights · Partitions · tierlog"),
        ("#/topics/flights/partitions", "flights · Partitions · tierlog"),
        ("#/topics/flights/partitions/0", "flights partition 0 · Records · tierlog"),
        ("#/topics/flights/partitions/0/segments", "flights partition 0 · Segments · tierlog"),
    ],
)
def test_an_address_without_its_end_shows_the_page_above(
    browser: Chromium, console: Console, flights: str, address: str, title: str
) -> None:
    browser.open(f"{console.url}/{address}")
    browser.until(f"document.title === '{title}'")


def test_back_returns_to_the_filter_the_row_and_the_scroll_position(
    browser: Chromium, tmp_path: Path
) -> None:
    with open_console(tmp_path, bucket=False) as console:
        for number in range(60):
            console.topic(f"team-{number % 2}.service-{number:03}")
        open_page(browser, console, "", heading="Topics")
        browser.press("/")
        browser.type("team-1")
        browser.until("document.querySelectorAll('#topics tbody tr').length === 30")
        browser.press("Escape")
        browser.run("document.querySelector('[id=\"topic-team-1.service-041\"]').focus()")
        scrolled = browser.run("window.scrollY")
        assert scrolled > 0
        browser.press("Enter")
        browser.until(f"{HEADING}.textContent === 'team-1.service-041'")
        browser.until(SETTLED)
        assert browser.run("window.scrollY") == 0
        browser.run("history.back()")
        browser.until("document.activeElement.id === 'topic-team-1.service-041'")
        browser.until(f"window.scrollY === {scrolled}")
        assert browser.run("document.querySelector('#filter').value") == "team-1"
        assert browser.run("document.querySelectorAll('#topics tbody tr').length") == 30


def test_a_slow_page_that_was_left_delays_no_other(
    browser: Chromium, console: Console, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answerable = threading.Event(), threading.Event()

    def slow(*_: object, **__: object) -> None:
        asked.set()
        answerable.wait(60)
        raise StoreUnavailable("slow")

    monkeypatch.setattr(topic_pages, "segment_page", slow)
    browser.expected += ("htmx:",)
    open_page(browser, console, f"#/topics/{flights}/partitions/0/tail", heading=flights)
    browser.run(f"location.hash = '#/topics/{flights}/partitions/0/segments'")
    assert asked.wait(30)
    loading = (
        "getComputedStyle(document.querySelector('#view'), '::after').content.includes('Load')"
    )
    assert browser.run(loading)
    try:
        browser.run("location.hash = '#/store'")
        browser.until(f"{HEADING}.textContent === 'Store'")
        assert not browser.run(loading)
    finally:
        answerable.set()


def test_a_late_refresh_does_not_undo_the_filter(
    browser: Chromium, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answerable = threading.Event(), threading.Event()
    unpatched = topic_pages.topic_page

    def slow_without_filter(topics: Any, *, wanted: str, **rest: Any) -> topic_pages.TopicPage:
        if not wanted:
            asked.set()
            answerable.wait(60)
        return unpatched(topics, wanted=wanted, **rest)

    with open_console(tmp_path, bucket=False) as console:
        for name in ("apples", "pears"):
            console.topic(name)
        open_page(browser, console, "", heading="Topics")
        monkeypatch.setattr(topic_pages, "topic_page", slow_without_filter)
        browser.run(TICK)
        assert asked.wait(30)
        rows = (
            "[...document.querySelectorAll('#topics tbody a')].map(one => one.textContent).join()"
        )
        browser.press("/")
        browser.type("pea")
        browser.until(f"{rows} === 'pears'")
        url = f"{console.url}/console/topics?filter=&sort=name&page=1"
        ended = f"performance.getEntriesByName('{url}').length"
        before = browser.run(ended)
        answerable.set()
        browser.until(f"{ended} > {before}")
        browser.run("new Promise(requestAnimationFrame)")
        assert browser.run(rows) == "pears"


# --- live ---------------------------------------------------------------------------------------


def test_the_tail_shows_records_as_they_arrive(browser: Chromium, console: Console) -> None:
    topic = console.topic("followed")
    open_page(browser, console, f"#/topics/{topic}/partitions/0/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    rows = "document.querySelectorAll('[data-tail-rows] tr').length"
    console.produce(topic, {"key": "k", "value": "first"}, {"value_base64": "/wA="})
    browser.until(f"{rows} === 2")
    assert "first" in browser.text()
    assert "base64 /wA=" in browser.text()
    browser.run("document.querySelector('[data-tail-pause]').click()")
    console.produce(topic, {"value": "while paused"})
    browser.until("document.querySelector('[data-tail]').tail.received === 3")
    browser.until("document.body.innerText.includes('3 received, 1 since the pause')")
    assert browser.run(rows) == 2
    browser.run("document.querySelector('[data-tail-pause]').click()")
    browser.until(f"{rows} === 3")
    assert "while paused" in browser.text()


def test_the_filter_of_a_tail_finds_what_is_shown_and_what_arrives(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("sifted")
    open_page(browser, console, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent === 'live'")
    console.produce(topic, {"key": "k", "value": "an Error"}, {"value": "all well"})
    received = "document.querySelector('[data-tail-count]').textContent"
    browser.until(f"{received} === '2 received'")
    shown = """[...document.querySelectorAll('[data-tail-rows] tr:not([hidden]) a')]
        .map(one => one.textContent).join()"""
    browser.press("/")
    browser.type("error")
    browser.until(f"{shown} === '0'")
    console.produce(topic, {"value": "fine"}, {"key": "ERRORS"}, {"value": "x" * 5000 + "error"})
    browser.until(f"{received} === '5 received'")
    assert browser.run(shown) == "4,3,0"
    heights = "[...document.querySelectorAll('[data-tail-rows] tr')].map(row => row.offsetHeight)"
    longest, line, *_ = browser.run(heights)
    assert longest < 7 * line, "a long value takes six lines; its offset opens the whole"
    browser.type("s none has")
    browser.until("document.body.innerText.includes('No record with this text so far')")
    browser.run("document.querySelector('[data-tail-filter]').select()")
    browser.type("x")
    browser.press("Escape")
    browser.press("j")
    browser.press("Enter")
    browser.until("document.querySelector('summary')?.id === 'record-4'")


def test_a_tail_that_an_error_stopped_can_be_connected_again_once(
    browser: Chromium, console: Console
) -> None:
    browser.expected += ("status of 404",)
    topic = console.topic("interrupted")
    open_page(browser, console, f"#/topics/{topic}/tail", heading=topic)
    state = "document.querySelector('[data-tail-state]').textContent"
    button = "document.querySelector('[data-tail-pause]')"
    browser.until(f"{state} === 'live'")
    console.delete(f"/v1/topics/{topic}")
    browser.until(f"{state} === 'stopped'")
    console.topic(topic)
    assert browser.run(f"{button}.textContent") == "Reconnect"
    browser.run(f"{button}.click(), {button}.click()")
    browser.until(f"{state} === 'paused' && {button}.textContent === 'Resume'")
    browser.run(f"{button}.click()")
    console.produce(topic, {"value": "seen again"})
    browser.until("document.body.innerText.includes('seen again')")
    assert browser.run("document.querySelector('[data-tail-count]').textContent") == "1 received"


def test_a_flood_keeps_only_the_newest_rows(browser: Chromium, console: Console) -> None:
    topic = console.topic("flood")
    open_page(browser, console, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    for start in range(0, 3000, 1000):
        console.produce(topic, *({"value": str(n)} for n in range(start, start + 1000)))
    browser.until("document.body.innerText.includes('3\u202f000 received')")
    assert browser.run("document.querySelectorAll('[data-tail-rows] tr').length") == 500
    first = "document.querySelector('[data-tail-rows] td.text:last-child').textContent"
    assert browser.run(first) == "2999"


def test_a_paused_tail_holds_few_large_records(browser: Chromium, console: Console) -> None:
    topic = console.topic("paused")
    open_page(browser, console, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    browser.run("document.querySelector('[data-tail-pause]').click()")
    for n in range(12):
        console.produce(topic, {"value": f"{n} " + "x" * 900_000})
    tail = "document.querySelector('[data-tail]').tail"
    browser.until(f"{tail}.received === 12")
    assert browser.run(f"{tail}.waiting.length") == 9, "at most 8 Mi characters"
    browser.run("document.querySelector('[data-tail-pause]').click()")
    browser.until("document.querySelectorAll('[data-tail-rows] tr').length === 9")
    first = "document.querySelector('[data-tail-rows] td.text:last-child').textContent.slice(0, 3)"
    assert browser.run(first) == "11 "


def test_leaving_the_tail_closes_its_stream(browser: Chromium, console: Console) -> None:
    topic = console.topic("left")
    open_page(browser, console, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    partition = console.broker.partition(topic, 0)
    until(lambda: partition._waiters._waiting)
    browser.run("location.hash = '#/overview'")
    until(lambda: not partition._waiters._waiting)


# --- hostile input ------------------------------------------------------------------------------

ATTACKS = (
    "<script>window.owned = 1</script>",
    "<img src=x onerror='window.owned = 1'>",
    '"><svg onload="window.owned = 1">',
    "</pre></details></main><h1>gone</h1>",
    "<div hx-get='/v1/topics' hx-trigger='load' hx-delete='/v1/topics/hostile'>",
    "{{ 7 * 7 }}{% raw %}",
    "javascript:window.owned = 1",
    "\u202egnp.exe\u0000\u001b[31m",
)


@pytest.fixture(scope="module")
def hostile(console: Console) -> str:
    topic = console.topic("hostile")
    console.produce(
        topic,
        *(
            {"key": text, "value": text, "headers": [{"name": text, "value": text}]}
            for text in ATTACKS
        ),
        *({"value": {text: [text]}} for text in ATTACKS),
    )
    return topic


def test_records_never_become_markup(browser: Chromium, console: Console, hostile: str) -> None:
    open_page(browser, console, f"#/topics/{hostile}/partitions/0/records", heading=hostile)
    browser.until(f"{RECORDS} === {2 * len(ATTACKS)}")
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    shown = browser.run("document.querySelector('#view').textContent")
    for attack in ATTACKS[:-1]:
        assert shown.count(attack) >= 5, attack
    assert "⟨U+202E⟩gnp.exe␀␛[31m" in shown
    assert browser.run("document.querySelectorAll('#view script, #view img, #view h1').length") == 1
    assert browser.run("window.owned") is None
    assert console.get(f"/v1/topics/{hostile}").status_code == 200


def test_tailed_records_never_become_markup(browser: Chromium, console: Console) -> None:
    hostile = console.topic("hostile-tail")
    open_page(browser, console, f"#/topics/{hostile}/tail", heading=hostile)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    console.produce(hostile, *({"key": text, "value": text} for text in ATTACKS))
    browser.until(f"document.querySelectorAll('[data-tail-rows] tr').length >= {len(ATTACKS)}")
    shown = browser.run("document.querySelector('[data-tail-rows]').textContent")
    for attack in ATTACKS[:-1]:
        assert attack in shown
    assert "\u202e" not in shown
    rest = ":not(tr, td, bdi, time, td.number > a)"
    inside = f"document.querySelectorAll('[data-tail-rows] {rest}').length"
    assert browser.run(inside) == 0
    assert browser.run("window.owned") is None


@pytest.mark.parametrize(
    "path",
    [
        "#/../v1/topics/page/partitions/0/records",
        "#/%2e%2e/v1/topics/page/partitions/0/segments/0",
        "#/topics/../../v1/topics/page/partitions/0/segments/0",
        "#//foreign.example/x",
        "#/..%2fv1/topics",
        "#/\\foreign.example",
    ],
)
def test_a_link_can_show_only_fragments_of_the_console(
    browser: Chromium, console: Console, hostile: str, path: str
) -> None:
    if not console.get("/v1/topics/page").is_success:
        console.topic("page")
        console.produce("page", {"value": "<h1>bytes of a stranger</h1>"})
    browser.expected += ERROR_LOGS
    browser.open(f"{console.url}/{path}")
    browser.until("document.querySelector('#view')?.childElementCount")
    assert "bytes of a stranger" not in browser.text()
    requested = [url for url in browser.requested if url.startswith("http")]
    assert all(url.startswith(f"{console.url}/") for url in requested)
    assert not any("/v1/" in url for url in requested)


def test_a_hostile_filter_is_shown_as_text(
    browser: Chromium, console: Console, flights: str
) -> None:
    query = "%3Cimg%20src%3Dx%20onerror%3D%22window.owned%3D1%22%3E"
    open_page(browser, console, f"#/overview?filter={query}", heading="Topics")
    assert '<img src=x onerror="window.owned=1">' in browser.text()
    assert browser.run("window.owned") is None
    browser.run(TICK)
    time.sleep(0.2)
    assert '<img src=x onerror="window.owned=1">' in browser.text()


@pytest.mark.parametrize("path", ["/", "/console/overview", "/console/static/console.js"])
def test_every_response_has_the_security_policy(console: Console, path: str) -> None:
    response = console.get(path)
    assert response.status_code == 200
    assert "script-src 'self'" in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"
    assert console.head(path).headers["content-length"] == response.headers["content-length"]


@pytest.mark.parametrize(
    "path",
    [
        "/console/static/..%2fpages.py",
        "/console/static/README.md",
        "/console/static/%2e%2e/pages.py",
        "/console/templates/shell.html",
        "/console/topics/none",
        "/console/topics/none/partitions/0/records",
    ],
)
def test_unknown_paths_are_problems(console: Console, path: str) -> None:
    response = console.get(path)
    assert response.status_code == 404
    assert response.headers["content-type"] == "application/problem+json"


def test_static_files_are_revalidated_by_etag(console: Console) -> None:
    first = console.get("/console/static/htmx.min.js")
    again = console.get(
        "/console/static/htmx.min.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert again.status_code == 304
    assert again.content == b""


# --- tokens -------------------------------------------------------------------------------------


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[tuple[Console, Path]]:
    file = tmp_path / "tokens.json"
    admin = create_token(file, "admin", scopes=(Scope.ADMIN,), now_ms=1)
    with open_console(tmp_path, bucket=False, tokens=file) as console:
        console.headers["authorization"] = f"Bearer {admin}"
        console.topic("orders.eu")
        console.topic("private")
        yield console, file


def test_the_page_asks_for_a_token(browser: Chromium, secured: tuple[Console, Path]) -> None:
    console, file = secured
    browser.expected += ERROR_LOGS
    token = create_token(file, "console", scopes=(Scope.READ,), now_ms=1)
    browser.open(console.url)
    enter_token(browser, "tierlog_guess")
    browser.until("!document.querySelector('[data-token-refusal]').hidden")
    assert "private" not in browser.text()
    enter_token(browser, token)
    browser.until("document.querySelector('#topic-private')")
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
    assert browser.run("sessionStorage.getItem('tierlog.token')") == token
    assert browser.run("document.cookie + JSON.stringify(localStorage)") == "{}"
    browser.run("location.hash = '#/topics/private/tail'")
    browser.until("document.querySelector('[data-tail-state]')?.textContent.startsWith('live')")
    console.produce("private", {"value": "seen with a token"})
    browser.until("document.body.innerText.includes('seen with a token')")
    browser.run("document.querySelector('[data-forget]').click()")
    browser.until("document.querySelector('#ask-token').open")
    assert "seen with a token" not in browser.text()
    assert browser.run("sessionStorage.getItem('tierlog.token')") is None


def test_a_token_with_a_topic_prefix_sees_no_other_topics(
    browser: Chromium, secured: tuple[Console, Path]
) -> None:
    console, file = secured
    browser.expected += ERROR_LOGS
    token = create_token(file, "eu", scopes=(Scope.READ,), topics="orders.", now_ms=1)
    browser.open(console.url)
    enter_token(browser, token)
    browser.until("document.querySelector('[id=\"topic-orders.eu\"]')")
    assert "private" not in browser.text()
    assert "On disk" in browser.text()
    assert "Chunk cache" not in browser.text()
    browser.run("location.hash = '#/topics/private'")
    browser.until("document.querySelector('#view > .refusal')")
    assert "orders." in browser.text()
    headers = {"authorization": f"Bearer {token}"}
    for path in ("summary", "samples", "store", "topics/private/tail"):
        assert httpx2.get(f"{console.url}/console/{path}", headers=headers).status_code == 403


# --- accessibility -------------------------------------------------------------------------------

PAGES = (
    "",
    "#/groups",
    "#/transactions",
    "#/store",
    "#/topics/flights",
    "#/topics/flights/search?text=tower&limit=5",
    "#/topics/flights/tail",
    "#/topics/flights/partitions/0/records?at=earliest",
    "#/topics/flights/partitions/0/tail",
    "#/topics/flights/partitions/0/segments",
    "#/topics/flights/partitions/0/manifest",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_fits_a_phone_and_labels_its_controls(
    browser: Chromium, console: Console, flights: str, page: str
) -> None:
    for width in (320, PHONE):
        browser.emulate(width=width, height=844)
        open_page(browser, console, page, heading="")
        browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        # Charts adopt the new width a frame later.
        browser.until(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
    unlabelled = """[...document.querySelectorAll(
            'input:not([type=hidden]), select, button, a, svg[role], img')]
        .filter(one => !(one.labels?.length || one.textContent.trim() || one.ariaLabel
                         || one.hasAttribute('alt'))).map(one => one.outerHTML)"""
    assert browser.run(unlabelled) == []
    small = """[...document.querySelectorAll('[data-row]')].map(one => one.getBoundingClientRect())
        .filter(({ width, height }) => Math.min(width, height) < 24).length"""
    assert browser.run(small) == 0, "what is smaller is hard to hit (WCAG 2.5.8)"
    assert browser.run("document.querySelectorAll('h1').length") == 1
    ids = "[...document.querySelectorAll('[id]')].map(one => one.id)"
    assert browser.run(f"new Set({ids}).size === {ids}.length")
    requested = [url for url in browser.requested if url.startswith("http")]
    assert requested
    assert all(url.startswith(f"{console.url}/") for url in requested)


def test_the_color_scheme_follows_the_system(
    browser: Chromium, console: Console, flights: str
) -> None:
    found = []
    for dark in (False, True):
        browser.emulate(dark=dark)
        open_page(browser, console, "", heading="Topics")
        browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
        found.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert found == ["rgb(247, 247, 245)", "rgb(20, 23, 27)"]


def test_records_can_be_reached_by_keyboard_only(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_page(browser, console, "", heading="Topics")
    browser.press("/")
    browser.type(flights)
    browser.until("document.querySelectorAll('#topics tbody tr').length === 1")
    browser.press("Escape")
    browser.press("j")
    browser.press("Enter")
    browser.until("document.querySelector('#partition-0')")
    browser.press("j")
    browser.press("Enter")
    browser.until(RECORDS)
    browser.press("p")
    browser.until("location.hash.includes('at=')")
    end = console.get(f"/v1/topics/{flights}/partitions/0/offsets").json()["high_watermark"]
    browser.until(f"document.querySelector('summary')?.id === 'record-{end - 100}'")
    browser.press("j")
    browser.press("j")
    browser.press("Enter")
    browser.until("document.querySelectorAll('details[open]').length === 1")
    opened = browser.run("document.querySelector('details[open] pre:last-of-type').innerText")
    assert opened
    assert "tower" in browser.run("document.querySelector('details[open]').innerText")
    browser.press("?")
    browser.until("document.querySelector('#help').open")
    browser.press("Escape")
    browser.until("!document.querySelector('#help').open")
    browser.press("u")
    browser.until("document.querySelector('#partition-0')")
    browser.press("u")
    browser.until("document.querySelector('#filter')")


def test_figures_are_refreshed_without_taking_the_focus(
    browser: Chromium, console: Console, flights: str
) -> None:
    open_page(browser, console, f"#/topics/{flights}", heading=flights)
    browser.press("j")
    assert browser.run("document.activeElement.id") == "partition-0"
    end = console.get(f"/v1/topics/{flights}/partitions/0/offsets").json()["high_watermark"]
    console.produce(flights, {"value": "one more"})
    browser.run(TICK)
    browser.until(f"document.body.innerText.includes('{end + 1}')")
    assert browser.run("document.activeElement.id") == "partition-0"


def test_a_refresh_keeps_the_focus_the_scroll_position_and_the_selection(
    browser: Chromium, console: Console, flights: str
) -> None:
    offsets = [{"topic": flights, "partition": 0, "offset": 10}]
    assert console.put("/v1/groups/reader/offsets", json={"offsets": offsets}).is_success

    def refresh(part: str) -> None:
        browser.run(f"document.querySelector('{part}').isOld = true")
        browser.run(TICK)
        browser.until(f"!document.querySelector('{part}').isOld")

    open_page(browser, console, "#/groups", heading="Groups")
    browser.run("document.querySelector('#group-reader').focus()")
    refresh("#groups")
    assert browser.run("document.activeElement.id") == "group-reader"

    browser.run("getSelection().selectAllChildren(document.querySelector('#groups td'))")
    responses = browser.run("performance.getEntriesByType('resource').length")
    browser.run(TICK)
    browser.until(f"performance.getEntriesByType('resource').length > {responses}")
    assert browser.run("getSelection().toString()") == "classic"
    browser.run("getSelection().empty()")
    refresh("#groups")

    browser.emulate(width=720)
    open_page(browser, console, f"#/topics/{flights}", heading=flights)
    scrolled = "document.querySelector('#partitions .scroll').scrollLeft"
    browser.run(f"{scrolled} = 7")
    assert browser.run(scrolled) == 7
    refresh("#partitions")
    assert browser.run(scrolled) == 7


# --- faults -------------------------------------------------------------------------------------


def test_a_store_that_is_down_is_reported(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path) as console:
        topic = console.two_tiers("colder")
        console.set_down(True)
        console.post(f"/v1/topics/{topic}/offload")
        records = f"#/topics/{topic}/partitions/0/records"
        open_page(browser, console, f"{records}?at=earliest", heading=topic)
        assert browser.run("document.querySelector('#view .refusal').textContent")
        browser.run("[...document.querySelectorAll('a.button')].at(-1).click()")
        browser.until("document.querySelector('#record-200')")
        browser.run("[...document.querySelectorAll('.tabs a')].at(-1).click()")
        browser.until("document.querySelector('.tabs [aria-current]').textContent === 'Manifest'")
        browser.until(SETTLED)
        shown = browser.run("document.querySelector('#view .refusal').textContent")
        assert shown.startswith("The object store does not respond: ")
        open_page(browser, console, "#/store", heading="Store")
        shown = browser.run("document.querySelector('#store .trouble').textContent")
        assert shown.startswith("store unavailable: ")


def test_a_damaged_partition_is_reported_beside_the_others(
    browser: Chromium, tmp_path: Path
) -> None:
    with open_console(tmp_path, bucket=False) as console:
        console.topic("t", partitions=3)
        for partition in range(3):
            console.produce("t", *({"value": f"{n}", "partition": partition} for n in range(5)))
    log = tmp_path / "data" / "t-1" / f"{0:020}.log"
    flip(log, -1)  # in flushed data: not the effect of a crash
    (tmp_path / "data" / ".kafka_cleanshutdown").unlink()
    notice = "document.querySelector('.trouble[role=alert]')"
    with open_console(tmp_path, bucket=False) as console:
        open_page(browser, console, "", heading="Topics")
        browser.until(f"{notice}?.textContent.includes('t-1')")
        assert "1 damaged" in browser.text()
        browser.run("document.querySelector('#topic-t').click()")
        browser.until(f"{HEADING}.textContent.trim() === 't'")
        browser.until(SETTLED)
        text = browser.run(f"{notice}.textContent")
        assert text.startswith("Partition 1: t-1/00000000000000000000.log")
        assert "tierlog storage repair" in text
        assert str(tmp_path) not in browser.text()  # the data folder is not disclosed
        rows = "[...document.querySelectorAll('[data-row][id]')].map(row => row.id)"
        assert browser.run(rows) == ["partition-0", "partition-1", "partition-2"]
        assert "1 damaged not served" in " ".join(browser.text().split())
        browser.run("document.querySelector('#partitions').isOld = true")
        browser.run(TICK)
        browser.until("!document.querySelector('#partitions').isOld")
        assert browser.run(f"{rows}.length === 3 && Boolean({notice})")
        browser.expected += ("htmx:", "status of 5", "Error Code 5")
        browser.run("document.querySelector('#partition-1').click()")
        browser.until("document.querySelector('#view > .refusal')")
        assert browser.run("document.title") == "A local file fails its check · tierlog"
        assert "t-1/00000000000000000000.log" in browser.text()
        browser.run("location.hash = '#/topics/t/tail'")
        state = "document.querySelector('[data-tail-state]')?.textContent"
        browser.until(f"{state} === 'refused for now; trying again'")
        assert "t-1/00000000000000000000.log" in browser.run(
            "document.querySelector('#notice').innerText"
        )
        browser.run("document.querySelector('#view [data-up]').click()")
        browser.until(f"{HEADING}.textContent.trim() === 't'")
        browser.until("document.querySelector('#partitions')")
        browser.emulate(width=PHONE)
        browser.until("document.documentElement.scrollWidth <= innerWidth")


def test_a_partition_taken_over_by_another_broker_is_reported(
    browser: Chromium, tmp_path: Path
) -> None:
    notice = "document.querySelector('#partitions .trouble[role=alert]')"
    with open_console(tmp_path) as console:
        console.two_tiers("flights")
        with open_console(restored(tmp_path)) as other:
            other.post("/v1/topics/flights/offload", params={"wait_ms": 20_000})
        open_page(browser, console, "#/topics/flights", heading="flights")
        assert not browser.run(notice)
        console.broker.background.fence_checker.run_round()
        browser.run(TICK)
        browser.until(notice)
        text = browser.run(f"{notice}.textContent")
        assert text.startswith("Partition 0: leadership lost: flights-0, manifest version ")
        assert browser.run("document.querySelector('tbody th').innerText") == "0 leadership lost"
        assert browser.run("document.querySelector('tbody tr').offsetHeight") < 60
        open_page(browser, console, "#/overview", heading="Topics")
        assert "1 leadership lost" in browser.run("document.querySelector('tbody th').innerText")
        open_page(browser, console, "#/topics/flights/partitions/0/segments", heading="flights")
        assert "leadership lost: " in browser.run("document.querySelector('#head').innerText")


def test_offsets_are_shown_without_separators(console: Console) -> None:
    topic = console.topic("many")
    for _ in range(2):
        console.produce(topic, *[{"value": "x"}] * 600)
    page = f"/console/topics/{topic}"
    shown = [
        console.get(page + part).text for part in ("", "/partitions/0/records?at=1100&limit=10")
    ]
    assert ["1200" in text for text in shown] == [True, True]
    assert not [text for text in shown if "1\u202f" in text]
    assert "1\u202f200" in console.get("/console/overview").text, "counts have separators"


def test_only_a_few_of_a_thousand_problems_are_listed(
    console: Console, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E.g. after another broker took all partitions over: the page still shows the topics."""
    reasons = [f"leadership lost: t-{number}" for number in range(1000)]
    monkeypatch.setattr(console.broker, "readiness", lambda: (reasons, []))
    shown = console.get("/console/overview").text
    assert shown.count("leadership lost") == shown.count('role="alert"') == 5
    assert "and 995 more" in shown
    monkeypatch.setattr(console.broker, "readiness", lambda: (reasons[:5], []))
    assert "more; <code>GET /readyz" not in console.get("/console/summary").text


def test_the_header_of_a_partition_is_refreshed_during_its_tail(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("renewed")
    open_page(browser, console, f"#/topics/{topic}/partitions/0/tail", heading=topic)
    watermark = "document.querySelectorAll('#head dd')[2].textContent"
    assert browser.run(watermark) == "0"
    browser.until("document.querySelector('[data-tail-state]').textContent === 'live'")
    console.produce(topic, {"value": ""}, {"key": ""})
    browser.run(TICK)
    browser.until(f"{watermark} === '2'")
    browser.until("document.querySelectorAll('[data-tail-rows] tr').length === 2")
    cells = "[...document.querySelectorAll('[data-tail-rows] .text')].map(one => one.textContent)"
    assert browser.run(cells) == ["empty", "null", "null", "empty"]


def test_a_long_key_takes_one_line(browser: Chromium, console: Console) -> None:
    topic = console.topic("long")
    console.produce(topic, {"key": "k", "value": ""}, {"key": "k" * 5000, "value": ""})
    wide = {"value": "", "headers": [{"name": "n", "value": "v" * 5000}]}
    console.produce(topic, wide)
    open_page(browser, console, f"#/topics/{topic}/partitions/0/records", heading=topic)
    browser.run("document.querySelector('#record-2').click()")
    header = "[...document.querySelectorAll('.headers bdi')].map(one => one.offsetTop)"
    name, value = browser.run(header)
    assert name - value < 8, "the name of a header stands beside the first line of its value"
    heights = "[...document.querySelectorAll('summary.line')].map(one => one.offsetHeight)"
    short, long, _ = browser.run(heights)
    assert long < short + 8
    assert "empty" in browser.text()


def test_a_broker_that_is_down_is_reported_until_it_is_back(
    browser: Chromium, tmp_path: Path
) -> None:
    browser.expected += ["ERR_", "htmx:"]
    with open_console(tmp_path, bucket=False) as console:
        console.topic("hello")
        open_page(browser, console, "", heading="Topics")
    browser.run(TICK)
    browser.until("document.querySelector('#notice').innerText.includes('does not respond')")
    assert "hello" in browser.text()


def test_a_page_that_got_no_response_is_requested_again(
    browser: Chromium, console: Console, flights: str
) -> None:
    """Not only the parts of the page that is still shown, under the address of another."""
    browser.expected += ["ERR_", "htmx:"]
    open_page(browser, console, "#/overview", heading="Topics")
    browser.call("Network.setBlockedURLs", urls=["*/console/*"])
    browser.run(f"location.hash = '#/topics/{flights}'")
    browser.until("document.querySelector('#notice').innerText.includes('does not respond')")
    browser.call("Network.setBlockedURLs", urls=[])
    browser.until(f"{HEADING}.textContent === '{flights}'")
    assert browser.run("document.querySelector('#notice').hidden")


def restored_flights(tmp_path: Path) -> Path:
    """A data folder restored from the bucket of another broker."""
    with open_console(tmp_path) as console:
        console.two_tiers("flights")
    return restored(tmp_path)


def restored(tmp_path: Path) -> Path:
    new = tmp_path / "new"
    options = RestoreOptions(data_dir=new / "data", gap=1_000_000_000, clock=lambda: 0)
    restore(open_store(f"file://{tmp_path / 'bucket'}"), options)
    (new / "bucket").symlink_to(tmp_path / "bucket")
    return new


def test_the_newest_page_after_a_restore_is_below_the_gap(tmp_path: Path) -> None:
    with open_console(restored_flights(tmp_path)) as console:
        newest = console.get("/console/topics/flights/partitions/0/records?limit=20").text
        assert all(f"key {n}<" in newest for n in range(180, 200))
        console.produce("flights", {"key": "after"})
        newest = console.get("/console/topics/flights/partitions/0/records?limit=20").text
        assert (">after<" in newest, "?at=180&amp;" in newest) == (True, True)


def test_the_records_of_a_compacted_topic_are_at_most_its_offsets(console: Console) -> None:
    for name, policy in (("kept", "delete"), ("compacted", "compact,delete")):
        console.produce(console.topic(name, cleanup_policy=policy), *[{"key": "k"}] * 30)
    listed = console.get("/console/topics", params={"filter": "compacted"}).text
    assert '<td class="number" data-label="Records">up to 30</td>' in listed
    console.topic("compacted-empty", cleanup_policy="compact")
    listed = console.get("/console/topics", params={"filter": "compacted-empty"}).text
    assert '<td class="number" data-label="Records">0</td>' in listed
    listed = console.get("/console/topics", params={"filter": "kept"}).text
    assert '<td class="number" data-label="Records">30</td>' in listed


def test_records_are_counted_without_the_gap_of_a_restore(tmp_path: Path) -> None:
    with open_console(restored_flights(tmp_path)) as console:
        console.produce("flights", {"key": "after"})
        overview = console.get("/console/overview").text
        assert '<td class="number" data-label="Records">201</td>' in overview
