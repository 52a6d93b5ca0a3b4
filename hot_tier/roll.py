"""Rolling the log: from one active segment to the next; and starting it over at another offset.

* The new files are created before the old segment is touched: if the disk is full, the old one
  stays active and complete.
* The next flush makes the sealed segment's bytes durable, together with its indexes, the snapshot
  and the folder's names; only then may anyone treat it as durable.
"""

from __future__ import annotations

from tierlog.host.disk import disk_full, is_disk_full
from tierlog.hot_tier.active_segment import ActiveSegment
from tierlog.hot_tier.derived_files import begin_states, write_snapshot
from tierlog.hot_tier.indexes import IndexColumns
from tierlog.hot_tier.log_folder import (
    LOG,
    OFFSET_INDEX,
    PARTITION_METADATA,
    SEGMENT_SUFFIXES,
    SNAPSHOT,
    TIME_INDEX,
    path_of,
)
from tierlog.hot_tier.log_state import Flushed, LogSetting, LogState, OpeningLog, Segments
from tierlog.hot_tier.segment import Segment, SegmentEnd, modified_ms
from tierlog.record_format.batch import NO_TIMESTAMP
from tierlog.record_format.errors import TierlogError
from tierlog.record_format.index_builder import LargestTimestamp
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


def create_segment(state: LogState | OpeningLog, base_offset: int) -> ActiveSegment:
    """Create the files of an empty segment. Raises OSError and leaves nothing behind, or
    LogOfflineError.
    """
    segment = Segment(state.folder, base_offset, SegmentEnd(0, base_offset))
    # Set here: a concurrent look-up would store what it found before the first append.
    segment.largest = LargestTimestamp(NO_TIMESTAMP, base_offset)
    try:
        active = open_active(state, segment)
    except OSError:
        remove_segment(state, segment)
        raise
    return active


def open_active(
    state: LogState | OpeningLog,
    segment: Segment,
    *,
    offsets: IndexColumns | None = None,
    times: IndexColumns | None = None,
    bytes_since_entry: int = 0,
) -> ActiveSegment:
    """Open a segment for writing, with the log's configuration. `offsets`, `times`: the entries of
    its index files. Raises OSError.
    """
    return ActiveSegment(
        segment,
        config=state.config,
        jitter_ms=state.jitter_ms(segment.base_offset),
        now_ms=state.monotonic_clock(),
        disk=state.disk,
        offsets=offsets or IndexColumns(OFFSET_ENTRY),
        times=times or IndexColumns(TIME_ENTRY),
        bytes_since_entry=bytes_since_entry,
    )


def resume_active(state: LogState | OpeningLog, active: ActiveSegment) -> None:
    """Continue the active segment of a log that is opened or was cut. Raises CorruptBatch."""
    segment = active.segment
    first_timestamp = segment.first_timestamp(state.files)
    active.resume(first_timestamp, age_ms=_age_ms(state, segment, first_timestamp))


def _age_ms(state: LogState | OpeningLog, segment: Segment, first_timestamp: int | None) -> int:
    """How long a segment has had records, as far as can be told after a restart; otherwise every
    restart would postpone a due roll.

    Its first record's own timestamp counts if it lies between the creation of the segment and the
    last write to it. The segment was created after the last write to its predecessor; if that is
    gone from the disk, when the producer snapshot at its base offset was written (recovery keeps
    it), or else the partition's metadata.
    """
    predecessor = [segment.path(LOG) for segment in state.segments.items[-2:-1]]
    marks = (*predecessor, segment.path(SNAPSHOT), state.folder / PARTITION_METADATA)
    last_ms = modified_ms(segment.path(LOG))
    created_ms = next((modified_ms(path) for path in marks if path.exists()), last_ms)
    first_ms = max(first_timestamp or NO_TIMESTAMP, created_ms)
    return max(0, state.clock() - min(first_ms, last_ms))


def remove_segment(state: LogState | OpeningLog, segment: Segment) -> None:
    """Unlink the files of a segment that was not used. If that fails, the log goes offline: with
    more records in the old segment, the next open would find two that overlap.
    """
    try:
        for suffix in (LOG, OFFSET_INDEX, TIME_INDEX):
            state.disk.unlink(segment.path(suffix))
    except OSError as error:
        raise state.go_offline(error) from error


def roll(state: LogState) -> None:
    """Seal the active segment and open the next at the log's end; does nothing if it is empty.

    Called under the lock. Raises DiskFull (nothing changed), LogOfflineError.
    """
    state.check_open()
    old = state.active
    if old.segment.end.size_bytes == 0:
        return
    try:
        new = create_segment(state, old.segment.end.next_offset)
    except OSError as error:
        raise disk_error(state, error) from error
    try:
        old.seal()
        write_snapshot(state, new.segment.base_offset)
    except OSError as error:
        new.close()
        remove_segment(state, new.segment)
        raise disk_error(state, error) from error
    state.unflushed.append(old)
    state.active, state.folder_changed = new, True
    state.segments = state.segments.with_added(new.segment)
    old.release_indexes()


def seal_last(state: LogState) -> None:
    """The log was flushed and is about to be closed: make its active segment what a clean shutdown
    leaves. Raises DiskFull, LogOfflineError.
    """
    with state.lock:
        try:
            state.active.seal()
            # Synced before its rename: if the active segment is empty it replaces the only one.
            write_snapshot(state, state.log_end_offset, sync=True)
            if state.active.is_shortened:  # otherwise the flush has synced it
                state.active.sync_log()
            state.active.sync_indexes()
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error


def truncate_fully_and_start_at(state: LogState, offset: int, producers: bytes | None) -> None:
    """Remove every local segment and create an empty one at `offset` (Kafka's
    truncateFullyAndStartAt): the bucket has everything below it, or the log start is above; all of
    it is committed. The log start does not change. `producers`: their snapshot at `offset`, as the
    other tier has it: nobody is asked for it while there is half a log.

    Only while the log is opened, because offsets that were assigned may be assigned again, or if it
    is empty: a crash in between leaves none, which an open begins where this one was to begin. A
    follower's log that has records begins anew otherwise (`cut.begin_anew_at`). Raises
    LogOfflineError, DiskFull.
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
            state.producers = begin_states(state, offset, producers)
            # Last: recovery would take the old ones, which end early, for complete up to it.
            state.active = create_segment(state, offset)
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error
        state.folder_changed = False
        state.segments = Segments.of((state.active.segment,))
        state.flushed, state.ended = Flushed(offset, offset, 0), ()
        if state.committed is not None:
            assert state.committed <= offset, "the high watermark never goes back"
            state.committed = offset


def disk_error(state: LogSetting, error: OSError) -> TierlogError:
    """The error for a failed system call: DiskFull, or the log goes offline."""
    if is_disk_full(error):
        return disk_full(state.folder, error)
    return state.go_offline(error)
