"""Reading the files of logs: a bounded cache of read-only descriptors, and the cache of indexes,
shared by all logs.

* A partition of ten thousand segments must not hold ten thousand descriptors. A file that
  was handed out stays open until its holder closes it, even if the cache drops it. Keys are path
  strings: creating, hashing and comparing Path objects costs more than a look-up.
* Repairs continue past sectors that the disk can no longer read (`zero_filling_pread`): they are
  filled with zeros, which no checksum accepts as a batch.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

from tierlog.host.file_slice import OpenFile
from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import Wait
from tierlog.hot_tier.indexes import IndexCache

KEPT_OPEN_MAX = 256  # of busy partitions: others are opened in a thread
SECTOR_BYTES: Final = 4096  # of a disk, or the page cache's page that covers it
Pread = Callable[[int, int, int], bytes]  # (fd, size, position)


class OpenFiles:
    """Least recently used descriptors by path. Thread-safe."""

    pread: Final = staticmethod(os.pread)

    def __init__(self) -> None:
        self._files: OrderedDict[str, OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._generation = 0
        self._pinned: dict[str, OpenFile] = {}
        self.indexes = IndexCache()

    def open(self, path: Path | str, wait: Wait = Wait.WAIT) -> OpenFile:
        """The file, from the cache or opened now; the caller closes it. Raises FileNotFoundError,
        WouldBlock.
        """
        file = self.get(path)
        if file is not None:
            return file
        wait.before("a file is opened")
        generation = self._generation
        file = OpenFile(path)
        with self._lock:
            if generation != self._generation:
                return file  # the path may name another file by now
            dropped = [self._files.pop(str(path), None)]  # opened by another thread meanwhile
            self._files[str(path)] = file.share()
            while len(self._files) > KEPT_OPEN_MAX:
                dropped.append(self._files.popitem(last=False)[1])
        _close_all(dropped)
        return file

    def reader_of(self, file: OpenFile, wait: Wait) -> FileReader:
        """A reader that raises WouldBlock for what is not in the page cache."""
        return FileReader(file, self.pread if wait is Wait.WAIT else pread_nowait)

    def get(self, path: Path | str) -> OpenFile | None:
        """The file, if it is in the cache; the caller closes it."""
        name = str(path)
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                return file.share()
            pinned = self._pinned.get(name)
            return None if pinned is None else pinned.share()

    def pin(self, path: Path | str, file: OpenFile) -> None:
        """Make the path mean `file`, whatever is there, until its folder is invalidated. The cache
        closes it then.
        """
        name = str(path)
        self.invalidate(name)
        with self._lock:
            before, self._pinned[name] = self._pinned.get(name), file
        _close_all([before])

    def invalidate(self, path: Path | str) -> None:
        """The path now names another file, or none."""
        name = str(path)
        self.indexes.invalidate(name)
        with self._lock:
            self._generation += 1
            dropped = self._files.pop(name, None)
        _close_all([dropped])

    def invalidate_folder(self, folder: Path) -> None:
        """The files in `folder` no longer belong to the log that had them open. Cached descriptors
        and indexes of all logs are dropped, which is cheaper than a search; pinned files only of
        this folder.
        """
        below = f"{folder}/"
        self.indexes.clear()
        with self._lock:
            self._generation += 1
            dropped = list(self._files.values())
            self._files.clear()
            names = [name for name in self._pinned if name.startswith(below)]
            dropped += [self._pinned.pop(name) for name in names]
        _close_all(dropped)


def _close_all(files: Iterable[OpenFile | None]) -> None:
    """Called without the lock: closing a file may take a while."""
    for file in files:
        if file is not None:
            file.close()


class FileReader:
    """Reads of one file, of which the reader is a holder."""

    __slots__ = ("_pread", "file")

    def __init__(self, file: OpenFile, pread: Pread = os.pread) -> None:
        self.file, self._pread = file, pread

    def close(self) -> None:
        self.file.close()

    @property
    def name(self) -> str:
        return self.file.name

    def read(self, size_bytes: int, position: int) -> bytes:
        """As os.pread."""
        return self._pread(self.file.fd, size_bytes, position)


def zero_filling_pread(pread: Pread) -> Pread:
    """A `pread` (os.pread) that reads to the end of the request despite EIO. Raises OSError for all
    other errors.
    """

    def read(fd: int, size_bytes: int, position: int) -> bytes:
        end = min(position + size_bytes, os.fstat(fd).st_size)
        found = _read(pread, fd, size_bytes, position) or b""
        if position + len(found) >= end:
            return found
        pieces = [found]  # up to the bad sector
        position += len(found)
        while position < end:
            size = min(SECTOR_BYTES - position % SECTOR_BYTES, end - position)
            pieces.append(_read(pread, fd, size, position) or bytes(size))
            position += len(pieces[-1])
        return b"".join(pieces)

    return read


def _read(pread: Pread, fd: int, size_bytes: int, position: int) -> bytes | None:
    """None on EIO."""
    try:
        return pread(fd, size_bytes, position)
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        return None
