"""Keeps what is durable of share partitions, in the partitions of `__share_group_state` that are
here: Kafka's share coordinator.

* One lock for all; a call holds it for microseconds and does no I/O: it may be made on an event
  loop. Records are queued under it, so that their order in the log is that of the states.
* An answer is given once what it says is durable. What could not be written is in the next record,
  which is a snapshot: it needs nothing before it.
* A leader that another has replaced may not write (`leader_epoch`), nor may one that knows nothing
  of a beginning anew (`state_epoch`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import structlog

from tierlog.host.threads import failed
from tierlog.record_format.errors import GroupRefused, Throttled, TierlogError
from tierlog.record_format.kafka_messages.source import MessageError
from tierlog.record_format.share_state import (
    UNKNOWN_START,
    DeliveryState,
    ShareKey,
    ShareState,
    StateBatch,
    StateCall,
    StateView,
    merge_batches,
    snapshot_record,
    tombstone,
    update_record,
)

log = structlog.get_logger(__name__)

NO_OFFSET: Final = -1
NOBODY: Final = (-1, -1)
OTHERS: Final = "NOT_LEADER_OR_FOLLOWER"  # what Kafka's leader tells its client
UNREAD: Final = "UNKNOWN_SERVER_ERROR"

Append = Callable[[str, list[tuple[bytes, bytes | None]]], "Future[Any]"]
"""(what is hashed, keys and values): queue records, all or none; it does not wait."""


class ShareSummary(NamedTuple):
    """As it was last written."""

    key: ShareKey
    start_offset: int
    complete_count: int
    leader_epoch: int


class _Update(NamedTuple):
    start_offset: int
    complete_count: int
    batches: Sequence[StateBatch]


class _Entry:
    """`state`: of the last record, but for `updates`, which are still to be merged into it.
    `needs_snapshot`: a record was lost. `snapshot_offset`: the state lies from there on.
    `last_write`: leader epoch and number.
    """

    __slots__ = ("key", "last_write", "needs_snapshot", "snapshot_offset", "state", "updates")

    def __init__(self, key: ShareKey, state: ShareState, snapshot_offset: int) -> None:
        self.key, self.state, self.snapshot_offset = key, state, snapshot_offset
        self.updates: list[_Update] = []
        self.needs_snapshot = False
        self.last_write = NOBODY

    @property
    def now(self) -> ShareState:
        """But for its batches."""
        if not self.updates:
            return self.state
        start, complete, _ = self.updates[-1]
        return self.state._replace(start_offset=start, complete_count=complete)

    def merge(self) -> ShareState:
        state, batches = self.now, self.state.batches
        for one in self.updates:
            batches = merge_batches(batches, one.batches, start=one.start_offset)
        self.updates.clear()
        self.state = state._replace(batches=batches)
        return self.state


class ShareCoordinator:
    """Thread-safe."""

    def __init__(self, append: Append, *, partitions_max: int, wall_ms: Callable[[], int]) -> None:
        self._append, self._partitions_max, self._wall_ms = append, partitions_max, wall_ms
        self._lock = threading.RLock()  # a record may be durable before its append returns
        self._entries: dict[ShareKey, _Entry] = {}
        self._calls = {
            "initialize": self._initialize,
            "read": self._read,
            "write": self._write,
            "delete": self._delete,
        }

    # --- which there are --------------------------------------------------------------------------

    def load(self, view: StateView) -> None:
        """Take over what a partition of the log says."""
        with self._lock:
            for key, state in view.states.items():
                self._entries[key] = _Entry(key, state, view.offsets[key])

    def forget(self, is_gone: Callable[[str], bool]) -> None:
        """Another broker keeps those with such homes."""
        with self._lock:
            for key in [key for key in self._entries if is_gone(key.home)]:
                del self._entries[key]

    def summaries(self, group: str | None = None) -> list[ShareSummary]:
        """Of one group, or of all, as far as they are here."""
        with self._lock:
            return [
                summary_of(key, one.now)
                for key, one in self._entries.items()
                if group in (None, key.group)
            ]

    # --- calls ------------------------------------------------------------------------------------

    def carry_out(self, call: StateCall) -> Future[ShareState]:
        """Does not wait. The future raises GroupRefused, Throttled, and what an append raises."""
        answer: Future[ShareState] = Future()
        answer.set_running_or_notify_cancel()
        try:
            with self._lock:
                state, written = self._calls[call.what](call)
        except TierlogError as error:
            return failed(error)
        if written is None:
            answer.set_result(state)
        else:
            written.add_done_callback(partial(_settle, answer, state))
        return answer

    def _entry(self, key: ShareKey) -> _Entry:
        entry = self._entries.get(key)
        if entry is None:
            detail = f"group {key.group!r} does not read it"
            raise GroupRefused(UNREAD, detail)
        return entry

    def _initialize(self, call: StateCall) -> tuple[ShareState, Future[Any]]:
        key, before = call.key, self._entries.get(call.key)
        if before is None and len(self._entries) >= self._partitions_max:
            raise Throttled(f"share groups read {len(self._entries)} partitions already")
        state = ShareState(
            call.start_offset,
            call.state_epoch,
            snapshot_epoch=0 if before is None else before.state.snapshot_epoch + 1,
            complete_count=0 if call.start_offset == UNKNOWN_START else -1,
            snapshot_ms=self._wall_ms(),
        )
        entry = self._entries[key] = _Entry(key, state, NO_OFFSET)
        future = self._queue(key, snapshot_record(key, state))
        future.add_done_callback(partial(self._initialized, entry, before))
        return state, future

    def _initialized(self, entry: _Entry, before: _Entry | None, future: Future[Any]) -> None:
        with self._lock:
            if future.exception() is None:
                entry.snapshot_offset = future.result().base_offset
            elif self._entries.get(entry.key) is entry:
                del self._entries[entry.key]
                if before is not None:
                    before.needs_snapshot = True
                    self._entries[entry.key] = before

    def _read(self, call: StateCall) -> tuple[ShareState, Future[Any] | None]:
        entry = self._entry(call.key)
        state = entry.merge()
        if call.leader_epoch <= state.leader_epoch:
            _check_leader(call, state)
            return state, None
        entry.state = state = state._replace(leader_epoch=call.leader_epoch)
        return state, self._update(entry, _Update(state.start_offset, state.complete_count, []))

    def _write(self, call: StateCall) -> tuple[ShareState, Future[Any] | None]:
        entry, this = self._entry(call.key), (call.leader_epoch, call.number)
        _check_leader(call, entry.state)
        if call.state_epoch < entry.state.state_epoch:
            raise GroupRefused(OTHERS, f"the group began anew: {entry.state.state_epoch}")
        if this < entry.last_write:
            raise GroupRefused("INVALID_REQUEST", "a later write has come before it")
        entry.last_write = this
        leader_epoch = max(call.leader_epoch, entry.state.leader_epoch)
        entry.state = entry.state._replace(leader_epoch=leader_epoch)
        update = _Update(call.start_offset, call.complete_count, call.batches)
        if call.is_whole or entry.needs_snapshot:
            future = self._snapshot(entry, update, is_whole=call.is_whole)
        else:
            future = self._update(entry, update)
        return entry.now, future

    def _delete(self, call: StateCall) -> tuple[ShareState, Future[Any] | None]:
        entry = self._entries.pop(call.key, None)
        if entry is None:
            return ShareState(UNKNOWN_START), None
        return entry.state, self._queue(call.key, tombstone(call.key))

    # --- records ----------------------------------------------------------------------------------

    def _update(self, entry: _Entry, update: _Update) -> Future[Any]:
        changed = merge_batches((), update.batches, start=update.start_offset)
        entry.state = entry.state._replace(updates=entry.state.updates + 1)
        entry.updates.append(update)
        future = self._queue(entry.key, update_record(entry.key, entry.now, changed))
        future.add_done_callback(partial(self._updated, entry, update))
        return future

    def _updated(self, entry: _Entry, update: _Update, future: Future[Any]) -> None:
        if (error := future.exception()) is not None:
            self._note_lost(entry, error)
            with self._lock:
                entry.updates = [one for one in entry.updates if one is not update]

    def _snapshot(
        self, entry: _Entry, update: _Update | None = None, *, is_whole: bool = False
    ) -> Future[Any]:
        before = state = entry.merge()
        if update is not None:
            start, complete, batches = update
            batches = merge_batches(() if is_whole else state.batches, batches, start=start)
            state = state._replace(start_offset=start, complete_count=complete, batches=batches)
        entry.state = state = state._replace(
            snapshot_epoch=state.snapshot_epoch + 1, updates=0, snapshot_ms=self._wall_ms()
        )
        entry.needs_snapshot = False
        future = self._queue(entry.key, snapshot_record(entry.key, state))
        future.add_done_callback(partial(self._snapshotted, entry, before, state))
        return future

    def _snapshotted(
        self, entry: _Entry, before: ShareState, state: ShareState, future: Future[Any]
    ) -> None:
        error = future.exception()
        if error is not None:
            self._note_lost(entry, error)
        with self._lock:
            if error is None:
                entry.snapshot_offset = max(entry.snapshot_offset, future.result().base_offset)
            elif entry.state is state:
                entry.state = before._replace(snapshot_epoch=state.snapshot_epoch)

    def _note_lost(self, entry: _Entry, error: BaseException) -> None:
        log.warning("a share partition was not written", key=str(entry.key), error=str(error))
        with self._lock:
            entry.needs_snapshot = True

    def _queue(self, key: ShareKey, row: tuple[bytes, bytes | None]) -> Future[Any]:
        try:
            return self._append(key.home, [row])
        except (TierlogError, OSError, MessageError) as error:
            return failed(error)

    def snapshot_older(self, *, than_ms: int) -> None:
        """Write snapshots where the last is older, and others came since: what lies before can be
        deleted then.
        """
        with self._lock:
            for entry in self._entries.values():
                state = entry.state
                is_older = state.updates and state.snapshot_ms <= self._wall_ms() - than_ms
                if is_older or entry.needs_snapshot:
                    self._snapshot(entry)

    def oldest_needed(self, is_home: Callable[[str], bool]) -> int | None:
        """The offset from which on the state's log is needed, of the share partitions whose home it
        is; None: nothing is to be deleted.
        """
        with self._lock:
            offsets = [
                one.snapshot_offset for key, one in self._entries.items() if is_home(key.home)
            ]
        return min(offsets, default=None) if NO_OFFSET not in offsets else None


def _check_leader(call: StateCall, state: ShareState) -> None:
    if 0 <= call.leader_epoch < state.leader_epoch:
        raise GroupRefused(OTHERS, f"its leader epoch is {state.leader_epoch}")


def _settle(answer: Future[ShareState], state: ShareState, written: Future[Any]) -> None:
    if (error := written.exception()) is not None:
        answer.set_exception(error)
    else:
        answer.set_result(state)


def summary_of(key: ShareKey, state: ShareState) -> ShareSummary:
    complete = state.complete_count
    if complete < 0:  # a record of Kafka's before 4.2
        done = [one for one in state.batches if DeliveryState(one.state).is_final]
        complete = sum(one.last - one.first + 1 for one in done)
    return ShareSummary(key, state.start_offset, complete, state.leader_epoch)
