"""One large object in parts: bounded memory, a checksum for each part and for the whole.

* A part is read from the file when a worker takes it up: `concurrency` parts are in memory, no
  more. A worker's parts share its memory, for fresh pages cost as much as the sending does. As a
  bytearray boto3 sends them in one call; of bytes it would make a file that it sends in pieces.
* The whole file's CRC-32C goes with the completion, for stores that check it (FULL_OBJECT); no
  store is trusted to have done so: the caller asks it afterwards.
* No precondition is put on the completion: several stores let two writers win it. Names are unique.
* An upload that fails is aborted. One that may go on later is not, where another try may do: then
  a part is sent again unless the store says that it has it, with the CRC-32C that the file gives.
* What is never taken up again is aborted by garbage collection, or by the store's own lifecycle
  rule (docs/formats/segment-objects.md).
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from crc32c import crc32c as crc32c_of

from cold_tier.object_store import ChecksumRefused, IncompleteUpload, Resumable, UploadNotFound
from cold_tier.retry import is_final
from record_format.errors import (
    ConfigurationError,
    MissingObject,
    ShuttingDown,
    StoreUnavailable,
    TierlogError,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MULTIPART_FROM_BYTES = 5 * 1024 * 1024  # S3's smallest part
MAX_PARTS = 10_000
LIST_PAGE = 1000


class Repeat(Protocol):
    """Calls, counts, maps errors, and repeats what may be."""

    def __call__(self, send: Callable[[], Any], *, sent_bytes: int = ...) -> Any: ...


class PartsOfFile(NamedTuple):
    path: Path
    size_bytes: int
    part_bytes: int

    @classmethod
    def of(cls, path: Path, *, size_bytes: int, part_bytes: int) -> PartsOfFile:
        """Parts of `part_bytes`, larger where S3 would not take so small or so many."""
        least = max(MULTIPART_FROM_BYTES, -(-size_bytes // MAX_PARTS))
        return cls(path, size_bytes, max(part_bytes, least))

    @property
    def number(self) -> int:
        return -(-self.size_bytes // self.part_bytes)

    def size_of(self, index: int) -> int:
        return min(self.part_bytes, self.size_bytes - index * self.part_bytes)

    def read_into(self, room: bytearray, index: int) -> None:
        read_part(self.path, index * self.part_bytes, room)


class _Part(NamedTuple):
    etag: str
    checksum: str


class _Open(NamedTuple):
    """An upload that goes on; `stored`: parts that the store had when it was taken up, by index."""

    upload_id: str
    stored: dict[int, _Part]


class MultipartUpload:
    def __init__(
        self, client: S3Client, target: Any, repeat: Repeat, *, settings: Any, crc32c: int
    ) -> None:
        self._client, self._target, self._repeat = client, target, repeat
        self._settings, self._crc32c = settings, crc32c
        self._own = threading.local()

    def run(
        self,
        parts: PartsOfFile,
        *,
        concurrency: int,
        pace: Callable[[int], None] | None,
        resumable: Resumable | None = None,
    ) -> None:
        """Upload and complete, or raise what went wrong first; aborted unless it may go on."""
        upload = self._open(parts, resumable)
        try:
            done = self._send_all(parts, upload, concurrency=concurrency, pace=pace)
            self._complete(upload.upload_id, done)
        except BaseException as error:
            if resumable is None or not _may_go_on(error):
                with suppress(TierlogError):
                    self._abort(upload.upload_id)
            raise

    def _open(self, parts: PartsOfFile, resumable: Resumable | None) -> _Open:
        if resumable is not None and resumable.upload_id:
            try:
                return _Open(resumable.upload_id, self._stored(parts, resumable.upload_id))
            except (MissingObject, ConfigurationError) as error:  # ListParts may not be allowed
                raise UploadNotFound(f"upload {resumable.upload_id} is not there") from error
        upload_id = self._begin()
        if resumable is not None:
            resumable.on_initiated(upload_id)
        return _Open(upload_id, {})

    def _stored(self, parts: PartsOfFile, upload_id: str) -> dict[int, _Part]:
        """What the store has, by index: of the right size, and with a CRC-32C to compare."""
        found: dict[int, _Part] = {}
        after = 0
        while True:
            send = partial(
                self._client.list_parts,
                **self._target,
                UploadId=upload_id,
                PartNumberMarker=after,
            )
            answer = self._repeat(send)
            for one in answer.get("Parts", []):
                index, checksum = one["PartNumber"] - 1, one.get("ChecksumCRC32C")
                if index < parts.number and one["Size"] == parts.size_of(index) and checksum:
                    found[index] = _Part(one["ETag"], checksum)
            if not answer["IsTruncated"] or answer["NextPartNumberMarker"] <= after:
                return found
            after = answer["NextPartNumberMarker"]

    def _begin(self) -> str:
        answer = self._repeat(
            lambda: self._client.create_multipart_upload(
                **self._target,
                ChecksumAlgorithm="CRC32C",
                ChecksumType="FULL_OBJECT",
                **self._settings,
            )
        )
        return str(answer["UploadId"])

    def _send_all(
        self,
        parts: PartsOfFile,
        upload: _Open,
        *,
        concurrency: int,
        pace: Callable[[int], None] | None,
    ) -> list[Any]:
        workers = max(1, min(concurrency, parts.number))
        with ThreadPoolExecutor(workers, thread_name_prefix="upload-part") as pool:
            sending = [
                pool.submit(self._send, parts, index, upload, pace) for index in range(parts.number)
            ]
            done, waiting = wait(sending, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
        failed = next((future for future in done if future.exception() is not None), None)
        try:
            if failed is not None:
                failed.result()
            return [future.result() for future in sending]
        finally:
            # An error that holds its own future keeps alive what its frames hold: whole parts.
            del failed, sending, done, waiting

    def _send(
        self,
        parts: PartsOfFile,
        index: int,
        upload: _Open,
        pace: Callable[[int], None] | None,
    ) -> Any:
        stored = upload.stored.get(index)
        if pace is not None and stored is None:
            pace(parts.size_of(index))
        body = self._room(parts.size_of(index))
        parts.read_into(body, index)
        checksum = encode_crc32c(crc32c_of(body))
        if stored is not None and stored.checksum == checksum:
            return {"PartNumber": index + 1, "ETag": stored.etag, "ChecksumCRC32C": checksum}
        answer = self._repeat(
            lambda: self._client.upload_part(
                **self._target,
                UploadId=upload.upload_id,
                PartNumber=index + 1,
                Body=body,  # type: ignore[arg-type]  # boto3 takes a bytearray
                ChecksumCRC32C=checksum,
            ),
            sent_bytes=len(body),
        )
        return {"PartNumber": index + 1, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

    def _room(self, size_bytes: int) -> bytearray:
        """The worker's own."""
        room: bytearray | None = getattr(self._own, "room", None)
        if room is None or len(room) != size_bytes:
            room = self._own.room = bytearray(size_bytes)
        return room

    def _complete(self, upload_id: str, parts: list[Any]) -> None:
        # A repeat of a completion that had landed finds no upload: what is there then is confirmed
        # by the caller, as always.
        with suppress(MissingObject):
            self._repeat(
                lambda: self._client.complete_multipart_upload(
                    **self._target,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC32C=encode_crc32c(self._crc32c),
                    ChecksumType="FULL_OBJECT",
                )
            )

    def _abort(self, upload_id: str) -> None:
        self._repeat(
            lambda: self._client.abort_multipart_upload(**self._target, UploadId=upload_id)
        )


def list_uploads(
    client: S3Client, wanted: Any, repeat: Repeat, limit: int
) -> list[IncompleteUpload]:
    """At most `limit` uploads that were begun and not ended; keys are the store's own."""
    found: list[IncompleteUpload] = []
    after: dict[str, Any] = {}
    while len(found) < limit:
        send = partial(
            client.list_multipart_uploads, **wanted, MaxUploads=min(LIST_PAGE, limit), **after
        )
        answer = repeat(send)
        for one in answer.get("Uploads", []):
            initiated_ms = int(one["Initiated"].timestamp() * 1000)
            found.append(IncompleteUpload(one["Key"], one["UploadId"], initiated_ms))
        marks = {
            "KeyMarker": answer.get("NextKeyMarker", ""),
            "UploadIdMarker": answer.get("NextUploadIdMarker", ""),
        }
        if not answer["IsTruncated"] or marks == after:
            break
        after = marks
    return found[:limit]


def _may_go_on(error: BaseException) -> bool:
    if isinstance(error, StoreUnavailable):
        return not is_final(error)
    return isinstance(error, ShuttingDown)


def read_part(path: Path, position: int, room: bytearray) -> None:
    """Fill `room`. Raises ChecksumRefused if the file is shorter: it is not what its CRC was
    taken of.
    """
    with path.open("rb", buffering=0) as file:
        size_bytes = os.preadv(file.fileno(), [room], position)
    if size_bytes != len(room):
        raise ChecksumRefused(f"{path}: ends at {position + size_bytes}: changed while it was read")


def encode_crc32c(crc: int) -> str:
    """As S3's headers want it: base64 of the four bytes, most significant first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
