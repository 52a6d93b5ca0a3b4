"""An ObjectStore on a local folder, which needs no server.

    <root>/<key>                    one file per object
    <root>/.tierlog-tmp/<unique>    objects being written

* An object appears atomically, with its final bytes: temp file, write, fsync, then link(2) (which
  fails if the name exists: the atomic create-if-absent) or rename(2), then fsync of the folder; if
  that fails, the link is removed, and if that fails too, not read before the folder is synced. No
  file is ever written under a key's own name.
* A key is a path below the root; `check_key` rejects components that could lead elsewhere. Symbolic
  links that an operator put inside the folder are followed. Files whose names no key can have are
  not objects.
* It keeps no checksums: callers that need certainty read the object back.
* If the folder is gone (an unmounted disk), no object is reported as missing: StoreUnavailable.
  `.tierlog-tmp`, which is created when the store is opened and never removed, tells the difference.
  It is not needed if the folder is read-only, as in a mounted copy.
* Several processes may share the folder. Temp files older than a day are deleted at open.
"""

from __future__ import annotations

import errno
import os
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from io import FileIO
from itertools import islice
from pathlib import Path
from stat import S_ISDIR

from tierlog.host.deferred_errors import DeferredErrors
from tierlog.host.medium import make_folders, sync_all, sync_folder
from tierlog.host.retry import READ_POLICY
from tierlog.object_store.ledger import Operation, StoreLedger
from tierlog.object_store.store import (
    PIECE_BYTES,
    RESERVED_COMPONENT,
    ChecksumRefused,
    IncompleteUpload,
    IncompleteUploads,
    InvalidKey,
    Names,
    ObjectStat,
    ObjectStats,
    Piece,
    Resumable,
    check_key,
    check_prefix,
    is_portable,
)
from tierlog.record_format.crc32c import crc32c_of
from tierlog.record_format.errors import (
    ConfigurationError,
    CorruptObject,
    MissingObject,
    ObjectExists,
    OutcomeUnknownError,
    StoreUnavailable,
    eio_as,
)

COPY_BYTES = 1024 * 1024
SWEEP_AFTER_S = 24 * 3600
PUBLISH_ATTEMPTS = 100  # a delete may remove the empty folder between mkdir and link

_NO_PERMISSION = (errno.EACCES, errno.EPERM, errno.EROFS)


class FolderStore:
    read_policy = READ_POLICY

    def __init__(self, root: Path, *, must_exist: bool = False) -> None:
        self._root = root.absolute()
        self._temp = self._root / RESERVED_COMPONENT
        self.url = self.identity = self._root.as_uri()
        self.ledger = StoreLedger()
        if must_exist and not self._root.is_dir():
            raise ConfigurationError(f"store {self.url}: the folder does not exist")
        try:
            make_folders(self._temp)
            _sweep(self._temp)
        except OSError as error:
            if error.errno not in _NO_PERMISSION or not self._root.is_dir():
                raise ConfigurationError(
                    f"store {self.url}: the folder cannot be used: {error.strerror}"
                ) from error
        self._sentinel = self._temp if self._temp.is_dir() else self._root
        self._unsynced: set[Path] = set()  # links that may be gone after a crash of the system

    def full_key(self, key: str) -> str:
        return str(self._root / key)

    # --- writing ----------------------------------------------------------------------------------

    def put(
        self,
        key: str,
        body: bytes | memoryview,
        *,
        if_absent: bool = False,
        crc32c: int | None = None,
    ) -> ObjectStat:
        path = self._path(key)
        if crc32c is not None and crc32c != (actual := crc32c_of(body)):
            raise ChecksumRefused(f"{key}: the body's CRC-32C is {actual:08x}, not {crc32c:08x}")
        with self._counted("put", key, sent_bytes=len(body)), self._temp_file() as (temp, fd):
            _write_all(fd, body)
            sync_all(fd)
            stored = _stat_of(key, os.fstat(fd))  # after the link nothing may fail: it is created
            self._publish(temp, path, if_absent=if_absent, key=key)
            return stored

    def put_file(
        self,
        key: str,
        path: Path,
        *,
        size_bytes: int,
        crc32c: int,
        part_bytes: int = 0,  # noqa: ARG002  a file is copied in one go
        concurrency: int = 1,  # noqa: ARG002
        pace: Callable[[int], None] | None = None,
        resumable: Resumable | None = None,  # noqa: ARG002
    ) -> ObjectStat:
        target = self._path(key)
        with (
            path.open("rb", buffering=0) as source,  # outside: a missing source is not the store's
            self._counted("put", key, sent_bytes=size_bytes),
            self._temp_file() as (temp, fd),
        ):
            actual = _copy(source, fd, size_bytes=size_bytes, pace=pace)
            if actual != crc32c:
                raise ChecksumRefused(f"{key}: {path} has CRC-32C {actual:08x}, not {crc32c:08x}")
            sync_all(fd)
            self._publish(temp, target, if_absent=False, key=key)
            return self._stat(key, target)

    def delete(self, keys: Sequence[str]) -> None:
        refused = DeferredErrors(ConfigurationError)
        for key in keys:
            with refused:
                self._delete(key)
        refused.raise_first()

    def _delete(self, key: str) -> None:
        path = self._path(key)
        with self._counted("delete", key):
            try:
                path.unlink()
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_mounted()
                return
            except PermissionError:
                if not path.is_dir():
                    raise
                return  # macOS reports EPERM for a folder
            self._remove_empty_folders(path.parent)

    # --- reading ----------------------------------------------------------------------------------

    def get(self, key: str, *, max_bytes: int) -> bytes:
        with self._open(key) as (fd, size_bytes):
            if size_bytes > max_bytes:
                raise CorruptObject(f"has {size_bytes} bytes, more than {max_bytes}", file=key)
            body = b"".join(_pieces(fd, 0, size_bytes, key=key))
        self.ledger.count("get", key, requests=0, received_bytes=len(body))
        return body

    def get_range(
        self, key: str, start: int, end: int, *, into: memoryview | None = None
    ) -> Iterator[Piece]:
        assert 0 <= start < end
        # Not in `get`: a manifest that cannot be read is not given up for one that is corrupt.
        with self._open(key) as (fd, size_bytes), eio_as(CorruptObject, file=key, position=start):
            if end > size_bytes:
                raise CorruptObject(f"ends at {size_bytes}, before {end}", file=key)
            for piece in _pieces(fd, start, end, key=key, into=into):
                self.ledger.count("get", key, requests=0, received_bytes=len(piece))
                yield piece

    def head(self, key: str) -> ObjectStat | None:
        path = self._path(key)
        with self._counted("head", key):
            try:
                return self._stat(key, path)
            except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                self._check_mounted()
                return None

    def list(self, prefix: str, *, start_after: str = "", limit: int) -> ObjectStats:
        check_prefix(prefix)
        found: ObjectStats = []
        with self._counted("list", prefix):
            self._check_mounted()
            above = prefix[: prefix.rfind("/") + 1]  # its siblings may be thousands
            for key in _walk(self._root / above, above, prefix=prefix, start_after=start_after):
                if len(found) == limit:
                    break
                try:
                    found.append(self._stat(key, self._root / key))
                except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
                    continue  # deleted since the folder was read
        return found

    def folders(self, prefix: str, *, limit: int) -> Names:
        check_prefix(prefix)
        with self._counted("list", prefix):
            try:
                below = sorted((self._root / prefix).iterdir(), key=lambda path: f"{path.name}/")
            except (FileNotFoundError, NotADirectoryError):
                self._check_mounted()
                return []
            found = (
                p.name for p in below if p.is_dir() and self._holds_objects(f"{prefix}{p.name}/")
            )
            return list(islice(found, limit))

    def _holds_objects(self, prefix: str) -> bool:
        if not (is_portable(prefix) and _may_hold(prefix, prefix=prefix, start_after="")):
            return False
        keys = _walk(self._root / prefix, prefix, prefix=prefix, start_after="")
        return next(keys, None) is not None

    def incomplete_uploads(self, prefix: str, *, limit: int) -> IncompleteUploads:  # noqa: ARG002
        return []  # there are no multipart uploads

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """There are no multipart uploads."""

    def close(self) -> None:
        """Nothing is held open between calls."""

    # --- files ------------------------------------------------------------------------------------

    def _path(self, key: str) -> Path:
        return self._root / check_key(key)

    def _check_mounted(self) -> None:
        """Raise OSError if the whole store is gone, not just an object."""
        if not self._sentinel.is_dir():
            raise OSError(errno.ENOENT, "the store's folder is gone; is its disk mounted?")

    def _stat(self, key: str, path: Path) -> ObjectStat:
        status = path.stat()
        if S_ISDIR(status.st_mode):
            raise IsADirectoryError(errno.EISDIR, "is a folder", str(path))
        return _stat_of(key, status)

    @contextmanager
    def _temp_file(self) -> Iterator[tuple[Path, int]]:
        if self._sentinel != self._temp:
            raise OSError(errno.EROFS, "the store is read-only")
        temp = self._temp / secrets.token_hex(12)
        fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            yield temp, fd
        finally:
            os.close(fd)
            with suppress(OSError):  # it is swept a day later
                temp.unlink(missing_ok=True)

    def _publish(self, temp: Path, path: Path, *, if_absent: bool, key: str) -> None:
        for _ in range(PUBLISH_ATTEMPTS):
            try:
                make_folders(path.parent, below=self._root)
                if if_absent:
                    os.link(temp, path)
                else:
                    temp.rename(path)
            except FileNotFoundError:
                continue
            except FileExistsError:
                if path.is_dir() or not if_absent:
                    raise InvalidKey(f"key {key!r} is the folder of other keys") from None
                raise ObjectExists(key) from None
            except (NotADirectoryError, IsADirectoryError):
                raise InvalidKey(f"key {key!r}: one of its folders is an object") from None
            try:
                sync_folder(path.parent)
            except OSError as error:
                if not if_absent:
                    raise
                try:  # or whoever finds it would take it for durable
                    path.unlink()
                except OSError:  # the disk became read-only
                    self._unsynced.add(path)
                raise OutcomeUnknownError(
                    f"{key}: put: could not fsync the folder: {error.strerror}"
                ) from error
            return
        raise StoreUnavailable(f"{key}: the folder is repeatedly deleted")

    def _remove_empty_folders(self, folder: Path) -> None:
        while folder != self._root:
            try:
                folder.rmdir()
            except OSError:  # not empty, or already deleted
                return
            folder = folder.parent

    @contextmanager
    def _open(self, key: str) -> Iterator[tuple[int, int]]:
        """The object's descriptor and size."""
        path = self._path(key)
        with self._counted("get", key):
            if path in self._unsynced:
                sync_folder(path.parent)
                self._unsynced.discard(path)
            try:
                fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except (FileNotFoundError, NotADirectoryError):
                self._check_mounted()
                raise MissingObject("the object is not in the store", file=key) from None
            try:
                status = os.fstat(fd)
                if S_ISDIR(status.st_mode):
                    raise MissingObject("the object is not in the store", file=key)
                yield fd, status.st_size
            finally:
                os.close(fd)

    @contextmanager
    def _counted(self, operation: Operation, key: str, *, sent_bytes: int = 0) -> Iterator[None]:
        """Count one request, and map its OSErrors to the store's errors."""
        with self.ledger.counted(operation, key, sent_bytes=sent_bytes):
            try:
                yield
            except OSError as error:
                if error.errno in _NO_PERMISSION:
                    raise ConfigurationError(
                        f"store {self.url}: no permission to {operation} {key}: {error.strerror}"
                    ) from error
                raise StoreUnavailable(f"{key}: {operation}: {error.strerror}") from error


def _stat_of(key: str, status: os.stat_result) -> ObjectStat:
    return ObjectStat(key, status.st_size, None, status.st_mtime_ns // 1_000_000)


def _walk(folder: Path, folder_key: str, *, prefix: str, start_after: str) -> Iterator[str]:
    """Keys below `folder` in byte order; subtrees that cannot match are skipped."""
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if is_portable(entry.name)]
            names = sorted(entry.name + "/" * entry.is_dir() for entry in found)
    except (FileNotFoundError, NotADirectoryError):
        return
    for name in names:
        key = folder_key + name
        if not name.endswith("/"):
            if key.startswith(prefix) and key > start_after:
                yield key
        elif _may_hold(key, prefix=prefix, start_after=start_after):
            yield from _walk(folder / name, key, prefix=prefix, start_after=start_after)


def _may_hold(folder_key: str, *, prefix: str, start_after: str) -> bool:
    if folder_key == RESERVED_COMPONENT + "/":
        return False
    if not (folder_key.startswith(prefix) or prefix.startswith(folder_key)):
        return False
    return folder_key > start_after or start_after.startswith(folder_key)


def _pieces(
    fd: int, start: int, end: int, *, key: str, into: memoryview | None = None
) -> Iterator[Piece]:
    position = start
    while position < end:
        wanted = min(PIECE_BYTES, end - position)
        if into is None:
            piece: Piece = os.pread(fd, wanted, position)
        else:
            piece = into[: os.preadv(fd, [into[:wanted]], position)]
        if not piece:
            raise CorruptObject(f"ends at {position}, before {end}", file=key)
        position += len(piece)
        yield piece


def _write_all(fd: int, body: bytes | memoryview) -> None:
    rest = memoryview(body)
    while rest:
        rest = rest[os.write(fd, rest) :]


def _copy(source: FileIO, fd: int, *, size_bytes: int, pace: Callable[[int], None] | None) -> int:
    """Copy the first `size_bytes` and return their CRC-32C. Raises ChecksumRefused for a short
    file.
    """
    crc = position = 0
    while position < size_bytes:
        piece = source.read(min(COPY_BYTES, size_bytes - position))
        if not piece:
            raise ChecksumRefused(f"{source.name}: ends at {position}, not at {size_bytes}")
        if pace is not None:
            pace(len(piece))
        crc = crc32c_of(piece, crc)
        _write_all(fd, piece)
        position += len(piece)
    return crc


def _sweep(temp: Path) -> None:
    """Delete old temp files of interrupted writers."""
    oldest = time.time() - SWEEP_AFTER_S
    with os.scandir(temp) as entries:
        for entry in entries:
            try:
                if entry.stat().st_mtime < oldest:
                    Path(entry.path).unlink(missing_ok=True)
            except FileNotFoundError:
                continue
