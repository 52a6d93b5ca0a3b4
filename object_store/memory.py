"""The reference implementation of ObjectStore, in memory.

* One lock makes each call atomic, as the contract promises.
* It implements the strictest reading of the contract (a CRC of each body, and no key may be the
  folder of another), so that code that works here works with a real store.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from tierlog.host.clock import wall_clock_ms
from tierlog.host.retry import READ_POLICY
from tierlog.object_store.ledger import StoreLedger
from tierlog.object_store.store import (
    PIECE_BYTES,
    ChecksumRefused,
    IncompleteUpload,
    IncompleteUploads,
    InvalidKey,
    Names,
    ObjectStat,
    ObjectStats,
    Resumable,
    check_key,
    check_prefix,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import CorruptObject, MissingObject, ObjectExists


class _Object(NamedTuple):
    body: bytes
    crc32c: int
    modified_ms: int


class MemoryStore:
    read_policy = READ_POLICY

    def __init__(self, name: str = "") -> None:
        self.url = self.identity = f"memory://{name}"
        self.ledger = StoreLedger()
        self._lock = threading.Lock()
        self._objects: dict[str, _Object] = {}
        self._keys: list[str] = []  # sorted

    def full_key(self, key: str) -> str:
        return key

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        check_key(key)
        stored = bytes(body)
        self.ledger.count("put", key, sent_bytes=len(stored))
        actual = crc32c_of(stored)
        if crc32c is not None and crc32c != actual:
            raise ChecksumRefused(f"{key}: the body's CRC-32C is {actual:08x}, not {crc32c:08x}")
        with self._lock:
            if if_absent and key in self._objects:
                raise ObjectExists(key)
            self._check_no_folder(key)
            if key not in self._objects:
                insort(self._keys, key)
            self._objects[key] = _Object(stored, actual, wall_clock_ms())
            return self._stat(key)

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size_bytes: int,
        crc32c: int,
        part_bytes: int = 0,  # noqa: ARG002  there is only one part
        concurrency: int = 1,  # noqa: ARG002
        pace: Callable[[int], None] | None = None,
        resumable: Resumable | None = None,  # noqa: ARG002
    ) -> ObjectStat:
        if pace is not None:
            pace(size_bytes)
        with path.open("rb") as file:
            body = file.read(size_bytes)
        if len(body) != size_bytes:
            raise ChecksumRefused(f"{path}: ends at {len(body)}, not at {size_bytes}")
        return self.put(key, body, crc32c=crc32c)

    def get(self, key: str, *, max_bytes: int) -> bytes:
        body = self._body(key)
        if len(body) > max_bytes:
            raise CorruptObject(f"has {len(body)} bytes, more than {max_bytes}", file=key)
        self.ledger.count("get", key, received_bytes=len(body))
        return body

    def get_range(
        self,
        key: str,
        start: int,
        end: int,
        *,
        into: memoryview | None = None,  # noqa: ARG002
    ) -> Iterator[bytes]:
        assert 0 <= start < end
        body = self._body(key)
        if end > len(body):
            self.ledger.count("get", key, failures=1)
            raise CorruptObject(f"ends at {len(body)}, before {end}", file=key)
        self.ledger.count("get", key, received_bytes=end - start)
        for position in range(start, end, PIECE_BYTES):
            yield body[position : min(position + PIECE_BYTES, end)]

    def head(self, key: str) -> ObjectStat | None:
        check_key(key)
        self.ledger.count("head", key)
        with self._lock:
            return self._stat(key) if key in self._objects else None

    def list(self, prefix: str, *, start_after: str = "", limit: int) -> ObjectStats:
        check_prefix(prefix)
        self.ledger.count("list", prefix)
        found: ObjectStats = []
        with self._lock:
            begin = max(bisect_left(self._keys, prefix), bisect_right(self._keys, start_after))
            for key in islice(self._keys, begin, begin + limit):
                if not key.startswith(prefix):
                    break
                found.append(self._stat(key)._replace(crc32c=None))
        return found

    def folders(self, prefix: str, *, limit: int) -> Names:
        check_prefix(prefix)
        self.ledger.count("list", prefix)
        with self._lock:
            inside = (key[len(prefix) :] for key in self._keys if key.startswith(prefix))
            names = dict.fromkeys(rest.partition("/")[0] for rest in inside if "/" in rest)
        return list(names)[:limit]

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            check_key(key)
            self.ledger.count("delete", key)
            with self._lock:
                if self._objects.pop(key, None) is not None:
                    self._keys.remove(key)

    def incomplete_uploads(self, prefix: str, *, limit: int) -> IncompleteUploads:  # noqa: ARG002
        return []  # there are no multipart uploads

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """There are no multipart uploads."""

    def close(self) -> None:
        """Objects remain until the process ends; `named_store` returns the same store again."""

    def _body(self, key: str) -> bytes:
        check_key(key)
        with self._lock:
            stored = self._objects.get(key)
        if stored is None:
            self.ledger.count("get", key)
            raise MissingObject("the object is not in the store", file=key)
        return stored.body

    def _stat(self, key: str) -> ObjectStat:
        stored = self._objects[key]
        return ObjectStat(key, len(stored.body), stored.crc32c, stored.modified_ms)

    def _check_no_folder(self, key: str) -> None:
        parts = key.split("/")
        for end in range(1, len(parts)):
            if (parent := "/".join(parts[:end])) in self._objects:
                raise InvalidKey(f"key {key!r}: {parent!r} is an object")
        after = bisect_right(self._keys, key + "/")
        if after < len(self._keys) and self._keys[after].startswith(key + "/"):
            raise InvalidKey(f"key {key!r} is the folder of other keys")


_named: dict[str, MemoryStore] = {}
_named_lock = threading.Lock()


def named_store(name: str) -> MemoryStore:
    """The store of that name, which lives as long as the process."""
    with _named_lock:
        return _named.setdefault(name, MemoryStore(name))
