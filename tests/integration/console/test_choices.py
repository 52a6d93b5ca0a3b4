import json

import pytest

from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import Console
from tierlog.api.console.rendering import byte_size, grouped, moment
from tierlog.record_format.units import rough_duration

BACK = "getComputedStyle(document.body).backgroundColor"
LIGHT, DARK = "rgb(247, 247, 245)", "rgb(20, 23, 27)"
RECORDS = "#/topics/chosen/partitions/0/records?at=earliest&limit=10"
FIRST = "document.querySelector('#record-0 time')"


@pytest.fixture(scope="module")
def chosen(console: Console) -> str:
    return console.two_tiers("chosen")


@pytest.fixture
def in_newfoundland(browser: Chromium, console: Console, chosen: str) -> Chromium:
    browser.call("Emulation.setTimezoneOverride", timezoneId="America/St_Johns")
    browser.open(f"{console.url}/{RECORDS}")
    browser.until(FIRST)
    yield browser
    browser.run("localStorage.clear()")
    browser.call("Emulation.setTimezoneOverride", timezoneId="")


def choose(browser: Chromium, name: str, value: str) -> None:
    browser.run("document.querySelector('[data-choices]').click()")
    browser.run(f"document.querySelector('#choices [name={name}][value={value}]').click()")
    browser.press("Escape")


@pytest.mark.parametrize("system_dark", [False, True])
def test_light_or_dark_is_chosen_and_kept(
    browser: Chromium, console: Console, chosen: str, system_dark: bool
) -> None:
    browser.emulate(dark=system_dark)
    browser.open(console.url)
    browser.until("document.querySelector('#view h1')")
    for scheme, colour in (("dark", DARK), ("light", LIGHT)):
        choose(browser, "scheme", scheme)
        assert browser.run(BACK) == colour
        browser.call("Page.reload")
        browser.until("document.querySelector('#view h1')")
        assert browser.run(BACK) == colour
    choose(browser, "scheme", "system")
    assert browser.run(BACK) == (DARK if system_dark else LIGHT)
    browser.run("localStorage.clear()")


def test_times_are_shown_and_read_as_local_if_that_is_chosen(in_newfoundland: Chromium) -> None:
    browser = in_newfoundland
    assert browser.run(f"{FIRST}.textContent") == "2013-07-04 01:06:40.000Z"
    choose(browser, "zone", "local")
    assert browser.run(f"{FIRST}.textContent") == "2013-07-03 22:36:40.000-02:30"
    assert "Time (local time)" in browser.text()
    browser.call("Page.reload")
    browser.until(f"{FIRST}?.textContent.endsWith('-02:30')")
    browser.run("document.querySelector('select[name=by]').value = 'timestamp'")
    browser.run("document.querySelector('input[name=at]').value = '2013-07-03 22:36:45'")
    browser.run("document.querySelector('form[data-route]').requestSubmit()")
    browser.until("document.querySelector('summary')?.id === 'record-5'")
    assert "at=2013-07-04T01%3A06%3A45.000Z" in browser.run("location.hash")
    choose(browser, "zone", "utc")
    browser.until("document.querySelector('#record-5 time').textContent.endsWith('45.000Z')")


def test_scripts_write_figures_as_the_server_does(
    browser: Chromium, console: Console, chosen: str
) -> None:
    browser.open(console.url)
    browser.until("document.querySelector('#view h1')")
    sizes = [0, 1, 999, 1000, 1023, 1024, 10_234, 102_390, 1 << 20, 12_600_000, 10**15, 10**18]
    spans = [0, 20, 999, 1000, 1500, 119_999, 120_000, 7_199_999, 7_200_000, 10**9]
    times = [-1, 0, 1_372_899_601_005, 253_402_300_799_999, 253_402_300_800_000]
    counts = [0, 999, 1000, 1_234_567]
    for name, write, values in (
        ("bytes", byte_size, sizes),
        ("duration", rough_duration, spans),
        ("moment", moment, times),
        ("count", grouped, counts),
    ):
        written = browser.run(f"{json.dumps(values)}.map(one => window.tierlog.{name}(one))")
        assert written == [write(one) for one in values], name
