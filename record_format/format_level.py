"""The format level: which of our own formats a data folder and its bucket may hold.

| level | read since | |
|---|---|---|
| 1 | 0.1.0 | every document and object at its version 1 (docs/formats) |

* A broker reads all levels in LEVELS, and writes what the level of its folder has: so the version
  before it opens what it writes, until `tierlog storage finalize` raises the level.
* A level above LEVELS is refused before anything is changed, with the version that reads it.
* Level 1 is what has no record. So folders and buckets that were never finalized hold nothing that
  a version without levels would not know.
* The record itself keeps its format for ever: sealed JSON of kind `format`, whose unknown members
  are ignored. Otherwise an older version could not say which newer one is needed.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tierlog.record_format import sealed_json
from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import ConfigurationError

FIRST_LEVEL: Final = 1
LEVELS: Final = {FIRST_LEVEL: "0.1.0"}
"""By level, the first version that reads it."""

NEW_FOLDER_LEVEL: Final = FIRST_LEVEL
"""The highest level of the last release, which can thereby open a new folder too."""

KIND_FORMAT: Final = "format"


class FormatLevel(msgspec.Struct, frozen=True, kw_only=True):
    """`read_since`: the first version that reads this level."""

    level: int
    read_since: str


def newest_level() -> int:
    return max(LEVELS)


def encode_level(level: int) -> bytes:
    return sealed_json.encode(FormatLevel(level=level, read_since=LEVELS[level]), kind=KIND_FORMAT)


def decode_level(data: Buffer, *, file: str) -> int:
    """Raises ConfigurationError for a level that this version does not read, CorruptManifest."""
    found = sealed_json.decode(data, kind=KIND_FORMAT, file=file, document=FormatLevel)
    if found.level > newest_level():
        raise ConfigurationError(
            f"{file}: format level {found.level}, which tierlog {found.read_since} and newer read; "
            f"this version reads levels up to {newest_level()}. Nothing was changed"
        )
    return found.level
