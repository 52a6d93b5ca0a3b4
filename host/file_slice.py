"""The unit of reading: byte ranges of local files, whichever tier they come from.

* A `FileSlice` stays readable even after its file is renamed or unlinked: it keeps the descriptor
  open, which is closed with the last reference.
* A file is never truncated below a slice of it, nor rewritten in place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from tierlog.host.page_cache import pread_nowait
from tierlog.host.waiting import Wait


class OpenFile:
    """A read-only descriptor that is closed with the last reference to this object."""

    __slots__ = ("fd", "name")

    def __init__(self, path: Path | str) -> None:
        self.fd = -1
        self.name = os.fspath(path)
        self.fd = os.open(self.name, os.O_RDONLY | os.O_CLOEXEC)

    @property
    def path(self) -> Path:
        return Path(self.name)

    def fileno(self) -> int:
        return self.fd

    def report_corrupt(self) -> None:
        """The file's bytes failed a check: a cache that owns the file should verify it again."""

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileSlice(NamedTuple):
    """`size_bytes` bytes of `file` from `position` on; in a log always whole record batches."""

    file: OpenFile
    position: int
    size_bytes: int

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


class TierRead(NamedTuple):
    """Whole batches from one tier; the first may begin below the requested offset.

    `next_offset` is where the next read starts. There are no slices if compaction left nothing.
    """

    slices: tuple[FileSlice, ...]
    next_offset: int
