"""The drawings in docs/pictures: `make docs` writes them, a test compares them.

A drawing is a list of boxes, lines and words at places in a grid of pixels. It brings its own
background and follows the light or dark of the system, so that it looks right on any page.
"""

from __future__ import annotations

import itertools
import re
import sys
from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"

HEAD = """<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">
<title>{title}</title>
<style>
  text {{ font: 13px system-ui, sans-serif; fill: #1f2937; }}
  .small {{ font-size: 11px; fill: #4b5563; }}
  .code {{ font: 12px ui-monospace, Menlo, Consolas, monospace; }}
  .title {{ font-weight: 600; }}
  .page {{ fill: #fbfcfd; }} .plain {{ fill: #ffffff; stroke: #9ca3af; }}
  .hot {{ fill: #fff1e0; stroke: #d97706; }} .cold {{ fill: #e0f2fe; stroke: #0284c7; }}
  .both {{ fill: #ede9fe; stroke: #7c3aed; }}
  .gone {{ fill: none; stroke: #9ca3af; stroke-dasharray: 4 3; }}
  .line {{ stroke: #4b5563; fill: none; stroke-width: 1.4; }} .tip {{ fill: #4b5563; }}
  @media (prefers-color-scheme: dark) {{
    text {{ fill: #e5e7eb; }} .small {{ fill: #9ca3af; }}
    .page {{ fill: #16181d; }} .plain {{ fill: #1f2329; stroke: #6b7280; }}
    .hot {{ fill: #3b2a10; }} .cold {{ fill: #0c2f43; }} .both {{ fill: #2b2150; }}
    .line {{ stroke: #9ca3af; }} .tip {{ fill: #9ca3af; }}
  }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" \
orient="auto"><path class="tip" d="M0 0 8 4 0 8z"/></marker></defs>
<rect class="page" width="{width}" height="{height}" rx="8"/>
"""


class Drawing:
    def __init__(self, title: str, width: int, height: int) -> None:
        self._parts = [HEAD.format(title=escape(title), width=width, height=height)]

    def box(self, kind: str, at: tuple[int, int], size: tuple[int, int], title: str = "") -> None:
        (x, y), (width, height) = at, size
        self._parts.append(
            f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="4"/>\n'
        )
        if title:
            self.words((x + width // 2, y + 18), title, anchor="middle", kind="title")

    def words(
        self, at: tuple[int, int], text: str, *, kind: str = "", anchor: str = "start"
    ) -> None:
        for number, line in enumerate(text.split("\n")):
            self._parts.append(
                f'<text class="{kind}" x="{at[0]}" y="{at[1] + 16 * number}" '
                f'text-anchor="{anchor}">{escape(line)}</text>\n'
            )

    def arrow(self, *points: tuple[int, int], tip: bool = True) -> None:
        path = "L".join(f"{x} {y}" for x, y in points)
        end = ' marker-end="url(#tip)"' if tip else ""
        self._parts.append(f'<path class="line" d="M{path}"{end}/>\n')

    def svg(self) -> str:
        return "".join(self._parts) + "</svg>\n"


def two_tiers() -> str:
    draw = Drawing("Two tiers, one log", 760, 420)
    for x, name, below in (
        (60, "producers", "curl, Client, CLI"),
        (270, "consumers", "curl, Client, CLI"),
    ):
        draw.box("plain", (x, 20), (150, 44), name)
        draw.words((x + 75, 56), below, kind="small", anchor="middle")
    draw.box("plain", (540, 20), (180, 44), "Spark, pandas, DuckDB")
    draw.words((630, 56), "read the bucket themselves", kind="small", anchor="middle")
    draw.arrow((135, 64), (135, 110))
    draw.words((142, 92), "POST records", kind="small")
    draw.arrow((345, 110), (345, 64))
    draw.words((352, 92), "GET from an offset", kind="small")
    draw.box("plain", (30, 110), (460, 140))
    draw.words((46, 130), "broker", kind="title")
    draw.words((110, 130), "check, assign offsets, write, fdatasync, answer", kind="small")
    draw.box("hot", (46, 142), (428, 94))
    draw.words((58, 162), "HOT: local disk", kind="title")
    for number, (name, note) in enumerate(
        ((".log …098112", "sealed"), (".log …102725", "sealed"), (".log …107338", "active"))
    ):
        draw.box("hot", (58 + 138 * number, 174), (126, 50))
        draw.words((121 + 138 * number, 194), name, kind="code", anchor="middle")
        draw.words((121 + 138 * number, 212), note, kind="small", anchor="middle")
    draw.arrow((490, 190), (590, 190), (590, 64))
    draw.words((500, 182), "the tail", kind="small")
    draw.arrow((130, 224), (130, 300))
    draw.words((138, 274), "uploaded, then committed", kind="small")
    draw.arrow((380, 300), (380, 250))
    draw.words((388, 274), "chunks, checked once", kind="small")
    draw.box("cold", (30, 300), (690, 96))
    draw.words((46, 320), "COLD: your bucket", kind="title")
    for x, name, note in (
        (46, "segments/…000-1-ab12.log", "Kafka's bytes as they are"),
        (276, "segments/…000-1-ab12.indexes", "indexes, chunk checksums"),
        (506, "manifest/…007.json", "which objects are the log"),
    ):
        draw.box("cold", (x, 332), (212 if x < 500 else 198, 50))
        draw.words((x + 104, 352), name, kind="code", anchor="middle")
        draw.words((x + 104, 370), note, kind="small", anchor="middle")
    draw.arrow((670, 300), (670, 64))
    draw.words((664, 284), "history", kind="small", anchor="end")
    return draw.svg()


def log() -> str:
    draw = Drawing("A partition's log: offsets, segments and tiers", 760, 250)
    edges = (30, 150, 270, 390, 510, 630, 700)
    kinds = ("gone", "cold", "cold", "both", "hot", "hot")
    notes = ("deleted", "cold", "cold", "in both", "sealed, hot", "active")
    for left, right, kind, note in zip(edges, edges[1:], kinds, notes, strict=False):
        draw.box(kind, (left, 90), (right - left - 4, 54))
        draw.words(((left + right) // 2 - 2, 121), note, kind="small", anchor="middle")
    for x, name in (
        (150, "log start"),
        (390, "local log start"),
        (510, "cold end"),
    ):
        draw.arrow((x, 62), (x, 88))
        draw.words((x, 54), name, anchor="middle")
    for x, name, y in ((672, "high watermark: flushed", 176), (696, "log end: next offset", 208)):
        draw.arrow((x, y - 14), (x, 146))
        draw.words((x - 8, y), name, anchor="end")
    draw.words((30, 30), "older", kind="small")
    draw.words((730, 30), "newer", kind="small", anchor="end")
    draw.arrow((70, 26), (690, 26))
    draw.words((30, 236), "Readers see [log start, high watermark).", kind="small")
    return draw.svg()


def segment() -> str:
    draw = Drawing("A segment and its sparse index", 760, 260)
    draw.words((30, 34), "00000000000000107338.log", kind="code")
    offsets = (107338, 107341, 107352, 107360, 107377, 107391)
    for number, offset in enumerate(offsets):
        draw.box("hot", (30 + 118 * number, 46), (112, 44))
        draw.words((86 + 118 * number, 64), f"batch {offset}", kind="small", anchor="middle")
        draw.words((86 + 118 * number, 80), "header · records", kind="small", anchor="middle")
    draw.words((30, 146), "….index", kind="code")
    draw.words((550, 176), "about one in 4 KiB of log", kind="small")
    for number, (text, target) in enumerate((("+21 → byte 8,211", 2), ("+52 → byte 16,480", 4))):
        x = 110 + 260 * number
        draw.box("plain", (x, 156), (160, 30))
        draw.words((x + 80, 176), text, kind="code", anchor="middle")
        draw.arrow((x + 80, 156), (x + 80, 112), (48 + 118 * target, 112), (48 + 118 * target, 92))
    draw.words(
        (30, 216),
        "An entry: the last offset of a batch, counted from the file's first, and where that batch "
        "begins.\nTo find offset 107370: the last entry not above it (+21), then headers from "
        "there: 107352, 107360.",
        kind="small",
    )
    return draw.svg()


def manifest() -> str:
    draw = Drawing("Manifest versions, pages and objects", 760, 300)
    for number, version in enumerate(("…005", "…006", "…007")):
        draw.box("plain", (30 + 170 * number, 30), (150, 40), f"manifest {version}")
        if number:
            draw.arrow((10 + 170 * number, 50), (28 + 170 * number, 50))
    draw.words((545, 46), "PUT, only if it does not exist:\nof two writers one wins", kind="small")
    draw.box("plain", (30, 110), (700, 70))
    draw.words((42, 130), "version 7 says", kind="title")
    draw.words(
        (42, 150),
        "owner and epoch · log start · newest entries: offsets, size, times, keys, checksums\n"
        "references to pages with older entries · objects to delete after their grace",
        kind="small",
    )
    draw.arrow((445, 70), (445, 108))
    for x, name, note in (
        (30, "pages/…", "older entries"),
        (270, "segments/… .log", "Kafka's bytes"),
        (510, "segments/… .indexes", "indexes, chunk table"),
    ):
        draw.box("cold", (x, 226), (220, 50))
        draw.words((x + 110, 246), name, kind="code", anchor="middle")
        draw.words((x + 110, 264), note, kind="small", anchor="middle")
        draw.arrow((x + 110, 180), (x + 110, 224))
    return draw.svg()


def read_path() -> str:
    draw = Drawing("The way of a read", 760, 270)
    draw.box("plain", (20, 100), (120, 50), "offset")
    draw.words((80, 140), "GET …?offset=", kind="small", anchor="middle")
    draw.box("plain", (190, 100), (140, 50), "which tier?")
    draw.words((260, 140), "local log start", kind="small", anchor="middle")
    draw.arrow((140, 125), (188, 125))
    draw.box("hot", (390, 30), (150, 56), "hot")
    draw.words((465, 70), "segment, index, file", kind="small", anchor="middle")
    draw.arrow((330, 115), (360, 115), (360, 58), (388, 58))
    draw.box("cold", (390, 150), (150, 56), "cold")
    draw.words((465, 190), "manifest, chunk table", kind="small", anchor="middle")
    draw.arrow((330, 135), (360, 135), (360, 178), (388, 178))
    draw.box("cold", (590, 190), (150, 56), "bucket")
    draw.words((665, 230), "GET, CRC-32C, into a file", kind="small", anchor="middle")
    draw.arrow((540, 196), (565, 196), (565, 218), (588, 218))
    draw.words((548, 262), "only if the chunk is not cached", kind="small", anchor="middle")
    draw.arrow((540, 165), (565, 165), (565, 120), (588, 120))
    draw.box("plain", (590, 84), (150, 60), "slice of a file")
    draw.words((665, 126), "sendfile", kind="code", anchor="middle")
    draw.arrow((540, 58), (665, 58), (665, 82))
    draw.arrow((665, 190), (665, 146))
    return draw.svg()


def losses() -> str:
    draw = Drawing("What a crash and a lost disk cost", 760, 250)
    draw.arrow((30, 120), (730, 120))
    draw.words((730, 140), "time", kind="small", anchor="end")
    for x, name in (
        (60, "sent"),
        (170, "written"),
        (300, "flushed: answered"),
        (620, "in a manifest"),
    ):
        draw.arrow((x, 108), (x, 132), tip=False)
        draw.words((x, 98), name, anchor="middle")
    draw.words(
        (430, 56),
        "at most offload.max.lag.ms: 10 minutes by default",
        anchor="middle",
        kind="small",
    )
    draw.arrow((305, 66), (615, 66))
    for y, left, right, kind, text in (
        (150, 60, 296, "hot", "a crash: may be gone"),
        (182, 304, 614, "both", "a crash: kept · a lost disk: gone"),
        (214, 624, 730, "cold", "kept in both"),
    ):
        draw.box(kind, (left, y), (right - left, 26))
        draw.words(((left + right) // 2, y + 18), text, kind="small", anchor="middle")
    return draw.svg()


def flowchart(text: str) -> str:
    """A Mermaid `flowchart TD` of plain arrows, in layers: below all that points to it."""
    names = dict(re.findall(r"(\w+)\[\"(.+?)\"\]", text))
    edges = re.findall(r"^ +(\w+)(?:\[.+?\])? --> (\w+)", text, re.M)
    layer = dict.fromkeys(itertools.chain.from_iterable(edges), 0)
    for _ in layer:
        for upper, lower in edges:
            layer[lower] = max(layer[lower], layer[upper] + 1)
    middles: dict[str, float] = {}
    for depth in range(max(layer.values()) + 1):
        row = [name for name in layer if layer[name] == depth]
        above = {name: [middles[one] for one, other in edges if other == name] for name in row}
        row.sort(key=lambda name: sum(above[name]) / len(above[name]) if above[name] else 0)
        step = 760 / len(row)
        middles |= {name: step * (number + 0.5) for number, name in enumerate(row)}
    places = {name: (int(x), 20 + 84 * layer[name]) for name, x in middles.items()}
    draw = Drawing("Which room imports which", 760, max(y for _, y in places.values()) + 56)
    for upper, lower in edges:
        (x, y), (to_x, to_y) = places[upper], places[lower]
        draw.arrow((x, y + 18), (to_x, to_y - 2))
    for name, (x, y) in places.items():
        label = names.get(name, name)
        width = 8 * len(label) + 24
        draw.box("plain", (x - width // 2, y), (width, 36))
        draw.words((x, y + 23), label, anchor="middle")
    return draw.svg()


DRAWINGS: dict[str, Callable[[], str]] = {
    "two-tiers.svg": two_tiers,
    "log.svg": log,
    "segment.svg": segment,
    "manifest.svg": manifest,
    "read-path.svg": read_path,
    "losses.svg": losses,
}


def main(arguments: Sequence[str]) -> int:
    """Write the drawings; with `--check` compare them, 1 where one is out of date."""
    PICTURES.mkdir(exist_ok=True)
    stale = []
    for name, drawing in DRAWINGS.items():
        path, svg = PICTURES / name, drawing()
        if not path.exists() or path.read_text() != svg:
            stale.append(name)
            if "--check" not in arguments:
                path.write_text(svg)
    return 1 if stale and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
