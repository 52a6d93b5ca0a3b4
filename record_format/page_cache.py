"""A read that does not wait for the disk: the one place that knows which systems have it.

* Linux: preadv2 with RWF_NOWAIT. Elsewhere, and on a file system that cannot tell, every answer is
  "would wait": the caller then reads on a thread that may. Slower, and as correct.
"""

from __future__ import annotations

import errno
import os
from typing import Final

NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0
_CANNOT_TELL: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


def pread_nowait(fd: int, size_bytes: int, position: int) -> bytes:
    """As os.pread: short only where the file ends.

    Raises BlockingIOError where some of it would have to come from the disk.
    """
    if not NOWAIT:
        raise BlockingIOError(errno.EAGAIN, "this system cannot say what is in memory")
    buffer = bytearray(size_bytes)
    try:
        read = os.preadv(fd, [buffer], position, NOWAIT)
        if 0 < read < size_bytes:  # the file's end, or what is in memory: asked once more, it says
            os.preadv(fd, [bytearray(1)], position + read, NOWAIT)
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            raise BlockingIOError(errno.EAGAIN, "this file system cannot say it") from error
        raise
    return bytes(memoryview(buffer)[:read])
