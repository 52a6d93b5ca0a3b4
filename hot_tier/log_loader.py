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

Recovery flushes everything that it keeps, and the folder, before the log is served. It runs before
the log is shared and takes no lock.
"""

from __future__ import annotations

from tierlog.hot_tier.clean_open import open_clean
from tierlog.hot_tier.file_names import OFFLINE_MARKER
from tierlog.hot_tier.index_rebuild import rebuild_transactions
from tierlog.hot_tier.leader_epochs import LeaderEpochs
from tierlog.hot_tier.log_folder import LogFolder
from tierlog.hot_tier.log_state import Flushed, LogState, Segments
from tierlog.hot_tier.producer_snapshots import load_newest
from tierlog.hot_tier.recovery import OpenRequest, Recovery, RecoveryReport
from tierlog.hot_tier.roll import create_segment
from tierlog.hot_tier.segment import Segment, SegmentEnd
from tierlog.hot_tier.transaction_index import read_entries
from tierlog.record_format.errors import CorruptIndex, CorruptSnapshot


def load_log(state: LogState, folder: LogFolder, request: OpenRequest) -> RecoveryReport:
    """Fill `state` from the folder. Raises CorruptDataError, OSError."""
    report = RecoveryReport(clean=request.clean)
    report.cut_files = [state.folder / name for name in folder.cuts]
    state.unmirrored = folder.unmirrored
    epochs_were_lost = not _load_epochs(state)
    if not folder.log_sizes:
        _start_empty(state, folder, request)
        return report
    _list_segments(state, folder)
    opened = request.clean and not folder.went_offline and open_clean(state, folder)
    if not opened:
        report.clean = False
        Recovery(state, folder, request, report).run()
    _check_transaction_indexes(state, folder)
    if epochs_were_lost and state.log_end_offset > state.segments.bases[0]:
        _epochs_from_batches(state)
    _finish_open(state, folder, request, report)
    return report


def _load_epochs(state: LogState) -> bool:
    """False if there is no valid file and the epochs must come from the batches."""
    try:
        state.epochs = LeaderEpochs.load(state.folder, disk=state.disk)
    except (FileNotFoundError, CorruptSnapshot):
        state.epochs = LeaderEpochs(state.folder, disk=state.disk)
    return bool(state.epochs.entries)


def _start_empty(state: LogState, folder: LogFolder, request: OpenRequest) -> None:
    start = max(request.start_offset, request.log_start_offset or 0)
    state.producers = load_newest(state, folder.snapshots, at_most=start, at_least=start)
    state.active = create_segment(state, start)
    state.segments = Segments.of((state.active.segment,))
    state.epochs.truncate_from_end(start)
    state.epochs.save()  # syncs the folder, with the segment's files
    state.log_start_offset = start if request.log_start_offset is None else request.log_start_offset
    state.leader_epoch = state.epochs.latest or 0
    state.folder_changed = False
    state.flushed = Flushed(start, start, 0)


def _list_segments(state: LogState, folder: LogFolder) -> None:
    bases = sorted(folder.log_sizes)
    items = []
    for number, base_offset in enumerate(bases):
        following = bases[number + 1] if number + 1 < len(bases) else base_offset
        end = SegmentEnd(folder.log_sizes[base_offset], following)
        segment = Segment(state.folder, base_offset, end)
        segment.unchecked_below = following
        segment.has_transactions = base_offset in folder.transaction_indexes
        items.append(segment)
    state.segments = Segments.of(tuple(items))


def _check_transaction_indexes(state: LogState, folder: LogFolder) -> None:
    """Checked at every open, as in Kafka: read_committed consumers rely on nothing else."""
    for segment in state.segments.items:
        if segment.has_transactions and not _has_valid_transaction_index(segment):
            rebuild_transactions(state, segment, folder.snapshots)


def _has_valid_transaction_index(segment: Segment) -> bool:
    try:
        return bool(read_entries(segment))  # a segment without aborted transactions has no file
    except CorruptIndex:
        return False


def _finish_open(
    state: LogState, folder: LogFolder, request: OpenRequest, report: RecoveryReport
) -> None:
    """The common end of every open: offsets, epochs, snapshots, the offline marker."""
    end_offset = state.log_end_offset
    entries = state.epochs.entries
    state.epochs.truncate_from_end(end_offset)
    if state.epochs.entries != entries or not report.clean:
        state.epochs.save()
    state.leader_epoch = state.epochs.latest or 0
    first = state.segments.bases[0]
    start = first if request.log_start_offset is None else request.log_start_offset
    state.log_start_offset = start
    folder.remove_stray_snapshots(end_offset=end_offset)
    segment = state.active.segment
    state.flushed = Flushed(end_offset, segment.base_offset, segment.end.size_bytes)
    if folder.went_offline:
        state.disk.unlink(state.folder / OFFLINE_MARKER)


def _epochs_from_batches(state: LogState) -> None:
    state.epochs.truncate_from_end(0)  # recovery has only those of the segments that it checked
    for segment in state.segments.items:
        for header in segment.headers(state.files):
            state.epochs.assign_in_memory(header.leader_epoch, header.base_offset)
    state.epochs.save()
