"""The system calls that change a disk, in one place so that tests can make each of them fail.

* Nothing in this room writes, syncs, renames or unlinks except through a `Disk`.
* Errors stay OSError here; the log maps them: a full disk refuses the write, anything else takes
  the log offline.
* What a platform lacks is substituted here and nowhere else (macOS has neither fdatasync nor an
  fsync that reaches the medium).
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NoReturn

from hot_tier.spare_descriptors import SpareDescriptors
from record_format.batch import Buffer
from record_format.errors import FILE_LIMIT_ERRNOS, DiskFull, disk_full_error

if sys.platform == "darwin":
    import fcntl

IOV_MAX = min(1024, os.sysconf("SC_IOV_MAX")) if os.sysconf("SC_IOV_MAX") > 0 else 1024
# No room, or no descriptor: the call did nothing, and may succeed later.
REFUSED_ERRNOS = FILE_LIMIT_ERRNOS | {errno.ENOSPC, errno.EDQUOT}
REFUSED_RETRY_S: Final = 5.0


_spare: Final = SpareDescriptors()


class Disk:
    """The calls as they are. A subclass may fail some of them."""

    def open(self, path: Path, flags: int) -> int:
        return os.open(path, flags | os.O_CLOEXEC, 0o644)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        """One pwritev(2): how many bytes it took, maybe fewer than given."""
        return os.pwritev(fd, buffers, position)

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        """Make the file this long and its blocks its own (`preallocate`)."""
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(fd, 0, size_bytes)
        else:
            os.ftruncate(fd, size_bytes)

    def sync_bytes(self, fd: int) -> None:
        """The file's bytes and length are on the medium when this returns."""
        if sys.platform == "darwin":
            fcntl.fcntl(fd, fcntl.F_FULLFSYNC)
        else:
            os.fdatasync(fd)

    def sync_file(self, path: Path) -> None:
        """As `sync_bytes`, of a file that is not open. Raises FileNotFoundError."""
        with _spare.opened(path, os.O_RDONLY) as fd:
            self.sync_bytes(fd)

    def sync_folder(self, path: Path) -> None:
        """The names in the folder are on the medium when this returns."""
        with _spare.opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.fsync(fd)

    def rename(self, source: Path, target: Path) -> None:
        source.replace(target)

    def unlink(self, path: Path) -> None:
        path.unlink(missing_ok=True)


def _refused(*_: object) -> NoReturn:
    raise OSError(errno.EBADF, "the log is closed")


class ClosedDisk(Disk):
    """Of a log that was closed: its folder's name may be another log's by now. Every call fails."""

    open = write_at = truncate = reserve = _refused  # type: ignore[assignment]
    sync_bytes = sync_folder = rename = unlink = _refused  # type: ignore[assignment]


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], position: int) -> int:
    """Write every byte of `buffers` at `position`, in as few calls as possible; the bytes written.

    Raises OSError; some of the bytes may then have been written.
    """
    wanted = sum(map(len, buffers))
    total = disk.write_at(fd, buffers[:IOV_MAX], position) if wanted else 0
    if total == wanted:
        return total
    pending, taken = [memoryview(buffer) for buffer in buffers if buffer], total
    while True:
        if taken <= 0:
            raise OSError(errno.EIO, "the disk took no bytes")
        while pending and taken >= len(pending[0]):
            taken -= len(pending.pop(0))
        if not pending:
            return total
        pending[0] = pending[0][taken:]
        taken = disk.write_at(fd, pending[:IOV_MAX], position + total)
        total += taken


def is_refusal(error: OSError) -> bool:
    return error.errno in REFUSED_ERRNOS


def refusal(where: object, error: OSError) -> DiskFull:
    """What to raise for a call that `is_refusal`."""
    return disk_full_error(where, error, retry_after_s=REFUSED_RETRY_S)
