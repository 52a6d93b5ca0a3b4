"""Replacing segments by the segment that compaction or a repair made from them.

| step | the next open after a crash finds |
|---|---|
| `.cleaned` files complete and synced | the old segments; it removes the `.cleaned` files |
| `.log.cleaned` renamed to `.log.swap`, then the others, folder | the new segment: `LogFolder` |
| synced | finishes the swap |
| the old segments' files renamed to `.deleted` | the same |
| `.swap` files renamed into place, the `.log` last, folder synced | the new segment |

* The marker that the bucket is out of date is created with the `.swap` names and synced with them.
* It runs under the log's lock: appends wait for a few renames and two syncs of the folder. Readers
  see either the old segments or the new one (`seqlock`); files that they have open stay open.
* If a step fails after the point of no return, the log goes offline and the next open finishes the
  swap. Until then reads use the old segments, wherever their files are by then.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from tierlog.host.file_slice import OpenFile
from tierlog.hot_tier.cleaned_segment import CleanedSegment
from tierlog.hot_tier.file_names import (
    CLEANED,
    LOG,
    SEGMENT_SUFFIXES,
    SNAPSHOT,
    SWAP,
    UNMIRRORED,
    path_of,
    staged,
)
from tierlog.hot_tier.log_state import LogState, Segments
from tierlog.hot_tier.reaper import FIRST_REPLACED_IN_ORDER, REPLACED_IN_ORDER, Reaper
from tierlog.hot_tier.roll import disk_error
from tierlog.hot_tier.segment import Segment
from tierlog.hot_tier.seqlock import replacing_segments


def swap(
    state: LogState,
    reaper: Reaper,
    old: tuple[Segment, ...],
    cleaned: CleanedSegment,
    *,
    bucket_follows: bool = True,
) -> bool:
    """Replace `old` by `cleaned` (finished); False if not all of `old` are still in the log.

    `bucket_follows`: the bucket may hold the old segments and must be updated. Raises
    LogOfflineError, DiskFull (nothing changed).
    """
    with state.lock:
        state.check_online()
        if state.closing:
            return False
        first = state.segments.number_of(old[0].base_offset)
        if first < 0 or state.segments.items[first : first + len(old)] != old:
            return False
        if bucket_follows:
            _mark_unmirrored(state)
        _publish(state, cleaned)
        with replacing_segments(state):
            moved: dict[Path, Path] = {}
            try:
                _rename(state, reaper, old, cleaned, moved=moved)
            except OSError as error:
                offline = state.go_offline(error)
                for path, current_path in moved.items():
                    with suppress(OSError):  # out of descriptors: reads fail until a restart
                        state.files.pin(path, OpenFile(current_path))
                raise offline from error
            items = state.segments.items
            after = (*items[:first], cleaned.segment, *items[first + len(old) :])
            state.segments = Segments.of(after)
        return True


def _mark_unmirrored(state: LogState) -> None:
    try:
        (state.folder / UNMIRRORED).touch()
    except OSError as error:
        raise disk_error(state, error) from error
    state.unmirrored = True


def _publish(state: LogState, cleaned: CleanedSegment) -> None:
    """From the first rename on, the swap will be finished, by this process or by the next open."""
    try:
        _stage(state, cleaned, LOG)
    except OSError as error:
        raise disk_error(state, error) from error
    try:
        for suffix in cleaned.suffixes:
            if suffix != LOG:
                _stage(state, cleaned, suffix)
        state.disk.sync_folder(state.folder)
    except OSError as error:
        raise state.go_offline(error) from error


def _stage(state: LogState, cleaned: CleanedSegment, suffix: str) -> None:
    path = cleaned.segment.path(suffix)
    state.disk.rename(staged(path, CLEANED), staged(path, SWAP))


def _rename(
    state: LogState,
    reaper: Reaper,
    old: tuple[Segment, ...],
    cleaned: CleanedSegment,
    *,
    moved: dict[Path, Path],
) -> None:
    reaper.rename_deleted(old[0], FIRST_REPLACED_IN_ORDER, moved=moved)
    for segment in old[1:]:
        reaper.rename_deleted(segment, REPLACED_IN_ORDER, moved=moved)
    for suffix in reversed(cleaned.suffixes):  # the .log is the first of them
        path = cleaned.segment.path(suffix)
        state.disk.rename(staged(path, SWAP), path)
    state.disk.sync_folder(state.folder)
    for segment in (*old, cleaned.segment):
        for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT):
            state.files.invalidate(path_of(state.folder, segment.base_offset, suffix))
