"""Reads that continue past sectors that the disk can no longer read. They are filled with zeros,
which no checksum accepts as a batch.
"""

from __future__ import annotations

import errno
import os
from typing import Final

from tierlog.hot_tier.open_files import Pread

SECTOR_BYTES: Final = 4096  # of a disk, or the page cache's page that covers it


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
