"""docs/architecture.md, and how it names files and functions."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = re.sub(r"\n {2,3}(?=\S)", " ", (ROOT / "docs" / "architecture.md").read_text())
"""With the lines of a list's items joined."""

NAMED = re.compile(r"`([\w/]+\.py)`((?:[ ,|]+`[A-Za-z_][\w.]*`)+)")
"""A file, and directly behind it what it defines."""
WALK = re.compile(r"^### (.+?)\n\n(.+?)(?=^##|\Z)", re.M | re.S)


def functions_in(text: str) -> list[tuple[str, str]]:
    """(file, function or class) for each that `text` names."""
    return [
        (file, name)
        for file, names in NAMED.findall(text)
        for name in re.findall(r"`([\w.]+)`", names)
    ]
