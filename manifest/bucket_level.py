"""The format level of a bucket (`record_format.format_level`), in `format/<version>.json`.

* Versioned like a topic object (`versions`): the newest whole version counts, and none is ever
  changed or deleted. Without one the level is 1.
* The level only rises. It is raised before anything of that level is written to the bucket.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

from tierlog.manifest.versions import VersionChain
from tierlog.object_store.store import ObjectStore
from tierlog.record_format.errors import ManifestConflict
from tierlog.record_format.format_level import FIRST_LEVEL, decode_level, encode_level

FORMAT_FOLDER: Final = "format/"
MAX_BYTES: Final = 64 * 1024
ATTEMPTS: Final = 16


class BucketLevel:
    def __init__(self, store: ObjectStore, *, pause: Callable[[float], None] = time.sleep) -> None:
        self._url = store.url
        self._chain = VersionChain(store, FORMAT_FOLDER, max_bytes=MAX_BYTES, pause=pause)

    def read_level(self) -> int:
        """Raises ConfigurationError for a level that this version does not read, CorruptManifest,
        StoreUnavailable.
        """
        return self._level_below(self._chain.newest_version() + 1)

    def raise_level(self, level: int) -> None:
        """The bucket's level is at least `level` when this returns. Idempotent.

        Raises what `read_level` raises, OutcomeUnknownError, ManifestConflict.
        """
        for _ in range(ATTEMPTS):
            version = self._chain.newest_version() + 1
            if self._level_below(version) >= level:
                return
            self._chain.create_version(version, encode_level(level))
        raise ManifestConflict(f"{self._chain.folder}: {ATTEMPTS} conflicts in a row")

    def _level_below(self, number: int) -> int:
        for version, data in self._chain.whole_below(number):
            return decode_level(data, file=f"{self._url}/{self._chain.key(version)}")
        return FIRST_LEVEL
