"""A file that the disk can no longer read, although it can write another in its place."""

import errno
import os
from pathlib import Path

from tierlog.hot_tier.open_files import OpenFiles


def cannot_read(
    monkeypatch, path: Path, *, kept: Path, where: range | None = None, opens: bool = True
) -> None:
    """Reads of this file fail from now on; reads of a file that replaces it do not.

    `where`: only those that touch these bytes. `opens`: False if it cannot even be opened.
    """
    os.link(path, kept)  # so that no other file gets its inode number
    bad, read_bytes, pread, preadv = path.stat().st_ino, Path.read_bytes, os.pread, os.preadv
    open_ = os.open
    sectors = where or range(path.stat().st_size)

    def refuse(number: int, start: int, end: int) -> None:
        if number == bad and start < sectors.stop and sectors.start < end:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_whole(path: Path) -> bytes:
        if path.exists():
            refuse(path.stat().st_ino, 0, path.stat().st_size)
        return read_bytes(path)

    def read_some(fd: int, size_bytes: int, position: int) -> bytes:
        refuse(os.fstat(fd).st_ino, position, position + size_bytes)
        return pread(fd, size_bytes, position)

    def read_into(fd: int, buffers: list[memoryview], position: int) -> int:
        refuse(os.fstat(fd).st_ino, position, position + sum(map(len, buffers)))
        return preadv(fd, buffers, position)

    def open_file(path: Path | str, flags: int, mode: int = 0o777, **at: int | None) -> int:
        fd = open_(path, flags, mode, **at)
        if not opens and os.fstat(fd).st_ino == bad:
            os.close(fd)
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fd

    monkeypatch.setattr(os, "open", open_file)
    monkeypatch.setattr(Path, "read_bytes", read_whole)
    monkeypatch.setattr(os, "pread", read_some)
    monkeypatch.setattr(os, "preadv", read_into)
    monkeypatch.setattr(OpenFiles, "pread", staticmethod(read_some))
