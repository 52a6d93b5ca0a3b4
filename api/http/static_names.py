"""The static files of the console and of the documentation, with their media types. They are
served without a token. This module imports nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

SCRIPT: Final = b"text/javascript; charset=utf-8"
STYLE: Final = b"text/css; charset=utf-8"
TEXT: Final = b"text/plain; charset=utf-8"

CONSOLE_NAMES: Final[Mapping[str, bytes]] = {
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
DOCS_NAMES: Final[Mapping[str, bytes]] = {
    "docs.js": SCRIPT,
    "docs.css": STYLE,
    "swagger-ui-bundle.js": SCRIPT,
    "swagger-ui.css": STYLE,
    "LICENSE": TEXT,
    "NOTICE": TEXT,
    "swagger-ui-bundle.js.LICENSE.txt": TEXT,
}
