"""Syncs that reach the medium on every system.

* On macOS fsync(2) reaches the drive, which may keep the bytes in its own cache, and fdatasync(2)
  is missing: F_FULLFSYNC empties that cache too. File systems that do not have it (network shares)
  are synced with fsync, as SQLite and the JDK do.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Final

_FULL_SYNC: Final[int | None] = getattr(fcntl, "F_FULLFSYNC", None)
_HAS_NO_FULL_SYNC: Final = frozenset((errno.ENOTSUP, errno.ENOTTY, errno.EINVAL))


def sync_bytes(fd: int) -> None:
    """Return when a file's bytes and length are on the medium. Raises OSError."""
    if _FULL_SYNC is None:
        os.fdatasync(fd)
    else:
        _sync_fully(fd, _FULL_SYNC)


def sync_all(fd: int) -> None:
    """As `sync_bytes`, for a folder's names or a file and its attributes. Raises OSError."""
    if _FULL_SYNC is None:
        os.fsync(fd)
    else:
        _sync_fully(fd, _FULL_SYNC)


def sync_folder(path: Path) -> None:
    """Return when the names in a folder are on the medium. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        sync_all(fd)
    finally:
        os.close(fd)


def make_folders(path: Path, *, below: Path | None = None) -> None:
    """Create a folder and those above it that are missing (`below` is not created). Each one's name
    is on the medium before anything is put in it. Raises OSError.
    """
    if path == below or path.is_dir():
        return
    make_folders(path.parent, below=below)
    try:
        path.mkdir()
    except FileExistsError:
        if path.is_file():  # otherwise another thread created it, and perhaps removed it again
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(path)) from None
    try:
        sync_folder(path.parent)
    except OSError:
        with suppress(OSError):  # or the next call would find it, and not sync its name
            path.rmdir()
        raise


def _sync_fully(fd: int, full_sync: int) -> None:
    try:
        fcntl.fcntl(fd, full_sync)
    except OSError as error:
        if error.errno not in _HAS_NO_FULL_SYNC:
            raise
        os.fsync(fd)
