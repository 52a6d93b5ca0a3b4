"""What may be a topic: Kafka's rule for names (Topic.validate), how many partitions it has, the
type of its configuration's values.

Names become folder names, object keys and fields of Kafka's checkpoint files, so they are checked
wherever they come from: a request, or the bucket.
"""

from __future__ import annotations

import re
from typing import Final

MAX_NAME_LENGTH: Final = 249  # the partition's number and a suffix must fit a 255-byte file name
MAX_PARTITIONS: Final = 10_000  # of one topic; each is a folder and open files
_LEGAL_NAME: Final = re.compile(r"[a-zA-Z0-9._-]+\Z")


def name_problem(name: str) -> str:
    """Why no topic can have this name; empty if one can."""
    if not name:
        return "a topic name may not be empty"
    if name in (".", ".."):
        return f"a topic may not be named {name!r}"
    if len(name) > MAX_NAME_LENGTH:
        return f"a topic name has at most {MAX_NAME_LENGTH} characters, this one {len(name)}"
    if not _LEGAL_NAME.match(name):
        return f"topic name {name!r}: only letters, digits, '.', '_' and '-'"
    return ""


ConfigValue = int | float | bool | str
