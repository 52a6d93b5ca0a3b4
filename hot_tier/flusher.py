"""Flushing: when it returns, everything appended before is on the medium.

* Syncs run outside the log's lock: appends, rolls and reads continue meanwhile and are not part of
  the flush.
* The order is: bytes and indexes of sealed segments, bytes of the active one, the folder's names.
  Only then do the recovery point and the high watermark advance.
* A failed sync is never retried: the kernel may have dropped the pages that it could not write and
  report success the next time. The log goes offline.
"""

from __future__ import annotations

import threading
from typing import NamedTuple

from tierlog.hot_tier.active_segment import ActiveSegment
from tierlog.hot_tier.log_state import Flushed, LogState


class _Target(NamedTuple):
    flushed: Flushed
    sealed: tuple[ActiveSegment, ...]
    active: ActiveSegment
    folder: bool


class Flusher:
    """Flushes one log, one flush at a time."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._flush_lock = threading.Lock()

    def flush(self) -> int:
        """Returns the new high watermark. Raises LogOfflineError, also on every call after a
        failure.
        """
        with self._flush_lock:
            target = self._target()
            try:
                self._sync(target)
            except OSError as error:
                with self._state.lock:
                    raise self._state.go_offline(error) from error
            return self._advance(target)

    def close(self) -> None:
        """Close the log's files once a flush in progress no longer needs them."""
        with self._flush_lock:
            self._state.close()

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

    def _advance(self, target: _Target) -> int:
        state = self._state
        with state.lock:
            # Even if another failure took the log offline meanwhile, these bytes are durable.
            state.flushed = target.flushed
            state.unflushed = state.unflushed[len(target.sealed) :]
        for sealed in target.sealed:
            sealed.close()
        return target.flushed.offset
