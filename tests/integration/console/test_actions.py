"""What the console does, done in the page, and read back through the API."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fakes.damage import flip
from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import Console, enter_token, open_console
from tests.integration.console.test_accessibility import findings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token

READ = {"topic": "read", "partition": 0, "offset": 0}
WORKING = "document.querySelector('[data-act] button:disabled')"


def open_page(browser: Chromium, console: Console, path: str) -> None:
    browser.open(f"{console.url}/#{path}")
    browser.until("document.querySelector('#view h1')")
    browser.until("!document.querySelector('#view').hasAttribute('aria-busy')")


def fill(browser: Chromium, form: str, **fields: str) -> None:
    """Type into the fields of a form by their names; a dot is written as two underscores."""
    for name, text in fields.items():
        field = named(form, name)
        browser.run(f"({field}).closest('details')?.setAttribute('open', '')")
        browser.run(f"(({field}).focus(), ({field}).select?.(), 0)")
        if browser.run(f"({field}).tagName === 'SELECT'"):
            browser.run(f"({field}).value = {text!r}")
        else:
            browser.run(f"({field}).value = ''")
            browser.type(text)


def named(form: str, name: str) -> str:
    field = name.replace("__", ".")
    return f"document.querySelector('form[data-act={form}]').elements[{field!r}]"


def send(browser: Chromium, form: str) -> None:
    """Press the form's button, and wait for its answer or its refusal."""
    browser.run(f"document.querySelector('form[data-act={form}] button:not([type])').click()")
    browser.until(f"!{WORKING}")


def said(browser: Chromium, form: str, text: str) -> None:
    browser.until(f"document.querySelector('form[data-act={form}]').innerText.includes({text!r})")


def records(console: Console, topic: str, partition: int = 0) -> list[dict[str, Any]]:
    path = f"/v1/topics/{topic}/partitions/{partition}/records"
    return console.get(path, params={"offset": "earliest"}).json()["records"]


def test_a_record_is_produced_and_linked_to(browser: Chromium, console: Console) -> None:
    topic = console.topic("produced-to", partitions=2)
    open_page(browser, console, f"/topics/{topic}/produce")
    fill(browser, "record", key="N14228", value='{"delay": 1.0}', headers="source=a=b\nempty=")
    browser.run(f"{named('record', 'kind')}.value = 'json'")
    fill(browser, "record", partition="1")
    send(browser, "record")
    said(browser, "record", "partition 1, offset 0")
    (record,) = records(console, topic, 1)
    assert record["key"] == "N14228"
    assert record["value"] == '{"delay": 1.0}'
    assert record["headers"] == [
        {"name": "source", "value": "a=b"},
        {"name": "empty", "value": ""},
    ]
    browser.run("document.querySelector('[data-answer] a').click()")
    browser.until("document.querySelector('.list details')")
    assert "N14228" in browser.text()


def test_json_that_cannot_be_read_is_said_beside_its_field(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("not-json")
    open_page(browser, console, f"/topics/{topic}/produce")
    browser.run(f"{named('record', 'kind')}.value = 'json'")
    fill(browser, "record", value="{")
    send(browser, "record")
    browser.until("document.activeElement.name === 'value'")
    assert browser.run("document.activeElement.nextElementSibling.dataset.problem") == "value"
    assert browser.run("document.activeElement.getAttribute('aria-invalid')") == "true"
    assert records(console, topic) == []


def test_a_record_without_a_value_deletes_its_key(browser: Chromium, console: Console) -> None:
    topic = console.topic("tombstones", cleanup_policy="compact")
    open_page(browser, console, f"/topics/{topic}/produce")
    fill(browser, "record", key="gone")
    browser.run(f"{named('record', 'kind')}.value = 'null'")
    send(browser, "record")
    said(browser, "record", "partition 0, offset 0")
    assert [(one["key"], one["value"]) for one in records(console, topic)] == [("gone", None)]


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ("values", [(None, '{"key": "a", "value": 1}'), (None, '{"value": "b"}')]),
        ("envelope", [("a", "1"), (None, "b")]),
    ],
)
def test_a_file_is_produced(
    browser: Chromium,
    console: Console,
    tmp_path: Path,
    lines: str,
    expected: list[tuple[Any, Any]],
) -> None:
    topic = console.topic(f"file-of-{lines}")
    file = tmp_path / "records.ndjson"
    file.write_text('{"key": "a", "value": 1}\n{"value": "b"}\n', "utf-8")
    open_page(browser, console, f"/topics/{topic}/produce")
    chosen = browser.call("Runtime.evaluate", expression=named("file", "file"))["result"]
    browser.call("DOM.setFileInputFiles", files=[str(file)], objectId=chosen["objectId"])
    browser.run(f"{named('file', 'lines')}.value = {lines!r}")
    send(browser, "file")
    said(browser, "file", "offsets 0 to 1")
    assert [(one.get("key"), one["value"]) for one in records(console, topic)] == expected


def test_a_topic_is_created_with_settings_in_words(browser: Chromium, console: Console) -> None:
    open_page(browser, console, "/create")
    assert "unlimited" in browser.run("document.querySelector('.settings').textContent")
    fill(browser, "create", name="made-here", partitions="3", config__retention__ms="7 days")
    browser.expected += ("status of 400",)
    send(browser, "create")
    browser.until("document.querySelector('[data-problem=\"config.retention.ms\"]')")
    assert "a duration, as in 90s, 12h or 7d" in browser.text()
    fill(
        browser,
        "create",
        config__retention__ms="7d",
        config__segment__bytes="64 MiB",
        config__retention__bytes="unlimited",
        config__cleanup__policy="compact,delete",
        config__preallocate="true",
    )
    send(browser, "create")
    browser.until("location.hash === '#/topics/made-here'")
    made = console.get("/v1/topics/made-here").json()
    assert len(made["partitions"]) == 3
    assert made["config"] == {
        "retention.ms": 604_800_000,
        "segment.bytes": 64 << 20,
        "retention.bytes": -1,
        "cleanup.policy": "compact,delete",
        "preallocate": True,
    }


def test_what_the_broker_refuses_is_shown_beside_the_field(
    browser: Chromium, console: Console
) -> None:
    browser.expected += ("status of 400", "status of 409")
    open_page(browser, console, "/create")
    fill(browser, "create", name="a/b")
    send(browser, "create")
    browser.until("document.querySelector('[data-refusal]').innerText.includes('not valid')")
    fill(browser, "create", name="fine", config__max__compaction__lag__ms="0s")
    send(browser, "create")
    browser.until("document.querySelector('[data-problem=\"config.max.compaction.lag.ms\"]')")
    assert console.get("/v1/topics/fine").status_code == 404


def test_only_changed_settings_are_sent_and_empty_ones_reset(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("altered", segment_bytes=2048, retention_ms=60_000)
    open_page(browser, console, f"/topics/{topic}/settings")
    assert browser.run(f"{named('alter', 'config__segment__bytes')}.value") == "2 KiB"
    assert browser.run(f"{named('alter', 'config__retention__ms')}.value") == "1 min"
    send(browser, "alter")
    said(browser, "alter", "Nothing was changed.")
    fill(browser, "alter", partitions="2", config__segment__bytes="", config__flush__ms="2 s")
    send(browser, "alter")
    said(browser, "alter", "Saved.")
    altered = console.get(f"/v1/topics/{topic}").json()
    assert altered["config"] == {"retention.ms": 60_000, "flush.ms": 2000}
    assert len(altered["partitions"]) == 2
    fill(browser, "alter", config__segment__bytes="64 KiB")
    send(browser, "alter")
    browser.until("document.querySelector('.warned')?.innerText.includes('a batch is never cut')")


def test_a_topic_is_deleted_once_its_name_is_typed(browser: Chromium, console: Console) -> None:
    topic = console.topic("unwanted")
    open_page(browser, console, f"/topics/{topic}/settings")
    fill(browser, "delete", confirmed="unwante")
    send(browser, "delete")
    said(browser, "delete", "type unwanted to delete it")
    assert console.get(f"/v1/topics/{topic}").status_code == 200
    fill(browser, "delete", confirmed="unwanted")
    send(browser, "delete")
    browser.until("location.hash === '#/overview'")
    assert console.get(f"/v1/topics/{topic}").status_code == 404


def commit(console: Console, group: str, topic: str, **offsets: int) -> None:
    body = [
        {"topic": topic, "partition": int(number.removeprefix("p")), "offset": offset}
        for number, offset in offsets.items()
    ]
    response = console.put(f"/v1/groups/{group}/offsets", json={"offsets": body})
    assert response.status_code == 204


def committed(console: Console, group: str) -> dict[int, int]:
    found = console.get(f"/v1/groups/{group}").json()["offsets"]
    return {one["partition"]: one["offset"] for one in found}


@pytest.fixture(scope="module")
def hours(console: Console) -> str:
    """Two partitions of ten records, an hour apart."""
    topic = console.topic("hours-apart", partitions=2, retention_ms=-1)
    for partition in range(2):
        made = [
            {"value": str(n), "timestamp": 1_372_900_000_000 + n * 3_600_000} for n in range(10)
        ]
        path = f"/v1/topics/{topic}/partitions/{partition}/records"
        assert console.post(path, json={"records": made}).status_code == 200
    return topic


@pytest.mark.parametrize(
    ("at", "partition", "expected"),
    [
        ("earliest", "", {0: 0, 1: 0}),
        ("latest", "", {0: 10, 1: 10}),
        ("3", "1", {0: 7, 1: 3}),
        ("2013-07-04 03:00", "", {0: 2, 1: 2}),
        ("2013-07-04T04:00:00Z", "0", {0: 3}),
    ],
)
def test_offsets_are_set_after_what_changes_was_shown(
    browser: Chromium,
    console: Console,
    hours: str,
    at: str,
    partition: str,
    expected: dict[int, int],
) -> None:
    group = "group-" + "".join(c for c in at + partition if c.isalnum())
    commit(console, group, hours, p0=7)
    open_page(browser, console, f"/offsets?group={group}&topic={hours}")
    form = "document.querySelector('form[data-route=\"/offsets\"]')"
    for name, text in (("at", at), ("partition", partition)):
        browser.run(f"{form}.elements.{name}.value = {text!r}")
    browser.run(f"{form}.requestSubmit()")
    browser.until("document.querySelector('[data-plan] tbody tr')")
    rows = browser.run(
        "[...document.querySelectorAll('[data-plan] tbody tr')].map(r => r.innerText)"
    )
    planned = {int(row.split()[0]): int(row.split()[2]) for row in rows}
    assert planned == {number: expected[number] for number in planned}
    assert committed(console, group) == {0: 7}
    send(browser, "offsets")
    said(browser, "offsets", "Set.")
    assert committed(console, group) == expected


@pytest.mark.parametrize("at", ["11", "yesterday", "-1"])
def test_offsets_that_the_log_does_not_have_are_refused(
    console: Console, hours: str, at: str
) -> None:
    page = console.get("/console/offsets", params={"group": "g", "topic": hours, "at": at}).text
    assert 'class="refusal" role="alert"><bdi>' in page
    assert "data-plan" not in page


def test_a_topic_is_offloaded_and_verified(browser: Chromium, console: Console) -> None:
    topic = console.topic("offloaded")
    console.produce(topic, {"value": "x"})
    open_page(browser, console, f"/topics/{topic}/storage")
    send(browser, "offload")
    said(browser, "offload", "Segments uploaded: 1")
    (partition,) = console.get(f"/v1/topics/{topic}").json()["partitions"]
    assert partition["cold_end_offset"] == 1
    browser.run(f"{named('verify', 'deep')}.checked = true")
    send(browser, "verify")
    said(browser, "verify", "No problems.")
    assert "local segments" in browser.text()


def test_pins_are_made_listed_and_removed(browser: Chromium, console: Console) -> None:
    topic = console.claimed(console.topic("pinned"))
    browser.expected += ("status of 400",)
    open_page(browser, console, f"/topics/{topic}/storage")
    fill(browser, "pin", name="not a name")
    send(browser, "pin")
    said(browser, "pin", "invalid pin name")
    fill(browser, "pin", name="june", days="2")
    send(browser, "pin")
    browser.until("document.querySelector('form[data-act=unpin]')")
    (pin,) = console.get(f"/v1/topics/{topic}/pins").json()["pins"]
    assert (pin["name"], pin["partition"]) == ("june", 0)
    assert pin["expires_ms"] > pin["created_ms"]
    browser.run("document.querySelector('form[data-act=unpin] button').click()")
    browser.until("!document.querySelector('form[data-act=unpin]')")
    assert console.get(f"/v1/topics/{topic}/pins").json()["pins"] == []


def test_a_repair_shows_its_plan_and_does_what_loses_nothing(
    browser: Chromium, console: Console
) -> None:
    topic = console.two_tiers("repaired")
    cold = console.broker.partition(topic, 0)._cold
    entry = next(cold.reads.cold_entries(0))
    console.store.delete([entry.indexes_key])
    open_page(browser, console, f"/topics/{topic}/storage")
    send(browser, "repair")
    said(browser, "repair", "Steps: 1, of which 1 lose nothing. Nothing was changed.")
    assert "rebuild the indexes in the bucket" in browser.text()
    assert "accept-loss" not in browser.text(), "nothing needs the broker stopped"
    assert findings(browser) == []
    assert console.post(f"/v1/topics/{topic}/verify").json()["ok"] is False
    browser.run("document.querySelector('[data-carry-out] button').click()")
    said(browser, "repair", "Done: 1. Left: 0.")
    assert console.post(f"/v1/topics/{topic}/verify").json()["ok"] is True
    send(browser, "repair")
    said(browser, "repair", "Nothing to repair.")


def test_a_plan_says_what_would_be_lost_and_gives_the_command_for_it(
    browser: Chromium, console: Console
) -> None:
    topic = console.topic("lossy", segment_bytes=1024, remote_storage_enable=False)
    for _ in range(3):
        console.produce(topic, {"value": "x" * 900})
    flip(console.broker.partition(topic, 0).local_segments()[0].path, -1)
    open_page(browser, console, f"/topics/{topic}/storage")
    browser.run(f"{named('repair', 'deep')}.checked = true")
    send(browser, "repair")
    said(browser, "repair", "Steps: 1, of which 0 lose nothing. Nothing was changed.")
    assert "offsets 0 to 0 are lost" in browser.text()
    assert browser.run("document.querySelector('[data-carry-out]').hidden")
    command = f"tierlog storage repair {topic} --data-dir DIR --store URL --apply --accept-loss"
    assert command in browser.text()
    permissions = ["clipboardReadWrite", "clipboardSanitizedWrite"]
    browser.call("Browser.grantPermissions", permissions=permissions, origin=console.url)
    browser.run("document.querySelector('.command .copy').click()")
    browser.until("document.querySelector('.command .copied')")
    assert browser.run("navigator.clipboard.readText()") == command


# --- who may --------------------------------------------------------------------------------------

FORBIDDEN = {"read": ("produce", "settings", "storage"), "produce": ("settings", "storage")}


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Console, dict[str, str]]]:
    """A broker that needs tokens, and one of each scope."""
    root = tmp_path_factory.mktemp("secured")
    file = root / "tokens.json"
    tokens = {one: create_token(file, one, scopes=(Scope(one),), now_ms=1) for one in Scope}
    with open_console(root, tokens=file) as console:
        console.headers["authorization"] = f"Bearer {tokens['admin']}"
        console.topic("guarded")
        yield console, tokens


def test_a_token_that_may_only_read_sees_no_controls(
    browser: Chromium, secured: tuple[Console, dict[str, str]]
) -> None:
    console, tokens = secured
    browser.expected += ("status of 401", "Error Code 401", "status of 403")
    browser.open(console.url)
    browser.run("sessionStorage.clear()")
    browser.open(console.url)
    enter_token(browser, tokens["read"])
    browser.until("document.querySelector('#view h1')")
    for path in ("/create", *(f"/topics/guarded/{one}" for one in FORBIDDEN["read"])):
        browser.run(f"location.hash = '#{path}'")
        browser.until("document.querySelector('[data-may-not]')?.innerText.includes('scope')")
        assert browser.run("document.querySelectorAll('[data-act]').length") == 0
        browser.run("location.hash = '#/overview'")
        browser.until("document.querySelector('#filter')")
        assert browser.run("document.querySelector('[href=\"#/create\"]')") is None
    forged = (
        "fetch('/v1/topics', {method: 'POST', headers: {...tierlog.headers(), "
        "'Content-Type': 'application/json'}, body: '{\"name\": \"forged\"}'})"
        ".then(one => one.status)"
    )
    assert browser.run(forged) == 403
    assert console.get("/v1/topics/forged").status_code == 404
    kept = browser.run("JSON.stringify(localStorage) + document.cookie")
    assert tokens["read"] not in kept
    browser.run("sessionStorage.clear()")


@pytest.mark.parametrize("scope", FORBIDDEN)
def test_a_form_is_shown_to_whom_the_api_would_let(
    secured: tuple[Console, dict[str, str]], scope: str
) -> None:
    console, tokens = secured
    headers = {"authorization": f"Bearer {tokens[scope]}"}
    for page in ("produce", "settings", "storage"):
        shown = console.get(f"/console/topics/guarded/{page}", headers=headers)
        if scope == "produce" and page != "produce":
            assert shown.status_code == 403  # it may not read
            continue
        assert ("data-act" in shown.text) == (page not in FORBIDDEN[scope])


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://localhost:1"},
        {"origin": "null"},
        {"sec-fetch-site": "cross-site"},
        {"sec-fetch-site": "same-site"},
    ],
)
def test_a_page_of_another_origin_changes_nothing(
    console: Console, secured: tuple[Console, dict[str, str]], headers: dict[str, str]
) -> None:
    for one in (console, secured[0]):
        assert one.post("/v1/topics/guarded/offload", headers=headers).status_code == 403
        response = one.post("/v1/topics", json={"name": "forged"}, headers=headers)
        assert response.status_code == 403
        assert response.json()["code"] == "forbidden"
        assert one.get("/v1/topics/forged").status_code == 404


def test_a_page_of_its_own_origin_may(console: Console) -> None:
    for n, headers in enumerate(({"origin": console.url}, {"sec-fetch-site": "none"}, {})):
        made = console.post("/v1/topics", json={"name": f"own-{n}"}, headers=headers)
        assert made.status_code == 201


def test_empty_pages_say_what_to_do_next(browser: Chromium, tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        open_page(browser, console, "/groups")
        assert "tierlog consume TOPIC --group NAME" in browser.text()
        open_page(browser, console, "/transactions")
        assert "transactional.id" in browser.text()
        console.topic("read")
        console.put("/v1/groups/g/offsets", json={"offsets": [READ]}).raise_for_status()
        open_page(browser, console, "/group?group=g")
        assert "tierlog consume TOPIC --group g" in browser.text()
        open_page(browser, console, "/overview")
        browser.run("document.querySelector('a[href=\"#/create\"]').click()")
        browser.until("document.querySelector('form[data-act=create]')")
