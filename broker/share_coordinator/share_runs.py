"""What a share partition knows of its records: runs, each of records in one state.

* Runs are in order, and no offset is in two. A part of one that changes is cut out of it first.
* Which run may become what is the state machine's to say (`share_partition`).
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Final, NamedTuple

from tierlog.record_format.share_state import DeliveryState, StateBatch

NEVER: Final = float("inf")
NOBODY: Final = ""


class Lock(NamedTuple):
    member: str
    until_ms: float


class Run:
    """`batch`: the first and last offset of what was given together at first. `until_ms`: while it
    is acquired. `before`: whose it is again if what was said of it cannot be written.
    """

    __slots__ = ("batch", "before", "count", "first", "last", "member", "state", "until_ms")

    def __init__(
        self, first: int, last: int, state: DeliveryState, count: int, batch: tuple[int, int]
    ) -> None:
        self.first, self.last, self.state, self.count = first, last, state, count
        self.batch = batch
        self.member, self.until_ms = NOBODY, NEVER
        self.before: str | None = None

    def __len__(self) -> int:
        return self.last - self.first + 1

    @property
    def is_available(self) -> bool:
        return self.state is DeliveryState.AVAILABLE and self.before is None

    @property
    def is_done(self) -> bool:
        return self.state.is_final and self.before is None

    @property
    def size(self) -> int:
        return self.batch[1] - self.batch[0] + 1

    def tail_from(self, offset: int) -> Run:
        """Give away what is at or above `offset`."""
        tail = Run(offset, self.last, self.state, self.count, self.batch)
        tail.member, tail.until_ms, tail.before = self.member, self.until_ms, self.before
        self.last = offset - 1
        return tail

    def lock(self, lock: Lock) -> None:
        self.state, self.count = DeliveryState.ACQUIRED, self.count + 1
        self.member, self.until_ms = lock

    def free(self, limit: int) -> None:
        """Nobody has it any more."""
        is_over = self.count >= limit
        self.state = DeliveryState.ARCHIVED if is_over else DeliveryState.AVAILABLE
        self.member, self.until_ms = NOBODY, NEVER

    def archive(self) -> None:
        self.state, self.member, self.until_ms = DeliveryState.ARCHIVED, NOBODY, NEVER

    def is_like(self, other: Run) -> bool:
        both = (self, other)
        mine, others = (
            (one.state, one.count, one.member, one.until_ms, one.before, one.batch) for one in both
        )
        return mine == others

    @property
    def written(self) -> StateBatch:
        return StateBatch(self.first, self.last, self.state, self.count)


class Runs(list[Run]):
    def between(self, first: int, last: int) -> list[Run]:
        """The runs with offsets in [first, last]. They may be cut meanwhile."""
        begin = max(bisect_right(self, first, key=_first) - 1, 0)
        found = []
        for run in self[begin:]:
            if run.first > last:
                break
            if run.last >= first:
                found.append(run)
        return found

    def cut(self, run: Run, first: int, last: int) -> Run:
        """The part of a run that lies in [first, last]."""
        if run.last > last:
            self.put(run.tail_from(last + 1))
        if run.first < first:
            run = run.tail_from(first)
            self.put(run)
        return run

    def put(self, run: Run) -> None:
        self.insert(bisect_right(self, run.first, key=_first), run)

    def join(self) -> None:
        """Those of one batch that are alike again, and follow each other, become one."""
        joined: list[Run] = []
        for run in self:
            if joined and run.before is None and joined[-1].is_like(run):
                joined[-1].last = run.last
            else:
                joined.append(run)
        self[:] = joined

    def drop_done(self) -> bool:
        """Forget what is done with from the start on; whether there was any."""
        count = next((i for i, run in enumerate(self) if not run.is_done), len(self))
        del self[:count]
        return count > 0


def _first(run: Run) -> int:
    return run.first
