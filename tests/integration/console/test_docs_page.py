"""`/docs` in a browser: every call is shown, by a token where one is wanted."""

from pathlib import Path

from api.http.access.grants import Scope
from api.http.access.tokens import create_token
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import House, open_house

CALLS_SHOWN = "document.querySelectorAll('.opblock').length > 25"
LIST_TOPICS = "document.querySelector('.opblock-get:has([data-path=\"/v1/topics\"])')"


def test_it_shows_every_call_and_loads_nothing_from_elsewhere(
    browser: Chromium, house: House
) -> None:
    browser.open(f"{house.url}/docs")
    browser.until(CALLS_SHOWN)
    shown = browser.text().replace("\u200b", "")
    assert "/v1/topics/{topic}/partitions/{partition}/records" in shown
    assert [url for url in browser.requested if not url.startswith((house.url, "data:"))] == []


def test_it_asks_for_a_token_and_sends_it_with_tried_calls(
    browser: Chromium, tmp_path: Path
) -> None:
    file = tmp_path / "tokens.json"
    admin = create_token(file, "admin", scopes=(Scope.ADMIN,), now_ms=1)
    producer = create_token(file, "producer", scopes=(Scope.PRODUCE,), now_ms=1)
    reader = create_token(file, "reader", scopes=(Scope.READ,), now_ms=1)
    browser.expected += ("status of 40",)
    with open_house(tmp_path, bucket=False, tokens=file) as house:
        house.headers["authorization"] = f"Bearer {admin}"
        house.topic("private")
        browser.open(f"{house.url}/docs")
        give(browser, "tierlog_guess")
        browser.until("document.querySelector('#refusal').textContent.includes('not valid')")
        give(browser, producer)
        browser.until("document.querySelector('#refusal').textContent.includes('scope')")
        give(browser, reader)
        browser.until(CALLS_SHOWN)
        browser.run(f"{LIST_TOPICS}.querySelector('.opblock-summary-control').click()")
        for button in ("try-out__btn", "execute"):
            browser.until(f"{LIST_TOPICS}.querySelector('.{button}')")
            browser.run(f"{LIST_TOPICS}.querySelector('.{button}').click()")
        browser.until(f"{LIST_TOPICS}.innerText.includes('\"private\"')")
        browser.open(f"{house.url}/")  # the console of the same tab asks for none
        browser.until("document.querySelector('#topic-private')")


def give(browser: Chromium, token: str) -> None:
    browser.until("document.querySelector('#ask-token')?.open")
    browser.until("document.activeElement.name === 'token'")
    browser.type(token)
    browser.press("Enter")
