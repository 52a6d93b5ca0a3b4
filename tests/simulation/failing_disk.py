"""A disk on which a planned call fails, or the process dies."""

import gc
import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import Any

import pytest

from tests.fakes.lossy_disk import LossyDisk
from tierlog.host.disk import Disk
from tierlog.host.durable_file import REAL_DISK

ALLOCATING = ("open", "write_at", "rename")
SYNCS = ("sync_bytes", "sync_folder")
CALLS = (*ALLOCATING, *SYNCS, "truncate", "unlink")


class Crash(BaseException):
    """The process ends here."""


class FailingDisk(LossyDisk):
    """From the planned call on, `times` of the given calls fail."""

    def __init__(self) -> None:
        super().__init__()
        self.before_call = self._maybe_fail
        self.heal()

    def plan(self, error: BaseException, *, of: tuple[str, ...], after: int, times: int) -> None:
        self._error, self._calls, self._after, self._times = error, of, after, times

    def heal(self) -> None:
        self._error = None

    def forget(self) -> None:
        """All files so far: they are gone."""
        self._files.clear()
        self._names.clear()

    def crash_broker(self, died: Path, image: Path, random: Random, *, power_fails: bool) -> None:
        """Make `image` the data folder that a broker finds when it starts again on `died`."""
        if power_fails:
            self.crash_into(image, random, of=died)
        else:
            self.keep_into(image, of=died)
        cache = died / "tierlog" / "cache"
        if cache.exists():
            chunks = image / "tierlog" / "cache"
            shutil.copytree(cache, chunks, copy_function=_copy_if_there, dirs_exist_ok=True)
        owner = image / "tierlog" / "owner"
        if owner.exists():  # so that it counts as the same folder
            owner_id, stat = owner.read_text().partition(" ")[0], image.stat()
            owner.write_text(f"{owner_id} {stat.st_dev}:{stat.st_ino}")

    def _maybe_fail(self, call: str) -> None:
        if self._error is None or call not in self._calls:
            return
        with self._lock:
            self._after -= 1
            is_due = -self._times <= self._after < 0
        if is_due:
            raise type(self._error)(*self._error.args)  # a new one, with its own traceback


def _copy_if_there(source: str, target: str) -> None:
    """A chunk that was downloaded meanwhile has another name, and one may have been evicted."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


def close_files_below(root: Path) -> None:
    """As the system does for a killed process: a run would leave over a thousand files open."""
    gc.collect()  # not later, when the descriptor may belong to something else
    for link in list(Path("/proc/self/fd").iterdir()):
        with suppress(FileNotFoundError):
            if link.readlink().is_relative_to(root):
                os.close(int(link.name))


@pytest.fixture
def failing_disk(monkeypatch, tmp_path):
    failing, sound = FailingDisk(), Disk()
    for name in (*CALLS, "reserve"):
        call = _below(tmp_path, getattr(failing, name), otherwise=getattr(sound, name))
        monkeypatch.setattr(REAL_DISK, name, call, raising=False)
    yield failing
    failing.heal()


def _below(root: Path, failing: Callable, *, otherwise: Callable) -> Callable:
    """`failing` below `root`; brokers of other tests that still run here keep a sound disk."""
    beginning = f"{root}/"

    def call(target: Path | int, *rest: Any) -> Any:
        if isinstance(target, int):  # thousands of times a second: no Path is made
            path = os.readlink(f"/proc/self/fd/{target}")  # noqa: PTH115
        else:
            path = str(target)
        return (failing if path.startswith(beginning) else otherwise)(target, *rest)

    return call
