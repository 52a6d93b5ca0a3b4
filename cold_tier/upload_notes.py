"""What a crash leaves of an upload in parts: its name in the store and its id, in a file.

    <folder>/<hash of the partition's folder in the store>.json      one at most a partition

* A note is of exactly one content: where size, CRC-32C or part size of what is to go up are others,
  it says nothing.
* It is believed for so long only: well below the grace after which what nothing names is collected,
  since a store may date an object by the beginning of its upload.
* It goes before the object that it led to may be named by a manifest, so that no name is ever used
  for a second object.
* What cannot be read, or written, is no note: the upload starts over, under a new name.

A partition's uploads go one after the other; different partitions may come from any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from record_format import typed_json


class LogContent(msgspec.Struct, frozen=True, kw_only=True):
    """What goes up, and how it is cut."""

    size_bytes: int
    crc32c: int
    part_bytes: int


class UploadNote(msgspec.Struct, frozen=True, kw_only=True):
    log_key: str
    upload_id: str
    content: LogContent
    began_ms: int


class UploadNotes:
    def __init__(self, folder: Path, *, kept_ms: int, clock: Callable[[], int]) -> None:
        self._folder, self._kept_ms, self._clock = folder, kept_ms, clock

    def find(self, segments_folder: str, content: LogContent) -> UploadNote | None:
        """An upload of this content into this folder that was begun, and may go on."""
        try:
            body = self._path(segments_folder).read_bytes()
            note = typed_json.decode(body, UploadNote)
        except (OSError, msgspec.DecodeError):
            return None
        fresh = 0 <= self._clock() - note.began_ms < self._kept_ms
        ours = note.log_key.startswith(segments_folder) and note.content == content
        return note if fresh and ours else None

    def write(
        self, segments_folder: str, log_key: str, content: LogContent, *, upload_id: str
    ) -> None:
        """An upload of this content begins now."""
        note = UploadNote(
            log_key=log_key, upload_id=upload_id, content=content, began_ms=self._clock()
        )
        path = self._path(segments_folder)
        temp = path.with_suffix(".new")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            temp.write_bytes(msgspec.json.encode(note))
            temp.replace(path)
        except OSError:  # a full disk: then a crash costs the upload
            with suppress(OSError):
                temp.unlink(missing_ok=True)

    def forget(self, segments_folder: str) -> None:
        with suppress(OSError):
            self._path(segments_folder).unlink(missing_ok=True)

    def _path(self, segments_folder: str) -> Path:
        name = hashlib.blake2b(segments_folder.encode(), digest_size=16).hexdigest()
        return self._folder / f"{name}.json"
