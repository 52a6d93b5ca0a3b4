"""The unit of reading: byte ranges of local files, whichever tier they come from.

* A `FileSlice` stays readable even after its file is renamed or unlinked: it holds the descriptor
  open until it is closed. Whoever is given slices closes them (`contextlib.closing`), or hands them
  on; once there is a response it owns them.
* A thread that goes on for a request that was cancelled may find its files closed: what it makes of
  them is dropped.
* A file is never truncated below a slice of it, nor rewritten in place.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple, Protocol, Self, runtime_checkable

from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import Wait


@runtime_checkable
class HoldsFiles(Protocol):
    """What holds files open, and is closed once, by its owner."""

    def close(self) -> None: ...


_HOLDERS: Final = threading.Lock()


class OpenFile:
    """A read-only descriptor, closed once all who hold it have closed it: who opened it, and who
    was given a `share`. Thread-safe.
    """

    __slots__ = ("_holders", "fd", "name")

    def __init__(self, path: Path | str) -> None:
        name = os.fspath(path)
        self._hold(os.open(name, os.O_RDONLY | os.O_CLOEXEC), name)

    def _hold(self, fd: int, name: str) -> None:
        self.fd, self.name, self._holders = fd, name, 1

    def share(self) -> Self:
        """The file, for one more holder."""
        with _HOLDERS:
            assert self._holders, "it is closed"
            self._holders += 1
        return self

    def close(self) -> None:
        with _HOLDERS:
            assert self._holders, "it is closed"
            self._holders -= 1
            if self._holders:
                return
        self._close_last()

    def _close_last(self) -> None:
        fd, self.fd = self.fd, -1
        os.close(fd)

    @property
    def path(self) -> Path:
        return Path(self.name)

    def fileno(self) -> int:
        return self.fd

    def report_corrupt(self) -> None:
        """The file's bytes failed a check: a cache that owns the file should verify it again."""


class FileSlice(NamedTuple):
    """`size_bytes` bytes of `file` from `position` on; in a log always whole record batches. It is
    one holder of the file.
    """

    file: OpenFile
    position: int
    size_bytes: int

    def close(self) -> None:
        self.file.close()

    def read(self, wait: Wait = Wait.WAIT) -> bytes:
        """The bytes. Raises EOFError if the file is shorter than the slice, WouldBlock."""
        if wait is Wait.NEVER:  # no check beforehand would do: it only takes samples
            data = pread_nowait(self.file.fd, self.size_bytes, self.position)
            if len(data) == self.size_bytes:
                return data
        return pread_exactly(self.file, self.size_bytes, self.position)


def pread_exactly(file: OpenFile, size_bytes: int, position: int) -> bytes:
    """As os.pread, but all of it. Raises EOFError if the file is shorter."""
    data = os.pread(file.fd, size_bytes, position)
    while len(data) < size_bytes:  # pread(2) stops at 2 GiB and at signals
        more = os.pread(file.fd, size_bytes - len(data), position + len(data))
        if not more:
            raise EOFError(f"{file.name}: ends before position {position} + {size_bytes}")
        data += more
    return data


def close_all(slices: Iterable[FileSlice]) -> None:
    for piece in slices:
        piece.file.close()


class TierRead(NamedTuple):
    """Whole batches from one tier; the first may begin below the requested offset.

    `next_offset` is where the next read starts. There are no slices if compaction left nothing.
    """

    slices: tuple[FileSlice, ...]
    next_offset: int

    def close(self) -> None:
        close_all(self.slices)
