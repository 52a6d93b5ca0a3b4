"""Cutting the end of a log, or all of it: what a take-over and a restore need.

Only while nobody is served from the log: offsets that were given are given again.
"""

from __future__ import annotations

import os

from hot_tier.file_names import LOG, SEGMENT_SUFFIXES, SNAPSHOT, path_of
from hot_tier.log_folder import LogFolder
from hot_tier.log_state import Flushed, LogState, Segments
from hot_tier.opening import open_log
from hot_tier.producer_state import ProducerStates
from hot_tier.recovery import OpenRequest
from hot_tier.roll import create_segment, disk_error
from hot_tier.segment_lookup import SegmentLookup


def truncate_to(state: LogState, offset: int) -> None:
    """Remove every batch that holds `offset` or comes after it. Past the end nothing happens.

    The log is then opened anew as after a crash, which rebuilds indexes, epochs and producers.
    Raises LogOfflineError, DiskFull.
    """
    with state.lock:
        state.check_online()
        if offset >= state.log_end_offset:
            return
        if offset <= state.segments.bases[0]:
            start_at(state, offset)
            return
        try:
            _truncate(state, offset)
        except OSError as error:
            raise disk_error(state, error) from error


def _truncate(state: LogState, offset: int) -> None:
    number = state.segments.number_of(offset)
    if state.segments.bases[number] == offset:
        number -= 1  # the whole segment goes
    kept = state.segments.items[number]
    header = SegmentLookup(kept, state.files).find_offset(offset)
    _close_files(state)
    for segment in state.segments.items[number + 1 :]:
        for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT):
            state.disk.unlink(segment.path(suffix))
    if header is not None:
        fd = state.disk.open(kept.path(LOG), os.O_RDWR)
        try:
            state.disk.truncate(fd, header.position)
        finally:
            os.close(fd)
    state.epochs.cut_end(offset)
    state.epochs.save()
    request = OpenRequest(
        clean=False,
        recovery_point=min(state.flushed.offset, kept.base_offset),
        flushed_end=0,
        log_start_offset=state.log_start_offset,
        start_offset=0,
        repair=False,
    )
    epoch = state.leader_epoch
    open_log(state, LogFolder.open(state.folder, disk=state.disk), request)
    state.leader_epoch = max(epoch, state.leader_epoch)


def start_at(state: LogState, offset: int) -> None:
    """Remove every local segment and begin an empty one at `offset`; the log start stays.

    Raises LogOfflineError, DiskFull.
    """
    with state.lock:
        state.check_online()
        old = state.segments.items
        _close_files(state)
        try:
            for segment in old:
                for suffix in (*SEGMENT_SUFFIXES, SNAPSHOT):
                    state.disk.unlink(segment.path(suffix))
            state.disk.unlink(path_of(state.folder, old[-1].end.next_offset, SNAPSHOT))
            state.epochs.clear()
            state.active = create_segment(state, offset)
            state.disk.sync_folder(state.folder)
        except OSError as error:
            raise disk_error(state, error) from error
        state.folder_changed = False
        state.segments = Segments.of((state.active.segment,))
        state.producers = ProducerStates()
        state.producers.end_offset = offset
        state.flushed = Flushed(offset, offset, 0)


def _close_files(state: LogState) -> None:
    state.active.close()
    for sealed in state.unflushed:
        sealed.close()
    state.unflushed = []
    state.files.forget_all(state.folder)
