"""A file that the disk cannot read any more, though it can write another in its place."""

import errno
import os
from pathlib import Path

from hot_tier.open_files import OpenFiles


def cannot_read(monkeypatch, path: Path, *, kept: Path) -> None:
    """Reads of that very file fail from now on; one that is put in its place is another."""
    os.link(path, kept)  # so that no other gets its number
    bad, read_bytes = path.stat().st_ino, Path.read_bytes

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

    monkeypatch.setattr(Path, "read_bytes", read_whole)
    monkeypatch.setattr(OpenFiles, "pread", staticmethod(read_some))
