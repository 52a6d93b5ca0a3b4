"""Keeps a reserve of disk space free: evicts cached chunks, then deletes local segments that the
bucket has, then refuses writes.

* Checked every CHECK_S, which costs one statvfs. A disk that fills up faster returns ENOSPC, and
  the hot tier raises DiskFull itself.
* Writes are accepted again as soon as the reserve is free. Reads are never refused.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from tierlog.host.disk import disk_full, is_disk_full
from tierlog.record_format.errors import DiskFull

log = structlog.get_logger(__name__)

CHECK_S: Final = 2.0

Relief = Callable[[int], bool]


@contextmanager
def raising_disk_full(path: Path) -> Iterator[None]:
    """Raise DiskFull if the disk has no room, or the process no file descriptor."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise


def free_bytes(path: Path) -> int:
    """The bytes that an unprivileged user may still write."""
    disk = os.statvfs(path)
    return disk.f_frsize * disk.f_bavail


class DiskReserve:
    def __init__(
        self, path: Path, *, reserve_bytes: int, free: Callable[[Path], int] = free_bytes
    ) -> None:
        self._path, self.reserve_bytes, self._free = path, reserve_bytes, free
        self._breached = False

    @property
    def free_bytes(self) -> int:
        return self._free(self._path)

    @property
    def refusal(self) -> str | None:
        """The reason why writes are refused, or None."""
        if not self._breached:
            return None
        return f"less than disk.reserve.bytes ({self.reserve_bytes}) is free below {self._path}"

    def check(self, reliefs: Iterable[Relief]) -> None:
        """Free space if needed, and decide whether writes are accepted. `reliefs` are called in
        order with the missing bytes; each returns whether it freed any.
        """
        missing = self._missing()
        for relief in reliefs:
            while missing > 0 and relief(missing):
                missing = self._missing()
        if (missing > 0) is not self._breached:
            self._breached = missing > 0
            if self._breached:
                log.error(
                    "disk reserve reached: writes are refused",
                    folder=str(self._path),
                    missing_bytes=missing,
                )
            else:
                log.info("disk reserve is free again: writes are accepted")

    def check_not_breached(self) -> None:
        if refusal := self.refusal:
            raise DiskFull(refusal, retry_after_s=CHECK_S)

    def check_fits(self, size_bytes: int) -> None:
        """Raise DiskFull if a file of this size would breach the reserve."""
        if self._missing() + size_bytes > 0:
            raise DiskFull(
                f"no room for {size_bytes} bytes and disk.reserve.bytes ({self.reserve_bytes}) "
                f"below {self._path}",
                retry_after_s=CHECK_S,
            )

    def _missing(self) -> int:
        return self.reserve_bytes - self.free_bytes
