"""A disk that fails, or whose process dies, at a call to come."""

import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from hot_tier.disk import Disk
from hot_tier.durable_file import REAL_DISK
from tests.fakes.lossy_disk import LossyDisk

TAKES_ROOM = ("open", "write_at", "rename")
SYNCS = ("sync_bytes", "sync_folder")
CALLS = (*TAKES_ROOM, *SYNCS, "truncate", "unlink")


class Crash(BaseException):
    """The process ends here."""


class Wear(LossyDisk):
    """From the planned call on, `times` of these calls fail."""

    def __init__(self) -> None:
        super().__init__()
        self.before_call = self._meet
        self.heal()

    def plan(self, error: BaseException, *, of: tuple[str, ...], after: int, times: int) -> None:
        self._error, self._calls, self._after, self._times = error, of, after, times

    def heal(self) -> None:
        self._error = None

    def crash_broker(self, died: Path, image: Path, random: Random, *, power_fails: bool) -> None:
        """Make `image` the data folder that a broker finds when it starts again on `died`."""
        if power_fails:
            self.crash_into(image, random, of=died)
        else:
            self.keep_into(image, of=died)
        cache = died / "tierlog" / "cache"
        if cache.exists():
            shutil.copytree(cache, image / "tierlog" / "cache", dirs_exist_ok=True)
        owner = image / "tierlog" / "owner"
        if owner.exists():  # it counts as the same folder
            owner_id, stat = owner.read_text().partition(" ")[0], image.stat()
            owner.write_text(f"{owner_id} {stat.st_dev}:{stat.st_ino}")

    def _meet(self, call: str) -> None:
        if self._error is None or call not in self._calls:
            return
        self._after -= 1
        if -self._times <= self._after < 0:
            raise type(self._error)(*self._error.args)  # each has its own traceback


@pytest.fixture
def wear(monkeypatch, tmp_path):
    wear, sound = Wear(), Disk()
    for name in (*CALLS, "reserve"):
        call = _below(tmp_path, getattr(wear, name), otherwise=getattr(sound, name))
        monkeypatch.setattr(REAL_DISK, name, call, raising=False)
    yield wear
    wear.heal()


def _below(root: Path, worn: Callable, *, otherwise: Callable) -> Callable:
    """`worn` below `root`; brokers that other tests left running here keep a sound disk."""

    def call(place: Path | int, *more: Any) -> Any:
        path = Path(f"/proc/self/fd/{place}").readlink() if isinstance(place, int) else place
        return (worn if path.is_relative_to(root) else otherwise)(place, *more)

    return call
