"""axe-core looks at every page, light and dark, at a table's and a phone's width. In the dark the
colours differ, and nothing else.
"""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE, TABLE, Console

AXE = (Path(__file__).parents[2] / "fixtures" / "axe" / "axe.min.js").read_text("utf-8")
SETTLED = "!document.querySelector('#view').hasAttribute('aria-busy')"
RECORDS = "#/topics/axe/partitions/0/records?at=earliest&limit=10"
BY_COLOURS = "color-contrast", "link-in-text-block"
OPENED = "(document.querySelector('.list details') ?? {}).open = true"
# Of each page: its address, what to do there, and what to wait for.
PAGES: dict[str, tuple[str, str, str]] = {
    "topics": ("", "0", "document.querySelectorAll('[data-chart] canvas').length === 3"),
    "groups": ("#/groups", "0", "document.querySelector('#groups table')"),
    "store": ("#/store", "0", "document.querySelector('#store table')"),
    "topic": (
        "#/topics/axe",
        "document.querySelector('details').open = true",
        "document.querySelectorAll('[data-chart] canvas').length === 4",
    ),
    "search": (
        "#/topics/axe/search?text=tower&limit=5",
        "0",
        f"({OPENED}) && document.querySelector('.found .json-number')",
    ),
    "refused search": ("#/topics/axe/search?json=a[", "0", "document.querySelector('.refusal')"),
    "tail": ("#/topics/axe/tail", "0", "document.querySelector('[data-tail]')"),
    "records": (RECORDS, OPENED, "document.querySelector('.json-number')"),
    "partition's tail": ("#/topics/axe/partitions/0/tail", "0", "true"),
    "segments": ("#/topics/axe/partitions/0/segments", "0", "true"),
    "manifest": ("#/topics/axe/partitions/0/manifest", "0", "document.querySelector('.versions')"),
    "new topic": ("#/create", "document.querySelector('details').open = true", "true"),
    "produce": ("#/topics/axe/produce", "0", "document.querySelector('textarea')"),
    "settings": ("#/topics/axe/settings", "0", "document.querySelector('.settings')"),
    "storage": ("#/topics/axe/storage", "0", "document.querySelector('form[data-act=repair]')"),
    "offsets": (
        "#/offsets?group=billing&topic=axe&at=latest",
        "0",
        "document.querySelector('[data-plan]')",
    ),
    "keys": ("", "document.querySelector('[data-help]').click()", "true"),
    "token": ("", "document.querySelector('#ask-token').showModal()", "true"),
    "unknown": ("#/topics/none", "0", "document.querySelector('#view > .refusal')"),
}


@pytest.fixture(scope="module")
def axe(console: Console) -> str:
    topic = console.two_tiers("axe")
    offsets = {"offsets": [{"topic": topic, "partition": 0, "offset": 3}]}
    assert console.put("/v1/groups/billing/offsets", json=offsets).status_code == 204
    assert console.post(f"/v1/topics/{topic}/pins", json={"name": "june"}).status_code == 201
    return topic


def findings(browser: Chromium, *, coloured: str = "html") -> list[str]:
    """What axe finds, in light colours by all its rules, in dark ones by those on colours, there in
    `coloured` alone.
    """
    browser.run(f"{AXE}; 0")
    found = [*violations(browser), *violations(in_the_dark(browser), *BY_COLOURS, within=coloured)]
    return [
        f"{rule['id']}: {node['target']} {node['failureSummary']}"
        for rule in found
        for node in rule["nodes"]
    ]


def violations(browser: Chromium, *rules: str, within: str = "html") -> list[dict[str, Any]]:
    options = {"resultTypes": ["violations"]} | ({"runOnly": rules} if rules else {})
    found: list[dict[str, Any]] = browser.run(
        f"axe.run('{within}', {json.dumps(options)}).then(({{ violations }}) => violations)"
    )
    return found


def in_the_dark(browser: Chromium) -> Chromium:
    browser.prefer(dark=True)
    assert browser.run("matchMedia('(prefers-color-scheme: dark)').matches")
    return browser


@pytest.mark.parametrize("page", PAGES)
def test_axe_finds_nothing_on_any_page(
    browser: Chromium, console: Console, axe: str, page: str
) -> None:
    path, act, condition = PAGES[page]
    browser.expected += ("status of 404", "Error Code 404")
    for width in (TABLE, PHONE):
        browser.emulate(width=width)
        browser.open(f"{console.url}/{path}")
        browser.until("document.querySelector('#view h1')")
        browser.until(SETTLED)
        browser.run(act)
        browser.until(condition)
        assert findings(browser) == []
        assert browser.run("document.documentElement.scrollWidth") <= width


def test_on_a_phone_the_strip_of_charts_is_scrolled_by_keyboard(
    browser: Chromium, console: Console, axe: str
) -> None:
    browser.emulate(width=PHONE, height=844)
    browser.open(console.url)
    browser.until("document.querySelectorAll('[data-chart] canvas').length === 3")
    strip = "document.querySelector('[data-charts]')"
    browser.run(f"{strip}.previousElementSibling.querySelector('a').focus()")
    browser.press("Tab")
    assert browser.run(f"document.activeElement === {strip}")
    browser.press("ArrowRight")
    browser.until(f"{strip}.scrollLeft > 0")


def test_on_a_phone_the_requests_of_the_store_are_one_table(
    browser: Chromium, console: Console, axe: str
) -> None:
    browser.emulate(width=PHONE, height=844)
    browser.open(f"{console.url}/#/store")
    browser.until("document.querySelector('#store tbody tr')")
    rights = "[...document.querySelectorAll('#store tr')].map(one => one.lastElementChild)"
    places = f"new Set({rights}.map(one => one.getBoundingClientRect().right)).size"
    assert browser.run(places) == 1
    table = "document.querySelector('#store .scroll')"
    assert browser.run(f"{table}.scrollWidth <= {table}.clientWidth")
