"""An ObjectStore on S3 or a compatible service: writes, lists and whole objects. `s3_ranged_get`
has the other reads, and how a request is made.

* Every write carries the CRC-32C of its bytes in a header, computed here (botocore[crt] is not
  needed).

Thread-safe: boto3's clients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

from tierlog.host.retry import (
    ChecksumMismatch,
    retry_on_checksum_mismatch,
)
from tierlog.object_store.s3_multipart import (
    MULTIPART_FROM_BYTES,
    FileParts,
    MultipartUpload,
    encode_crc32c,
    list_uploads,
    read_part,
)
from tierlog.object_store.s3_ranged_get import S3Reads
from tierlog.object_store.s3_responses import (
    ErrorResponse,
    Fault,
    classify,
    error_for,
    member_of,
    reported_crc32c,
    response_time_ms,
)
from tierlog.object_store.store import (
    PIECE_BYTES,
    IncompleteUpload,
    IncompleteUploads,
    Names,
    ObjectStat,
    ObjectStats,
    Resumable,
    check_key,
    check_prefix,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    MissingObject,
    OutcomeUnknownError,
    StoreUnavailable,
)

LIST_PAGE = 1000
DELETE_PAGE = 1000
PART_BYTES = 16 * 1024 * 1024


class S3Store(S3Reads):
    # --- writing ----------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        body: bytes | bytearray | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        check_key(key)
        data = bytes(body) if isinstance(body, memoryview) else body
        checksum = encode_crc32c(crc32c_of(data) if crc32c is None else crc32c)
        condition: Any = {"IfNoneMatch": "*"} if if_absent else {}

        def send() -> Any:
            response: Any = self._client.put_object(
                **self._target(key),
                Body=data,  # type: ignore[arg-type]  # boto3 takes a bytearray
                ChecksumCRC32C=checksum,
                **condition,
                **self._write_options(key),
            )
            if "ETag" not in response:  # another kind of server, in the store's place for a while
                kind = OutcomeUnknownError if if_absent else StoreUnavailable
                raise kind(f"{key}: the response has no ETag")
            return response

        response = self._call("put", key, send, creates=if_absent, sent_bytes=len(data))
        return ObjectStat(key, len(data), reported_crc32c(response), response_time_ms(response))

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size_bytes: int,
        crc32c: int,
        part_bytes: int = PART_BYTES,
        concurrency: int = 4,
        pace: Callable[[int], None] | None = None,
        resumable: Resumable | None = None,
    ) -> ObjectStat:
        check_key(key)
        if size_bytes <= max(part_bytes, MULTIPART_FROM_BYTES):
            if pace is not None:
                pace(size_bytes)
            body = bytearray(size_bytes)
            read_part(path, 0, body)
            self.put(key, body, crc32c=crc32c)
        else:
            upload = MultipartUpload(
                self._client,
                self._target(key),
                partial(self._call, "put", key),
                write_options=self._write_options(key),
                crc32c=crc32c,
            )
            parts = FileParts.of(path, size_bytes=size_bytes, part_bytes=part_bytes)
            upload.send_parts(parts, concurrency=concurrency, pace=pace, resumable=resumable)
        stored = self.head(key)
        if stored is None:
            raise StoreUnavailable(f"{key}: the store accepted it but does not have it")
        return stored

    def delete(self, keys: Sequence[str]) -> None:
        # Not checked: LIST shows keys of other tools too, such as the `folder/` of a console.
        refused: list[tuple[str, ErrorResponse]] = []
        for begin in range(0, len(keys), DELETE_PAGE):
            page = keys[begin : begin + DELETE_PAGE]
            refused += self._call("delete", page[0], partial(self._delete_page, page))
        if refused:
            key, fault = refused[0]
            raise error_for(fault, operation="delete", key=key, url=self.url)

    def _delete_page(self, keys: Sequence[str]) -> list[tuple[str, ErrorResponse]]:
        """The keys that may not be deleted, and why."""
        objects: Any = [{"Key": self.full_key(key)} for key in keys]
        response: Any = self._client.delete_objects(
            Bucket=self._bucket, Delete={"Objects": objects, "Quiet": True}
        )
        refused = []
        for failed in response.get("Errors", []):
            key = failed.get("Key", keys[0])
            # It has no status: what the table does not know is refused, and not an outage.
            fault = ErrorResponse(400, failed.get("Code", ""), failed.get("Message", ""))
            kind = classify(fault)
            if kind is Fault.MISCONFIGURED:
                refused.append((key, fault))
            elif kind is not Fault.MISSING:
                raise error_for(fault, operation="delete", key=key, url=self.url)
        return refused

    def incomplete_uploads(self, prefix: str, *, limit: int) -> IncompleteUploads:
        check_prefix(prefix)
        wanted = {"Bucket": self._bucket, "Prefix": self.full_key(prefix)}
        try:
            found = list_uploads(self._client, wanted, partial(self._call, "list", prefix), limit)
        except ConfigurationError:  # it needs a permission that nothing else needs
            return []
        return [upload._replace(key=upload.key[len(self._prefix) :]) for upload in found]

    def abort_upload(self, upload: IncompleteUpload) -> None:
        with suppress(MissingObject):
            self._call(
                "delete",
                upload.key,
                lambda: self._client.abort_multipart_upload(
                    **self._target(upload.key), UploadId=upload.upload_id
                ),
            )

    # --- reading ----------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> bytes:
        check_key(key)

        def send() -> bytes:
            # By boto3: some servers accept a signed URL from a clock ahead (decision 17).
            response = self._client.get_object(**self._target(key), ChecksumMode="ENABLED")
            with closing(response["Body"]) as stream:
                size_bytes = member_of(response, "ContentLength", key=key)
                if size_bytes > max_bytes:
                    raise CorruptObject(f"has {size_bytes} bytes, more than {max_bytes}", file=key)
                pieces = stream.iter_chunks(PIECE_BYTES)
                body = b"".join(self._counted(key, pieces, size_bytes))
            given = reported_crc32c(response)
            if given is not None and given != (actual := crc32c_of(body)):
                raise ChecksumMismatch(
                    f"came with CRC-32C {actual:08x}, the store says {given:08x}"
                )
            return body

        return retry_on_checksum_mismatch(lambda: self._call("get", key, send), file=key)

    def list(self, prefix: str, *, start_after: str = "", limit: int) -> ObjectStats:
        check_prefix(prefix)
        after: dict[str, Any] = {}
        if start_after:
            after["StartAfter"] = self.full_key(start_after)
        found: ObjectStats = []
        for response in self._pages(prefix, after, limit=limit):
            found += self._object_stats(response)
        if start_after and found and found[0].key <= start_after:
            # A caller that continues after the last key it saw would loop forever.
            raise StoreUnavailable(f"store {self.url}: LIST ignores StartAfter")
        return found[:limit]

    def folders(self, prefix: str, *, limit: int) -> Names:
        check_prefix(prefix)
        whole = self.full_key(prefix)
        found: Names = []
        for response in self._pages(prefix, {"Delimiter": "/"}, limit=limit):
            folders = response.get("CommonPrefixes", [])
            found += [folder["Prefix"][len(whole) :].rstrip("/") for folder in folders]
        return found[:limit]

    def _pages(self, prefix: str, wanted: dict[str, Any], *, limit: int) -> Iterator[Any]:
        """LIST responses until `limit` entries were returned.

        Continues by the store's token, never by StartAfter: MinIO omits keys when asked to start
        after a key of another folder.
        """
        remaining = limit
        while remaining > 0:
            send = partial(
                self._client.list_objects_v2,
                Bucket=self._bucket,
                Prefix=self.full_key(prefix),
                MaxKeys=min(remaining, LIST_PAGE),
                **wanted,
            )
            response: Any = self._call("list", prefix, send)
            is_truncated = member_of(response, "IsTruncated", key=prefix)
            yield response
            remaining -= len(response.get("Contents", []))
            remaining -= len(response.get("CommonPrefixes", []))
            token = response.get("NextContinuationToken")
            if not is_truncated:
                return
            if not token or token == wanted.get("ContinuationToken"):
                raise StoreUnavailable(
                    f"LIST {prefix}: the response is truncated but has no continuation token"
                )
            wanted = {**wanted, "ContinuationToken": token}

    def _object_stats(self, response: Any) -> ObjectStats:
        return [
            ObjectStat(
                entry["Key"][len(self._prefix) :],
                entry["Size"],
                None,
                int(entry["LastModified"].timestamp() * 1000),
            )
            for entry in response.get("Contents", [])
        ]

    # --- one call ---------------------------------------------------------------------------------

    def _write_options(self, key: str) -> Any:
        """The configured options of a write; the storage class is for segment logs only."""
        options = self._options
        configured = {
            "ServerSideEncryption": options.server_side_encryption,
            "SSEKMSKeyId": options.sse_kms_key_id,
            "StorageClass": options.storage_class if key.endswith(".log") else None,
        }
        return {name: value for name, value in configured.items() if value is not None}
