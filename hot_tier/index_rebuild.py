"""Both indexes of a sealed segment made anew from its batch headers, as appending made them."""

from __future__ import annotations

from hot_tier.batch_walk import headers_from
from hot_tier.durable_file import write_whole
from hot_tier.file_names import LOG, OFFSET_INDEX, TIME_INDEX
from hot_tier.index_plan import IndexPlan
from hot_tier.log_state import LogState
from hot_tier.segment import OFFSET_ENTRY, TIME_ENTRY, Segment, reader_of


def rebuild_indexes(state: LogState, segment: Segment) -> None:
    """Replace `.index` and `.timeindex` of a sealed segment. Raises CorruptBatch,
    FileNotFoundError.
    """
    plan = IndexPlan(segment.base_offset, interval_bytes=state.config.index_interval_bytes)
    read_at = reader_of(state.files, segment.path(LOG))
    for header in headers_from(read_at, 0, end=segment.end.size_bytes):
        plan.take(header, position=header.position)
    plan.add_time_entry()
    write_indexes(state, segment, plan)


def write_indexes(state: LogState, segment: Segment, plan: IndexPlan) -> None:
    """Write the index files of a sealed segment out of a finished plan, synced."""
    offsets = b"".join(OFFSET_ENTRY.pack(*entry) for entry in plan.offset_entries)
    times = b"".join(TIME_ENTRY.pack(*entry) for entry in plan.time_entries)
    for suffix, data in ((OFFSET_INDEX, offsets), (TIME_INDEX, times)):
        path = segment.path(suffix)
        write_whole(path, data, disk=state.disk, sync=True)
        state.files.forget(path)
    segment.largest = plan.largest
    state.disk.sync_folder(state.folder)
