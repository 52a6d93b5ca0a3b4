"""`/docs` in a browser: every call is shown, with a token if one is required."""

from pathlib import Path

import pytest

from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import Console, enter_token, open_console
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token

CALLS_SHOWN = "document.querySelectorAll('.opblock').length > 25"
BACKGROUND = "getComputedStyle(document.body).backgroundColor"
IS_DARK = "document.documentElement.classList.contains('dark-mode')"
LOADED = "document.readyState === 'complete' && location.protocol !== 'about:'"
LIST_TOPICS = "document.querySelector('.opblock-get:has([data-path=\"/v1/topics\"])')"


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
    assert browser.run(IS_DARK) is dark
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
        assert browser.run(IS_DARK)
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
        browser.run(f"{LIST_TOPICS}.querySelector('.opblock-summary-control').click()")
        for button in ("try-out__btn", "execute"):
            browser.until(f"{LIST_TOPICS}.querySelector('.{button}')")
            browser.run(f"{LIST_TOPICS}.querySelector('.{button}').click()")
        browser.until(f"{LIST_TOPICS}.innerText.includes('\"private\"')")
        browser.open(f"{console.url}/")  # the console in the same tab uses it too
        browser.until("document.querySelector('#topic-private')")
