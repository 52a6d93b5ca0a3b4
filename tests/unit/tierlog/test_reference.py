"""docs/reference is generated from the tables of the code, and links between pages work."""

import re
import runpy
from pathlib import Path

from tierlog.api.http import problems
from tierlog.api.http.metrics.table import METRICS
from tierlog.api.http.routes import CALLS
from tierlog.api.kafka.handlers import all_calls
from tierlog.api.kafka.refusals import NOT_SERVED, REFUSED
from tierlog.record_format.kafka_messages.apis import APIS

ROOT = Path(__file__).parents[3]
GENERATE = runpy.run_path(str(ROOT / "docs" / "generate.py"))


def test_the_reference_is_up_to_date():
    assert GENERATE["main"](["--check"]) == 0


def test_every_command_and_metric_is_in_the_reference():
    commands = GENERATE["commands_page"]()
    for heading in ("tierlog serve", "tierlog topic create", "tierlog storage verify"):
        assert f"## {heading}\n" in commands
    assert "`--timestamp`" in commands
    assert "| `--step-bytes` | `4GiB` |" in commands
    assert "| `--before` | required |" in commands
    assert commands.count("| `--server` | `http://127.0.0.1:8640` |") == 1, "a common option"
    assert "with commas between them. Or `TIERLOG_SERVER`." in commands
    metrics = GENERATE["metrics_page"]()
    assert metrics.count("`tierlog_") == len(METRICS)


def test_every_call_is_in_the_reference_with_its_scope():
    page = GENERATE["http_page"]()
    for call in CALLS:
        assert f"### {call.method} {call.path}\n" in page
    assert "Delete a topic, its files and its objects. Scope `admin`." in page
    assert "The process is alive. No token." in page
    assert "| `wait_ms` | query | 0 | 0 to 60\u202f000 |" in page


def test_every_setting_is_in_the_reference():
    page = GENERATE["settings_page"]()
    assert "`--retention-check-interval` (seconds)" in page
    assert page.count("TIERLOG_") > 40
    assert "`segment.bytes`" in GENERATE["topic_settings_page"]()


def test_every_problem_is_in_the_reference_with_its_members():
    rows = re.findall(r"^\| \d+ .*$", GENERATE["problems_page"](), re.M)
    lines = {row.split("`")[1]: row for row in rows}
    assert set(lines) == {kind.code for kind in (*problems.TABLE.values(), problems.INTERNAL)}
    assert "| 431 |" in lines["header-too-large"]
    assert "`limit_bytes`, `size_bytes`" in lines["header-too-large"]
    assert "| `file`, `position` |" in lines["corrupt-log"]
    assert lines["disk-full"].endswith("| yes |"), "sent with Retry-After"


def test_every_api_of_kafka_is_in_the_reference_served_or_with_its_reason():
    calls = all_calls()
    assert {one.name for one in APIS.values()} == calls.keys() | NOT_SERVED.keys()
    assert not calls.keys() & NOT_SERVED.keys(), "served, with a reason why it is not"
    assert calls.keys() >= REFUSED.keys()
    page = GENERATE["kafka_page"]()
    for api in APIS.values():
        assert f"| {api.key} | {api.name} |" in page
    assert "| 0 | Produce | 0 to 13 |" in page


def test_decisions_have_unique_numbers_and_are_all_in_the_index():
    folder = ROOT / "docs" / "decisions"
    listed = re.findall(r"^- \[(\d+\. .+)\]\((.+)\)$", (folder / "README.md").read_text(), re.M)
    found = []
    for page in folder.glob("[0-9]*.md"):
        title = page.read_text().partition("\n")[0].removeprefix("# ")
        assert title.startswith(f"{int(page.name[:4])}. "), page.name
        found.append((title, page.name))
    assert sorted(listed) == sorted(found)
    assert len({name[:4] for _, name in found}) == len(found)


def test_links_between_pages_work():
    pages = (ROOT / "README.md", *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md"))
    for page in pages:
        for target in re.findall(r"\]\(([^)#]+)", page.read_text()):
            assert "://" in target or (page.parent / target).exists(), (page.name, target)
