"""The files of the documentation's page, by name: what is served, and served to anybody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

_SCRIPT: Final = b"text/javascript; charset=utf-8"
_STYLE: Final = b"text/css; charset=utf-8"
_TEXT: Final = b"text/plain; charset=utf-8"
FILES: Final[Mapping[str, bytes]] = {
    "docs.js": _SCRIPT,
    "docs.css": _STYLE,
    "swagger-ui-bundle.js": _SCRIPT,
    "swagger-ui.css": _STYLE,
    "LICENSE": _TEXT,
    "NOTICE": _TEXT,
    "swagger-ui-bundle.js.LICENSE.txt": _TEXT,
}
