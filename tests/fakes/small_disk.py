"""A small real file system that can be filled on demand: a separate tmpfs."""

from __future__ import annotations

import errno
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

import pytest

FILES = 256


def no_room(*_: object) -> NoReturn:
    """Replaces a call that a full disk refuses."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class SmallDisk:
    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        """Leave no free space."""
        with self._ballast.open("wb", buffering=0) as file:
            _until_refused(lambda: file.write(bytes(4096)))

    def empty(self) -> None:
        """Undo `fill`."""
        self._ballast.unlink()

    def make_read_only(self) -> None:
        """As Linux does with a disk that fails."""
        remount = ["mount", "-o", "remount,ro", str(self.path)]
        subprocess.run(remount, check=True, capture_output=True)

    def fill_with_files(self, *, but: int = 0) -> None:
        """Leave no inode free, or only `but`."""
        self._ballast.mkdir()
        names = (self._ballast / str(number) for number in range(2 * FILES))
        _until_refused(lambda: next(names).touch())
        for name in sorted(self._ballast.iterdir())[:but]:
            name.unlink()


@contextmanager
def small_disk(path: Path, *, size_bytes: int = 1 << 20) -> Iterator[SmallDisk]:
    path.mkdir(parents=True)
    options = f"size={size_bytes},nr_inodes={FILES}"
    mount = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)


@contextmanager
def read_only(folder: Path, mount_point: Path) -> Iterator[Path]:
    """The folder mounted a second time at `mount_point`, read-only."""
    mount_point.mkdir()
    mount = ["mount", "--bind", "-o", "ro", str(folder), str(mount_point)]
    if os.geteuid() or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("cannot mount a file system")
    try:
        yield mount_point
    finally:
        subprocess.run(["umount", "--lazy", str(mount_point)], check=True)


def _until_refused(write) -> None:
    try:
        while True:
            write()
    except OSError:
        return
