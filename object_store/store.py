"""The object store interface: the calls that every store implements.

* Keys are relative to the store's prefix. Every store rejects keys that a file system could not
  hold or that could lead outside a folder (`check_key`), so that a bucket can be copied to a folder
  and back.
* Readers see an object whole or not at all; once `put` returns, the object is durable.
* A store retries idempotent calls itself, within one deadline. It never retries a conditional
  create whose response was lost: that raises OutcomeUnknownError, and the caller reads back.
  `get_range` makes one attempt; `ranged_reader` retries it.
* What a store reports after a write describes what it stored, never what was sent.

All calls are synchronous, may block, and may be made from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from tierlog.host.retry import RetryPolicy
from tierlog.object_store.ledger import StoreLedger
from tierlog.record_format.errors import RequestError, StoreUnavailable

PIECE_BYTES = 256 * 1024
Piece: TypeAlias = bytes | memoryview
MAX_KEY_BYTES = 900  # S3's limit is 1,024; the rest is left to the prefix
MAX_COMPONENT_BYTES = 255  # the limit of file systems, and of S3 servers built on them
RESERVED_COMPONENT = ".tierlog-tmp"


class Resumable(NamedTuple):
    """A multipart upload that can be resumed: its id, empty if it has not been initiated, and a
    callback that receives the id when it is.
    """

    upload_id: str
    on_initiated: Callable[[str], None]


class IncompleteUpload(NamedTuple):
    """A multipart upload that was initiated and neither completed nor aborted."""

    key: str
    upload_id: str
    initiated_ms: int


class ObjectStat(NamedTuple):
    """An object's metadata as the store reports it; `crc32c` is None if it reports none."""

    key: str
    size_bytes: int
    crc32c: int | None
    modified_ms: int


ObjectStats: TypeAlias = list[ObjectStat]
Names: TypeAlias = list[str]
IncompleteUploads: TypeAlias = list[IncompleteUpload]


class InvalidKey(RequestError):
    """A key that some store could not hold, or that is a folder of other keys."""


class ChecksumRefused(StoreUnavailable):
    """The body does not match the checksum that was sent with it; nothing was stored."""

    is_final = True  # the caller may read its bytes again


class UploadNotFound(StoreUnavailable):
    """The upload to resume no longer exists: start over under another name."""

    is_final = True


class ObjectStore(Protocol):
    @property
    def url(self) -> str:
        """The store's URL as `open_store` accepts it, without secrets."""
        ...

    @property
    def identity(self) -> str:
        """The URL and the server behind it: two servers may have a bucket of the same name."""
        ...

    @property
    def read_policy(self) -> RetryPolicy:
        """How to retry reads. Callers of `get_range` apply it themselves."""
        ...

    @property
    def ledger(self) -> StoreLedger: ...

    def full_key(self, key: str) -> str:
        """The key including the store's prefix, as it appears in the bucket."""
        ...

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        """Store `body` in one request, with its CRC-32C; pass `crc32c` if it is already known.

        With `if_absent`, exactly one of many concurrent writers wins and the others get
        ObjectExists. Raises OutcomeUnknownError (only with `if_absent`: the response was lost),
        StoreUnavailable, ChecksumRefused, InvalidKey, ConfigurationError.
        """
        ...

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size_bytes: int,
        crc32c: int,
        part_bytes: int = ...,
        concurrency: int = ...,
        pace: Callable[[int], None] | None = None,
        resumable: Resumable | None = None,
    ) -> ObjectStat:
        """Store the first `size_bytes` of a file, whose CRC-32C is `crc32c`; large files in parts.

        Uses about `part_bytes * concurrency` of memory. `pace(n)` is called before `n` bytes are
        sent and may block, to limit the rate. The result comes from a HEAD after the write. A
        failed upload leaves no object and, if the store can be reached, no parts. With `resumable`,
        a failure that a retry may overcome keeps the parts, and the retry sends the missing ones.
        The key must be new, or that of the upload being resumed: two uploads to one key cannot be
        distinguished. Raises UploadNotFound if the upload to resume is gone.
        """
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. Raises MissingObject; CorruptObject if it is larger than `max_bytes` or
        does not match the checksum that the store keeps of it, if any.
        """
        ...

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Iterator[Piece]:
        """The bytes [start, end), complete or an error, in pieces of at most 256 KiB; one attempt.

        With `into`, a buffer of at least 256 KiB, a piece may be a view of it that the next piece
        overwrites, which avoids allocation. Without it, pieces are bytes and may be kept.

        The request is sent at the first `next`; close the iterator if it is not exhausted. Raises
        MissingObject; CorruptObject if the object ends before `end`; StoreUnavailable if the
        response was interrupted or is of another range.
        """
        ...

    def head(self, key: str) -> ObjectStat | None:
        """The object's metadata; None if it does not exist."""
        ...

    def list(self, prefix: str, *, start_after: str = "", limit: int) -> ObjectStats:
        """At most `limit` objects whose keys begin with `prefix` and sort after `start_after`, in
        order of their UTF-8 bytes. `crc32c` is not filled in.
        """
        ...

    def folders(self, prefix: str, *, limit: int) -> Names:
        """At most `limit` names of the folders that lie directly below `prefix` (which ends with a
        slash or is empty) and hold objects, in order and without slashes. Costs one LIST per
        thousand names, however many objects they hold. With versioning, MinIO also returns folders
        whose objects were deleted.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete these objects; a missing key is not an error. Accepts whatever `list` returned.

        A key that may not be deleted does not keep the others: ConfigurationError names it when
        those are gone.
        """
        ...

    def incomplete_uploads(self, prefix: str, *, limit: int) -> IncompleteUploads:
        """At most `limit` incomplete multipart uploads of keys that begin with `prefix`. Some
        stores never list any.
        """
        ...

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """Abort an upload and delete its parts; a missing upload is not an error."""
        ...

    def close(self) -> None:
        """Close the connections. Later calls that would send a request raise ShuttingDown."""
        ...


def check_key(key: str) -> str:
    """Return `key`, or raise InvalidKey."""
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise InvalidKey(f"key {key[:80]!r}… is longer than {MAX_KEY_BYTES} bytes")
    for component in key.split("/"):
        _check_component(component, key)
    return key


def check_prefix(prefix: str) -> str:
    """As `check_key`, but a prefix may be empty or end inside a component."""
    folder, slash, last = prefix.rpartition("/")
    if slash:
        check_key(folder)
    if last:
        check_key(last)
    return prefix


def is_portable(component: str) -> bool:
    """Whether every store preserves the characters of a component of a key."""
    return component.isprintable() and "\\" not in component


def _check_component(component: str, key: str) -> None:
    if component in {"", ".", ".."} or component == RESERVED_COMPONENT:
        raise InvalidKey(f"key {key!r}: {component!r} is not allowed as a component of a key")
    if not is_portable(component):
        raise InvalidKey(f"key {key!r} contains a character that some stores do not preserve")
    if len(component.encode()) > MAX_COMPONENT_BYTES:
        raise InvalidKey(
            f"key {key[:80]!r}… has a component that is longer than {MAX_COMPONENT_BYTES} bytes"
        )
