"""Cutting a follower's open log where it parts from its leader's (Kafka's truncateTo), or all of it
(truncateFullyAndStartAt).

* All that the cut log will be is found out first, from the files as they are: an error changes
  nothing.
* Then the recovery point goes down, in memory and in its checkpoint, before anything is removed: at
  a start a log that ends below it is one that lost records.
* Files are removed from the end, each removal on the medium before the next: a crash leaves a log
  that ends somewhere between the two ends. Snapshots above the end go first, because the log will
  come there again with other records.
* The one file that is shortened is shortened in place. Slices of it that other replicas were given
  may end early, or go on with other batches: an answer that came too late, which their epochs tell.
  What consumers were given is below the high watermark, and stays.
* Where all goes, the new segment comes first, and then the files of the old ones from the start: a
  crash leaves what is left of the old log, of which recovery drops a new segment that does not
  continue it, or the new one.
* It waits for the disk under the log's lock, while no flush runs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import closing
from struct import Struct
from typing import NamedTuple

from tierlog.hot_tier.active_segment import ActiveSegment
from tierlog.hot_tier.derived_files import begin_states, read_entries
from tierlog.hot_tier.indexes import IndexColumns
from tierlog.hot_tier.log_folder import (
    LOG,
    OFFSET_INDEX,
    SEGMENT_SUFFIXES,
    SNAPSHOT,
    TIME_INDEX,
    TRANSACTION_INDEX,
    path_of,
    segment_files,
)
from tierlog.hot_tier.log_reader import with_index_rebuild
from tierlog.hot_tier.log_state import Flushed, LogState, Segments, replacing_segments
from tierlog.hot_tier.producer_state import ProducerStates
from tierlog.hot_tier.recovery import TailFacts, load_producers, read_index
from tierlog.hot_tier.roll import (
    create_segment,
    disk_error,
    open_active,
    remove_segment,
    resume_active,
)
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.hot_tier.segment_lookup import SegmentLookup
from tierlog.record_format.errors import CorruptIndex
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


class _Plan(NamedTuple):
    """The log after the cut: `last` is its last segment, and has yet to be shortened."""

    kept: tuple[Segment, ...]
    last: Segment
    facts: TailFacts
    producers: ProducerStates
    removed: tuple[Segment, ...]


def cut_log(state: LogState, offset: int, save_recovery_point: Callable[[], None]) -> None:
    """Remove what is at and above `offset`, which is not below the high watermark; of a batch that
    contains it, all. Call it while nothing is appended or flushed. `save_recovery_point` brings the
    checkpoint up to date.

    Raises CorruptDataError, DiskFull, and what `save_recovery_point` raises (nothing was removed);
    LogOfflineError.
    """
    plan = _plan(state, offset)
    if plan is not None:
        _lower_recovery_point(state, plan.last, save_recovery_point)
    with state.lock:
        try:
            state.epochs.drop_from(offset if plan is None else plan.last.end.next_offset)
        except OSError as error:
            raise disk_error(state, error) from error
        if plan is not None:
            _apply(state, plan)


def begin_anew_at(
    state: LogState,
    offset: int,
    producers: bytes | None,
    save_recovery_point: Callable[[], None],
) -> None:
    """Go on at `offset` without all that is here. What is below is committed, and in the bucket, or
    trimmed. The log start does not change. `producers`: their snapshot at `offset`, as the other
    tier has it. Call it as `cut_log`.

    Raises DiskFull, what `save_recovery_point` raises, LogOfflineError.
    """
    cut_log(state, offset, save_recovery_point)
    with state.lock:
        assert state.high_watermark <= offset, "the high watermark never goes back"
        active, states = _create_at(state, offset, producers)
        try:
            with replacing_segments(state):
                for one in (state.active, *state.unflushed):
                    if one is not active:
                        one.close()
                _remove_all_but(state, active.segment)
                state.active, state.segments = active, Segments.of((active.segment,))
                state.unflushed, state.producers, state.ended = [], states, ()
                state.max_timestamps_so_far = None
                state.flushed, state.committed = Flushed(offset, offset, 0), offset
        except Exception as error:
            raise state.go_offline(error) from error


def _create_at(
    state: LogState, offset: int, producers: bytes | None
) -> tuple[ActiveSegment, ProducerStates]:
    """An empty segment, of which the folder has the producers. The old ones are as they were."""
    active = before = state.active
    try:
        if before.segment.base_offset != offset:  # or it is empty
            active = create_segment(state, offset)
        if not producers:
            state.disk.unlink(path_of(state.folder, offset, SNAPSHOT))
        states = begin_states(state, offset, producers)
        state.epochs.clear()  # recovery finds those of the old segments in their batches
        state.disk.sync_folder(state.folder)
    except OSError as error:
        if active is not before:
            active.close()
            remove_segment(state, active.segment)
        raise disk_error(state, error) from error
    return active, states


def _remove_all_but(state: LogState, kept: Segment) -> None:
    end_offset = state.log_end_offset
    for segment in state.segments.items:
        if segment is not kept:
            _unlink(state, segment, (*SEGMENT_SUFFIXES, SNAPSHOT))
    if end_offset < kept.base_offset:
        state.disk.unlink(path_of(state.folder, end_offset, SNAPSHOT))
    state.disk.sync_folder(state.folder)


def _plan(state: LogState, offset: int) -> _Plan | None:
    """None if the log ends there."""
    with state.lock:
        state.check_open()
        assert state.is_follower, "a leader cuts nothing"
        assert offset >= state.high_watermark, "what is committed is never cut"
        if offset >= state.log_end_offset:
            return None
        segments = state.segments
        number = segments.number_of(offset)
        old = segments.items[number]
        end = with_index_rebuild(state, old, lambda: _end_at(state, old, offset))
        assert end.next_offset >= state.high_watermark, "a batch is committed whole"
        last = _shortened(old, end)
        facts = with_index_rebuild(state, old, lambda: _facts_of(state, old, last))
        found = segment_files(state.folder)
        snapshots = {name.offset for name, _ in found if name.suffix == SNAPSHOT and not name.stage}
        producers = load_producers(state, snapshots, last, facts)
    kept, removed = segments.items[:number], segments.items[number + 1 :]
    return _Plan(kept, last, facts, producers, removed)


def _end_at(state: LogState, segment: Segment, offset: int) -> SegmentEnd:
    with closing(SegmentLookup(segment, state.files)) as lookup:
        header = lookup.find_offset(offset)
    if header is None:  # compaction left nothing there
        return SegmentEnd(segment.end.size_bytes, offset)
    return SegmentEnd(header.position, min(header.base_offset, offset))


def _shortened(old: Segment, end: SegmentEnd) -> Segment:
    last = Segment(old.folder, old.base_offset, end)
    checked_from = end.next_offset if old.damage else old.unchecked_below
    last.unchecked_below = min(checked_from, end.next_offset)
    last.add_aborted([one for one in read_entries(old) if one.last_offset < end.next_offset])
    return last


def _facts_of(state: LogState, old: Segment, last: Segment) -> TailFacts:
    offsets = _copy_of(old, old.offsets, OFFSET_INDEX, OFFSET_ENTRY)
    times = _copy_of(old, old.times, TIME_INDEX, TIME_ENTRY)
    offsets.truncate(column=1, target=last.end.size_bytes - 1)
    return TailFacts(state, last, offsets=offsets, times=times)


def _copy_of(
    segment: Segment, active: IndexColumns | None, suffix: str, layout: Struct
) -> IndexColumns:
    if active is not None:
        return IndexColumns(layout, active.image())
    try:
        return read_index(segment, suffix, layout)
    except FileNotFoundError:
        raise CorruptIndex("is missing", file=segment.name(suffix)) from None


def _lower_recovery_point(
    state: LogState, last: Segment, save_recovery_point: Callable[[], None]
) -> None:
    before, (size_bytes, end_offset) = state.flushed, last.end
    if before.offset <= end_offset:
        return
    state.flushed = Flushed(end_offset, last.base_offset, size_bytes)
    try:
        save_recovery_point()
    except BaseException:
        state.flushed = before
        raise


def _apply(state: LogState, plan: _Plan) -> None:
    """If this fails, the disk has something between the two logs, and memory neither."""
    try:
        with replacing_segments(state):
            for one in (state.active, *state.unflushed):
                if one.segment not in plan.kept:
                    one.close()
            _remove_snapshots_above(state, plan.last.end.next_offset)
            for segment in reversed(plan.removed):
                _unlink(state, segment, reversed((*SEGMENT_SUFFIXES, SNAPSHOT)))
            _shorten(state, plan.last)
            _put_in_place(state, plan)
    except Exception as error:
        raise state.go_offline(error) from error


def _remove_snapshots_above(state: LogState, end_offset: int) -> None:
    for name, path in segment_files(state.folder):
        if name.suffix == SNAPSHOT and name.offset > end_offset:
            state.disk.unlink(path)
    state.disk.sync_folder(state.folder)


def _unlink(state: LogState, segment: Segment, suffixes: Iterable[str]) -> None:
    for suffix in suffixes:
        state.disk.unlink(segment.path(suffix))
        state.files.invalidate(segment.name(suffix))
    state.disk.sync_folder(state.folder)


def _shorten(state: LogState, last: Segment) -> None:
    fd = state.disk.open(last.path(LOG), os.O_RDWR)
    try:
        state.disk.truncate(fd, last.end.size_bytes)
        state.disk.sync_bytes(fd)
    finally:
        os.close(fd)
    state.files.invalidate(last.name(LOG))
    _unlink(state, last, (OFFSET_INDEX, TIME_INDEX, TRANSACTION_INDEX))


def _put_in_place(state: LogState, plan: _Plan) -> None:
    facts, last = plan.facts, plan.last
    active = open_active(state, last, bytes_since_entry=facts.bytes_since_entry)
    active.add_entries(facts.offsets, facts.times)
    last.largest = facts.largest
    state.active, state.segments = active, Segments.of((*plan.kept, last))
    state.unflushed = [one for one in state.unflushed if one.segment in plan.kept]
    state.folder_changed = True
    state.producers = plan.producers
    state.ended = tuple(one for one in state.ended if one.marker_offset < last.end.next_offset)
    state.max_timestamps_so_far = None
    resume_active(state, active)
