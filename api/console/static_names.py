"""The names of the files that the page loads, and their media types. A leaf: it imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SCRIPT: Final = b"text/javascript; charset=utf-8"
STYLE: Final = b"text/css; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"

STATIC_NAMES: Final[Mapping[str, bytes]] = {
    "charts.js": SCRIPT,
    "console.css": STYLE,
    "console.js": SCRIPT,
    "htmx.LICENSE.txt": TEXT,
    "htmx.min.js": SCRIPT,
    "icon.svg": b"image/svg+xml",
    "tail.js": SCRIPT,
    "uplot.LICENSE.txt": TEXT,
    "uplot.min.css": STYLE,
    "uplot.min.js": SCRIPT,
}
