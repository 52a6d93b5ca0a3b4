"""Descriptors held back for syncs, given up for a moment when the process has no other left.

Connections and readers may use up all that it is allowed. A file that cannot be opened to be synced
would then take its log offline until a restart, though nothing is wrong with the disk.
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
    """Thread-safe; one for a process."""

    COUNT: Final = 16  # others may be faster than who gives them up

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._held: list[int] = []
        self._take()

    @contextmanager
    def opened(self, path: Path, flags: int) -> Iterator[int]:
        """Raises OSError."""
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
        with suppress(OSError):  # later, then
            while len(self._held) < self.COUNT:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
