"""Descriptors held in reserve for syncs, released when the process has no others left.

Connections and readers may use up the limit. A file that cannot be opened for a sync would then
take its log offline until a restart, though the disk is fine.
"""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final


class SpareDescriptors:
    """Thread-safe; one per process."""

    COUNT: Final = 16  # other threads may take a released one first

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._take()

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Open a file, releasing the reserve if there is no other descriptor. Raises OSError."""
        try:
            fd = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
            with self._lock:
                fd = self._open_anyway(path, flags)
        try:
            yield fd
        finally:
            os.close(fd)
            if len(self._held) < self.COUNT:
                with self._lock:
                    self._take()

    def _open_anyway(self, path: Path, flags: int) -> int:
        while self._held:
            os.close(self._held.pop())
        return os.open(path, flags | os.O_CLOEXEC)

    def _take(self) -> None:
        with suppress(OSError):  # refilled by a later call
            while len(self._held) < self.COUNT:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
