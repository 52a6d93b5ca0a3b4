"""Queries of the OS page cache, and reads that do not block on the disk. All platform dependencies
are in this file.

* On Linux: preadv2 with RWF_NOWAIT. On other systems, and on file systems without support for it,
  everything counts as not resident: the caller then reads in a thread that may block, which is
  slower but equally correct.
* `is_resident` samples: readahead loads runs of pages, so one byte per 64 KiB stands for the rest.
  If a page between two samples was evicted, that costs one disk read, never wrong bytes.
* `resident_bytes` maps the file for mincore(2) without touching its pages: nothing is read, and a
  concurrent truncation raises no signal.
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
_ANY_BYTE: Final = [bytearray(1)]  # written by any thread, read by none
_CANNOT_TELL: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


def pread_nowait(fd: int, size_bytes: int, position: int, /) -> bytes:
    """`os.pread` from the page cache only; short only at the end of the file.

    Raises BlockingIOError if any of it would have to be read from disk.
    """
    if not NOWAIT:
        raise BlockingIOError(errno.EAGAIN, "no RWF_NOWAIT on this system")
    buffer, read = bytearray(size_bytes), 0
    try:
        # A short read ends at the end of the file or of the cached part: the next one tells which.
        while more := os.preadv(fd, [memoryview(buffer)[read:]], position + read, NOWAIT):
            read += more
            if read == size_bytes:
                return bytes(buffer)
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            raise BlockingIOError(errno.EAGAIN, "no RWF_NOWAIT on this file system") from error
        raise
    return bytes(buffer[:read])


def is_resident(fd: int, position: int, size_bytes: int) -> bool:
    """Whether these bytes of a regular file can be read without disk I/O. Never blocks."""
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
    """Read the bytes into the page cache, up to the end of the file. Blocks: run it in a thread."""
    end = position + size_bytes
    while position < end:
        data = os.pread(file.fileno(), min(_TOUCH_BYTES, end - position), position)
        if not data:
            return
        position += len(data)


def resident_bytes(fd: int) -> int:
    """How many bytes of a file are in the page cache, by whole pages except for the file's last.

    Linux reports residency only to processes that may write to the file; to others it reports all
    pages as resident. Raises OSError.
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
