"""The `detail` of a problem about corrupt or missing bytes: where they are, and what to do.

* A local path is reduced to the partition's folder and the file.
* An object is named by its key within the store's prefix; of a store in a folder, the prefix is a
  local path.
"""

from __future__ import annotations

import re
from pathlib import PurePath
from typing import Final

from api.http.local_paths import short_path
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


def corruption_detail(error: CorruptDataError) -> str:
    """The error's own text, and which commands help unless it names one already."""
    in_bucket = isinstance(error, _IN_BUCKET) and not PurePath(error.file).is_absolute()
    file = error.file if in_bucket else short_path(error.file)
    text = str(
        CorruptDataError(error.detail, file=file, position=error.position, offset=error.offset)
    )
    topic = (_TOPIC_OF_OBJECT if in_bucket else _TOPIC_OF_FILE).match(file)
    if topic is None or "`" in error.detail or isinstance(error, UnknownFormatVersion):
        return text
    return (
        f"{text}; `tierlog storage verify {topic[1]} --deep` reports what else is corrupt, "
        f"`tierlog storage repair {topic[1]}` repairs it"
    )
