"""Is it in memory? What the event loop may send at once, and what a thread has to bring in first.

* Asked in samples: read-ahead brings in runs of pages, so one byte in every 64 KiB stands for the
  rest. A page that was evicted between two samples costs the loop one disk read, never wrong bytes.
* Where the kernel cannot be asked (macOS, a file system without RWF_NOWAIT) the answer is "not in
  memory", and a thread touches the bytes: slower, and as correct.
"""

from __future__ import annotations

import errno
import os
from typing import Final, Protocol

SAMPLE_BYTES: Final = 64 << 10
_TOUCH_BYTES: Final = 256 << 10
_NOWAIT: Final[int | None] = getattr(os, "RWF_NOWAIT", None) if hasattr(os, "preadv") else None
_UNSUPPORTED: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


def is_resident(fd: int, position: int, size_bytes: int) -> bool:
    """Whether reading these bytes of a regular file would not wait for the disk. Never blocks."""
    if _NOWAIT is None:
        return False
    end = position + size_bytes
    byte = bytearray(1)
    try:
        for sample in range(position, end, SAMPLE_BYTES):
            os.preadv(fd, [byte], sample, _NOWAIT)
        os.preadv(fd, [byte], end - 1, _NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _UNSUPPORTED:
            return False
        raise
    return True


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def bring_in(file: HasFileno, position: int, size_bytes: int) -> None:
    """Read the bytes, for the page cache's sake. For a thread. Ends early at the file's end."""
    end = position + size_bytes
    while position < end:
        data = os.pread(file.fileno(), min(_TOUCH_BYTES, end - position), position)
        if not data:
            return
        position += len(data)
