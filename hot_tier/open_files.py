"""Read-only descriptors, a bounded number of them kept for the next read.

A partition of ten thousand segments must not hold ten thousand descriptors. An `OpenFile` that was
handed out lives as long as somebody holds it, whatever is dropped here.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from pathlib import Path

from record_format.file_slice import OpenFile

DEFAULT_LIMIT = 64


class OpenFiles:
    """Least recently used descriptors by path. Thread-safe."""

    def __init__(self, limit: int = DEFAULT_LIMIT) -> None:
        self._limit = limit
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, path: Path) -> OpenFile:
        """The file, opened now or before. Raises FileNotFoundError."""
        with self._lock:
            file = self._files.get(path)
            if file is not None:
                self._files.move_to_end(path)
                return file
        file = OpenFile(path)
        with self._lock:
            self._files[path] = file
            dropped = [
                self._files.popitem(last=False) for _ in range(len(self._files) - self._limit)
            ]
        del dropped  # closed outside the lock
        return file

    def forget(self, path: Path) -> None:
        """The path names another file, or none, from now on."""
        with self._lock:
            self._files.pop(path, None)

    def forget_all(self) -> None:
        with self._lock:
            self._files.clear()
