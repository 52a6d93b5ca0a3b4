"""A copy-on-write overlay of a log's folder, made of symbolic links: opened like the log, it shows
what recovery would find and do, while the original files stay unchanged.

* Links are renamed and unlinked like files. A file that is written in place is copied first.
* A `.log` is never copied: writes to it and truncations are dropped, because nobody reads a log
  past the end that its owner knows.
* Nothing is synced.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from tierlog.host.disk import Disk
from tierlog.hot_tier.file_names import LOG
from tierlog.hot_tier.log_folder import LogFolder
from tierlog.record_format.batch import Buffer


def link_files(source: Path, target: Path) -> None:
    """Create the folder `target` with a link to each file of `source`."""
    target.mkdir()
    for path in source.iterdir():
        if path.is_file() and path.suffix != ".tmp":  # overwritten or removed by the open
            (target / path.name).symlink_to(path.resolve())


@contextmanager
def with_swaps_finished(folder: Path) -> Iterator[Path]:
    """An overlay of a closed log's folder as the next open would leave it, with an interrupted swap
    finished. Raises OSError.
    """
    with tempfile.TemporaryDirectory(prefix="tierlog-log-") as made:
        place = Path(made) / folder.name
        link_files(folder, place)
        LogFolder.open(place, disk=OverlayDisk())
        yield place


class OverlayDisk(Disk):
    """Copies a link's target before the first write in place; see the module."""

    def open(self, path: Path, flags: int) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR) and path.is_symlink():
            if path.suffix == LOG:
                return super().open(path, os.O_RDONLY)
            data = path.read_bytes()
            path.unlink()
            path.write_bytes(data)
        return super().open(path, flags)

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        if _is_read_only(fd):
            return sum(map(len, buffers))
        return super().write_at(fd, buffers, position)

    def truncate(self, fd: int, size_bytes: int) -> None:
        if not _is_read_only(fd):
            super().truncate(fd, size_bytes)

    def reserve(self, fd: int, size_bytes: int) -> None:
        if not _is_read_only(fd):
            super().reserve(fd, size_bytes)

    def sync_bytes(self, fd: int) -> None:
        pass

    def sync_folder(self, path: Path) -> None:
        pass


def _is_read_only(fd: int) -> bool:
    return fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY
