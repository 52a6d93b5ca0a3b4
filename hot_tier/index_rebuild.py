"""Rebuilding the indexes of a segment from its batch headers; the result equals what appends wrote.

All of the segment is read, which may take seconds: without the log's lock, or appends would wait.
The result is put in place under it, if the segment is still there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tierlog.host.durable_file import write_atomically
from tierlog.hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX
from tierlog.hot_tier.index_builder import IndexBuilder
from tierlog.hot_tier.index_columns import IndexColumns
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.producer_snapshots import load_newest
from tierlog.hot_tier.replay import replay
from tierlog.hot_tier.segment import Segment
from tierlog.hot_tier.transaction_index import write_entries
from tierlog.record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


def rebuild_indexes(state: LogState, segment: Segment) -> None:
    """Replace `.index` and `.timeindex` of a sealed segment. Raises CorruptBatch, OSError
    (FileNotFoundError: it was deleted or replaced, or the log was closed).
    """
    with _built(state, segment) as builder:
        builder.add_time_entry()
        write_indexes(state, segment, builder)


def rebuild_for_reading(state: LogState, segment: Segment) -> None:
    """As `rebuild_indexes`, also for the active segment; if the disk takes no files, the indexes
    are only in memory: retention and reads must work on a full disk too. Raises only what reading
    the segment raises.
    """
    with _built(state, segment) as builder:
        if segment is state.active.segment:
            state.active.replace_entries(builder)
            return
        builder.add_time_entry()
        try:
            write_indexes(state, segment, builder)
        except OSError:
            offsets, times = builder.images()
            cache = state.files.indexes
            cache.put(segment.name(OFFSET_INDEX), IndexColumns(OFFSET_ENTRY, offsets))
            cache.put(segment.name(TIME_INDEX), IndexColumns(TIME_ENTRY, times))


@contextmanager
def _built(state: LogState, segment: Segment) -> Iterator[IndexBuilder]:
    """A builder with all batches, and the log's lock. Raises FileNotFoundError if the segment was
    deleted or replaced, or the log was closed.
    """
    builder = IndexBuilder(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
    position = _add_batches(state, segment, builder, start=0)
    with state.lock:
        if state.closed or segment not in state.segments.items:
            raise FileNotFoundError(segment.name(LOG))
        _add_batches(state, segment, builder, start=position)  # appended meanwhile
        yield builder


def _add_batches(state: LogState, segment: Segment, builder: IndexBuilder, *, start: int) -> int:
    """Add the batches from the position `start` on; returns where they end."""
    for header in segment.headers(state.files, start=start):
        builder.add(header, position=header.position)
        start = header.end_position
    return start


def rebuild_transactions(state: LogState, segment: Segment, snapshots: set[int]) -> None:
    """Replace `.txnindex`. The transactions that its markers abort may have begun in earlier
    segments.

    `snapshots`: the offsets of those in the folder. Raises CorruptBatch.
    """
    start = state.segments.bases[0]
    producers = load_newest(state, snapshots, at_most=segment.base_offset, at_least=start)
    replay(state, producers, end_offset=segment.base_offset)
    aborted = replay(state, producers, end_offset=segment.end.next_offset)
    write_entries(segment, aborted, disk=state.disk)


def write_indexes(state: LogState, segment: Segment, builder: IndexBuilder) -> None:
    """Write and sync the index files of a sealed segment."""
    for suffix, data in zip((OFFSET_INDEX, TIME_INDEX), builder.images(), strict=True):
        path = segment.path(suffix)
        write_atomically(path, data, disk=state.disk, sync=True)
        state.files.invalidate(path)
    segment.largest = builder.largest
    state.disk.sync_folder(state.folder)
