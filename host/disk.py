"""The system calls that modify the disk, in one place so that tests can make each of them fail.

* Nothing in this package writes, syncs, renames or unlinks except through a `Disk`.
* Errors stay OSError here. The log maps them: a full disk refuses the write, anything else takes
  the log offline.
* Connections and readers may use up the descriptors. A file that cannot be opened for a sync would
  then take its log offline until a restart, though the disk is fine: some are held in reserve.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

from tierlog.host.medium import sync_all, sync_bytes
from tierlog.record_format.batch import Buffer
from tierlog.record_format.errors import FILE_LIMIT_ERRNOS, DiskFull, disk_full_error

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if os.sysconf("SC_IOV_MAX") > 0 else 1024
# No space or no descriptor left: the call did nothing, and may succeed later.
DISK_FULL_ERRNOS = FILE_LIMIT_ERRNOS | {errno.ENOSPC, errno.EDQUOT}
DISK_FULL_RETRY_S: Final = 5.0


class SpareDescriptors:
    """Thread-safe; one per process."""

    COUNT: Final = 16  # other threads may take a released one first

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._take()

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file, releasing the reserve if there is no other descriptor. Raises OSError."""
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                fd = self._open_anyway(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)
            if len(self._held) < self.COUNT:
                with self._lock:
                    self._take()

    def _open_anyway(self, path: Path, flags: int) -> int:
        while self._held:
            os.close(self._held.pop())
        return os.open(path, flags | os.O_CLOEXEC)

    def _take(self) -> None:
        with suppress(OSError):  # refilled by a later call
            while len(self._held) < self.COUNT:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))


_spare: Final = SpareDescriptors()


class Disk:
    """The real calls. Subclasses may fail some of them."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """One pwritev(2); returns the bytes written, which may be fewer than given."""
        return os.pwritev(fd, buffers, position)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Set the file's length and allocate its blocks (`preallocate`)."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)

    def sync_bytes(self, fd: int) -> None:
        """Returns when the file's bytes and length are on the medium."""
        sync_bytes(fd)

    def sync_file(self, path: Path) -> None:
        """As `sync_bytes`, for a file that is not open. Raises FileNotFoundError."""
        with _spare.opened(path, os.O_RDONLY) as fd:
            self.sync_bytes(fd)

    def sync_folder(self, path: Path) -> None:
        """Returns when the names in the folder are on the medium."""
        with _spare.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            sync_all(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def _refused(*_: object) -> NoReturn:
    raise OSError(errno.EBADF, "the log is closed")


class ClosedDisk(Disk):
    """For a log that was closed, whose folder may belong to another log by now. Every call
    fails.
    """

    open = write_at = truncate = reserve = _refused  # type: ignore[assignment]
    sync_bytes = sync_folder = rename = unlink = _refused  # type: ignore[assignment]


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], position: int) -> int:
    """Write all `buffers` at `position` in as few calls as possible; returns the bytes written.

    Raises OSError; some bytes may have been written then.
    """
    wanted = sum(map(len, buffers))
    total = disk.write_at(fd, buffers[:IOV_MAX], position) if wanted else 0
    if total == wanted:
        return total
    pending, taken = [memoryview(buffer) for buffer in buffers if buffer], total
    while True:
        if taken <= 0:
            raise OSError(errno.EIO, "pwritev wrote no bytes")
        while pending and taken >= len(pending[0]):
            taken -= len(pending.pop(0))
        if not pending:
            return total
        pending[0] = pending[0][taken:]
        taken = disk.write_at(fd, pending[:IOV_MAX], position + total)
        total += taken


def is_disk_full(error: OSError) -> bool:
    """Whether the call failed for lack of space or descriptors, and so did nothing."""
    return error.errno in DISK_FULL_ERRNOS


def disk_full(where: object, error: OSError) -> DiskFull:
    """The error to raise for a call that failed with `is_disk_full`."""
    return disk_full_error(where, error, retry_after_s=DISK_FULL_RETRY_S)
