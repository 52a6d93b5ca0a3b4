"""What a refusal says of bytes that fail their check, or are gone: where, and what to do about it.

* Of a path of this machine: the partition's folder and the file, and no more.
* Of an object: its key within the store's prefix, which for a folder is a path of this machine.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from record_format.errors import (
    CorruptDataError,
    CorruptManifest,
    CorruptObject,
    MissingObject,
    UnknownFormatVersion,
)

_IN_BUCKET: Final = (MissingObject, CorruptObject, CorruptManifest)
_TOPIC_OF_FILE: Final = re.compile(r"([a-zA-Z0-9._-]+)-\d+/")
_TOPIC_OF_OBJECT: Final = re.compile(r"topics/([a-zA-Z0-9._-]+)/[^/]+/\d+/")


def short_path(path: str) -> str:
    """The partition's folder and the file: what an operator needs, and nothing more of the path."""
    return "/".join(PurePath(path).parts[-2:]) if path else ""


def corruption_detail(error: CorruptDataError) -> str:
    """As the error's own text, and what helps, unless it says so already."""
    in_bucket = isinstance(error, _IN_BUCKET) and not PurePath(error.file).is_absolute()
    file = error.file if in_bucket else short_path(error.file)
    text = str(
        CorruptDataError(error.detail, file=file, position=error.position, offset=error.offset)
    )
    topic = (_TOPIC_OF_OBJECT if in_bucket else _TOPIC_OF_FILE).match(file)
    if topic is None or "`" in error.detail or isinstance(error, UnknownFormatVersion):
        return text
    return (
        f"{text}; `tierlog storage verify {topic[1]} --deep` says what else is bad, "
        f"`tierlog storage repair {topic[1]}` mends it"
    )
