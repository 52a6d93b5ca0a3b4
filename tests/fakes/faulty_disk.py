"""A disk that works until a test makes it fail.

`fail(name, error, ...)` makes matching calls raise; `calls` records every call.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tierlog.host.disk import Disk
from tierlog.record_format.batch import Buffer


class Call(NamedTuple):
    name: str
    path: str

    @property
    def suffix(self) -> str:
        return Path(self.path).suffix


class Fault(NamedTuple):
    name: str
    number: int  # errno
    suffix: str | None
    after: int  # calls that succeed first
    bytes_first: int  # what a failing write still writes
    left: int  # calls that fail


class FaultyDisk(Disk):
    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.faults: list[Fault] = []
        self.most_bytes_a_write: int | None = None
        self._paths: dict[int, str] = {}

    def fail(
        self,
        name: str,
        number: int = errno.EIO,
        *,
        suffix: str | None = None,
        after: int = 0,
        bytes_first: int = 0,
        times: int = sys.maxsize,
    ) -> None:
        """Make calls of `name` (on files with `suffix`) fail from the one after `after` on."""
        self.faults.append(Fault(name, number, suffix, after, bytes_first, times))

    def heal(self) -> None:
        self.faults.clear()

    def open(self, path: Path, flags: int) -> int:
        self._record("open", str(path))
        fd = super().open(path, flags)
        self._paths[fd] = str(path)
        return fd

    def write_at(self, fd: int, buffers: Sequence[Buffer], position: int) -> int:
        fault = self._matching("write_at", self._paths[fd])
        if fault and fault.bytes_first:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            self.faults = [planned._replace(bytes_first=0) for planned in self.faults]
            return super().write_at(fd, [whole[: fault.bytes_first]], position)
        self._record("write_at", self._paths[fd])
        if self.most_bytes_a_write:
            whole = b"".join(bytes(buffer) for buffer in buffers)
            return super().write_at(fd, [whole[: self.most_bytes_a_write]], position)
        return super().write_at(fd, buffers, position)

    def truncate(self, fd: int, size_bytes: int) -> None:
        self._record("truncate", self._paths[fd])
        super().truncate(fd, size_bytes)

    def sync_bytes(self, fd: int) -> None:
        self._record("sync_bytes", str(Path(f"/proc/self/fd/{fd}").readlink()))
        super().sync_bytes(fd)

    def sync_folder(self, path: Path) -> None:
        self._record("sync_folder", str(path))
        super().sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        self._record("rename", str(target))
        super().rename(source, target)

    def unlink(self, path: Path) -> None:
        self._record("unlink", str(path))
        super().unlink(path)

    def _matching(self, name: str, path: str) -> Fault | None:
        for fault in self.faults:
            if fault.name == name and fault.suffix in (None, Path(path).suffix):
                return fault if fault.after == 0 else None
        return None

    def _record(self, name: str, path: str) -> None:
        self.calls.append(Call(name, path))
        for number, fault in enumerate(self.faults):
            if fault.name == name and fault.suffix in (None, Path(path).suffix):
                if fault.after == 0:
                    self.faults[number] = fault._replace(left=fault.left - 1)
                    if fault.left > 0:
                        raise OSError(fault.number, os.strerror(fault.number), path)
                    continue
                self.faults[number] = fault._replace(after=fault.after - 1)
