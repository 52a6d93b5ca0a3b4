"""Replacing small files atomically: temp file, write, sync, rename, sync of the folder.

Readers see the old bytes or the new ones, also after a crash. One writer per path at a time.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

from tierlog.host.disk import Disk, is_disk_full, write_all
from tierlog.record_format.errors import CorruptDataError, eio_as

REAL_DISK = Disk()
COPY_BYTES = 1 << 20


def write_durably(path: Path, data: bytes, *, disk: Disk = REAL_DISK) -> None:
    """Replace `path` with `data`; returns when it is on the medium. Raises OSError."""
    write_atomically(path, data, disk=disk, sync=True)
    disk.sync_folder(path.parent)


def copy_durably(
    source: Path,
    target: Path,
    *,
    start: int,
    end: int | None = None,
    pread: Callable[[int, int, int], bytes] = os.pread,
    disk: Disk = REAL_DISK,
) -> None:
    """Copy the bytes [start, end) of a file, read by `pread`, to the file `target`, which appears
    complete or not at all. Raises OSError.
    """
    temporary = target.with_name(target.name + ".tmp")
    out = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    try:
        with source.open("rb", buffering=0) as file:
            at, stop = start, file.seek(0, os.SEEK_END) if end is None else end
            while data := pread(file.fileno(), min(COPY_BYTES, stop - at), at):
                write_all(disk, out, [data], at - start)
                at += len(data)
        disk.sync_bytes(out)
    except OSError as error:  # calls on descriptors do not set it
        error.filename = str(source if error.errno == errno.EIO else target)
        raise
    finally:
        os.close(out)
    disk.rename(temporary, target)
    disk.sync_folder(target.parent)


def write_atomically(path: Path, data: bytes, *, disk: Disk = REAL_DISK, sync: bool) -> None:
    """Replace `path` with `data`; readers see all of it or the old file. Does not sync the
    folder.
    """
    temporary = path.with_name(path.name + ".tmp")
    try:
        fd = disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(disk, fd, [data], 0)
            if sync:
                disk.sync_bytes(fd)
        finally:
            os.close(fd)
    except OSError as error:
        error.filename = str(path)  # calls on descriptors do not set it
        if is_disk_full(error) and _has_already(path, data, disk=disk, sync=sync):
            return
        raise
    disk.rename(temporary, path)


def _has_already(path: Path, data: bytes, *, disk: Disk, sync: bool) -> bool:
    """Whether the file has these bytes, perhaps followed by preallocated space: a start after a
    crash writes most files as they are, which needs no room.
    """
    try:
        fd = disk.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        if os.pread(fd, len(data), 0) != data:
            return False
        disk.truncate(fd, len(data))
        if sync:
            disk.sync_bytes(fd)
    finally:
        os.close(fd)
    return True


def read_whole(path: Path, corrupt: type[CorruptDataError]) -> bytes:
    """Read a file that can be rebuilt. Raises FileNotFoundError, or `corrupt` if the disk cannot
    read it.
    """
    with eio_as(corrupt, file=str(path)):
        return path.read_bytes()
