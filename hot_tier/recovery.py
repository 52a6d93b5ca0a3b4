"""What opening a log does with each state that a stop, a crash or a failing disk may leave behind.

| found | action |
|---|---|
| clean shutdown | check only the tail of the last segment, from its last index entry |
| clean shutdown, but the tail is not whole batches | as after a crash |
| segment entirely below the recovery point | trust its length |
| segment that ends exactly there | its seal may not have been synced: rebuild the indexes, cut |
| | what follows its last record (preallocated space) |
| segment above it, or the last one | check every batch (complete, CRC, offsets increase), rebuild |
| | the indexes |
| first bad byte above all that is known to be flushed | see `torn_tail`: refuse (CorruptBatch) if |
| | whole batches follow, else remove later segments, truncate there, and keep what is cut |
| first bad byte below that | refuse (CorruptBatch): flushed records were damaged |
| segment above that which ends before the next one begins | remove later segments |
| overlapping segments | refuse (CorruptDataError) |
| log ends below the recovery point | lower the point; `broker` decides whether that is acceptable |
| index missing, short, unordered, garbage | rebuild; below the recovery point on first use |
| `.txnindex` empty, short, unordered, garbage | rebuild from the batches |
| snapshot missing or bad | use an older one and replay more; at the log start, or if none is |
| | left, the other tier's; rebuild it for an upload |
| `leader-epoch-checkpoint` missing or bad | rebuild from the batches |
| the log had gone offline | rewrite what is above the recovery point before flushing it |

Files that are rebuilt when bad are also rebuilt when unreadable (EIO). An unreadable `.log` takes
the log offline.

After a clean shutdown index files are trusted until a look-up finds an entry that is wrong.
Recovery flushes everything that it keeps, and the folder, before the log is served. It runs before
the log is shared and takes no lock.
"""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from struct import Struct

from tierlog.host.durable_file import read_whole
from tierlog.hot_tier.derived_files import (
    READ_BACK_BYTES,
    load_newest,
    read_entries,
    rebuild_transactions,
    replay,
    restore_older_batches,
)
from tierlog.hot_tier.indexes import IndexColumns
from tierlog.hot_tier.leader_epochs import LeaderEpochs
from tierlog.hot_tier.log_folder import OFFLINE_MARKER, OFFSET_INDEX, TIME_INDEX, LogFolder
from tierlog.hot_tier.log_state import LogSetting, LogState, OpeningLog, Segments
from tierlog.hot_tier.producer_state import ProducerStates
from tierlog.hot_tier.recovery_scan import OpenRequest, Recovery, RecoveryReport
from tierlog.hot_tier.roll import create_segment, open_active, resume_active
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.record_format.errors import CorruptDataError, CorruptIndex, CorruptSnapshot
from tierlog.record_format.index_builder import LargestTimestamp
from tierlog.record_format.index_layouts import MAX_RELATIVE_OFFSET, OFFSET_ENTRY, TIME_ENTRY


class TailFacts:
    """The state of the last segment from its indexes and its tail: enough to append to it. Raises
    CorruptIndex, CorruptBatch, OSError.
    """

    def __init__(
        self,
        state: LogState | OpeningLog,
        segment: Segment,
        *,
        offsets: IndexColumns,
        times: IndexColumns,
    ) -> None:
        size_bytes = segment.end.size_bytes
        self.offsets, self.times = offsets, times
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
        self, state: LogState | OpeningLog, segment: Segment, position: int, *, expected: int | None
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


def read_index(segment: Segment, suffix: str, layout: Struct) -> IndexColumns:
    """The entries of an index file. Raises CorruptIndex, FileNotFoundError."""
    path = segment.path(suffix)
    data = read_whole(path, CorruptIndex)
    if len(data) % layout.size:
        raise CorruptIndex(f"{len(data)} bytes are not whole entries", file=str(path))
    return IndexColumns(layout, data)


def open_clean(state: OpeningLog, folder: LogFolder) -> bool:
    """Open without a full check; False if the tail is not what a clean shutdown leaves."""
    segment = state.segments.items[-1]
    try:
        facts = TailFacts(
            state,
            segment,
            offsets=read_index(segment, OFFSET_INDEX, OFFSET_ENTRY),
            times=read_index(segment, TIME_INDEX, TIME_ENTRY),
        )
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
    resume_active(state, state.active)
    state.producers = load_producers(state, folder.snapshots, segment, facts)
    return True


def load_producers(
    state: LogState | OpeningLog, snapshots: set[int], last: Segment, facts: TailFacts
) -> ProducerStates:
    """The newest snapshot up to the end of the `last` segment, the batches after it, and the older
    batches that a snapshot does not hold.
    """
    end_offset = last.end.next_offset
    producers = load_newest(state, snapshots, at_most=end_offset, at_least=state.segments.bases[0])
    replay(state, producers, end_offset=end_offset)
    if len(producers):
        entry = facts.offsets.floor(column=1, target=max(0, last.end.size_bytes - READ_BACK_BYTES))
        restore_older_batches(producers, last.headers(state.files, start=entry[1] if entry else 0))
    return producers


def load_log(
    setting: LogSetting, folder: LogFolder, request: OpenRequest
) -> tuple[LogState, RecoveryReport]:
    """The log in the folder, ready to be served, and what was changed or checked. Raises
    CorruptDataError, OSError.
    """
    report = RecoveryReport(clean=request.clean)
    report.cut_files = [setting.folder / name for name in folder.cuts]
    opening = OpeningLog(setting, _list_segments(setting.folder, folder), _load_epochs(setting))
    with ExitStack() as on_failure:
        on_failure.callback(opening.close_files)
        if folder.log_sizes:
            start = _open_segments(opening, folder, request, report)
        else:
            start = _start_empty(opening, folder, request)
        state = LogState(
            setting,
            opening,
            log_start_offset=start
            if request.log_start_offset is None
            else request.log_start_offset,
            unmirrored=folder.unmirrored,
        )
        on_failure.pop_all()
    return state, report


def _list_segments(path: Path, folder: LogFolder) -> tuple[Segment, ...]:
    bases = sorted(folder.log_sizes)
    items = []
    for number, base_offset in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else base_offset
        segment = Segment(path, base_offset, SegmentEnd(folder.log_sizes[base_offset], following))
        segment.unchecked_below = following
        segment.has_transactions = base_offset in folder.transaction_indexes
        items.append(segment)
    return tuple(items)


def _load_epochs(setting: LogSetting) -> LeaderEpochs:
    """Empty if there is no valid file."""
    try:
        return LeaderEpochs.load(setting.folder, disk=setting.disk)
    except (FileNotFoundError, CorruptSnapshot):
        return LeaderEpochs(setting.folder, disk=setting.disk)


def _start_empty(state: OpeningLog, folder: LogFolder, request: OpenRequest) -> int:
    """Returns where the log starts."""
    start = max(request.start_offset, request.log_start_offset or 0)
    state.producers = load_newest(state, folder.snapshots, at_most=start, at_least=start)
    state.active = create_segment(state, start)
    state.segments = Segments.of((state.active.segment,))
    state.epochs.truncate_from_end(start)
    state.epochs.save()  # syncs the folder, with the segment's files
    return start


def _open_segments(
    state: OpeningLog, folder: LogFolder, request: OpenRequest, report: RecoveryReport
) -> int:
    """Returns where the local log starts."""
    epochs_were_lost = not state.epochs.entries
    if not (request.clean and not folder.went_offline and open_clean(state, folder)):
        report.clean = False
        Recovery(state, folder, request, report).recover()
    _check_transaction_indexes(state, folder)
    start = state.segments.bases[0]
    if epochs_were_lost and state.log_end_offset > start:
        _epochs_from_batches(state)
    _finish_open(state, folder, report)
    return start


def _check_transaction_indexes(state: OpeningLog, folder: LogFolder) -> None:
    """Checked at every open, as in Kafka: read_committed consumers rely on nothing else."""
    for segment in state.segments.items:
        if segment.has_transactions and not _has_valid_transaction_index(segment):
            rebuild_transactions(state, segment, folder.snapshots)
    active = state.segments.items[-1]
    active.add_aborted(read_entries(active))


def _has_valid_transaction_index(segment: Segment) -> bool:
    try:
        return bool(read_entries(segment))  # a segment without aborted transactions has no file
    except CorruptIndex:
        return False


def _finish_open(state: OpeningLog, folder: LogFolder, report: RecoveryReport) -> None:
    """The common end of every open: epochs, snapshots, the offline marker."""
    entries = state.epochs.entries
    state.epochs.truncate_from_end(state.log_end_offset)
    if state.epochs.entries != entries or not report.clean:
        state.epochs.save()
    folder.remove_stray_snapshots(end_offset=state.log_end_offset)
    if folder.went_offline:
        state.disk.unlink(state.folder / OFFLINE_MARKER)


def _epochs_from_batches(state: OpeningLog) -> None:
    state.epochs.truncate_from_end(0)  # recovery has only those of the segments that it checked
    for segment in state.segments.items:
        for header in segment.headers(state.files):
            state.epochs.assign_in_memory(header.leader_epoch, header.base_offset)
    state.epochs.save()
