"""Writes `docs/figures.md` from the last results: every row of every claim, met or missed."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

import msgspec

from bench.report import RESULTS, number

PAGE: Final = Path(__file__).parent.parent / "docs" / "figures.md"
_SECTION: Final = "\n## "
_HEAD: Final = """# Figures

Written by `python -m bench --page` out of the last run of each claim; do not edit. What is
measured, against what and how to read it: [bench](../bench/README.md). Ours and the peer's were
taken in turn in one run; figures are medians, ratios the medians of each round's ratio. Machines
are noisy: read ratios, and repeat a run before quoting it. [Why some targets are
missed](../bench/README.md#targets-that-are-missed).
"""


def write(claims: Sequence[str]) -> Path:
    """Write the page. Claims that were not measured in this checkout keep their section."""
    before = dict(_sections(PAGE.read_text()))
    PAGE.write_text("".join([_HEAD, *(_section(name, before) for name in claims)]))
    return PAGE


def _sections(page: str) -> Iterator[tuple[str, str]]:
    """Each section with its claim's name."""
    for section in page.split(_SECTION)[1:]:
        if named := re.search(r"`python -m bench (\w+)`", section):
            yield named[1], _SECTION + section


def _section(name: str, before: Mapping[str, str]) -> str:
    path = RESULTS / f"{name}.json"
    if not path.exists():
        return before.get(name, f"{_SECTION}{name}\nNot measured.\n")
    found = msgspec.json.decode(path.read_bytes())
    machine = found["machine"]
    when = f"{found['measured_at'][:16].replace('T', ' ')} UTC"
    where = (
        f"{machine['cpus']} cores ({machine['cpu']}), load {machine['load'][0]:.1f}, "
        f"Python {machine['python']}"
    )
    peer = found["peer"] or "peer"
    lines = [
        f"{_SECTION}{found['title']}\n`python -m bench {name}`; {when}, {where}.\n",
        f"| | unit | tierlog | {peer} | ratio | target | |",
        "|---|---|---|---|---|---|---|",
        *(_line(row) for row in found["rows"]),
        *(f"\n{note}" for note in found["notes"]),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    return "| " + " | ".join(_cells(row)) + " |"


def _cells(row: dict[str, Any]) -> Iterator[str]:
    yield row["what"]
    yield row["unit"]
    yield number(median(row["ours"]))
    yield number(median(row["peer"])) if row["peer"] else ""
    yield f"{median(row['ratios']):.2f}x" if row["ratios"] else ""
    yield row["target"] or ""
    yield {True: "met", False: "**missed**", None: ""}[row["met"]]
