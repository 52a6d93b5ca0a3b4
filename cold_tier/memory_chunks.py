"""Chunks that the disk has no room for: in memory, in unnamed files.

* Only for those who wait for one: nobody else finds it here, and it is gone with its last reader.
  It is read and sent like any file.
* All of them together stay within the limit, or are a single chunk; beyond that a fill waits until
  a reader lets go, and is finally Throttled. Those that are being filled count.
* Linux has such files. Elsewhere, and if the process has no descriptor left for one, the read is
  refused as the disk refused it.

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

from cold_tier.ranged_reader import ChunkRef
from record_format.errors import Throttled, disk_refusal
from record_format.file_slice import OpenFile


class _MemoryFile(OpenFile):
    __slots__ = ("__weakref__",)

    def __init__(self, chunk: ChunkRef) -> None:
        self.fd, self.name = -1, f"{chunk.log_key}, chunk {chunk.number}"
        if not hasattr(os, "memfd_create"):
            raise OSError(errno.ENOSYS, "this system has no files in memory")
        self.fd = os.memfd_create("tierlog-chunk")


class MemoryChunks:
    def __init__(self, *, limit_bytes: int) -> None:
        self._limit_bytes, self._lock = limit_bytes, threading.Lock()
        self._open: list[tuple[ref[_MemoryFile], int]] = []

    def fill(
        self, chunk: ChunkRef, fetch: Callable[[ChunkRef, memoryview], object], *, wait_s: float
    ) -> OpenFile:
        """A file that `fetch` filled. Raises Throttled, DiskFull, and as `fetch`."""
        deadline = time.monotonic() + wait_s
        try:
            while (file := self._begin(chunk)) is None:
                if time.monotonic() >= deadline:
                    raise Throttled("the disk is full, and so is the memory for chunks in use")
                time.sleep(0.05)  # a file that is closed cannot notify: look again
            os.posix_fallocate(file.fd, 0, chunk.size_bytes)
            room = mmap.mmap(file.fd, chunk.size_bytes)
        except OSError as error:
            raise disk_refusal("no room on disk, nor in memory", error) from error
        fetch(chunk, memoryview(room))
        return file

    def _begin(self, chunk: ChunkRef) -> _MemoryFile | None:
        with self._lock:
            self._open = [held for held in self._open if held[0]() is not None]
            taken = sum(size_bytes for _, size_bytes in self._open)
            if taken and taken + chunk.size_bytes > self._limit_bytes:
                return None
            file = _MemoryFile(chunk)
            self._open.append((ref(file), chunk.size_bytes))
            return file
