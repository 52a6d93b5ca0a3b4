"""A disk that fails, or whose process dies, at a call to come."""

import pytest

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

    def _meet(self, call: str) -> None:
        if self._error is None or call not in self._calls:
            return
        self._after -= 1
        if -self._times <= self._after < 0:
            raise type(self._error)(*self._error.args)  # each has a traceback of its own


@pytest.fixture
def wear(monkeypatch):
    wear = Wear()
    for name in (*CALLS, "reserve"):
        monkeypatch.setattr(REAL_DISK, name, getattr(wear, name), raising=False)
    yield wear
    wear.heal()
