"""Starting a log over at an offset: the bucket has everything below it, or the log start is above.

Only before the log is served, because offsets that were assigned may be assigned again. The
producers at that offset come from the other tier.
"""

from __future__ import annotations

from hot_tier.file_names import SEGMENT_SUFFIXES, SNAPSHOT, path_of
from hot_tier.log_state import Flushed, LogState, Segments
from hot_tier.producer_snapshots import load_newest
from hot_tier.roll import create_segment, disk_error


def truncate_fully_and_start_at(state: LogState, offset: int) -> None:
    """Remove every local segment and create an empty one at `offset` (Kafka's
    truncateFullyAndStartAt); the log start does not change.

    Raises LogOfflineError, DiskFull.
    """
    with state.lock:
        state.check_online()
        old = state.segments.items
        state.close_files()
        state.unflushed = []
        state.files.invalidate_folder(state.folder)
        try:
            for segment in old:
                for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT):
                    state.disk.unlink(segment.path(suffix))
            state.disk.unlink(path_of(state.folder, old[-1].end.next_offset, SNAPSHOT))
            state.epochs.clear()
            state.producers = load_newest(state, set(), at_most=offset, at_least=offset)
            state.active = create_segment(state, offset)
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error
        state.folder_changed = False
        state.segments = Segments.of((state.active.segment,))
        state.flushed = Flushed(offset, offset, 0)
