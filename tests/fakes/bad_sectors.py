"""A file that the disk cannot read any more, though it can write another in its place."""

import errno
import os
from pathlib import Path

from hot_tier.open_files import OpenFiles


def cannot_read(monkeypatch, path: Path, *, kept: Path) -> None:
    """Reads of that very file fail from now on; one that is put in its place is another."""
    os.link(path, kept)  # so that no other gets its number
    bad, read_bytes, preadv = path.stat().st_ino, Path.read_bytes, os.preadv

    def refuse(number: int) -> None:
        if number == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    def read_whole(one: Path) -> bytes:
        if one.exists():
            refuse(one.stat().st_ino)
        return read_bytes(one)

    def read_some(fd: int, size_bytes: int, position: int) -> bytes:
        refuse(os.fstat(fd).st_ino)
        return os.pread(fd, size_bytes, position)

    def read_into(fd: int, buffers: list[memoryview], position: int) -> int:
        refuse(os.fstat(fd).st_ino)
        return preadv(fd, buffers, position)

    monkeypatch.setattr(Path, "read_bytes", read_whole)
    monkeypatch.setattr(os, "preadv", read_into)
    monkeypatch.setattr(OpenFiles, "pread", staticmethod(read_some))
