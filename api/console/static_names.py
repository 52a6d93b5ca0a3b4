"""The names of the files that the page loads, and their media types. A leaf: it imports nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SCRIPT: Final = b"text/javascript; charset=utf-8"
_STYLE: Final = b"text/css; charset=utf-8"
_TEXT: Final = b"text/plain; charset=utf-8"

STATIC_NAMES: Final[Mapping[str, bytes]] = {
    "charts.js": _SCRIPT,
    "console.css": _STYLE,
    "console.js": _SCRIPT,
    "htmx.LICENSE.txt": _TEXT,
    "htmx.min.js": _SCRIPT,
    "icon.svg": b"image/svg+xml",
    "tail.js": _SCRIPT,
    "uplot.LICENSE.txt": _TEXT,
    "uplot.min.css": _STYLE,
    "uplot.min.js": _SCRIPT,
}
