"""The pages about the schema registry, and records that are shown decoded."""

import base64
import json
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.integration.console.chromium import Chromium
from tests.integration.console.conftest import PHONE, TABLE, Console, open_console
from tests.integration.console.test_accessibility import SETTLED, findings
from tierlog.api.console.schema_pages import COMPARED_MAX, TEXT_MAX, DiffLine, differences
from tierlog.api.http.settings import HttpSettings
from tierlog.api.serving.grants import Scope
from tierlog.api.serving.tokens import create_token

FLIGHT = {
    "type": "record",
    "name": "Flight",
    "fields": [{"name": "carrier", "type": "string"}, {"name": "delay", "type": "int"}],
}
LATER = {
    **FLIGHT,
    "fields": [FLIGHT["fields"][0], {"name": "gate", "type": "string", "default": "<b>none</b>"}],
}
PROTO = 'syntax = "proto3";\nimport "money.proto";\n\nmessage Ticket {\n  Money price = 1;\n}\n'
MONEY = 'syntax = "proto3";\n\nmessage Money {\n  int64 cents = 1;\n}\n'


def register(console: Console, subject: str, schema: object, **more: object) -> int:
    text = schema if isinstance(schema, str) else json.dumps(schema)
    answer = console.post(
        f"/subjects/{quote(subject, safe='')}/versions", json={"schema": text, **more}
    )
    assert answer.status_code == 200, answer.text
    return int(answer.json()["id"])


@pytest.fixture(scope="module")
def schemas(console: Console) -> Console:
    console.topic("legs", schema_validation="id")
    register(console, "legs-value", FLIGHT)
    register(console, "legs-value", LATER)
    register(console, "money", MONEY, schemaType="PROTOBUF")
    reference = {"name": "money.proto", "subject": "money", "version": 1}
    register(console, "tickets-value", PROTO, schemaType="PROTOBUF", references=[reference])
    console.put("/config/money", json={"compatibility": "FULL"})
    return console


def test_subjects_are_listed_with_what_their_latest_version_is(
    browser: Chromium, schemas: Console
) -> None:
    browser.open(f"{schemas.url}/#/subjects")
    browser.until("document.querySelector('#subjects tbody')")
    rows = "[...document.querySelectorAll('#subjects tbody tr')].map(one => one.innerText)"
    shown = {row.split()[0]: row.split()[1:] for row in browser.run(rows)}
    ids = {one["subject"]: str(one["id"]) for one in schemas.get("/schemas").json()}
    assert shown["legs-value"] == ["AVRO", "2", ids["legs-value"], "2", "BACKWARD"]
    assert shown["money"] == ["PROTOBUF", "1", ids["money"], "1", "FULL", "set"]
    nav = "document.querySelector('nav [aria-current]').textContent"
    assert browser.run(nav) == "Schemas"
    browser.run("document.querySelector('[name=filter]').value = 'TICK'")
    browser.run("document.querySelector('form[data-route]').requestSubmit()")
    browser.until(f"{rows}.length === 1")
    browser.run("document.querySelector('#subjects a[data-row]').click()")
    browser.until("document.querySelector('h1').textContent === 'tickets-value'")
    assert 'import "money.proto";' in browser.text()
    browser.run("[...document.querySelectorAll('ul a')].at(-1).click()")
    browser.until("document.querySelector('h1').textContent === 'money'")
    assert "Referred to by\ntickets-value, version 1" in browser.text()


def test_two_versions_are_compared_line_by_line(browser: Chromium, schemas: Console) -> None:
    browser.open(f"{schemas.url}/#/subject?subject=legs-value")
    browser.until("document.querySelector('pre .json-name')")
    assert (
        browser.run("[...document.querySelectorAll('#view h2')].at(-1).textContent") == "Version 2"
    )
    assert '"default": "<b>none</b>"' in browser.text(), "it is indented, and text"
    browser.run("document.querySelector('form[data-route]').requestSubmit()")
    browser.until("document.querySelector('.diff')")
    gone, new = (
        browser.run(f"[...document.querySelectorAll('.diff {tag}')].map(one => one.textContent)")
        for tag in ("del", "ins")
    )
    assert [one.split() for one in gone] == [
        ["-", '"name":', '"delay",'],
        ["-", '"type":', '"int"'],
    ]
    assert '+      "name": "gate",' in new
    assert "3 lines added, 2 removed" in browser.text()
    path = "/console/subject?subject=legs-value&version=1&against=2"
    assert "2 lines added, 3 removed" in " ".join(schemas.get(path).text.split())
    same = schemas.get("/console/subject?subject=money&version=1&against=1").text
    assert "They are the same." in same


def test_versions_that_differ_in_their_references_alone_differ(schemas: Console) -> None:
    register(schemas, "money", MONEY.replace("cents", "pennies"), schemaType="PROTOBUF")
    reference = {"name": "money.proto", "subject": "money", "version": 2}
    register(schemas, "tickets-value", PROTO, schemaType="PROTOBUF", references=[reference])
    shown = schemas.get("/console/subject?subject=tickets-value&version=2&against=1").text
    assert "<ins>+<bdi>money.proto: money, version 2</bdi></ins>" in shown


def test_what_is_too_long_is_not_compared() -> None:
    line = "x\n"
    assert differences(line, line) == []
    assert differences("a", "b\u202e") == [
        DiffLine("place", "@ -1 +1 @@"),
        DiffLine("removed", "a"),
        DiffLine("added", "b⟨U+202E⟩"),
    ]
    assert differences(line * COMPARED_MAX, line) is not None
    assert differences(line, line * (COMPARED_MAX + 1)) is None
    assert differences("x" * (TEXT_MAX + 1), line) is None


def test_a_version_that_is_deleted_is_still_shown(schemas: Console) -> None:
    register(schemas, "gone/é", '"string"')
    schemas.delete("/subjects/gone%2F%C3%A9")
    page = {"subject": "gone/é"}
    shown = schemas.get("/console/subject", params=page).text
    assert '<span class="tag">deleted</span>' in shown
    assert "gone" not in schemas.get("/console/subjects").text
    schemas.delete("/subjects/gone%2F%C3%A9", params={"permanent": "true"})
    assert schemas.get("/console/subject", params=page).json()["code"] == "unknown-schema"


def test_a_topics_page_leads_to_its_subjects(browser: Chromium, schemas: Console) -> None:
    browser.open(f"{schemas.url}/#/topics/legs")
    browser.until("document.querySelector('.tabs')")
    browser.run("document.querySelector('.tabs a[href$=schemas]').click()")
    browser.until("document.querySelector('.tabs [aria-current]')?.textContent === 'Schemas'")
    text = browser.text()
    assert "there is no subject legs-key" in text
    assert "schema.validation is id" in text
    browser.run("document.querySelector('#view td, #view [data-row]').click()")
    browser.until("document.querySelector('h1').textContent === 'legs-value'")


def test_a_broker_without_schemas_says_how_there_are_some(tmp_path: Path) -> None:
    with open_console(tmp_path, bucket=False) as console:
        assert "schema.registry.url" in console.get("/console/subjects").text
        assert console.get("/v1/topics").json()["topics"] == [], "looking makes no topic"


def test_a_token_for_some_topics_sees_their_subjects_alone(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens.json"
    some = create_token(tokens, "r", scopes=(Scope.READ,), topics="eu.", now_ms=1)
    reads = {"Authorization": f"Bearer {some}"}
    all_of_it = create_token(tokens, "a", scopes=tuple(Scope), now_ms=1)
    with open_console(tmp_path, bucket=False, tokens=tokens) as console:
        console.headers["Authorization"] = f"Bearer {all_of_it}"
        for subject in ("eu.a-value", "us.b-value"):
            register(console, subject, '"string"')
        reference = {"name": "a", "subject": "eu.a-value", "version": 1}
        register(console, "us.c-value", '{"type": "array", "items": "int"}', references=[reference])
        listed = console.get("/console/subjects", headers=reads).text
        assert ("eu.a-value" in listed, "us.b-value" in listed) == (True, False)
        shown = console.get("/console/subject?subject=eu.a-value", headers=reads).text
        assert "us.c-value" not in shown
        assert "us.c-value" in console.get("/console/subject?subject=eu.a-value").text
        refused = console.get("/console/subject?subject=us.b-value", headers=reads)
        assert refused.status_code == 403


def fill_decoded(console: Console) -> str:
    """Records of each kind, and such that do not decode."""
    topic = console.topic("decoded")
    key_id = register(console, "decoded-key", '"string"')
    register(console, "decoded-value", FLIGHT)
    sent = {"records": [{"value": {"carrier": "UA", "delay": 2}}]}
    path = f"/v1/topics/{topic}/records"
    console.post(path, json=sent, params={"value_schema_version": "1"}).raise_for_status()
    proto = {"schema": MONEY, "schemaType": "PROTOBUF"}
    money_id = console.post("/subjects/money", json=proto).json()["id"]
    good = console.get(f"/v1/topics/{topic}/partitions/0/records?encoding=base64").json()
    flight = base64.b64decode(good["records"][0]["value_base64"])
    key = b"\0" + key_id.to_bytes(4) + b"\x04UA"
    values = (
        flight,
        b"\0" + money_id.to_bytes(4) + b"\0\x08\x07",
        flight[:-1],
        b"\0\x00\x98\x96\x7fabc",
        b"plain",
    )
    for value in values:
        parts = {"key_base64": key, "value_base64": value}
        console.produce(
            topic, {name: base64.b64encode(one).decode() for name, one in parts.items()}
        )
    return topic


@pytest.fixture(scope="module")
def decoded(schemas: Console) -> str:
    return fill_decoded(schemas)


def test_a_record_is_shown_as_what_it_says_and_as_it_was_sent(
    browser: Chromium, schemas: Console, decoded: str
) -> None:
    browser.open(f"{schemas.url}/#/topics/{decoded}/partitions/0/records?at=earliest")
    browser.until("document.querySelectorAll('.list details[data-offset]').length === 6")
    lines = "[...document.querySelectorAll('summary.line .text')].map(one => one.textContent)"
    shown = browser.run(lines)[2:]
    assert shown[::2] == ['"UA"'] * 5
    assert shown[1::2][:2] == ['{"carrier":"UA","delay":2}', '{"cents":"7"}']
    assert shown[1::2][2].startswith("00 00 00")
    assert shown[1::2][4] == "plain"
    browser.run("document.querySelectorAll('details[data-offset]').forEach(one => one.open = true)")
    browser.until("document.querySelector('[data-offset=\"1\"] .json-name')")
    texts = "[...document.querySelectorAll('details[data-offset]')].map(one => one.innerText)"
    opened = browser.run(texts)
    assert "Value decoded-value, version 1, id " in opened[1]
    assert "Value money, version 1, id " in opened[2], "of another subject"
    assert "Not decoded by the schema with the id" in opened[3]
    assert "it ends early" in opened[3]
    assert "9999999: there is no schema of this id" in opened[4]
    assert "Not decoded" not in opened[5]
    raw = "document.querySelectorAll('[data-offset=\"1\"] .raw')[1]"
    browser.run(f"{raw}.querySelector('summary').click()")
    assert "04 55 41 04" in browser.run(f"{raw}.innerText")
    browser.run(f"{raw}.closest('.opened').querySelectorAll('ul a, h3 a')[1].click()")
    browser.until("document.querySelector('h1').textContent === 'decoded-value'")


def test_what_a_value_says_is_copied_and_so_is_what_was_sent(
    browser: Chromium, schemas: Console, decoded: str
) -> None:
    browser.open(f"{schemas.url}/#/topics/{decoded}/partitions/0/records?at=1&limit=1")
    browser.until("document.querySelector('.list details')")
    browser.run(
        "delete window.ClipboardItem; window.addEventListener('copy', ({ clipboardData }) => "
        "{ window.taken = clipboardData.getData('text/plain') })"
    )
    browser.run("document.querySelectorAll('.list details').forEach(one => one.open = true)")

    def copied(button: str) -> str:
        browser.run(f"document.querySelector('{button}').focus()")
        browser.press("Enter")
        browser.until("document.querySelector('#said').textContent === 'Copied'")
        browser.run("document.querySelector('#said').textContent = ''")
        return str(browser.run("window.taken"))

    assert json.loads(copied("[data-copy-shown]")) == "UA"
    sent = base64.b64decode(copied("[data-copy=value_base64]"))
    assert sent[5:] == b"\x04UA\x04"


def test_what_takes_too_long_is_shown_as_it_was_sent(tmp_path: Path) -> None:
    limits = (("decode_max_ms", 0), ("decode_max_bytes", 3))
    for name, limit in limits:
        http = HttpSettings(**{name: limit})
        with open_console(tmp_path / name, bucket=False, http=http) as console:
            register(console, "money", MONEY, schemaType="PROTOBUF")
            fill_decoded(console)
            shown = console.get("/console/topics/decoded/partitions/0/records?at=earliest").text
        assert f"http.{name.replace('_', '.')} is {limit}" in shown
        assert shown.count("<summary class") == 6


@pytest.mark.parametrize(
    "page",
    [
        "subjects",
        "subject?subject=legs-value",
        "subject?subject=legs-value&version=2&against=1",
        "topics/legs/schemas",
        "topics/decoded/partitions/0/records?at=earliest",
    ],
)
def test_axe_finds_nothing_on_pages_of_schemas(
    browser: Chromium, schemas: Console, decoded: str, page: str
) -> None:
    for width in (TABLE, PHONE):
        browser.emulate(width=width)
        browser.open(f"{schemas.url}/#/{page}")
        browser.until("document.querySelector('#view h1')")
        browser.until(SETTLED)
        browser.run("document.querySelectorAll('.list details').forEach(one => one.open = true)")
        assert findings(browser) == []
        assert browser.run("document.documentElement.scrollWidth") <= width
