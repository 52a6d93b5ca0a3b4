"""One unit of reading: runs of bytes of local files, whichever tier they came from.

* Whoever holds a `FileSlice` may send it, even after the file was renamed or unlinked: the slice
  keeps the descriptor open, and the last reference to it closes it.
* A file that slices are taken from is never truncated below them, nor rewritten in place.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple


class OpenFile:
    """A read-only descriptor that lives as long as somebody refers to it."""

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
        """Its bytes proved bad: whoever keeps it for others should check it again."""

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class FileSlice(NamedTuple):
    """`size_bytes` bytes of `file` from `position` on; of a log always whole record batches."""

    file: OpenFile
    position: int
    size_bytes: int

    def read(self) -> bytes:
        """The bytes. Raises EOFError if the file is shorter than the slice."""
        data = os.pread(self.file.fd, self.size_bytes, self.position)
        while len(data) < self.size_bytes:  # pread(2) stops at 2 GiB and at signals
            more = os.pread(self.file.fd, self.size_bytes - len(data), self.position + len(data))
            if not more:
                raise EOFError(
                    f"{self.file.name}: shorter than position {self.position} + {self.size_bytes}"
                )
            data += more
        return data


class TierRead(NamedTuple):
    """Whole batches of one tier; the first may begin below the offset asked for.

    `next_offset` is where the next read begins; slices may be empty where compaction left nothing.
    """

    slices: tuple[FileSlice, ...]
    next_offset: int
