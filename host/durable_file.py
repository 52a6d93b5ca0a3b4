"""Replacing small files atomically: temp file, write, sync, rename, sync of the folder.

Readers see the old bytes or the new ones, also after a crash. One writer per path at a time.
"""

from __future__ import annotations

import os
from pathlib import Path

from tierlog.host.disk import Disk, write_all
from tierlog.record_format.errors import CorruptDataError, eio_as

REAL_DISK = Disk()


def write_durably(path: Path, data: bytes, *, disk: Disk = REAL_DISK) -> None:
    """Replace `path` with `data`; returns when it is on the medium. Raises OSError."""
    write_atomically(path, data, disk=disk, sync=True)
    disk.sync_folder(path.parent)


def write_atomically(path: Path, data: bytes, *, disk: Disk = REAL_DISK, sync: bool) -> None:
    """Replace `path` with `data`; readers see all of it or the old file. Does not sync the
    folder.
    """
    temporary = path.with_name(path.name + ".tmp")
    fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, [data], 0)
        if sync:
            disk.sync_bytes(fd)
    except OSError as error:
        error.filename = str(path)  # calls on descriptors do not set it
        raise
    finally:
        os.close(fd)
    disk.rename(temporary, path)


def read_whole(path: Path, corrupt: type[CorruptDataError]) -> bytes:
    """Read a file that can be rebuilt. Raises FileNotFoundError, or `corrupt` if the disk cannot
    read it.
    """
    with eio_as(corrupt, file=str(path)):
        return path.read_bytes()
