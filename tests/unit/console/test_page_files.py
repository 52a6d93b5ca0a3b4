"""What keeps hostile text from becoming markup is also a rule over the files: none may break it."""

import re
from importlib.resources import files

import pytest
from jinja2 import nodes

from tierlog.api.console.rendering import (
    CONTENT_SECURITY_POLICY,
    byte_size,
    environment,
    grouped,
    moment,
    object_moment,
)
from tierlog.api.http.access.scopes import CONSOLE_NAMES
from tierlog.record_format.units import dollars, rough_duration

CONSOLE = files("tierlog.api.console")
TEMPLATES = sorted(path.name for path in CONSOLE.joinpath("templates").iterdir())
OWN_SCRIPTS = (
    "actions.js",
    "charts.js",
    "choices.js",
    "console.js",
    "download.js",
    "format.js",
    "search.js",
    "tail.js",
    "travel.js",
    "viewer.js",
)


def static(name: str) -> str:
    return CONSOLE.joinpath("static", name).read_text("utf-8")


def test_every_static_file_is_there_and_no_other_is_served() -> None:
    files = {path.name for path in CONSOLE.joinpath("static").iterdir()}
    assert files - set(CONSOLE_NAMES) == {"README.md"}
    assert set(CONSOLE_NAMES) <= files


@pytest.mark.parametrize("name", TEMPLATES)
def test_no_template_marks_anything_as_safe_or_brings_a_script(name: str) -> None:
    source = CONSOLE.joinpath("templates", name).read_text("utf-8")
    parsed = environment().parse(source)
    filters = {node.name for node in parsed.find_all(nodes.Filter)}
    assert not filters & {"safe", "forceescape", "xmlattr", "tojson"}
    assert not list(parsed.find_all(nodes.ScopedEvalContextModifier))
    assert not re.search(r"<script(?!( defer)? src=\"/console/static/)", source)
    assert not re.search(r"\s(style|on\w+|hx-on[:\w-]*|srcdoc)=[\"']", source)
    assert not re.search(r"hx-(post|put|patch|delete|vals|vars)", source)
    assert "autoescape" not in source


@pytest.mark.parametrize("name", OWN_SCRIPTS)
def test_no_script_makes_markup_of_text(name: str) -> None:
    source = static(name)
    for forbidden in (
        "innerHTML =",
        "outerHTML =",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
    ):
        assert forbidden not in source


def test_the_policy_forbids_inline_code() -> None:
    assert "unsafe" not in CONTENT_SECURITY_POLICY
    assert "default-src 'none'" in CONTENT_SECURITY_POLICY
    assert "*" not in CONTENT_SECURITY_POLICY


def _luminance(colour: str) -> float:
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    r, g, b = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * r + 0.7152 * g + 0.0722 * b


def _contrast(one: str, other: str) -> float:
    dark, light = sorted((_luminance(one), _luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_light_and_dark(scheme: str) -> None:
    light, dark, chosen = re.findall(r":root[^{]* \{(.*?)\}", static("console.css"), re.DOTALL)[:3]
    assert dark.split() == chosen.split()
    names = dict(re.findall(r"--(\w[\w-]*): (#[0-9a-f]{6})", light if scheme == "light" else dark))
    for text in ("text", "dim", "link"):
        for back in ("back", "card", "chosen"):
            assert _contrast(names[text], names[back]) >= 4.5, (text, back)
    assert _contrast(names["bad"], names["bad-back"]) >= 4.5
    for lane in ("hot", "cold"):  # graphics: WCAG 1.4.11
        for back in ("lane", "card"):
            assert _contrast(names[lane], names[back]) >= 3, (lane, back)


def test_sizes_have_three_digits() -> None:
    assert [byte_size(n) for n in (0, 999, 1000, 1024, 12_600, 1 << 20, 10**15)] == [
        "0 B",
        "999 B",
        "0.98 KiB",
        "1.00 KiB",
        "12.3 KiB",
        "1.00 MiB",
        "909 TiB",
    ]


def test_times_are_in_utc_and_unknown_ones_a_dash() -> None:
    assert moment(1_372_899_601_005) == "2013-07-04 01:00:01.005Z"
    assert moment(None) == moment(-1) == "–"
    assert object_moment(1_372_899_601_005) == "2013-07-04 01:00:01.005Z"
    assert object_moment(1_372_899_601_000) == "2013-07-04 01:00:01Z", "S3 reports whole seconds"
    assert moment(2**63 - 1) == "9223372036854775807 ms"


def test_other_figures() -> None:
    assert grouped(1_234_567) == "1\u202f234\u202f567"
    assert [rough_duration(ms) for ms in (0, 20, 1500, 150_000, 8_000_000, 10**9)] == [
        "0 s",
        "20 ms",
        "1 s",
        "2 min",
        "2 h",
        "11 d",
    ]
    assert [dollars(x) for x in (0, 4e-7, 0.000026, 0.0013, 0.25, 1234.5)] == [
        "$0.00",
        "under $0.000001",
        "$0.000026",
        "$0.0013",
        "$0.25",
        "$1,234.50",
    ]
