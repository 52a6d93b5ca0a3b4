"""`/docs` in a browser: every call is shown and can be sent, with a token if one is required."""

from pathlib import Path

import pytest

from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import (
    PHONE,
    TABLE,
    Console,
    enter_token,
    open_console,
)
from tests.integration.console.test_accessibility import findings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token

CALLS_SHOWN = "document.querySelectorAll('.call').length > 25"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
LOADED = "document.readyState === 'complete' && location.protocol !== 'about:'"
LIST_TOPICS = "document.querySelector('#list_topics')"


def test_the_page_shows_every_call_and_loads_nothing_from_elsewhere(
    browser: Chromium, console: Console
) -> None:
    browser.open(f"{console.url}/docs")
    browser.until(CALLS_SHOWN)
    shown = browser.text().replace("\u200b", "")
    assert "/v1/topics/{topic}/partitions/{partition}/records" in shown
    assert [url for url in browser.requested if not url.startswith((console.url, "data:"))] == []


@pytest.mark.parametrize("dark", [False, True])
def test_the_page_has_the_consoles_colours_and_a_way_back(
    browser: Chromium, console: Console, dark: bool
) -> None:
    browser.emulate(dark=dark)
    browser.open(f"{console.url}/")
    browser.until(LOADED)
    of_the_console = browser.run(BACKGROUND)
    browser.run("document.querySelector('nav a[href=\"/docs\"]').click()")
    browser.until(CALLS_SHOWN)
    assert browser.run(BACKGROUND) == of_the_console
    browser.run("document.querySelector('.top .brand').click()")
    browser.until("location.pathname === '/' && document.querySelector('#view h1')")


def test_the_page_is_light_or_dark_as_was_chosen_in_the_console(
    browser: Chromium, console: Console
) -> None:
    browser.open(f"{console.url}/docs")
    browser.until(CALLS_SHOWN)
    try:
        browser.run("localStorage.setItem('tierlog.choices', '{\"scheme\": \"dark\"}')")
        browser.open(f"{console.url}/docs")
        browser.until(CALLS_SHOWN)
        assert browser.run(BACKGROUND) == "rgb(20, 23, 27)"
    finally:
        browser.run("localStorage.clear()")


def test_the_page_asks_for_a_token_and_sends_it_with_calls(
    browser: Chromium, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    admin = create_token(file, "admin", scopes=(Scope.ADMIN,), now_ms=1)
    producer = create_token(file, "producer", scopes=(Scope.PRODUCE,), now_ms=1)
    reader = create_token(file, "reader", scopes=(Scope.READ,), now_ms=1)
    browser.expected += ("status of 40",)
    with open_console(tmp_path, bucket=False, tokens=file) as console:
        console.headers["authorization"] = f"Bearer {admin}"
        console.topic("private")
        browser.open(f"{console.url}/docs")
        enter_token(browser, "tierlog_guess")
        browser.until("document.querySelector('#refusal').textContent.includes('not valid')")
        enter_token(browser, producer)
        browser.until("document.querySelector('#refusal').textContent.includes('scope')")
        enter_token(browser, reader)
        browser.until(CALLS_SHOWN)
        browser.run(f"{LIST_TOPICS}.querySelector('summary').click()")
        browser.until(f"{LIST_TOPICS}.querySelector('form')")
        browser.run(f"{LIST_TOPICS}.querySelector('form button').click()")
        browser.until(f"{LIST_TOPICS}.innerText.includes('\"private\"')")
        browser.open(f"{console.url}/")  # the console in the same tab uses it too
        browser.until("document.querySelector('#topic-private')")


def form_of(browser: Chromium, call: str) -> str:
    browser.run(f"document.querySelector('#{call}').open = true")
    browser.until(f"document.querySelector('#{call} form')")
    return f"document.querySelector('#{call} form')"


def test_a_call_is_sent_with_what_was_filled_in_and_shown_with_its_answer(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("sent", retention_ms=2**63 - 1)
    browser.open(f"{console.url}/docs#produce_to_partition")
    browser.until(CALLS_SHOWN)
    form = form_of(browser, "produce_to_partition")  # opened by its address
    browser.run(f"{form}.requestSubmit(), 0")
    assert not browser.run(f"{form}.querySelector('.result').hasChildNodes()"), "no topic yet"
    browser.run(f"{form}.elements.topic.value = '{topic}', {form}.elements.partition.value = '0'")
    browser.run(f"{form}.elements.acks.value = '1', {form}.requestSubmit(), 0")
    browser.until(f"{form}.innerText.includes('base_offset')")
    assert f"/v1/topics/{topic}/partitions/0/records?acks=1'" in browser.text()
    shown = form_of(browser, "get_topic")
    browser.run(f"{shown}.elements.topic.value = '{topic}', {shown}.requestSubmit(), 0")
    browser.until(f"{shown}.innerText.includes('{2**63 - 1}')")


def test_an_answer_without_an_end_is_shown_as_it_comes_and_can_be_stopped(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("endless")
    console.produce(topic, {"value": "first"})
    browser.open(f"{console.url}/docs")
    browser.until(CALLS_SHOWN)
    form = form_of(browser, "tail_topic")
    browser.run(f"{form}.elements.topic.value = '{topic}'")
    browser.run(f"{form}.elements.offset.value = 'earliest', {form}.requestSubmit(), 0")
    browser.until(f"{form}.innerText.includes('first')")
    stop = f"[...{form}.querySelectorAll('button')].find(one => one.textContent === 'Stop')"
    browser.run(f"{stop}.click()")
    browser.until(f"{stop}.hidden")


def test_axe_finds_nothing_with_every_call_and_answer_opened(
    browser: Chromium, console: Console
) -> None:
    for width in (TABLE, PHONE):
        browser.emulate(width=width)
        browser.open(f"{console.url}/docs")
        browser.until(CALLS_SHOWN)
        assert findings(browser) == []
    browser.prefer(dark=False)
    browser.run("document.querySelectorAll('.call').forEach(one => { one.open = true })")
    browser.until("document.querySelectorAll('.call form').length > 25")
    browser.run("document.querySelectorAll('.call details').forEach(one => { one.open = true })")
    browser.until("document.querySelectorAll('.answer[open] pre').length > 100")
    assert findings(browser, coloured="#produce_to_partition") == []  # all calls look alike
    assert browser.run("document.documentElement.scrollWidth") <= PHONE
