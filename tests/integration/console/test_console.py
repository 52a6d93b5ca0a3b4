import dataclasses
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from api.http.access.grants import Scope
from api.http.access.tokens import create_token
from broker.repair.restore import RestoreOptions, restore
from cold_tier.open import open_store
from cold_tier.store_ledger import FREE, PriceTable
from tests.fakes.damage import flip
from tests.fakes.waiting import until
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE, House, open_house

TICK = "document.body.dispatchEvent(new CustomEvent('tick'))"
RECORDS = "document.querySelectorAll('.list details').length"
SETTLED = "!document.querySelector('#view').hasAttribute('aria-busy')"
REFUSALS = ("htmx:", "status of 4", "Error Code 4")  # what a browser logs of them
HEADING = "document.querySelector('#view h1')"


@pytest.fixture(scope="module")
def flights(house: House) -> str:
    return house.two_tiers("flights")


def shown_at(browser: Chromium, house: House, path: str, *, heading: str) -> None:
    browser.open(f"{house.url}/{path}")
    browser.until(f"{HEADING}?.textContent.includes('{heading}')")
    browser.until(SETTLED)


# --- what is there ------------------------------------------------------------------------------


def test_an_empty_broker_shows_the_first_commands(browser: Chromium, tmp_path: Path) -> None:
    with open_house(tmp_path, bucket=False) as house:
        shown_at(browser, house, "", heading="Topics")
        assert f"tierlog topic create hello --server {house.url}" in browser.text()
        assert "no bucket" in browser.text()
        house.topic("hello")
        browser.run(TICK)
        browser.until("document.querySelector('#topic-hello')")
        browser.until("document.querySelector('[data-chart=bytes] canvas')")


def test_both_tiers_are_drawn_to_scale(browser: Chromium, house: House, flights: str) -> None:
    shown_at(browser, house, f"#/topics/{flights}", heading=flights)
    now = house.get(f"/v1/topics/{flights}/partitions/0/offsets").json()
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
    browser: Chromium, house: House, flights: str
) -> None:
    records = f"#/topics/{flights}/partitions/0/records"
    shown_at(browser, house, f"{records}?at=earliest&limit=10", heading=flights)
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


def test_an_offset_that_cannot_be_read_is_an_error_next_to_the_form(
    browser: Chromium, house: House, flights: str
) -> None:
    shown_at(browser, house, f"#/topics/{flights}/partitions/0/records?at=90000", heading=flights)
    assert "above the high watermark" in browser.text()
    assert browser.run("document.querySelector('input[name=at]').value") == "90000"


def test_segments_and_manifest_versions(browser: Chromium, house: House, flights: str) -> None:
    shown_at(browser, house, f"#/topics/{flights}/partitions/0/segments", heading=flights)
    listed = house.get(f"/v1/topics/{flights}/partitions/0/segments").json()["segments"]
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


def test_the_requests_to_the_store_and_their_cost(
    browser: Chromium, house: House, flights: str
) -> None:
    shown_at(browser, house, "#/store", heading="Store")
    text = browser.text()
    assert "offload" in text
    assert "$0." in text
    assert "list prices of S3" in text


@pytest.mark.parametrize("prices", [FREE, PriceTable(put_per_1000=3.0)], ids=["free", "told"])
def test_the_store_page_names_the_source_of_its_prices(
    house: House, flights: str, monkeypatch: pytest.MonkeyPatch, prices: PriceTable
) -> None:
    settings = dataclasses.replace(house.broker.settings, prices=prices)
    monkeypatch.setattr(house.broker, "settings", settings)
    page = house.get("/console/store").text
    assert "S3 Standard" not in page
    free = prices == FREE
    assert ("costs nothing" in page, "a month" in page) == (free, not free)


def test_groups_show_their_lag(browser: Chromium, house: House, flights: str) -> None:
    offsets = [{"topic": flights, "partition": 0, "offset": 150}]
    made = house.put("/v1/groups/a<b>b/offsets".replace("<", "%3C"), json={"offsets": offsets})
    assert made.status_code == 204
    shown_at(browser, house, "#/groups", heading="Groups")
    (told,) = house.get("/v1/groups/a%3Cb%3Eb").json()["offsets"]
    assert f"a<b>b lag {told['lag']}" in browser.text()


def test_throughput_is_drawn_over_time(browser: Chromium, house: House, flights: str) -> None:
    shown_at(browser, house, "", heading="Topics")
    for _ in range(3):
        house.produce(flights, {"value": "more"})
        time.sleep(0.12)
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
    measured = house.get("/console/samples").json()
    assert max(measured["produced_records_per_s"]) > 0
    assert len({len(column) for column in measured.values()}) == 1


def test_many_topics_are_paged_and_filtered(browser: Chromium, tmp_path: Path) -> None:
    with open_house(tmp_path, bucket=False) as house:
        for number in range(120):
            house.topic(f"team-{number % 10}.service-{number:03}")
        browser.open(house.url)
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


# --- live ---------------------------------------------------------------------------------------


def test_the_tail_shows_records_as_they_arrive(browser: Chromium, house: House) -> None:
    topic = house.topic("followed")
    shown_at(browser, house, f"#/topics/{topic}/partitions/0/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    rows = "document.querySelectorAll('[data-tail-rows] tr').length"
    house.produce(topic, {"key": "k", "value": "first"}, {"value_base64": "/wA="})
    browser.until(f"{rows} === 2")
    assert "first" in browser.text()
    assert "base64 /wA=" in browser.text()
    browser.run("document.querySelector('[data-tail-pause]').click()")
    house.produce(topic, {"value": "while paused"})
    browser.until("document.querySelector('[data-tail]').tail.seen === 3")
    browser.run("new Promise(requestAnimationFrame)")  # in which it would be drawn
    assert browser.run(rows) == 2
    browser.run("document.querySelector('[data-tail-pause]').click()")
    browser.until(f"{rows} === 3")
    assert "while paused" in browser.text()


def test_a_flood_keeps_only_the_newest_rows(browser: Chromium, house: House) -> None:
    topic = house.topic("flood")
    shown_at(browser, house, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    for start in range(0, 3000, 1000):
        house.produce(topic, *({"value": str(n)} for n in range(start, start + 1000)))
    browser.until("document.body.innerText.includes('3,000 received')")
    assert browser.run("document.querySelectorAll('[data-tail-rows] tr').length") == 500
    first = "document.querySelector('[data-tail-rows] td.text:last-child').textContent"
    assert browser.run(first) == "2999"


def test_a_paused_tail_holds_few_large_records(browser: Chromium, house: House) -> None:
    topic = house.topic("paused")
    shown_at(browser, house, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    browser.run("document.querySelector('[data-tail-pause]').click()")
    for n in range(12):
        house.produce(topic, {"value": f"{n} " + "x" * 900_000})
    tail = "document.querySelector('[data-tail]').tail"
    browser.until(f"{tail}.seen === 12")
    assert browser.run(f"{tail}.waiting.length") == 9, "of 8 Mi characters"
    browser.run("document.querySelector('[data-tail-pause]').click()")
    browser.until("document.querySelectorAll('[data-tail-rows] tr').length === 9")
    first = "document.querySelector('[data-tail-rows] td.text:last-child').textContent.slice(0, 3)"
    assert browser.run(first) == "11 "


def test_leaving_the_tail_closes_its_stream(browser: Chromium, house: House) -> None:
    topic = house.topic("left")
    shown_at(browser, house, f"#/topics/{topic}/tail", heading=topic)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    partition = house.broker.partition(topic, 0)
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
def hostile(house: House) -> str:
    topic = house.topic("hostile")
    house.produce(
        topic,
        *(
            {"key": text, "value": text, "headers": [{"name": text, "value": text}]}
            for text in ATTACKS
        ),
        *({"value": {text: [text]}} for text in ATTACKS),
    )
    return topic


def test_records_never_become_markup(browser: Chromium, house: House, hostile: str) -> None:
    shown_at(browser, house, f"#/topics/{hostile}/partitions/0/records", heading=hostile)
    browser.until(f"{RECORDS} === {2 * len(ATTACKS)}")
    browser.run("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    shown = browser.run("document.querySelector('#view').textContent")
    for attack in ATTACKS[:-1]:
        assert shown.count(attack) >= 5, attack
    assert "⟨U+202E⟩gnp.exe␀␛[31m" in shown
    assert browser.run("document.querySelectorAll('#view script, #view img, #view h1').length") == 1
    assert browser.run("window.owned") is None
    assert house.get(f"/v1/topics/{hostile}").status_code == 200


def test_the_tail_never_makes_markup(browser: Chromium, house: House) -> None:
    hostile = house.topic("hostile-tail")
    shown_at(browser, house, f"#/topics/{hostile}/tail", heading=hostile)
    browser.until("document.querySelector('[data-tail-state]').textContent.startsWith('live')")
    house.produce(hostile, *({"key": text, "value": text} for text in ATTACKS))
    browser.until(f"document.querySelectorAll('[data-tail-rows] tr').length >= {len(ATTACKS)}")
    shown = browser.run("document.querySelector('[data-tail-rows]').textContent")
    for attack in ATTACKS[:-1]:
        assert attack in shown
    assert "\u202e" not in shown
    inside = "document.querySelectorAll('[data-tail-rows] :not(tr, td, bdi)').length"
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
    browser: Chromium, house: House, hostile: str, path: str
) -> None:
    if not house.get("/v1/topics/page").is_success:
        house.topic("page")
        house.produce("page", {"value": "<h1>bytes of a stranger</h1>"})
    browser.expected += REFUSALS
    browser.open(f"{house.url}/{path}")
    browser.until("document.querySelector('#view')?.childElementCount")
    assert "bytes of a stranger" not in browser.text()
    asked = [url for url in browser.requested if url.startswith("http")]
    assert all(url.startswith(f"{house.url}/") for url in asked)
    assert not any("/v1/" in url for url in asked)


def test_a_hostile_filter_is_shown_as_text(browser: Chromium, house: House, flights: str) -> None:
    query = "%3Cimg%20src%3Dx%20onerror%3D%22window.owned%3D1%22%3E"
    shown_at(browser, house, f"#/overview?filter={query}", heading="Topics")
    assert '<img src=x onerror="window.owned=1">' in browser.text()
    assert browser.run("window.owned") is None
    browser.run(TICK)
    time.sleep(0.2)
    assert '<img src=x onerror="window.owned=1">' in browser.text()


@pytest.mark.parametrize("path", ["/", "/console/overview", "/console/static/console.js"])
def test_every_response_has_the_security_policy(house: House, path: str) -> None:
    answer = house.get(path)
    assert answer.status_code == 200
    assert "script-src 'self'" in answer.headers["content-security-policy"]
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert house.head(path).headers["content-length"] == answer.headers["content-length"]


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
def test_unknown_paths_are_problems(house: House, path: str) -> None:
    answer = house.get(path)
    assert answer.status_code == 404
    assert answer.headers["content-type"] == "application/problem+json"


def test_static_files_are_revalidated_by_etag(house: House) -> None:
    first = house.get("/console/static/htmx.min.js")
    again = house.get(
        "/console/static/htmx.min.js", headers={"if-none-match": first.headers["etag"]}
    )
    assert again.status_code == 304
    assert again.content == b""


# --- tokens -------------------------------------------------------------------------------------


@pytest.fixture
def guarded(tmp_path: Path) -> Iterator[tuple[House, Path]]:
    file = tmp_path / "tokens.json"
    admin = create_token(file, "admin", scopes=(Scope.ADMIN,), now_ms=1)
    with open_house(tmp_path, bucket=False, tokens=file) as house:
        house.headers["authorization"] = f"Bearer {admin}"
        house.topic("orders.eu")
        house.topic("private")
        yield house, file


def give(browser: Chromium, token: str) -> None:
    browser.until("document.querySelector('#ask-token')?.open")
    browser.until("document.activeElement.name === 'token'")
    browser.type(token)
    browser.press("Enter")


def test_the_page_asks_for_a_token(browser: Chromium, guarded: tuple[House, Path]) -> None:
    house, file = guarded
    browser.expected += REFUSALS
    token = create_token(file, "console", scopes=(Scope.READ,), now_ms=1)
    browser.open(house.url)
    give(browser, "tierlog_guess")
    browser.until("!document.querySelector('[data-token-refusal]').hidden")
    assert "private" not in browser.text()
    give(browser, token)
    browser.until("document.querySelector('#topic-private')")
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
    assert browser.run("sessionStorage.getItem('tierlog.token')") == token
    assert browser.run("document.cookie + JSON.stringify(localStorage)") == "{}"
    browser.run("location.hash = '#/topics/private/tail'")
    browser.until("document.querySelector('[data-tail-state]')?.textContent.startsWith('live')")
    house.produce("private", {"value": "seen with a token"})
    browser.until("document.body.innerText.includes('seen with a token')")
    browser.run("document.querySelector('[data-forget]').click()")
    browser.until("document.querySelector('#ask-token').open")
    assert "seen with a token" not in browser.text()
    assert browser.run("sessionStorage.getItem('tierlog.token')") is None


def test_a_token_for_some_topics_sees_no_other(
    browser: Chromium, guarded: tuple[House, Path]
) -> None:
    house, file = guarded
    browser.expected += REFUSALS
    token = create_token(file, "eu", scopes=(Scope.READ,), topics="orders.", now_ms=1)
    browser.open(house.url)
    give(browser, token)
    browser.until("document.querySelector('[id=\"topic-orders.eu\"]')")
    assert "private" not in browser.text()
    assert "On disk" in browser.text()
    assert "Chunk cache" not in browser.text()
    browser.run("location.hash = '#/topics/private'")
    browser.until("document.querySelector('#view > .refusal')")
    assert "orders." in browser.text()
    headers = {"authorization": f"Bearer {token}"}
    for path in ("summary", "samples", "store", "topics/private/tail"):
        assert httpx.get(f"{house.url}/console/{path}", headers=headers).status_code == 403


# --- whoever uses it ----------------------------------------------------------------------------

PAGES = (
    "",
    "#/groups",
    "#/store",
    "#/topics/flights",
    "#/topics/flights/tail",
    "#/topics/flights/partitions/0/records?at=earliest",
    "#/topics/flights/partitions/0/tail",
    "#/topics/flights/partitions/0/segments",
    "#/topics/flights/partitions/0/manifest",
)


@pytest.mark.parametrize("page", PAGES)
def test_every_page_fits_a_phone_and_labels_its_parts(
    browser: Chromium, house: House, flights: str, page: str
) -> None:
    for width in (320, PHONE):
        browser.look(width=width, height=844)
        shown_at(browser, house, page, heading="")
        # Charts take the page's new width a frame later.
        browser.until(
            "document.documentElement.scrollWidth <= document.documentElement.clientWidth"
        )
    nameless = """[...document.querySelectorAll('input, select, button, a, svg[role], img')]
        .filter(one => !(one.labels?.length || one.textContent.trim() || one.ariaLabel
                         || one.hasAttribute('alt'))).map(one => one.outerHTML)"""
    assert browser.run(nameless) == []
    assert browser.run("document.querySelectorAll('h1').length") == 1
    ids = "[...document.querySelectorAll('[id]')].map(one => one.id)"
    assert browser.run(f"new Set({ids}).size === {ids}.length")
    asked = [url for url in browser.requested if url.startswith("http")]
    assert asked
    assert all(url.startswith(f"{house.url}/") for url in asked)


def test_dark_and_light_follow_the_system(browser: Chromium, house: House, flights: str) -> None:
    found = []
    for dark in (False, True):
        browser.look(dark=dark)
        shown_at(browser, house, "", heading="Topics")
        browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
        found.append(browser.run("getComputedStyle(document.body).backgroundColor"))
    assert found == ["rgb(247, 247, 245)", "rgb(20, 23, 27)"]


def test_records_are_reached_by_keyboard_alone(
    browser: Chromium, house: House, flights: str
) -> None:
    shown_at(browser, house, "", heading="Topics")
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
    end = house.get(f"/v1/topics/{flights}/partitions/0/offsets").json()["high_watermark"]
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
    browser: Chromium, house: House, flights: str
) -> None:
    shown_at(browser, house, f"#/topics/{flights}", heading=flights)
    browser.press("j")
    assert browser.run("document.activeElement.id") == "partition-0"
    end = house.get(f"/v1/topics/{flights}/partitions/0/offsets").json()["high_watermark"]
    house.produce(flights, {"value": "one more"})
    browser.run(TICK)
    browser.until(f"document.body.innerText.includes('{end + 1}')")
    assert browser.run("document.activeElement.id") == "partition-0"


# --- faults -------------------------------------------------------------------------------------


def test_a_store_that_is_down_is_reported(browser: Chromium, tmp_path: Path) -> None:
    with open_house(tmp_path) as house:
        topic = house.two_tiers("colder")
        house.set_down(True)
        house.post(f"/v1/topics/{topic}/offload")
        records = f"#/topics/{topic}/partitions/0/records"
        shown_at(browser, house, f"{records}?at=earliest", heading=topic)
        assert browser.run("document.querySelector('#view .refusal').textContent")
        browser.run("[...document.querySelectorAll('a.button')].at(-1).click()")
        browser.until("document.querySelector('#record-200')")


def test_a_damaged_partition_is_reported_beside_the_others(
    browser: Chromium, tmp_path: Path
) -> None:
    with open_house(tmp_path, bucket=False) as house:
        house.topic("t", partitions=3)
        for partition in range(3):
            house.produce("t", *({"value": f"{n}", "partition": partition} for n in range(5)))
    log = tmp_path / "data" / "t-1" / f"{0:020}.log"
    flip(log, -1)  # of what was flushed: no crash leaves this
    (tmp_path / "data" / ".kafka_cleanshutdown").unlink()
    notice = "document.querySelector('.trouble[role=alert]')"
    with open_house(tmp_path, bucket=False) as house:
        shown_at(browser, house, "", heading="Topics")
        browser.until(f"{notice}?.textContent.includes('t-1')")
        assert "1 damaged" in browser.text()
        browser.run("document.querySelector('#topic-t').click()")
        browser.until(f"{HEADING}.textContent.trim() === 't'")
        browser.until(SETTLED)
        said = browser.run(f"{notice}.textContent")
        assert said.startswith("Partition 1: t-1/00000000000000000000.log")
        assert "tierlog storage repair" in said
        assert str(tmp_path) not in browser.text()  # where the broker's files lie is its own affair
        rows = "[...document.querySelectorAll('[data-row][id]')].map(row => row.id)"
        assert browser.run(rows) == ["partition-0", "partition-2"]
        browser.run(TICK)
        browser.until(f"{rows}.length === 2 && {notice}")
        browser.expected += ("htmx:", "status of 5", "Error Code 5")
        browser.run("location.hash = '#/topics/t/partitions/1/records'")
        browser.until("document.querySelector('#view > .refusal')")
        assert "t-1/00000000000000000000.log" in browser.text()
        browser.run("document.querySelector('#view [data-up]').click()")
        browser.until(f"{HEADING}.textContent.trim() === 't'")
        browser.look(width=PHONE)
        browser.until("document.documentElement.scrollWidth <= innerWidth")


def test_a_partition_taken_over_by_another_broker_is_reported(
    browser: Chromium, tmp_path: Path
) -> None:
    notice = "document.querySelector('#partitions .trouble[role=alert]')"
    with open_house(tmp_path) as house:
        house.two_tiers("flights")
        with open_house(restored(tmp_path)) as other:
            other.post("/v1/topics/flights/offload", params={"wait_ms": 20_000})
        shown_at(browser, house, "#/topics/flights", heading="flights")
        assert not browser.run(notice)
        house.broker.background.fence_checker.run_round()
        browser.run(TICK)
        browser.until(notice)
        said = browser.run(f"{notice}.textContent")
        assert said.startswith("Partition 0: leadership lost: flights-0, manifest version ")
        assert browser.run("document.querySelector('tbody th').innerText") == "0 leadership lost"
        assert browser.run("document.querySelector('tbody tr').offsetHeight") < 60
        shown_at(browser, house, "#/overview", heading="Topics")
        assert "1 leadership lost" in browser.run("document.querySelector('tbody th').innerText")
        shown_at(browser, house, "#/topics/flights/partitions/0/segments", heading="flights")
        assert "leadership lost: " in browser.run("document.querySelector('#head').innerText")


def test_offsets_are_shown_without_separators(house: House) -> None:
    topic = house.topic("many")
    for _ in range(2):
        house.produce(topic, *[{"value": "x"}] * 600)
    page = f"/console/topics/{topic}"
    shown = [house.get(page + part).text for part in ("", "/partitions/0/records?at=1100&limit=10")]
    assert ["1200" in text for text in shown] == [True, True]
    assert not [text for text in shown if "1\u202f" in text]
    assert "1\u202f200" in house.get("/console/overview").text, "what is counted has thousands"


def test_only_a_few_of_a_thousand_problems_are_listed(
    house: House, flights: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where another broker took all partitions over: the page is still one of topics."""
    reasons = [f"leadership lost: t-{number}" for number in range(1000)]
    monkeypatch.setattr(house.broker, "readiness", lambda: (reasons, []))
    shown = house.get("/console/overview").text
    assert shown.count("leadership lost") == shown.count('role="alert"') == 5
    assert "and 995 more" in shown
    monkeypatch.setattr(house.broker, "readiness", lambda: (reasons[:5], []))
    assert "more; <code>GET /readyz" not in house.get("/console/summary").text


def test_the_head_of_a_partition_is_refreshed_during_its_tail(
    browser: Chromium, house: House
) -> None:
    topic = house.topic("renewed")
    shown_at(browser, house, f"#/topics/{topic}/partitions/0/tail", heading=topic)
    watermark = "document.querySelectorAll('#head dd')[2].textContent"
    assert browser.run(watermark) == "0"
    browser.until("document.querySelector('[data-tail-state]').textContent === 'live'")
    house.produce(topic, {"value": ""}, {"key": ""})
    browser.run(TICK)
    browser.until(f"{watermark} === '2'")
    browser.until("document.querySelectorAll('[data-tail-rows] tr').length === 2")
    cells = "[...document.querySelectorAll('[data-tail-rows] .text')].map(one => one.textContent)"
    assert browser.run(cells) == ["empty", "null", "null", "empty"]


def test_a_long_key_takes_one_line(browser: Chromium, house: House) -> None:
    topic = house.topic("long")
    house.produce(topic, {"key": "k", "value": ""}, {"key": "k" * 5000, "value": ""})
    shown_at(browser, house, f"#/topics/{topic}/partitions/0/records", heading=topic)
    heights = "[...document.querySelectorAll('summary.line')].map(one => one.offsetHeight)"
    short, long = browser.run(heights)
    assert long < short + 8
    assert "empty" in browser.text()


def test_a_broker_that_is_down_is_reported_until_it_is_back(
    browser: Chromium, tmp_path: Path
) -> None:
    browser.expected += ["ERR_", "htmx:"]
    with open_house(tmp_path, bucket=False) as house:
        house.topic("hello")
        shown_at(browser, house, "", heading="Topics")
    browser.run(TICK)
    browser.until("document.querySelector('#notice').innerText.includes('does not respond')")
    assert "hello" in browser.text()


def restored_flights(tmp_path: Path) -> Path:
    """A house's folder, made out of the bucket of another one."""
    with open_house(tmp_path) as house:
        house.two_tiers("flights")
    return restored(tmp_path)


def restored(tmp_path: Path) -> Path:
    new = tmp_path / "new"
    options = RestoreOptions(data_dir=new / "data", gap=1_000_000_000, clock=lambda: 0)
    restore(open_store(f"file://{tmp_path / 'bucket'}"), options)
    (new / "bucket").symlink_to(tmp_path / "bucket")
    return new


def test_the_newest_page_after_a_restore_is_below_the_gap(tmp_path: Path) -> None:
    with open_house(restored_flights(tmp_path)) as house:
        newest = house.get("/console/topics/flights/partitions/0/records?limit=20").text
        assert all(f"key {n}<" in newest for n in range(180, 200))
        house.produce("flights", {"key": "after"})
        newest = house.get("/console/topics/flights/partitions/0/records?limit=20").text
        assert (">after<" in newest, "?at=180&amp;" in newest) == (True, True)


def test_records_are_counted_without_the_gap_of_a_restore(tmp_path: Path) -> None:
    with open_house(restored_flights(tmp_path)) as house:
        house.produce("flights", {"key": "after"})
        overview = house.get("/console/overview").text
        assert '<td class="number" data-label="Records">201</td>' in overview
