"""Deleting local segments: renamed at once, unlinked later.

* Only sealed segments at the start of the log are deleted, oldest first, and none after one that
  could not be renamed or ends above the high watermark. A segment must have been flushed with its
  seal: once it is gone, only the snapshot at its end has its producers.
* The `.log` of a deleted segment is renamed first: a crash leaves a whole segment, or files without
  a log, which the next open unlinks. The `.log` of a replaced segment is renamed last: until then
  the next open finishes the swap and removes what is left of the old segment.
* A reader that has the file open keeps it; a later one does not find it.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

from tierlog.host.disk import is_disk_full
from tierlog.hot_tier.log_folder import (
    DELETED,
    LOG,
    OFFSET_INDEX,
    SNAPSHOT,
    TIME_INDEX,
    TRANSACTION_INDEX,
    staged,
)
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import Segment

DELETED_IN_ORDER: Final = (LOG, OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX, SNAPSHOT)
REPLACED_IN_ORDER: Final = (SNAPSHOT, TRANSACTION_INDEX, TIME_INDEX, OFFSET_INDEX, LOG)
# The first replaced segment's snapshot stays: it is also that of the new segment.
FIRST_REPLACED_IN_ORDER: Final = REPLACED_IN_ORDER[1:]


class _Deleted(NamedTuple):
    """A deleted segment: when it was renamed, and its files."""

    deleted_ms: int
    files: tuple[Path, ...]


class Reaper:
    """The deleted files of one log that are still on disk."""

    def __init__(self, state: LogState) -> None:
        self._state = state
        self._deleted: list[_Deleted] = []

    def delete_before(self, before_offset: int) -> list[int]:
        """Rename the segments that end at or below `before_offset`; returns their base offsets."""
        state = self._state
        with state.lock:
            if state.closed:
                return []
            items, count = state.segments.items, 0
            before_offset = min(before_offset, state.high_watermark)
            while (  # the snapshot at a segment's end is flushed with its seal
                items[count].base_offset < state.flushed.base_offset
                and items[count].end.next_offset <= before_offset
            ):
                count += 1
            if count:
                self._delete_first(count)
                self._start_epochs_at(items[count].base_offset)
            return [segment.base_offset for segment in items[:count]]

    def _delete_first(self, count: int) -> None:
        """If one cannot be renamed, it and all after it stay: a gap in the log would be damage."""
        state = self._state
        before = state.segments
        state.segments = before.from_number(count)
        state.folder_changed = True
        try:
            for segment in before.items[:count]:
                self.rename_deleted(segment, DELETED_IN_ORDER)
        except OSError as error:
            kept = (n for n in range(count) if before.items[n].path(LOG).exists())
            state.segments = before.from_number(next(kept, count))
            raise disk_error(state, error) from error

    def rename_deleted(
        self, segment: Segment, suffixes: Sequence[str], *, moved: dict[Path, Path] | None = None
    ) -> None:
        """Rename these files of a segment that is no longer part of the log to `.deleted`. Raises
        OSError.

        `moved` receives the new path of each file.
        """
        state = self._state
        renamed: list[Path] = []
        try:
            for suffix in suffixes:
                path = segment.path(suffix)
                if path.exists():
                    deleted_path = staged(path, DELETED)
                    state.disk.rename(path, deleted_path)
                    renamed.append(deleted_path)
                    if moved is not None:
                        moved[path] = deleted_path
                state.files.invalidate(path)  # last, so that nobody caches the old file after it
        finally:  # what was renamed before an error is unlinked like the rest: it is the room
            self._deleted.append(_Deleted(state.monotonic_clock(), tuple(renamed)))

    def _start_epochs_at(self, offset: int) -> None:
        """Drop epochs without local records, as Kafka does.

        If the disk is full, this is left to the next deletion: the current one has to make room.
        """
        try:
            self._state.epochs.truncate_from_start(max(offset, self._state.log_start_offset))
        except OSError as error:
            if not is_disk_full(error):
                raise disk_error(self._state, error) from error

    def reap(self, *, at_once: bool) -> int:
        """Unlink files deleted long enough ago; returns how many segments.

        Raises OSError after unlinking all others; the failed ones are retried by the next call.
        """
        state = self._state
        with state.lock:
            if state.closed:
                return 0
            delay_ms = 0 if at_once else state.config.file_delete_delay_ms
            until_ms = state.monotonic_clock() - delay_ms
            due = [segment for segment in self._deleted if segment.deleted_ms <= until_ms]
            self._deleted = [segment for segment in self._deleted if segment.deleted_ms > until_ms]
        failures: list[OSError] = []
        for segment in due:  # outside the lock: unlinking a gigabyte takes a while
            try:
                for path in segment.files:
                    state.disk.unlink(path)
            except OSError as error:
                failures.append(error)
                with state.lock:
                    self._deleted.append(segment)
        if failures:
            raise failures[0]
        return len(due)
