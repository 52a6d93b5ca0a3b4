"""Checkpoint files of multipart uploads, which let an upload resume after a crash.

    <folder>/<hash of the partition's folder in the store>.json      at most one per partition

* A checkpoint names the object and its upload id. It applies to exactly one content: if the size,
  CRC-32C or part size of the segment to upload differs, it is ignored.
* It expires well before the grace period after which unreferenced objects are collected, since a
  store may date an object by when its upload was initiated.
* It is deleted before a manifest can name the object, so that no name is ever used for a second
  object.
* A checkpoint that cannot be read or written counts as absent: the upload restarts under a new
  name.

Uploads of one partition run one at a time; different partitions may use different threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from tierlog.record_format import typed_json


class LogContent(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes to upload, and the size of the parts that they are split into."""

    size_bytes: int
    crc32c: int
    part_bytes: int


class UploadCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    log_key: str
    upload_id: str
    content: LogContent
    began_ms: int


class UploadCheckpoints:
    def __init__(self, folder: Path, *, max_age_ms: int, clock: Callable[[], int]) -> None:
        self._folder, self._max_age_ms, self._clock = folder, max_age_ms, clock

    def find(self, segments_folder: str, content: LogContent) -> UploadCheckpoint | None:
        """The upload of this content to this folder that can be resumed, if there is one."""
        try:
            body = self._path(segments_folder).read_bytes()
            found = typed_json.decode(body, UploadCheckpoint)
        except (OSError, msgspec.DecodeError):
            return None
        is_fresh = 0 <= self._clock() - found.began_ms < self._max_age_ms
        matches = found.log_key.startswith(segments_folder) and found.content == content
        return found if is_fresh and matches else None

    def save(
        self, segments_folder: str, log_key: str, content: LogContent, *, upload_id: str
    ) -> None:
        """Record an upload that was just initiated."""
        checkpoint = UploadCheckpoint(
            log_key=log_key, upload_id=upload_id, content=content, began_ms=self._clock()
        )
        path = self._path(segments_folder)
        temp = path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temp.write_bytes(msgspec.json.encode(checkpoint))
            temp.replace(path)
        except OSError:  # a full disk, say: without a checkpoint a crash restarts the upload
            with suppress(OSError):
                temp.unlink(missing_ok=True)

    def delete(self, segments_folder: str) -> None:
        with suppress(OSError):
            self._path(segments_folder).unlink(missing_ok=True)

    def _path(self, segments_folder: str) -> Path:
        name = hashlib.blake2b(segments_folder.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"
