"""An ObjectStore on S3 or a compatible service.

* Retries happen only here, by `RetryPolicy`; every attempt is counted.
* Every write carries the CRC-32C of its bytes in a header, computed here (botocore[crt] is not
  needed).
* A ranged response is accepted only if its Content-Range is the one that was requested.
* `s3_ranged_get` receives ranges without boto3, which is the fallback.
* Foreign exceptions are mapped only in `error_response_of` and `_raise_error`.

Thread-safe: boto3's clients are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from botocore.exceptions import BotoCoreError, FlexibleChecksumError

from tierlog.host.retry import (
    READ_POLICY,
    ChecksumMismatch,
    RetryPolicy,
    retry_on_checksum_mismatch,
)
from tierlog.object_store.ledger import Operation, StoreLedger
from tierlog.object_store.s3_client import (
    FOREIGN,
    ca_file,
    error_response_of,
    make_client,
    url_signer,
)
from tierlog.object_store.s3_connection import S3Options, UnsupportedResponse
from tierlog.object_store.s3_multipart import (
    MULTIPART_FROM_BYTES,
    FileParts,
    MultipartUpload,
    encode_crc32c,
    list_uploads,
    read_part,
)
from tierlog.object_store.s3_ranged_get import ErrorStatus, RangedGets, RangeResponse
from tierlog.object_store.s3_responses import (
    CLOCK_SKEW_CODES,
    CONNECT_FAILED,
    ErrorResponse,
    Fault,
    advice,
    check_range,
    classify,
    member_of,
    reason,
    reported_crc32c,
    response_time_ms,
)
from tierlog.object_store.store import (
    PIECE_BYTES,
    ChecksumRefused,
    IncompleteUpload,
    IncompleteUploads,
    Names,
    ObjectStat,
    ObjectStats,
    Piece,
    Resumable,
    check_key,
    check_prefix,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ClockSkewTooLarge,
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    ShuttingDown,
    StoreUnavailable,
    StoreUnreachable,
)

T = TypeVar("T")
P = TypeVar("P", bytes, Piece)

READS = frozenset(("get", "head", "list"))
LIST_PAGE = 1000
DELETE_PAGE = 1000
PART_BYTES = 16 * 1024 * 1024


class S3Store:
    def __init__(
        self, bucket: str, prefix: str, options: S3Options, *, policy: RetryPolicy | None = None
    ) -> None:
        """`policy` is for all calls. By default it is a broker's: a read gives up sooner than a
        write, since a client waits for it.
        """
        self._bucket, self._options = bucket, options
        self._prefix = prefix + "/" if prefix else ""
        self._policy = policy or RetryPolicy(deadline_s=options.deadline_s)
        self.read_policy = policy or READ_POLICY
        self.url = f"s3://{self._bucket}/{self._prefix}".rstrip("/")
        self.ledger = StoreLedger()
        self._is_closed = False
        try:
            self._client = make_client(options)
            sign, authorities = url_signer(options), ca_file(options)
        except (BotoCoreError, ValueError) as error:
            raise ConfigurationError(f"store {self.url}: {error}") from error
        self.identity = f"{self.url} at {self._client.meta.endpoint_url}"
        self._ranges = RangedGets(
            lambda operation, key: sign(operation, bucket, self.full_key(key)),
            options,
            endpoint=self._client.meta.endpoint_url,
            ca_file=authorities,
        )

    def full_key(self, key: str) -> str:
        return self._prefix + key

    def close(self) -> None:
        """Calls in progress end with their current request."""
        self._is_closed = True
        self._ranges.close()
        self._client.close()

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

        response = self._retry("put", key, send, creates=if_absent, sent_bytes=len(data))
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
                partial(self._retry, "put", key),
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
            refused += self._retry("delete", page[0], partial(self._delete_page, page))
        if refused:
            key, fault = refused[0]
            self._raise_error(fault, "delete", key)

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
                self._raise_error(fault, "delete", key)
        return refused

    def incomplete_uploads(self, prefix: str, *, limit: int) -> IncompleteUploads:
        check_prefix(prefix)
        wanted = {"Bucket": self._bucket, "Prefix": self.full_key(prefix)}
        try:
            found = list_uploads(self._client, wanted, partial(self._retry, "list", prefix), limit)
        except ConfigurationError:  # it needs a permission that nothing else needs
            return []
        return [upload._replace(key=upload.key[len(self._prefix) :]) for upload in found]

    def abort_upload(self, upload: IncompleteUpload) -> None:
        with suppress(MissingObject):
            self._retry(
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

        return retry_on_checksum_mismatch(lambda: self._retry("get", key, send), file=key)

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Iterator[Piece]:
        assert 0 <= start < end
        check_key(key)
        if not self._ranges.is_usable:
            yield from self._range_by_boto3(key, start, end)
            return
        try:
            response = self._once("get", key, lambda: self._ranges.open(key, start, end))
        except UnsupportedResponse:
            yield from self._range_by_boto3(key, start, end)
            self._ranges.note_fallback()
            return
        with closing(response):
            check_range(response.content_range, response.size_bytes, start=start, end=end, key=key)
            yield from self._counted(key, _pieces(response, into), end - start)

    def _range_by_boto3(self, key: str, start: int, end: int) -> Iterator[bytes]:
        def send() -> Any:
            return self._client.get_object(**self._target(key), Range=f"bytes={start}-{end - 1}")

        response = self._once("get", key, send)
        with closing(response["Body"]) as stream:
            size_bytes = member_of(response, "ContentLength", key=key)
            given = response.get("ContentRange", "")
            check_range(given, size_bytes, start=start, end=end, key=key)
            yield from self._counted(key, stream.iter_chunks(PIECE_BYTES), end - start)

    def head(self, key: str) -> ObjectStat | None:
        check_key(key)
        try:
            return self._retry("head", key, partial(self._head, key))
        except MissingObject:
            return None

    def _head(self, key: str) -> ObjectStat:
        if not self._ranges.is_usable:
            return self._head_by_boto3(key)
        try:
            return self._ranges.head(key)
        except UnsupportedResponse:
            found = self._head_by_boto3(key)
        self._ranges.note_fallback()
        return found

    def _head_by_boto3(self, key: str) -> ObjectStat:
        response = self._client.head_object(**self._target(key), ChecksumMode="ENABLED")
        size_bytes = member_of(response, "ContentLength", key=key)
        modified = member_of(response, "LastModified", key=key)
        modified_ms = int(modified.timestamp() * 1000)
        return ObjectStat(key, size_bytes, reported_crc32c(response), modified_ms)

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
            response: Any = self._retry("list", prefix, send)
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

    def _target(self, key: str) -> Any:
        return {"Bucket": self._bucket, "Key": self.full_key(key)}

    def _write_options(self, key: str) -> Any:
        """The configured options of a write; the storage class is for segment logs only."""
        options = self._options
        configured = {
            "ServerSideEncryption": options.server_side_encryption,
            "SSEKMSKeyId": options.sse_kms_key_id,
            "StorageClass": options.storage_class if key.endswith(".log") else None,
        }
        return {name: value for name, value in configured.items() if value is not None}

    def _retry(
        self,
        operation: Operation,
        key: str,
        send: Callable[[], T],
        *,
        creates: bool = False,
        sent_bytes: int = 0,
    ) -> T:
        policy = self.read_policy if operation in READS else self._policy
        return policy.call_with_retries(
            lambda: self._once(operation, key, send, creates=creates, sent_bytes=sent_bytes)
        )

    def _once(
        self,
        operation: Operation,
        key: str,
        send: Callable[[], T],
        *,
        creates: bool = False,
        sent_bytes: int = 0,
    ) -> T:
        if self._is_closed:
            raise ShuttingDown(f"store {self.url} was closed")
        with self.ledger.counted(operation, key, sent_bytes=sent_bytes):
            try:
                return send()
            except ErrorStatus as status:
                self._raise_error(status.response, operation, key, cause=status)
            except FOREIGN as error:
                self._raise_error(
                    error_response_of(error), operation, key, creates=creates, cause=error
                )

    def _raise_error(
        self,
        response: ErrorResponse,
        operation: str,
        key: str,
        *,
        creates: bool = False,
        cause: BaseException | None = None,
    ) -> NoReturn:
        fault = classify(response, operation=operation)
        if fault is Fault.EXISTS:
            raise ObjectExists(key) from cause
        if fault is Fault.MISSING:
            raise MissingObject("the object is not in the store", file=key) from cause
        if fault is Fault.RANGE:
            raise CorruptObject("ends before the requested range", file=key) from cause
        if fault is Fault.CHECKSUM:
            raise ChecksumRefused(f"{key}: {reason(response)}") from cause
        if fault is Fault.MISCONFIGURED:
            line = advice(response, operation=operation, key=key)
            if response.code in CLOCK_SKEW_CODES:
                raise ClockSkewTooLarge(f"store {self.url}: {line}") from cause
            raise ConfigurationError(f"store {self.url}: {line}") from cause
        if fault is Fault.UNKNOWN and creates:
            raise OutcomeUnknownError(
                f"{key}: the response was lost: {reason(response)}"
            ) from cause
        kind = StoreUnreachable if response.code == CONNECT_FAILED else StoreUnavailable
        raise kind(f"{key}: {operation}: {reason(response)}") from cause

    def _counted(self, key: str, pieces: Iterator[P], size_bytes: int) -> Iterator[P]:
        """Count the bytes of `pieces`. Raises StoreUnavailable unless they total `size_bytes`."""
        received = 0
        try:
            for piece in pieces:
                received += len(piece)
                yield piece
        except FlexibleChecksumError as error:  # boto3 checks other algorithms too
            raise ChecksumMismatch(str(error)) from error
        except FOREIGN as error:
            why = error_response_of(error).detail
            raise StoreUnavailable(
                f"{key}: the response was interrupted after {received} bytes: {why}"
            ) from error
        finally:
            self.ledger.count("get", key, requests=0, received_bytes=received)
        if received != size_bytes:
            raise StoreUnavailable(f"{key}: the response has {received} bytes, not {size_bytes}")


def _pieces(response: RangeResponse, into: memoryview | None) -> Iterator[Piece]:
    if into is not None:
        return response.pieces(into)
    return (bytes(piece) for piece in response.pieces(memoryview(bytearray(PIECE_BYTES))))
