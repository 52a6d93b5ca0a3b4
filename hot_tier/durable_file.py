"""Small files replaced whole: temp file, write, sync, rename, sync of the folder.

A reader sees the old bytes or the new ones, after a crash too. One writer per path at a time.
"""

from __future__ import annotations

import os
from pathlib import Path

from hot_tier.disk import Disk, write_all
from record_format.errors import CorruptDataError, eio_as

REAL_DISK = Disk()


def write_durably(path: Path, data: bytes, *, disk: Disk = REAL_DISK) -> None:
    """Replace `path` with `data`; it is on the medium when this returns. Raises OSError."""
    write_whole(path, data, disk=disk, sync=True)
    disk.sync_folder(path.parent)


def write_whole(path: Path, data: bytes, *, disk: Disk = REAL_DISK, sync: bool) -> None:
    """Replace `path` with `data`, seen whole or not at all; the folder is not synced."""
    temporary = path.with_name(path.name + ".tmp")
    fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        write_all(disk, fd, [data], 0)
        if sync:
            disk.sync_bytes(fd)
    except OSError as error:
        error.filename = str(path)  # a call on a descriptor does not tell it
        raise
    finally:
        os.close(fd)
    disk.rename(temporary, path)


def sync_folder(path: Path) -> None:
    REAL_DISK.sync_folder(path)


def read_whole(path: Path, corrupt: type[CorruptDataError]) -> bytes:
    """A file that can be rebuilt. Raises FileNotFoundError; `corrupt` where the disk fails."""
    with eio_as(corrupt, file=str(path)):
        return path.read_bytes()
