"""The share partitions that are read here, as their partitions' leader has them: carries out what
happens to one, and keeps time.

* One lock for all; a call holds it for microseconds and does no I/O: it may be made on an event
  loop. What changes is written under it (`ask`), so that the state's keeper hears in order.
* What a member says counts, and is answered, once it is durable; what could not be written is taken
  back, and the next write has all that there is.
* A share partition is open while members of its group have sessions here, and from the state that
  its keeper has. A leader that others have replaced is told so by its next write, and closes it.
* A share partition is read by one at a time (`begin_read`), so that nothing is given twice.
* At rest it costs nothing: a share partition with locked records is one callback of the broker's
  timer.
* Whoever is told (`watch`) that there may be something for it is told from any thread.
"""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final

import structlog

from tierlog.broker.group_coordinator.share_group import ShareLimits
from tierlog.broker.share_coordinator.coordinator import OTHERS, UNREAD
from tierlog.broker.share_coordinator.share_partition import (
    Ack,
    AckBatch,
    Acquired,
    Change,
    SharePartition,
    Span,
    Wanted,
)
from tierlog.record_format.errors import GroupRefused
from tierlog.record_format.share_state import (
    ShareKey,
    ShareState,
    StateBatch,
    StateCall,
)

log = structlog.get_logger(__name__)

NEVER: Final = float("inf")

Reply = Callable[[BaseException | None], None]
Ask = Callable[[StateCall], "Future[ShareState]"]
"""Ask who keeps the state, in order; it does not wait."""


class _Entry:
    """`reader`: who reads it. `needs_whole`: what was to be written was lost. `updates`: writes
    since the last whole one.
    """

    __slots__ = (
        "armed_ms",
        "key",
        "leader_epoch",
        "needs_whole",
        "partition",
        "reader",
        "state_epoch",
        "updates",
        "watchers",
    )

    def __init__(self, key: ShareKey, state: ShareState, leader_epoch: int) -> None:
        self.key, self.partition = key, SharePartition(state)
        self.state_epoch, self.leader_epoch = state.state_epoch, leader_epoch
        self.updates, self.needs_whole = state.updates, False
        self.reader: object | None = None
        self.armed_ms = NEVER
        self.watchers: set[Callable[[], None]] = set()


class SharePartitions:
    """Thread-safe. `call_after` is the timer: (milliseconds, callback). `late_count`: records whose
    lock was over, and `acknowledged`, by type, since the start.
    """

    def __init__(
        self,
        ask: Ask,
        *,
        limits_of: Callable[[str], ShareLimits],
        updates_per_snapshot: int,
        call_after: Callable[[int, Callable[[], None]], None],
        now_ms: Callable[[], int],
    ) -> None:
        self._ask, self._limits_of, self._updates_max = ask, limits_of, updates_per_snapshot
        self._call_after, self._now_ms = call_after, now_ms
        self._lock = threading.RLock()  # a write may be done before it returns
        self._entries: dict[ShareKey, _Entry] = {}
        self._opening: dict[ShareKey, set[object]] = {}
        self._numbers = itertools.count(1)
        self._is_closed = False
        self.late_count = 0
        self.acknowledged: Counter[Ack] = Counter()

    # --- which are open ---------------------------------------------------------------------------

    def is_open(self, key: ShareKey) -> bool:
        return key in self._entries

    def begin_open(self, key: ShareKey, leader_epoch: int) -> tuple[object, Future[ShareState]]:
        """Ask for the state, with which `open` is called. What is read now counts no more once the
        share partition was open, or was to be closed, meanwhile.
        """
        turn = object()
        with self._lock:
            self._opening.setdefault(key, set()).add(turn)
            asked = self._ask(StateCall(what="read", key=key, leader_epoch=leader_epoch))
        return turn, asked

    def open(
        self,
        key: ShareKey,
        state: ShareState,
        turn: object,
        *,
        leader_epoch: int,
        is_changed: bool = False,
    ) -> None:
        """`state`: of a start that is known now. `is_changed`: it is written. Look whether it
        `is_open` then; else begin again.
        """
        with self._lock:
            if turn not in self._opening.get(key, ()):
                return
            del self._opening[key]
            entry = self._entries[key] = _Entry(key, state, leader_epoch)
            if is_changed:
                entry.needs_whole = True
                self._write(entry, [])

    def close_where(self, is_closed: Callable[[ShareKey], bool]) -> None:
        """Whoever reads them on begins with what its keeper has."""
        with self._lock:
            for key in list(filter(is_closed, self._opening)):
                del self._opening[key]
            gone = [self._entries.pop(key) for key in list(filter(is_closed, self._entries))]
            for entry in gone:
                self._wake(entry)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True

    def count_in_flight(self) -> int:
        with self._lock:
            return sum(one.partition.in_flight_count for one in self._entries.values())

    # --- reading ----------------------------------------------------------------------------------

    def next_offset(self, key: ShareKey) -> int | None:
        """Where to read for the group; None if it is being read, or has all that it may have.
        Raises GroupRefused.
        """
        with self._lock:
            entry = self._entry(key)
            if entry.reader is not None or not entry.partition.may_acquire(
                self._limits_of(key.group)
            ):
                return None
            return entry.partition.next_fetch_offset

    def begin_read(self, key: ShareKey, reader: object) -> int | None:
        """As `next_offset`; if it is one, nobody else reads until `end_read`."""
        with self._lock:
            offset = self.next_offset(key)
            if offset is not None:
                self._entry(key).reader = reader
            return offset

    def end_read(self, key: ShareKey, reader: object) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None and entry.reader is reader:
                entry.reader = None
                self._wake(entry)

    def acquire(
        self,
        key: ShareKey,
        wanted: Wanted,
        spans: Sequence[Span],
        *,
        fetch_offset: int,
        reader: object,
    ) -> list[Acquired]:
        """Between `begin_read` and `end_read`. Raises GroupRefused."""
        with self._lock:
            entry = self._entry(key)
            if entry.reader is not reader:
                return []  # it was opened anew meanwhile
            found = entry.partition.acquire(
                wanted,
                spans,
                fetch_offset=fetch_offset,
                limits=self._limits_of(key.group),
                now_ms=self._now_ms(),
            )
            self._arm(entry)
            return found

    def skip(self, key: ShareKey, fetch_offset: int, next_offset: int) -> None:
        """There is nothing between them in the log."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.partition.skip(fetch_offset, next_offset)

    def move_start(self, key: ShareKey, log_start_offset: int) -> None:
        with self._lock:
            entry = self._entries.get(key)
            if entry is not None:
                entry.partition.move_start(log_start_offset)

    def watch(self, key: ShareKey, callback: Callable[[], None]) -> Callable[[], None]:
        """Call whenever there may be something for the group. Returns what ends it."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                return _nothing
            entry.watchers.add(callback)
            return partial(entry.watchers.discard, callback)

    # --- what members say -------------------------------------------------------------------------

    def acknowledge(
        self, key: ShareKey, member: str, acks: Sequence[AckBatch], reply: Reply
    ) -> None:
        """`reply` is called once, perhaps before this returns."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                detail = f"group {key.group!r} has no records of it"
                reply(GroupRefused("UNKNOWN_TOPIC_OR_PARTITION", detail))
                return
            limits = self._limits_of(key.group)
            try:
                change = entry.partition.acknowledge(member, acks, limits, self._now_ms())
            except GroupRefused as refused:
                reply(refused)
                return
            for one in acks:
                self.acknowledged.update(one.count_by_type())
            self._carry_out(entry, change, reply)

    def release(self, key: ShareKey, member: str, reply: Reply) -> None:
        """The member gives up all that it has."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                reply(None)
                return
            change = entry.partition.release(member, self._limits_of(key.group))
            self._carry_out(entry, change, reply)

    def _carry_out(self, entry: _Entry, change: Change, reply: Reply) -> None:
        if not change.batches:
            self._arm(entry)
            reply(None)
            return
        future = self._write(entry, change.batches)
        future.add_done_callback(partial(self._settle, entry, change, reply))

    def _settle(self, entry: _Entry, change: Change, reply: Reply, future: Future[Any]) -> None:
        error = future.exception()
        with self._lock:
            entry.partition.settle(
                change.runs,
                is_written=error is None,
                limits=self._limits_of(entry.key.group),
                now_ms=self._now_ms(),
            )
            self._arm(entry)
            self._wake(entry)
        reply(error)

    # --- what is written --------------------------------------------------------------------------

    def _entry(self, key: ShareKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            raise GroupRefused(OTHERS, f"{key} was closed meanwhile")
        return entry

    def _write(self, entry: _Entry, batches: Iterable[StateBatch]) -> Future[ShareState]:
        share = entry.partition
        is_whole = entry.needs_whole or entry.updates >= self._updates_max
        call = StateCall(
            what="write",
            key=entry.key,
            state_epoch=entry.state_epoch,
            leader_epoch=entry.leader_epoch,
            number=next(self._numbers),
            start_offset=share.start_offset,
            complete_count=share.complete_count,
            batches=share.batches() if is_whole else list(batches),
            is_whole=is_whole,
        )
        entry.needs_whole, entry.updates = False, 0 if is_whole else entry.updates + 1
        future = self._ask(call)
        future.add_done_callback(partial(self._written, entry))
        return future

    def _written(self, entry: _Entry, future: Future[ShareState]) -> None:
        error = future.exception()
        if error is None:
            return
        with self._lock:
            entry.needs_whole = True
            is_others = isinstance(error, GroupRefused) and error.reason in (OTHERS, UNREAD)
            if is_others and self._entries.get(entry.key) is entry:
                log.warning("a share partition is another's", key=str(entry.key), error=str(error))
                self.close_where(entry.key.__eq__)

    # --- time -------------------------------------------------------------------------------------

    def _arm(self, entry: _Entry) -> None:
        due_ms = entry.partition.due_ms
        if due_ms < entry.armed_ms and not self._is_closed:
            entry.armed_ms = due_ms
            delay_ms = max(0, int(due_ms) - self._now_ms())
            self._call_after(delay_ms, partial(self._expire, entry, due_ms))

    def _expire(self, entry: _Entry, armed_ms: float) -> None:
        with self._lock:
            if entry.armed_ms != armed_ms or self._entries.get(entry.key) is not entry:
                return  # an earlier callback came since, or it was closed
            entry.armed_ms = NEVER
            batches = entry.partition.expire(self._limits_of(entry.key.group), self._now_ms())
            if batches:
                self.late_count += sum(one.last - one.first + 1 for one in batches)
                self._write(entry, batches)
                self._wake(entry)
            self._arm(entry)

    def _wake(self, entry: _Entry) -> None:
        for callback in list(entry.watchers):
            callback()


def _nothing() -> None:
    pass
