"""The files of the documentation's page, by name. Anybody may read them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from api.console.static_names import SCRIPT, STYLE, TEXT

FILES: Final[Mapping[str, bytes]] = {
    "docs.js": SCRIPT,
    "docs.css": STYLE,
    "swagger-ui-bundle.js": SCRIPT,
    "swagger-ui.css": STYLE,
    "LICENSE": TEXT,
    "NOTICE": TEXT,
    "swagger-ui-bundle.js.LICENSE.txt": TEXT,
}
