"""Opening a log after a clean shutdown.

Index files are trusted until a look-up finds an entry that is wrong. Only the tail of the last
segment, from its last index entry on, is read; if that is inconsistent, the log is recovered as
after a crash.
"""

from __future__ import annotations

from struct import Struct

from tierlog.host.durable_file import read_whole
from tierlog.hot_tier.file_names import OFFSET_INDEX, TIME_INDEX
from tierlog.hot_tier.index_columns import IndexColumns
from tierlog.hot_tier.log_folder import LogFolder
from tierlog.hot_tier.log_state import LogState
from tierlog.hot_tier.producer_snapshots import READ_BACK_BYTES, load_newest, restore_older_batches
from tierlog.hot_tier.replay import replay
from tierlog.hot_tier.roll import open_active, resume_active
from tierlog.hot_tier.segment import LargestTimestamp, Segment, SegmentEnd
from tierlog.record_format.errors import CorruptDataError, CorruptIndex
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET, OFFSET_ENTRY, TIME_ENTRY


class TailFacts:
    """The state of the last segment from its index files and its tail: enough to append to it."""

    def __init__(self, state: LogState, segment: Segment) -> None:
        size_bytes = segment.end.size_bytes
        self.offsets = _read_index(segment, OFFSET_INDEX, OFFSET_ENTRY)
        self.times = _read_index(segment, TIME_INDEX, TIME_ENTRY)
        relative, position = self.offsets[-1] if len(self.offsets) else (-1, 0)
        # The entry that sealing added to the time index has no offset entry: appends would not have
        # added it.
        self.times.truncate(column=1, target=relative)
        self.bytes_since_entry = size_bytes - position
        self.next_offset = segment.base_offset
        self.largest = LargestTimestamp(-1, segment.base_offset)
        if len(self.times):
            timestamp, offset = self.times[-1]
            self.largest = LargestTimestamp(timestamp, segment.base_offset + offset)
        self._walk(state, segment, position, expected=relative if len(self.offsets) else None)

    def _walk(
        self, state: LogState, segment: Segment, position: int, *, expected: int | None
    ) -> None:
        end_offset = segment.base_offset + MAX_RELATIVE_OFFSET + 1  # it is not known yet
        for header in segment.headers(state.files, start=position, end_offset=end_offset):
            if expected is not None and header.last_offset != segment.base_offset + expected:
                raise CorruptIndex("does not match the log", file=str(segment.path(OFFSET_INDEX)))
            expected = None
            self.next_offset = header.next_offset
            if header.max_timestamp > self.largest.timestamp:
                self.largest = LargestTimestamp(header.max_timestamp, header.last_offset)
        if expected is not None:
            raise CorruptIndex("points past the end of the log", file=segment.name(OFFSET_INDEX))


def _read_index(segment: Segment, suffix: str, layout: Struct) -> IndexColumns:
    path = segment.path(suffix)
    data = read_whole(path, CorruptIndex)
    if len(data) % layout.size:
        raise CorruptIndex(f"{len(data)} bytes are not whole entries", file=str(path))
    return IndexColumns(layout, data)


def open_clean(state: LogState, folder: LogFolder) -> bool:
    """Open without a full check; False if the tail is not what a clean shutdown leaves."""
    segment = state.segments.items[-1]
    try:
        facts = TailFacts(state, segment)
    except (CorruptDataError, FileNotFoundError):
        return False
    segment.end = SegmentEnd(segment.end.size_bytes, facts.next_offset)
    segment.largest, segment.unchecked_below = facts.largest, facts.next_offset
    state.active = open_active(
        state,
        segment,
        offsets=facts.offsets,
        times=facts.times,
        bytes_since_entry=facts.bytes_since_entry,
    )
    resume_active(state)
    load_producers(state, folder, end_offset=facts.next_offset)
    return True


def load_producers(state: LogState, folder: LogFolder, *, end_offset: int) -> None:
    """The newest snapshot, the batches after it, and the older batches that a snapshot does not
    hold.
    """
    state.producers = load_newest(
        state, folder.snapshots, at_most=end_offset, at_least=state.segments.bases[0]
    )
    replay(state, state.producers, end_offset=end_offset)
    if len(state.producers):
        segment = state.segments.items[-1]
        start = max(0, segment.end.size_bytes - READ_BACK_BYTES)
        assert segment.offsets is not None
        entry = segment.offsets.floor(column=1, target=start)
        restore_older_batches(
            state.producers, segment.headers(state.files, start=entry[1] if entry else 0)
        )
