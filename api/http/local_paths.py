"""Local paths in responses are reduced to the partition's folder and the file: where a broker keeps
its data does not concern its clients.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import PurePath
from typing import Final

_NOT_WITHIN_A_PATH: Final = r"(?<![\w/:.-])"
_PART: Final = r"/[\w.@+-]+"
# An absolute path of three or more parts, as in errors of the operating system.
_LOCAL_PATH: Final = re.compile(f"{_NOT_WITHIN_A_PATH}(?:{_PART}){{3,}}")


def short_path(path: str) -> str:
    """The partition's folder and the file, without the rest of the local path."""
    return "/".join(PurePath(path).parts[-2:]) if path else ""


def shorten_paths(text: str) -> str:
    """Reduce the local paths in a text, in which a path ends at a space."""
    return _LOCAL_PATH.sub(lambda found: short_path(found.group()), text)


def path_shortener(data_dir: PurePath) -> Callable[[str], str]:
    """As `shorten_paths`, for a broker: the path of its data folder may contain a space."""
    if not data_dir.is_absolute():
        return shorten_paths
    inside = re.compile(f"{_NOT_WITHIN_A_PATH}{re.escape(str(data_dir))}((?:{_PART})*)")

    def shorten(text: str) -> str:
        text = inside.sub(lambda found: short_path(data_dir.name + found[1]), text)
        return shorten_paths(text)

    return shorten
