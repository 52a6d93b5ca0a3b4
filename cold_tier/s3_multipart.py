"""One large object in parts: bounded memory, a checksum for each part and for the whole.

* A part is read from the file when a worker takes it up: `concurrency` parts are in memory, no
  more.
* The whole file's CRC-32C goes with the completion, for stores that check it (FULL_OBJECT); no
  store is trusted to have done so: the caller asks it afterwards.
* No precondition is put on the completion: several stores let two writers win it. Names are unique.
* An upload that fails is aborted; where the store does not answer that either, its own lifecycle
  rule has to (docs/formats/segment-objects.md).
"""

from __future__ import annotations

import base64
import os
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from crc32c import crc32c as crc32c_of

from cold_tier.object_store import ChecksumRefused
from record_format.errors import MissingObject, TierlogError

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

MULTIPART_FROM_BYTES = 5 * 1024 * 1024  # S3's smallest part
MAX_PARTS = 10_000


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

    def read(self, index: int) -> bytes:
        return read_part(self.path, index * self.part_bytes, self.size_of(index))


class MultipartUpload:
    def __init__(
        self, client: S3Client, target: Any, repeat: Repeat, *, settings: Any, crc32c: int
    ) -> None:
        self._client, self._target, self._repeat = client, target, repeat
        self._settings, self._crc32c = settings, crc32c

    def run(
        self, parts: PartsOfFile, *, concurrency: int, pace: Callable[[int], None] | None
    ) -> None:
        """Upload and complete, or abort and raise what went wrong first."""
        upload_id = self._begin()
        try:
            done = self._send_all(parts, upload_id, concurrency=concurrency, pace=pace)
            self._complete(upload_id, done)
        except BaseException:
            with suppress(TierlogError):
                self._abort(upload_id)
            raise

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
        upload_id: str,
        *,
        concurrency: int,
        pace: Callable[[int], None] | None,
    ) -> list[Any]:
        workers = max(1, min(concurrency, parts.number))
        with ThreadPoolExecutor(workers, thread_name_prefix="upload-part") as pool:
            sending = [
                pool.submit(self._send, parts, index, upload_id, pace)
                for index in range(parts.number)
            ]
            done, waiting = wait(sending, return_when=FIRST_EXCEPTION)
            for future in waiting:
                future.cancel()
        failed = next((future for future in done if future.exception() is not None), None)
        if failed is not None:
            failed.result()
        return [future.result() for future in sending]

    def _send(
        self,
        parts: PartsOfFile,
        index: int,
        upload_id: str,
        pace: Callable[[int], None] | None,
    ) -> Any:
        if pace is not None:
            pace(parts.size_of(index))
        body = parts.read(index)
        checksum = encode_crc32c(crc32c_of(body))
        answer = self._repeat(
            lambda: self._client.upload_part(
                **self._target,
                UploadId=upload_id,
                PartNumber=index + 1,
                Body=body,
                ChecksumCRC32C=checksum,
            ),
            sent_bytes=len(body),
        )
        return {"PartNumber": index + 1, "ETag": answer["ETag"], "ChecksumCRC32C": checksum}

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


def read_part(path: Path, position: int, size_bytes: int) -> bytes:
    """Raises ChecksumRefused where the file is shorter: it is not what its CRC was taken of."""
    with path.open("rb", buffering=0) as file:
        body = os.pread(file.fileno(), size_bytes, position)
    if len(body) != size_bytes:
        raise ChecksumRefused(f"{path}: ends at {position + len(body)}: changed while it was read")
    return body


def encode_crc32c(crc: int) -> str:
    """As S3's headers want it: base64 of the four bytes, most significant first."""
    return base64.b64encode(crc.to_bytes(4, "big")).decode()
