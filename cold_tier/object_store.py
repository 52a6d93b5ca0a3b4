"""What a bucket can do, in eleven calls: the port that every store implements.

* Keys are relative to the store's prefix. A key that a file system could not hold, or that could
  lead outside a folder, is refused by every store alike (`check_key`), so that a bucket can be
  copied to a folder and back.
* For every reader, an object is whole or not there; what `put` acknowledged is durable.
* A store retries idempotent calls itself, within one deadline. It never retries a create whose
  answer was lost: that is OutcomeUnknownError, and the caller reads back. `get_range` is one
  attempt; `ranged_reader` retries it.
* What a store says about an object after a write is what it stored, never what was sent.

All calls are synchronous, may block, and may come from any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol, TypeAlias

from cold_tier.retry import RetryPolicy
from cold_tier.store_ledger import StoreLedger
from record_format.errors import RequestError, StoreUnavailable

PIECE_BYTES = 256 * 1024
Piece: TypeAlias = bytes | memoryview
MAX_KEY_BYTES = 900  # S3 takes 1,024; the rest is the prefix's
MAX_COMPONENT_BYTES = 255  # what file systems take, and S3 servers that stand on them
RESERVED_COMPONENT = ".tierlog-tmp"


class Resumable(NamedTuple):
    """A multipart upload that may be resumed later: its id, empty if it is still to begin, and the
    function that notes the id that the store gives it.
    """

    upload_id: str
    note: Callable[[str], None]


class Unfinished(NamedTuple):
    """A multipart upload that was begun and neither completed nor aborted."""

    key: str
    upload_id: str
    begun_ms: int


class Checksum(NamedTuple):
    """`algorithm` in lower case (`crc32c`, `md5`, …) over the whole object; `value` in hex."""

    algorithm: str
    value: str


class ObjectStat(NamedTuple):
    """What the store says of an object; `checksum` is None if it keeps none to compare."""

    key: str
    size_bytes: int
    checksum: Checksum | None
    modified_ms: int


ObjectStats: TypeAlias = list[ObjectStat]
Names: TypeAlias = list[str]
UnfinishedUploads: TypeAlias = list[Unfinished]


class InvalidKey(RequestError):
    """A key that not every store could hold, or one that is a folder of other keys."""


class ChecksumRefused(StoreUnavailable):
    """The body does not match the checksum that was sent with it: nothing was stored."""

    final = True  # not repeated inside the store; the caller may read its bytes anew


class UploadLost(StoreUnavailable):
    """The store does not know an upload that was to be resumed: start over, under another name."""

    final = True


class ObjectStore(Protocol):
    @property
    def url(self) -> str:
        """Where it is, in the form that `open_store` takes; no secrets."""
        ...

    @property
    def place(self) -> str:
        """The URL, and the server that answers for it: two servers may have a bucket of the same
        name.
        """
        ...

    @property
    def read_policy(self) -> RetryPolicy:
        """How long those go on who read from it; `get_range` leaves that to them."""
        ...

    @property
    def ledger(self) -> StoreLedger: ...

    def full_key(self, key: str) -> str:
        """The key with the store's prefix: what a person sees in the bucket."""
        ...

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        """Store `body`, in one request, with a checksum: `crc32c`, if the caller already has it.

        With `if_absent` exactly one of many concurrent writers wins and the others get
        ObjectExists. Raises OutcomeUnknownError (only with `if_absent`: the answer was lost),
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
        """Store the first `size_bytes` of a file, of CRC-32C `crc32c`, in parts when it is large.

        Memory is about `part_bytes * concurrency`. `pace(n)` is called before `n` bytes are sent
        and may block: a rate limit. What it returns was asked of the store after the write. A
        failed upload leaves no object and, as far as the store answers, no parts; with `resumable`
        it leaves the parts if another try may succeed, which then sends those that are missing. The
        key must be new, or that of the upload being resumed: two uploads to one key are not told
        apart. Raises UploadLost if the upload to be resumed is gone.
        """
        ...

    def get(self, key: str, *, max_bytes: int) -> bytes:
        """The whole object. Raises MissingObject; CorruptObject if it is above `max_bytes`, or not
        what the checksum says that the store keeps of it, if it keeps one.
        """
        ...

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Iterator[Piece]:
        """The bytes [start, end) in pieces of at most 256 KiB, whole or an error; one attempt.

        With `into`, a buffer of at least 256 KiB, a piece may be a view of it, which the next one
        overwrites: nothing is allocated. Without, pieces are bytes and may be kept.

        Nothing is sent before the first `next`; close the iterator when leaving it early. Raises
        MissingObject; CorruptObject if the object ends before `end`; StoreUnavailable if the
        answer broke off or was of another range.
        """
        ...

    def head(self, key: str) -> ObjectStat | None:
        """None if there is no such object."""
        ...

    def list(self, prefix: str, *, start_after: str = "", limit: int) -> ObjectStats:
        """At most `limit` objects whose keys begin with `prefix` and are above `start_after`, in
        order of their UTF-8 bytes. Checksums are not filled in.
        """
        ...

    def folders(self, prefix: str, *, limit: int) -> Names:
        """At most `limit` names of what lies directly below the folder `prefix` (with its slash, or
        empty) and holds objects, in order; without slashes. One LIST per thousand names, however
        many objects lie in them. With versioning, MinIO also names folders that once did.
        """
        ...

    def delete(self, keys: Sequence[str]) -> None:
        """Delete what is there; a missing key is not an error."""
        ...

    def unfinished(self, prefix: str, *, limit: int) -> UnfinishedUploads:
        """At most `limit` unfinished multipart uploads, of keys that begin with `prefix`. Some
        stores list none.
        """
        ...

    def abort(self, upload: Unfinished) -> None:
        """Abort an upload: its parts are gone. A missing one is not an error."""
        ...

    def close(self) -> None:
        """Let go of connections. Whoever is still at work gets ShuttingDown from the next call that
        would ask another machine.
        """
        ...


def crc32c_checksum(crc: int) -> Checksum:
    return Checksum("crc32c", f"{crc:08x}")


def check_key(key: str) -> str:
    """The key itself. Raises InvalidKey."""
    if len(key.encode("utf-8", "surrogatepass")) > MAX_KEY_BYTES:
        raise InvalidKey(f"key {key[:80]!r}…: longer than {MAX_KEY_BYTES} bytes")
    for component in key.split("/"):
        _check_component(component, key)
    return key


def check_prefix(prefix: str) -> str:
    """A prefix may end inside a component, or be empty; otherwise as a key."""
    folder, slash, last = prefix.rpartition("/")
    if slash:
        check_key(folder)
    if last:
        check_key(last)
    return prefix


def _check_component(component: str, key: str) -> None:
    if component in {"", ".", ".."} or component == RESERVED_COMPONENT:
        raise InvalidKey(f"key {key!r}: {component!r} cannot be part of a key")
    if not component.isprintable() or "\\" in component:
        raise InvalidKey(f"key {key!r}: it has a character that some stores do not keep")
    if len(component.encode()) > MAX_COMPONENT_BYTES:
        raise InvalidKey(f"key {key[:80]!r}…: a part is longer than {MAX_COMPONENT_BYTES} bytes")
