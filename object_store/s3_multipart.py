"""Multipart uploads: bounded memory, and a checksum for each part and for the whole object.

* At most `concurrency` parts are in memory; each worker reads its next part into the same buffer,
  since touching fresh pages costs as much as sending them. boto3 sends a bytearray in one call, but
  wraps bytes in a file that it sends in pieces.
* The whole file's CRC-32C is sent with CompleteMultipartUpload (FULL_OBJECT), for stores that check
  it. None is trusted to: the caller verifies the object afterwards.
* CompleteMultipartUpload carries no precondition, since several stores let two writers win it. Keys
  are unique instead.
* A failed upload is aborted, unless it is resumable and a retry may succeed. Resuming skips the
  parts that the store has with the CRC-32C that the file has now.
* Uploads that are never resumed are aborted by garbage collection or by the store's lifecycle rule
  (docs/formats/segment-objects.md).
"""

from __future__ import annotations

import base64
import os
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, wait
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from tierlog.host.threads import Threads
from tierlog.object_store.s3_responses import member_of
from tierlog.object_store.store import (
    ChecksumRefused,
    IncompleteUpload,
    Resumable,
    UploadNotFound,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    MissingObject,
    ShuttingDown,
    StoreUnavailable,
    TierlogError,
)

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MULTIPART_FROM_BYTES = 5 * 1024 * 1024  # S3's minimum part size
MAX_PARTS = 10_000
LIST_PAGE = 1000


class RetriedCall(Protocol):
    """Makes a call to the store: counts it, maps its errors and retries it."""

    def __call__(self, send: Callable[[], Any], *, sent_bytes: int = ...) -> Any: ...


class FileParts(NamedTuple):
    path: Path
    size_bytes: int
    part_bytes: int

    @classmethod
    def of(cls, path: Path, *, size_bytes: int, part_bytes: int) -> FileParts:
        """Parts of `part_bytes`, or larger if S3's limits on their size and number require it."""
        minimum = max(MULTIPART_FROM_BYTES, -(-size_bytes // MAX_PARTS))
        return cls(path, size_bytes, max(part_bytes, minimum))

    @property
    def number_of_parts(self) -> int:
        return -(-self.size_bytes // self.part_bytes)

    def size_of(self, index: int) -> int:
        return min(self.part_bytes, self.size_bytes - index * self.part_bytes)


class _Part(NamedTuple):
    etag: str
    checksum: str


class _OpenUpload(NamedTuple):
    """An upload in progress. `stored` are the parts that a resumed upload has, by index."""

    upload_id: str
    stored: dict[int, _Part]


class MultipartUpload:
    def __init__(
        self, client: S3Client, target: Any, call: RetriedCall, *, write_options: Any, crc32c: int
    ) -> None:
        self._client, self._target, self._call = client, target, call
        self._write_options, self._crc32c = write_options, crc32c
        self._thread_local = threading.local()

    def send_parts(
        self,
        parts: FileParts,
        *,
        concurrency: int,
        pace: Callable[[int], None] | None,
        resumable: Resumable | None = None,
    ) -> None:
        """Upload all parts and complete the upload. Raises the first error; the upload is then
        aborted unless it can be resumed.
        """
        upload = self._open(parts, resumable)
        try:
            done = self._send_all(parts, upload, concurrency=concurrency, pace=pace)
            self._complete(upload.upload_id, done)
        except MissingObject as error:
            raise UploadNotFound(f"upload {upload.upload_id} no longer exists") from error
        except BaseException as error:
            if resumable is None or not _is_resumable(error):
                with suppress(TierlogError):
                    self._abort(upload.upload_id)
            raise

    def _open(self, parts: FileParts, resumable: Resumable | None) -> _OpenUpload:
        if resumable is not None and resumable.upload_id:
            try:
                stored = self._list_parts(parts, resumable.upload_id)
            except (MissingObject, ConfigurationError) as error:  # ListParts may not be permitted
                raise UploadNotFound(f"upload {resumable.upload_id} does not exist") from error
            return _OpenUpload(resumable.upload_id, stored)
        upload_id = self._initiate()
        if resumable is not None:
            resumable.on_initiated(upload_id)
        return _OpenUpload(upload_id, {})

    def _list_parts(self, parts: FileParts, upload_id: str) -> dict[int, _Part]:
        """The parts that the store has, by index: those of the right size and with a CRC-32C."""
        found: dict[int, _Part] = {}
        after = 0
        while True:
            send = partial(
                self._client.list_parts,
                **self._target,
                UploadId=upload_id,
                PartNumberMarker=after,
            )
            response = self._call(send)
            for part in response.get("Parts", []):
                index, checksum = part["PartNumber"] - 1, part.get("ChecksumCRC32C")
                if (
                    index < parts.number_of_parts
                    and part["Size"] == parts.size_of(index)
                    and checksum
                ):
                    found[index] = _Part(part["ETag"], checksum)
            is_truncated = member_of(response, "IsTruncated", key=self._target["Key"])
            if not is_truncated or response["NextPartNumberMarker"] <= after:
                return found
            after = response["NextPartNumberMarker"]

    def _initiate(self) -> str:
        response = self._call(
            lambda: self._client.create_multipart_upload(
                **self._target,
                ChecksumAlgorithm="CRC32C",
                ChecksumType="FULL_OBJECT",
                **self._write_options,
            )
        )
        return str(member_of(response, "UploadId", key=self._target["Key"]))

    def _send_all(
        self,
        parts: FileParts,
        upload: _OpenUpload,
        *,
        concurrency: int,
        pace: Callable[[int], None] | None,
    ) -> list[Any]:
        workers = max(1, min(concurrency, parts.number_of_parts))
        with Threads(workers, name="upload-part") as pool:
            sending = [
                pool.submit(self._send, parts, index, upload, pace)
                for index in range(parts.number_of_parts)
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
            # An error that refers to its own future keeps its frames alive, and so whole parts.
            del failed, sending, done, waiting

    def _send(
        self,
        parts: FileParts,
        index: int,
        upload: _OpenUpload,
        pace: Callable[[int], None] | None,
    ) -> Any:
        stored = upload.stored.get(index)
        if pace is not None and stored is None:
            pace(parts.size_of(index))
        body = self._buffer(parts.size_of(index))
        read_part(parts.path, index * parts.part_bytes, body)
        checksum = encode_crc32c(crc32c_of(body))
        if stored is not None and stored.checksum == checksum:
            return {"PartNumber": index + 1, "ETag": stored.etag, "ChecksumCRC32C": checksum}
        response = self._call(
            lambda: self._client.upload_part(
                **self._target,
                UploadId=upload.upload_id,
                PartNumber=index + 1,
                Body=body,  # type: ignore[arg-type]  # boto3 takes a bytearray
                ChecksumCRC32C=checksum,
            ),
            sent_bytes=len(body),
        )
        etag = member_of(response, "ETag", key=self._target["Key"])
        return {"PartNumber": index + 1, "ETag": etag, "ChecksumCRC32C": checksum}

    def _buffer(self, size_bytes: int) -> bytearray:
        """The worker thread's own buffer."""
        buffer: bytearray | None = getattr(self._thread_local, "buffer", None)
        if buffer is None or len(buffer) != size_bytes:
            buffer = self._thread_local.buffer = bytearray(size_bytes)
        return buffer

    def _complete(self, upload_id: str, parts: list[Any]) -> None:
        # A retry of a completion that had succeeded finds no upload; the caller verifies the object
        # in any case.
        with suppress(MissingObject):
            self._call(
                lambda: self._client.complete_multipart_upload(
                    **self._target,
                    UploadId=upload_id,
                    MultipartUpload={"Parts": parts},
                    ChecksumCRC32C=encode_crc32c(self._crc32c),
                    ChecksumType="FULL_OBJECT",
                )
            )

    def _abort(self, upload_id: str) -> None:
        self._call(lambda: self._client.abort_multipart_upload(**self._target, UploadId=upload_id))


def list_uploads(
    client: S3Client, wanted: Any, call: RetriedCall, limit: int
) -> list[IncompleteUpload]:
    """At most `limit` uploads that are neither completed nor aborted; keys include the prefix."""
    found: list[IncompleteUpload] = []
    after: dict[str, Any] = {}
    while len(found) < limit:
        send = partial(
            client.list_multipart_uploads, **wanted, MaxUploads=min(LIST_PAGE, limit), **after
        )
        response = call(send)
        for upload in response.get("Uploads", []):
            initiated_ms = int(upload["Initiated"].timestamp() * 1000)
            found.append(IncompleteUpload(upload["Key"], upload["UploadId"], initiated_ms))
        markers = {
            "KeyMarker": response.get("NextKeyMarker", ""),
            "UploadIdMarker": response.get("NextUploadIdMarker", ""),
        }
        if not member_of(response, "IsTruncated", key=wanted["Prefix"]) or markers == after:
            break
        after = markers
    return found[:limit]


def _is_resumable(error: BaseException) -> bool:
    if isinstance(error, StoreUnavailable):
        return not error.is_final
    return isinstance(error, ShuttingDown)


def read_part(path: Path, position: int, buffer: bytearray) -> None:
    """Fill `buffer`. Raises ChecksumRefused if the file is shorter than when its CRC was taken."""
    with path.open("rb", buffering=0) as file:
        size_bytes = os.preadv(file.fileno(), [buffer], position)
    if size_bytes != len(buffer):
        raise ChecksumRefused(
            f"{path}: ends at {position + size_bytes}; it was truncated during the upload"
        )


def encode_crc32c(crc: int) -> str:
    """For S3's headers: base64 of the four bytes, most significant first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
