"""Chunks in anonymous memory files, for when the disk has no space for them.

* A chunk serves only the readers that are waiting for it, and is freed with the last of them. It is
  read and sent like any other file.
* Together, including those being filled, they stay within the limit or are a single chunk. Beyond
  that a fill waits for a reader to release one, and finally raises Throttled.
* Memory files need Linux. On other systems, or if the process is out of file descriptors, the read
  fails with the error of the disk.

Thread-safe.
"""

from __future__ import annotations

import errno
import mmap
import os
import threading
import time
from collections.abc import Callable
from weakref import ref

from tierlog.cold_tier.ranged_reader import ChunkRef
from tierlog.host.file_slice import OpenFile
from tierlog.record_format.errors import Throttled, disk_full_error


class _MemoryFile(OpenFile):
    __slots__ = ("__weakref__",)

    def __init__(self, chunk: ChunkRef) -> None:
        self.fd, self.name = -1, f"{chunk.log_key}, chunk {chunk.number}"
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no memory files")
        self.fd = os.memfd_create("tierlog-chunk")


class MemoryChunks:
    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes, self._lock = limit_bytes, threading.Lock()
        self._open: list[tuple[ref[_MemoryFile], int]] = []

    def fill(
        self, chunk: ChunkRef, fetch: Callable[[ChunkRef, memoryview], object], *, wait_s: float
    ) -> OpenFile:
        """A file filled by `fetch`. Raises Throttled, DiskFull, and whatever `fetch` raises."""
        deadline = time.monotonic() + wait_s
        try:
            while (file := self._maybe_create(chunk)) is None:
                if time.monotonic() >= deadline:
                    raise Throttled("the disk is full, and so is the memory for chunks in use")
                time.sleep(0.05)  # a file's finalizer cannot notify, so poll
            os.posix_fallocate(file.fd, 0, chunk.size_bytes)
            buffer = mmap.mmap(file.fd, chunk.size_bytes)
        except OSError as error:
            raise disk_full_error("no space on disk or in memory", error) from error
        fetch(chunk, memoryview(buffer))
        return file

    def _maybe_create(self, chunk: ChunkRef) -> _MemoryFile | None:
        with self._lock:
            self._open = [entry for entry in self._open if entry[0]() is not None]
            used = sum(size_bytes for _, size_bytes in self._open)
            if used and used + chunk.size_bytes > self._limit_bytes:
                return None
            file = _MemoryFile(chunk)
            self._open.append((ref(file), chunk.size_bytes))
            return file
