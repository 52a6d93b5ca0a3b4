"""Which parts of a file are in memory, and reads that do not wait for the disk: the only module
that knows which systems can tell.

* Linux: preadv2 with RWF_NOWAIT. Elsewhere, and on a file system that cannot tell, every answer is
  "would wait": the caller then reads in a thread that may wait. Slower, but just as correct.
* `is_resident` takes samples: read-ahead brings in runs of pages, so one byte in every 64 KiB
  stands for the rest. A page that was evicted between two samples costs one disk read, never wrong
  bytes.
* `resident_bytes` maps the file to ask mincore(2), and touches no page of it: nothing is read, and
  a file that is truncated meanwhile raises no signal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final, Protocol

SAMPLE_BYTES: Final = 64 << 10
_TOUCH_BYTES: Final = 256 << 10
NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0
_ANY_BYTE: Final = [bytearray(1)]  # any thread may write to it: nobody reads it
_CANNOT_TELL: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


def pread_nowait(fd: int, size_bytes: int, position: int, /) -> bytes:
    """As os.pread: short only where the file ends.

    Raises BlockingIOError if some of it would have to come from the disk.
    """
    if not NOWAIT:
        raise BlockingIOError(errno.EAGAIN, "this system cannot say what is in memory")
    buffer, read = bytearray(size_bytes), 0
    try:
        # A short read ends at the end of the file or of what is in memory: the next one tells.
        while more := os.preadv(fd, [memoryview(buffer)[read:]], position + read, NOWAIT):
            read += more
            if read == size_bytes:
                return bytes(buffer)
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            raise BlockingIOError(errno.EAGAIN, "this file system cannot say it") from error
        raise
    return bytes(buffer[:read])


def is_resident(fd: int, position: int, size_bytes: int) -> bool:
    """Whether reading these bytes of a regular file would not wait for the disk. Never blocks."""
    if not NOWAIT:
        return False
    end = position + size_bytes
    try:
        for sample in range(position, end, SAMPLE_BYTES):
            os.preadv(fd, _ANY_BYTE, sample, NOWAIT)
        os.preadv(fd, _ANY_BYTE, end - 1, NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            return False
        raise
    return True


class HasFileno(Protocol):
    def fileno(self) -> int: ...


def prefetch(file: HasFileno, position: int, size_bytes: int) -> None:
    """Read the bytes into the page cache. Run in a thread. Stops at the end of the file."""
    end = position + size_bytes
    while position < end:
        data = os.pread(file.fileno(), min(_TOUCH_BYTES, end - position), position)
        if not data:
            return
        position += len(data)


def resident_bytes(fd: int) -> int:
    """How many bytes of a file are in the page cache, in whole pages except for the file's last.

    Linux tells only those who may write to the file; for others all of it counts. Raises OSError.
    """
    size_bytes = os.fstat(fd).st_size
    return sum(
        _resident_in(fd, start, min(_WINDOW_BYTES, size_bytes - start))
        for start in range(0, size_bytes, _WINDOW_BYTES)
    )


_WINDOW_BYTES: Final = 1 << 30
_MAP_FAILED: Final = ctypes.c_void_p(-1).value


def _resident_in(fd: int, position: int, size_bytes: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = (
        *(ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int),
        ctypes.c_longlong,
    )
    libc.mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
    libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    address = libc.mmap(None, size_bytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, position)
    if address == _MAP_FAILED:
        raise _failure()
    try:
        pages = ctypes.create_string_buffer(-(-size_bytes // mmap.PAGESIZE))
        if libc.mincore(address, size_bytes, pages):
            raise _failure()
    finally:
        libc.munmap(address, size_bytes)
    in_memory = [byte & 1 for byte in pages.raw]
    resident = sum(in_memory) * mmap.PAGESIZE
    past_end = -size_bytes % mmap.PAGESIZE
    return resident - past_end if in_memory[-1] else resident


def _failure() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
