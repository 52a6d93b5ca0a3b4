"""Keeps a reserve of disk free: cached chunks go first, then covered segments, then writes are
refused.

* Looked at every CHECK_S, which costs one statvfs; a disk that fills faster answers ENOSPC, and the
  hot tier raises DiskFull itself.
* Writes are accepted again as soon as the reserve is free again. Reads never stop.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import structlog

from hot_tier.disk import disk_full, is_disk_full
from record_format.errors import DiskFull

log = structlog.get_logger(__name__)

CHECK_S: Final = 2.0

Relief = Callable[[int], bool]


@contextmanager
def raising_disk_full(path: Path) -> Iterator[None]:
    """If the disk has no room, or the process no descriptor, the write is refused (`DiskFull`)."""
    try:
        yield
    except OSError as error:
        if is_disk_full(error):
            raise disk_full(path, error) from error
        raise


def free_bytes(path: Path) -> int:
    """What an ordinary user may still write there."""
    disk = os.statvfs(path)
    return disk.f_frsize * disk.f_bavail


class DiskReserve:
    """`reliefs`, in order: each is told how much is missing and says whether it freed any."""

    def __init__(
        self,
        path: Path,
        *,
        reserve_bytes: int,
        reliefs: tuple[Relief, ...],
        free: Callable[[Path], int] = free_bytes,
    ) -> None:
        self._path, self.reserve_bytes = path, reserve_bytes
        self._reliefs, self._free = reliefs, free
        self._breached = False

    @property
    def free_bytes(self) -> int:
        return self._free(self._path)

    @property
    def refusal(self) -> str | None:
        """Why writes are refused, if they are."""
        if not self._breached:
            return None
        return f"less than disk.reserve.bytes ({self.reserve_bytes}) is free below {self._path}"

    def check(self) -> None:
        """Look, make room where it is needed, and remember whether writes may go on."""
        missing = self._missing()
        for relief in self._reliefs:
            while missing > 0 and relief(missing):
                missing = self._missing()
        if (missing > 0) is not self._breached:
            self._breached = missing > 0
            if self._breached:
                log.error("disk reserve reached: writes are refused", missing_bytes=missing)
            else:
                log.info("disk reserve is back: writes are taken again")

    def check_not_breached(self) -> None:
        if refusal := self.refusal:
            raise DiskFull(refusal, retry_after_s=CHECK_S)

    def check_fits(self, size_bytes: int) -> None:
        """For a file that is written in one go: refused before it breaches the reserve."""
        if self._missing() + size_bytes > 0:
            raise DiskFull(
                f"{size_bytes} bytes and disk.reserve.bytes ({self.reserve_bytes}) do not fit "
                f"below {self._path}",
                retry_after_s=CHECK_S,
            )

    def _missing(self) -> int:
        return self.reserve_bytes - self.free_bytes
