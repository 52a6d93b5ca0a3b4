"""One flush: everything appended so far is on the medium when it returns.

* The sync runs outside the log's lock: appends, rolls and reads go on meanwhile, and are not part
  of it.
* The order: bytes and indexes of sealed segments, bytes of the active one, the folder's names. Only
  then do the recovery point and the high watermark move.
* A sync that failed is never repeated: the kernel may have dropped the very pages it could not
  write and report success the next time. The log goes offline.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from hot_tier.active_segment import ActiveSegment
from hot_tier.log_state import Flushed, LogState


class _Target(NamedTuple):
    flushed: Flushed
    sealed: tuple[ActiveSegment, ...]
    active: ActiveSegment
    folder: bool


class Flusher:
    """Flushes of one log, one at a time."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._one_at_a_time = threading.Lock()

    def flush(self) -> int:
        """The new high watermark. Raises LogOfflineError, now and for ever after a failure."""
        with self._one_at_a_time:
            target = self._target()
            try:
                self._sync(target)
            except OSError as error:
                with self._state.lock:
                    raise self._state.go_offline(error) from error
            return self._take_over(target)

    def shut_down(self) -> None:
        """The log's end: a flush that began before it keeps its files until it is done."""
        with self._one_at_a_time:
            self._state.shut_down()

    def _target(self) -> _Target:
        state = self._state
        with state.lock:
            state.check_online()
            segment = state.active.segment
            end = segment.end
            flushed = Flushed(end.next_offset, segment.base_offset, end.size_bytes)
            target = _Target(flushed, tuple(state.unflushed), state.active, state.folder_changed)
            state.folder_changed = False
            return target

    def _sync(self, target: _Target) -> None:
        for sealed in target.sealed:
            sealed.sync_all()
        if target.flushed.offset != self._state.flushed.offset:
            target.active.sync_log()
        if target.folder:
            self._state.disk.sync_folder(self._state.folder)

    def _take_over(self, target: _Target) -> int:
        state = self._state
        with state.lock:
            # A failure of another kind may have taken the log offline meanwhile; these bytes are
            # safe.
            state.flushed = target.flushed
            state.unflushed = state.unflushed[len(target.sealed) :]
        for sealed in target.sealed:
            sealed.close()
        return target.flushed.offset
