"""Rebuilding the indexes of a sealed segment from its batch headers; the result equals what appends
wrote.
"""

from __future__ import annotations

from hot_tier.durable_file import write_atomically
from hot_tier.file_names import OFFSET_INDEX, TIME_INDEX
from hot_tier.index_builder import IndexBuilder
from hot_tier.index_columns import IndexColumns
from hot_tier.log_state import LogState
from hot_tier.producer_snapshots import load_newest
from hot_tier.replay import replay
from hot_tier.segment import Segment
from hot_tier.transaction_index import write_entries
from record_format.index_layouts import OFFSET_ENTRY, TIME_ENTRY


def rebuild_indexes(state: LogState, segment: Segment) -> None:
    """Replace `.index` and `.timeindex` of a sealed segment. Raises CorruptBatch, OSError
    (FileNotFoundError: it was deleted).
    """
    write_indexes(state, segment, _build_sealed(state, segment))


def rebuild_for_reading(state: LogState, segment: Segment) -> None:
    """As `rebuild_indexes`, also for the active segment; if the disk takes no files, the indexes
    are only in memory: retention and reads must work on a full disk too. Raises only what reading
    the segment raises.
    """
    if segment is state.active.segment:
        state.active.replace_entries(_build(state, segment))
        return
    builder = _build_sealed(state, segment)
    try:
        write_indexes(state, segment, builder)
    except OSError:
        offsets, times = builder.images()
        cache = state.files.indexes
        cache.put(segment.name(OFFSET_INDEX), IndexColumns(OFFSET_ENTRY, offsets))
        cache.put(segment.name(TIME_INDEX), IndexColumns(TIME_ENTRY, times))


def _build(state: LogState, segment: Segment) -> IndexBuilder:
    builder = IndexBuilder(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
    for header in segment.headers(state.files):
        builder.add(header, position=header.position)
    return builder


def _build_sealed(state: LogState, segment: Segment) -> IndexBuilder:
    builder = _build(state, segment)
    builder.add_time_entry()
    return builder


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
