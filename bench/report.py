"""A benchmark's result: rows of figures, printed as a table and kept as JSON.

* A figure is the median of several rounds; its lowest and highest value are shown beside it.
* A ratio is computed within each round, ours over the peer's, and the median of the ratios is
  shown: the two were measured seconds apart, so other load on the machine affected both.
* A target is shown beside its figure, but nothing is asserted: a figure that misses it is marked,
  and the program still succeeds.
"""

from __future__ import annotations

import datetime
import os
import platform
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

RESULTS: Final = Path(__file__).parent / "results"


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a figure should reach. `of_ratio`: the ratio to the peer, not our own figure."""

    value: float
    at_most: bool = False
    of_ratio: bool = True

    def __str__(self) -> str:
        return f"{'≤' if self.at_most else '≥'} {number(self.value)}{'x' if self.of_ratio else ''}"

    def is_met(self, figure: float) -> bool:
        return figure <= self.value if self.at_most else figure >= self.value


@dataclass(frozen=True, kw_only=True)
class Row:
    """One figure, ours and a peer's, one value per round. `peer` is empty if there is none."""

    what: str
    unit: str
    ours: Sequence[float]
    peer: Sequence[float] = ()
    target: Target | None = None

    @property
    def ratios(self) -> list[float]:
        return [own / other for own, other in zip(self.ours, self.peer, strict=False) if other > 0]

    @property
    def is_met(self) -> bool | None:
        """None if there is no target."""
        figures = self.ratios if self.target and self.target.of_ratio else self.ours
        if self.target is None or not figures:
            return None
        return self.target.is_met(median(figures))


@dataclass(kw_only=True)
class Report:
    """The rows of one claim. `peer` names what ours is compared with, `notes` what was left out."""

    name: str
    title: str
    peer: str
    rows: list[Row] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add(
        self,
        what: str,
        unit: str,
        ours: Sequence[float],
        peer: Sequence[float] = (),
        *,
        target: Target | None = None,
    ) -> None:
        self.rows.append(Row(what=what, unit=unit, ours=ours, peer=peer, target=target))

    def add_latency(
        self,
        what: str,
        ours: Sequence[list[float]],
        peer: Sequence[list[float]],
        *,
        peer_is: str | None = None,
        targets: Mapping[float, Target] = MappingProxyType({}),
    ) -> None:
        """The median and p99 of each round's milliseconds; `targets` by share."""
        note = "" if peer_is is None else f" (peer: {peer_is})"
        for share in (0.5, 0.99):
            self.add(
                f"{what}, p{share * 100:.0f}{note}",
                "ms",
                [percentile(one, share) for one in ours],
                [percentile(one, share) for one in peer],
                target=targets.get(share),
            )


def percentile(values: list[float], share: float) -> float:
    """The value below which `share` of them are."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def show(report: Report, console: Console) -> None:
    table = Table(title=report.title, title_justify="left", title_style="bold")
    table.add_column("")
    table.add_column("unit")
    for heading in ("tierlog", "least to most", report.peer):
        table.add_column(heading, justify="right")
    table.add_column("ratio", justify="right")
    table.add_column("target", justify="right")
    for row in report.rows:
        table.add_row(*_cells(row))
    console.print(table)
    for note in report.notes:
        console.print(f"  {note}", style="dim", highlight=False)


def save(report: Report) -> Path:
    """Write `bench/results/<name>.json`, including the machine that was measured."""
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{report.name}.json"
    rows = [
        {**asdict(row), "ratios": row.ratios, "target": row.target and str(row.target)}
        | {"met": row.is_met}
        for row in report.rows
    ]
    document = {
        "name": report.name,
        "title": report.title,
        "peer": report.peer,
        "measured_at": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpus": os.cpu_count(),
            "cpu": _cpu(),
            "kernel": platform.release(),
            "python": platform.python_version(),
            "load": os.getloadavg(),
        },
        "rows": rows,
        "notes": report.notes,
    }
    path.write_bytes(msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")
    return path


def _cpu() -> str:
    """Virtual machines often hide the name, but not the family."""
    about = Path("/proc/cpuinfo").read_text()
    found = re.search(r"cpu family\s+: (\d+)\nmodel\s+: (\d+)\nmodel name\s+: (.+)", about)
    if found is None:
        return platform.machine()
    return f"{found[3]}, family {found[1]}, model {found[2]}"


def _cells(row: Row) -> list[str]:
    ratio = f"{median(row.ratios):.2f}x" if row.ratios else ""
    marks = {True: "[green]", False: "[red]", None: ""}
    target = f"{marks[row.is_met]}{row.target}" if row.target else ""
    return [
        row.what,
        row.unit,
        number(median(row.ours)),
        f"{number(min(row.ours))} to {number(max(row.ours))}",
        number(median(row.peer)) if row.peer else "",
        ratio,
        target,
    ]


def number(value: float) -> str:
    size = abs(value)
    if size >= 100:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 10 else f"{value:.2f}".rstrip("0").rstrip(".") or "0"
