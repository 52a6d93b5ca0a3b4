"""Queries of the OS page cache, and reads that do not block on the disk. All platform dependencies
are in this file.

* On Linux: preadv2 with RWF_NOWAIT. On other systems, and on file systems without support for it,
  everything counts as not resident: the caller then reads in a thread that may block, which is
  slower but equally correct.
* `is_resident` asks cachestat(2), Linux 6.5, for the number of cached pages, and samples, because
  that counts pages that are still being read. Without it, or for a few pages, it only samples, more
  densely: readahead loads runs of pages, so one byte stands for the rest. If a page between two
  samples is missing, that costs one disk read, never wrong bytes.
* `resident_bytes` maps the file for mincore(2) without touching its pages: nothing is read, and a
  concurrent truncation raises no signal.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from typing import Final, Protocol

from tierlog.host.waiting import WouldBlock

SAMPLE_BYTES: Final = 64 << 10
COUNTED_SAMPLE_BYTES: Final = 1 << 20  # if all pages are there; readahead reads less at a time
_COUNT_FROM_BYTES: Final = 3 * SAMPLE_BYTES  # below that, samples are faster
_TOUCH_BYTES: Final = 256 << 10
NOWAIT: Final = getattr(os, "RWF_NOWAIT", 0) if hasattr(os, "preadv") else 0
_ANY_BYTE: Final = [bytearray(1)]  # written by any thread, read by none
_CANNOT_TELL: Final = frozenset((errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS))


def pread_nowait(fd: int, size_bytes: int, position: int, /) -> bytes:
    """`os.pread` from the page cache only; short only at the end of the file.

    Raises WouldBlock if any of it would have to be read from disk.
    """
    if not NOWAIT:
        raise WouldBlock("no RWF_NOWAIT on this system")
    buffer, read = bytearray(size_bytes), 0
    try:
        # A short read ends at the end of the file or of the cached part: the next one tells which.
        while more := os.preadv(fd, [memoryview(buffer)[read:]], position + read, NOWAIT):
            read += more
            if read == size_bytes:
                return bytes(buffer)
    except BlockingIOError as error:
        raise WouldBlock("not in the page cache") from error
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            raise WouldBlock("no RWF_NOWAIT on this file system") from error
        raise
    return bytes(buffer[:read])


def is_resident(fd: int, position: int, size_bytes: int) -> bool:
    """Whether these bytes of a regular file can be read without disk I/O. Never blocks."""
    if not NOWAIT:
        return False
    end, step = position + size_bytes, SAMPLE_BYTES
    if size_bytes >= _COUNT_FROM_BYTES:
        pages = (end - 1) // mmap.PAGESIZE - position // mmap.PAGESIZE + 1
        cached = _cached_pages(fd, position, size_bytes)
        if cached is not None:
            if cached < pages:
                return False
            step = COUNTED_SAMPLE_BYTES
    try:
        for sample in range(position, end, step):
            os.preadv(fd, _ANY_BYTE, sample, NOWAIT)
        os.preadv(fd, _ANY_BYTE, end - 1, NOWAIT)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in _CANNOT_TELL:
            return False
        raise
    return True


def _cached_pages(fd: int, position: int, size_bytes: int) -> int | None:
    """The number of pages of a range in the page cache, up to date or being read; None if the
    system does not tell.
    """
    counts = (ctypes.c_uint64 * 5)()  # cached, dirty, in writeback, evicted, recently evicted
    span = (ctypes.c_uint64 * 2)(position, size_bytes)
    return None if _syscall(_CACHESTAT, fd, span, counts, 0) else counts[0]


_CACHESTAT: Final = 451  # on all architectures of Linux but Alpha
# It takes some microseconds and never blocks, so the GIL is kept.
_syscall: Final = ctypes.PyDLL(None).syscall
_syscall.argtypes = (
    *(ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint),
)
_syscall.restype = ctypes.c_long


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
